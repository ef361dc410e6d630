"""Operations and bytes of products, convolutions and attention, from their inputs' shapes and types.

Operations are those of the mathematics, two for a multiply-add, as ``torch.utils.flop_counter`` counts
them: a product of m×k and k×n has 2·m·n·k (times the batch), a convolution 2·outputs·weights per output
channel, attention 4·batch·heads·queries·keys·head size and its backward 2.5 times that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ._shapes import Tensor, broadcast, by_position, numel, tensors_of

__all__ = [
    "ATTENTION",
    "CONVOLUTIONS",
    "HALVES",
    "PRODUCTS",
    "Dims",
    "Product",
    "Work",
    "attention",
    "conv_inputs",
    "conv_outputs",
    "convolution",
    "output_like",
    "plain_name",
    "total",
]

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: batch × (m×k times k×n)."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Work:
    """``kind``: matmul, convolution, attention, elementwise, reduction, copy or gather. ``outputs`` are the
    elements of the output (None where unknown), ``inputs`` those of each input."""

    kind: str
    flops: int | None = None
    read_bytes: int | None = None
    write_bytes: int | None = None
    dtype: str | None = None
    product: Product | None = None
    outputs: int | None = None
    inputs: tuple[int, ...] = ()


def plain_name(operator: str) -> str:
    """``aten::add_`` → ``add``: without the name space and the mark of an operator in place."""
    name = operator.rsplit("::", 1)[-1]
    return name.rstrip("_") if not name.startswith("__") else name


def total(sizes: Sequence[int | None]) -> int | None:
    """The sum, None where a part is unknown."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


# --- products --------------------------------------------------------------------------------------


def _product(first: Tensor, second: Tensor, product: Product, more: Sequence[Tensor] = ()) -> Work:
    outputs = product.batch * product.m * product.n
    # An fp8 or integer product writes a wider type; what it writes is then not known.
    wide = first.size is not None and first.size >= 2
    return Work(
        kind="matmul",
        flops=2 * product.batch * product.m * product.n * product.k,
        read_bytes=total([first.bytes, second.bytes, *(tensor.bytes for tensor in more)]),
        write_bytes=outputs * first.size if wide and first.size is not None else outputs,
        dtype=first.dtype,
        product=product,
        outputs=outputs,
        inputs=(first.elements, second.elements),
    )


def _mm(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    """``mm(a, b)``, ``addmm(bias, a, b)`` and their like."""
    at = by_position(tensors)
    first = 1 if name.startswith(("addmm", "_addmm")) else 0
    a, b = at.get(first), at.get(first + 1)
    if a is None or b is None or len(a.dims) != 2 or len(b.dims) != 2 or a.dims[1] != b.dims[0]:
        return None
    more = [at[0]] if first == 1 and 0 in at else []
    return _product(a, b, Product(1, a.dims[0], b.dims[1], a.dims[1]), more)


def _bmm(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    at = by_position(tensors)
    first = 1 if name.startswith(("baddbmm", "addbmm")) else 0
    a, b = at.get(first), at.get(first + 1)
    if a is None or b is None or len(a.dims) != 3 or len(b.dims) != 3 or a.dims[2] != b.dims[1]:
        return None
    # beta is often 0 and then the first input is not read (Megatron's attention): it is not counted.
    return _product(a, b, Product(a.dims[0], a.dims[1], b.dims[2], a.dims[2]))


def _linear(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    at = by_position(tensors)
    x, weight = at.get(0), at.get(1)
    if x is None or weight is None or len(weight.dims) != 2 or not x.dims or x.dims[-1] != weight.dims[1]:
        return None
    return _product(x, weight, Product(1, numel(x.dims[:-1]), weight.dims[0], weight.dims[1]))


def _matmul(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    at = by_position(tensors)
    a, b = at.get(0), at.get(1)
    if a is None or b is None or len(a.dims) < 2 or len(b.dims) < 2 or a.dims[-1] != b.dims[-2]:
        return None
    batch = numel(broadcast([a.dims[:-2], b.dims[:-2]]) or ())
    return _product(a, b, Product(batch, a.dims[-2], b.dims[-1], a.dims[-1]))


def _mv(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    at = by_position(tensors)
    first = 1 if name == "addmv" else 0
    a, x = at.get(first), at.get(first + 1)
    if a is None or x is None or len(a.dims) != 2 or x.dims != a.dims[1:]:
        return None
    return _product(a, x, Product(1, a.dims[0], 1, a.dims[1]))


# --- convolutions ----------------------------------------------------------------------------------

#: Name → (argument of the output's gradient or None, of the input, of the weight, products it is worth).
CONVOLUTIONS: dict[str, tuple[int | None, int, int, int]] = {
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "cudnn_convolution", "miopen_convolution",
         "mkldnn_convolution", "thnn_conv2d", "slow_conv2d_forward", "_conv_depthwise2d", "cudnn_convolution_relu",
         "convolution_overrideable", "miopen_depthwise_convolution", "_slow_conv2d_forward"),
        (None, 0, 1, 1),
    ),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), (0, 1, 2, 2)),
    **dict.fromkeys(("cudnn_convolution_backward", "miopen_convolution_backward", "mkldnn_convolution_backward"), (1, 0, 2, 2)),
}  # fmt: skip
#: Nothing needs the gradient of an image: a convolution of at most so many channels is the first of its model,
#: and its backward is that of the weight alone.
_IMAGE_CHANNELS = 4


#: Halves of an older convolution's backward: neither has all three shapes, the operator around them has.
HALVES = frozenset(
    f"aten::{library}_convolution_{half}"
    for library in ("cudnn", "miopen", "mkldnn", "thnn")
    for half in ("backward_input", "backward_weight", "backward_bias", "backward_weights")
)


def conv_outputs(
    calls: Sequence[tuple[str, str | None, str | None]],
) -> dict[tuple[Dims, Dims], Dims]:
    """(input, weight) → output of convolutions, as their backward operators show it (name, shapes, types)."""
    found: dict[tuple[Dims, Dims], Dims] = {}
    for operator, shapes, types in calls:
        gradient, x, weight, _ = CONVOLUTIONS.get(plain_name(operator), (None, 0, 0, 0))
        tensors = tensors_of(shapes, types) if gradient is not None else None
        if tensors and gradient is not None:
            at = by_position(tensors)
            if gradient in at and x in at and weight in at:
                found[at[x].dims, at[weight].dims] = at[gradient].dims
    return found


def conv_inputs(operator: str, shapes: str | None, types: str | None) -> tuple[Dims, Dims] | None:
    """(input, weight) of a forward convolution; None of anything else."""
    gradient, x, weight, _ = CONVOLUTIONS.get(plain_name(operator), (0, 0, 0, 0))
    tensors = tensors_of(shapes, types) if gradient is None else None
    at = by_position(tensors) if tensors else {}
    if x not in at or weight not in at or len(at[weight].dims) < 3 or len(at[x].dims) != len(at[weight].dims):
        return None
    return at[x].dims, at[weight].dims


def output_like(shapes: str | None, x: Dims, weight: Dims) -> Dims | None:
    """The first tensor of these that could be the output of a convolution: its batch, its channels, no larger a side."""
    for tensor in tensors_of(shapes, None) or ():
        dims = tensor.dims
        if (
            len(dims) == len(x)
            and dims[:2] == (x[0], weight[0])
            and all(side <= before for side, before in zip(dims[2:], x[2:], strict=True))
        ):
            return dims
    return None


def convolution(
    name: str, tensors: tuple[Tensor, ...], outputs: Mapping[tuple[Dims, Dims], Dims]
) -> Work | None:
    gradient, position, weights, products = CONVOLUTIONS[name]
    at = by_position(tensors)
    x, weight = at.get(position), at.get(weights)
    if x is None or weight is None or len(weight.dims) < 3:
        return None
    y = at[gradient].dims if gradient is not None and gradient in at else outputs.get((x.dims, weight.dims))
    if y is None:
        return None
    if products == 2 and len(x.dims) > 1 and x.dims[1] <= _IMAGE_CHANNELS:
        products = 1
    # A transposed convolution's weight is (in, out, …): each of its inputs meets the weights instead.
    transposed = len(y) > 1 and y[1] != weight.dims[0]
    met = numel(x.dims) if transposed else numel(y)
    size = x.size
    moved = None if size is None else size * numel(y)
    own, weight_bytes = x.bytes, weight.bytes
    backward = gradient is not None
    return Work(
        kind="convolution",
        flops=2 * products * met * numel(weight.dims[1:]),
        read_bytes=total([own, weight_bytes, moved if backward else 0]),
        write_bytes=total([own if products == 2 else 0, weight_bytes]) if backward else moved,
        dtype=x.dtype,
        outputs=numel(y) if not backward else None,
        inputs=(x.elements,),
    )


# --- attention -------------------------------------------------------------------------------------

#: Attention by name → (first argument among q, k, v; whether heads come before positions).
ATTENTION: dict[str, tuple[int, bool]] = {
    "_flash_attention_forward": (0, False),
    "_efficient_attention_forward": (0, False),
    "_scaled_dot_product_flash_attention": (0, True),
    "_scaled_dot_product_efficient_attention": (0, True),
    "_scaled_dot_product_cudnn_attention": (0, True),
    "_scaled_dot_product_fused_attention_overrideable": (0, True),
    "_scaled_dot_product_flash_attention_for_cpu": (0, True),
    "_flash_attn_forward": (0, False),
    "efficient_attention_forward_cutlass": (0, False),
    "efficient_attention_backward_cutlass": (1, False),
    "FlashAttnFunc": (0, False),
    "_flash_attention_backward": (1, False),
    "_efficient_attention_backward": (1, False),
    "_scaled_dot_product_flash_attention_backward": (1, True),
    "_scaled_dot_product_efficient_attention_backward": (1, True),
    "_scaled_dot_product_cudnn_attention_backward": (1, True),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, True),
    "_flash_attn_backward": (1, False),
}


def attention(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    """Without a mask. Packed sequences of unlike length (three dimensions) tell no length each: None."""
    first, heads_first = ATTENTION[name]
    at = by_position(tensors)
    q, k, v = (at.get(first + place) for place in range(3))
    if q is None or k is None or v is None or not len(q.dims) == len(k.dims) == len(v.dims) == 4:
        return None
    batch, heads, queries, width = q.dims if heads_first else (q.dims[0], q.dims[2], q.dims[1], q.dims[3])
    keys = k.dims[2] if heads_first else k.dims[1]
    flops = 2 * batch * heads * queries * keys * (width + v.dims[3])
    backward = first == 1
    inputs = [q.bytes, k.bytes, v.bytes]
    return Work(
        kind="attention",
        flops=flops * 5 // 2 if backward else flops,
        read_bytes=total([*inputs, q.bytes, q.bytes] if backward else inputs),
        write_bytes=total(inputs) if backward else q.bytes,
        dtype=q.dtype,
        outputs=None if backward else q.elements,
        inputs=(q.elements,),
    )


def _grouped_mm(name: str, tensors: tuple[Tensor, ...]) -> Work | None:
    """``_grouped_mm(a, b)`` of experts: each row of a (tokens × k) meets one of b's matrices (experts × k × n)."""
    at = by_position(tensors)
    a, b = at.get(0), at.get(1)
    if a is None or b is None or len(a.dims) != 2 or len(b.dims) != 3 or a.dims[1] not in b.dims[1:]:
        return None
    columns = b.dims[2] if a.dims[1] == b.dims[1] else b.dims[1]
    return replace(_product(a, b, Product(1, a.dims[0], columns, a.dims[1])), product=None)


#: Matrix products by name.
PRODUCTS: dict[str, Callable[[str, tuple[Tensor, ...]], Work | None]] = {
    **dict.fromkeys(("mm", "addmm", "_addmm_activation", "_scaled_mm", "_int_mm", "sspaddmm"), _mm),
    **dict.fromkeys(("bmm", "baddbmm", "addbmm"), _bmm),
    **dict.fromkeys(("mv", "addmv"), _mv),
    "linear": _linear,
    "mkldnn_linear": _linear,
    "matmul": _matmul,
    "_grouped_mm": _grouped_mm,
    "_scaled_grouped_mm": _grouped_mm,
}
