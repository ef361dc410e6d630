"""What a plan says to its reader: a plain winner, a batch that keeps a pipeline busy, tables that can be read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_problems import DENSE, cluster, problem

from trine.analyzers.reports.document import Table
from trine.analyzers.reports.plan import compose, limit_words, render_text
from trine.analyzers.units import duration
from trine.optim.plan.busier import LARGEST_SHARE, busier
from trine.optim.plan.candidates import NEW_SOFTWARE
from trine.optim.plan.constants import spread
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.limits import Limit
from trine.optim.plan.plainest import plainest, plainness
from trine.optim.plan.plan_json import plan_to_dict
from trine.optim.plan.planning import ORDER_KNOWN_TO, plan
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


@pytest.mark.slow
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


def test_rows_of_step_time_against_memory_can_be_told_apart() -> None:
    # One device saves by smaller micro-batches alone: all other words of these rows are the same.
    found = plan("gpt2", "dgx-h100", devices=1, global_batch=32, pins=["recompute=none"])
    (front,) = [section for section in compose(found).sections if section.id == "front"]
    table = front.blocks[0]
    assert isinstance(table, Table) and len(table.rows) > 3
    words = [row[1:4] for row in table.rows]
    assert len({(layout, rest) for layout, _, rest in words}) < len(words) == len(set(words))


@pytest.mark.slow
def test_rows_whose_order_is_not_known_are_named_and_so_is_the_next_command() -> None:
    found = plan("llama3-70b", "dgx-h100", devices=64, pins=["recompute=none"])
    limit = found.best.step.value * (1 + ORDER_KNOWN_TO)
    assert [one.step.value <= limit for one in found.ranked] == [
        rank < found.tied for rank in range(len(found.ranked))
    ]
    shown = " ".join(render_text(found).split())
    assert 1 < found.tied < 10 and f"{found.tied} lie within 2.9 %" in shown
    assert "trine export plan.json --to megatron" in shown
    sources = [one.source for one in found.ranked if one.layout["pipeline"] != 1]
    assert {"simulator", "formula"} == set(sources) and "pipelines simulated, but of row" in shown
    assert plan_to_dict(found)["tied"] == {"rows": found.tied, "order_known_to": ORDER_KNOWN_TO}
    alone = plan(DENSE, cluster(80.0), global_batch=8, top=1)
    assert alone.tied == 1 and "their order" not in render_text(alone)


def test_how_well_the_order_is_known_is_what_the_page_says() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "plan.md").read_text(encoding="utf-8")
    lost = re.search(r"groups of one node \| [^|]*\| [^(]*\(left out ([\d.]+) %\)", page)
    assert lost is not None and float(lost[1]) == pytest.approx(100 * ORDER_KNOWN_TO)


@pytest.mark.parametrize(("stack", "is_known"), [("torchtitan", True), ("trine", False), ("pytorch", False)])
def test_intervals_of_software_without_a_published_run_are_wider_and_say_so(
    stack: str, is_known: bool
) -> None:
    found = plan(DENSE, cluster(80.0), global_batch=8, stack=stack, top=3)
    step, all_tables = found.best.step, spread()
    least = all_tables.low if is_known else min(all_tables.low, NEW_SOFTWARE.low)
    most = all_tables.high if is_known else max(all_tables.high, NEW_SOFTWARE.high)
    assert (step.low / step.value, step.high / step.value) == pytest.approx((least, most))
    shown = render_text(found)
    assert ("nine of ten published runs lay that no constant" in shown) == is_known
    assert shown.count(f"no published run is of {stack}") == (0 if is_known else 4)


def test_pins_are_shown_with_their_values() -> None:
    pins = {"pipeline": 1, "recompute": ["none", "full"]}
    facts = dict(compose(plan(DENSE, cluster(80.0), global_batch=8, pins=pins, top=1)).facts)
    assert facts["pinned"] == "pipeline=1; recompute=none,full"


def test_a_micro_batch_that_may_not_fit_is_not_from_nought() -> None:
    layout = Layouts.of().row(0)
    assert limit_words(Limit(1, 0, 1, layout)) == "1 (or none)"
    assert limit_words(Limit(1, 0, 2, layout)) == "1 (up to 2, or none)"
    assert limit_words(Limit(4, 3, 5, layout)) == "4 (3 to 5)"


def test_each_row_says_how_many_layers_its_stages_have() -> None:
    found = plan(DEEP, cluster(80.0), global_batch=8, pins=["pipeline=4"], top=3)
    rows = plan_to_dict(found)["rows"]
    for row in rows:
        assert sum(row["stage_layers"]) == 48
        assert len(row["stage_layers"]) == 4 * row["layout"]["chunks"]
    odd = plan(
        DENSE.with_changes(layers=7),
        cluster(80.0),
        global_batch=8,
        pins=["pipeline=2", "schedule=1f1b"],
        top=1,
    )
    assert plan_to_dict(odd)["rows"][0]["stage_layers"] == [4, 3]
