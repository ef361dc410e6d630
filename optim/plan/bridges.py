"""Bridges: NVLink that joins a few cards of a node, beside the PCIe that joins them all.

    bridge_of(device_named("H100 PCIe"))      300 GB/s between two; None where a card has none

A plan has one link for all devices of a node, so a bridge is that link only where the node is no larger than what it joins, and
only where a cluster's file says so: it is bought beside the cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from trine.optim.plan._tables import packaged_rows
from trine.optim.plan.cluster import Cluster, Device
from trine.optim.plan.units import Bandwidth

__all__ = ["Bridge", "bridge_of", "bridge_words"]


@dataclass(frozen=True, slots=True)
class Bridge:
    """A row of ``bridges.csv``. ``bandwidth``: of a device; ``joins``: how many devices at most."""

    bandwidth: Bandwidth
    joins: int
    source: str


def bridge_of(device: Device) -> Bridge | None:
    """What joins a few of such devices; None where nothing does, or nobody said."""
    return _table().get(device.name)


def bridge_words(cluster: Cluster) -> str | None:
    """What a plan says of bridges: that one would be another link, or that it does not join so many devices."""
    bridge, device, inside = bridge_of(cluster.device), cluster.device.name, cluster.inside
    if bridge is None or inside is None:
        return None
    many = cluster.devices_per_node
    if inside.kind == "nvlink":
        if many <= bridge.joins:
            return None
        return (
            f"an NVLink bridge joins {bridge.joins} {device} at most, and a node has {many}: what goes round it "
            "crosses PCIe, and takes longer than planned"
        )
    if not inside.note:
        return None  # the file says that it is PCIe
    if many > bridge.joins:
        return (
            f"an NVLink bridge would join {bridge.joins} {device} at most: a plan has one link for all {many} of a node, "
            "and leaves bridges out"
        )
    return (
        f"no NVLink bridge is taken for granted: one would join up to {bridge.joins} {device} at {bridge.bandwidth} a device and "
        f'direction ({bridge.source}); to plan with it, give a file with device = "{device}", devices_per_node = {many}, '
        'inside = "NVLink"'
    )


@cache
def _table() -> Mapping[str, Bridge]:
    return {
        row["device"]: Bridge(
            Bandwidth.gigabytes_per_s(float(row["gb_per_s"])), int(row["joins"]), row["source"]
        )
        for row in packaged_rows("bridges.csv")
    }
