"""The collectives' times: by hand, against published figures, against one another, and what cannot be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.optim.plan import collectives, nccl
from trine.optim.plan.cluster import Cluster, Device, Link
from trine.optim.plan.collectives import LINK_CONSTANTS, LinkConstants, Network
from trine.optim.plan.units import Bandwidth
from trine.record.errors import UsageError

EXACT = LinkConstants(1.0)
GB = Bandwidth.gigabytes_per_s


def network(
    family: str = "ampere",
    inside: float = 300,
    between: float = 25,
    *,
    reduces: tuple[bool, bool] = (False, False),
    constants: tuple[LinkConstants, LinkConstants] = (EXACT, EXACT),
    kinds: tuple[str, str] = ("nvlink", "infiniband"),
) -> Network:
    """Eight devices a node. Links reach their line rates, and latencies are NCCL's, unless ``constants`` say otherwise."""
    return Network(
        8,
        family,
        Link(GB(inside), kind=kinds[0], in_switch=reduces[0]),
        Link(GB(between), kind=kinds[1], in_switch=reduces[1]),
        *constants,
    )


A100 = network()
H100 = network("hopper", 450, 50, reduces=(True, False))


def bus_bandwidth(seconds: float, size: float, ranks: int) -> float:
    """As nccl-tests counts it, GB/s."""
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def test_a_ring_between_nodes_is_the_tuner_s_form() -> None:
    # 16 ranks on 2 nodes, Simple: (8.4 + 28·3.4 + 2·14) · 1.4 µs (plateau), and 2·15/16·S over 8 adapters.
    expected = 1.4 * (8.4 + 28 * 3.4 + 2 * 14.0) * 1e-6 + 2 * 15 / 16 * 2**32 / 200e9
    assert collectives.all_reduce_s(A100, 2**32, 16, 8, "ring") == pytest.approx(expected, rel=1e-9)


def test_a_tree_between_nodes_is_the_tuner_s_form() -> None:
    # 32 ranks on 4 nodes, LL128 at 1 MB: 14 + 2·(7·1.25 + 2·8.5) µs; its bus is 0.92·120/128 of 200 GB/s, corrected by 0.6.
    bus = 0.92 * 200e9 * 120 / 128 * 0.6
    expected = (14 + 2 * (7 * 1.25 + 2 * 8.5)) * 1e-6 + 2 * 2**20 / bus
    assert collectives.all_reduce_s(A100, 2**20, 32, 8, "tree") == pytest.approx(expected, rel=1e-9)


def test_factors_multiply_hops_and_the_start_and_the_efficiency_the_bus() -> None:
    slow = network(constants=(EXACT, LinkConstants(0.5, 3.0, 2.0)))
    ring = 2**32 * 2 * 15 / 16
    latency = 1.4 * (2 * 8.4 + 3 * (28 * 3.4 + 28)) * 1e-6
    assert collectives.all_reduce_s(slow, 2**32, 16, 8, "ring") == pytest.approx(latency + ring / 100e9)
    # The tree: LL128 at 1 MB starts in 14 µs and hops 2 · (7 · 1.25 + 8.5).
    fast = collectives.all_reduce_s(network(), 2**20, 16, 8, "tree")
    later = collectives.all_reduce_s(
        network(constants=(EXACT, LinkConstants(1.0, 3.0, 2.0))), 2**20, 16, 8, "tree"
    )
    assert later - fast == pytest.approx((14 + 2 * 2 * (7 * 1.25 + 8.5)) * 1e-6)


def test_the_ends_of_a_ring_cost_most_where_there_are_two_ranks() -> None:
    turning = network(constants=(LinkConstants(1.0, turn_share=0.5), EXACT))
    for ranks, steps in ((2, 2.5), (8, 14.5)):
        latency = (8.4 + 2 * (ranks - 1) * 3.4) * 1e-6
        expected = latency + steps / ranks * 2**32 / 300e9
        assert collectives.all_reduce_s(turning, 2**32, ranks, ranks, "ring") == pytest.approx(expected)
    half = collectives.reduce_scatter_s(turning, 2**34, 2, 2)
    assert half == pytest.approx(collectives.all_reduce_s(turning, 2**34, 2, 2, "ring") / 2, rel=1e-3)


def test_starting_takes_its_factor_inside_a_node_and_hops_theirs_between() -> None:
    inside, between = LINK_CONSTANTS["nvlink"], LINK_CONSTANTS["infiniband"]
    assert inside.start_factor > 1 == inside.latency_factor
    assert between.latency_factor > 1 == between.start_factor


def test_reduce_scatter_and_all_gather_are_half_a_ring() -> None:
    half = collectives.reduce_scatter_s(A100, 2**33, 64, 8)
    whole = collectives.all_reduce_s(A100, 2**33, 64, 8, "ring")
    assert half == pytest.approx(whole / 2, rel=0.02)
    assert collectives.all_gather_s(A100, 2**33, 64, 8) == half


def test_a_group_of_one_rank_a_node_has_one_adapter() -> None:
    strided = collectives.reduce_scatter_s(A100, 2**30, 8, 1)
    assert strided == pytest.approx(7 / 8 * 2**30 / 25e9, rel=0.02)
    filling = collectives.reduce_scatter_s(A100, 2**30, 64, 8)
    assert filling == pytest.approx(63 / 64 * 2**30 / 200e9, rel=0.2)


def test_two_levels_send_a_share_between_nodes() -> None:
    # 7/8 of S within a node twice, and 2·7/8 of S/8 over each adapter.
    bytes_s = 2 * 7 / 8 * 2**34 / 300e9 + 2 * 7 / 8 * 2**31 / 25e9
    assert collectives.all_reduce_s(A100, 2**34, 64, 8, "two_level") == pytest.approx(bytes_s, rel=0.01)


def test_two_levels_gain_where_a_ring_would_cross_adapters_that_are_slow_to_answer() -> None:
    many = 1024
    two = collectives.all_reduce_s(A100, 2**22, many, 8, "two_level")
    assert two < collectives.all_reduce_s(A100, 2**22, many, 8, "ring")


def test_a_switch_that_reduces_beats_the_line_rate_of_a_ring() -> None:
    # NVLS: S·(1 + 1/8) through 0.85 of 450 GB/s; nccl-tests then reports more than the links' 450 GB/s.
    seconds = float(collectives.all_reduce_s(H100, 2**33, 8, 8, "in_switch"))
    assert seconds == pytest.approx(25e-6 + 9 / 8 * 2**33 / (0.85 * 450e9), rel=1e-6)
    assert bus_bandwidth(seconds, 2**33, 8) > 450
    assert collectives.all_reduce_s(H100, 2**33, 8, 8) == seconds


def test_switches_that_reduce_between_nodes_halve_the_traffic_of_adapters() -> None:
    sharp = network(inside=900, reduces=(False, True))
    reduced, ring = (
        collectives.all_reduce_s(sharp, 2**34, 512, 8, algorithm) for algorithm in ("in_switch", "ring")
    )
    assert ring / reduced == pytest.approx(2, rel=0.05)


def shipped(name: str, family: str, inside: float, between: float, kind: str) -> Network:
    device = Device(name, family, {"bf16": 1e15}, 80 * 2**30, GB(3000))
    return Network.of(
        Cluster(device, 8, 2, Link(GB(inside), in_switch=family == "hopper"), Link(GB(between), kind=kind))
    )


def test_published_figures_of_h100() -> None:
    p5 = shipped("H100", "hopper", 450, 50, "efa")
    # aws-do-eks, nccl-tests: all-reduce of 2 GiB on one p5.48xlarge 8.02 ms, on two 9.18 ms.
    assert float(collectives.all_reduce_s(p5, 2**31, 8)) == pytest.approx(8.02e-3, rel=0.05)
    assert float(collectives.all_reduce_s(p5, 2**31, 16)) == pytest.approx(9.18e-3, rel=0.15)
    # meta-pytorch/autoparallel, nccl-tests on 8 H100: all-gather of 1 GB at 394 GB/s, of four ranks at 434 GB/s.
    assert 1.0 / float(collectives.all_gather_s(p5, 1e9, 8)) == pytest.approx(394, rel=0.1)
    assert 1.0 / float(collectives.all_gather_s(p5, 1e9, 4)) == pytest.approx(434, rel=0.1)
    # The same: all-to-all at 380 GB/s.
    assert 1.0 / float(collectives.all_to_all_s(p5, 1e9, 8)) == pytest.approx(380, rel=0.1)


def test_published_figures_of_mi300x() -> None:
    # stas00/ml-engineering, network: 4 GB on two and on eight MI300X of a node, a full mesh, 47.7 and 312.9 GB/s.
    mesh = shipped("MI300X", "cdna3", 448, 50, "roce")
    assert mesh.inside is not None
    mesh = Network(8, "cdna3", Link(GB(448), kind="xgmi"), None, LINK_CONSTANTS["xgmi"])
    for ranks, expected in ((2, 47.7), (8, 312.9)):
        seconds = float(collectives.all_reduce_s(mesh, 2**32, ranks))
        assert bus_bandwidth(seconds, 2**32, ranks) == pytest.approx(expected, rel=0.1)


def test_a_dgx_1_s_rings_are_as_many_as_its_links_allow() -> None:
    v100 = network("volta", 150)
    two, four, eight = (float(collectives.all_reduce_s(v100, 2**30, ranks)) for ranks in (2, 4, 8))
    # One lane of 25 GB/s between two devices, four rings over four, six over eight.
    for seconds, ranks, lanes in ((two, 2, 1), (four, 4, 4), (eight, 8, 6)):
        assert bus_bandwidth(seconds, 2**30, ranks) == pytest.approx(25 * lanes, rel=0.02)


def test_all_to_all_is_bound_by_the_adapter() -> None:
    seconds = float(collectives.all_to_all_s(A100, 2**30, 64, 8))
    assert seconds == pytest.approx(56 / 64 * 2**30 / (0.9 * 25e9), rel=0.02)


def test_messages_and_broadcasts_carry_the_vector_once() -> None:
    inside, between = collectives.point_to_point_s(A100, 2**30, [True, False])
    assert inside == pytest.approx(2**30 / 300e9, rel=0.01)
    assert between == pytest.approx(2**30 / 25e9, rel=0.01)
    assert collectives.broadcast_s(A100, 2**33, 8) == pytest.approx(2**33 / 300e9, rel=0.01)


def test_a_message_has_its_peer_s_share_of_a_communicator_s_channels() -> None:
    # 32 channels of 20 GB/s (LL128, Ampere) over 8 ranks are 4, over 32 ranks the least, 2; two ranks' are faster than links.
    seconds = collectives.point_to_point_s(A100, 2**34, True, [2, 4, 8, 32])
    assert 2**34 / seconds / 1e9 == pytest.approx([300, 160, 80, 40], rel=1e-3)
    # Over an adapter of 25 GB/s two channels suffice.
    assert 2**34 / collectives.point_to_point_s(A100, 2**34, False, 32) / 1e9 == pytest.approx(25, rel=1e-3)
    gloo = Network(4, "cpu", Link(GB(10), kind="shared-memory"), None, LinkConstants(0.5, hop_s=50e-6))
    assert collectives.point_to_point_s(gloo, 1e8, True, 64) == collectives.point_to_point_s(gloo, 1e8, True)


def test_other_libraries_are_hockney_s_ring() -> None:
    gloo = Network(4, "cpu", Link(GB(10), kind="shared-memory"), None, LinkConstants(0.5, hop_s=50e-6))
    assert collectives.all_reduce_s(gloo, 1e8, 4) == pytest.approx(6 * 50e-6 + 1.5e8 / 5e9)
    assert collectives.reduce_scatter_s(gloo, 1e8, 4) == pytest.approx(3 * 50e-6 + 0.75e8 / 5e9)
    assert collectives.point_to_point_s(gloo, 1e8, True) == pytest.approx(50e-6 + 1e8 / 5e9)
    assert collectives.all_to_all_s(gloo, 1e8, 4) == pytest.approx(3 * 50e-6 + 0.75e8 / 4.5e9)


def test_arrays_broadcast_and_one_rank_sends_nothing() -> None:
    found = collectives.all_reduce_s(A100, [0, 2**20, 2**30], [[1], [8], [64]])
    assert found.shape == (3, 3)
    assert (found[0] == 0).all() and (found[:, 0] == 0).all() and (found[1:, 1:] > 0).all()


def test_a_cluster_s_constants_are_its_kind_s_and_family_s() -> None:
    p5 = shipped("H100", "hopper", 450, 50, "infiniband")
    assert p5.inside_constants == LINK_CONSTANTS["nvlink/hopper"]
    assert p5.between_constants == LINK_CONSTANTS["infiniband"]
    device = Device("A", "ampere", {"bf16": 3e14}, 2**36, GB(2000))
    fitted = {"infiniband": LinkConstants(0.5, source="here")}
    cluster = Cluster(device, 8, 2, Link(GB(300)), Link(GB(25), kind="infiniband"))
    assert Network.of(cluster, fitted).between_constants.source == "here"
    assert Network.of(cluster, fitted).inside_constants == LINK_CONSTANTS["nvlink"]
    generic = {"nvlink": LinkConstants(0.4)}
    hopper = cluster.with_changes(device=Device("H", "hopper", {"bf16": 1e15}, 2**36, GB(3000)))
    assert Network.of(hopper, generic).inside_constants.bandwidth_efficiency == 0.4


@settings(max_examples=25, deadline=None)
@given(
    size=st.floats(1e3, 1e10),
    exponent=st.integers(0, 9),
    per_node=st.sampled_from([1, 2, 4, 8]),
    bigger=st.floats(1.0, 64.0),
    reduces=st.tuples(st.booleans(), st.booleans()),
)
def test_more_bytes_take_longer_and_no_algorithm_beats_physics(
    size: float, exponent: int, per_node: int, bigger: float, reduces: tuple[bool, bool]
) -> None:
    on = network("hopper", 450, 50, reduces=reduces)
    ranks = per_node * 2**exponent
    for take in (
        collectives.all_reduce_s,
        collectives.reduce_scatter_s,
        collectives.all_to_all_s,
        collectives.broadcast_s,
    ):
        assert take(on, size, ranks, per_node) <= take(on, size * bigger, ranks, per_node) * (1 + 1e-9)
    if ranks == 1:
        return
    auto = float(collectives.all_reduce_s(on, size, ranks, per_node))
    assert auto <= float(collectives.all_reduce_s(on, size, ranks, per_node, "ring"))
    # Whoever reduces, a node's vector leaves it once: its adapters carry it (and one adapter a rank, at most).
    narrowest = 450e9 if ranks == per_node else min(450e9 if per_node > 1 else np.inf, per_node * 50e9)
    assert auto >= size / narrowest


def test_the_table_is_read_as_it_is_written() -> None:
    nodes = np.asarray([1.0, 2.0, 16.0])
    assert nccl.tree_bus("ampere", "simple", np.full(3, 1e15), np.full(3, 8.0), nodes).tolist() == [
        8 * 24.0e9,
        8 * 23.6e9,
        8 * 17.8e9,
    ]
    assert nccl.tree_share("ll128", np.asarray([2.0**20]))[0] == 0.6
    assert nccl.tree_share("simple", np.asarray([2.0**40, 1.0])).tolist() == [0.9, 0.9]
    assert nccl.channels("hopper", np.asarray([8.0, 8.0, 1.0]), np.asarray([1.0, 4.0, 4.0])).tolist() == [
        24,
        16,
        2,
    ]
    assert nccl.in_switch_share("ampere") == 0 and nccl.in_switch_share("hopper") == 0.85


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: collectives.all_reduce_s(A100, -1, 8), "at least 0 bytes"),
        (lambda: collectives.all_reduce_s(A100, float("nan"), 8), "at least 0 bytes"),
        (lambda: collectives.all_reduce_s(A100, 1, 0), "at least one rank"),
        (lambda: collectives.all_reduce_s(A100, 1, float("nan")), "at least one rank"),
        (lambda: collectives.all_reduce_s(A100, 1, 32, 16), "16 ranks of a group cannot share a node of 8"),
        (lambda: collectives.all_reduce_s(A100, 1, 8, 8, "in_switch"), "set in_switch of the link"),
        (lambda: collectives.all_reduce_s(A100, 1, 8, 8, "star"), "no all-reduce is called 'star'"),
        (lambda: collectives.all_reduce_s(Network(8, "ampere", Link(GB(1))), 1, 16), "needs a link between"),
        (lambda: collectives.point_to_point_s(Network(1), 1, True), "cannot share a node of one device"),
        (lambda: LinkConstants(1.5), "at most 1"),
        (lambda: LinkConstants(0.5, -1.0), "at least 0"),
        (lambda: LinkConstants(0.5, start_factor=-1.0), "at least 0"),
        (lambda: LinkConstants(0.5, turn_share=1.5), "between 0 and 1"),
        (lambda: shipped("A", "ampere", 300, 25, "pigeon"), "no constants for a link of kind 'pigeon'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
