"""Clusters by name or from files: ``cluster_of("dgx-h100", devices=512)``, ``cluster_of("cluster.toml")``.

device = "H100-SXM-80GB"                # a known name, or a table [device]
devices_per_node = 8
nodes = 16
inside = "NVLink4 NVSwitch"             # as papers write it, or a table
between = { bandwidth = "400 Gb/s", kind = "infiniband", in_switch = true }
host_memory = "2 TiB"                   # of a node
host_link = "64 GB/s"                   # of a device, one direction
nvme = "6 GB/s"                         # a device's share

[device]                                # one that is not known, or like one that is
like = "H100-SXM-80GB"
name = "H100 of ours"
memory = "94 GiB"
flops_per_s = { bf16 = 900e12 }
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trine.optim.plan._tables import check_keys, check_line, near, packaged, read_toml
from trine.optim.plan.cluster import Cluster, Device, Link, require_believable
from trine.optim.plan.devices import device_named, facts_of, families
from trine.optim.plan.links import default_link, link_of
from trine.optim.plan.measured import HERE, measured_cluster
from trine.optim.plan.network import LINK_CONSTANTS
from trine.optim.plan.units import Bandwidth, parse_sized
from trine.record.errors import UsageError

__all__ = ["cluster_from_table", "cluster_names", "cluster_of", "sized"]

_KEYS = (
    "name",
    "device",
    "devices_per_node",
    "nodes",
    "inside",
    "between",
    "host_memory",
    "host_link",
    "nvme",
    "source",
)
_DEVICE_KEYS = (
    "name",
    "like",
    "family",
    "flops_per_s",
    "memory",
    "memory_bandwidth",
    "link",
    "matmul_flops_per_s",
    "source",
)
#: What a device's table must say that is like no known one.
_FIGURES = ("flops_per_s", "memory", "memory_bandwidth")
#: No device and no host has less: a smaller number has lost its unit.
_LEAST_MEMORY = 2**30
#: Bytes a second. No memory and no link is slower, nor is a disk of which jobs are planned: less has lost its unit.
_LEAST_BANDWIDTH = 1e6
#: Devices of one machine. What has more is a rack, of which jobs take an even part (64 of 72, as powers of two ask for).
_LARGEST_SERVER = 16
_PRECISIONS = ("bf16", "fp16", "tf32", "fp8", "fp32")


def cluster_of(source: str | Path, devices: int | None = None) -> Cluster:
    """A cluster by the name of a known one, from TOML, or "here": this machine, as it was calibrated.

    ``devices``: of the whole job, whole nodes or a part of one; by default the nodes that the file says, else one. A known
    device's name alone is a cluster of such nodes as it usually stands in. Raises ``UsageError`` or ``UnreadableInput``.
    """
    if not str(source).strip():
        raise UsageError(
            "no cluster is named: is a variable unset? give a cluster's or a device's name, or a .toml"
        )
    known = packaged("clusters.toml")
    name = str(source).casefold()
    path = Path(source)
    if name == HERE and not path.is_file():
        return measured_cluster(devices)
    if name in known and not path.is_file():
        found = cluster_from_table(known[name], name, name)
    elif path.suffix == ".toml" or path.is_file():
        found = cluster_from_table(read_toml(path, "cluster"), path.stem, str(path))
    else:
        found = _usual(str(source), known)
    return found if devices is None else sized(found, devices)


def cluster_names() -> tuple[str, ...]:
    """The clusters that are known by name."""
    return tuple(packaged("clusters.toml"))


def cluster_from_table(table: Mapping[str, Any], name: str, where: str) -> Cluster:
    """A cluster from a file's table; ``where`` begins messages. Raises ``UsageError``."""
    check_keys(table, _KEYS, where)
    _text(table, "source", "", where)
    if "device" not in table:
        raise UsageError(f'{where} has no device: device = "H100-SXM-80GB", or a table [device]')
    device = _device(table["device"], where)
    facts = facts_of(device)
    usual_node = facts.node if facts is not None else 1
    per_node = _count(table, "devices_per_node", usual_node, where)
    nodes = _count(table, "nodes", 1, where)
    inside = _link(table.get("inside"), device, per_node, where, between=False) if per_node > 1 else None
    between = None
    if "between" in table or facts is not None or nodes > 1:
        between = _link(table.get("between"), device, per_node, where, between=True)
    return Cluster(
        device=device,
        devices_per_node=per_node,
        nodes=nodes,
        inside=inside,
        between=between,
        name=check_line(table.get("name", name), "name", where),
        host_memory_bytes=_placed(_host_memory, table, "host_memory", where) or 0,
        host_link=_placed(_bandwidth, table, "host_link", where),
        nvme=_placed(_bandwidth, table, "nvme", where),
    )


def _usual(source: str, known: Mapping[str, Any]) -> Cluster:
    """Nodes as a device usually stands in, by the device's name."""
    try:
        device = device_named(source)
        facts = facts_of(device)
    except UsageError:
        facts = None
    if facts is None:
        raise UsageError(
            f"no cluster is called {source!r}{near(source, known)} and no file: give a .toml, a device's name, or one of "
            f"{', '.join(known)}; {HERE} is this machine, once trine hardware --calibrate has measured it"
        )
    inside = default_link(device) if facts.node > 1 else None
    return Cluster(device, facts.node, 1, inside, default_link(device, between=True), name=device.name)


def sized(cluster: Cluster, devices: int) -> Cluster:
    """The same nodes, as many as hold these devices, or a part of one; of racks an equal part of each. Raises ``UsageError``."""
    if devices < 1:
        raise UsageError(f"devices must be at least 1, not {devices}")
    require_believable(devices)
    per_node = cluster.devices_per_node
    if devices < per_node:
        inside = cluster.inside if devices > 1 else None
        return cluster.with_changes(nodes=1, devices_per_node=devices, inside=inside)
    racks = math.ceil(devices / per_node)
    if per_node > _LARGEST_SERVER and devices % racks == 0:
        per_node = devices // racks
    if devices % per_node:
        fewer, more = devices // per_node * per_node, racks * per_node
        raise UsageError(
            f"{devices} devices fill no whole number of {cluster.name or 'the cluster'}'s nodes of {per_node}: take {fewer} or {more}"
        )
    if devices > per_node and cluster.between is None:
        raise UsageError(
            f"{devices} devices are {devices // per_node} nodes of {cluster.name or 'the cluster'}, and it does not say what links nodes: "
            'between = "400 Gb/s NDR InfiniBand"'
        )
    return cluster.with_changes(nodes=devices // per_node, devices_per_node=per_node)


def _link(said: Any, device: Device, per_node: int, where: str, *, between: bool) -> Link:
    key = "between" if between else "inside"
    if said is None:
        try:
            return default_link(device, between=between)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    if isinstance(said, str):
        try:
            link = link_of(said, device, between=between, devices_per_node=per_node)
            _plausible(link.bandwidth, said)
            return link
        except UsageError as error:
            raise UsageError(f"{where}: {key}: {error}") from None
    if not isinstance(said, Mapping):
        raise UsageError(f"{where}: {key} must be text or a table, not {said!r}")
    check_keys(said, ("bandwidth", "kind", "in_switch"), f"{where}: {key}")
    bandwidth = _placed(_bandwidth, said, "bandwidth", f"{where}: {key}")
    if bandwidth is None:
        raise UsageError(
            f'{where}: {key} has no bandwidth: bandwidth = "400 Gb/s", of one device in one direction'
        )
    kind = _text(said, "kind", "infiniband" if between else "nvlink", f"{where}: {key}")
    known = sorted({name.partition("/")[0] for name in LINK_CONSTANTS})
    if kind not in known:
        raise UsageError(
            f"{where}: {key}: no kind of link is called {kind!r}{near(kind, known)}: one of {', '.join(known)}"
        )
    if not isinstance(said.get("in_switch", False), bool):
        raise UsageError(f"{where}: {key}.in_switch must be true or false, not {said['in_switch']!r}")
    return Link(bandwidth, kind, said.get("in_switch", False))


def _device(said: Any, where: str) -> Device:
    if isinstance(said, str):
        return _known(said, f"{where}: device")
    if not isinstance(said, Mapping):
        raise UsageError(f"{where}: device must be a name or a table, not {said!r}")
    place = f"{where}: [device]"
    check_keys(said, _DEVICE_KEYS, place)
    if "like" in said:
        known = _known(_text(said, "like", "", place), f"{place}: like")
        return _changed(known.with_changes(source=f"{where}, like {known.name}"), said, place)
    missing = next((key for key in _FIGURES if not said.get(key)), None)
    if missing is not None:
        raise UsageError(
            f'{place} has no {missing}: add it, or start from a known device with like = "H100-SXM-80GB"'
        )
    figures = Device(
        name="device",
        family="unknown",
        flops_per_s=_rates(said["flops_per_s"], f"{place}: flops_per_s"),
        memory_bytes=_placed(_memory, said, "memory", place),
        memory_bandwidth=_placed(_bandwidth, said, "memory_bandwidth", place),
        source=where,
    )
    return _changed(figures, said, place)


def _known(name: str, place: str) -> Device:
    """A device by its name. Raises ``UsageError`` that says where it stands."""
    try:
        return device_named(name)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None


def _changed(base: Device, said: Mapping[str, Any], place: str) -> Device:
    """A device with what a table says of it in place of its own."""
    flops = _rates(said.get("flops_per_s", {}), f"{place}: flops_per_s")
    peaks = {**base.flops_per_s, **flops}
    # Rates of precisions whose peak is said anew are another device's.
    rates = {name: rate for name, rate in base.matmul_rates.items() if name not in flops}
    if "matmul_flops_per_s" in said:
        rates["bf16"] = _matmul(said["matmul_flops_per_s"], peaks, place)
    family = _family(said, base.family, place)
    return base.with_changes(
        name=check_line(said.get("name", base.name), "name", place),
        family=family,
        flops_per_s=peaks,
        memory_bytes=_placed(_memory, said, "memory", place) or base.memory_bytes,
        memory_bandwidth=_placed(_bandwidth, said, "memory_bandwidth", place) or base.memory_bandwidth,
        link=_placed(_bandwidth, said, "link", place) or base.link,
        matmul_flops_per_s=rates.get("bf16"),
        source=_text(said, "source", base.source, place),
        matmul_rates=rates,
        constants=base.constants if family == base.family else {},
    )


def _bandwidth(text: Any) -> Bandwidth:
    """Raises ``UsageError`` for less than anything has."""
    return _plausible(Bandwidth.parse(text), text)


def _plausible(found: Bandwidth, text: Any) -> Bandwidth:
    if found.bytes_per_s < _LEAST_BANDWIDTH:
        raise UsageError(
            f"{text!r} is no bandwidth of a device or a link, but {found.bytes_per_s:g} bytes a second: write it with its unit, "
            '"450 GB/s" in bytes or "400 Gb/s" in bits'
        )
    return found


def _memory(text: Any) -> int:
    """Raises ``UsageError`` for none, which no device has."""
    return parse_sized(text, _LEAST_MEMORY, "memory of a device", "80GiB or 24GB")


def _host_memory(text: Any) -> int:
    """0 is none. Raises ``UsageError`` for less than any host has."""
    return parse_sized(text, _LEAST_MEMORY, "memory of a host", "2TiB or 512GB", or_none=True)


def _matmul(said: Any, peaks: Mapping[str, float], place: str) -> float:
    """What products of bf16 reach. Raises ``UsageError`` for more than the peak."""
    rate = _rate(said, f"{place}: matmul_flops_per_s")
    if rate > peaks.get("bf16", rate):
        raise UsageError(
            f"{place}: matmul_flops_per_s {rate:g} is above the peak of bf16, {peaks['bf16']:g}: give what products reach"
        )
    return rate


def _family(said: Mapping[str, Any], otherwise: str, place: str) -> str:
    family = _text(said, "family", otherwise, place)
    if family not in (known := (*families(), "unknown")):
        raise UsageError(
            f"{place}: no family is called {family!r}{near(family, known)}: one of {', '.join(known)}"
        )
    return family


def _rates(said: Any, place: str) -> dict[str, float]:
    if not isinstance(said, Mapping):
        raise UsageError(f"{place} is a table by precision: flops_per_s = {{ bf16 = 989e12 }}")
    check_keys(said, _PRECISIONS, place)
    return {key: _rate(value, f"{place}.{key}") for key, value in said.items()}


def _rate(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e9 <= value < 1e18:
        raise UsageError(f"{place} must be floating-point operations a second such as 989e12, not {value!r}")
    return float(value)


def _placed(parse: Any, table: Mapping[str, Any], key: str, where: str) -> Any:
    """A value through its parser; None where it is not said. Errors say where it stands."""
    if key not in table:
        return None
    try:
        return parse(table[key])
    except UsageError as error:
        raise UsageError(f"{where}: {key}: {error}") from None


def _count(table: Mapping[str, Any], key: str, otherwise: int, where: str) -> int:
    value = table.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{where}: {key} must be a whole number of at least 1, not {value!r}")
    return value


def _text(table: Mapping[str, Any], key: str, otherwise: str, where: str) -> str:
    value = table.get(key, otherwise)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key} must be text, not {value!r}")
    return value
