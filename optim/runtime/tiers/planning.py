"""Which part of a run's state lies where: what there is, what room there is, and the plan of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import distributed, nn

from trine.optim.runtime.adoption import plain_name
from trine.optim.runtime.memory_fit import MARGIN, available_host_bytes, bytes_of
from trine.optim.runtime.shard_groups import STATE_SHARE
from trine.optim.runtime.shard_units import sharded_units
from trine.optim.runtime.tiers.plan import Item, Plan, place
from trine.optim.runtime.tiers.slots import Slot, slots_of
from trine.optim.runtime.tiers.tiled_step import IN_FLIGHT
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.runtime.masters import Masters
    from trine.optim.techniques._assembly import Assembly

__all__ = ["DEFAULT_TILE_BYTES", "Planning", "slot_name", "together"]

_Found = TypeVar("_Found")

_MIB = 2**20
#: Keys that change nothing before there is a plan.
_OWN = tuple(
    f"offload.{name}"
    for name in ("optimizer", "parameters", "path", "tile_mib", "overlap", "device_bytes", "cpu_bytes")
)
#: Of parameters: long enough for a disk and a link to be busy, short beside what is saved.
DEFAULT_TILE_BYTES = 16 * _MIB
#: Of the host's bytes, what buffers may take where the tile is not stated.
_BUFFER_SHARE = 0.25


class Planning:
    """Slots, blocks, tile and plan of a run whose techniques have all been applied."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._config = assembly.config.offload
        self._slots = slots_of(assembly)
        self._blocks = self._candidates()
        self._tile_bytes = self._tile()
        self.plan = together(assembly, self._planned)

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
        room["device"] -= window
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
            items.append(_item("optimizer state", slot_name(slot), size, 2.0, self._config.optimizer, below))
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

    def _device_limit(self) -> str:
        """What bounds the device, as the configuration has it: on a CPU the host's memory is the device's."""
        if self._config.device_bytes is None and self._assembly.facts.device_type == "cpu":
            stated = self._config.cpu_bytes
            return f"offload.cpu_bytes = {'what is available' if stated is None else stated}"
        stated = self._config.device_bytes
        return f"offload.device_bytes = {'what the device has' if stated is None else stated}"

    def _require_homes(self, found: Plan, room: dict[str, float]) -> None:
        if not found.homeless and room["device"] >= 0:
            return
        lacking = sum(item.bytes for item in found.homeless)
        if room["device"] < 0 or self._config.path is not None:
            raise UsageError(
                f"{self._device_limit()} is {max(-int(room['device']), 0) or lacking} bytes less than what stays on "
                "the device: gradients, and parameters that are in no repeated block: raise it, or have fewer of them a "
                f"rank with zero.stage{self._again()}"
            )
        raise UsageError(
            f"offload.cpu_bytes = {self._config.cpu_bytes} and the device leave {lacking} bytes of the run's state without "
            f"a place: name a folder on a disk in offload.path, or raise one of them{self._again()}"
        )

    def _again(self) -> str:
        """What other techniques have made of the model by then: a plan is of that."""
        others = [key for key in self._assembly.config.changes() if key not in _OWN]
        return "; and make the model anew, which has been changed" if others else ""


def _item(
    kind: str, name: str, size: int, heat: float, where: str, below: tuple[str, str] | None = None
) -> Item:
    """Pinned to one tier where that was said: then it may be no hotter, and room is not asked for."""
    least = {"none": "device", "auto": "device"}.get(where, where)
    return Item(kind, name, size, heat, least, below if where == "auto" else None)


def slot_name(slot: Slot) -> str:
    """Of its item in the plan."""
    return f"{slot.group}.{slot.place}"


def together(assembly: Assembly, act: Callable[[], _Found]) -> _Found:
    """What fails on one rank, as a full disk or a plan that does not fit, is raised on all: the others would wait for it in the first step."""
    failed: Exception | None = None
    found: _Found | None = None
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
    return cast(_Found, found)
