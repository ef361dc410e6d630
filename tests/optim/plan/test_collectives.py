"""The collectives' times: by hand, against one another, and what cannot be."""

import pytest

from trine.optim.plan.cluster import Link
from trine.optim.plan.collectives import LinkConstants, Network, all_reduce_s
from trine.optim.plan.units import Bandwidth


def ampere(inside: float = 1.0, between: float = 1.0, factor: float = 1.0) -> Network:
    """Eight devices a node, 300 GB/s among them and 25 GB/s each to others."""
    return Network(
        8,
        "ampere",
        Link(Bandwidth.gigabytes_per_s(300)),
        Link(Bandwidth.gigabytes_per_s(25), kind="infiniband"),
        LinkConstants(inside, factor),
        LinkConstants(between, factor),
    )


def test_a_ring_between_nodes_is_the_tuner_s_form() -> None:
    # 16 ranks on 2 nodes, Simple: (8.4 + 28·3.4 + 2·14) · 1.4 µs, and 2·15/16·S over 8 adapters.
    expected = 1.4 * (8.4 + 28 * 3.4 + 2 * 14.0) * 1e-6 + 2 * 15 / 16 * 2**32 / 200e9
    assert all_reduce_s(ampere(), 2**32, 16, 8, "ring") == pytest.approx(expected, rel=1e-9)
