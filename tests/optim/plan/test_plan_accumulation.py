"""Gradients over the micro-batches of a step: software that reduces each, and software that holds whole sums until the last."""

from __future__ import annotations

import numpy as np
import pytest
from plan_memory_cases import TORCHTITAN, llama, of

from trine.optim.plan import Layouts
from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.constants import Stack, stack_named
from trine.optim.plan.drawn_bytes import carried_by
from trine.optim.plan.memory import memory_of
from trine.optim.plan.step import predict
from trine.optim.plan.waits import wire_bytes
from trine.optim.plan.workload import Workload

OURS = stack_named("trine")


def gradients(workload: Workload, stack: Stack, **layout: int) -> float:
    """Bytes of a rank at its peak."""
    layouts = Layouts.of(micro_batch=1, recompute="full", **layout)
    return of(memory_of(workload, cluster_of("dgx-h100", devices=64), stack, layouts), "gradients")


@pytest.mark.parametrize("stage", [2, 3])
def test_our_runtime_holds_whole_gradients_until_the_last_micro_batch(stage: int) -> None:
    # Long enough that the peak is at the loss.
    workload = llama(sequence=32768)
    whole = gradients(workload, OURS, data=64, microbatches=4, zero_stage=stage)
    assert whole == pytest.approx(4 * workload.parameters)
    shared = gradients(workload, TORCHTITAN, data=64, microbatches=4, zero_stage=stage)
    assert shared == pytest.approx(4 * workload.parameters / 64)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_s_stages_hold_theirs_whole(stage: int) -> None:
    workload = llama(sequence=32768)
    layout = {"data": 8, "pipeline": 8, "microbatches": 16}
    found = [gradients(workload, TORCHTITAN, zero_stage=each, **layout) for each in (0, stage)]
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def exposed(stack: Stack, part: str, **layout: object) -> np.ndarray:
    layouts = Layouts.of(micro_batch=1, recompute="full", **layout)
    return predict(llama(), cluster_of("dgx-h100", devices=64), stack, layouts).parts[part]


def test_what_is_held_whole_is_reduced_once_a_step() -> None:
    few, many = exposed(OURS, "exposed_gradients", data=64, zero_stage=2, microbatches=[1, 16])
    assert many == pytest.approx(few)
    few, many = exposed(TORCHTITAN, "exposed_gradients", data=64, zero_stage=2, microbatches=[1, 16])
    assert many > 2 * few  # each behind its backward, and slowing it
    layout = {"data": 8, "pipeline": 8, "microbatches": 16}
    once, sharded = exposed(TORCHTITAN, "exposed_gradients", zero_stage=[1, 2], **layout)
    assert sharded == pytest.approx(once)


def test_weights_are_gathered_for_each_micro_batch_all_the_same() -> None:
    # Two nodes' worth of ranks a stage would hide nothing: the reductions of all but the last micro-batch are saved.
    ours = exposed(OURS, "gathers", data=64, zero_stage=3, microbatches=16)
    each = exposed(OURS.with_traits(name="pytorch"), "gathers", data=64, zero_stage=3, microbatches=16)
    assert 0 < float(ours[0]) < float(each[0])


def test_a_drawn_micro_batch_has_its_part_of_the_one_reduction() -> None:
    layouts = Layouts.of(data=8, zero_stage=3, microbatches=4)
    sizes, where = Sizes.of(llama()), cluster_of("dgx-h100", devices=8)
    ours, each = (
        carried_by(sizes, Conditions.of(where, stack), layouts).reduced[0] for stack in (OURS, TORCHTITAN)
    )
    # Gathered again in 16 bits, reduced in 32.
    assert ours / each == pytest.approx((2 + 4 / 4) / (2 + 4))


# --- masters --------------------------------------------------------------------------------------------------------------


def test_our_replicas_are_of_sixteen_bits_beside_masters_and_shards_are_the_masters() -> None:
    workload, where = llama(), cluster_of("dgx-h100", devices=64)
    layouts = Layouts.of(data=64, zero_stage=[0, 1, 2, 3], recompute="full")
    found = memory_of(workload, where, OURS, layouts)
    each = [found.parts[name] / workload.parameters for name in ("parameters", "optimizer")]
    assert each[0] == pytest.approx([2, 2, 2 + 4 / 64, 4 / 64])
    assert each[1] == pytest.approx([12, 12 / 64, 8 / 64, 8 / 64])
    # FSDP2 replicates what tensor ranks cut, in 32 bits.
    cut = memory_of(workload, where, OURS, Layouts.of(data=8, tensor=8, recompute="full"))
    assert of(cut, "parameters", "optimizer") * 8 == pytest.approx(12 * workload.parameters, rel=1e-3)


def test_our_replicas_exchange_sixteen_bits_and_shards_thirty_two() -> None:
    where = Conditions.of(cluster_of("dgx-h100", devices=64), OURS)
    layouts = Layouts.of(data=[64, 64, 64, 8, 64], zero_stage=[0, 1, 2, 0, 0], tensor=[1, 1, 1, 8, 1])
    assert list(wire_bytes(where, layouts)) == [2, 2, 4, 4, 2]
    assert list(wire_bytes(where, Layouts.of(data=64, precision="fp32"))) == [4]


def test_sums_of_earlier_micro_batches_are_in_thirty_two_bits_beside_the_next() -> None:
    workload = llama(sequence=32768)
    two, four = (gradients(workload, OURS, data=64, microbatches=count, zero_stage=1) for count in (2, 4))
    assert (two / workload.parameters, four / workload.parameters) == pytest.approx((2, 4))
