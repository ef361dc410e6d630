"""What a kernel or operator is limited by, from its name: arithmetic, or moving memory.

Names come from the traces under test (torch 1.8 to 2.13; CUDA, ROCm, CPU). A name that matches
nothing is counted as arithmetic: what is unknown is never called waste.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from trine.analyzers.results import NamedTime, RankSummary

__all__ = ["by_class", "classify", "work"]

_MATMUL = re.compile(
    r"gemm|gemv|cutlass|cublas|xmma|wgmma|Cijk_|nvjet|conv(?!ert)|cudnn|miopen|winograd|flash|fmha|attention"
    r"|efficient_|aten::(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|einsum|mv|dot|_int_mm|_scaled_mm|_grouped_mm)\b"
    r"|mkldnn|onednn|_scaled_dot_product|lstm|gru",
    re.IGNORECASE,
)
_OPTIMIZER = re.compile(
    r"multi_tensor|_foreach_|_fused_(adam|adamw|sgd|adagrad)|FusedAdam|fused_adam", re.IGNORECASE
)
#: Already joined by a compiler: memory-bound, but not unfused.
_FUSED = re.compile(r"triton_|^inductor|graph_\d+_cpp_fused|cpp_fused", re.IGNORECASE)
_ELEMENTWISE = re.compile(
    r"elementwise|vectorized_|unrolled_|pointwise|index_|indexSelect|gather|scatter|embedding|cat_?array|CatArrayBatched"
    r"|layer_?norm|batch_?norm|group_?norm|rms_?norm|softmax|dropout|gelu|silu|relu|sigmoid|tanh|bernoulli|distribution_"
    r"|reduce_kernel|nll_loss|copy_kernel|fill|transpose|permute|cast|Memcpy|Memset"
    r"|aten::(add|add_|sub|sub_|mul|mul_|div|div_|neg|exp|log|pow|sqrt|rsqrt|where|masked_fill|masked_fill_|copy_|clone"
    r"|_to_copy|to|contiguous|cat|stack|sum|mean|var|bernoulli_|native_dropout|fill_|zero_|threshold_backward|addcmul_"
    r"|addcdiv_|lerp_|_log_softmax|_softmax|index_select|index_add_|pad|max_pool2d.*|sqrt_|maximum|minimum)\b",
    re.IGNORECASE,
)


def classify(name: str) -> str:
    """``matmul``, ``optimizer``, ``fused``, ``elementwise`` or ``other``; the first that fits."""
    for label, pattern in (
        ("optimizer", _OPTIMIZER),
        ("fused", _FUSED),
        ("matmul", _MATMUL),
        ("elementwise", _ELEMENTWISE),
    ):
        if pattern.search(name):
            return label
    return "other"


def work(summary: RankSummary) -> tuple[NamedTime, ...]:
    """The rank's compute by name: kernels, or operators (self time) where there is no device."""
    return tuple(row for row in (summary.kernels or summary.operators) if row.kind != "communication")


def by_class(rows: Iterable[NamedTime]) -> dict[str, int]:
    """Time of ``rows`` by class, ns."""
    total: dict[str, int] = {}
    for row in rows:
        label = classify(row.name)
        total[label] = total.get(label, 0) + row.total_ns
    return total
