"""Kernels and operators by name, and the precision of matrix products."""

from __future__ import annotations

import numpy as np
import pytest
from analysis_tables import rank_of

from trine.analyzers.precision import matmul_dtype
from trine.analyzers.results import NamedTime
from trine.analyzers.tables import add_up, kernel_times, matmul_times, operator_times


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "bf16"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "bf16"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_128x128_32x5_tn_align8>", "fp16"),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "fp16"),
        ("volta_fp16_s884gemm_fp16_256x128_ldg8_f2f_nn", "fp16"),
        ("volta_h884gemm_256x128_ldg8_nn", "fp16"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>", "tf32"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16", "tf32"),
        ("volta_sgemm_32x128_tn", "fp32"),
        ("ampere_sgemm_32x32_sliced1x4_tn", "fp32"),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int)", "fp32"),
        ("sm90_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n_tilesize128x128x128", "fp8"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "bf16"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "fp16"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT64x64x64_MI16x16x16x1", "bf16"),
        ("Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64", "bf16"),
        ("Cijk_Ailk_Bjlk_HHS_BH_MT64x64x64", "fp16"),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32", "fp32"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", None),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", None),
        ("gemm_of_unknown_type", None),
    ],
)
def test_kernel_names_tell_the_precision(kernel: str, dtype: str | None) -> None:
    assert matmul_dtype(kernel) == dtype


def kernels():
    rank = rank_of(
        device=[
            (0, 10, "compute", -1, 0, "volta_sgemm_1"),
            (5, 10, "compute", -1, 0, "volta_sgemm_1"),
            (0, 7, "copy", -1, 0, "Memcpy HtoD"),
            (0, 3, "compute", -1, 0, "sm80_xmma_fprop_tf32f32"),
            (0, 99, "communication", -1, 0, "volta_sgemm_1"),
        ]
    )
    assert rank.device is not None
    return rank.device


def test_kernels_are_summed_by_name_and_kind() -> None:
    device = kernels()
    assert kernel_times(device, np.arange(5)) == (
        NamedTime("volta_sgemm_1", "communication", 1, 99),
        NamedTime("volta_sgemm_1", "compute", 2, 15),
        NamedTime("Memcpy HtoD", "copy", 1, 7),
        NamedTime("sm80_xmma_fprop_tf32f32", "compute", 1, 3),
    )
    assert matmul_times(device, np.arange(5)) == {"fp32": 15, "tf32": 3}
    assert kernel_times(None, np.arange(0)) == () and matmul_times(None, np.arange(0)) == {}


def test_operators_count_what_no_operator_inside_them_takes() -> None:
    host = rank_of(
        host=[
            (0, 100, "operator", "aten::linear", 1),
            (10, 90, "python", "forward", 1, 0),
            (20, 80, "operator", "aten::addmm", 1, 1),  # linear's, through a Python frame
            (30, 40, "runtime", "cudaLaunchKernel", 1, 2),  # addmm's own
            (50, 60, "operator", "aten::copy_", 1, 2),
            (200, 200, "operator", "aten::nothing", 1),
        ]
    ).host
    assert host is not None
    assert operator_times(host, np.ones(len(host), dtype=bool)) == (
        NamedTime("aten::addmm", "operator", 1, 50),
        NamedTime("aten::linear", "operator", 1, 40),
        NamedTime("aten::copy_", "operator", 1, 10),
    )
    assert operator_times(None, np.ones(0, dtype=bool)) == ()


def test_ranks_add_up() -> None:
    one = (NamedTime("a", "compute", 1, 10), NamedTime("b", "copy", 2, 30))
    assert add_up([one, one, ()]) == (NamedTime("b", "copy", 4, 60), NamedTime("a", "compute", 2, 20))
