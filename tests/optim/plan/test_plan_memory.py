"""Memory of layouts: formulas by hand, values of papers, and what must hold for all layouts."""

from __future__ import annotations

import ast
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from trine.optim.plan import Bandwidth, Cluster, Device, LatentAttention, Layouts, Link, Workload
from trine.optim.plan.constants import stack_named
from trine.optim.plan.layouts import OFFLOADS, PRECISIONS, RECOMPUTATIONS, SCHEDULES
from trine.optim.plan.memory import CATEGORIES, USABLE, MemoryEstimate, memory_of
from trine.optim.plan.memory_traits import memory_traits
from trine.optim.plan.step import predict

GIB = 2**30
MEGATRON = stack_named("megatron-lm-2022")
DEEPSPEED = stack_named("deepspeed")
TORCHTITAN = stack_named("torchtitan")
#: Kinds whose figures are of tensors alone, without what was fitted.
TENSORS = [name for name in CATEGORIES if name not in ("allocator", "framework")]


def cluster(gib: int = 80, *, host_gib: int = 0, family: str = "ampere") -> Cluster:
    device = Device(
        "a device",
        family,
        {"bf16": 3e14, "fp32": 2e13},
        gib * GIB,
        Bandwidth.gigabytes_per_s(2000),
        Bandwidth(3e11),
    )
    return Cluster(
        device,
        devices_per_node=8,
        nodes=1024,
        between=Link(Bandwidth(2.5e10), kind="infiniband"),
        host_memory_bytes=host_gib * GIB,
    )


def gpt(**changes: object) -> Workload:
    """22 billion parameters, of Korthikanti et al. 2022; its layers alone."""
    given = {
        "layers": 48,
        "hidden": 6144,
        "heads": 64,
        "ffn": 24576,
        "vocab": 1,
        "sequence": 2048,
        "dropout": True,
    }
    return Workload(name="gpt", **{**given, **changes})  # type: ignore[arg-type]


def llama(**changes: object) -> Workload:
    """8 billion parameters."""
    given = {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "sequence": 8192,
        "gated": True, "bias": False, "tied_embeddings": False,
    }  # fmt: skip
    return Workload(name="llama", **{**given, **changes})  # type: ignore[arg-type]


def mixture() -> Workload:
    return llama(experts=8, experts_per_token=2, expert_ffn=14336, vocab=32000)


def of(estimate: MemoryEstimate, *names: str) -> float:
    return sum(float(estimate.parts[name][0]) for name in names)


def state(estimate: MemoryEstimate) -> float:
    return of(estimate, "parameters", "gradients", "optimizer")


# --- activations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ({}, 10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8)),
        ({"sequence": 1}, (34 + 5 * 64 * 2048 / 6144) / 8),
        ({"recompute": "selective"}, 10 + 24 / 8),
        ({"recompute": "selective", "sequence": 1}, 34 / 8),
        ({"recompute": "full"}, 2),
        ({"recompute": "full", "sequence": 1}, 2 / 8),
    ],
)
def test_a_layer_keeps_what_korthikanti_counts(mode: dict[str, object], expected: float) -> None:
    found = memory_of(gpt(), cluster(), MEGATRON, Layouts.of(tensor=8, micro_batch=4, **mode))
    token = 2048 * 4 * 6144
    mask = 1 / 8 if "sequence" in mode else 1
    assert of(found, "activations") == pytest.approx(token * (48 * expected + mask), rel=1e-12)


def test_fused_attention_keeps_a_sum_a_head_in_place_of_scores() -> None:
    with_scores = memory_of(gpt(), cluster(), MEGATRON, Layouts.of())
    without = memory_of(gpt(), cluster(), MEGATRON.with_traits(fused_attention=True), Layouts.of())
    token = 48 * 2048
    expected = token * (5 * 64 * 2048 - 4 * 64)
    assert of(with_scores, "activations") - of(without, "activations") == pytest.approx(expected)


def test_a_policy_over_operators_keeps_every_second_matmul() -> None:
    layouts = Layouts.of(data=8, zero_stage=3, recompute="selective")
    # Input, queries, values, attention's output and its sums, the gate; where kernels are not joined the last output, too.
    joined = 2 * (4096 + 4096 + 1024 + 4096 + 14336) + 4 * 32
    for fused, a_token in ((True, joined), (False, joined + 2 * 4096)):
        found = memory_of(llama(), cluster(), TORCHTITAN.with_traits(fused=fused), layouts)
        assert of(found, "activations") == pytest.approx(32 * 8192 * a_token)


def test_our_own_policy_keeps_all_matmuls() -> None:
    found = memory_of(llama(), cluster(), stack_named("trine"), Layouts.of(recompute="selective"))
    a_token = 2 * (4096 + 4096 + 2 * 1024 + 4096 + 4096 + 2 * 14336 + 4096) + 4 * 32
    assert of(found, "activations") == pytest.approx(32 * 8192 * a_token)


def test_gates_and_few_key_heads() -> None:
    stack = stack_named("megatron-core")
    found = memory_of(llama(), cluster(), stack, Layouts.of(tensor=8, sequence=1))
    a_token = (12 * 4096 + 4 * 1024 + 6 * 14336 + 4 * 32) / 8
    assert of(found, "activations") == pytest.approx(32 * 8192 * a_token)


def test_low_rank_attention_keeps_keys_of_every_head_and_what_is_compressed() -> None:
    latent = LatentAttention(kv_rank=512, query_rank=1536, rope_head_size=64, value_head_size=96)
    stack = stack_named("megatron-core")
    plain = memory_of(llama(kv_heads=32), cluster(), stack, Layouts.of())
    found = memory_of(llama(latent=latent, kv_heads=32), cluster(), stack, Layouts.of())
    more = 2 * (32 * (2 * (128 + 64) + 2 * 96) - 32 * 4 * 128) + 4 * (512 + 64 + 1536)
    assert of(found, "activations") - of(plain, "activations") == pytest.approx(32 * 8192 * more)


def test_experts_keep_a_copy_for_each_that_a_token_visits() -> None:
    stack = stack_named("megatron-core-moe")
    two = memory_of(mixture(), cluster(), stack, Layouts.of(data=8, expert=8))
    three = memory_of(
        mixture().with_changes(experts_per_token=3), cluster(), stack, Layouts.of(data=8, expert=8)
    )
    each = 4 * 4096 + 6 * 14336
    assert of(three, "activations") - of(two, "activations") == pytest.approx(32 * 8192 * each)


def test_the_busiest_expert_rank_counts() -> None:
    stack = stack_named("megatron-core-moe")
    even = memory_of(mixture(), cluster(), stack, Layouts.of(data=8, expert=8))
    uneven = memory_of(
        mixture().with_changes(load_imbalance=1.5), cluster(), stack, Layouts.of(data=8, expert=8)
    )
    moved = 32 * 8192 * 2 * (4 * 4096 + 6 * 14336)
    assert of(uneven, "activations") - of(even, "activations") == pytest.approx(0.5 * moved)


def test_context_ranks_and_budget_share_the_activations() -> None:
    whole = memory_of(gpt(), cluster(), MEGATRON.with_traits(fused_attention=True), Layouts.of())
    half = memory_of(gpt(), cluster(), MEGATRON.with_traits(fused_attention=True), Layouts.of(context=2))
    assert of(half, "activations") == pytest.approx(of(whole, "activations") / 2)
    kept = [
        of(
            memory_of(gpt(), cluster(), MEGATRON, Layouts.of(recompute="budget", recomputed_layers=again)),
            "activations",
        )
        for again in (0, 12, 48)
    ]
    full = of(memory_of(gpt(), cluster(), MEGATRON, Layouts.of(recompute="full")), "activations")
    plain = of(memory_of(gpt(), cluster(), MEGATRON, Layouts.of()), "activations")
    assert kept[0] == pytest.approx(plain) and kept[2] == pytest.approx(full)
    assert kept[1] == pytest.approx(plain - (plain - full) / 4)


def test_interleaving_holds_more_and_the_second_stage_may_hold_most() -> None:
    workload = gpt(layers=96)
    one = memory_of(workload, cluster(), MEGATRON, Layouts.of(pipeline=8, microbatches=64))
    three = memory_of(
        workload,
        cluster(),
        MEGATRON,
        Layouts.of(pipeline=8, microbatches=64, chunks=3, schedule="interleaved"),
    )
    assert of(three, "activations") / of(one, "activations") == pytest.approx(1 + 7 / 24)
    # 22 layers on 8 ranks: 2, then 3 each, then 2 (Qi et al. 2023, table 3).
    uneven = memory_of(gpt(layers=22), cluster(), MEGATRON, Layouts.of(pipeline=8, microbatches=64))
    assert uneven.stage[0] == 1
    assert of(uneven, "activations") == pytest.approx(7 * 3 / (8 * 12) * of(one, "activations"), rel=2e-3)


def test_logits_are_of_the_last_stage_and_of_all_micro_batches_where_forwards_come_first() -> None:
    workload = llama(layers=4)
    found = [
        memory_of(workload, cluster(), TORCHTITAN, Layouts.of(pipeline=2, microbatches=16, schedule=name))
        for name in ("1f1b", "gpipe")
    ]
    elements = 8192 * 128256
    assert of(found[0], "logits") == pytest.approx(elements * 14)
    assert of(found[1], "logits") == pytest.approx(elements * (14 + 15 * 4))
    assert [int(each.stage[0]) for each in found] == [1, 1]
    fused = memory_of(workload, cluster(), TORCHTITAN.with_traits(fused_loss=True), Layouts.of())
    assert of(fused, "logits") == pytest.approx(elements * 4)


# --- state --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_divides_state_as_its_paper_says(stage: int, gigabytes: float) -> None:
    workload = gpt(layers=32, hidden=4096, heads=32, ffn=16384, vocab=50000)
    layouts = Layouts.of(data=64, zero_stage=stage, precision="fp16")
    found = state(memory_of(workload, cluster(), DEEPSPEED, layouts))
    assert found / workload.parameters * 7.5 == pytest.approx(gigabytes, abs=0.05)


def test_megatron_holds_18_bytes_or_6_and_12_shared() -> None:
    elements = 12 * 6144**2 * 48 / 8
    for stage, expected in ((0, 18.0), (1, 6 + 12 / 16)):
        layouts = Layouts.of(data=16, tensor=8, zero_stage=stage, recompute="full")
        assert state(memory_of(gpt(), cluster(), MEGATRON, layouts)) / elements == pytest.approx(
            expected, rel=2e-3
        )


def test_fsdp_divides_16_bytes_and_gathers_blocks_and_the_root() -> None:
    found = memory_of(llama(), cluster(), TORCHTITAN, Layouts.of(data=8, zero_stage=3, recompute="full"))
    assert state(found) == pytest.approx(16 * llama().parameters / 8)
    block = llama().layer_parameters(mixture=False)
    outside = 2 * 128256 * 4096
    assert of(found, "gathers") == pytest.approx(2 * (block + outside))
    # The backward of a long stack's layer: two blocks, and whole gradients of one and of the head.
    small = memory_of(
        llama(sequence=128), cluster(), TORCHTITAN, Layouts.of(data=8, zero_stage=3, recompute="full")
    )
    assert of(small, "gathers") == pytest.approx(2 * (2 * block + outside) + 2 * (block + 128256 * 4096))


def test_fsdp_in_a_pipeline_keeps_its_stage_whole() -> None:
    layouts = Layouts.of(data=8, zero_stage=3, pipeline=4, microbatches=8, recompute="full")
    found = memory_of(llama(sequence=128), cluster(), TORCHTITAN, layouts)
    stage = 8 * llama().layer_parameters(mixture=False) + 128256 * 4096
    # Gathered in 16 bits, gradients summed in 32; the embedding's or the head's stage is largest.
    assert found.stage[0] in (0, 3)
    assert of(found, "gathers") == pytest.approx((2 + 4) * stage)


def test_deepspeed_gathers_module_by_module() -> None:
    layouts = Layouts.of(data=8, zero_stage=3, recompute="full", precision="fp16")
    found = memory_of(gpt(sequence=128), cluster(), DEEPSPEED, layouts)
    largest = 4 * 6144 * 6144
    assert of(found, "gathers") == pytest.approx(2 * (1e9 + largest) + 2 * (largest + 6144))


def test_recipes_of_megatron_core_share_the_optimizer_and_sum_in_bf16() -> None:
    shared = Layouts.of(data=16, zero_stage=1, recompute="full")
    found = memory_of(llama(), cluster(), stack_named("megatron-core"), shared)
    assert state(found) == pytest.approx((2 + 2 + 12 / 16) * llama().parameters)


def test_flat_gradients_of_the_step_lie_beside_activations() -> None:
    layouts = Layouts.of(data=4, zero_stage=1, recompute="full", precision="fp16")
    flat = memory_of(gpt(vocab=50000), cluster(), DEEPSPEED, layouts)
    without, pieces = (
        memory_of(
            gpt(vocab=50000), cluster(), DEEPSPEED, layouts, traits=replace(memory_traits(DEEPSPEED), **given)
        )
        for given in ({"step_bytes": 0.0}, {"flat_step": False})
    )
    # 32 bits of a quarter of the gradients.
    quarter = float(gpt(vocab=50000).parameters)
    assert of(flat, "temporary") - of(without, "temporary") == pytest.approx(quarter)
    # In pieces they come when activations are gone.
    assert of(pieces, "temporary") == pytest.approx(quarter) and of(pieces, "activations") == 0


def test_experts_have_a_data_group_of_their_own() -> None:
    workload, stack = mixture(), stack_named("megatron-core-moe")
    layouts = Layouts.of(data=32, expert=8, zero_stage=1, recompute="full")
    routed = 32 * 8 * workload.expert_parameters / 8
    shared = workload.parameters - 32 * 8 * workload.expert_parameters
    found = memory_of(workload, cluster(), stack, layouts)
    assert of(found, "optimizer") == pytest.approx(12 * (shared / 32 + routed / 4))
    assert of(found, "parameters") == pytest.approx(2 * (shared + routed))
    # Experts that are split over the tensor group, too.
    split = stack.with_traits(expert_tensor=True)
    halved = memory_of(workload, cluster(), split, Layouts.of(data=32, expert=8, tensor=2, recompute="full"))
    whole = memory_of(workload, cluster(), stack, Layouts.of(data=32, expert=8, tensor=2, recompute="full"))
    assert of(whole, "parameters") - of(halved, "parameters") == pytest.approx(2 * routed / 2)


def test_dense_layers_of_a_mixture_come_first() -> None:
    workload, stack = mixture().with_changes(dense_layers=8), stack_named("megatron-core-moe")
    found = memory_of(workload, cluster(), stack, Layouts.of(pipeline=4, microbatches=8, recompute="full"))
    # The first stage has no expert, so a later one holds most.
    assert found.stage[0] > 0
    assert of(found, "parameters") > 2 * 8 * 8 * workload.expert_parameters


def test_a_tied_table_lies_on_both_ends() -> None:
    tied, untied = gpt(vocab=51200), gpt(vocab=51200, tied_embeddings=False)
    for pipeline, table in ((1, 51200 * 6144), (4, 0)):
        layouts = Layouts.of(pipeline=pipeline, microbatches=8, recompute="full")
        more = [of(memory_of(each, cluster(), MEGATRON, layouts), "parameters") for each in (untied, tied)]
        assert more[0] - more[1] == pytest.approx(2 * table)


def test_deepspeed_sums_in_32_bits_beside_bf16_below_stage_2() -> None:
    elements = gpt(vocab=50000).parameters
    for precision, stage, expected in (("fp16", 1, 2.0), ("bf16", 1, 6.0), ("bf16", 0, 6.0)):
        layouts = Layouts.of(zero_stage=stage, precision=precision)
        found = memory_of(gpt(vocab=50000), cluster(), DEEPSPEED, layouts)
        assert of(found, "gradients") / elements == pytest.approx(expected)


def test_fp32_has_four_bytes_of_each() -> None:
    for stack in (MEGATRON, TORCHTITAN, DEEPSPEED):
        found = memory_of(gpt(vocab=50000), cluster(), stack, Layouts.of(precision="fp32"))
        assert state(found) == pytest.approx(16 * gpt(vocab=50000).parameters)


def test_frozen_weights_have_neither_gradients_nor_state() -> None:
    found = memory_of(llama(), cluster(), stack_named("pytorch"), Layouts.of(), frozen=True)
    assert of(found, "gradients", "optimizer") == 0
    assert of(found, "parameters") == pytest.approx(2 * llama().parameters)
    trained = memory_of(llama(), cluster(), stack_named("pytorch"), Layouts.of())
    assert of(found, "activations") < of(trained, "activations")


# --- elsewhere ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "where"), [("cpu", "host_bytes"), ("nvme", "disk_bytes"), ("remote", "remote_bytes")]
)
def test_offloaded_state_lies_in_its_tier(tier: str, where: str) -> None:
    here = memory_of(gpt(), cluster(), DEEPSPEED, Layouts.of(data=8, zero_stage=3))
    there = memory_of(
        gpt(),
        cluster(),
        DEEPSPEED,
        Layouts.of(data=8, zero_stage=3, optimizer_offload=tier, parameter_offload=tier),
    )
    assert state(there) == 0
    away = 8 * of(here, "parameters", "optimizer")
    gradients = 8 * of(here, "gradients")
    expected = away + gradients if tier == "cpu" else away
    assert float(getattr(there, where)[0]) == pytest.approx(expected)
    # Gradients pass through the host's memory whichever tier it is.
    assert float(there.host_bytes[0]) >= gradients * (1 - 1e-12)


def test_moved_activations_leave_two_layers_and_what_does_not_fit_the_host_does_not_fit() -> None:
    here = memory_of(gpt(), cluster(), MEGATRON, Layouts.of(tensor=8))
    layouts = Layouts.of(tensor=8, activation_offload="cpu")
    there = memory_of(gpt(), cluster(), MEGATRON, layouts)
    assert of(there, "activations") == pytest.approx(of(here, "activations") * 2 / 48)
    assert float(there.host_bytes[0]) == pytest.approx(
        8 * (of(here, "activations") - of(there, "activations"))
    )
    assert there.fits[0]
    assert not memory_of(gpt(), cluster(host_gib=1), MEGATRON, layouts).fits[0]


# --- all layouts --------------------------------------------------------------------------------------------------------

LAYOUTS = some.fixed_dictionaries(
    {
        "data": some.sampled_from([1, 2, 8, 64]),
        "zero_stage": some.integers(0, 3),
        "tensor": some.sampled_from([1, 2, 8]),
        "sequence": some.integers(0, 1),
        "context": some.sampled_from([1, 2]),
        "pipeline": some.sampled_from([1, 2, 3, 8]),
        "chunks": some.sampled_from([1, 2]),
        "schedule": some.integers(0, len(SCHEDULES) - 1),
        "micro_batch": some.integers(1, 4),
        "microbatches": some.integers(1, 32),
        "recompute": some.integers(0, len(RECOMPUTATIONS) - 1),
        "recomputed_layers": some.integers(0, 4),
        "precision": some.integers(0, len(PRECISIONS) - 1),
        "optimizer_offload": some.integers(0, len(OFFLOADS) - 1),
        "parameter_offload": some.integers(0, len(OFFLOADS) - 1),
        "activation_offload": some.integers(0, len(OFFLOADS) - 1),
    }
)
STACKS = some.sampled_from(
    ["pytorch", "trine", "torchtitan", "megatron-core", "megatron-core-moe", "deepspeed"]
)


@settings(max_examples=25, deadline=None)
@given(given_layout=LAYOUTS, name=STACKS, of_experts=some.booleans())
def test_categories_sum_to_the_peak_and_columns_are_rows(
    given_layout: dict[str, int], name: str, of_experts: bool
) -> None:
    workload, stack = (mixture() if of_experts else llama()), stack_named(name)
    found = memory_of(workload, cluster(), stack, Layouts.of(**given_layout))
    assert tuple(found.parts) == CATEGORIES
    assert all(np.isfinite(part).all() and (part >= 0).all() for part in found.parts.values())
    assert sum(found.parts.values())[0] == pytest.approx(found.peak_bytes[0])
    assert found.allocated_bytes[0] == pytest.approx(of(found, *TENSORS))
    assert 0 <= found.stage[0] < given_layout["pipeline"]
    assert found.low_bytes[0] < found.peak_bytes[0] < found.high_bytes[0]
    # A row among others is the row alone.
    other = Layouts.of(data=4, tensor=2, pipeline=4, microbatches=8)
    both = memory_of(workload, cluster(), stack, Layouts.joined([other, Layouts.of(**given_layout)]))
    assert both.peak_bytes[1] == pytest.approx(found.peak_bytes[0])


@settings(max_examples=15, deadline=None)
@given(given_layout=LAYOUTS, name=STACKS)
def test_more_work_needs_more_and_savings_need_less(given_layout: dict[str, int], name: str) -> None:
    plain = Layouts.of(**{**given_layout, "activation_offload": 0, "recompute": 0})
    stack = stack_named(name)

    def peak(**changes: object) -> float:
        return float(memory_of(llama(), cluster(), stack, plain.with_changes(**changes)).allocated_bytes[0])

    at_all = peak() * (1 + 1e-9)
    assert peak(micro_batch=plain["micro_batch"] + 1) > peak()
    assert peak(microbatches=plain["microbatches"] + 8) >= peak() / (1 + 1e-9)
    assert peak(activation_offload="cpu") <= at_all
    assert peak(optimizer_offload="cpu") <= peak(optimizer_offload="none") * (1 + 1e-9)
    kept = [
        of(memory_of(llama(), cluster(), stack, plain.with_changes(recompute=mode)), "activations")
        for mode in ("none", "selective", "full")
    ]
    if memory_of(llama(), cluster(), stack, plain).stage[0] == 0:
        assert kept[0] >= kept[1] * (1 - 1e-9) and kept[1] >= kept[2] * (1 - 1e-9)


def test_capacity_is_what_the_driver_gives() -> None:
    layouts = Layouts.of(tensor=8, micro_batch=4, recompute=["none", "selective"], sequence=1)
    found = memory_of(gpt(), cluster(80), MEGATRON, layouts)
    assert found.capacity_bytes == 80 * GIB * USABLE
    # Korthikanti et al. 2022, figure 1: 45.6 + 39.6 GiB do not fit 80, 45.6 + 9.6 do.
    assert list(found.fits) == [False, True]


def test_a_cpu_has_no_context_and_one_rank_no_communicators() -> None:
    assert of(memory_of(gpt(), cluster(family="cpu"), MEGATRON, Layouts.of(data=8)), "framework") == 0
    one, eight = (memory_of(gpt(), cluster(), MEGATRON, Layouts.of(data=data)) for data in (1, 8))
    assert 0 < of(one, "framework") < of(eight, "framework")


def test_buckets_of_ddp_repeat_the_gradients_of_several_ranks() -> None:
    stack = stack_named("pytorch")
    one, two = (memory_of(llama(), cluster(), stack, Layouts.of(data=data)) for data in (1, 2))
    assert of(one, "communication") == 0
    assert of(two, "communication") == pytest.approx(4 * llama().parameters)


def test_a_stack_has_the_traits_of_its_kind_or_its_parents() -> None:
    assert memory_traits(stack_named("nemo-23")).kind == "megatron-core"
    assert memory_traits(stack_named("nemo-23")).family == "megatron"
    older, newer = memory_traits(stack_named("megatron-lm-2021")), memory_traits(stack_named("megascale"))
    assert (newer.fragmentation, newer.bf16_gradient_bytes) == (
        older.fragmentation,
        older.bf16_gradient_bytes,
    )
    assert stack_named("megascale").split_optimizer and not stack_named("megatron-lm-2021").split_optimizer
    assert memory_traits(stack_named("pytorch").with_traits(name="something new")).kind == "pytorch"


def test_a_prediction_of_time_tells_its_memory() -> None:
    layouts = Layouts.of(data=[8, 16], zero_stage=3)
    found = predict(llama(), cluster(), TORCHTITAN.with_traits(fused=False), layouts)
    again = memory_of(llama(), cluster(), TORCHTITAN.with_traits(fused=False), layouts)
    assert found.memory.peak_bytes == pytest.approx(again.peak_bytes)


def test_the_page_s_example_says_what_it_says() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "plan_memory.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(block, names)  # noqa: S102
    shown = re.findall(r"^(found\S.*?)  # .*?array\((\[.*\])\)$", block, re.MULTILINE)
    assert len(shown) == 3
    for expression, values in shown:
        assert list(eval(expression, names)) == pytest.approx(ast.literal_eval(values), abs=0.06)


def test_a_hundred_thousand_layouts_take_seconds() -> None:
    count = 100_000
    generator = np.random.default_rng(0)
    layouts = Layouts.of(
        data=generator.integers(1, 65, count),
        pipeline=2 ** generator.integers(0, 4, count),
        schedule=generator.integers(0, len(SCHEDULES), count),
        microbatches=generator.integers(1, 65, count),
        zero_stage=generator.integers(0, 4, count),
    )
    start = time.perf_counter()
    memory_of(mixture(), cluster(), stack_named("megatron-core"), layouts)
    assert time.perf_counter() - start < 15
