"""A step's parts: they sum, they answer to what they are of, and published steps are met."""

from __future__ import annotations

import dataclasses
import time

import codec_traffic
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.optim.plan import Bandwidth, Cluster, Layouts, Link, Workload
from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.constants import device_constants, stack_named, stacks
from trine.optim.plan.devices import device_named
from trine.optim.plan.operators import layer_times
from trine.optim.plan.step import PARTS, predict, rank_times
from trine.optim.plan.traffic import CODE_BYTES, layer_calls, traffic_of
from trine.optim.plan.waits import waits_of
from trine.record.errors import UsageError

GPT = Workload(
    name="gpt", layers=48, hidden=6144, heads=64, ffn=24576, vocab=51200, sequence=2048, dropout=True
)
MIXTURE = Workload(
    name="mixture",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    ffn=768,
    vocab=151936,
    sequence=4096,
    gated=True,
    experts=128,
    experts_per_token=8,
    expert_ffn=768,
)


def cluster(nodes: int = 8, device: str = "A100-SXM4-80GB", between: float = 200.0) -> Cluster:
    return Cluster(
        device=device_named(device),
        devices_per_node=8,
        nodes=nodes,
        between=Link(Bandwidth.gigabits_per_s(between), "infiniband"),
    )


def step(layouts: Layouts, workload: Workload = GPT, stack: str = "megatron-lm-2022", **how: float):  # type: ignore[no-untyped-def]
    return predict(workload, cluster(**how), stack_named(stack), layouts)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4, 8]),
    micro_batch=st.integers(1, 8),
    microbatches=st.integers(1, 64),
    zero_stage=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
    precision=st.sampled_from(["fp16", "bf16", "tf32"]),
    stack=st.sampled_from(sorted(stacks())),
)
def test_parts_are_finite_and_sum_to_the_step(stack: str, **layout: object) -> None:
    layouts = Layouts.of(data=2, **layout)
    found = step(layouts, stack=stack)
    assert set(found.parts) == set(PARTS)
    for name, seconds in found.parts.items():
        assert np.isfinite(seconds).all() and (seconds >= -1e-12).all(), name
    assert sum(part[0] for part in found.parts.values()) == pytest.approx(found.step_s[0])
    assert 0 < found.low_s[0] < found.step_s[0] < found.high_s[0]
    assert 0 < found.mfu("megatron")[0] < 1


def test_columns_are_as_rows_one_by_one() -> None:
    layouts = Layouts.of(
        tensor=[1, 2, 4, 8], pipeline=[8, 4, 2, 1], data=2, microbatches=16, zero_stage=[0, 1, 2, 3]
    )
    together = step(layouts).step_s
    assert together.tolist() == pytest.approx([step(layouts.take([row])).step_s[0] for row in range(4)])


def test_published_step_times_of_one_node() -> None:
    # Korthikanti et al. 2022, table 5: 22 billion on eight A100 with four sequences, 1.42 s and 1.10 s.
    layouts = Layouts.of(
        tensor=8, micro_batch=4, sequence=[0, 1], recompute=["full", "selective"], precision="fp16"
    )
    assert step(layouts, nodes=1).step_s.tolist() == pytest.approx([1.42, 1.10], rel=0.1)


def test_published_layer_times() -> None:
    # The same paper, table 4: of one layer with its collectives, 7.7 ms forward, 11.9 backward, 19.5 with full recomputation.
    layouts = Layouts.of(tensor=8, micro_batch=4, recompute=["none", "full"], precision="fp16")
    found = rank_times(GPT, cluster(1), stack_named("megatron-lm-2022"), layouts).middle
    assert (found.forward_s / 48).tolist() == pytest.approx([7.7e-3, 7.7e-3], rel=0.1)
    assert ((found.input_s + found.weight_s) / 48).tolist() == pytest.approx([11.9e-3, 19.5e-3], rel=0.12)


def test_a_step_is_affine_in_its_micro_batches() -> None:
    layouts = Layouts.of(
        tensor=8, pipeline=8, chunks=6, schedule="interleaved", data=4, microbatches=[32, 64, 96]
    )
    seconds = step(layouts, nodes=32).step_s
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=1e-6)
    # And starts above the ideal bubble alone: synchronisation, optimizer and fixed costs.
    per_batch = (seconds[1] - seconds[0]) / 32
    assert seconds[0] - 32 * per_batch > 7 / 6 * per_batch


def test_chunks_shrink_the_bubble_and_zero_bubbles_more() -> None:
    layouts = Layouts.of(
        pipeline=8, microbatches=16, chunks=[1, 3, 1], schedule=["1f1b", "interleaved", "zb-h2"]
    )
    idle = step(layouts).parts["pipeline_bubble"]
    assert idle[1] == pytest.approx(idle[0] / 3, rel=0.3)
    assert idle[2] < 0.5 * idle[0]


def test_a_large_vocabulary_makes_the_last_stage_the_slowest() -> None:
    layouts = Layouts.of(pipeline=8, tensor=8, microbatches=64)
    small, large = (step(layouts, GPT.with_changes(vocab=vocab)).step_s[0] for vocab in (51200, 256000))
    head_flops = 6 * 2048 * 64 * 6144 * (256000 - 51200) / 8
    # All micro-batches pass through the one stage that has it.
    assert large - small > 0.8 * head_flops / 312e12


def test_slower_networks_cost_exposed_gradients() -> None:
    layouts = Layouts.of(tensor=8, data=8, microbatches=2)
    slow, fast = (step(layouts, between=rate).parts["exposed_gradients"][0] for rate in (100.0, 400.0))
    assert slow == pytest.approx(4 * fast, rel=0.15)


def test_sharded_optimizer_state_is_updated_by_its_ranks() -> None:
    layouts = Layouts.of(tensor=8, data=8, zero_stage=[0, 1])
    whole, share = step(layouts).parts["optimizer"]
    assert share == pytest.approx(whole / 8)


def test_gathers_are_hidden_until_they_are_longer_than_computing() -> None:
    layouts = Layouts.of(data=64, zero_stage=3, micro_batch=[8, 1])
    found = step(layouts, stack="torchtitan", between=50.0)
    assert found.parts["gathers"][0] < 0.25 * found.parts["compute"][0]
    assert found.parts["gathers"][1] > found.parts["compute"][1]


def test_a_host_that_lags_pays_for_its_tensor_collectives_too() -> None:
    small = Workload("small", 48, 1024, 16, 4096, 51200, 1024, dropout=True)
    layouts = Layouts.of(tensor=[1, 2], data=[2, 1])
    found = step(layouts, small)
    # Half the work a rank, but the host has the same kernels to launch, and two all-reduces each way.
    assert found.step_s[1] > found.step_s[0]
    alone = found.parts["compute"] + found.parts["overhead"]
    calls_s = 48 * 4 * device_constants("ampere").call_s
    assert 0 < alone[1] + found.parts["tensor_communication"][1] - alone[0] < 1.5 * calls_s
    captured = predict(
        small, cluster(), dataclasses.replace(stack_named("megatron-lm-2022"), captured=True), layouts
    )
    assert captured.parts["overhead"][1] == pytest.approx(captured.parts["overhead"][0])


def test_what_a_layer_calls_is_counted_for_each_kind_of_group() -> None:
    dense, mixture = Sizes.of(GPT), Sizes.of(MIXTURE)
    layouts = Layouts.of(
        tensor=[1, 2, 2, 1, 1, 1],
        sequence=[0, 0, 1, 0, 0, 0],
        context=[1, 1, 1, 4, 1, 1],
        expert=[1, 1, 1, 1, 1, 8],
        zero_stage=[0, 0, 0, 0, 3, 0],
        data=[8, 4, 4, 2, 8, 8],
    )
    ahead, behind = layer_calls(dense, layouts)
    assert ahead.tolist() == [0, 2, 4, 3, 1, 0]
    assert behind.tolist() == [0, 2, 6, 3, 2, 0]
    # Two all-to-alls a layer of experts, either way; a reduction after attention alone.
    ahead, behind = layer_calls(mixture, layouts)
    assert ahead.tolist() == [0, 1, 2, 3, 1, 2]
    assert behind.tolist() == [0, 1, 3, 3, 2, 2]


def test_softmax_is_not_joined_where_heads_do_not_divide_into_its_kernel() -> None:
    small = Workload("small", 48, 1024, 16, 4096, 51200, 1024, dropout=True)
    layouts = Layouts.of(tensor=8, data=1, micro_batch=[1, 2])
    by_fours, by_ones = (
        predict(
            small, cluster(), stack_named("megatron-lm-2021").with_traits(softmax_heads=heads), layouts
        ).step_s
        for heads in (4, 1)
    )
    # Two heads a rank: one sequence is no multiple of four, two are.
    assert by_fours[0] > 1.02 * by_ones[0]
    assert by_fours[1] == by_ones[1]


def test_a_pipeline_gathers_its_stage_once_a_step_whatever_the_micro_batches() -> None:
    layouts = Layouts.of(data=64, zero_stage=3, pipeline=[1, 1, 4, 4], microbatches=[8, 16, 8, 16])
    plain, twice, piped, piped_twice = step(layouts, stack="torchtitan", between=50.0).parts["gathers"]
    assert twice == pytest.approx(2 * plain)
    assert piped_twice == pytest.approx(piped, rel=0.01)
    # Weights that lie elsewhere come for each use; their gradients are reduced once all the same.
    moved = Layouts.of(data=64, zero_stage=3, pipeline=4, microbatches=[8, 16], parameter_offload="cpu")
    once, again = step(moved, stack="torchtitan", between=50.0).parts["gathers"]
    assert 1.7 * once < again < 2 * once


def test_compression_sends_less_and_costs_memory() -> None:
    layouts = Layouts.of(data=64, compression=["none", "int8", "bf16"])
    plain, small, half = step(layouts, stack="llm-foundry", between=10.0).parts["exposed_gradients"]
    # A quarter of the bytes, and encoding them; half of them, and two casts.
    assert 0.25 * plain < small < 0.6 * plain
    assert 0.5 * plain < half < 0.55 * plain
    # Over a network as fast as encoding is slow, it costs more than it saves.
    plain, small, _ = step(layouts, stack="llm-foundry", between=200.0).parts["exposed_gradients"]
    assert small > plain


@pytest.mark.parametrize("code", sorted(set(CODE_BYTES) - {"none"}))
def test_what_codes_move_is_what_ours_move(code: str) -> None:
    assert CODE_BYTES[code] == pytest.approx(codec_traffic.bytes_an_element(code), rel=0.01)


def test_experts_meet_all_to_alls_and_launches() -> None:
    layouts = Layouts.of(data=64, expert=[8, 64], micro_batch=2)
    found = predict(
        MIXTURE, cluster(device="H100-SXM-80GB", between=400.0), stack_named("megatron-core-moe"), layouts
    )
    inside, across = found.parts["expert_communication"]
    assert across > 3 * inside > 0
    graphs = dataclasses.replace(stack_named("megatron-core-moe"), captured=True)
    captured = predict(MIXTURE, cluster(device="H100-SXM-80GB"), graphs, layouts)
    assert captured.parts["overhead"][0] < found.parts["overhead"][0]


def test_imbalance_of_experts_costs() -> None:
    layouts = Layouts.of(data=64, expert=8, micro_batch=4)
    even, uneven = (
        step(layouts, MIXTURE.with_changes(load_imbalance=load), stack="megatron-core-moe").step_s[0]
        for load in (1.0, 1.5)
    )
    assert 1.1 * even < uneven < 1.5 * even


def test_frozen_weights_have_no_gradients() -> None:
    layouts = Layouts.of(tensor=8, data=8)
    whole = step(layouts)
    adapters = predict(GPT, cluster(), stack_named("megatron-lm-2022"), layouts, frozen=True)
    assert adapters.parts["exposed_gradients"][0] == 0 and adapters.parts["optimizer"][0] == 0
    assert 0.6 < adapters.parts["compute"][0] / whole.parts["compute"][0] < 0.8


def test_offload_costs_what_links_take() -> None:
    layouts = Layouts.of(data=8, zero_stage=1, optimizer_offload=["none", "cpu", "nvme"])
    none, cpu, nvme = step(layouts, nodes=1).step_s
    assert none < cpu < nvme


def test_messages_between_stages_cost_what_the_network_takes() -> None:
    layouts = Layouts.of(data=8, pipeline=8, microbatches=64)
    shown = step(layouts, between=10.0).parts["pipeline_messages"][0]
    assert shown > step(layouts, between=400.0).parts["pipeline_messages"][0] >= 0


def test_many_configurations_a_minute() -> None:
    layouts = Layouts.of(tensor=[1, 2, 4, 8] * 1000, pipeline=[1, 2, 4, 8, 8, 4, 2, 1] * 500, microbatches=16)
    start = time.process_time()
    step(layouts)
    assert len(layouts) / (time.process_time() - start) * 60 > 100_000


def test_a_precision_that_a_device_lacks_is_not_a_number() -> None:
    # The search says why (constraints); a prediction is no place for a guess.
    assert np.isnan(step(Layouts.of(precision="fp8")).step_s[0])


def test_unknown_conventions_are_refused() -> None:
    with pytest.raises(UsageError, match="no FLOPs convention"):
        step(Layouts.of()).mfu("mine")  # type: ignore[arg-type]


def test_gradients_that_are_no_wider_than_their_code_are_not_coded() -> None:
    layouts = Layouts.of(data=64, compression=["none", "bf16", "int8"])
    plain, same, shorter = step(layouts, stack="megatron-core").parts["exposed_gradients"]
    assert same == plain and shorter != plain
    # Gradients of four bytes are: what is sent halves, and the device works for it.
    wide, coded, _ = step(layouts, stack="megatron-lm-2023", between=1e6).parts["exposed_gradients"]
    assert coded > wide


def test_ranks_that_share_the_vocabulary_reduce_at_both_ends() -> None:
    layouts = Layouts.of(tensor=[1, 2, 8], data=1, microbatches=4)
    sizes = Sizes.of(GPT)

    def ends(between_devices: float) -> tuple[np.ndarray, np.ndarray]:
        inside = Link(Bandwidth.gigabytes_per_s(between_devices), "nvlink")
        conditions = Conditions.of(cluster(1).with_changes(inside=inside), stack_named("megatron-lm-2022"))
        waits = waits_of(sizes, conditions, layouts)
        found = traffic_of(sizes, conditions, layouts, layer_times(sizes, conditions, layouts), waits)
        return found.embedding_s, found.head_s

    embedding, head = ends(300.0)
    assert embedding[0] == head[0] == 0 and (embedding[1:] > 0).all()
    assert (head[1:] > embedding[1:]).all()  # and what the loss sums and compares
    slower, _ = ends(30.0)
    assert (slower[1:] > 5 * embedding[1:]).all()
