"""What a link's description means: ``link_of("4x100Gb/s Omni-Path per node (=50Gb/s per GPU)")``.

Papers and logs name a generation, a rate of one adapter or of a node's, or nothing. What comes out is always one device's
share in one direction. Where the text leaves something open, the device's usual wiring is taken (``devices.csv``) and
``note`` of the link says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trine.optim.plan.bridges import bridge_of
from trine.optim.plan.cluster import Device, Link
from trine.optim.plan.devices import facts_of
from trine.optim.plan.units import Bandwidth
from trine.record.errors import UsageError

__all__ = ["default_link", "link_of"]

#: Words of a text → who carries. The first that matches wins: "RoCE on ConnectX" is RoCE.
_KINDS: tuple[tuple[str, str], ...] = (
    (r"nvlink|nvswitch|nvl\b", "nvlink"),
    (r"neuronlink", "neuronlink"),
    (r"xgmi|infinity ?fabric", "xgmi"),
    (r"omni-?path|\bopa\b", "omnipath"),
    (r"\bici\b|torus", "ici"),
    (r"\befa(?:v\d)?\b|\bsrd\b", "efa"),
    (r"\broce", "roce"),
    (r"infiniband|\bib\b|\b[sdqefhnx]dr\d*\b|\bhca", "infiniband"),
    (r"slingshot|ethernet|gbe\b|\btcp(?:xo?)?\b", "ethernet"),
    (r"pcie?\b|pci-?e", "pcie"),
    (r"shared-?memory|\bshm\b", "shared-memory"),
)

#: Generations → bytes a second of one device (NVLink, all its lanes; NVIDIA's datasheets of P100, V100, A100, H100, B200)
#: or of one adapter (InfiniBand Trade Association's roadmap, 4X ports; Intel Omni-Path 100), in one direction.
_GENERATIONS: tuple[tuple[str, float], ...] = (
    (r"nvlink ?(?:gen ?)?1(?:\.0)?\b", 80e9),
    (r"nvlink ?(?:gen ?)?2(?:\.0)?\b", 150e9),
    (r"nvlink ?(?:gen ?)?3(?:\.0)?\b", 300e9),
    (r"nvlink ?(?:gen ?)?4(?:\.0)?\b", 450e9),
    (r"nvlink ?(?:gen ?)?5(?:\.0)?\b", 900e9),
    (r"\bxdr\b", 100e9),
    (r"\bndr200\b", 25e9),
    (r"\bndr\b", 50e9),
    (r"\bhdr100\b", 12.5e9),
    (r"\bhdr\b", 25e9),
    (r"\bedr\b", 12.5e9),
    (r"\bfdr\b", 6.8e9),
    (r"omni-?path|\bopa\b", 12.5e9),
    (r"pcie? ?(?:gen ?)?6", 128e9),
    (r"pcie? ?(?:gen ?)?5", 64e9),
    (r"pcie? ?(?:gen ?)?4", 32e9),
    (r"pcie? ?(?:gen ?)?3", 16e9),
)

#: Families → bytes a second of sixteen lanes of the PCIe that their cards have, in one direction (vendors' datasheets).
_PCIE = {
    **dict.fromkeys(("pascal", "volta", "turing"), 16e9),
    **dict.fromkeys(("ampere", "ada", "cdna1", "cdna2", "gaudi"), 32e9),
    **dict.fromkeys(("hopper", "blackwell", "cdna3", "cdna4"), 64e9),
}
#: Families → bytes a second of a device over EFA: Amazon EC2's P3dn (100 Gb/s for eight), P4d (400), P5 and P6 (3,200).
_EFA = {"volta": 1.5625e9, "ampere": 6.25e9, "hopper": 50e9, "blackwell": 50e9}
#: A network that names no rate → bytes a second of a device: Slingshot 11's adapter, Google Cloud's A3 (TCPX) and A3 Mega
#: (TCPXO), and 100 Gb/s of what is Ethernet and no more.
_ADAPTERS: tuple[tuple[str, float], ...] = (
    (r"slingshot|\btcpxo\b", 25e9),
    (r"ethernet|gbe\b|\btcpx?\b", 12.5e9),
)
#: Two names of one network: its adapters carry either, at one rate.
_SAME = {"roce": "infiniband"}

_RATE = re.compile(
    r"(?:(?P<count>\d+) ?[x×*] ?)?(?P<value>\d+(?:\.\d+)?) ?(?P<prefix>[mgt])(?P<unit>b(?:it)?|B(?:yte)?)"
    r"(?: ?/ ?s(?:ec)?\b|ps\b|E\b)(?P<after>[^,;()=]*)",
    re.IGNORECASE,
)
_PREFIXES = {"m": 1e6, "g": 1e9, "t": 1e12}
_WHOLE_NODE = re.compile(r"(?:per|/|a|of a|each)? ?\b(?:node|server|host|machine)\b", re.IGNORECASE)
_BOTH_DIRECTIONS = re.compile(r"bi-?dir|both directions|total|aggregate", re.IGNORECASE)
_ONE_DEVICE = re.compile(r"(?:per|/|a|each) ?(?:gpu|device|chip|accelerator|rank)", re.IGNORECASE)
#: Bytes a second that no device has towards other nodes by itself: adapters of 800 Gb/s are the fastest.
_MOST_OF_A_DEVICE = 101e9
_REDUCES = re.compile(r"\bsharp|\bnvls\b|in-switch", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Rate:
    """One rate of a text: bytes a second in one direction; of the whole node or of one adapter; said to be one device's."""

    bytes_per_s: float
    of_node: bool
    of_device: bool


def link_of(
    text: str, device: Device | None = None, *, between: bool = False, devices_per_node: int | None = None
) -> Link:
    """The link that a text describes, or the device's usual one where it says nothing.

    ``between`` nodes or inside one; the text is of a device where it does not say "per node". ``device`` fills what is left
    open; ``devices_per_node`` shares what is a node's (by default the device's usual node). Raises ``UsageError`` where
    neither the text nor the device tells.

    >>> link_of("4x100Gb/s Omni-Path per node (=50Gb/s per GPU)").bandwidth.bytes_per_s
    6250000000.0
    """
    if not text or not text.strip():
        if device is not None:
            return default_link(device, between=between)
        raise UsageError(
            'no link is described: write a rate with its unit, as in "NVLink4 450GB/s" or "400Gb/s NDR InfiniBand"'
        )
    usual = _usual(device, between)
    kind = next((kind for pattern, kind in _KINDS if re.search(pattern, text, re.IGNORECASE)), None)
    bandwidth = _bandwidth_of(text, device, devices_per_node, between)
    bridge = bridge_of(device) if device is not None and kind == "nvlink" and not between else None
    if bridge is not None and not _rates(text, between):
        # Of a card's NVLinks a bridge joins some: its rate is no generation's.
        note = f"{text!r} says no rate: a bridge's {bridge.bandwidth} a device taken ({bridge.source})"
        return Link(bridge.bandwidth, kind or "nvlink", False, note)
    note = ""
    if bandwidth is None:
        if kind is None:
            raise UsageError(
                f'{text!r} names no link and no rate: write both, as in "NVLink4 450GB/s" or "400Gb/s NDR InfiniBand"'
            )
        bandwidth, whose = _bandwidth_of_kind(text, kind, device, between)
        note = f"{text!r} says no rate: {bandwidth} a device taken, as {whose}"
    if kind is None:
        kind = usual.kind if usual is not None else "infiniband" if between else "nvlink"
    in_switch = bool(_REDUCES.search(text)) or (usual is not None and usual.in_switch and usual.kind == kind)
    return Link(bandwidth, kind, in_switch, note)


def _bandwidth_of_kind(text: str, kind: str, device: Device | None, between: bool) -> tuple[Bandwidth, str]:
    """What a device has of a kind of link, and who says so: its usual link's where that is of this kind, else the kind's own.

    Raises ``UsageError`` where neither is known: another kind's rate would be a wrong plan.
    """
    if device is not None:
        for side in (between, not between):
            usual = _usual(device, side)
            if usual is not None and _SAME.get(usual.kind, usual.kind) == _SAME.get(kind, kind):
                return usual.bandwidth, f"{device.name} usually has"
        rates = {"pcie": _PCIE, "efa": _EFA}.get(kind, {})
        if device.family in rates:
            return Bandwidth(rates[device.family]), f"{kind} of the family {device.family} has"
        for pattern, rate in _ADAPTERS:
            if re.search(pattern, text, re.IGNORECASE):
                return Bandwidth(rate), "an adapter of such networks usually has"
    raise UsageError(f'{text!r} says no rate: add one with its unit, as in "{text} 400Gb/s"')


def default_link(device: Device, *, between: bool = False) -> Link:
    """What such devices usually have inside a node or between nodes. Raises ``UsageError`` where nobody said."""
    facts = facts_of(device)
    if between:
        if facts is None:
            raise UsageError(
                f'what links nodes of {device.name} is not known: say it, between = "400Gb/s NDR InfiniBand"'
            )
        written = link_of(facts.between, between=True)
        return Link(
            written.bandwidth, written.kind, False, f"not said; usual for {device.name}: {facts.source}"
        )
    # More than a kind, "PCIe Gen5": its own rate, because the device's links do not join the whole node.
    if facts is not None and (device.link is None or " " in facts.inside):
        written = link_of(facts.inside)
        return Link(
            written.bandwidth, written.kind, False, f"not said; usual for {device.name}: {facts.source}"
        )
    if device.link is None:
        raise UsageError(
            f'what links devices of a node of {device.name} is not known: say it, inside = "NVLink4 450GB/s"'
        )
    kind, in_switch = (facts.inside, facts.in_switch) if facts is not None else ("nvlink", False)
    return Link(device.link, kind, in_switch, f"not said; of {device.name}: {device.source}")


def _usual(device: Device | None, between: bool) -> Link | None:
    try:
        return None if device is None else default_link(device, between=between)
    except UsageError:
        return None


def _bandwidth_of(
    text: str, device: Device | None, devices_per_node: int | None, between: bool
) -> Bandwidth | None:
    rates = _rates(text, between)
    said = next((rate for rate in rates if rate.of_device), None)
    if said is not None:
        return Bandwidth(_one_way(text, said.bytes_per_s, device))
    if rates:
        # "200Gb/s (1.6Tb/s node)" says the same twice: the first is a device's unless it, too, is a node's.
        rate = next((rate for rate in rates if not rate.of_node), rates[0])
        shared = _node(text, device, devices_per_node) if rate.of_node else 1
        return Bandwidth(_one_way(text, rate.bytes_per_s, device) / shared)
    for pattern, bytes_per_s in _GENERATIONS:
        if found := re.search(pattern, text, re.IGNORECASE):
            counted = re.search(r"(\d+) ?[x×] ?$", text[: found.start()])
            value = bytes_per_s * (int(counted[1]) if counted else 1)
            of_node = _is_of_node(text) or (between and counted is not None and not _ONE_DEVICE.search(text))
            return Bandwidth(value / (_node(text, device, devices_per_node) if of_node else 1))
    return None


def _one_way(text: str, bytes_per_s: float, device: Device | None) -> float:
    """Half of a rate that is twice what its bridge, generation or device has: datasheets of NVLink and PCIe add both directions up."""
    generation = next(
        (rate for pattern, rate in _GENERATIONS if re.search(pattern, text, re.IGNORECASE)), None
    )
    if re.search(r"nvlink|nvswitch", text, re.IGNORECASE):
        bridge = bridge_of(device) if device is not None else None
        own = device.link.bytes_per_s if device is not None and device.link is not None else 0.0
        known = bridge.bandwidth.bytes_per_s if bridge is not None else generation or own
    else:
        known = generation or 0.0 if re.search(r"pci", text, re.IGNORECASE) else 0.0
    return bytes_per_s / 2 if known and abs(bytes_per_s / known - 2) < 0.01 else bytes_per_s


def _is_of_node(text: str) -> bool:
    """Whether a description without a rate is of a node: "8x HDR per node", and not "4 nodes"."""
    return re.search(r"(?:per|/|a) ?(?:node|server|host)\b", text, re.IGNORECASE) is not None


def _rates(text: str, between: bool) -> list[_Rate]:
    """All rates of a text. Between nodes, several adapters are a node's, and so is what no device has alone."""
    found = []
    for match in _RATE.finditer(text):
        after = match["after"]
        value = float(match["value"]) * int(match["count"] or 1) * _PREFIXES[match["prefix"].lower()]
        if match["unit"][0] == "b":
            value /= 8
        if _BOTH_DIRECTIONS.search(after):
            value /= 2
        of_device = _ONE_DEVICE.search(after) is not None
        of_node = _WHOLE_NODE.search(after) is not None
        if between and not of_device and not re.search(r"\bici\b|torus|nvl", text, re.IGNORECASE):
            of_node = of_node or match["count"] is not None or value > _MOST_OF_A_DEVICE
        found.append(_Rate(value, of_node, of_device))
    return found


def _node(text: str, device: Device | None, devices_per_node: int | None) -> int:
    if devices_per_node:
        return devices_per_node
    facts = facts_of(device) if device is not None else None
    if facts is None:
        raise UsageError(f"{text!r} is a node's: say how many devices share it (devices_per_node)")
    return facts.node
