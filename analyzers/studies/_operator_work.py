"""What an operator must at least do, from its inputs' shapes and types: operations, bytes read and written.

Operations are those of the mathematics, two for a multiply-add, as ``torch.utils.flop_counter`` counts
them: a product of m×k and k×n has 2·m·n·k (times the batch), a convolution 2·outputs·weights per output
channel, attention 4·batch·heads·queries·keys·head size and its backward 2.5 times that. Bytes are every
input once and the output once (Williams, Waterman and Patterson, "Roofline", CACM 2009: compulsory
traffic), so a kernel can move more but not less, unless a cache held its inputs.

What cannot be said from shapes is None: an operator that is not listed, a convolution whose output was
seen nowhere, a type that was not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from ._products import ATTENTION, CONVOLUTIONS, PRODUCTS, Work, attention, convolution, plain_name, total
from ._shapes import Tensor, broadcast, by_position, numel, tensors_of

__all__ = ["work_of"]

Dims = tuple[int, ...]


def work_of(
    operator: str, shapes: str | None, types: str | None, outputs: Mapping[tuple[Dims, Dims], Dims]
) -> Work | None:
    """The work of one call; ``outputs`` is convolution's (input, weight) → output, from :func:`conv_outputs`."""
    name = plain_name(operator)
    if name in CONVOLUTIONS:
        tensors = tensors_of(shapes, types)
        return None if not tensors or len(tensors) < 2 else convolution(name, tensors, outputs)
    return _work(name, shapes, types)


@lru_cache(maxsize=8192)
def _work(name: str, shapes: str | None, types: str | None) -> Work | None:
    build = _BUILDERS.get(name) or (_compiled if name.startswith(_COMPILED) else None)
    if build is None:
        return None
    tensors = tensors_of(shapes, types)
    return build(name, tensors) if tensors else None


# --- what moves memory -----------------------------------------------------------------------------


def _promoted(tensors: Sequence[Tensor]) -> int | None:
    """Bytes an element of the result: a floating type wins over integers, then the wider one."""
    floating = [tensor for tensor in tensors if tensor.floating] or list(tensors)
    sizes = [tensor.size for tensor in floating]
    return None if any(size is None for size in sizes) else max(size for size in sizes if size is not None)


def _moves(
    kind: str, tensors: Sequence[Tensor], written: int | None, size: int | None, outputs: int | None
) -> Work:
    return Work(
        kind=kind,
        read_bytes=total([tensor.bytes for tensor in tensors]),
        write_bytes=None if written is None or size is None else written * size,
        dtype=next((tensor.dtype for tensor in tensors if tensor.floating), None),
        outputs=outputs,
        inputs=tuple(tensor.elements for tensor in tensors)[:4],
    )


def _pointwise(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    """Each element of the broadcast inputs once; comparisons write one byte. A tensor beyond the operator's own
    inputs is ``out=``: where the result goes, not what is read."""
    own = [tensor for tensor in tensors if tensor.argument < _ARGUMENTS[name]]
    if not own:
        return None
    dims = broadcast([tensor.dims for tensor in own])
    if dims is None:
        return _like_first(name, tuple(own))
    size = 1 if name in _COMPARISONS else _promoted(own)
    return _moves("elementwise", own, numel(dims), size, numel(dims))


def _like_first(name: str, tensors: tuple[Tensor, ...]) -> Work:
    """The output is as the first input (normalisations, softmax)."""
    first = tensors[0]
    return _moves("elementwise", tensors, first.elements, first.size, first.elements)


def _dropout(name: str, tensors: tuple[Tensor, ...]) -> Work:
    first = tensors[0]
    size = None if first.size is None else first.size + 1  # the mask
    return _moves("elementwise", tensors[:1], first.elements, size, first.elements)


def _reduction(name: str, tensors: tuple[Tensor, ...]) -> Work:
    """The result is smaller than what is read, by how much the shapes do not tell."""
    return _moves("reduction", tensors[:1], 0, 1, None)


def _copy(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    """``copy_(target, source)``."""
    at = by_position(tensors)
    target, source = at.get(0), at.get(1)
    if target is None or source is None:
        return None
    return _moves("copy", (source,), target.elements, target.size, target.elements)


def _fill(name: str, tensors: tuple[Tensor, ...]) -> Work:
    first = tensors[0]
    return Work("copy", None, 0, first.bytes, first.dtype, None, first.elements, ())


def _joined(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    members = [tensor for tensor in tensors if tensor.member]
    if not members:
        return None
    total = sum(tensor.elements for tensor in members)
    # A list's types are not written: the bytes stay unknown, what is joined does not.
    return _moves("copy", members, total, members[0].size, total)


def _rows(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    """``embedding(weight, indices)``, ``index_select(table, dim, indices)``: whole rows of a table."""
    if len(tensors) < 2 or not tensors[0].dims:
        return None
    table, indices = tensors[0], tensors[-1]
    elements = indices.elements * numel(table.dims[1:])
    moved = None if table.size is None else elements * table.size
    return Work(
        "gather", None, total([moved, indices.bytes]), moved, table.dtype, None, elements, (indices.elements,)
    )


def _lists(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    """Operators on lists of tensors: all are read, the first list is written (fused optimizers: all but gradients)."""
    members = [tensor for tensor in tensors if tensor.member]
    if not members:
        return None
    first = min(tensor.argument for tensor in members)
    kept = [
        t for t in members if (t.argument != first + 1 if name.startswith("_fused") else t.argument == first)
    ]
    return Work(
        "elementwise",
        None,
        total([tensor.bytes for tensor in members]),
        total([tensor.bytes for tensor in kept]),
        next((tensor.dtype for tensor in members if tensor.dtype), None),
    )


#: Kernels that TorchInductor wrote: pointwise, reductions in one or several passes, loops over several.
_COMPILED = ("triton_poi_", "triton_red_", "triton_per_", "triton_for_")


def _compiled(name: str, tensors: tuple[Tensor, ...]) -> Work:
    """A compiled kernel is given what it reads and what it writes: each is moved once at least."""
    return Work(
        "fused",
        None,
        total([tensor.bytes for tensor in tensors]),
        0,
        next((tensor.dtype for tensor in tensors if tensor.floating), None),
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_COMPARISONS = frozenset(_names("eq ne lt le gt ge isnan isinf logical_not logical_and logical_or signbit"))
_UNARY = _names(
    "neg abs exp exp2 log log2 log1p sqrt rsqrt reciprocal square sin cos tan tanh sigmoid relu clamp clamp_min clamp_max "
    "gelu silu mish elu leaky_relu hardtanh hardswish softplus erf floor ceil round sign threshold cumsum triu tril nan_to_num "
    "_to_copy clone contiguous isnan isinf logical_not bitwise_not signbit"
)
_BINARY = _names(
    "add sub rsub mul div pow maximum minimum bitwise_and bitwise_or bitwise_xor remainder fmod threshold_backward "
    "gelu_backward silu_backward tanh_backward sigmoid_backward elu_backward hardswish_backward leaky_relu_backward "
    "hardtanh_backward native_dropout_backward masked_fill mul_out atan2 polar eq ne lt le gt ge logical_and logical_or"
)
_TERNARY = _names("where addcmul addcdiv lerp")
#: Tensors that an elementwise operator may be given.
_ARGUMENTS = {**dict.fromkeys(_UNARY, 1), **dict.fromkeys(_BINARY, 2), **dict.fromkeys(_TERNARY, 3)}
_LIKE_FIRST = _names(
    "softmax _softmax _log_softmax log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm "
    "layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward rms_norm _fused_rms_norm "
    "_fused_rms_norm_backward cudnn_batch_norm native_batch_norm _native_batch_norm_legit miopen_batch_norm "
    "cudnn_batch_norm_backward native_batch_norm_backward miopen_batch_norm_backward batch_norm_backward "
    "FusedLayerNormAffineFunction FusedRMSNormAffineFunction FastLayerNormFN ScaledUpperTriangMaskedSoftmax "
    "ScaledMaskedSoftmax ScaledSoftmax GeLUFunction"
)
_REDUCTIONS = _names(
    "sum mean var std norm linalg_vector_norm max min amax amin argmax argmin all any prod logsumexp nll_loss_forward "
    "max_pool2d_with_indices var_mean embedding_dense_backward"
)
_BUILDERS: dict[str, Callable[[str, tuple[Tensor, ...]], Work | None]] = {
    **dict.fromkeys(_ARGUMENTS, _pointwise),
    **dict.fromkeys(_LIKE_FIRST, _like_first),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(("fill", "zero", "uniform", "normal", "bernoulli", "random", "exponential"), _fill),
    **dict.fromkeys(ATTENTION, attention),
    **PRODUCTS,
    "native_dropout": _dropout,
    "copy": _copy,
    "cat": _joined,
    "stack": _joined,
    "embedding": _rows,
    "index_select": _rows,
    **dict.fromkeys(
        ("_foreach_add", "_foreach_mul", "_foreach_div", "_foreach_sub", "_foreach_addcmul", "_foreach_addcdiv",
         "_foreach_lerp", "_foreach_sqrt", "_foreach_pow", "_foreach_copy", "_fused_adam", "_fused_adamw", "_fused_sgd"),
        _lists,
    ),
}  # fmt: skip
