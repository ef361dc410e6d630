"""The search finds what weighing every layout one by one finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_problems import MIXTURE, problem

from trine.optim.plan import search
from trine.optim.plan.layouts import OFFLOADED, SCHEDULES
from trine.optim.plan.memory import memory_of
from trine.optim.plan.pareto import front
from trine.optim.plan.problem import SEARCHABLE, Problem
from trine.optim.plan.search import Found, Searcher
from trine.optim.plan.space import savings, shapes
from trine.optim.plan.step import predict

CASES = {
    "roomy": problem(80.0),
    "tight": problem(4.0),
    "tighter": problem(3.3),
    "hardly anything fits": problem(2.95),
    "everything that is priced": problem(3.1, "compression=none,int8", stack="trine"),
    "all that may be searched": replace(
        problem(3.1, "pipeline=1", "micro_batch=1,2", stack="trine"), searched=SEARCHABLE
    ),
    "several precisions": problem(4.5, "precision=bf16,fp32", "pipeline=1,2"),
    "experts": problem(3.0, workload=MIXTURE),
    "all recomputed": problem(3.5, "recompute=full"),
    "a budget alone": problem(4.0, "recompute=budget"),
    "two kinds of recomputation": problem(3.6, "recompute=selective,budget"),
    "offloaded": problem(4.0, "optimizer_offload=cpu,nvme", "zero_stage=1,3", stack="deepspeed"),
    "kept on devices": problem(6.5, "optimizer_offload=none", "parameter_offload=none", stack="deepspeed"),
    "hosts that hold little": problem(5.0, stack="deepspeed", host_memory_bytes=2**31),
    "hosts that hold what comes from other nodes": problem(
        4.2, "optimizer_offload=none,remote", stack="deepspeed", host_memory_bytes=2**31
    ),
    "one node": problem(4.7, nodes=1),
    "three nodes": problem(3.6, nodes=3, batch=24),
}


#: Weighed in seconds, not tenths of one.
SLOW = {
    "experts",
    "a budget alone",
    "kept on devices",
    "several precisions",
    "two kinds of recomputation",
    "three nodes",
    "roomy",
    "tighter",
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that only hold where all shapes are expanded at once would go unseen on small spaces."""
    monkeypatch.setattr(search, "_BATCH", 40)


def weighed(asked: Problem) -> tuple[Found, np.ndarray]:
    """Every configuration there is with what it takes, and whether it fits."""
    every, _ = savings(asked, shapes(asked), ("recompute", *OFFLOADED))
    times = predict(asked.workload, asked.cluster, asked.stack, every)
    memory = memory_of(asked.workload, asked.cluster, asked.stack, every)
    hosts = memory.host_bytes + memory.remote_bytes <= (asked.cluster.host_memory_bytes or np.inf)
    fits = hosts & (memory.peak_bytes <= asked.capacity_bytes)
    return Found(every, times.step_s, memory.peak_bytes), fits


def way(found: Found, row: int) -> tuple[int, ...]:
    return tuple(
        int(found.layouts[name][row]) for name in ("data", "context", "tensor", "expert", "pipeline")
    )


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(asked, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, asked in CASES.items()
    ],
)
@pytest.mark.slow
def test_the_search_finds_what_weighing_everything_finds(asked: Problem) -> None:
    every, fits = weighed(asked)
    best: dict[tuple[int, ...], tuple[float, float]] = {}
    for row in np.flatnonzero(fits):
        cost = (round(float(np.log(every.step_s[row])), 8), float(every.peak_bytes[row]))
        best[way(every, row)] = min(best.get(way(every, row), (np.inf, np.inf)), cost)
    expected = sorted(np.exp(cost[0]) for cost in best.values())
    assert expected, "a case in which nothing fits shows nothing"
    searcher = Searcher(asked, shapes(asked))
    for count in (1, 3, len(expected) + 5):
        found = searcher.fastest(count)
        assert found.step_s == pytest.approx(expected[:count], rel=1e-7)
        for row in range(len(found.step_s)):
            assert found.peak_bytes[row] == pytest.approx(best[way(found, row)][1])
    assert searcher.tally.configurations == len(every.step_s)


@pytest.mark.parametrize(
    "name", ["offloaded", "hosts that hold little", pytest.param("experts", marks=pytest.mark.slow)]
)
def test_the_front_is_that_of_everything(name: str) -> None:
    every, fits = weighed(CASES[name])
    mine = Searcher(CASES[name], shapes(CASES[name])).front(offload=True)
    kept = every.take(fits)
    expected = kept.take(front(kept.step_s, kept.peak_bytes))
    assert mine.step_s == pytest.approx(expected.step_s)
    assert mine.peak_bytes == pytest.approx(expected.peak_bytes)


@pytest.mark.parametrize(
    "name",
    [
        "tight",
        "offloaded",
        pytest.param("experts", marks=pytest.mark.slow),
        "everything that is priced",
    ],
)
def test_a_shape_is_a_bound_for_all_that_it_can_become(name: str) -> None:
    asked = CASES[name]
    searcher = Searcher(asked, shapes(asked))
    children, of = savings(asked, searcher.shapes, ("recompute", *OFFLOADED))
    step_s, peak_bytes = searcher.step_s(children), searcher.peak_bytes(children)
    assert (step_s >= searcher.fastest_s[of] * (1 - 1e-12)).all()
    least = searcher.least_bytes(searcher.shapes)
    assert (peak_bytes >= least[of] * (1 - 1e-12)).all()


def test_pruning_leaves_most_of_a_large_space_uncomputed() -> None:
    asked = problem(3.4, stack="trine", nodes=8, batch=16)
    searcher = Searcher(asked, shapes(asked))
    assert len(searcher.fastest(1).step_s) == 1
    assert searcher.tally.weighed < searcher.tally.configurations / 4


def test_of_equally_fast_layouts_the_smallest_wins() -> None:
    # GPipe and 1F1B leave the same idle; GPipe holds all micro-batches at once.
    asked = problem(80.0, "pipeline=2", "schedule=gpipe,1f1b", "micro_batch=1", "recompute=none")
    found = Searcher(asked, shapes(asked)).fastest(20)
    assert (found.layouts["schedule"] == SCHEDULES.index("1f1b")).all()


def test_every_layout_keeps_the_batch_and_the_devices() -> None:
    for asked in CASES.values():
        found = shapes(asked)
        assert (found.devices == asked.devices).all()
        assert (found.global_batch == asked.global_batch).all()
        for name, values in asked.pins.items():
            if name not in ("recompute", *OFFLOADED):
                assert np.isin(found[name], values).all()
