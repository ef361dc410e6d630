"""Transformations of a step that is made by hand, on a machine whose calibration is made by hand: answers are arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
from whatif_steps import ALPHA, BETA, calibration, layer, memory, product, run

from trine.optim.plan.whatif.build import Steady
from trine.optim.plan.whatif.graph import HOST, LINK, Pipeline
from trine.optim.plan.whatif.operators import Product, operator_of
from trine.optim.plan.whatif.times import OperationTimes
from trine.optim.plan.whatif.transforms import transforms
from trine.optim.plan.whatif.transforms._pace import Pace, pace_of
from trine.record.errors import UsageError


def test_the_replay_of_a_step_is_the_step_and_its_error_comes_first() -> None:
    found = run().what_if({"loader_wait": False})
    assert found.replay_error == pytest.approx(0.0, abs=1e-9)
    assert found.step.mid - found.predicted.mid == pytest.approx(0.01)
    assert found.gain.low <= found.gain.mid <= found.gain.high
    assert str(found).startswith("loader_wait = False: ")


def test_products_in_bf16_take_their_calibrated_ratio_and_casts_come_between() -> None:
    before = run()
    found = before.what_if({"precision.dtype": "bf16"})
    products = sum(task.seconds for task in before.graph.steps[0].ranks[0].tasks if task.kind == "product")
    # Elements: between products three passes of gelu and two of multiply, half of each saved; activations and weights of
    # each block and of the head cast in forward, and in backward their gradients, from half the bytes.
    between = 3 * 128 * 256 * (3 + 1 + 1) / 2
    casts = 3 * (128 * 64 + 2 * 64 * 256) + 128 * 64 + 64 * 512
    assert found.gain.mid == pytest.approx(products * 3 / 4 + 1e-9 * (between - 1.5 * casts), rel=1e-6)


def test_a_compiled_chain_is_one_pass_and_its_arithmetic() -> None:
    # gelu 3 passes and multiply 1, of 32768 elements: a pass for the chain and two passes' worth of arithmetic.
    found = run().what_if({"compute.compile": "blocks"})
    assert found.gain.mid == pytest.approx(3 * 128 * 256 * 1e-9, rel=0.05)


def test_full_recomputation_repeats_all_of_a_block_before_its_last_product() -> None:
    again = layer(0)[:3]
    found = run().what_if({"checkpointing.mode": "full"})
    assert -found.gain.mid == pytest.approx(3 * sum(task.seconds for task in again), rel=1e-6)
    kept = run().what_if({"checkpointing.mode": "selective"})
    assert -kept.gain.mid == pytest.approx(3 * sum(task.seconds for task in again[1:]), rel=1e-6)
    every = run().what_if({"checkpointing.mode": "full", "checkpointing.every": 2})
    assert -every.gain.mid == pytest.approx(2 * sum(task.seconds for task in again), rel=1e-6)


def test_smaller_buckets_hide_behind_backward() -> None:
    before = run()
    found = before.what_if({"communication.bucket_mib": 0.05})  # 64 KiB of gradients fill one
    transfer = next(task for task in before.graph.steps[0].ranks[0].tasks if task.lane == LINK)
    # All but the last bucket, of one gradient, is hidden; the last still takes its latency.
    hidden = transfer.seconds - (ALPHA + 64 * 256 * 4 / BETA)
    assert found.gain.mid == pytest.approx(hidden, rel=1e-3)


def test_buckets_of_all_gradients_leave_the_step_as_it_is() -> None:
    assert run().what_if({"communication.bucket_mib": 100}).gain.mid == pytest.approx(0.0, abs=1e-6)


def test_compression_saves_bytes_and_pays_the_codec_and_a_second_latency() -> None:
    before = run()
    size = next(task.bytes for task in before.graph.steps[0].ranks[0].tasks if task.lane == LINK)
    found = before.what_if({"communication.compression": "int8"})
    assert found.gain.mid == pytest.approx(size / BETA * 3 / 4 - size * 1e-10 - ALPHA, rel=1e-3)


def test_zero_divides_the_optimizer_and_moves_parameters() -> None:
    before = run()
    tasks = before.graph.steps[0].ranks[0].tasks
    size = sum(task.gradient_bytes for task in tasks)
    optimizer = sum(task.seconds for task in tasks if task.phase == "optimizer")
    copies = size / 4 * 1e-9  # half in, half out
    first = before.what_if({"zero.stage": 1})
    assert first.gain.mid == pytest.approx(optimizer / 2 - copies - (ALPHA + size / BETA), rel=1e-3)
    second, third = (before.what_if({"zero.stage": stage}) for stage in (2, 3))
    assert third.gain.mid < second.gain.mid
    # Stage 3 gathers the three blocks once more; the root's parameters stay.
    blocks = 3 * 2 * 64 * 256 * 4
    again = 3 * ALPHA + blocks / BETA + 1.5 * blocks / 4 * 1e-9
    assert second.gain.mid - third.gain.mid == pytest.approx(again, rel=0.02)


def test_a_host_works_for_every_unit_that_is_sharded() -> None:
    def machine(unit: float, each: float) -> OperationTimes:
        """``unit`` seconds and ``each`` a parameter; twice as much where parameters are gathered twice."""
        rows = [
            {"operation": "sharded_unit", "phase": phase, "again": again, "parameters": parameters,
             "seconds": (unit + each * parameters) * (2 if again else 1)}
            for phase in ("forward", "backward") for again in (False, True) for parameters in (2, 16)
        ]  # fmt: skip
        return calibration(further=rows)

    free, dear = (replace(run(), times=machine(unit, unit / 10)) for unit in (0.0, 1e-3))
    tasks = free.graph.steps[0].ranks[0].tasks
    parameters = sum(task.gradient_bytes > 0 for task in tasks)
    pace = pace_of(tasks, free.times).product

    def longer(stage: int) -> float:
        return free.what_if({"zero.stage": stage}).gain.mid - dear.what_if({"zero.stage": stage}).gain.mid

    # Three blocks of two parameters, and a root that keeps its own: once in forward and once in backward.
    root = parameters - 3 * 2
    once = 2 * (4e-3 + 1e-4 * parameters) * pace
    assert longer(2) == pytest.approx(once, rel=1e-6)
    assert longer(3) == pytest.approx(2 * once - 2 * (1e-3 + 1e-4 * root) * pace, rel=1e-6)
    said = (
        "the host's work for shards was not calibrated and is left out: run trine hardware --calibrate again"
    )
    assert (
        said in run().what_if({"zero.stage": 2}).notes and said not in free.what_if({"zero.stage": 2}).notes
    )


def test_accumulation_halves_rows_and_adds_gradients() -> None:
    before = run()
    found = before.what_if({"accumulation.steps": 2})
    # Times that are linear in rows stay: what is more is one addition of every gradient in the second micro-batch.
    elements = sum(task.gradient_bytes for task in before.graph.steps[0].ranks[0].tasks) / 4
    assert -found.gain.mid == pytest.approx(elements * 1e-9, rel=0.05)


def test_more_ranks_lengthen_the_ring() -> None:
    before = run()
    size = next(task.bytes for task in before.graph.steps[0].ranks[0].tasks if task.lane == LINK)
    found = before.what_if({"ranks": 4})
    # Latency by hops, 3 : 1; bytes by 2(n−1)/n, 1.5 : 1.
    assert -found.gain.mid == pytest.approx(2 * ALPHA + 0.5 * size / BETA, rel=1e-3)
    assert before.what_if({"ranks": 1}).gain.mid == pytest.approx(ALPHA + size / BETA, rel=1e-3)


def test_without_a_straggler_the_step_is_the_median_ranks() -> None:
    slow = run(slow=1.5)
    even = run()
    found = slow.what_if({"straggler": False})
    assert found.predicted.mid / found.step.mid == pytest.approx(even.base_s[5] / slow.base_s[5], rel=1e-6)


@pytest.mark.parametrize(
    ("key", "kind"), [("product_speed", "product"), ("memory_speed", "memory"), ("link_speed", "transfer")]
)
def test_twice_as_fast_takes_half_of_its_time(key: str, kind: str) -> None:
    before = run()
    spent = sum(task.seconds for task in before.graph.steps[0].ranks[0].tasks if task.kind == kind)
    assert before.what_if({key: 2}).gain.mid == pytest.approx(spent / 2, rel=1e-6)


def test_loader_workers_hide_what_is_shorter_than_the_step() -> None:
    assert run().what_if({"data.workers": 1}).gain.mid == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision.dtyp": "bf16"}, "what_if has no answer for 'precision.dtyp': it knows"),
        ({"communication.bucket_mib": "auto"}, "wants a number of MiB"),
        (
            {"communication.algorithm": "two_level"},
            "several nodes of several ranks each, and the record has 2 ranks on 1 node",
        ),
        ({"checkpointing.mode": "auto"}, "decided by measurement"),
        ({"ranks": 0}, "a whole number from 1 to 1000000, not 0"),
        ({"ranks": 10**9}, "a whole number from 1 to 1000000, not 1000000000"),
        *(
            ({"link_speed": speed}, f"from a millionth to a million, not {speed}")
            for speed in (-1, 0, math.inf, math.nan, 1e-320, 10**7)
        ),
        ({"straggler": True}, "give false"),
        ({"communication.compression": "qsgd"}, "the codec qsgd is not in this machine's calibration"),
    ],
)
def test_what_cannot_be_answered_is_one_line(changes: Mapping[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace(".", r"\.")) as caught:
        run().what_if(changes)
    assert "\n" not in str(caught.value)


def test_without_operators_only_phases_are_answered() -> None:
    recorded = run()
    phases = replace(recorded, graph=replace(recorded.graph, basis="phases"))
    with pytest.raises(UsageError, match="no deep window: record one"):
        phases.what_if({"precision.dtype": "bf16"})
    assert phases.what_if({"loader_wait": False}).gain.mid > 0


def test_without_a_calibration_it_says_how_to_make_one() -> None:
    blank = replace(run(), times=OperationTimes(None))
    with pytest.raises(UsageError, match="trine hardware --calibrate"):
        blank.what_if({"compute.compile": "blocks"})


def test_on_two_nodes_the_two_level_exchange_crosses_with_fewer_bytes() -> None:
    recorded = run(ranks=4, hosts=2)
    task = next(task for task in recorded.graph.steps[0].ranks[0].tasks if task.lane == LINK)
    found = recorded.what_if({"communication.algorithm": "two_level"})
    # The node's link carried 2·3/4 S and carries two rings of 2·1/2·S/2; inside, a scatter and a gather between two.
    expected = task.seconds * (1 - (1 / 2) / (3 / 4)) - 2 * (ALPHA + task.bytes / BETA)
    assert found.gain.mid == pytest.approx(expected, rel=1e-3)
    levelled = run(ranks=4, hosts=2, configuration={"communication": {"algorithm": "two_level"}})
    with pytest.raises(UsageError, match=r"has communication\.algorithm = two_level already"):
        levelled.what_if({"communication.algorithm": "two_level"})


def test_two_nodes_of_eight_ranks_send_little_less_over_their_links() -> None:
    recorded = run(ranks=16, hosts=2)
    task = next(task for task in recorded.graph.steps[0].ranks[0].tasks if task.lane == LINK)
    both = {"communication.algorithm": "two_level", "communication.compression": "int8"}
    inside = 2 * (7 * ALPHA + (7 / 8) / (1 / 2) * task.bytes / BETA)
    plain = recorded.what_if({"communication.algorithm": "two_level"})
    assert plain.gain.mid == pytest.approx(task.seconds * (1 - (1 / 2) / (15 / 16)) - inside, rel=1e-3)
    # What a codec takes is the same on either.
    slower = replace(recorded, times=calibration(codec_s=1e-9))
    before, after = recorded.what_if(both), slower.what_if(both)
    assert before.gain.mid - after.gain.mid == pytest.approx(task.bytes * 0.9e-9, rel=1e-3)


def test_intervals_come_from_the_steps_that_were_measured() -> None:
    recorded = run()
    rng = np.random.default_rng(0)
    wide = replace(recorded, steady=Steady(recorded.base_s[5] * rng.uniform(0.8, 1.2, 30), {}))
    even = replace(recorded, steady=Steady(np.full(30, recorded.base_s[5]), {}))
    change = {"product_speed": 2}
    assert even.what_if(change).predicted.high == pytest.approx(even.what_if(change).predicted.low)
    found = wide.what_if(change)
    assert found.predicted.low < found.predicted.mid < found.predicted.high
    assert found.step.mid == pytest.approx(median(wide.steady.seconds.tolist()))


def test_another_schedule_changes_the_step_by_the_difference_of_the_simulated_spans() -> None:
    recorded = run()
    pipeline = Pipeline(4, 8, (1e-3,) * 4, (2e-3,) * 4, (0.0,) * 4)
    piped = replace(recorded, graph=replace(recorded.graph, pipeline=pipeline))
    # GPipe and 1F1B have one bubble, (p − 1)(F + B); ZB-H1's is (p − 1)(F + B − 2W) for B = 2, W = 1 of it.
    assert piped.what_if({"parallel.schedule": "gpipe"}).gain.mid == pytest.approx(0.0, abs=1e-9)
    assert piped.what_if({"parallel.schedule": "zb-h1"}).gain.mid == pytest.approx(3 * 2e-3, rel=0.05)
    with pytest.raises(UsageError, match="holds no micro-batches of every stage"):
        recorded.what_if({"parallel.schedule": "gpipe"})


def test_every_key_of_a_transformation_has_one_home() -> None:
    keys = [key for each in transforms() for key in each.KEYS]
    assert len(keys) == len(set(keys)) and len(transforms()) >= 12


def test_operators_are_read_off_their_shapes() -> None:
    found = operator_of(
        "aten::addmm",
        "[[768], [768, 256], [256, 768], [], []]",
        '["float", "float", "float", "Scalar", "Scalar"]',
    )
    assert found.product == Product(1, 768, 768, 256) and found.dtype == "fp32"
    batched = operator_of("aten::bmm", "[[16, 384, 32], [16, 32, 384]]", '["c10::BFloat16", "c10::BFloat16"]')
    assert batched.product == Product(16, 384, 384, 32) and batched.dtype == "bf16"
    assert operator_of("aten::gelu", "[[2, 384, 1024], []]", '["float", ""]').elements == 2 * 384 * 1024
    assert operator_of("aten::view", "[[768, 256], []]", None).kind == "glue"
    assert operator_of("aten::mm", None, None).kind == "glue"


def test_times_between_sizes_are_interpolated_and_beyond_them_go_on() -> None:
    times = calibration()
    assert times.memory("copy", 2**17, "fp32") == pytest.approx(2**17 * 1e-9, rel=1e-6)
    assert times.memory("copy", 2**26, "fp32") == pytest.approx(2**26 * 1e-9, rel=1e-6)
    assert times.product(Product(1, 128, 128, 512), "bf16") == pytest.approx(128 * 128 * 512 / 4e9, rel=1e-6)
    assert times.link("all_gather").seconds(2**20) == pytest.approx(ALPHA + 2**20 / BETA, rel=1e-3)
    assert math.isclose(times.codec("int8", 2)[1], 4.0) and times.slowdown == 0.0
    assert HOST == "host"


def test_what_a_step_takes_beyond_its_calibrated_time_goes_with_the_bytes() -> None:
    times = calibration()
    tasks = [
        product(128, 256, 64, "forward", 0).times(2.0),
        memory("multiply", 2**15, "forward", 1).times(6.0),
    ]
    pace = pace_of(tasks, times)
    assert pace.product == pytest.approx(2.0) and pace.memory == pytest.approx(6.0)
    # Of six times its calibrated time two are the machine's, and four wait for memory: half of them in half the bytes.
    calibrated = 2**15 * 1e-9
    changed = pace.changed(6 * calibrated, calibrated, calibrated / 2, 0.5)
    assert changed == pytest.approx(2 * calibrated / 2 + 4 * calibrated / 2)
    assert pace.new("cast", 2**15, "fp32") == pytest.approx(6 * calibrated)
    assert pace_of([], times) == Pace(times)
