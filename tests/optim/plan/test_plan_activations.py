"""What a layout keeps for backward, and the loss's logits: formulas by hand, and Korthikanti's."""

from __future__ import annotations

import pytest
from plan_memory_cases import MEGATRON, TORCHTITAN, cluster, gpt, llama, mixture, of

from trine.optim.plan import LatentAttention, Layouts
from trine.optim.plan.constants import stack_named
from trine.optim.plan.memory import memory_of


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
