"""Operators by hand: tiles and waves, rooflines, recomputation, and what each does to a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.optim.plan import Cluster, Layouts, Workload
from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.constants import stack_named
from trine.optim.plan.devices import device_named
from trine.optim.plan.layouts import PRECISIONS
from trine.optim.plan.operators import Rates, layer_times, matmul_s

A100 = device_named("A100-SXM4-80GB")
GPT = Workload(
    name="gpt", layers=48, hidden=6144, heads=64, ffn=24576, vocab=51200, sequence=2048, dropout=True
)


def rates(rate: float = 100e12, units: float = 100.0, depth: float = 0.0, memory: float = 1e15) -> Rates:
    return Rates(*(np.asarray([value]) for value in (rate, memory, units, depth, 2.0)))


def seconds(rows: float, columns: float, depth: float, on: Rates, count: float = 1.0) -> float:
    return float(matmul_s(*(np.asarray([float(value)]) for value in (rows, columns, depth, count)), on)[0])


def layer(workload: Workload, stack: str = "megatron-lm-2022", **layout: object):  # type: ignore[no-untyped-def]
    cluster = Cluster(device=A100, devices_per_node=8)
    return layer_times(
        Sizes.of(workload), Conditions.of(cluster, stack_named(stack)), Layouts.of(**layout)
    ).dense


def test_whole_waves_take_the_peak_rate() -> None:
    # 25,600 × 512 in tiles of 256 × 128 are 400 tiles: four whole waves of a hundred units.
    assert seconds(25600, 512, 4096, rates()) == pytest.approx(2 * 25600 * 512 * 4096 / 100e12)


def test_a_wave_that_is_not_full_costs_more_than_its_share() -> None:
    whole = seconds(25600, 512, 4096, rates())
    assert seconds(25600 + 256, 512, 4096, rates()) > whole * 404 / 400


def test_a_tile_is_filled_and_drained_along_the_summed_dimension() -> None:
    plain, slow = (seconds(25600, 512, 1024, rates(depth=depth)) for depth in (0.0, 64.0))
    assert slow / plain == pytest.approx((1024 + 64) / 1024)


def test_a_thin_matmul_is_bound_by_memory() -> None:
    # One row: a matrix of 16-bit elements is read once.
    found = seconds(1, 8192, 8192, rates(rate=1e15, memory=1e12))
    assert found == pytest.approx(2 * (8192 + 8192 * 8192 + 8192) / 1e12)


@given(
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.integers(1, 8192),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 4),
)
def test_no_matmul_beats_its_rooflines(rows: int, columns: int, depth: int, count: int, more: int) -> None:
    on = rates(depth=64.0, memory=2e12)
    found = seconds(rows, columns, depth, on, count)
    assert found >= 2 * rows * columns * depth * count / 100e12 * (1 - 1e-9)
    assert found >= 2 * (rows * depth + depth * columns + rows * columns) * count / 2e12 * (1 - 1e-9)
    assert seconds(rows, columns, depth * (1 + more), on, count) >= found * (1 - 1e-9)


def test_recomputation_repeats_a_forward_or_its_scores() -> None:
    found = layer(GPT, tensor=8, micro_batch=4, recompute=["none", "selective", "full"])
    again, forward, scores = found.recompute_s, found.forward_s, found.scores_s
    assert again.tolist() == pytest.approx([0.0, float(scores[0]), float(forward[0])])
    # Table 4 again: selective recomputation costs 7 % of a layer where scores are kept in memory.
    share = again[1] / (found.forward_s + found.input_s + found.weight_s)[1]
    assert 0.03 < share < 0.11


def test_grouped_queries_and_windows_save_time() -> None:
    plain = layer(GPT, "megatron-core").forward_s[0]
    assert layer(GPT.with_changes(kv_heads=8), "megatron-core").forward_s[0] < plain
    long = GPT.with_changes(sequence=32768)
    windowed = long.with_changes(window=4096, window_layers=48)
    assert layer(windowed, "megatron-core").forward_s[0] < layer(long, "megatron-core").forward_s[0]


def test_heads_that_are_not_aligned_leave_the_tensor_units() -> None:
    # One model of width 13,824: 96 heads of 144, or 128 of 108.
    sizes = {"hidden": 13824, "ffn": 55296, "kv_heads": 0, "head_size": 0}
    even, odd = (
        layer(
            Workload(name="x", layers=78, heads=heads, vocab=250880, sequence=2048, **sizes),
            tensor=4,
            micro_batch=4,
        )
        for heads in (96, 128)
    )
    assert odd.scores_s[0] > 5 * even.scores_s[0]
    # Fused kernels pad their tiles.
    fused_even, fused_odd = (
        layer(
            Workload(name="x", layers=78, heads=heads, vocab=250880, sequence=2048, **sizes),
            "megatron-core",
            tensor=4,
        )
        for heads in (96, 128)
    )
    assert fused_odd.scores_s[0] < 1.2 * fused_even.scores_s[0]


def test_fp8_hastens_matmuls_alone() -> None:
    hopper = Cluster(device=device_named("H100-SXM-80GB"), devices_per_node=8)
    found = layer_times(
        Sizes.of(GPT),
        Conditions.of(hopper, stack_named("megatron-core")),
        Layouts.of(tensor=4, precision=["bf16", "fp8"]),
    )
    assert found.dense.weight_s[1] < 0.75 * found.dense.weight_s[0]
    assert found.dense.scores_s[1] == found.dense.scores_s[0]
    assert found.head.forward_s[1] == found.head.forward_s[0]


def test_without_tensor_units_scores_go_at_32_bit_arithmetic_s_rate() -> None:
    model = Workload("x", 78, 13824, 128, 55296, 250880, 2048)  # heads of 108
    scores_s = layer(model, micro_batch=4).scores_s[0]
    flops = 2 * 2 * 4 * 128 * 2048 * 2048 * 108
    # 19.5 TFLOP/s at best, and tiles are filled and drained for each of a head's 108.
    assert flops / 19.5e12 < scores_s < 3 * flops / 19.5e12


def test_a_device_s_own_multiprocessors_and_rates_stand_before_its_family_s() -> None:
    def conditions(**changes: object) -> Conditions:
        device = device_named("H100 PCIe").with_changes(**changes)
        return Conditions.of(Cluster(device=device, devices_per_node=8), stack_named("megatron-core"))

    assert conditions().units == 114
    assert conditions(multiprocessors=None).units == 132
    assert conditions(constants={"units": 7.0}).units == 7
    rates = conditions(matmul_rates={"fp32": 40e12, "fp8": 1e12}).rates[0]
    assert rates[PRECISIONS.index("fp32")] == 40e12
    assert rates[PRECISIONS.index("fp8")] > rates[PRECISIONS.index("bf16")]


def test_an_odd_vocabulary_is_slow_where_nobody_pads_it() -> None:
    cluster = Cluster(device=A100, devices_per_node=8)

    def head_s(vocab: int, stack: str, tensor: int = 1, precision: str = "bf16") -> float:
        sizes = Sizes.of(GPT.with_changes(vocab=vocab))
        conditions = Conditions.of(cluster, stack_named(stack))
        layouts = Layouts.of(tensor=tensor, precision=precision)
        return float(layer_times(sizes, conditions, layouts).head.weight_s[0])

    assert head_s(50257, "pytorch") > 1.8 * head_s(50304, "pytorch")
    assert head_s(50257, "megatron-core") < 1.1 * head_s(50304, "megatron-core")
    assert head_s(50257, "pytorch", tensor=2) < head_s(50304, "pytorch")
    # Full precision has no tensor units to leave.
    assert head_s(50257, "pytorch", precision="fp32") < 1.1 * head_s(50304, "pytorch", precision="fp32")


def test_dropout_of_scores_moves_five_bytes_an_element_there_and_back() -> None:
    plain = Workload("GPT", 4, 2048, 16, 8192, 50304, 2048, learned_positions=True)
    without, with_dropout = layer(plain), layer(replace(plain, dropout=True))
    scores, norms = 5 * 16 * 2048 * 2048, 2 * 2048 * 2048  # two residual additions keep a mask of a byte
    memory = Conditions.of(Cluster(device=A100, devices_per_node=8), stack_named("megatron-lm-2022"))
    rate = memory.memory_per_s * memory.memory
    ahead = with_dropout.forward_s - without.forward_s
    assert ahead * rate == pytest.approx(scores + norms, rel=1e-6)
    behind = with_dropout.input_s - without.input_s
    assert behind * rate == pytest.approx(scores + 1.4 * norms, rel=1e-6)


def test_backward_of_scores_reads_the_softmax_s_result() -> None:
    plain = Workload("GPT", 4, 2048, 16, 8192, 50304, 2048, learned_positions=True)
    stack = stack_named("megatron-lm-2022")
    found = []
    for fused in (True, False):
        conditions = Conditions.of(Cluster(device=A100, devices_per_node=8), stack.with_traits(fused=fused))
        found.append(layer_times(Sizes.of(plain), conditions, Layouts.of()).dense)
    rate = conditions.memory_per_s * conditions.memory
    # Scale and mask by themselves read and write two bytes each, both ways.
    assert (found[1].scores_s - found[0].scores_s) * rate == pytest.approx(8 * 16 * 2048 * 2048, rel=1e-6)
