"""Kernel names of the libraries that communicate, and of those that only look so."""

from __future__ import annotations

import pytest

from trine.record.kernels import is_communication, operation_of

COMMUNICATION = {
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)": "all_gather",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": None,
    "oneccl_allreduce_pcie_kernel": "all_reduce",
    "hcom_allReduce__409_0_1": "all_reduce",
    "void deep_ep::internode::dispatch<false, 4, ...>(int4*, float*)": "all_to_all",
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(...)": "all_to_all",
    "nvshmemi_transfer_on_stream": None,
    "void mscclKernel_Sum_half_LL(ncclDevComm*)": None,
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(...)": "all_reduce",
    "void two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(...)": "all_reduce",
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>": "all_reduce",
    "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop": "all_reduce",
}

COMPUTE = (
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(...)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>(...)",
    "void at::native::vectorized_gather_kernel<16, long>(...)",
    "triton_poi_fused_all_gather_into_tensor_wait_tensor_3",
    "triton_red_fused_all_reduce_native_layer_norm_0",
    "flash_fwd_kernel",
    "__amd_rocclr_copyBuffer",
    "Cijk_Alik_Bljk_HHS_BH_MT128x128x32",
    "void at::native::broadcast_kernel<float>()",
    "void splitKreduce_kernel<32, 16, int, float>()",
)


@pytest.mark.parametrize(("name", "operation"), COMMUNICATION.items())
def test_communication(name: str, operation: str | None) -> None:
    assert is_communication(name)
    assert operation_of(name) == operation


@pytest.mark.parametrize("name", COMPUTE)
def test_compute(name: str) -> None:
    assert not is_communication(name)
