"""The planner's formulas beside what the runtime itself predicts, which is exact: the same model, the same configuration."""

from __future__ import annotations

from typing import Any

import pytest

import trine
from trine.optim.plan import Bandwidth, Cluster, Device, Layouts, Link
from trine.optim.plan.constants import stack_named
from trine.optim.plan.from_module import workload_of_module
from trine.optim.plan.memory import memory_of
from trine.samples.sizing import gpt

pytestmark = pytest.mark.slow


def make() -> tuple[Any, Any, Any]:
    return gpt(batch=4, layers=4, hidden=1024, heads=16, sequence=1024)


@pytest.mark.parametrize(
    ("configuration", "layout"),
    [
        ({"zero.stage": 3}, {"precision": "fp32", "zero_stage": 3}),
        ({"precision.dtype": "bf16", "checkpointing.mode": "selective"}, {"recompute": "selective"}),
    ],
)
def test_tensors_are_within_six_percent_of_the_runtime_s(
    configuration: dict[str, object], layout: dict[str, object]
) -> None:
    model, loss, batch = make()
    exact = trine.predict_memory(
        lambda: make()[0], configuration, ranks=8, batch=batch, loss_fn=loss, device_type="cuda"
    )
    device = Device("a device", "ampere", {"bf16": 3e14}, 80 * 2**30, Bandwidth.gigabytes_per_s(2000))
    cluster = Cluster(device, devices_per_node=8, inside=Link(Bandwidth.gigabytes_per_s(300)))
    workload = workload_of_module(model, sequence=1024)
    found = memory_of(workload, cluster, stack_named("trine"), Layouts.of(data=8, micro_batch=4, **layout))
    assert float(found.allocated_bytes[0]) == pytest.approx(exact.peak_bytes, rel=0.06)
