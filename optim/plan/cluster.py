"""What it is trained on: devices, the links between them, and nodes.

    cluster = Cluster(device=device_named("H100-SXM-80GB"), nodes=16, devices_per_node=8,
                      inside=Link(Bandwidth.gigabytes_per_s(450)), between=Link(Bandwidth.gigabits_per_s(400)))

What these reach in practice (efficiencies, latencies, launch costs) is no property of a datasheet: it is fitted, per device
family and per network, and lies in ``constants`` beside its provenance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trine.optim.plan.units import Bandwidth
from trine.record.errors import UsageError
from trine.record.hardware import Peaks

__all__ = ["Cluster", "Device", "Link", "require_believable"]

#: The largest job that is believed: ten times the largest clusters that are being built.
_MOST_DEVICES = 10**7


def require_believable(devices: int) -> None:
    """Raises ``UsageError`` for more devices than any job has."""
    if devices > _MOST_DEVICES:
        raise UsageError(f"{devices} devices are more than any job has: at most {_MOST_DEVICES:,}")


@dataclass(frozen=True, slots=True)
class Device:
    """One device. ``flops_per_s``: dense peaks by precision (``bf16``, ``fp16``, ``tf32``, ``fp8``, ``fp32``).

    ``matmul_flops_per_s``: the best rate any matmul of bf16 was seen to reach, None where nobody said. ``family`` chooses
    the fitted constants: ``volta``, ``ampere``, ``hopper``, ``blackwell``, ``cdna3``, ``tpu``, ``gaudi``, ``cpu`` and others of
    ``devices.csv``; ``unknown`` where nobody said. ``matmul_rates``: such best rates by precision, as far as they are known.
    ``multiprocessors``: enabled streaming multiprocessors or compute units; None: as its family's usually have.
    ``constants``: of the family's constants, those that were measured on this very device.
    """

    name: str
    family: str
    flops_per_s: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: Bandwidth
    link: Bandwidth | None = None
    matmul_flops_per_s: float | None = None
    source: str = ""
    matmul_rates: Mapping[str, float] = field(default_factory=dict)
    multiprocessors: int | None = None
    constants: Mapping[str, float] = field(default_factory=dict)

    def with_changes(self, **changes: Any) -> Device:
        """A copy with other figures."""
        return replace(self, **changes)

    @property
    def is_processor(self) -> bool:
        """Whether it is a CPU, whose memory is the host's."""
        return self.family == "cpu"

    def peak(self, precision: str) -> float:
        """Dense peak of a precision in FLOP/s; fp32's where there is no unit for tf32. Raises ``UsageError``."""
        for name in (
            precision,
            *{"tf32": ("fp32",), "fp16": ("bf16",), "bf16": ("fp16",)}.get(precision, ()),
        ):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        raise UsageError(
            f"{self.name} has no peak for {precision}: declare flops_per_s.{precision}, or choose one of "
            f"{', '.join(sorted(self.flops_per_s))}"
        )

    @classmethod
    def from_peaks(cls, peaks: Peaks, family: str, matmul_flops_per_s: float | None = None) -> Device:
        """From a row of :mod:`trine.record.hardware`. Raises ``UsageError`` where memory is not known."""
        if peaks.memory_bytes is None or peaks.memory_bytes_per_s is None:
            raise UsageError(
                f"{peaks.name}: memory_bytes and memory_bandwidth are not known: declare them in the cluster file"
            )
        return cls(
            name=peaks.name,
            family=family,
            flops_per_s=peaks.flops_per_s,
            memory_bytes=peaks.memory_bytes,
            memory_bandwidth=Bandwidth(peaks.memory_bytes_per_s),
            link=None if peaks.link_bytes_per_s is None else Bandwidth(peaks.link_bytes_per_s),
            matmul_flops_per_s=matmul_flops_per_s,
            multiprocessors=peaks.multiprocessors,
            source=peaks.source,
        )


@dataclass(frozen=True, slots=True)
class Link:
    """What one device has towards others: bandwidth in one direction, and who carries it.

    ``kind`` chooses fitted constants: ``nvlink``, ``pcie``, ``xgmi``, ``infiniband``, ``roce``, ``omnipath``, ``efa``, ``ethernet``,
    ``shared-memory``, ``ici``, ``neuronlink``. ``in_switch``: the switch reduces (SHARP between nodes, NVLS inside). ``note``: what was
    taken because nobody said. ``constants``: of the kind's constants, those that were measured on this very link.
    """

    bandwidth: Bandwidth
    kind: str = "nvlink"
    in_switch: bool = False
    note: str = ""
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.bandwidth, Bandwidth):
            raise UsageError(
                f"a link takes a Bandwidth, not {self.bandwidth!r}: Bandwidth.gigabytes_per_s(…) or .gigabits_per_s(…) "
                "says the unit"
            )


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` of ``devices_per_node`` equal devices. ``between`` None: one node alone."""

    device: Device
    devices_per_node: int
    nodes: int = 1
    inside: Link | None = None
    between: Link | None = None
    name: str = ""
    host_memory_bytes: int = 0
    host_link: Bandwidth | None = None
    nvme: Bandwidth | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise UsageError(
                f"a cluster needs at least one node of one device, not {self.nodes} of {self.devices_per_node}"
            )
        if self.nodes > 1 and self.between is None:
            raise UsageError(
                f'{self.nodes} nodes need a link between them: between = {{bandwidth = "400 Gb/s"}}'
            )
        if self.devices_per_node > 1 and self.inside is None:
            if self.device.link is None:
                raise UsageError(
                    f"{self.devices_per_node} devices of a node need a link: inside = {{bandwidth = …}}"
                )
            object.__setattr__(self, "inside", Link(self.device.link))

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.devices_per_node

    def with_changes(self, **changes: Any) -> Cluster:
        """A copy with other nodes, links or devices."""
        return replace(self, **changes)
