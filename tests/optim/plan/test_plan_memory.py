"""Memory of layouts: state by hand and by its papers, what lies elsewhere, and what must hold for all layouts."""

from __future__ import annotations

import ast
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from plan_memory_cases import (
    DEEPSPEED,
    GIB,
    MEGATRON,
    TENSORS,
    TORCHTITAN,
    cluster,
    gpt,
    llama,
    mixture,
    of,
    state,
)

from trine.optim.plan import Layouts
from trine.optim.plan.constants import stack_named
from trine.optim.plan.layouts import OFFLOADS, PRECISIONS, RECOMPUTATIONS, SCHEDULES
from trine.optim.plan.memory import CATEGORIES, USABLE, memory_of
from trine.optim.plan.memory_traits import memory_traits
from trine.optim.plan.step import predict

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
    assert of(found, "gathers") == pytest.approx(2 * stage)
    norms = 17 * 4096
    assert of(found, "gradients") == pytest.approx(4 * stage, abs=4 * norms)


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


def test_gathered_layers_of_experts_are_a_tensor_ranks_part() -> None:
    workload, stack = mixture(), stack_named("megatron-core-moe")
    layouts = Layouts.of(data=32, expert=8, tensor=2, zero_stage=3, recompute="full")
    whole, halved = (
        memory_of(workload, cluster(), stack.with_traits(expert_tensor=split), layouts)
        for split in (False, True)
    )
    # Of a layer an expert a rank: the one in use and those ahead, and its gradients, two bytes each.
    experts, held = workload.expert_parameters, 2 + memory_traits(stack).prefetch
    assert of(whole, "gathers") - of(halved, "gathers") == pytest.approx(2 * held * experts / 2)


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


@pytest.mark.parametrize("tier", ["cpu", "nvme", "remote"])
def test_moved_activations_lie_in_their_tier(tier: str) -> None:
    found = memory_of(gpt(), cluster(), MEGATRON, Layouts.of(tensor=8, activation_offload=tier))
    where = {"cpu": "host_bytes", "nvme": "disk_bytes", "remote": "remote_bytes"}
    filled = {name for name, column in where.items() if getattr(found, column)[0] > 0}
    assert filled == {tier}


def test_what_lies_in_another_nodes_memory_fills_hosts_too() -> None:
    layouts = Layouts.of(data=2, tensor=8, zero_stage=3, optimizer_offload="remote", recompute="full")
    found = memory_of(gpt(), cluster(host_gib=2**20), DEEPSPEED, layouts)
    held = float(found.host_bytes[0] + found.remote_bytes[0]) / 2**30
    assert found.remote_bytes[0] > 0 and found.hosts_hold[0] and found.fits[0]
    assert memory_of(gpt(), cluster(host_gib=math.ceil(held)), DEEPSPEED, layouts).fits[0]
    short = memory_of(gpt(), cluster(host_gib=math.floor(held)), DEEPSPEED, layouts)
    assert short.host_bytes[0] < math.floor(held) * 2**30 and not short.hosts_hold[0] and not short.fits[0]


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
