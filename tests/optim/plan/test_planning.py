"""Plans: what they hold together, why others lost, the front, limits, days and price, and their JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from plan_problems import DENSE, MIXTURE, cluster, problem

import trine
from trine.optim.plan.constraints import kept
from trine.optim.plan.layouts import DEFAULTS, Layouts
from trine.optim.plan.limits import limits_of
from trine.optim.plan.memory import memory_of
from trine.optim.plan.memory_traits import memory_spread
from trine.optim.plan.pareto import Staircase, front
from trine.optim.plan.plan_json import plan_to_dict
from trine.optim.plan.planning import Plan, plan
from trine.optim.plan.reasons import bound_by, layout_words, lost_by, too_large
from trine.optim.plan.refine import idle_of, work_of
from trine.optim.plan.saving_constraints import SAVINGS
from trine.optim.plan.step import predict, rank_times
from trine.optim.plan.workload import Workload
from trine.optim.plan.workload_files import workload_of
from trine.record.errors import UsageError


@pytest.fixture(scope="module")
def tight() -> Plan:
    """Where the best has to save."""
    return plan(DENSE, cluster(6.0), global_batch=64, stack="torchtitan", tokens=1e9, price=2.0, largest=True)


def test_a_plan_holds_together(tight: Plan) -> None:
    steps = [one.step.value for one in tight.ranked]
    assert steps == sorted(steps) and len(steps) > 3
    for one in (*tight.ranked, *tight.front):
        assert sum(one.parts_s.values()) == pytest.approx(one.step.value)
        assert sum(one.memory_bytes.values()) == pytest.approx(one.peak.value)
        assert one.peak.value <= 0.9 * 6 * 2**30
        for number in (one.step, one.tokens_per_s, one.mfu, one.peak):
            assert number.low < number.value < number.high
        assert one.tokens_per_s.value == pytest.approx(64 * 4096 / one.step.value)
        assert one.mfu.value * one.step.value == pytest.approx(one.mfu.low * one.step.high)
        assert 0 < one.mfu.value < 1
    degrees = {
        tuple(one.layout[name] for name in ("data", "context", "tensor", "expert", "pipeline"))
        for one in tight.ranked
    }
    assert len(degrees) == len(tight.ranked), "one row for each way to divide the devices"
    assert tight.best.lost_by is None and all(one.lost_by for one in tight.ranked[1:])


def test_mfu_is_by_its_convention(tight: Plan) -> None:
    flops = DENSE.model_flops("megatron") * 64 * 4096 / 4
    assert tight.best.mfu.value == pytest.approx(flops / tight.best.step.value / 312e12)


def test_the_front_falls_in_memory_as_it_grows_in_time(tight: Plan) -> None:
    steps = [one.step.value for one in tight.front]
    peaks = [one.peak.value for one in tight.front]
    assert len(steps) > 2 and steps == sorted(steps) and peaks == sorted(peaks, reverse=True)


def test_alternatives_change_what_they_say(tight: Plan) -> None:
    changed = {one.column for one in tight.alternatives}
    assert {"recompute", "micro_batch", "zero_stage"} <= changed
    for one in tight.alternatives:
        assert one.layout[one.column] == one.value != tight.best.layout[one.column]
        assert one.fits == (one.peak.value <= tight.problem.capacity_bytes)
        assert one.fits != one.reason.startswith("does not fit: ")
        assert one.reason.endswith("other numbers") == (
            one.fits and one.column in ("precision", "compression")
        )


def test_alternatives_can_be(tight: Plan) -> None:
    """Each keeps what offload and recomputation ask for, and fits hosts as well as devices, or says that it does not."""
    moved = plan(
        DENSE, cluster(6.0), global_batch=64, stack="deepspeed", top=1, pins=["parameter_offload=cpu"]
    )
    some_layers = plan(
        DENSE, cluster(6.0), global_batch=64, stack="torchtitan", top=1, pins=["recompute=budget"]
    )
    for found in (tight, moved, some_layers):
        layouts = Layouts.of(**{name: [one.layout[name] for one in found.alternatives] for name in DEFAULTS})
        assert len(layouts) and kept(SAVINGS, found.problem, layouts.columns).all()
    assert not any(one.column == "zero_stage" for one in moved.alternatives)  # 3 is what moves parameters
    assert any(one.column == "pipeline" for one in some_layers.alternatives)


def test_of_a_number_only_its_neighbours_are_shown(tight: Plan) -> None:
    own = int(tight.best.layout["micro_batch"])
    shown = [int(one.value) for one in tight.alternatives if one.column == "micro_batch"]
    assert (
        len([value for value in shown if value < own]) <= 1
        and len([value for value in shown if value > own]) <= 1
    )


def test_days_and_price_follow_from_the_step(tight: Plan) -> None:
    cost = tight.best.cost
    assert cost is not None and cost.price is not None
    seconds = 1e9 / (64 * 4096) * tight.best.step.value
    assert cost.days.value == pytest.approx(seconds / 86400)
    assert cost.device_hours.value == pytest.approx(4 * seconds / 3600)
    assert cost.price.value == pytest.approx(8 * seconds / 3600)
    assert cost.price.high / cost.price.value == pytest.approx(tight.best.step.high / tight.best.step.value)


def test_limits_are_the_last_that_fit(tight: Plan) -> None:
    best = Layouts.of(**tight.best.layout)
    found = limits_of(tight.problem, best)
    assert found == tight.limits and found.micro_batch is not None and found.context is not None

    def peak(layout: Layouts, sequence: int = 4096) -> float:
        asked = tight.problem
        workload = asked.workload.with_changes(sequence=sequence)
        return float(memory_of(workload, asked.cluster, asked.stack, layout).peak_bytes[0])

    room = tight.problem.capacity_bytes
    size = found.micro_batch.value
    assert peak(best.with_changes(micro_batch=size)) <= room < peak(best.with_changes(micro_batch=size + 1))
    tokens, ones = found.context.value, best.with_changes(micro_batch=1)
    assert peak(ones, tokens) <= room < peak(ones, tokens + 256)
    spread = memory_spread()
    for limit, factor in ((found.context.low, spread.high), (found.context.high, spread.low)):
        assert factor * peak(ones, limit) <= room < factor * peak(ones, limit + 256)
    assert found.context.low < tokens < found.context.high
    assert tight.largest is not None and tight.largest.micro_batch is not None
    assert tight.largest.micro_batch.value >= size


def test_the_best_pipelines_are_simulated_and_agree_with_the_formula() -> None:
    found = plan(DENSE, cluster(80.0), global_batch=16, stack="torchtitan", pins=["pipeline=2,4"], top=3)
    for one in found.ranked:
        assert one.source == "simulator"
        layout = Layouts.of(**one.layout)
        formula = predict(DENSE, found.problem.cluster, found.problem.stack, layout)
        assert one.step.value == pytest.approx(float(formula.step_s[0]), rel=0.02)
    with_one = plan(DENSE, cluster(80.0), global_batch=16, stack="torchtitan", pins=["pipeline=1"], top=1)
    assert with_one.best.source == "formula"


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 3), (3, 2)])
def test_stages_hold_the_whole_model(ranks: int, chunks: int) -> None:
    asked = problem()
    layouts = Layouts.of(pipeline=ranks, chunks=chunks)
    times = rank_times(DENSE, asked.cluster, asked.stack, layouts)
    work = work_of(times, layouts, 0)
    assert len(work.forward_s) == ranks * chunks and min(work.forward_s) > 0
    ends = [float((getattr(times, end).forward_s - times.ends.forward_s)[0]) for end in ("first", "last")]
    layer = float(times.middle.forward_s[0] / times.middle_layers[0])
    assert sum(work.forward_s) == pytest.approx(4 * layer + sum(ends))


def test_stages_without_layers_take_no_time_beyond_their_embedding_or_head() -> None:
    llama = workload_of("llama3-8b")  # 32 layers are 34 stages with an embedding and a head
    layouts = Layouts.of(pipeline=2, chunks=17, microbatches=8, schedule="interleaved")
    asked = problem(workload=llama)
    work = work_of(rank_times(llama, asked.cluster, asked.stack, layouts), layouts, 0)
    assert 0 <= work.input_s[0] < 1e-12 and min(work.forward_s) >= 0
    assert work.forward_s[0] < 0.1 * work.forward_s[1] < work.forward_s[-1]
    assert idle_of(llama, asked.cluster, asked.stack, layouts, 0) is not None


def test_long_steps_are_continued_from_short_ones() -> None:
    asked = problem()
    layouts = Layouts.of(pipeline=4, microbatches=[400, 4000], schedule="1f1b")
    short, long = (idle_of(DENSE, asked.cluster, asked.stack, layouts, row) for row in (0, 1))
    assert short is not None and long is not None
    assert short.exact and not long.exact
    assert long.bubble_s == pytest.approx(short.bubble_s, rel=1e-3)
    assert idle_of(DENSE, asked.cluster, asked.stack, Layouts.of(), 0) is None


def test_many_devices_have_an_interval_of_their_steps() -> None:
    large = plan(
        "llama3-8b", "dgx-h100", devices=128, global_batch=256, top=1, pins=["tensor=8", "pipeline=1"]
    )
    assert large.jitter is not None
    assert float(large.jitter.low_s) < large.best.step.value < float(large.jitter.high_s)
    alone = predict(
        large.problem.workload, large.problem.cluster, large.problem.stack, Layouts.of(**large.best.layout)
    )
    assert large.best.step.high > float(alone.high_s[0])
    assert large.best.step.low < float(alone.low_s[0]) * 1.001


def test_what_goes_beyond_the_software_is_said() -> None:
    found = plan(DENSE, cluster(80.0), global_batch=8, pins=["schedule=zb-v", "pipeline=2"])
    assert found.best.beyond == ("schedule=zb-v",)
    assert any("does not offer schedule=zb-v" in text for text in found.assumptions)
    remote = plan(DENSE, cluster(80.0), global_batch=8, pins=["optimizer_offload=remote"], stack="trine")
    assert remote.best.remote_bytes > 0 and remote.best.beyond == ("optimizer_offload=remote",)


def test_the_public_name_takes_objects_and_pins_as_a_mapping() -> None:
    found = trine.plan(
        MIXTURE,
        cluster(80.0),
        global_batch=8,
        pins={"expert": [2, 4], "schedule": "1f1b", "sequence": True},
        top=2,
    )
    assert {one.layout["expert"] for one in found.ranked} <= {2, 4}
    assert all(one.layout["tensor"] == 2 for one in found.ranked)
    assert (
        trine.plan(DENSE, cluster(), sequence=8192, global_batch=8, top=1).problem.workload.sequence == 8192
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"top": 0}, "top must be at least 1"),
        ({"price": 2.0}, "needs the tokens"),
        ({"tokens": -1.0}, "tokens must be a positive number"),
        ({"tokens": 1e9, "price": -1.0}, "price must be"),
        ({"tokens": 1e300}, "tokens must be a positive number up to 1e+18"),
        ({"tokens": 1e9, "price": 1e300}, "from 0 to 1e+09"),
        ({"memory_headroom": 1.0}, "memory headroom must be"),
        ({"global_batch": 0}, "global batch must be"),
        ({"devices": 3}, "no whole number of test cluster's nodes"),
        ({"stack": "none such"}, "no software stack"),
    ],
)
def test_bad_arguments_end_in_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(DENSE, cluster(), **changes)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_buckets_cost_latency_where_small_and_hide_nothing_where_one() -> None:
    asked = problem(stack="torchtitan")
    whole = 4 * DENSE.parameters

    def exposed(bucket: int, stage: int = 0) -> float:
        layout = Layouts.of(data=4, microbatches=2, bucket_bytes=bucket, zero_stage=stage)
        return float(predict(DENSE, asked.cluster, asked.stack, layout).parts["exposed_gradients"][0])

    assert exposed(2**20) > exposed(25 * 2**20) > 0
    share = asked.stack.exposed
    assert exposed(2 * whole) == pytest.approx(exposed(0) / min(share, 1.0), rel=1e-6)


def test_sharded_gradients_are_reduced_with_each_micro_batch_behind_its_backward() -> None:
    asked = problem(stack="torchtitan")

    def exposed(stage: int, microbatches: int, workload: Workload = DENSE) -> float:
        layout = Layouts.of(data=4, microbatches=microbatches, zero_stage=stage)
        return float(predict(workload, asked.cluster, asked.stack, layout).parts["exposed_gradients"][0])

    def each(workload: Workload = DENSE) -> float:
        return exposed(2, 2, workload) - exposed(2, 1, workload)

    assert exposed(1, 8) == pytest.approx(exposed(1, 1))
    assert exposed(2, 1) == pytest.approx(exposed(1, 1))
    # The reduce-scatter eight times, the gather of new parameters once.
    assert exposed(2, 8) - exposed(2, 1) == pytest.approx(7 * each())
    # Of a step's one synchronisation two thirds are the reduction, in 32 bits, and the rest the gather, in 16. A long backward
    # hides it and is slowed by it; a short one does not.
    reduction = 2 / 3 * exposed(2, 1)
    assert 0 < each() < 0.5 * reduction < each(replace(DENSE, sequence=16)) <= reduction * (1 + 1e-6)


# --- JSON ---------------------------------------------------------------------------------------


def test_the_json_is_strict_and_gives_the_layouts_back(tight: Plan) -> None:
    content = json.loads(json.dumps(plan_to_dict(tight), allow_nan=False))
    assert content["schema"] == "trine.plan/1"
    for entry, one in zip(content["rows"], tight.ranked, strict=True):
        assert Layouts.of(**entry["layout"]).row(0) == one.layout
        assert entry["step_s"]["value"] == one.step.value
        assert entry["mfu"]["low"] < entry["mfu"]["value"] < entry["mfu"]["high"]
        assert entry["memory"]["peak_low_bytes"] < one.peak.value < entry["memory"]["peak_high_bytes"]
    for entry in content["alternatives"]:
        assert entry["step_s"]["low"] < entry["step_s"]["value"] < entry["step_s"]["high"]
        assert entry["peak_low_bytes"] < entry["peak_bytes"] < entry["peak_high_bytes"]
    assert content["limits"]["context_tokens"]["low"] < content["limits"]["context_tokens"]["high"]
    assert content["workload"]["layers"] == 4 and content["cluster"]["devices"] == 4
    assert content["options"] == {
        "devices": 4,
        "global_batch": 64,
        "global_batch_is_usual": False,
        "sequence": 4096,
        "memory_headroom": 0.1,
        "pins": {},
        "searched": [],
    }
    assert content["jitter"] is None and "no-jitter" in {each["id"] for each in content["data_quality"]}
    assert content["search"]["weighed"] <= content["search"]["configurations"]
    assert content["search"]["configurations_per_minute"] > 0


def test_constants_that_no_run_was_fitted_on_are_a_warning(tight: Plan) -> None:
    assert tight.unfitted == ()  # torchtitan, Ampere, NVLink, InfiniBand
    other = cluster(80.0).with_changes(device=cluster().device.with_changes(family="none such"))
    found = plan(DENSE, other, global_batch=8, stack="trine", top=1, pins=["pipeline=1", "recompute=none"])
    assert len(found.unfitted) == 2 and all(text in found.assumptions for text in found.unfitted)
    warned = [each for each in plan_to_dict(found)["data_quality"] if each["severity"] == "warning"]
    assert [each["id"] for each in warned] == ["not-fitted", "not-fitted"]


def test_what_the_json_lacks_has_a_reason() -> None:
    content = plan_to_dict(plan(DENSE, cluster(80.0), global_batch=8, top=1, pins=["recompute=none"]))
    assert content["rows"][0]["cost"] is None and content["largest"] is None
    assert {each["id"] for each in content["data_quality"]} == {"no-tokens", "no-jitter", "no-largest"}
    assert content["options"]["pins"] == {"recompute": ["none"]}


# --- words --------------------------------------------------------------------------------------


def test_a_loser_lost_by_the_part_that_grew_most() -> None:
    best = {"compute": 0.8, "pipeline_bubble": 0.2}
    assert lost_by({"compute": 0.8, "pipeline_bubble": 0.32}, best) == "+12 % pipeline bubble"
    assert lost_by({"compute": 0.85, "pipeline_bubble": 0.18}, best) == "+5.0 % compute"
    assert lost_by(best, best) == "as fast"
    assert lost_by({"compute": 0.7, "pipeline_bubble": 0.2}, best) == "10 % faster"


def test_what_bounds_and_what_is_too_large() -> None:
    parts = {"compute": 0.71, "tensor_communication": 0.09, "overhead": 0.2}
    assert bound_by(parts) == "compute 71 %, overhead 20 %"
    asked = problem(80.0, headroom=0.1)
    words = too_large(92 * 2**30, {"activations": 41.0 * 2**30, "optimizer": 2.0**30}, asked)
    assert words == "does not fit: 92.0 of 72.0 GiB, activations 41.0 GiB"


def test_a_layout_in_words_leaves_out_what_is_usual() -> None:
    row = Layouts.of(
        tensor=8,
        pipeline=4,
        data=2,
        schedule="interleaved",
        chunks=5,
        micro_batch=2,
        microbatches=16,
        zero_stage=1,
    ).row(0)
    assert (
        layout_words(row)
        == "tensor 8 · pipeline 4 · data 2 · interleaved x5 · 16 micro-batches of 2 · ZeRO 1"
    )
    assert layout_words(Layouts.of().row(0)) == "one device · 1 micro-batch of 1"
    away = Layouts.of(
        data=4, zero_stage=3, shard=2, optimizer_offload="cpu", recompute="budget", recomputed_layers=3
    )
    assert layout_words(away.row(0)).endswith(
        "ZeRO 3 in groups of 2 · recompute budget 3 layers · optimizer on cpu"
    )


# --- arithmetic ---------------------------------------------------------------------------------

costs = some.lists(some.tuples(some.integers(0, 9), some.integers(0, 9)), min_size=1, max_size=30)


@given(costs)
def test_the_front_is_what_no_other_beats(points: list[tuple[int, int]]) -> None:
    first, second = (np.asarray(column, dtype=float) for column in zip(*points, strict=True))
    kept = {(first[row], second[row]) for row in front(first, second)}
    expected = {
        point
        for point in points
        if not any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in points)
    }
    assert kept == expected


@given(costs, some.tuples(some.integers(0, 9), some.integers(0, 9)))
def test_a_staircase_beats_what_any_of_its_points_beats(
    points: list[tuple[int, int]], other: tuple[int, int]
) -> None:
    staircase = Staircase()
    for point in points:
        staircase.add(*(np.asarray([value], dtype=float) for value in point))
    beaten = staircase.beats(*(np.asarray([value], dtype=float) for value in other))[0]
    assert beaten == any(a <= other[0] and b <= other[1] for a, b in points)


def test_steps_that_read_alike_are_not_said_to_lie_between_each_other() -> None:
    from trine.analyzers.reports.plan import _jitter_words

    assert _jitter_words(3.86, 3.93) == "Steps of one run vary: nine of ten between 3.86 s and 3.93 s."
    assert _jitter_words(3.4801, 3.4845) == (
        "Steps of one run hardly vary: nine of ten lie within 0.1% of each other, at 3.48 s."
    )


def test_without_headroom_a_plan_may_take_what_the_driver_gives() -> None:
    given, roomy = problem(80.0, headroom=0.0), problem(80.0, headroom=0.1)
    layout = Layouts.of(data=8)
    usable = memory_of(given.workload, given.cluster, given.stack, layout).capacity_bytes
    assert given.capacity_bytes == usable < given.cluster.device.memory_bytes
    assert roomy.capacity_bytes == 0.9 * roomy.cluster.device.memory_bytes
