"""The planner's formulas beside what the runtime itself predicts, which is exact: the same model, the same configuration."""

from __future__ import annotations

from typing import Any

import pytest

import trine
from trine.optim.exports._from_layout import config_of
from trine.optim.plan import Bandwidth, Cluster, Device, Layouts, Link
from trine.optim.plan.constants import stack_named
from trine.optim.plan.from_module import workload_of_module
from trine.optim.plan.memory import memory_of
from trine.samples.sizing import gpt

pytestmark = pytest.mark.slow

RANKS = 4


def make() -> tuple[Any, Any, Any]:
    return gpt(batch=4, layers=2, hidden=1024, heads=16, sequence=512)


def planned_and_exact(configuration: dict[str, object], **layout: object) -> tuple[float, float]:
    """Bytes of tensors at a rank's peak."""
    model, loss, batch = make()
    exact = trine.predict_memory(
        lambda: make()[0], configuration, ranks=RANKS, batch=batch, loss_fn=loss, device_type="cuda"
    )
    device = Device("a device", "ampere", {"bf16": 3e14}, 80 * 2**30, Bandwidth.gigabytes_per_s(2000))
    cluster = Cluster(device, devices_per_node=RANKS, inside=Link(Bandwidth.gigabytes_per_s(300)))
    workload = workload_of_module(model, sequence=512)
    found = memory_of(workload, cluster, stack_named("trine"), Layouts.of(data=RANKS, **layout))
    return float(found.allocated_bytes[0]), exact.peak_bytes


def written(**layout: object) -> dict[str, object]:
    """What a plan's export sets."""
    return dict(config_of(Layouts.of(data=RANKS, **layout).row(0))[0].changes())


def test_autocast_with_recomputed_operators_is_within_six_percent() -> None:
    planned, exact = planned_and_exact(
        {"precision.dtype": "bf16", "checkpointing.mode": "selective"}, micro_batch=4, recompute="selective"
    )
    assert planned == pytest.approx(exact, rel=0.06)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_plan_s_own_configuration_needs_is_within_three_percent(
    precision: str, stage: int, steps: int
) -> None:
    layout = {"precision": precision, "zero_stage": stage, "micro_batch": 4 // steps, "microbatches": steps}
    planned, exact = planned_and_exact(written(**layout), **layout)
    assert planned == pytest.approx(exact, rel=0.03)


def test_sums_of_earlier_micro_batches_lie_beside_a_later_one_s() -> None:
    layout = {"zero_stage": 1, "micro_batch": 1, "microbatches": 4}
    planned, exact = planned_and_exact(written(**layout), **layout)
    assert planned == pytest.approx(exact, rel=0.03)
