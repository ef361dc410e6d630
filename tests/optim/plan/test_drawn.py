"""A layout's step, simulated to be drawn: what it takes is what was predicted."""

from __future__ import annotations

from typing import Any

import pytest

from trine.analyzers import analyze
from trine.optim.plan import Bandwidth, Cluster, Layouts, Link, Workload
from trine.optim.plan.constants import stack_named
from trine.optim.plan.devices import device_named
from trine.optim.plan.drawn import simulated_step
from trine.optim.plan.refine import refined_parts
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
MIXTURE = Workload(
    "experts",
    layers=16,
    hidden=4096,
    heads=32,
    ffn=14336,
    vocab=32000,
    sequence=4096,
    experts=8,
    experts_per_token=2,
)
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
    # The plan simulates what the formula estimates.
    assert simulation.step_s == pytest.approx(predicted.step_s[row], rel=0.05)
    parts = refined_parts(WORKLOAD, CLUSTER, stack, LAYOUTS.take([row]))
    assert simulation.step_s == pytest.approx(sum(parts.values()))
    assert 0 < simulation.rest_s < parts["overhead"] + parts["pipeline_messages"]
    found = analyze(job_of(simulation)).pipeline
    assert found is not None
    assert (found.schedule, found.microbatches, len(found.stages)) == (schedule, 16, 4)
    assert found.bubble_ratio == pytest.approx(simulation.bubble_ratio, abs=1e-6)


@pytest.mark.parametrize(
    ("columns", "groups"),
    [
        ({"data": 8, "tensor": 2, "expert": 4, "sequence": 1, "zero_stage": 1}, {"tensor", "expert"}),
        ({"data": 4, "tensor": 2, "context": 2, "expert": 2, "pipeline": 2}, {"tensor", "context", "expert"}),
        ({"data": 8, "expert": 2, "zero_stage": 3, "recompute": "full"}, {"expert", "gather"}),
    ],
)
def test_what_layers_wait_for_is_drawn_as_collectives(columns: dict[str, Any], groups: set[str]) -> None:
    stack = stack_named("megatron-bridge")
    layouts = Layouts.of(**{"microbatches": 8, **columns})
    simulation = simulated_step(MIXTURE, CLUSTER, stack, layouts, 0, steps=1)
    predicted = {
        name: float(column[0]) for name, column in predict(MIXTURE, CLUSTER, stack, layouts).parts.items()
    }
    names = {
        "tensor": "tensor_communication",
        "context": "context_communication",
        "expert": "expert_communication",
        "gather": "gathers",
    }
    busiest = int(layouts["pipeline"][0]) - 1  # it has the head
    drawn = dict.fromkeys(names, 0.0)
    for met in simulation.meetings:
        kind = met.group.partition(" ")[0]
        kind = "gather" if (kind, met.operation) == ("data", "all_gather") else kind
        if met.rank == busiest and kind in drawn:
            drawn[kind] += met.end_s - met.entered_s
    assert {name for name, seconds in drawn.items() if seconds > 0} == groups
    for name, part in names.items():
        # Nothing hides a step's first gather, which is no action's; and the busiest rank counts as a mean one with more layers.
        assert drawn[name] == pytest.approx(predicted[part], rel=0.15)
    steps = list(job_of(simulation))[busiest].steps
    exposed = float(steps["phase_exposed_communication_ns"][0]) / 1e9
    assert exposed >= sum(drawn.values()) * (1 - 1e-6)
    computed = sum(float(steps[f"phase_{name}_ns"][0]) for name in ("forward", "backward")) / 1e9
    assert computed <= (predicted["compute"] + predicted["recomputation"] + predicted["overhead"]) * 1.05
