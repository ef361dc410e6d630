"""Which bytes lie on which tier: what is touched most often, per byte, on the fastest. Pure arithmetic.

A tier saves its speed for every byte that is touched, so what counts is touches a step and byte: the *heat*. A byte of a
parameter is read in every micro-batch's forward and backward and written once; one of a gradient is added to in every
backward; one of a moment is read and written once a step. With items that can be divided anywhere this is the fractional
knapsack problem, for which filling the fastest tier with the hottest, then the next, is exact: if a hotter byte lay on a
slower tier than a colder one, changing their places would save time (Dantzig 1957). A parameter's moments and a block are
not divided here, so a tier may end with less room than its next item, and the plan is off the best by no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["TIERS", "Item", "Plan", "Rates", "place"]

#: From the hot to the cold.
TIERS = ("device", "cpu", "nvme")


@dataclass(frozen=True, slots=True)
class Item:
    """What is placed as one. ``heat``: touches of a byte in a step. ``least``: the hottest tier that it may have."""

    kind: str
    name: str
    bytes: int
    heat: float
    least: str = "device"
    #: The item that this one must not be hotter than, (kind, name).
    below: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured, in bytes a second."""

    copy_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None


@dataclass(slots=True)
class Plan:
    """Tier of each item, and what does not fit anywhere."""

    tier: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Tier → kind → bytes.
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    homeless: list[Item] = field(default_factory=list)

    def of(self, tier: str) -> int:
        """Bytes on this tier."""
        return sum(self.bytes.get(tier, {}).values())

    def add(self, tier: str, kind: str, size: int) -> None:
        """Count bytes that are no item: buffers."""
        kinds = self.bytes.setdefault(tier, {})
        kinds[kind] = kinds.get(kind, 0) + size


def place(items: Sequence[Item], capacities: Mapping[str, float]) -> Plan:
    """The hottest first, each on the fastest tier that has room for it; equal ones in their order."""
    plan = Plan()
    room = dict(capacities)
    for item in sorted(items, key=lambda item: -item.heat):
        least = TIERS.index(item.least)
        if item.below is not None:
            least = max(least, TIERS.index(plan.tier.get(item.below, "device")) and 1)
        tier = next((t for t in TIERS[least:] if item.bytes <= room.get(t, 0.0)), None)
        if tier is None:
            plan.homeless.append(item)
            continue
        room[tier] -= item.bytes
        plan.tier[item.kind, item.name] = tier
        plan.add(tier, item.kind, item.bytes)
    return plan
