"""Rules on kernels: each with its fault, and a healthy control beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kernel_traces import BF16, FP32, MM, SGEMM, Call, analyzed, mm, pointwise

from trine.analyzers.results import Finding
from trine.optim.config import Config

#: The same tile and layout as MM, but for rows that are not aligned.
UNALIGNED = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_128x128_32x1_tn_align1>"
#: A layer's products at 70 % of an A100, and enough of them to be a step.
LAYER = [mm(8192, 4096, 4096, 1260.0, grid=108 * 19) for _ in range(20)]


def found(folder: Path, calls: list[Call], **options: Any) -> dict[str, Finding]:
    # A rule needs a hundred spans: twelve steps of a dozen kernels give them.
    return {finding.id: finding for finding in analyzed(folder, calls, steps=12, **options).findings}


# --- gemm-shapes -----------------------------------------------------------------------------------


def vocabulary(size: int, us: float, kernel: str = MM) -> list[Call]:
    return [*LAYER, mm(8192, size, 4096, us, kernel, grid=108 * 237)]


def test_an_odd_vocabulary_is_told_to_be_padded(tmp_path: Path) -> None:
    # 2 · 8192 · 50257 · 4096 operations at 70 % of the peak take 15.4 ms; here they take 60.
    finding = found(tmp_path, vocabulary(50_257, 60_000.0, UNALIGNED))["gemm-shapes"]
    assert finding.kind == "opportunity"
    shape = finding.evidence["shapes"][0]
    assert (shape["n"], shape["why"]) == (50_257, ["alignment"])
    assert finding.recommendation is not None and "50,257 to 50,304" in finding.recommendation.why
    gain = finding.recommendation.predicted.gain_ns  # type: ignore[union-attr]
    assert gain.low < gain.mid < gain.high == pytest.approx(44.6e6, rel=0.05)  # 60 ms less 15.4


@pytest.mark.parametrize(
    ("size", "us", "kernel"),
    [
        (50_304, 15_400.0, MM),  # padded, and as fast as the layers' products
        (50_257, 15_400.0, UNALIGNED),  # odd, and yet as fast: then alignment is not what holds it
        (50_304, 60_000.0, MM),  # slow for some other reason: its shape fits
    ],
)
def test_a_vocabulary_that_fits_or_does_not_cost_is_silent(
    tmp_path: Path, size: int, us: float, kernel: str
) -> None:
    assert "gemm-shapes" not in found(tmp_path, vocabulary(size, us, kernel))


def test_a_last_wave_that_is_nearly_empty_is_found(tmp_path: Path) -> None:
    half = [mm(4096, 4096, 4096, 800.0, grid=109) for _ in range(20)]
    finding = found(tmp_path, half)["gemm-shapes"]
    assert finding.evidence["shapes"][0]["why"] == ["wave"]
    assert finding.evidence["shapes"][0]["wave_use"] == pytest.approx(109 / 216, abs=1e-3)


def test_full_waves_and_short_calls_are_silent(tmp_path: Path) -> None:
    assert "gemm-shapes" not in found(
        tmp_path, [mm(4096, 4096, 4096, 800.0, grid=108 * 5) for _ in range(20)]
    )
    assert "gemm-shapes" not in found(tmp_path, [mm(512, 512, 512, 6.0, grid=109) for _ in range(60)])


def test_without_shapes_nothing_is_said_of_them(tmp_path: Path) -> None:
    calls = [Call("aten::mm", kernels=[(UNALIGNED, 60_000.0)]) for _ in range(10)]
    assert "gemm-shapes" not in found(tmp_path, calls)


# --- tensor-cores-unused ---------------------------------------------------------------------------


def test_fp32_products_of_inference_are_told_of_tf32(tmp_path: Path) -> None:
    finding = found(tmp_path, [mm(4096, 4096, 4096, 9000.0, SGEMM, FP32) for _ in range(12)])[
        "tensor-cores-unused"
    ]
    assert finding.recommendation is not None and finding.recommendation.change == {"precision.tf32": True}
    Config.from_dict({"precision": {"tf32": True}})
    gain = finding.recommendation.predicted.gain_ns  # type: ignore[union-attr]
    # An A100's TF32 is eight times its fp32, of which 0.2 to 0.7 is reached.
    assert pytest.approx(gain.low, rel=0.02) == 12 * 9e6 * (1 - 1 / 1.6)
    assert pytest.approx(gain.high, rel=0.02) == 12 * 9e6 * (1 - 1 / 5.6)


def test_training_in_fp32_is_the_other_rules(tmp_path: Path) -> None:
    backward = Call("autograd::engine::evaluate_function: MmBackward0", sequence=1, backward=True,
                    inside=[mm(4096, 4096, 4096, 9000.0, SGEMM, FP32, backward=True)])  # fmt: skip
    findings = found(tmp_path, [mm(4096, 4096, 4096, 9000.0, SGEMM, FP32, sequence=1), backward] * 6)
    assert "low-precision-unused" in findings and "tensor-cores-unused" not in findings


def test_half_precision_off_the_tensor_cores_is_found(tmp_path: Path) -> None:
    plain = "void cutlass::Kernel2<cutlass_80_simt_bf16_gemm_128x128_8x2_nn_align1>"
    finding = found(tmp_path, [mm(4096, 4096, 4096, 3000.0, plain) for _ in range(12)])["tensor-cores-unused"]
    assert finding.recommendation is not None and finding.recommendation.change == {}
    assert finding.evidence["half_precision_unused_ns"] > 0 and finding.evidence["fp32_unused_ns"] == 0


@pytest.mark.parametrize(
    "device", ["NVIDIA A100-SXM4-80GB", "Tesla P100-SXM2-16GB", "Nobody's Accelerator 9"]
)
def test_tensor_cores_in_use_and_devices_without_are_silent(tmp_path: Path, device: str) -> None:
    kernel, dtype = (MM, BF16) if "A100" in device else (SGEMM, FP32)
    analysis = analyzed(
        tmp_path, [mm(4096, 4096, 4096, 600.0, kernel, dtype) for _ in range(12)], steps=12, device=device
    )
    assert all(finding.id != "tensor-cores-unused" for finding in analysis.findings)
    said = [one.statement for one in analysis.not_bound_by if one.id == "tensor-cores-unused"]
    assert bool(said) == ("A100" in device)


def test_products_with_vectors_need_no_tensor_cores(tmp_path: Path) -> None:
    vector = "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>"
    calls = [Call("aten::mv", [[4096, 4096], [4096]], [FP32, FP32], [(vector, 900.0)]) for _ in range(12)]
    assert "tensor-cores-unused" not in found(tmp_path, calls)


# --- unfused-elementwise ---------------------------------------------------------------------------


def test_chains_say_what_fusion_saves(tmp_path: Path) -> None:
    size = 1 << 26
    chain = [
        pointwise(size, 300.0, name, inputs=1) for name in ("aten::exp", "aten::neg", "aten::sigmoid")
    ] * 4
    finding = found(tmp_path, [mm(4096, 4096, 4096, 600.0), *chain])["unfused-elementwise"]
    gain = finding.recommendation.predicted.gain_ns  # type: ignore[union-attr]
    # Twelve in a row: eleven pairs save a read (150 µs each) at least, a write as well at best.
    assert gain.low == pytest.approx(11 * 150_000, rel=0.02) and gain.high == pytest.approx(
        11 * 300_000, rel=0.02
    )
    assert finding.evidence["top_chains"][0]["operators"].startswith("exp → neg → sigmoid")


def test_elementwise_work_that_stands_alone_is_silent(tmp_path: Path) -> None:
    alone = [call for _ in range(12) for call in (mm(4096, 4096, 4096, 600.0), pointwise(1 << 26, 300.0))]
    assert "unfused-elementwise" not in found(tmp_path, alone)


# --- attention-unfused -----------------------------------------------------------------------------

BATCH, LENGTH, WIDTH = 128, 2048, 64
SCORES = [BATCH, LENGTH, LENGTH]


def attention(softmax: str = "aten::_softmax") -> list[Call]:
    """By hand: scores, their softmax, values; 128 heads of 2,048 tokens."""
    heads, turned = [BATCH, LENGTH, WIDTH], [BATCH, WIDTH, LENGTH]
    return [
        Call("aten::bmm", [heads, turned], [BF16, BF16], [(MM, 1200.0)]),
        Call("aten::div_", [SCORES, []], [BF16, "double"], [("div_elementwise_kernel", 1100.0)]),
        Call(softmax, [SCORES, [], []], [BF16, "Scalar", "Scalar"], [("softmax_warp_forward", 1100.0)]),
        Call("aten::bmm", [SCORES, heads], [BF16, BF16], [(MM, 1200.0)]),
    ]


def test_attention_by_hand_is_found(tmp_path: Path) -> None:
    finding = found(tmp_path, [*attention(), mm(8192, 4096, 4096, 1260.0)] * 4)["attention-unfused"]
    assert finding.recommendation is not None and finding.recommendation.change == {
        "compute.attention": "sdpa"
    }
    assert finding.evidence["scores"] == SCORES and finding.evidence["scores_bytes"] == 2 * BATCH * LENGTH**2
    assert finding.evidence["memory_bound_ns"] == pytest.approx(4 * 2_200_000, rel=0.01)
    gain = finding.recommendation.predicted.gain_ns  # type: ignore[union-attr]
    flops = 4 * BATCH * LENGTH * LENGTH * WIDTH
    assert gain.mid == pytest.approx(4 * (4_600_000 - flops / (312e12 * 0.4) * 1e9), rel=0.01)


def test_its_backward_counts(tmp_path: Path) -> None:
    backward = [
        Call("aten::bmm", [[BATCH, LENGTH, WIDTH], [BATCH, WIDTH, LENGTH]], [BF16, BF16], [(MM, 1200.0)]),
        Call(
            "aten::_softmax_backward_data",
            [SCORES, SCORES, [], []],
            [BF16, BF16],
            [("softmax_warp_backward", 1700.0)],
        ),
    ]
    finding = found(tmp_path, [*attention(), mm(8192, 4096, 4096, 1260.0), *backward] * 4)[
        "attention-unfused"
    ]
    assert (
        finding.evidence["backward_calls"] == finding.evidence["forward_calls"] == 44
    )  # eleven complete steps
    assert finding.evidence["memory_bound_ns"] == pytest.approx(4 * 3_900_000, rel=0.01)


def test_fused_attention_and_products_that_are_none_are_silent(tmp_path: Path) -> None:
    heads = [8, LENGTH, 16, WIDTH]
    fused = Call(
        "aten::_flash_attention_forward", [heads] * 3, [BF16] * 3, [("void flash_fwd_kernel<traits>", 400.0)]
    )
    assert "attention-unfused" not in found(tmp_path, [fused, mm(8192, 4096, 4096, 1260.0)] * 12)
    assert "attention-unfused" not in found(tmp_path, attention("aten::sigmoid") * 4)
    apart = [call for one in attention() for call in (one, mm(8192, 4096, 4096, 1260.0))]
    assert "attention-unfused" not in found(tmp_path, apart * 4)
