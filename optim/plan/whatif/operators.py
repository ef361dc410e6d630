"""What an operator of a trace does: a product of so many rows, work on memory of so many elements, or neither.

Names are PyTorch's (``aten::addmm``); shapes as its profiler writes them. What is no product and no work that is known by
name is *glue*: views, dispatch, Python between operators.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

__all__ = ["ARITHMETIC", "DTYPE_BYTES", "TRANSFER", "WAIT", "Kind", "Operator", "Product", "operator_of"]

Kind = Literal["product", "memory", "glue", "wait", "transfer"]

#: Bytes of an element, by the names that calibrations have.
DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_DTYPES = {
    "float": "fp32",
    "c10::bfloat16": "bf16",
    "c10::half": "fp16",
    "bfloat16": "bf16",
    "half": "fp16",
}


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products of (rows, inner) by (inner, columns)."""

    batch: int
    rows: int
    columns: int
    inner: int

    @property
    def multiplications(self) -> int:
        """Half the FLOPs."""
        return self.batch * self.rows * self.columns * self.inner


@dataclass(frozen=True, slots=True)
class Operator:
    """``work`` is the calibrated operation that it is timed by, None for glue; ``elements`` of its largest tensor, or list of
    tensors. A ``convolution`` is timed as the product that it is like."""

    kind: Kind
    work: str | None
    product: Product | None
    elements: int
    dtype: str


#: Waiting for others, and bytes on a link.
WAIT = Operator("wait", None, None, 0, "fp32")
TRANSFER = Operator("transfer", None, None, 0, "fp32")
#: Operator → the calibrated work on memory that is like it (``profiler/calibrate_operations.py``).
_MEMORY = {
    "aten::add": "add",
    "aten::sub": "add",
    "aten::mul": "multiply",
    "aten::div": "multiply",
    "aten::neg": "multiply",
    "aten::add_": "add_in_place",
    "aten::sub_": "add_in_place",
    "aten::mul_": "add_in_place",
    "aten::div_": "add_in_place",
    "aten::lerp_": "add_in_place",
    "aten::addcmul_": "add_in_place",
    "aten::addcdiv_": "add_in_place",
    "aten::sqrt": "multiply",
    "aten::rsqrt": "multiply",
    "aten::pow": "multiply",
    "aten::where": "masked_fill",
    "aten::masked_fill": "masked_fill",
    "aten::masked_fill_": "masked_fill",
    "aten::gelu": "gelu",
    "aten::gelu_backward": "gelu_backward",
    "aten::silu": "gelu",
    "aten::silu_backward": "gelu_backward",
    "aten::relu": "multiply",
    "aten::clamp_min": "multiply",
    "aten::clamp_min_": "add_in_place",
    "aten::exp": "gelu",
    "aten::threshold_backward": "add",
    "aten::tanh": "gelu",
    "aten::tanh_backward": "add",
    "aten::sigmoid": "gelu",
    "aten::_softmax": "softmax",
    "aten::_log_softmax": "softmax",
    "aten::_softmax_backward_data": "softmax_backward",
    "aten::_log_softmax_backward_data": "softmax_backward",
    "aten::native_layer_norm": "layer_norm",
    "aten::native_layer_norm_backward": "layer_norm_backward",
    "aten::_fused_rms_norm": "layer_norm",
    "aten::_fused_rms_norm_backward": "layer_norm_backward",
    "aten::native_batch_norm": "layer_norm",
    "aten::native_batch_norm_backward": "layer_norm_backward",
    "aten::cudnn_batch_norm": "layer_norm",
    "aten::cudnn_batch_norm_backward": "layer_norm_backward",
    "aten::miopen_batch_norm": "layer_norm",
    "aten::miopen_batch_norm_backward": "layer_norm_backward",
    "aten::max_pool2d_with_indices": "copy",
    "aten::max_pool2d_with_indices_backward": "copy",
    "aten::native_dropout": "masked_fill",
    "aten::native_dropout_backward": "add",
    "aten::bernoulli_": "gelu",
    "aten::sum": "sum",
    "aten::mean": "sum",
    "aten::clone": "transposed_copy",
    "aten::copy_": "copy",
    "aten::contiguous": "transposed_copy",
    "aten::cat": "copy",
    "aten::stack": "copy",
    "aten::zero_": "multiply",
    "aten::fill_": "multiply",
    "aten::index_select": "copy",
    "aten::embedding_dense_backward": "copy",
    "torch::distributed::reducer::mul_out": "copy",
}
#: Operators on lists of tensors: ``aten::_foreach_mul_`` is ``aten::mul_`` of each, a fused optimizer updates them in place.
_FOREACH, _FUSED = "aten::_foreach_", ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
#: Work that computes more than it moves: what is above a pass over memory stays when it is fused.
ARITHMETIC = frozenset(
    {"gelu", "gelu_backward", "softmax", "softmax_backward", "layer_norm", "layer_norm_backward"}
)
_BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})
_PLAIN = frozenset({"aten::mm", "aten::addmm", "aten::_int_mm", "aten::_scaled_mm"})
#: Convolution → which of its tensors of four sides are the gradient of its output (None: it has none), its input, its weight.
_CONVOLUTION: Mapping[str, tuple[int | None, int, int]] = {
    "aten::mkldnn_convolution": (None, -2, -1),
    "aten::cudnn_convolution": (None, -2, -1),
    "aten::miopen_convolution": (None, -2, -1),
    "aten::_slow_conv2d_forward": (None, -2, -1),
    "aten::thnn_conv2d": (None, -2, -1),
    "aten::convolution_backward": (0, 1, 2),
    "aten::cudnn_convolution_backward": (1, 0, 2),  # until PyTorch 1.10
    "aten::miopen_convolution_backward": (1, 0, 2),
}
_ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")


@lru_cache(maxsize=65536)
def operator_of(name: str, shapes: str | None, types: str | None) -> Operator:
    """What a row of a trace does. ``shapes`` and ``types``: of its inputs, as the profiler wrote them, JSON lists."""
    sizes = _flat(_parsed(shapes))
    elements = max((math.prod(size) for size in sizes), default=1)
    dtype = _dtype(types)
    product = _product(name, sizes)
    if product is not None:
        return Operator(
            "product", "convolution" if name in _CONVOLUTION else "product", product, elements, dtype
        )
    work = _MEMORY.get(name)
    if work is not None and shapes:
        return Operator("memory", work, None, elements, dtype)
    if (work := _of_lists(name)) is not None and (listed := _listed(_parsed(shapes))) > 0:
        return Operator("memory", work, None, listed, dtype)
    return Operator("glue", None, None, 0, dtype)


def _of_lists(name: str) -> str | None:
    """The calibrated work of an operator on lists of tensors."""
    if name.startswith(_FUSED):
        return "add_in_place"
    if name.startswith(_FOREACH):
        return _MEMORY.get(f"aten::{name.removeprefix(_FOREACH)}")
    return None


def _listed(shapes: Sequence[Any]) -> int:
    """Elements of the largest list of tensors; nought where a trace does not say how large they are."""
    lists = [shape for shape in shapes if isinstance(shape, list) and shape and isinstance(shape[0], list)]
    return max((sum(math.prod(size) for size in _flat([each])) for each in lists), default=0)


def _product(name: str, sizes: Sequence[Sequence[int]]) -> Product | None:
    if name in _PLAIN or name in _BATCHED:
        wide = 3 if name in _BATCHED else 2
        factors = [size for size in sizes if len(size) == wide][-2:]
        if len(factors) < 2 or factors[0][-1] != factors[1][-2]:
            return None
        left, right = factors
        return Product(left[0] if wide == 3 else 1, left[-2], right[-1], left[-1])
    if name in _CONVOLUTION:
        return _of_convolution(sizes, *_CONVOLUTION[name])
    if name.startswith(_ATTENTION):
        whole = [size for size in sizes if len(size) == 4]
        if len(whole) < 2:
            return None
        query, key = whole[0], whole[1]
        return Product(query[0] * query[1], query[2], 2 * key[2], query[3])
    return None


def _of_convolution(
    sizes: Sequence[Sequence[int]], output: int | None, image: int, kernel: int
) -> Product | None:
    """As a product over the kernel's window, a row an output. A forward does not say its stride: windows count that do not
    overlap, so that its time is of the right order and no more: it tells no pace."""
    whole = [size for size in sizes if len(size) == 4]
    if len(whole) < (2 if output is None else 3):
        return None
    (samples, _, height, width), weight = whole[image], whole[kernel]
    if output is not None:
        rows = samples * math.prod(whole[output][2:])
    else:
        rows = samples * max(height // max(weight[2], 1), 1) * max(width // max(weight[3], 1), 1)
    return Product(1, rows, weight[0], math.prod(weight[1:]))


def _dtype(types: str | None) -> str:
    """Of the first input that is a float; fp32 where none is."""
    for name in _parsed(types):
        if isinstance(name, str) and (found := _DTYPES.get(name.lower())) is not None:
            return found
    return "fp32"


def _parsed(text: str | None) -> list[Any]:
    if not text:
        return []
    try:
        found = json.loads(text)
    except ValueError:
        return []
    return found if isinstance(found, list) else []


def _flat(shapes: Sequence[Any]) -> list[list[int]]:
    """Sizes of single tensors, and of those in lists."""
    found: list[list[int]] = []
    for shape in shapes:
        if isinstance(shape, list) and shape:
            if all(isinstance(side, int) for side in shape):
                found.append(shape)
            else:
                found += _flat(shape)
    return found
