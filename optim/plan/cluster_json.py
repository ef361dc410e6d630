"""A cluster as plain values, with all that predictions need, and back: what a plan holds of it.

Names end in their unit. Bandwidths are of one device in one direction, as :class:`~trine.optim.plan.units.Bandwidth` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trine.optim.plan.cluster import Cluster, Device, Link
from trine.optim.plan.units import Bandwidth
from trine.record.errors import UsageError

__all__ = ["cluster_from_dict", "cluster_to_dict"]


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Strict JSON takes it; :func:`cluster_from_dict` gives a cluster of the same predictions: only sources are not held."""
    device = cluster.device
    return {
        "name": cluster.name,
        "device": device.name,
        "family": device.family,
        "devices": cluster.devices,
        "devices_per_node": cluster.devices_per_node,
        "nodes": cluster.nodes,
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bandwidth.bytes_per_s,
        "flops_per_s": dict(device.flops_per_s),
        "matmul_flops_per_s": dict(device.matmul_rates),
        "best_matmul_flops_per_s": device.matmul_flops_per_s,
        "multiprocessors": device.multiprocessors,
        "constants": dict(device.constants),
        "inside": _link(cluster.inside),
        "between": _link(cluster.between),
        "host_memory_bytes": cluster.host_memory_bytes,
        "host_link_bytes_per_s": _rate(cluster.host_link),
        "nvme_bytes_per_s": _rate(cluster.nvme),
    }


def cluster_from_dict(table: Mapping[str, Any]) -> Cluster:
    """From :func:`cluster_to_dict`'s values. Raises ``UsageError`` for one that is missing or is not what it should be."""
    device = Device(
        name=_text(table, "device"),
        family=_text(table, "family"),
        flops_per_s=_numbers(table, "flops_per_s"),
        memory_bytes=_count(table, "memory_bytes"),
        memory_bandwidth=Bandwidth(_known(table, "memory_bytes_per_s")),
        matmul_flops_per_s=_optional(table, "best_matmul_flops_per_s"),
        matmul_rates=_numbers(table, "matmul_flops_per_s"),
        multiprocessors=None if table.get("multiprocessors") is None else _count(table, "multiprocessors"),
        constants=_numbers(table, "constants"),
    )
    return Cluster(
        device=device,
        devices_per_node=_count(table, "devices_per_node"),
        nodes=_count(table, "nodes"),
        inside=_link_from(table, "inside"),
        between=_link_from(table, "between"),
        name=_text(table, "name"),
        host_memory_bytes=_count(table, "host_memory_bytes"),
        host_link=_bandwidth(table, "host_link_bytes_per_s"),
        nvme=_bandwidth(table, "nvme_bytes_per_s"),
    )


def _link(link: Link | None) -> dict[str, Any] | None:
    if link is None:
        return None
    return {
        "kind": link.kind,
        "bytes_per_s": link.bandwidth.bytes_per_s,
        "in_switch": link.in_switch,
        "constants": dict(link.constants),
        "note": link.note or None,
    }


def _link_from(table: Mapping[str, Any], key: str) -> Link | None:
    said = _known(table, key)
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise UsageError(f"{key} of its cluster is {said!r}, no table")
    return Link(
        Bandwidth(_known(said, "bytes_per_s")),
        _text(said, "kind"),
        _known(said, "in_switch") is True,
        str(said.get("note") or ""),
        _numbers(said, "constants"),
    )


def _rate(bandwidth: Bandwidth | None) -> float | None:
    return None if bandwidth is None else bandwidth.bytes_per_s


def _known(table: Mapping[str, Any], key: str) -> Any:
    if key not in table:
        raise UsageError(f"its cluster has no {key}")
    return table[key]


def _text(table: Mapping[str, Any], key: str) -> str:
    value = _known(table, key)
    if not isinstance(value, str):
        raise UsageError(f"{key} of its cluster is {value!r}, no text")
    return value


def _count(table: Mapping[str, Any], key: str) -> int:
    value = _known(table, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UsageError(f"{key} of its cluster is {value!r}, no whole number")
    return value


def _optional(table: Mapping[str, Any], key: str) -> float | None:
    return None if _known(table, key) is None else _numbers({key: {key: table[key]}}, key)[key]


def _bandwidth(table: Mapping[str, Any], key: str) -> Bandwidth | None:
    return None if _known(table, key) is None else Bandwidth(table[key])


def _numbers(table: Mapping[str, Any], key: str) -> dict[str, float]:
    found = _known(table, key)
    if not isinstance(found, Mapping) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        for value in found.values()
    ):
        raise UsageError(f"{key} of its cluster is {found!r}, no table of positive numbers")
    return {str(name): float(value) for name, value in found.items()}
