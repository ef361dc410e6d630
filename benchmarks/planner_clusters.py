"""Clusters of published runs: devices, links and nodes, as a row's cells name them or leave them open.

A name that the package does not know is its nearest neighbour's, a link that says nothing is the device's usual one; both are
kept beside the run as assumptions.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from planner_cells import Row

from trine.optim.plan import Cluster, Device
from trine.optim.plan.cluster import Link
from trine.optim.plan.devices import device_named, facts_of
from trine.optim.plan.links import default_link, link_of
from trine.record.errors import TrineError, UsageError

__all__ = ["Placed", "cluster_of_row"]

#: Watts of a device of a family as it is usually sold.
_POWER = {"hopper": 700, "ampere": 400}
#: A stated size of memory within this share of a device's is the device's own: 94 or 96 GB, 180 or 192 GB.
_SAME_MEMORY = 0.08
#: Devices of one machine at most; where links reach more of them, a row that says so few speaks of trays.
_LARGEST_SERVER = 16
_MEMORY = re.compile(r"[\s_-]?\b\d+ ?GI?B?\b", re.IGNORECASE)
#: Names of machines, or of devices whose makers publish no dense peaks → the nearest device, and its share of that one's peaks.
_NEAREST: tuple[tuple[str, str, float], ...] = (
    (r"\bp4de\b", "A100-SXM-80GB", 1.0),
    (r"\bp4d\b", "A100-SXM-40GB", 1.0),
    (r"\bp5en?\b", "H200", 1.0),
    (r"\bp5\b", "H100-SXM-80GB", 1.0),
    (r"\bp6-b200\b", "B200", 1.0),
    (r"mi308x", "MI300X", 80 / 304),  # compute units
    (r"ascend.*910_?c", "H800", 1.0),
    (r"ascend.*910_?b", "A100-SXM-80GB", 1.0),
    (r"ascend", "A100-SXM-40GB", 1.0),
    (r"max 1550|ponte ?vecchio|\bpvc\b", "A100-SXM-80GB", 1.0),
    (r"(?<![a-z\d])a100(?!\d|.*\bmig\b)", "A100-SXM-80GB", 1.0),
    (r"(?<![a-z\d])h100(?!\d|.*\bmig\b)", "H100-SXM-80GB", 1.0),
)
_NOTHING = re.compile(
    r"(?:unknown|none|n\.?/?a\.?|not (?:stated|listed|said|reported|published)|-+|–|—|\?+)?", re.IGNORECASE
)
#: Rates of networks as people shorten them: "8x400G", "1.6T", "10GigE".
_SHORT_RATE = re.compile(r"(\d(?:\.\d+)?) ?([GT])(?:ig ?E|bE|bit)?(?![\w/])", re.IGNORECASE)
_ADAPTER = re.compile(r"(?:connectx|cx|bluefield)-?(\d)", re.IGNORECASE)
#: Generations of ConnectX → Gb/s of their fastest port.
_CONNECTX = {"4": 100, "5": 100, "6": 200, "7": 400, "8": 800}


@dataclass(frozen=True, slots=True)
class Placed:
    """A row's cluster. ``devices``: ranks of the job; ``parts``: devices of what the row counts as one (two of a module)."""

    cluster: Cluster
    devices: int
    parts: int = 1


def cluster_of_row(row: Row) -> Placed:
    """The cluster of a row. Raises ``Missing`` without a number of devices and ``UsageError`` for an unknown device."""
    device = _device(row)
    facts = facts_of(device)
    parts = _parts(row, device)
    devices = row.needed("n_gpus") * parts
    stated = row.count("gpus_per_node")
    node = stated * parts if stated else (facts.node if facts else 8)
    if facts is not None and facts.node > _LARGEST_SERVER >= node:
        row.assume(f"{facts.node} devices that reach each other, of which a tray holds {node}")
        node = facts.node
    here = min(node, devices)
    nodes = -(-devices // here)
    return Placed(
        Cluster(
            device=device,
            devices_per_node=here,
            nodes=nodes,
            inside=_link(row, "intra_link", device, node) if here > 1 else None,
            between=_link(row, "inter_link_per_gpu", device, node) if nodes > 1 else None,
            name=f"{devices} × {device.name}",
        ),
        devices,
        parts,
    )


# --- links --------------------------------------------------------------------------------------------------------------


def _link(row: Row, cell: str, device: Device, node: int) -> Link:
    """As the cell says, or the device's usual one, which is noted."""
    between = cell == "inter_link_per_gpu"
    text = row.text(cell)
    if _NOTHING.fullmatch(text):
        return link_of("", device, between=between, devices_per_node=node)
    readings = [_SHORT_RATE.sub(r"\1 \2b/s", text) if between else text]
    if between and (found := _ADAPTER.search(text)) and found[1] in _CONNECTX:
        readings.append(f"{text} {_CONNECTX[found[1]]}Gb/s")
    for reading in readings:
        try:
            return link_of(reading, device, between=between, devices_per_node=node)
        except UsageError:
            continue
    usual = default_link(device, between=between)
    row.assume(f"{usual.kind} at {usual.bandwidth} for {text!r}, as {device.name} usually has")
    return usual


# --- devices ------------------------------------------------------------------------------------------------------------


def _device(row: Row) -> Device:
    """The device; one whose stated power is below its family's runs at lower clocks."""
    device = _with_memory(row, _named(row))
    stated = re.search(r"\b(\d{3,4}) ?W\b", row.text("gpu"))
    nominal = _POWER.get(device.family)
    if stated is None or nominal is None or int(stated[1]) >= nominal:
        return device
    row.assume(f"clocks by the cube root of {stated[1]} of {nominal} W")
    return _slower(device, (int(stated[1]) / nominal) ** (1 / 3))


def _named(row: Row) -> Device:
    """By its name; where that leaves its memory open, as its own cell says; else the nearest that is known."""
    text, memory = row.text("gpu"), row.count("gpu_mem_gb")
    names = [text, _MEMORY.sub("", text)]
    if memory is not None and not _MEMORY.search(text):
        names = [f"{text} {memory}GB", text]
    for name in names:
        try:
            return device_named(name)
        except TrineError:
            continue
    nearest = next((each for each in _NEAREST if re.search(each[0], text, re.IGNORECASE)), None)
    if nearest is None:
        return device_named(text)  # whose error says what is near
    row.assume(f"{text} as {nearest[1]}" + (f" at {nearest[2]:.2g} of its peaks" if nearest[2] < 1 else ""))
    return _slower(device_named(nearest[1]), nearest[2])


def _with_memory(row: Row, device: Device) -> Device:
    """With the stated memory, where only that differs: of its own cell, else of the name."""
    stated, own = _stated_memory(row), device.memory_bytes / 2**30
    known = not stated or _is_module(row, device) or abs(own - stated) <= _SAME_MEMORY * stated
    if known or "gh200" in device.name.lower():  # whose name counts its host's memory
        return device
    row.assume(f"{device.name} with {stated:g} GB")
    return device.with_changes(memory_bytes=int(stated * 2**30))


def _stated_memory(row: Row) -> float:
    """Of the device's name, else of its own cell, in GB; 0 where neither says."""
    said = _MEMORY.search(row.text("gpu"))
    return float(re.sub(r"\D", "", said[0])) if said else row.number("gpu_mem_gb") or 0.0


def _slower(device: Device, share: float) -> Device:
    """With this share of its peaks."""
    if share == 1:
        return device
    peaks = {name: value * share for name, value in device.flops_per_s.items()}
    rate = device.matmul_flops_per_s and device.matmul_flops_per_s * share
    return device.with_changes(flops_per_s=peaks, matmul_flops_per_s=rate)


def _is_module(row: Row, device: Device) -> bool:
    """Whether the row's memory is of a module of two devices."""
    return "one GCD" in device.name and _stated_memory(row) > 1.5 * device.memory_bytes / 2**30


def _parts(row: Row, device: Device) -> int:
    """Devices of what a row counts as one: two where it counts modules, by its ranks or by what a node has."""
    if not _is_module(row, device):
        return 1
    counted, node = row.count("n_gpus") or 0, row.count("gpus_per_node")
    ranks = math.prod(row.count(cell) or 1 for cell in ("dp", "tp", "pp", "cp")) if row.count("dp") else 0
    modules = ranks == 2 * counted or (ranks != counted and (node is None or node <= 4))
    if modules:
        row.assume("modules of two devices each")
    return 2 if modules else 1
