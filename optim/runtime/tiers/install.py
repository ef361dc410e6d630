"""From a configuration to tiers: the plan, the file, the tiled step and the blocks, and what the record hears of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trine.optim.runtime.adoption import plain_name
from trine.optim.runtime.local_steps import placed, step_on_shards
from trine.optim.runtime.memory_fit import bytes_of
from trine.optim.runtime.plain_tensors import local
from trine.optim.runtime.tiers.block_parameters import BlockParameters
from trine.optim.runtime.tiers.faults import Faults
from trine.optim.runtime.tiers.files import TierFile, page_rounded
from trine.optim.runtime.tiers.plan import Rates
from trine.optim.runtime.tiers.planning import Planning, slot_name, together
from trine.optim.runtime.tiers.rates import copy_bytes_per_s, disk_bytes_per_s
from trine.optim.runtime.tiers.slots import Slot, is_moment
from trine.optim.runtime.tiers.tiled_step import TiledStep
from trine.optim.techniques._assembly import Effect, since_last

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Tiers"]

_MIB = 2**20


class Tiers(Planning):
    """Made when every technique has been applied: of what the optimizer and the model hold then."""

    def __init__(self, assembly: Assembly) -> None:
        super().__init__(assembly)
        self._gradient_bytes = 0
        self._closed = False
        uses_disk = self._uses_disk()
        self._faults = Faults(assembly.facts, uses_disk)
        self._file = together(assembly, self._make_file)
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
        return self.plan.tier.get(("optimizer state", slot_name(slot)), "device")

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
                slot.parameter.cut([(0, values.numel())])
                slot.parameter.fill(values.detach())
                _put(slot.held, slot.parameter.tensor)
                slot.parameter.watch(slot.held)
            elif values.device.type != "cpu":
                _put(slot.held, values.detach().cpu().pin_memory())

    def _move_state(self, slot: Slot) -> None:
        """What the optimizer has already, onto its tier."""
        if slot.parameter is not None:
            slot.parameter.trust()
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
        assembly.filled.append(self.step.filled)
        assembly.closers.append(self._close)
        if self._parameters is not None:
            assembly.settle.append(self._parameters.settle)
            assembly.filled.append(self._parameters.filled)
            assembly.collect.insert(0, self._parameters.release_all)
            assembly.collect.insert(1, self._faults.agree)
            assembly.discard.append(self._parameters.release_all)
        assembly.collect.insert(0, self._see_gradients)
        metrics = assembly.metrics
        metrics["offload/device_bytes"] = lambda: float(self.device_bytes())
        metrics["offload/cpu_bytes"] = lambda: float(self.cpu_bytes())
        metrics["offload/disk_bytes"] = lambda: float(self.disk_bytes())
        metrics["offload/moved_bytes"] = since_last(self._moved_bytes)
        metrics["offload/wait_ns"] = since_last(self._wait_ns)
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
            after = f"{self.step.tiles} {'tile' if self.step.tiles == 1 else 'tiles'} of {tile}"
            note = f"{self.step.slabs_bytes / _MIB:.3g} MiB of buffers"
            note += ", transfer and update one after the other" if config.overlap is False else ""
            effects.append(Effect("offload.tile_mib", "one step of all parameters", after, note))
        self._say_plan()

    def _say_plan(self) -> None:
        """A line a tier, and one of what travels between them."""
        effects = self._assembly.effects
        for tier, name in _TIER_NAMES.items():
            kinds = {kind: size for kind, size in self.plan.bytes.get(tier, {}).items() if size}
            if kinds:
                listed = ", ".join(f"{kind} {size / _MIB:.4g}" for kind, size in kinds.items())
                before = "everything" if tier == "device" else "nothing"
                effects.append(
                    Effect(f"offload plan, {name}", before, f"{self.plan.of(tier) / _MIB:.4g} MiB", listed)
                )
        traffic = self._predicted()
        if traffic:
            effects.append(Effect("offload plan, traffic", "nothing moves", traffic))

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
