"""A layout's step, simulated to be drawn: what it takes is what was predicted."""

from __future__ import annotations

import pytest

from trine.analyzers import analyze
from trine.optim.plan import Bandwidth, Cluster, Layouts, Link, Workload
from trine.optim.plan.constants import stack_named
from trine.optim.plan.devices import device_named
from trine.optim.plan.drawn import simulated_step
from trine.optim.plan.simulated_record import job_of
from trine.optim.plan.step import predict

CLUSTER = Cluster(
    device_named("A100-SXM-80GB"),
    devices_per_node=8,
    nodes=8,
    inside=Link(Bandwidth.gigabytes_per_s(300)),
    between=Link(Bandwidth.gigabits_per_s(200), kind="infiniband"),
)
WORKLOAD = Workload("gpt-22b", layers=48, hidden=6144, heads=64, ffn=24576, vocab=51200, sequence=2048)
LAYOUTS = Layouts.of(
    data=2,
    tensor=8,
    pipeline=4,
    micro_batch=1,
    microbatches=16,
    schedule=["1f1b", "zb-h1", "interleaved"],
    chunks=[1, 1, 3],
)


@pytest.mark.parametrize(("row", "schedule"), [(0, "1F1B"), (1, "ZB-H1"), (2, "Interleaved1F1B")])
def test_the_drawn_step_is_the_predicted_one(row: int, schedule: str) -> None:
    stack = stack_named("Megatron-LM")
    simulation = simulated_step(WORKLOAD, CLUSTER, stack, LAYOUTS, row)
    predicted = predict(WORKLOAD, CLUSTER, stack, LAYOUTS)
    # What is not drawn: overhead a step or a micro-batch, and messages that hold up their sender.
    rest = sum(float(predicted.parts[name][row]) for name in ("overhead", "pipeline_messages"))
    assert predicted.step_s[row] - rest <= simulation.step_s[1] * 1.05
    assert simulation.step_s[1] <= predicted.step_s[row] * 1.05
    found = analyze(job_of(simulation)).pipeline
    assert found is not None
    assert (found.schedule, found.microbatches, len(found.stages)) == (schedule, 16, 4)
    assert found.bubble_ratio == pytest.approx(simulation.bubble_ratio, abs=1e-6)
