"""Transformations of steps whose work runs on devices: kernels on a stream, launched by a host that goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_traces import Call, mm, trace
from whatif_steps import ALPHA, BETA, LAUNCH_S, a_step, run, run_on_device

from trine.optim.plan.whatif import recorded
from trine.optim.plan.whatif.graph import Pipeline
from trine.record.errors import UsageError

CHANGES = (
    {"zero.stage": 1},
    {"zero.stage": 2},
    {"zero.stage": 3},
    {"accumulation.steps": 2},
    {"checkpointing.mode": "full"},
    {"precision.dtype": "bf16"},
    {"compute.compile": "blocks"},
    {"communication.bucket_mib": 0.05},
    {"communication.compression": "int8"},
    {"ranks": 4},
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_device_gains_what_a_host_gains_that_does_the_same_work(change: dict[str, object]) -> None:
    there = run_on_device().what_if(change)
    # Gathers and scatters run beside its work; the rest is one thing after another on either.
    beside = 3 * 2 * (ALPHA + 2 * 64 * 256 * 4 / BETA) if "zero.stage" in change else 0.0
    launches = 100 * LAUNCH_S
    assert run().what_if(change).gain.mid - launches <= there.gain.mid
    assert there.gain.mid <= run().what_if(change).gain.mid + launches + beside


def test_zero_exchanges_on_a_device_what_the_gradients_hold() -> None:
    found = run_on_device()
    before = found.graph.steps[0].ranks[0].tasks
    size = sum(task.gradient_bytes for task in before)
    assert size == sum(task.gradient_bytes for task in a_step(0).tasks) > 0
    copies = size / 4 * 1e-9
    optimizer = sum(task.seconds for task in before if task.phase == "optimizer" and task.lane == "stream 7")
    first = found.what_if({"zero.stage": 1})
    assert first.gain.mid == pytest.approx(optimizer / 2 - copies - (ALPHA + size / BETA), rel=0.02)


def test_without_the_gradients_sizes_zero_has_no_answer() -> None:
    found = run_on_device()
    step = found.graph.steps[0]
    blank = tuple(
        replace(each, tasks=tuple(replace(task, gradient_bytes=0) for task in each.tasks))
        for each in step.ranks
    )
    found = replace(found, graph=replace(found.graph, steps=(replace(step, ranks=blank),)))
    for stage in (1, 2, 3):
        with pytest.raises(
            UsageError, match=r"zero\.stage: this record does not say how large parameters are"
        ):
            found.what_if({"zero.stage": stage})


def test_a_kernel_at_whose_end_a_gradient_is_stored_says_how_large_it_is(tmp_path: Path) -> None:
    stored = "torch::autograd::AccumulateGrad"
    calls = [
        mm(256, 64, 64, 10.0),
        mm(64, 64, 256, 10.0, backward=True, sequence=7),
        Call(stored, [[64, 64]], ["float"]),
        mm(64, 128, 256, 10.0, backward=True, sequence=6),
        Call(stored, [[64, 128]], ["c10::BFloat16"]),
        Call(stored, [[128]], ["float"]),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace(calls)), encoding="utf-8")
    step = recorded(path).graph.steps[1].ranks[0]
    sizes = [task.gradient_bytes for task in step.tasks if task.kind == "product"]
    assert sizes == [0, 64 * 64 * 4, 64 * 128 * 2 + 128 * 4]


def test_another_schedule_moves_a_device_and_its_host_by_the_same_time() -> None:
    pipeline = Pipeline(4, 8, (1e-3,) * 4, (2e-3,) * 4, (0.0,) * 4)
    found = run_on_device()
    found = replace(found, graph=replace(found.graph, pipeline=pipeline))
    gain = found.what_if({"parallel.schedule": "zb-h1"}).gain.mid
    assert gain == pytest.approx(3 * 2e-3, rel=0.05)
