"""The optimizer's own step, a tile at a time: what a tile needs comes in, is updated, and goes back, side by side.

Of a tile, gradients and parameters come from the device and moments from the disk while the tile before it is updated and
the one before that is written: three slabs of memory, and no more, whatever the model's size. PyTorch's optimizer itself
steps, on one-dimensional views of what it holds, so that every setting, fused kernel and scheduler means what it meant.
An optimizer that works element by element gives the same bits that way (:data:`trine.optim.runtime.tiers.spans.ALIGNED`).

It hangs on the optimizer's own hooks: the step that follows finds no gradients and does nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch

from trine.optim.runtime.host_memory import Copier, CudaCopier
from trine.optim.runtime.plain_tensors import local
from trine.optim.runtime.tiers.faults import Faults
from trine.optim.runtime.tiers.files import DamagedTier, Region
from trine.optim.runtime.tiers.parts import (
    Live,
    Part,
    Tile,
    as_bytes,
    events_of,
    raw,
    read_all,
    reads_of,
    regions_of,
    write_all,
)
from trine.optim.runtime.tiers.slabs import Slabs, padded
from trine.optim.runtime.tiers.slots import Slot, flat, is_moment, raw_step, with_strides_of
from trine.optim.runtime.tiers.spans import Span, tiles_of
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["IN_FLIGHT", "TiledStep"]

#: Tiles in flight: one comes in, one is updated, one goes back.
IN_FLIGHT = 3
_THREADS = 2


class TiledStep:
    """Stands in for ``optimizer.step()`` of the slots; other parameters step as ever."""

    def __init__(
        self,
        assembly: Assembly,
        slots: Sequence[Slot],
        tile_bytes: float,
        overlap: bool = True,
        faults: Faults | None = None,
        copier: Copier | None = None,
    ) -> None:
        self.slots = list(slots)
        self._optimizer = assembly.optimizer
        self._step = raw_step(assembly.optimizer)
        self._device = assembly.facts.device
        is_cuda = self._device.type == "cuda"
        self._copier = copier or (CudaCopier(self._device) if is_cuda else Copier())
        self._faults = faults or Faults(assembly.facts, False)
        self._tiles = self._cut(tile_bytes)
        self._spans: list[list[tuple[int, int]]] = [[] for _ in self.slots]
        for tile in self._tiles:
            for span in tile:
                self._spans[span.slot].append((span.start, span.end))
        for slot, spans in zip(self.slots, self._spans, strict=True):
            for region in regions_of(slot):
                region.cut(spans)
        self._lengths = [len(group["params"]) for group in self._optimizer.param_groups]
        self._copied: list[Any] = []
        self._overlap = overlap
        uses_disk = any(slot.regions or slot.parameter for slot in self.slots)
        self._threads = (
            ThreadPoolExecutor(_THREADS, thread_name_prefix="trine-tiles") if overlap and uses_disk else None
        )
        sizes = [size for tile in self._tiles if (size := self._slab_bytes(tile))]
        # What goes back at once leaves two: the tile that is updated, and the next.
        behind = uses_disk or self._copier.is_asynchronous
        count = min((IN_FLIGHT if behind else IN_FLIGHT - 1) if overlap else 1, len(sizes))
        #: Bytes that tiles in flight take.
        self.slabs_bytes = count * max(sizes, default=0)
        self.slabs = Slabs(count, max(sizes, default=0), is_cuda, self._waited)
        self._live: dict[int, Live] = {}
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Since the start: bytes copied between device, host and disk; time that the update waited for them.
        self.moved_bytes = 0
        self.wait_ns = 0
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before),
            self._optimizer.register_step_post_hook(self._after),
        ]

    def moved_by_a_step(self) -> tuple[int, int]:
        """Bytes that a step copies between device and host, and that it reads and writes on disk."""
        copied = on_disk = 0
        for slot in self.slots:
            values = local(slot.held)
            size = values.numel() * values.element_size()
            if slot.parameter is not None:
                on_disk += 2 * size
            elif self._travels(slot, values):
                copied += 2 * size
            copied += size if self._gradient_travels(slot) else 0
            if slot.target is not None and self._copier.is_asynchronous:
                copied += slot.target.numel() * slot.target.element_size()
            on_disk += 2 * sum(region.bytes for region in slot.regions.values())
        return copied, on_disk

    @property
    def tiles(self) -> int:
        """Tiles of a step."""
        return len(self._tiles)

    def settle(self) -> None:
        """Compare all that is on disk with its checksums; between steps."""
        try:
            for slot in self.slots:
                for region in regions_of(slot):
                    region.notice()
                    region.verify()
        except DamagedTier as error:
            self._faults.report(error)
        self._faults.agree()

    def filled(self) -> None:
        """A checkpoint has filled what is on disk: from now on that is compared, before any step."""
        for slot in self.slots:
            for region in regions_of(slot):
                region.notice()

    def home_of(self, held: torch.Tensor, key: str) -> torch.Tensor | None:
        """Where this state of what the optimizer holds lies, for who fills it anew; ``None``: on the parameter's device."""
        slot = next((slot for slot in self.slots if slot.held is held), None)
        if slot is None or key not in slot.moments or slot.tier == "device":
            return None
        return self._home(slot, local(slot.held), key, slot.moments[key])

    def close(self) -> None:
        """Take the hooks out and stop the threads; what is being written is written."""
        for handle in self._handles:
            handle.remove()
        if self._threads is not None:
            self._threads.shutdown(wait=True)

    # --- around the optimizer's step -----------------------------------------------------------

    def _before(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        groups = optimizer.param_groups
        inside = [group["params"] for group in groups]
        self._require_all(inside)
        self._open(inside)
        try:
            with torch.no_grad():
                self._run()
        except DamagedTier as error:
            self._faults.report(error)
        finally:
            for group, parameters in zip(groups, inside, strict=True):
                group["params"] = parameters
        self._faults.agree()
        for live in self._live.values():
            gradient = live.parameter.grad
            if gradient is not None:
                self._hidden.append((live.parameter, gradient))
                live.parameter.grad = None
        self._live.clear()

    def _after(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        """Whoever looks at gradients after the step finds them."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def _require_all(self, inside: list[list[torch.Tensor]]) -> None:
        """Raises ``UsageError`` where parameters were taken out of the groups, whose places tell which state is whose."""
        lengths = [len(parameters) for parameters in inside]
        for index, length in enumerate(self._lengths):
            if index >= len(lengths) or lengths[index] < length:
                raise UsageError(
                    f"offload.optimizer: parameters were taken out of group {index} of the optimizer ({length} were there), which "
                    "cannot follow while their state is off the device: freeze them instead (requires_grad_(False)), or make "
                    "the optimizer anew and call trine.optimize again"
                )

    def _open(self, inside: list[list[torch.Tensor]]) -> None:
        """What takes part in this step: whatever has a gradient."""
        self._live.clear()
        self._hidden.clear()
        for index, slot in enumerate(self.slots):
            parameter = inside[slot.group][slot.place]
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise UsageError(
                    f"offload.tile_mib: the gradient of {slot.name} is sparse, and cannot be cut into tiles: take the offload.* "
                    "keys of the optimizer out, or make the embedding with sparse=False"
                )
            state = self._optimizer.state.get(parameter, {})
            gradient = with_strides_of(gradient, parameter.detach())
            live = Live(parameter, gradient, state, len(self._spans[index]), not state)
            self._live[index] = live
            self._adopt(slot, live)

    def _adopt(self, slot: Slot, live: Live) -> None:
        """State that the program put there since, as ``load_state_dict`` does, goes where it belongs."""
        for key, value in live.state.items():
            if not is_moment(value, live.parameter):
                if isinstance(value, torch.Tensor) and slot.tier != "device" and value.device.type != "cpu":
                    live.state[key] = value.cpu()  # the update runs on the host
                continue
            region = slot.regions.get(key)
            if region is not None:
                if value.data_ptr() != region.tensor.data_ptr():
                    region.fill(value)
                    live.state[key] = region.tensor
                region.notice()
            elif slot.divisible and (
                value.stride() != live.parameter.stride()
                or (slot.tier == "cpu" and value.device.type != "cpu")
            ):
                home = self._home(slot, live.parameter, key, value.dtype)
                live.state[key] = home.copy_(value)
        if slot.parameter is not None:
            slot.parameter.notice()

    # --- the tiles -----------------------------------------------------------------------------

    def _cut(self, tile_bytes: float) -> list[tuple[Span, ...]]:
        """By tier: what is updated on the device does not wait for what comes from elsewhere."""
        tiles: list[tuple[Span, ...]] = []
        for tier in ("device", "cpu", "nvme"):
            chosen = [index for index, slot in enumerate(self.slots) if slot.tier == tier]
            cut = tiles_of([self.slots[index].length for index in chosen], tile_bytes)
            tiles += [tuple(Span(chosen[span.slot], span.start, span.end) for span in tile) for tile in cut]
        return tiles

    def place(self, slot: Slot, key: str, value: torch.Tensor) -> torch.Tensor:
        """Existing state on its tier from now on; what stands for it."""
        region = slot.regions.get(key)
        if region is not None:
            region.fill(value)
            return region.tensor
        return self._home(slot, local(slot.held), key, value.dtype).copy_(value)

    def _run(self) -> None:
        tiles = [
            spans for tile in self._tiles if (spans := [span for span in tile if span.slot in self._live])
        ]
        loaded: deque[Tile] = deque()
        try:
            for place, spans in enumerate(tiles):
                tile = loaded[0] if loaded else self._load(spans, loaded)
                following = tiles[place + 1 : place + 2]
                if following and self._overlap:
                    self._load(following[0], loaded)
                self._wait(tile)
                self._update(tile)
                self._store(tile)
                loaded.popleft()
        except BaseException:
            self._abandon(loaded)
            raise
        # Whoever looks at the state between steps finds it whole.
        self._timed(self.slabs.finish_writing)
        if self._copier.is_asynchronous:
            for event in self._copied:
                self._copier.wait(event, self._copier.computing())
            self._copied.clear()

    def _abandon(self, tiles: Iterable[Tile]) -> None:
        """What a failed step leaves behind: their slabs are free, and the optimizer's state holds no views of parts."""
        for tile in tiles:
            for part in tile.parts:
                self._optimizer.state.pop(part.parameter, None)
            if tile.reading is not None:
                wait([tile.reading])  # it writes into the slab
            if tile.slab is not None:
                tile.slab.events = tile.events
                self.slabs.give_back(tile.slab)

    def _load(self, spans: list[Span], loaded: deque[Tile]) -> Tile:
        """Begin to bring a tile in; it stands in ``loaded`` from the moment it has a slab."""
        size = self._slab_bytes(spans)
        slab = self.slabs.take() if size else None
        tile = Tile([], slab, [])
        loaded.append(tile)
        for span in spans:
            tile.parts.append(self._load_part(span, tile))
        reads = [read for part in tile.parts for read in reads_of(part)]
        if reads:
            if self._threads is None:
                read_all(reads)
            else:
                tile.reading = self._threads.submit(read_all, reads)
            self.moved_bytes += sum(buffer.numel() for _, _, _, buffer in reads)
        return tile

    def _load_part(self, span: Span, tile: Tile) -> Part:
        slot, live = self.slots[span.slot], self._live[span.slot]
        part = Part(slot, span, live, live.parameter, live.gradient, {}, [], None, [])
        parameter = flat(live.parameter, slot, span.start, span.end)
        if slot.parameter is not None:
            part.parameter = self._from_disk(slot.parameter, parameter, tile, part)
        elif self._travels(slot, parameter):
            part.parameter = self._staged(parameter, tile)
            part.back.append((parameter, part.parameter))
        else:
            part.parameter = parameter
        gradient = flat(live.gradient, slot, span.start, span.end)
        part.gradient = self._staged(gradient, tile) if self._travels(slot, gradient) else gradient
        for key, value in () if live.fresh else live.state.items():
            if slot.divisible and is_moment(value, live.parameter):
                piece = flat(value, slot, span.start, span.end)
                region = slot.regions.get(key)
                part.state[key] = piece if region is None else self._from_disk(region, piece, tile, part)
            elif isinstance(value, torch.Tensor) and slot.divisible:
                part.state[key] = value.clone()  # each span counts its step by itself
            else:
                part.state[key] = value
        if slot.target is not None and self._copier.is_asynchronous:
            assert tile.slab is not None
            part.rounded = tile.slab.take(parameter.numel(), slot.target.dtype)
        return part

    def _travels(self, slot: Slot, values: torch.Tensor) -> bool:
        """Whether this is copied to the host for the update. On a CPU that is a copy within memory, as a device's would be."""
        if slot.tier == "device":
            return False
        if values.device.type != "cpu":
            return True
        return slot.tier == "cpu" and self._device.type == "cpu" and slot.divisible and slot.target is None

    def _gradient_travels(self, slot: Slot) -> bool:
        """Before there is one: it lies where the parameter computes, a master's beside the master."""
        if slot.target is not None or slot.tier == "device":
            return False
        return self._device.type != "cpu" or (slot.tier == "cpu" and slot.divisible)

    def _staged(self, values: torch.Tensor, tile: Tile) -> torch.Tensor:
        assert tile.slab is not None
        buffer = tile.slab.take(values.numel(), values.dtype).view(values.shape)
        tile.events += events_of(self._copier.copy(*raw(buffer, values)))
        self.moved_bytes += buffer.numel() * buffer.element_size()
        return buffer

    def _from_disk(self, region: Region, like: torch.Tensor, tile: Tile, part: Part) -> torch.Tensor:
        assert tile.slab is not None
        buffer = tile.slab.take(like.numel(), like.dtype)
        part.reads.append((region, buffer))
        return buffer

    def _wait(self, tile: Tile) -> None:
        def arrive() -> None:
            if tile.reading is not None:
                tile.reading.result()
            for event in tile.events:
                event.synchronize()

        self._timed(arrive)

    def _timed(self, wait: Callable[[], None]) -> None:
        before = time.monotonic_ns()
        wait()
        self._waited(time.monotonic_ns() - before)

    def _waited(self, time_ns: int) -> None:
        self.wait_ns += time_ns

    def _update(self, tile: Tile) -> None:
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            group["params"] = []
        for part in tile.parts:
            part.parameter = part.parameter.detach()  # another object than what others hold
            part.parameter.grad = part.gradient
            optimizer.param_groups[part.slot.group]["params"].append(part.parameter)
            if not part.live.fresh:
                optimizer.state[part.parameter] = part.state
        self._step()
        for part in tile.parts:
            part.parameter.grad = None

    # --- after the update ----------------------------------------------------------------------

    def _store(self, tile: Tile) -> None:
        """Begin to write a tile back."""
        writes: list[tuple[Region, int, int, torch.Tensor]] = []
        tile.events.clear()  # of what came in, which has come
        slab, events = tile.slab, tile.events
        for part in tile.parts:
            writes += self._keep_state(part)
            if part.slot.parameter is not None:
                writes.append((part.slot.parameter, part.span.start, part.span.end, as_bytes(part.parameter)))
            for where, buffer in part.back:
                events += events_of(self._copier.copy(*raw(where, buffer)))
                self.moved_bytes += buffer.numel() * buffer.element_size()
            events += self._round(part)
        self.moved_bytes += sum(values.numel() for *_, values in writes)
        writing = None
        if writes:
            if self._threads is None:
                write_all(writes)
            else:
                writing = self._threads.submit(write_all, writes)
        self._copied.extend(events)
        if slab is not None:
            slab.writing, slab.events = writing, events
            self.slabs.give_back(slab)

    def _round(self, part: Part) -> list[Any]:
        """A master's new values into what the model computes with."""
        target = part.slot.target
        if target is None:
            return []
        where = flat(target, part.slot, part.span.start, part.span.end)
        if part.rounded is None:
            where.copy_(part.parameter)
            return []
        self.moved_bytes += part.rounded.numel() * part.rounded.element_size()
        return events_of(self._copier.copy(*raw(where, part.rounded.copy_(part.parameter))))

    def _keep_state(self, part: Part) -> list[tuple[Region, int, int, torch.Tensor]]:
        """The state that the optimizer left for a span, into the whole; what is to be written of it."""
        slot, live, span = part.slot, part.live, part.span
        writes = []
        for key, value in (self._optimizer.state.pop(part.parameter, None) or {}).items():
            if not (slot.divisible and is_moment(value, part.parameter)):
                live.made[key] = value
                continue
            region, whole = slot.regions.get(key), live.state.get(key)
            if not isinstance(whole, torch.Tensor):
                whole = live.made.get(key)
            if not isinstance(whole, torch.Tensor):
                whole = live.made[key] = self._home(slot, live.parameter, key, value.dtype)
            if region is not None:
                writes.append((region, span.start, span.end, as_bytes(value)))
            elif value is not part.state.get(key):
                flat(whole, slot, span.start, span.end).copy_(value)
        live.left -= 1
        if not live.left:
            self._keep(live)
        return writes

    def _keep(self, live: Live) -> None:
        """After a slot's last span: numbers, of which each span had its own, and what is new."""
        for key, value in live.made.items():
            held = live.state.get(key)
            if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
                live.made[key] = held if held is value else held.copy_(value)
        if not live.fresh:
            live.state.update(live.made)
        elif live.made:
            self._optimizer.state[live.parameter] = live.made

    def _home(self, slot: Slot, like: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        region = slot.regions.get(key)
        if region is not None:
            return region.tensor
        device = like.device if slot.tier == "device" else torch.device("cpu")
        values = torch.empty_like(like.detach(), dtype=dtype, device=device)
        return values.pin_memory() if slot.tier == "cpu" and self._device.type == "cuda" else values

    def _slab_bytes(self, tile: Sequence[Span]) -> int:
        """Most bytes of a slab that a tile may use."""
        total = 0
        for span in tile:
            slot, count = self.slots[span.slot], span.end - span.start
            values = local(slot.held)
            kinds: list[torch.dtype] = [slot.moments[key] for key in slot.regions]
            if slot.parameter is not None or self._travels(slot, values):
                kinds.append(values.dtype)
            if self._gradient_travels(slot):
                kinds.append(values.dtype)
            if slot.target is not None and self._copier.is_asynchronous:
                kinds.append(slot.target.dtype)
            total += sum(padded(count * kind.itemsize) for kind in kinds)
        return total
