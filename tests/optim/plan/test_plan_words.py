"""What a plan says to its reader: a plain winner, a batch that keeps a pipeline busy, tables that can be read."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from plan_problems import DENSE, cluster, problem

from trine.analyzers.reports.plan import render_text
from trine.analyzers.units import duration
from trine.optim.plan.busier import LARGEST_SHARE, busier
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.plainest import plainest, plainness
from trine.optim.plan.plan_json import plan_to_dict
from trine.optim.plan.planning import plan
from trine.optim.plan.reasons import SAME
from trine.optim.plan.search import Searcher, Tally
from trine.optim.plan.space import shapes
from trine.optim.plan.step import predict
from trine.record.errors import UsageError

DEEP = DENSE.with_changes(name="deep", layers=48)


def test_of_layouts_that_are_as_fast_the_one_with_fewer_chunks_wins() -> None:
    asked = problem(80.0, "pipeline=2", "tensor=2", workload=DEEP, stack="megatron-core", batch=512)
    searcher = Searcher(asked, shapes(asked))
    many = Layouts.of(pipeline=2, tensor=2, chunks=24, schedule="interleaved", microbatches=512, sequence=1)
    row = plainest(searcher, many.row(0))
    plain = Layouts.of(**row)
    assert row["chunks"] < 24 and row["tensor"] == 2 and row["microbatches"] == 512  # type: ignore[operator]
    assert searcher.step_s(plain)[0] <= searcher.step_s(many)[0] * (1 + SAME)


def test_a_slower_layout_is_not_taken_for_plainness() -> None:
    asked = problem(80.0, "pipeline=4", workload=DEEP, stack="megatron-core", batch=16)
    searcher = Searcher(asked, shapes(asked))
    best = searcher.fastest(1).layouts
    row = plainest(searcher, best.row(0))
    assert row["chunks"] > 1  # type: ignore[operator]
    assert searcher.step_s(Layouts.of(**row))[0] <= searcher.step_s(best)[0] * (1 + SAME)


def test_plainness_counts_kinds_of_parallelism_before_chunks() -> None:
    rows = [
        Layouts.of(data=4),
        Layouts.of(data=4, zero_stage=1),
        Layouts.of(data=2, pipeline=2),
        Layouts.of(data=2, pipeline=2, chunks=2, schedule="interleaved"),
        Layouts.of(tensor=2, pipeline=2),
    ]
    found = [plainness(layout.row(0)) for layout in rows]
    assert found == sorted(found) and len(set(found)) == len(found)


def test_the_first_row_is_as_fast_as_any() -> None:
    found = plan(DEEP, cluster(80.0), global_batch=64, stack="megatron-core", top=10)
    steps = [one.step.value for one in found.ranked]
    assert steps[1:] == sorted(steps[1:])
    assert steps[0] <= min(steps) * (1 + SAME)


def test_an_idle_pipeline_names_the_batch_that_would_keep_it_busy() -> None:
    pins = ["pipeline=4", "schedule=1f1b", "micro_batch=1", "tensor=1", "context=1"]
    found = plan(DEEP, cluster(80.0), global_batch=4, stack="megatron-core", pins=pins, top=1)
    assert found.busier is not None
    # Of 1F1B (p - 1) / (m + p - 1), less what else a step has: with 4 ranks 3 / 7 at 4 micro-batches, 3 / 35 at 32.
    assert 0.35 < found.busier.idle < 3 / 7
    batch = found.busier.global_batch
    shown = render_text(found)
    assert "The pipeline is idle" in shown and f"with a global batch of {batch} (" in shown
    assert json.loads(json.dumps(plan_to_dict(found)))["busier"]["global_batch"] == batch
    layout = Layouts.of(**{**found.best.layout, "microbatches": [batch // 2, batch]})
    times = predict(DEEP, found.problem.cluster, found.problem.stack, layout)
    before, then = np.broadcast_to(times.parts["pipeline_bubble"], 2) / times.step_s
    assert then == pytest.approx(found.busier.then) and then <= LARGEST_SHARE < before
    assert batch in (16, 32)


def test_a_busy_pipeline_and_one_without_stages_say_nothing() -> None:
    asked = problem(80.0)
    assert busier(asked, Layouts.of(pipeline=4).row(0), {"compute": 1.0, "pipeline_bubble": 0.1}) is None
    assert plan(DENSE, cluster(80.0), global_batch=8, pins=["pipeline=1"], top=1).busier is None


def test_no_more_is_computed_than_there_is() -> None:
    assert Tally(configurations=1176, weighed=1556).computed == 1176
    found = plan(DENSE, cluster(80.0), global_batch=8, pins=["pipeline=1", "tensor=1", "recompute=none"])
    assert found.tally.weighed >= found.tally.configurations
    assert f"{found.tally.configurations:,} configurations, all of them computed" in render_text(found)
    some = replace(found, tally=Tally(shapes=10, configurations=100, weighed=20, seconds=1.0))
    assert "100 configurations, 20 of them computed" in render_text(some)


def test_tables_of_layouts_can_be_read() -> None:
    wide = plan(
        DEEP.with_changes(heads=64, kv_heads=64), cluster(8.0, nodes=16, per_node=8), global_batch=256
    )
    shown = render_text(wide)
    assert max(map(len, shown.splitlines())) <= 100
    cut = [line for line in shown.splitlines() if "…" in line]
    assert not cut, cut


def test_more_devices_than_any_job_has_are_refused() -> None:
    with pytest.raises(UsageError, match="200000000000 devices are more than any job has"):
        plan(DENSE, cluster(80.0), devices=2 * 10**11)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (999.0, "999 s"),
        (1200.0, "20.0 min"),
        (3599.9, "1.00 h"),
        (19_450.0, "5.40 h"),
        (359_000.0, "99.7 h"),
        (86_400 * 30.0, "30.0 days"),
    ],
)
def test_long_steps_are_in_minutes_hours_and_days(seconds: float, words: str) -> None:
    assert duration(seconds * 1e9) == words
