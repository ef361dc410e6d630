"""Ring, two trees, two levels: their schedules without processes, their sums on live ranks, and ranks that fail."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import all_reduce_cases
import optim_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from trine.optim.runtime.exchange import selection
from trine.optim.runtime.exchange.ring import ring_plan
from trine.optim.runtime.exchange.schedule import Message, Plan, Step, bounds
from trine.optim.runtime.exchange.tree import double_tree, tree_load, tree_plan
from trine.optim.runtime.exchange.two_level import two_level_plan
from trine.optim.runtime.links import Link, Links
from trine.optim.topology import Topology

# --- schedules ---------------------------------------------------------------------------------


def simulate(plans: list[Plan]) -> int:
    """Run all ranks' plans step by step; each chunk must end as the sum of all ranks, each counted once. The steps."""
    held = [[frozenset([rank])] * plan.chunks for rank, plan in enumerate(plans)]
    by_number: dict[int, list[tuple[int, Step]]] = {}
    for rank, plan in enumerate(plans):
        assert [step.number for step in plan.steps] == sorted({step.number for step in plan.steps})
        for step in plan.steps:
            by_number.setdefault(step.number, []).append((rank, step))
    for number in sorted(by_number):
        mail: dict[tuple[int, int], list[tuple[Message, Any]]] = {}
        for rank, step in by_number[number]:
            touched = [c for m in (*step.sends, *step.copies) for c in range(m.first, m.last)]
            written = {c for m in step.copies for c in range(m.first, m.last)}
            assert not written & {c for m in step.sends for c in range(m.first, m.last)}, (rank, touched)
            for message in step.sends:
                content = held[rank][message.first : message.last]
                mail.setdefault((rank, message.peer), []).append((message, content))
        for rank, step in by_number[number]:
            for message in sorted((*step.adds, *step.copies)):
                sent, content = mail[message.peer, rank].pop(0)  # in the order of sending
                assert (sent.first, sent.last) == (message.first, message.last)
                for chunk, value in zip(range(message.first, message.last), content, strict=True):
                    if message in step.adds:
                        assert not held[rank][chunk] & value, "a rank's part would be counted twice"
                        held[rank][chunk] |= value
                    else:
                        held[rank][chunk] = value
        assert not any(mail.values()), "something was sent that nobody received"
    everyone = frozenset(range(len(plans)))
    assert all(value == everyone for row in held for value in row)
    return max(by_number, default=-1) + 1


@settings(deadline=None, max_examples=30)
@given(ranks=st.integers(1, 40))
def test_a_ring_takes_2n_less_2_steps_and_the_least_bytes(ranks: int) -> None:
    plans = [ring_plan(rank, ranks) for rank in range(ranks)]
    assert simulate(plans) == 2 * (ranks - 1)
    assert {plan.sent_chunks() / plan.chunks for plan in plans} == {2 * (ranks - 1) / ranks}


@settings(deadline=None, max_examples=40)
@given(ranks=st.integers(2, 40), pieces=st.integers(1, 9))
def test_two_trees_take_logarithmic_steps_and_twice_the_bytes_at_most(ranks: int, pieces: int) -> None:
    plans = [tree_plan(rank, ranks, pieces) for rank in range(ranks)]
    height = math.ceil(math.log2(ranks))
    assert simulate(plans) == 2 * height + pieces - 1
    sent = [plan.sent_chunks() / plan.chunks for plan in plans]
    assert max(sent) <= 2.0
    assert max(sent) == tree_load(ranks) / 2
    assert sum(sent) == pytest.approx(2 * (ranks - 1))  # what any all-reduce moves in all


@given(ranks=st.integers(2, 200))
def test_inner_places_of_one_tree_are_leaves_of_the_other(ranks: int) -> None:
    one, other = double_tree(ranks)
    assert max(map(len, (*one.children, *other.children))) <= 2
    both = [place for place in range(ranks) if one.children[place] and other.children[place]]
    assert len(both) <= ranks % 2


@settings(deadline=None, max_examples=40)
@given(nodes=st.integers(2, 9), local=st.integers(2, 6), pieces=st.one_of(st.none(), st.integers(1, 5)))
def test_two_levels_send_a_slice_a_rank_between_nodes(nodes: int, local: int, pieces: int | None) -> None:
    ranks = nodes * local
    plans = [two_level_plan(Topology(rank, ranks, local), pieces) for rank in range(ranks)]
    across = 2 * (nodes - 1) if pieces is None else 2 * math.ceil(math.log2(nodes)) + pieces - 1
    assert simulate(plans) == 2 * (local - 1) + across
    for rank, plan in enumerate(plans):
        leaving = sum(
            (m.last - m.first) / plan.chunks
            for step in plan.steps
            for m in step.sends
            if m.peer // local != rank // local
        )
        if pieces is None:
            assert leaving == pytest.approx(2 * (nodes - 1) / nodes / local)
        assert leaving <= 2 / local + 1e-12


@given(elements=st.integers(0, 5000), chunks=st.integers(1, 300))
def test_chunks_cover_the_tensor_evenly(elements: int, chunks: int) -> None:
    edges = [bounds(elements, chunks, chunk) for chunk in range(chunks + 1)]
    sizes = [b - a for a, b in pairwise(edges)]
    assert edges[0] == 0
    assert edges[-1] == elements
    assert max(sizes) - min(sizes) <= 1


# --- prediction and choice ---------------------------------------------------------------------


def link(alpha_s: float, bytes_per_s: float, ranks: int = 8) -> Link:
    return Link(alpha_s, bytes_per_s, "gloo", ranks, "a test")


def costs_of(topology: Topology, whole: Link, inside: Link, across: Link, backend: Link) -> selection.Costs:
    return selection.Costs(topology, Links(whole, inside, across), backend, 1e15)


def simulated_seconds(plans: list[Plan], size_bytes: float, shift: Link) -> float:
    """Each step as long as its busiest rank's messages."""
    busiest: dict[int, float] = {}
    for plan in plans:
        for step in plan.steps:
            sent = sum(m.last - m.first for m in step.sends)
            received = sum(m.last - m.first for m in (*step.adds, *step.copies))
            busiest[step.number] = max(busiest.get(step.number, 0.0), sent, received)
    return sum(shift.seconds(chunks * size_bytes / plans[0].chunks) for chunks in busiest.values())


@settings(deadline=None, max_examples=30)
@given(ranks=st.integers(2, 24), size=st.sampled_from([2**10, 2**16, 2**22, 2**26]))
def test_predictions_are_the_schedules_cost(ranks: int, size: int) -> None:
    shift = link(50e-6, 1e9)
    ring = simulated_seconds([ring_plan(rank, ranks) for rank in range(ranks)], size, shift)
    assert selection.ring_seconds(size, ranks, shift) == pytest.approx(ring)
    pieces = selection.best_pieces(size, ranks, shift)
    tree = simulated_seconds([tree_plan(rank, ranks, pieces) for rank in range(ranks)], size, shift)
    predicted = selection.tree_seconds(size, ranks, shift)
    assert tree <= predicted * (1 + 1e-9)  # steps in which the pipeline fills or drains are less busy
    assert predicted <= 2 * tree


@given(
    ranks=st.integers(2, 300),
    size=st.integers(8, 2**30),
    alpha=st.floats(1e-6, 1e-2),
    beta=st.floats(1e7, 1e12),
)
def test_the_number_of_chunks_in_a_tree_is_near_the_best(
    ranks: int, size: int, alpha: float, beta: float
) -> None:
    shift = link(alpha, beta)
    best = min(selection.tree_seconds(size, ranks, shift, pieces=2**n) for n in range(7))
    assert selection.tree_seconds(size, ranks, shift) <= 1.07 * best


def test_choices_by_size() -> None:
    """Many ranks: trees for small, rings for large; a slow network between nodes: two levels for large."""
    topology = Topology(0, 64, 8)
    names = selection.candidates("auto", topology)
    assert names == ("backend", "ring", "tree", "two_level/ring", "two_level/tree")
    slow = link(20e-6, 1e9)
    even = costs_of(topology, slow, slow, slow, link(1.0, 1e6))
    by_size = {choice.name for choice in selection.ranges(even, ("ring", "tree"), 2**30)}
    assert by_size == {"ring", "tree"}
    assert selection.ranges(even, ("ring", "tree"), 2**30)[0].name == "tree"
    assert selection.ranges(even, ("ring", "tree"), 2**30)[-1].name == "ring"
    nodes = costs_of(topology, link(20e-6, 1e9), link(5e-6, 100e9), link(20e-6, 1e9), link(1.0, 1e6))
    assert selection.ranges(nodes, names, 2**28)[-1].name.startswith("two_level")
    good = costs_of(topology, slow, slow, slow, link(1e-6, 1e12))
    assert [choice.name for choice in selection.ranges(good, names, 2**28)] == ["backend"]


@given(
    alphas=st.lists(st.floats(1e-6, 1e-2), min_size=4, max_size=4),
    betas=st.lists(st.floats(1e7, 1e12), min_size=4, max_size=4),
    size=st.integers(1, 2**27),
)
def test_the_table_has_the_fastest_at_each_power_of_two(
    alphas: list[float], betas: list[float], size: int
) -> None:
    topology = Topology(3, 12, 4)
    costs = costs_of(topology, *(link(a, b) for a, b in zip(alphas, betas, strict=True)))
    names = selection.candidates("auto", topology)
    choices = selection.ranges(costs, names, 2**27)
    size = 2 ** max(10, math.ceil(math.log2(size)))
    found = next(choice for choice in choices if size <= choice.largest_bytes)
    others = [costs.seconds(name, size) for name in names if name != "backend"]
    if found.name == "backend":
        assert costs.seconds("backend", size) <= min(others) * (1 + selection.MARGIN)
    else:
        assert costs.seconds(found.name, size) == min(others)
        assert min(others) * (1 + selection.MARGIN) <= costs.seconds("backend", size)


def test_a_trial_corrects_predictions_between_its_sizes() -> None:
    topology = Topology(0, 4, 2)
    plain = costs_of(topology, *[link(1e-5, 1e9)] * 4)
    tried = replace(plain, factors={"ring": ((2**13, 4.0), (2**21, 1.0))})
    for size, factor in ((2**10, 4.0), (2**13, 4.0), (2**17, 2.0), (2**21, 1.0), (2**25, 1.0)):
        assert tried.seconds("ring", size) == pytest.approx(factor * plain.seconds("ring", size))
    assert tried.seconds("tree", 2**17) == plain.seconds("tree", 2**17)


def test_a_table_in_words() -> None:
    choices = [
        selection.Range(2**16, "tree", 0.1),
        selection.Range(2**21, "ring", 0.2),
        selection.Range(2**23, "backend", 1),
    ]
    assert selection.described(choices) == "up to 64 KiB tree, up to 2 MiB ring, above it backend"
    assert selection.described(choices[:1]) == "tree"


# --- live ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("ring", 4), ("ring", 3), ("tree 1", 3), ("tree 3", 4), ("two_level", 4), ("two_level 2", 4)],
)
def test_sums_are_exact_and_the_same_bits_on_every_rank(four_ranks: Any, name: str, ranks: int) -> None:
    for found in four_ranks.run("all_reduce_cases:sums", name, ranks)[:ranks]:
        for dtype, (worst, same) in found.items():
            assert same, f"{dtype}: ranks hold different bits"
            assert worst <= (ranks if "float" in dtype else 0), dtype
    # 1e-10 relative in float64 is a million such units.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("ring", 8),
        ("ring", 7),
        ("tree 1", 8),
        ("tree 4", 7),
        ("tree 2", 5),
        ("two_level", 8),
        ("two_level 2", 6),
    ],
)
def test_sums_over_more_ranks(eight_ranks: Any, name: str, ranks: int) -> None:
    for found in eight_ranks.run("all_reduce_cases:sums", name, ranks)[:ranks]:
        for dtype, (worst, same) in found.items():
            assert same, f"{dtype}: ranks hold different bits"
            assert worst <= (ranks if "float" in dtype else 0), dtype


def test_bytes_sent_are_those_of_the_theory(four_ranks: Any) -> None:
    elements = 1200
    size = elements * 4
    assert four_ranks.run("all_reduce_cases:counted", "ring", 4, elements) == [2 * 3 / 4 * size] * 4
    tree = four_ranks.run("all_reduce_cases:counted", "tree 3", 4, elements)
    assert max(tree) == 2 * size
    assert sum(tree) == 2 * 3 * size
    two_level = four_ranks.run("all_reduce_cases:counted", "two_level", 4, elements)
    assert two_level == [size // 2 + size // 2 + size // 2] * 4  # in, across (2 · 1/2 of a half), out


def test_auto_agrees_on_every_rank_and_goes_by_size(four_ranks: Any) -> None:
    by_rank = four_ranks.run("all_reduce_cases:costs_and_choices", 4)
    assert all(exact for _, _, exact in by_rank)
    costs, choices, _ = by_rank[0]
    for other, chosen, _ in by_rank[1:]:
        assert other.factors == costs.factors
        assert (other.shift, other.backend, other.add_bytes_per_s) == (
            costs.shift,
            costs.backend,
            costs.add_bytes_per_s,
        )
        assert chosen == choices


NODES = {"TRINE_RANKS_PER_NODE": "2"}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "tree", "two_level"])
def test_the_chosen_algorithm_is_what_sends_the_gradients(four_ranks: Any, algorithm: str) -> None:
    """A ring's traffic is 2·3/4 of the gradients' bytes; two trees' and two levels' differ from it and by rank."""
    changes = {"communication.algorithm": algorithm}
    by_rank = four_ranks.run("all_reduce_cases:trained", 4, changes, NODES)
    gradients = sum(p.numel() * 4 for p in optim_cases.small_gpt().parameters())
    assert len({checksum for _, _, checksum in by_rank}) == 1
    sent = [bytes_ for _, bytes_, _ in by_rank]
    assert sum(sent) == pytest.approx(2 * 3 * gradients, rel=1e-3)
    if algorithm == "ring":
        assert sent == pytest.approx([2 * 3 / 4 * gradients] * 4, rel=1e-3)
    if algorithm == "tree":
        assert max(sent) > 1.9 * gradients
    for effects, _, _ in by_rank:
        assert any(effect.startswith("communication.algorithm: the backend's own →") for effect in effects)


@pytest.mark.slow
def test_auto_says_what_it_chose_from_which_numbers(four_ranks: Any) -> None:
    by_rank = four_ranks.run("all_reduce_cases:trained", 4, {"communication.algorithm": "auto"}, NODES)
    effects = {next(e for e in effects if "communication.algorithm" in e) for effects, _, _ in by_rank}
    assert len(effects) == 1
    said = effects.pop()
    for word in (
        "ring step",
        "inside",
        "across",
        "backend",
        "GB/s",
        "gloo",
        "measured on the spot",
        "by a trial at",
    ):
        assert word in said


@pytest.mark.parametrize(
    ("changes", "environment", "words"),
    [
        ({"communication.algorithm": "two_level"}, {}, "needs several nodes"),
        ({"communication.algorithm": "two_level"}, {"TRINE_RANKS_PER_NODE": "1"}, "one on each"),
        (
            {"communication.algorithm": "ring", "communication.compression": "int8"},
            {},
            'communication.compression = "int8" has an exchange of its own',
        ),
        ({"communication.algorithm": "ring", "zero.stage": 2}, {}, "zero.stage = 2"),
        ({"communication.nccl": {"algo": "Ring"}}, {}, "gradients travel by gloo on cpu"),
        ({"communication.nccl": {"algo": "ring"}}, {}, 'did you mean "Ring"'),
    ],
)
def test_what_cannot_work_is_refused(
    two_ranks: Any, changes: dict[str, Any], environment: dict[str, str], words: str
) -> None:
    for said in two_ranks.run("all_reduce_cases:refused", 2, changes, environment):
        assert words in said
        assert "\n" not in said


def test_alone_there_is_nothing_to_choose() -> None:
    for key, value in (("communication.algorithm", "ring"), ("communication.nccl", {"proto": "LL"})):
        assert f"{key} is about several ranks" in optim_cases.refused(0, 1, {key: value})


# --- ranks that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_straggling_rank_changes_nothing(four_ranks: Any, algorithm: str) -> None:
    punctual = four_ranks.run("all_reduce_cases:straggling", 4, algorithm, None, 0.0)
    late = four_ranks.run("all_reduce_cases:straggling", 4, algorithm, 2, 0.03)
    assert late == punctual
    assert all(rank == punctual[0] for rank in punctual)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_rank_that_dies_inside_the_exchange_ends_the_others_with_an_error(algorithm: str) -> None:
    """The healthy control trains; with a dead rank every other one says so, by the group's timeout at the latest."""
    found = all_reduce_cases.failing(algorithm, 3, "dies", timeout_s=6)
    assert sorted(found) == [0, 1]
    for said, took in found.values():
        assert said.startswith("ExchangeFailed: averaging gradients failed on rank")
        assert "\n" not in said
        assert took < 30


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_rank_that_hangs_is_not_waited_for_longer_than_the_timeout(algorithm: str) -> None:
    assert {said for said, _ in all_reduce_cases.failing(algorithm, 3, None, timeout_s=6).values()} == {
        "trained"
    }
    found = all_reduce_cases.failing(algorithm, 3, "hangs", timeout_s=4)
    assert sorted(found) == [0, 1]
    for said, took in found.values():
        assert said.startswith("ExchangeFailed")
        assert 2 < took < 30
