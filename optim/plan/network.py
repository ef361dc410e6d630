"""A cluster's links and what they reach in practice: what :mod:`~trine.optim.plan.collectives` computes with.

    network = Network.of(cluster)
    network.with_constants(between=LinkConstants(bandwidth_efficiency=0.66, latency_factor=1.5))

A link's line rate is a datasheet's; the few scalars beside it are fitted, by kind of link, and say where they are from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from trine.optim.plan.cluster import Cluster, Link
from trine.optim.plan.nccl import PROTOCOLS, Floats, Hardware, Protocol
from trine.record.errors import UsageError

__all__ = ["LINK_CONSTANTS", "LinkConstants", "Network"]


@dataclass(frozen=True, slots=True)
class LinkConstants:
    """What a kind of link reaches: fitted, beside where it is from.

    ``bandwidth_efficiency``: the bus over the line rate. ``latency_factor``: hops' latencies over those of NCCL's tuner;
    ``start_factor``: what starting a collective takes over it. ``turn_share``: of a ring's step, what its first send and its
    last receive cost beyond the steps between, since nothing runs beside them (of an all-reduce, 2(n − 1) steps).
    ``all_to_all_efficiency``: of the bus, when every rank sends to every other. ``switch_fill_bytes``: of the traffic
    through a switch that reduces, what passes before its steps overlap. ``hop_s``: α of one step of a ring, for libraries
    that are not NCCL; None: NCCL's own. ``source`` is the bandwidth's, and the latencies' where ``latency_source`` names no other.
    Raises ``UsageError``.
    """

    bandwidth_efficiency: float
    latency_factor: float = 1.0
    start_factor: float = 1.0
    turn_share: float = 0.0
    all_to_all_efficiency: float = 0.9
    switch_fill_bytes: float = 0.0
    hop_s: float | None = None
    source: str = ""
    latency_source: str = ""

    def __post_init__(self) -> None:
        for name in ("bandwidth_efficiency", "all_to_all_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} must be above 0 and at most 1, not {getattr(self, name)!r}")
        latencies = (self.latency_factor, self.start_factor, 0.0 if self.hop_s is None else self.hop_s)
        if not all(each >= 0 for each in latencies):
            raise UsageError(f"latencies must be at least 0, not {min(latencies)!r}")
        if not 0 <= self.turn_share <= 1:
            raise UsageError(f"turn_share must be between 0 and 1, not {self.turn_share!r}")


_FITTED = "fitted by benchmarks/planner_collectives.py on published nccl-tests logs"
_ASSUMED = "assumed: no measurement of this kind of link is at hand"
_MAINTAINERS = "NVIDIA/nccl-tests#290 and #267, NVIDIA/nccl#689: what tuned nodes reach an adapter"
_AS_INFINIBAND = "infiniband's, carried over"
#: By :attr:`Link.kind`, or by kind/family where generations differ. A fitted file (``constants.toml``) may say otherwise.
LINK_CONSTANTS: Mapping[str, LinkConstants] = {
    "nvlink": LinkConstants(
        0.78, start_factor=3.9, turn_share=0.5, switch_fill_bytes=20e6, source=_FITTED + " of A100 nodes"
    ),
    "nvlink/volta": LinkConstants(0.9, start_factor=2.8, source=_FITTED),
    "nvlink/hopper": LinkConstants(0.79, start_factor=0.77, switch_fill_bytes=20e6, source=_FITTED),
    "nvlink/blackwell": LinkConstants(
        0.79, start_factor=0.77, switch_fill_bytes=20e6, source="as Hopper's; no log is at hand"
    ),
    "xgmi": LinkConstants(
        0.72,
        1.6,
        1.6,
        source="ROCm's all-reduce of 4 GB on 2 and 8 MI300X (stas00/ml-engineering, network)",
        latency_source=_ASSUMED,
    ),
    "pcie": LinkConstants(0.75, 1.6, 1.6, source=_ASSUMED),
    "infiniband": LinkConstants(
        0.9, 1.65, source=_MAINTAINERS + "; a cloud's A100 nodes logged 0.66", latency_source=_FITTED
    ),
    "roce": LinkConstants(0.9, 1.65, source=_MAINTAINERS, latency_source=_AS_INFINIBAND),
    "efa": LinkConstants(
        0.8,
        2.5,
        source="two p5.48xlarge, all-reduce of 2 GiB (aws-samples/aws-do-eks, nccl-tests)",
        latency_source="as two p6-b200 logged (dstackai/dstack#3961, up to 256 B); two p4d of 2021 logged three times as much "
        "(aws-samples/aws-efa-eks)",
    ),
    "omnipath": LinkConstants(0.8, 1.65, source=_ASSUMED, latency_source=_AS_INFINIBAND),
    "ethernet": LinkConstants(
        0.6,
        4.0,
        source=_ASSUMED,
        latency_source="as two a3-megagpu-8g logged over GPUDirect-TCPXO, 64 KB to 1 MB (lessizzmore/create-a3mega-ztan-fork)",
    ),
    "shared-memory": LinkConstants(0.8, hop_s=60e-6, source=_ASSUMED),
    "ici": LinkConstants(0.8, hop_s=2e-6, source=_ASSUMED),
    "neuronlink": LinkConstants(0.8, hop_s=10e-6, source=_ASSUMED),
}
_LATENCIES = frozenset(("latency_factor", "start_factor", "turn_share", "hop_s"))

#: NVLink lanes of a DGX-1 that rings over the first n devices use, of six (its hybrid cube mesh: NVIDIA, DGX-1 with Tesla
#: V100 system architecture, 2017): a Hamiltonian cycle of its links is two rings. Five devices have none.
_CUBE_MESH_LANES = {1: 6, 2: 1, 3: 2, 4: 4, 5: 1.65, 6: 2, 7: 4, 8: 6}


def _with_measured(constants: LinkConstants, link: Link | None) -> LinkConstants:
    """The kind's constants, and before them those that were measured on this very link."""
    names = {each.name for each in fields(LinkConstants)}
    measured = {name: value for name, value in (link.constants if link else {}).items() if name in names}
    if link is None or not measured:
        return constants
    kept = constants.latency_source or constants.source
    return replace(
        constants,
        **measured,
        source=link.note,
        latency_source=link.note if _LATENCIES & measured.keys() else kept,
    )


@dataclass(frozen=True, slots=True)
class Network:
    """Links of a cluster and what they reach. ``family``: of the device, which bounds NCCL's channels."""

    devices_per_node: int
    family: str = "ampere"
    inside: Link | None = None
    between: Link | None = None
    inside_constants: LinkConstants = LINK_CONSTANTS["nvlink"]
    between_constants: LinkConstants = LINK_CONSTANTS["infiniband"]

    @classmethod
    def of(cls, cluster: Cluster, constants: Mapping[str, LinkConstants] | None = None) -> Network:
        """A cluster's. ``constants``, by kind or kind/family, stand before :data:`LINK_CONSTANTS`. Raises ``UsageError``."""
        tables = (constants or {}, LINK_CONSTANTS)

        def found(link: Link | None, otherwise: str) -> LinkConstants:
            kind = otherwise if link is None else link.kind
            for table in tables:
                for name in (f"{kind}/{cluster.device.family}", kind):
                    if name in table:
                        return _with_measured(table[name], link)
            known = sorted({*LINK_CONSTANTS, *(constants or {})})
            raise UsageError(f"no constants for a link of kind {kind!r}: one of {', '.join(known)}")

        return cls(
            devices_per_node=cluster.devices_per_node,
            family=cluster.device.family,
            inside=cluster.inside,
            between=cluster.between,
            inside_constants=found(cluster.inside, "nvlink"),
            between_constants=found(cluster.between, "infiniband"),
        )

    def with_constants(
        self, inside: LinkConstants | None = None, between: LinkConstants | None = None
    ) -> Network:
        """A copy with other constants, as a fit needs."""
        return replace(
            self,
            inside_constants=inside or self.inside_constants,
            between_constants=between or self.between_constants,
        )

    @property
    def hardware(self) -> Hardware:
        """What hops inside a node go through, as NCCL distinguishes it."""
        return "pci" if self.inside is not None and self.inside.kind == "pcie" else "nvlink"

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """LL128 needs stores of 128 bytes that arrive whole: NVLink and its like."""
        return PROTOCOLS if self.hardware == "nvlink" else ("ll", "simple")

    def lanes(self, ranks: Floats) -> Floats:
        """The share of a device's links that ``ranks`` of a node can use among themselves; 1 behind a switch."""
        if self.inside is not None and self.inside.kind == "xgmi" and self.devices_per_node > 1:
            # Every device has one link to every other (AMD CDNA 3 white paper): few ranks reach few links.
            return np.clip((ranks - 1) / (self.devices_per_node - 1), 1 / self.devices_per_node, 1.0)
        if self.family == "volta" and self.hardware == "nvlink" and self.devices_per_node <= 8:
            lanes = np.asarray([_CUBE_MESH_LANES[max(count, 1)] for count in range(9)]) / 6
            return np.asarray(lanes[np.clip(ranks, 0, 8).astype(int)])
        return np.ones_like(ranks)
