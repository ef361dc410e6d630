"""Kernels by operator and shape: attribution, rooflines, chains, fits; on traces made by hand and on real ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_traces import ADD, BF16, FP32, MM, MUL, Call, analyzed, mm, pointwise

import trine
from trine.analyzers.kernel_classes import classify
from trine.analyzers.precision import causal, on_tensor_cores
from trine.analyzers.results import Analysis
from trine.analyzers.studies import result_of
from trine.analyzers.studies._fusion import find_chains, small_kernels
from trine.analyzers.studies._gemm import contiguous, fit_of, padded, tile_of
from trine.analyzers.studies._kernel_part import kernel_word
from trine.analyzers.studies._products import Product
from trine.analyzers.studies.kernel_efficiency import KernelEfficiency, to_json

NHWC = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(params)"


def study(analysis: Analysis) -> KernelEfficiency:
    result = result_of(analysis, "kernel_efficiency", KernelEfficiency)
    assert result is not None
    return result


# --- attribution -----------------------------------------------------------------------------------


def test_kernels_belong_to_the_operator_that_launched_them(tmp_path: Path) -> None:
    inner = mm(1024, 1024, 1024, 100.0)
    calls = [
        Call("aten::linear", [[1024, 1024], [1024, 1024]], [BF16, BF16], inside=[inner]),
        pointwise(1 << 20, 10.0),
    ]
    result = study(analyzed(tmp_path, calls, steps=3))  # two of three steps are complete
    assert [(row.name, row.calls, row.kernels, row.ns) for row in result.operators] == [
        ("aten::mm", 2, 2, 200_000),
        ("aten::mul", 2, 2, 20_000),
    ]
    assert [(row.name, row.calls) for row in result.outermost] == [("aten::linear", 2), ("aten::mul", 2)]
    assert result.attributed_ns == result.total_ns == result.with_shapes_ns == 220_000
    assert result.classes == {"matmul": 200_000, "elementwise": 20_000}


def test_kernels_without_a_launch_belong_to_no_operator_and_it_is_said(tmp_path: Path) -> None:
    analysis = analyzed(tmp_path, [Call("aten::mm", kernels=[(MM, 50.0)])], steps=2)
    assert any(note.id == "no-shapes" for note in analysis.data_quality)
    import json

    content = json.loads((tmp_path / "rank0.json").read_text())
    content["traceEvents"] = [event for event in content["traceEvents"] if event["cat"] != "cuda_runtime"]
    (tmp_path / "rank0.json").write_text(json.dumps(content))
    orphans = trine.analyze(trine.load(tmp_path / "rank0.json"), steps="all")
    result = study(orphans)
    assert [row.name for row in result.operators] == ["(no operator)"] and result.attributed_ns == 0
    assert any(note.id == "kernels-without-operators" for note in orphans.data_quality)


# --- roofline --------------------------------------------------------------------------------------


def test_a_product_is_measured_against_the_arithmetic_peak(tmp_path: Path) -> None:
    # 2 · 4096³ operations in 550.8 µs are 249.5 TFLOP/s: 80 % of an A100's 312 in bf16.
    result = study(analyzed(tmp_path, [mm(4096, 4096, 4096, 550.8)]))
    row, roofline = result.shapes[0], result.rooflines[0]
    assert row.product == Product(1, 4096, 4096, 4096) and not row.counted and row.tensor_cores
    assert roofline.bound == "compute" and roofline.efficiency == pytest.approx(0.8, rel=0.01)
    assert roofline.gain_ns == pytest.approx(0.2 * row.ns, rel=0.05)
    assert result.roofline_ns == (row.ns, roofline.least_ns)


def test_elementwise_work_is_measured_against_the_memory(tmp_path: Path) -> None:
    # 64 Mi elements: two read, one written, 805 MB at 2039 GB/s are 395 µs at least.
    result = study(analyzed(tmp_path, [pointwise(1 << 26, 500.0)]))
    roofline = result.rooflines[0]
    assert roofline.bound == "memory" and roofline.efficiency == pytest.approx(0.79, abs=0.01)
    assert roofline.flops_per_s is None and roofline.bytes_per_s == pytest.approx(1.61e12, rel=0.01)


def test_faster_than_memory_means_a_cache_and_no_efficiency(tmp_path: Path) -> None:
    roofline = study(analyzed(tmp_path, [pointwise(1 << 22, 15.0)])).rooflines[0]
    assert roofline.bound == "cache" and roofline.efficiency is None and roofline.gain_ns is None


def test_an_unknown_device_has_rates_and_no_roofline(tmp_path: Path) -> None:
    result = study(analyzed(tmp_path, [mm(1024, 1024, 1024, 100.0)], device="Nobody's Accelerator 9"))
    roofline = result.rooflines[0]
    assert roofline.flops_per_s == pytest.approx(2 * 1024**3 / 100e-6)
    assert roofline.bound is None and roofline.efficiency is None and result.roofline_ns is None


def test_operations_that_the_profiler_counted_come_first(tmp_path: Path) -> None:
    result = study(analyzed(tmp_path, [mm(1024, 1024, 1024, 100.0, extra={"flops": 1e9})]))
    assert result.shapes[0].counted and result.shapes[0].flops == 2e9
    assert to_json(result)["shapes"][0]["flops_from"] == "profiler"


def test_winograd_has_no_efficiency(tmp_path: Path) -> None:
    kernel = "cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1"
    dims = [[32, 64, 56, 56], [32, 64, 56, 56], [64, 64, 3, 3]]
    result = study(
        analyzed(tmp_path, [Call("aten::convolution_backward", dims, [FP32] * 3, [(kernel, 100.0)])])
    )
    assert result.shapes[0].shortcut and result.rooflines[0].flops_per_s
    assert result.rooflines[0].efficiency is None


def test_a_convolution_of_inference_takes_its_output_from_what_follows(tmp_path: Path) -> None:
    convolution = Call(
        "aten::cudnn_convolution",
        [[8, 64, 32, 32], [128, 64, 3, 3]],
        [FP32, FP32],
        [("sm80_xmma_fprop_tf32f32_tf32f32", 100.0)],
    )
    after = Call("aten::clamp_min", [[8, 128, 16, 16], []], [FP32, "Scalar"], [(MUL, 5.0)])
    row = study(analyzed(tmp_path, [convolution, after], steps=2)).shapes[0]
    assert row.flops == 2 * (8 * 128 * 16 * 16) * (64 * 3 * 3)
    other = Call("aten::clamp_min", [[8, 256, 16, 16], []], [FP32, "Scalar"], [(MUL, 5.0)])
    assert study(analyzed(tmp_path, [convolution, other], steps=2)).shapes[0].flops is None


def test_operators_of_the_host_have_no_roofline_of_a_device_they_fed(tmp_path: Path) -> None:
    analysis = analyzed(tmp_path, [Call("aten::mm", [[64, 64], [64, 64]], [FP32, FP32])])
    result = study(analysis)
    assert result.basis == "host" and result.rooflines[0].efficiency is None
    assert result.operators[0].name == "aten::mm" and not result.products and not result.chains


# --- chains and small kernels ----------------------------------------------------------------------


def test_a_chain_saves_what_passes_from_one_kernel_to_the_next(tmp_path: Path) -> None:
    size = 1 << 24
    chain = [pointwise(size, 90.0, "aten::exp", inputs=1), pointwise(size, 90.0, "aten::neg", inputs=1)]
    result = study(analyzed(tmp_path, [mm(512, 512, 512, 20.0), *chain, mm(512, 512, 512, 20.0)], steps=3))
    count, kernels, ns, low, mid, high = result.chain_totals
    assert (count, kernels, ns) == (2, 4, 360_000)
    # Each reads and writes alike: neg's read (half of 90 µs) and exp's write (the same).
    assert (low, mid, high) == (2 * 45_000, 2 * 67_500, 2 * 90_000)
    assert result.chains[0].operators == "exp → neg" and result.chains[0].known_share == 1.0


def test_neighbours_of_unlike_sizes_save_nothing(tmp_path: Path) -> None:
    chain = [pointwise(1 << 24, 90.0, "aten::exp", inputs=1), pointwise(1 << 20, 9.0, "aten::neg", inputs=1)]
    assert study(analyzed(tmp_path, chain)).chain_totals[3:] == (0, 0, 0)


def test_what_no_compiler_touches_is_no_chain(tmp_path: Path) -> None:
    adds = [
        Call("torch::autograd::AccumulateGrad", inside=[pointwise(1 << 20, 10.0, "aten::add_", ADD)])
        for _ in range(4)
    ]
    assert study(analyzed(tmp_path, adds)).chain_totals[0] == 0
    copies = [Call("aten::copy_", [[8]] * 2, [FP32] * 2, [("Memcpy DtoD", 5.0)], category="gpu_memcpy")] * 3
    assert study(analyzed(tmp_path, copies)).chain_totals[0] == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1000), st.booleans()), min_size=1, max_size=40))
def test_chains_never_save_more_than_they_take(rows: list[tuple[bool, int, bool]]) -> None:
    fusible, ns = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    known = np.array([row[2] for row in rows])
    stream = np.arange(len(rows)) // 15
    outputs, inputs = np.where(known, 8, -1), np.where(known, 8, -2)[:, None]
    read = np.where(known, 0.5, np.nan)
    chains = find_chains(stream, fusible, np.ones(len(rows), dtype=int), ns, outputs, inputs, read, read)
    # A slow walk finds the same chains.
    expected, begin = [], None
    for place in range(len(rows) + 1):
        inside = place < len(rows) and fusible[place]
        if begin is not None and (not inside or stream[place] != stream[begin]):
            if place - begin >= 2:
                expected.append((begin, place - 1, int(ns[begin:place].sum())))
            begin = None
        if inside and begin is None:
            begin = place
    assert list(zip(chains.first.tolist(), chains.last.tolist(), chains.ns.tolist(), strict=True)) == expected
    low, mid, high = chains.saved.T
    assert (
        (low <= mid + 1e-9).all()
        and (mid <= high + 1e-9).all()
        and (high <= chains.ns).all()
        and (low >= 0).all()
    )


def test_small_kernels_and_the_gaps_before_them() -> None:
    start = np.array([0, 6_000, 100_000, 250_000, 7_000])
    end = np.array([5_000, 9_000, 190_000, 251_000, 9_000])
    stream = np.array([0, 0, 0, 0, 1])
    small = small_kernels(stream, start, end)
    assert (small.calls, small.total_ns, small.all_calls) == (4, 5_000 + 3_000 + 1_000 + 2_000, 5)
    assert small.gap_ns == 1_000  # the 60 µs before the fourth are somebody else's


# --- shapes that fit badly -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "tile", "sides"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", (128, 256), "kn"),
        ("ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x5_nn", (64, 64), "kn"),
        ("volta_sgemm_128x64_nt", (128, 64), "mn"),
        ("nvjet_tst_192x128_64x5_2x1_v_bz_coopA_TNT", (192, 128), "kn"),
        ("Cijk_Ailk_Bjlk_BBS_BH_MT64x32x64_MI16x16x16x1_SN", (64, 32), "mn"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x128x64_MI16x16x1", (256, 128), "kn"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", (128, 128), "kn"),
        ("splitKreduce_kernel", None, "n"),
    ],
)
def test_names_tell_tiles_and_layouts(kernel: str, tile: Any, sides: str) -> None:
    assert tile_of(kernel) == tile and "".join(sorted(contiguous(kernel))) == sides


def test_alignment_counts_contiguous_dimensions_only() -> None:
    name = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"
    assert fit_of(Product(1, 8191, 50257, 768), "bf16", name, None).misaligned == ("n",)
    assert fit_of(Product(1, 8191, 50304, 768), "bf16", name, None).misaligned == ()  # tokens are no row
    assert fit_of(Product(1, 4096, 512, 1004), "fp16", name, None).misaligned == ("k",)
    assert fit_of(Product(1, 4096, 512, 1004), "tf32", name, None).misaligned == ()  # 4 elements are 16 bytes
    assert fit_of(Product(1, 4096, 520, 1024), "fp8", name, None).misaligned == ("n",)
    assert padded(50257) == 50304 and padded(50304) == 50304


def test_tiles_and_waves_are_shares_of_what_was_asked_for() -> None:
    name = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
    fit = fit_of(Product(1, 129, 128, 64), "bf16", name, 2, 256, 0.125, 108)
    assert fit.tile_use == pytest.approx(129 / 256)
    assert fit_of(Product(1, 4096, 4096, 64), "bf16", name, 1080, 256, 0.125, 108).wave_use == 1.0
    late = fit_of(Product(1, 4096, 4096, 64), "bf16", name, 109, 256, 0.125, 108)
    assert late.waves == pytest.approx(109 / 108) and late.wave_use == pytest.approx(109 / 216)
    two = fit_of(Product(1, 4096, 4096, 64), "bf16", name, 432, 256, 0.25, 108)  # two blocks fit at a time
    assert two.waves == 2.0 and two.wave_use == 1.0
    persistent = fit_of(
        Product(1, 4096, 4096, 64), "bf16", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 132, 384, 0.1, 132
    )
    assert persistent.waves is None and persistent.wave_use == 1.0


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 100_000),
    st.integers(1, 100_000),
    st.integers(1, 10_000),
    st.integers(0, 10**6),
    st.floats(0, 1),
    st.integers(1, 400),
)
def test_useful_shares_are_shares(m: int, n: int, k: int, blocks: int, occupancy: float, sms: int) -> None:
    for kernel in (MM, "volta_sgemm_64x64_nt", "unheard_of"):
        fit = fit_of(Product(1, m, n, k), "bf16", kernel, blocks, 256, occupancy, sms)
        assert 0 < fit.tile_use <= 1 and 0 < fit.wave_use <= 1


# --- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (MM, True),
        (
            "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize192x128x32_stage4_warpsize4x2x1_tensor16x8x16_kernel",
            True,
        ),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", True),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", True),
        ("volta_fp16_s884gemm_fp16_256x128_ldg8_f2f_nn", True),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", True),
        ("Cijk_Ailk_Bljk_BBS_BH_MT64x64x64_MI16x16x16x1_SN", True),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32", True),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16_SN_K1", False),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>", False),
        ("volta_sgemm_128x64_nt", False),
        ("volta_scudnn_128x64_relu_interior_nn_v1", False),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)", False),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>", False),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", None),
    ],
)
def test_names_tell_tensor_cores(kernel: str, expected: bool | None) -> None:
    assert on_tensor_cores(kernel) is expected


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (MM, "matmul"),
        ("triton_tem_fused_mm_3", "matmul"),
        ("triton_poi_fused_add_0", "fused"),
        (NHWC, "elementwise"),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)", "elementwise"),
        ("MIOpenBatchNormFwdTrainSpatial", "elementwise"),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int, long>", "elementwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("something nobody named", "other"),
    ],
)
def test_names_tell_what_bounds_a_kernel(kernel: str, expected: str) -> None:
    assert classify(kernel) == expected


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, K<1, 2> >, false, true, false, true>(p)",
            True,
        ),
        (
            "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128>, false, false, false>(p)",
            False,
        ),
        ("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 128>, true, false>(p)", True),
        ("attn_fwd", None),
        ("void flash_fwd_kernel<cut off", None),
    ],
)
def test_names_tell_causal_masks(kernel: str, expected: bool | None) -> None:
    assert causal(kernel) is expected


def test_a_causal_kernel_does_half_the_work(tmp_path: Path) -> None:
    def flops(flag: str) -> float | None:
        name = (
            f"void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, false, {flag}, false>(p)"
        )
        shape = [8, 1024, 16, 64]
        call = Call("aten::_flash_attention_forward", [shape] * 3, [BF16] * 3, [(name, 500.0)])
        return study(analyzed(tmp_path, [call], steps=2)).shapes[0].flops

    whole = 4 * 8 * 16 * 1024 * 1024 * 64
    assert flops("false") == whole and flops("true") == whole / 2


def test_a_kernel_in_a_word() -> None:
    assert kernel_word(MUL) == "Mul" and kernel_word(ADD) == "add"
    assert kernel_word("triton_poi_fused_add_0") == "triton_poi_fused_add_0"


# --- real traces -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(data: Path) -> dict[str, KernelEfficiency]:
    folder = data / "traces" / "kineto"
    names = {
        "h100": "single/h100_qwen1.5_0.5b.json.gz",
        "mi300x": "single/mi300x_qwen1.5_0.5b.json.gz",
        "resnet": "single/torch1.9_resnet50_workers0.json.gz",
        "megatron": "megatron_tp8_a100",
    }
    return {key: study(trine.analyze(trine.load(folder / name))) for key, name in names.items()}


def test_no_real_kernel_is_faster_than_its_device(real: dict[str, KernelEfficiency]) -> None:
    for name, result in real.items():
        known = [one.efficiency for one in result.rooflines if one.efficiency is not None]
        assert known and max(known) <= 1.0, name
        assert sum(row.ns for row in result.operators) <= result.total_ns
        assert len(pickle.dumps(result)) < 200_000


def test_real_products_reach_what_such_products_reach(real: dict[str, KernelEfficiency]) -> None:
    def best(result: KernelEfficiency) -> float:
        pairs = zip(result.shapes, result.rooflines, strict=True)
        return max(
            one.efficiency or 0.0 for row, one in pairs if row.product is not None and row.ns > 1_000_000
        )

    assert 0.6 < best(real["h100"]) < 0.8  # cuBLAS on Hopper, thin products
    assert 0.3 < best(real["mi300x"]) < 0.6
    assert 0.8 < best(real["megatron"]) < 0.87  # the best rate measured on an A100 is 87 % of its peak


def test_one_model_on_two_devices_does_the_same_work(real: dict[str, KernelEfficiency]) -> None:
    def flops(result: KernelEfficiency) -> dict[tuple[str, str], float]:
        return {(row.operator, row.shapes): row.flops for row in result.shapes if row.flops and row.product}

    first, second = flops(real["h100"]), flops(real["mi300x"])
    large = {key for key, value in first.items() if value > 1e10}
    assert large and all(first[key] == second[key] for key in large)


def test_the_old_resnet_runs_its_products_in_fp32_off_the_tensor_cores(
    real: dict[str, KernelEfficiency],
) -> None:
    result = real["resnet"]
    assert "used" not in result.products and result.products["unused"] > 0.99 * sum(result.products.values())
    assert next(iter(result.precision)) == "fp32"
    shortcut = [row for row in result.shapes if row.shortcut]
    assert shortcut, "its 3×3 convolutions use Winograd, and would seem faster than the device"
