"""From a configuration to tiers: the plan, the file, the tiled step and the blocks, and what the record hears of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed, nn

from trine.optim.runtime.adoption import plain_name
from trine.optim.runtime.local_steps import placed, step_on_shards
from trine.optim.runtime.memory_fit import MARGIN, available_host_bytes, bytes_of
from trine.optim.runtime.nonfinite import local
from trine.optim.runtime.shard_groups import STATE_SHARE
from trine.optim.runtime.shard_units import sharded_units
from trine.optim.runtime.tiers.block_parameters import BlockParameters
from trine.optim.runtime.tiers.faults import Faults
from trine.optim.runtime.tiers.files import TierFile, page_rounded
from trine.optim.runtime.tiers.plan import Item, Plan, Rates, place
from trine.optim.runtime.tiers.rates import copy_bytes_per_s, disk_bytes_per_s
from trine.optim.runtime.tiers.slots import Slot, is_moment, slots_of
from trine.optim.runtime.tiers.tiled_step import IN_FLIGHT, TiledStep
from trine.optim.techniques._assembly import Effect
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.runtime.masters import Masters
    from trine.optim.techniques._assembly import Assembly

__all__ = ["DEFAULT_TILE_BYTES", "Tiers"]

_MIB = 2**20
#: Of parameters: long enough for a disk and a link to be busy, short beside what is saved.
DEFAULT_TILE_BYTES = 16 * _MIB
#: Of the host's bytes, what buffers may take where the tile is not stated.
_BUFFER_SHARE = 0.25


class Tiers:
    """Made when every technique has been applied: of what the optimizer and the model hold then."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._config = assembly.config.offload
        self._slots = slots_of(assembly)
        self._blocks = self._candidates()
        self._gradient_bytes = 0
        self._closed = False
        self._tile_bytes = self._tile()
        self.plan = self._planned()
        uses_disk = self._uses_disk()
        self._faults = Faults(assembly.facts, uses_disk)
        self._file = _together(assembly, self._make_file)
        overlap = self._config.overlap is not False
        self._parameters: BlockParameters | None = None
        homes = {
            module: tier
            for name, module in self._blocks.items()
            if (tier := self.plan.tier.get(("parameters", name), "device")) != "device"
        }
        if homes:
            names = {p: plain_name(name) for name, p in assembly.model.named_parameters()}
            self._parameters = BlockParameters(
                assembly.facts, homes, names, self._file, self._faults, overlap
            )
        self._settle_slots()
        if any(hasattr(slot.held, "to_local") for slot in self._slots):
            step_on_shards(assembly.optimizer)  # once more does no harm
        self.step = TiledStep(assembly, self._slots, self._tile_bytes, overlap, self._faults)
        for slot in self._slots:
            self._move_state(slot)
        self._wire()

    # --- what there is -------------------------------------------------------------------------

    def _candidates(self) -> dict[str, nn.Module]:
        """Blocks whose parameters may leave the device, by name."""
        if self._config.parameters == "none" or self._assembly.config.zero.stage:
            return {}
        blocks = {id(block) for block in sharded_units(self._assembly.model)}
        return {
            plain_name(name): module
            for name, module in self._assembly.model.named_modules()
            if id(module) in blocks
        }

    def _masters(self) -> Masters | None:
        return cast("Masters | None", self._assembly.state.get("masters"))

    def _tile(self) -> float:
        if self._config.tile_mib is not None:
            return self._config.tile_mib * _MIB
        if self._config.optimizer == "none":
            return float("inf")
        if self._config.cpu_bytes is None:
            return DEFAULT_TILE_BYTES
        kinds = 2 + max((len(slot.moments) for slot in self._slots), default=0)
        return max(1.0, min(DEFAULT_TILE_BYTES, _BUFFER_SHARE * self._config.cpu_bytes / (IN_FLIGHT * kinds)))

    def _uses_disk(self) -> bool:
        kinds = (self._config.optimizer, self._config.parameters)
        return "nvme" in kinds or ("auto" in kinds and self._config.path is not None)

    # --- the plan ------------------------------------------------------------------------------

    def _planned(self) -> Plan:
        items = self._items()
        fixed = Plan()
        # FSDP2's CPUOffloadPolicy has shards, and their gradients, in the host's memory.
        where = "cpu" if self._by_fsdp() else "device"
        fixed.add(where, "parameters", self._resident_bytes())
        fixed.add(where, "gradients", self._planned_gradients())
        window = self._window_bytes() if self._config.parameters in ("cpu", "nvme") else 0
        room = self._capacities(fixed)
        found = place(items, room)
        off = [
            item
            for item in items
            if item.kind == "parameters" and found.tier.get((item.kind, item.name)) != "device"
        ]
        if off and self._config.parameters == "auto":  # blocks come back for their turn, which takes room
            window = self._window_bytes()
            found = place(items, {**room, "device": room["device"] - window})
        self._require_homes(found, room)
        for tier, kinds in fixed.bytes.items():
            for kind, size in kinds.items():
                found.add(tier, kind, size)
        if window:
            found.add("device", "blocks in use", window)
        return found

    def _items(self) -> list[Item]:
        accumulation = self._assembly.config.accumulation.steps
        micro = accumulation if isinstance(accumulation, int) else 1
        blocks_of = {
            id(parameter): name for name, module in self._blocks.items() for parameter in module.parameters()
        }
        items = []
        for name, module in self._blocks.items():
            size = sum(p.numel() * p.element_size() for p in module.parameters())
            trained = any(p.requires_grad for p in module.parameters())
            items.append(_item("parameters", name, size, 2.0 * micro + trained, self._config.parameters))
        masters = self._masters()
        for slot in self._slots:
            size = slot.state_bytes
            if masters is not None and masters.held_of(slot.held) is not None:
                size += bytes_of([slot.held])
            block = blocks_of.get(id(slot.held))
            below = None if block is None else ("parameters", block)
            items.append(_item("optimizer state", _slot_name(slot), size, 2.0, self._config.optimizer, below))
        return items

    def _resident_bytes(self) -> int:
        """Parameters that stay on the device whatever the plan."""
        moving = {id(p) for module in self._blocks.values() for p in module.parameters()}
        masters = self._masters()
        held = (
            {}
            if masters is None
            else {id(slot.held) for slot in self._slots if masters.held_of(slot.held) is not None}
        )
        found = {id(p): p for p in self._assembly.model.parameters()}
        if self._assembly.config.zero.stage == 0:
            found.update({id(slot.held): slot.held for slot in self._slots if id(slot.held) not in held})
        return bytes_of([p for key, p in found.items() if key not in moving])

    def _by_fsdp(self) -> bool:
        return self._config.parameters != "none" and self._assembly.config.zero.stage == 3

    def _planned_gradients(self) -> int:
        """Each parameter's in its own type, and sums in fp32 where masters and micro-batches ask for them."""
        trained = [p for p in self._assembly.model.parameters() if p.requires_grad]
        low = [p for p in trained if p.element_size() < 4]
        summed = self._masters() is not None and self._assembly.config.accumulation.splits
        return bytes_of(trained) + (4 * sum(p.numel() for p in low) if summed else 0)

    def _window_bytes(self) -> int:
        """Two blocks: the one that computes, and the next."""
        sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in self._blocks.values()]
        count = 2 if self._config.overlap is not False else 1
        return max((sum(sizes[at : at + count]) for at in range(max(1, len(sizes) - count + 1))), default=0)

    def _capacities(self, fixed: Plan) -> dict[str, float]:
        config = self._config
        infinite = float("inf")
        if "auto" not in (config.optimizer, config.parameters):
            return {"device": infinite, "cpu": infinite, "nvme": infinite}
        facts = self._assembly.facts
        device: float = infinite
        if config.device_bytes is not None:
            device = float(config.device_bytes)
            if self._assembly.fitting is not None:  # the rest is for the activations of its micro-batches
                device *= STATE_SHARE
        elif facts.device_type == "cuda":
            device = STATE_SHARE * torch.cuda.get_device_properties(facts.device).total_memory
        host = (
            float(config.cpu_bytes)
            if config.cpu_bytes is not None
            else MARGIN * available_host_bytes() / facts.topology.ranks_per_node
        )
        if facts.device_type == "cpu" and device == infinite:
            device = host  # one memory
        if self._tile_bytes != infinite:
            host -= self._buffer_bytes()
        return {
            "device": device - fixed.of("device"),
            "cpu": host,
            "nvme": infinite if config.path is not None else 0.0,
        }

    def _buffer_bytes(self) -> int:
        """Most bytes of tiles in flight."""
        whole = sum(bytes_of([slot.held]) for slot in self._slots)
        kinds = 2 + max((len(slot.moments) for slot in self._slots), default=0)
        return int(IN_FLIGHT * kinds * min(self._tile_bytes, whole))

    def _require_homes(self, found: Plan, room: dict[str, float]) -> None:
        if not found.homeless and room["device"] >= 0:
            return
        lacking = sum(item.bytes for item in found.homeless)
        if room["device"] < 0 or self._config.path is not None:
            raise UsageError(
                f"offload.device_bytes = {self._config.device_bytes} is {-int(room['device'])} bytes less than what stays on "
                "the device: gradients, and parameters that are in no repeated block: raise it, or have fewer of them a "
                "rank with zero.stage"
            )
        raise UsageError(
            f"offload.cpu_bytes = {self._config.cpu_bytes} and the device leave {lacking} bytes of the run's state without "
            "a place: name a folder on a disk in offload.path, or raise one of them"
        )

    # --- making it so --------------------------------------------------------------------------

    def _make_file(self) -> TierFile | None:
        size = 0
        for slot in self._slots:
            if self._tier_of(slot) == "nvme":
                numel = local(slot.held).numel()
                size += sum(page_rounded(numel * dtype.itemsize) for dtype in slot.moments.values())
                size += page_rounded(bytes_of([slot.held]))  # of masters
        for name, module in self._blocks.items():
            if self.plan.tier.get(("parameters", name)) == "nvme":
                size += sum(page_rounded(p.numel() * p.element_size()) for p in module.parameters())
        return TierFile(Path(str(self._config.path)), size) if size else None

    def _tier_of(self, slot: Slot) -> str:
        if not slot.divisible:  # a number, or what does not lie in one piece: it is updated where it is
            return "device" if local(slot.held).device.type == self._assembly.facts.device_type else "cpu"
        return self.plan.tier.get(("optimizer state", _slot_name(slot)), "device")

    def _settle_slots(self) -> None:
        """Tiers and places in the file, and masters off the device."""
        masters = self._masters()
        regions = {} if self._parameters is None else self._parameters.regions
        for slot in self._slots:
            slot.tier = self._tier_of(slot)
            slot.parameter = regions.get(slot.held)
            values = local(slot.held)
            if slot.tier == "nvme":
                assert self._file is not None
                slot.regions = {
                    key: self._file.take(slot.name, key, values, dtype) for key, dtype in slot.moments.items()
                }
            target = None if masters is None else masters.held_of(slot.held)
            if target is None or slot.tier == "device":
                continue
            slot.target = local(target)
            assert masters is not None
            masters.by_tiles.add(slot.held)
            if slot.tier == "nvme":
                assert self._file is not None
                slot.parameter = self._file.take(slot.name, "master", values, values.dtype)
                slot.parameter.fill(values.detach(), [(0, values.numel())])
                _put(slot.held, slot.parameter.tensor)
                slot.parameter.watch(slot.held)
            elif values.device.type != "cpu":
                _put(slot.held, values.detach().cpu().pin_memory())

    def _move_state(self, slot: Slot) -> None:
        """What the optimizer has already, onto its tier."""
        if slot.parameter is not None:
            slot.parameter.trust(self.step.spans_of(slot))
        state = self._assembly.optimizer.state.get(slot.held)
        if not state or slot.tier == "device":
            return
        for key, value in state.items():
            if is_moment(value, slot.held):
                there = self.step.place(slot, key, local(value))
                state[key] = placed(there, slot.held) if hasattr(value, "to_local") else there
            elif isinstance(value, torch.Tensor) and value.device.type != "cpu":
                state[key] = value.cpu()

    def _wire(self) -> None:
        assembly = self._assembly
        assembly.home_of = self.step.home_of
        assembly.resident_bytes = lambda: self.plan.of("device")
        assembly.settle.append(self.step.settle)
        assembly.closers.append(self._close)
        if self._parameters is not None:
            assembly.settle.append(self._parameters.settle)
            assembly.collect.insert(0, self._parameters.release_all)
            assembly.collect.insert(1, self._faults.agree)
            assembly.discard.append(self._parameters.release_all)
        assembly.collect.insert(0, self._see_gradients)
        metrics = assembly.metrics
        metrics["offload/device_bytes"] = lambda: float(self.device_bytes())
        metrics["offload/cpu_bytes"] = lambda: float(self.cpu_bytes())
        metrics["offload/disk_bytes"] = lambda: float(self.disk_bytes())
        metrics["offload/moved_bytes"] = _since_last(self._moved_bytes)
        metrics["offload/wait_ns"] = _since_last(self._wait_ns)
        self._say()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self.step.close()
            if self._parameters is not None:
                self._parameters.close()
            if self._file is not None:
                self._file.close()

    # --- what is measured ----------------------------------------------------------------------

    def _see_gradients(self) -> None:
        held = [p.grad for p in self._assembly.model.parameters() if p.grad is not None]
        masters = self._masters()
        self._gradient_bytes = bytes_of(held) + (0 if masters is None else masters.summed_bytes)

    def device_bytes(self) -> int:
        """Most bytes on the device in the last step, of parameters, gradients and optimizer state."""
        total = 0 if self._by_fsdp() else self._resident_bytes() + self._gradient_bytes
        for name, module in self._blocks.items():
            if self.plan.tier.get(("parameters", name), "device") == "device":
                total += bytes_of(module.parameters())
        if self._parameters is not None:
            total += self._parameters.peak_bytes()
        return total + self._state_bytes("device")

    def cpu_bytes(self) -> int:
        """Bytes in the host's memory that were moved there, with the tiles' buffers."""
        total = self._state_bytes("cpu") + self.step.slabs.total_bytes
        total += self._resident_bytes() + self._gradient_bytes if self._by_fsdp() else 0
        return total + (0 if self._parameters is None else self._parameters.host_bytes())

    def disk_bytes(self) -> int:
        """Bytes of the file that hold something."""
        regions = [] if self._parameters is None else list(self._parameters.regions.values())
        own = sum(region.bytes for region in regions)
        return own + self._state_bytes("nvme")

    def _state_bytes(self, tier: str) -> int:
        total = 0
        for slot in self._slots:
            if slot.tier != tier:
                continue
            state = self._assembly.optimizer.state.get(slot.held, {})
            total += bytes_of(value for value in state.values() if is_moment(value, slot.held))
            if slot.target is not None:
                total += bytes_of([slot.held])
        return total

    def _moved_bytes(self) -> int:
        return self.step.moved_bytes + (0 if self._parameters is None else self._parameters.moved_bytes)

    def _wait_ns(self) -> int:
        return self.step.wait_ns + (0 if self._parameters is None else self._parameters.wait_ns)

    # --- what is said --------------------------------------------------------------------------

    def _say(self) -> None:
        config, effects = self._config, self._assembly.effects
        on_cpu = self._assembly.facts.device_type == "cpu"
        if self.step.slabs_bytes:
            self.plan.add("cpu", "tiles in flight", self.step.slabs_bytes)
        if config.optimizer != "none":
            note = (
                "the model is on the CPU, whose memory this is: copies cost and nothing is gained"
                if on_cpu and config.optimizer == "cpu"
                else ""
            )
            effects.append(
                Effect("offload.optimizer", "on the device", _where(config.optimizer, config.path), note)
            )
        if config.parameters != "none":
            effects.append(
                Effect(
                    "offload.parameters",
                    "on the device",
                    f"{_where(config.parameters, config.path)}, between uses",
                    f"{len(self._blocks)} blocks, fetched one ahead" if config.overlap is not False else "",
                )
            )
        if config.tile_mib is not None or config.optimizer != "none":
            tile = (
                "all of a tier"
                if self._tile_bytes == float("inf")
                else f"{self._tile_bytes / _MIB:.3g} MiB of parameters"
            )
            after = f"{self.step.tiles} tiles of {tile}"
            note = f"{self.step.slabs_bytes / _MIB:.3g} MiB of buffers"
            note += ", transfer and update one after the other" if config.overlap is False else ""
            effects.append(Effect("offload.tile_mib", "one step of all parameters", after, note))
        effects.append(Effect("offload plan", "all on the device", self._described(), self._predicted()))

    def _described(self) -> str:
        parts = []
        for tier in ("device", "cpu", "nvme"):
            kinds = {kind: size for kind, size in self.plan.bytes.get(tier, {}).items() if size}
            if kinds:
                listed = ", ".join(f"{kind} {size / _MIB:.4g}" for kind, size in kinds.items())
                parts.append(f"{_TIER_NAMES[tier]} {self.plan.of(tier) / _MIB:.4g} MiB ({listed})")
        return "; ".join(parts)

    def _predicted(self) -> str:
        copied, on_disk = self.predicted_bytes()
        if not copied and not on_disk:
            return ""
        rates = Rates(
            copy_bytes_per_s(self._assembly.facts.device) if copied else None,
            disk_bytes_per_s(Path(str(self._config.path))) if on_disk else None,
        )
        moves = f"a step moves {(copied + on_disk) / _MIB:.4g} MiB"
        if on_disk and rates.disk_bytes_per_s is None:
            return f"{moves}; the disk has no room to measure how fast"
        time_s, said = 0.0, []
        if rates.copy_bytes_per_s:
            time_s += copied / rates.copy_bytes_per_s
            said.append(f"copies at {rates.copy_bytes_per_s / 1e9:.3g} GB/s")
        if rates.disk_bytes_per_s:
            time_s += on_disk / rates.disk_bytes_per_s
            said.append(f"the disk at {rates.disk_bytes_per_s / 1e9:.3g} GB/s through the system's cache")
        return f"{moves}, {time_s * 1e3:.3g} ms where nothing hides it: {' and '.join(said)}"

    def predicted_bytes(self) -> tuple[int, int]:
        """Bytes that a step of one micro-batch copies between device and host, and that it reads and writes on disk."""
        accumulation = self._assembly.config.accumulation.steps
        micro = accumulation if isinstance(accumulation, int) else 1
        copied, on_disk = self.step.moved_by_a_step()
        moving = [n for n in self._blocks if self.plan.tier.get(("parameters", n), "device") != "device"]
        last = moving[-1] if moving else None
        for name, module in self._blocks.items():
            tier = self.plan.tier.get(("parameters", name), "device")
            # The last block of a forward stays for the backward that begins with it.
            fetched = 2 * micro - (micro if name == last else 0)
            size = bytes_of(module.parameters()) * fetched
            copied += size if tier == "cpu" else 0
            on_disk += size if tier == "nvme" else 0
        return copied, on_disk


_TIER_NAMES = {"device": "device", "cpu": "host", "nvme": "disk"}


def _item(
    kind: str, name: str, size: int, heat: float, where: str, below: tuple[str, str] | None = None
) -> Item:
    """Pinned to one tier where that was said: then it may be no hotter, and room is not asked for."""
    least = {"none": "device", "auto": "device"}.get(where, where)
    return Item(kind, name, size, heat, least, below if where == "auto" else None)


def _slot_name(slot: Slot) -> str:
    return f"{slot.group}.{slot.place}"


def _where(tier: str, path: str | None) -> str:
    if tier == "auto":
        return "by heat on the device, the host" + ("" if path is None else f" and a disk, under {path}")
    return "in the host's memory" if tier == "cpu" else f"on disk, under {path}"


def _put(held: nn.Parameter, values: torch.Tensor) -> None:
    """Let what the optimizer holds lie there."""
    if hasattr(held, "_local_tensor"):
        held._local_tensor = values
    else:
        held.data = values


def _since_last(read: Callable[[], int]) -> Callable[[], float]:
    before = [0]

    def value() -> float:
        now = read()
        found, before[0] = now - before[0], now
        return float(found)

    return value


def _together(assembly: Assembly, act: Callable[[], TierFile | None]) -> TierFile | None:
    """What fails on one rank, as a full disk, is raised on all: the others would wait for it in the first step."""
    failed: Exception | None = None
    found = None
    try:
        found = act()
    except (UsageError, OSError) as error:
        failed = error
    ranks = assembly.facts.ranks
    said: list[Any] = [None if failed is None else str(failed)]
    if ranks > 1:
        mine, said = said[0], [None] * ranks
        distributed.all_gather_object(said, mine)
    if failed is not None:
        raise failed if isinstance(failed, UsageError) else UsageError(f"offload.path: {failed}") from failed
    first = next((rank for rank, words in enumerate(said) if words is not None), None)
    if first is not None:
        raise UsageError(f"on rank {first}: {said[first]}")
    return found
