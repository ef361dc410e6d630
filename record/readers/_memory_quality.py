"""What is unusual in a memory snapshot, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ..memory_categories import Trait
from ._memory_history import Device
from ._memory_segments import Held
from ._memory_stacks import Stacks

__all__ = ["notes_of"]

Severity = Literal["info", "warning", "error"]
Note = tuple[str, Severity, str]


def notes_of(
    devices: Sequence[Device], held: Held, stacks: Stacks, about: dict[str, Any], odd: int, has_traces: bool
) -> Iterator[Note]:
    """(id, severity, message) of each oddity."""
    if not has_traces:
        yield (
            "memory-no-history",
            "warning",
            (
                "the snapshot has no history (call torch.cuda.memory._record_memory_history() before the first step): "
                "what is held is shown; the peak and what came before are not known"
            ),
        )
    if not len(held.address):
        yield (
            "memory-no-segments",
            "warning",
            (
                "the snapshot has no segments: totals are summed from the history alone and are lower bounds, "
                "and fragmentation is not known"
            ),
        )
    if not any(trait & Trait.STACK for trait in stacks.traits):
        yield (
            "memory-no-stacks",
            "warning",
            "no event has a stack (it was recorded with stacks off): owners and categories are not known",
        )
    if len(devices) > 1:
        most = max(devices, key=lambda device: int(device.allocated.max(initial=device.held_bytes)))
        yield (
            "memory-several-devices",
            "info",
            f"the snapshot holds {len(devices)} devices; the one with the highest peak, {most.index}, is summarised",
        )
    odd += held.odd + sum(device.odd for device in devices)
    if odd:
        yield "memory-odd-events", "warning", f"{odd} events or blocks are of no known kind and were left out"
    if stacks.shortened:
        yield (
            "memory-stacks-dropped",
            "info",
            f"{stacks.shortened} stacks were longer than is kept; their owners are",
        )
    for device in devices:
        yield from _of_device(device, about)


def _of_device(device: Device, about: dict[str, Any]) -> Iterator[Note]:
    events = len(device.action)
    own = device.allocations
    before = own.start < 0
    if events and before.any():
        freed = int((before & (own.end < events)).sum())
        how = (
            "the ring overflowed"
            if _overflowed(device, about)
            else "recording began later, or the ring overflowed"
        )
        yield (
            "memory-history-lost",
            "info",
            (
                f"device {device.index}: {int(before.sum())} blocks ({_size(device.held_bytes)}) are older than the history "
                f"({freed} of them were released in it): {how}; the peak is that of the history, a lower bound"
            ),
        )
    if not device.timed:
        yield (
            "memory-no-times",
            "info",
            f"device {device.index}: events have no times; their order stands in for them",
        )
    if device.overwritten:
        text = f"{device.overwritten} allocations were replaced at their address without a release"
        yield "memory-release-missing", "warning", f"device {device.index}: {text}"
    if device.vanished:
        text = f"{device.vanished} allocations have no release and are not held either"
        yield "memory-blocks-vanished", "warning", f"device {device.index}: {text}"
    if device.inferred.sized:
        yield (
            "memory-told-by-size",
            "info",
            (
                f"device {device.index}: {_size(device.inferred.sized)} older than the history count as parameters or "
                "optimizer state because they have the sizes of the gradients"
            ),
        )
    for when, requested, free, _ in device.failures[-1:]:
        at = f" at {(when - int(device.time_ns[0])) / 1e9:.3f} s" if device.timed else ""
        yield (
            "memory-exhausted",
            "warning",
            (
                f"device {device.index}: {len(device.failures)} allocations failed for want of memory, the last{at} for "
                f"{_size(requested)}" + (f" with {_size(free)} free on the device" if free >= 0 else "")
            ),
        )


def _overflowed(device: Device, about: dict[str, Any]) -> bool:
    flag, most = about["overflowed"], about["most_entries"]
    if type(flag) is list:
        flag = flag[device.index] if device.index < len(flag) else None
    if flag is True:
        return True
    return type(most) is int and 0 < most <= len(device.action)


def _size(value: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value} B"
