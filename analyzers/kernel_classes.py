"""What a kernel or operator is limited by, from its name: arithmetic, or moving memory.

Names come from traces and libraries' sources (torch 1.8 to 2.13; CUDA, ROCm, CPU). A name that matches
nothing is ``other``: what is unknown is never called waste.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

__all__ = ["KernelClass", "classify"]

KernelClass = Literal["matmul", "optimizer", "fused", "elementwise", "other"]

_OPTIMIZER = re.compile(
    r"multi_tensor|_foreach_|_fused_(adam|adamw|sgd|adagrad)|FusedAdam|fused_adam", re.IGNORECASE
)
#: Already joined by a compiler: memory-bound, but not unfused.
_FUSED = re.compile(r"triton_|^triton|^inductor|graph_\d+_cpp_fused|cpp_fused", re.IGNORECASE)
#: Products that a compiler wrote (TorchInductor's templates).
_TEMPLATE = re.compile(r"triton_(?:tem|mm|bmm|flex)_|triton_tem", re.IGNORECASE)
#: Vendors' libraries of convolutions also normalise, reorder and scale; these move memory like any other.
_LIBRARY_MEMORY = re.compile(
    r"cudnn.*::bn_|batch_?norm|bnBwd|bnFwd|MIOpenBatchNorm|nchwToNhwc|nhwcToNchw|scalePackedTensor|tensorTransform"
    r"|batched_transpose|transpose_NCHW|SubTensorOp|OpTensor|cudnn::ops::|pooling|layer_?norm|rms_?norm"
    r"|fbgemm_gpu|split_embedding|im2col|col2im",
    re.IGNORECASE,
)
_MATMUL = re.compile(
    r"gemm|gemv|cutlass|cublas|xmma|wgmma|Cijk_|nvjet|conv(?!ert)|cudnn|miopen|winograd|flash|fmha|attention|attn_(fwd|bwd)"
    r"|efficient_|aten::(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|einsum|mv|addmv|dot|_int_mm|_scaled_mm|_grouped_mm)\b"
    r"|mkldnn|onednn|_scaled_dot_product|lstm|\bgru|wgrad|dgrad",
    re.IGNORECASE,
)
_ELEMENTWISE = re.compile(
    r"elementwise|vectorized_|unrolled_|pointwise|index_|indexSelect|gather|scatter|embedding|cat_?array|CatArrayBatched"
    r"|layer_?norm|batch_?norm|group_?norm|rms_?norm|softmax|dropout|gelu|silu|relu|sigmoid|tanh|bernoulli|distribution_"
    r"|reduce_kernel|nll_loss|copy_kernel|copyBuffer|fill|transpose|permute|cast|Memcpy|Memset|triu_tril"
    r"|aten::(add|add_|sub|sub_|mul|mul_|div|div_|neg|exp|log|pow|sqrt|rsqrt|where|masked_fill|masked_fill_|copy_|clone"
    r"|_to_copy|to|contiguous|cat|stack|sum|mean|var|bernoulli_|native_dropout|fill_|zero_|threshold_backward|addcmul_"
    r"|addcdiv_|lerp_|_log_softmax|_softmax|index_select|index_add_|pad|max_pool2d.*|sqrt_|maximum|minimum|clamp_min_?"
    r"|clamp_max_?|rsub|exp_|log_|cos|sin|abs|norm)\b",
    re.IGNORECASE,
)
_ORDER: tuple[tuple[KernelClass, re.Pattern[str]], ...] = (
    ("optimizer", _OPTIMIZER),
    ("matmul", _TEMPLATE),
    ("fused", _FUSED),
    ("elementwise", _LIBRARY_MEMORY),
    ("matmul", _MATMUL),
    ("elementwise", _ELEMENTWISE),
)


@lru_cache(maxsize=65536)
def classify(name: str) -> KernelClass:
    """``matmul``, ``optimizer``, ``fused``, ``elementwise`` or ``other``; the first that fits."""
    return next((label for label, pattern in _ORDER if pattern.search(name)), "other")
