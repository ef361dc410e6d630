"""Regions of a transformer computed as one: norms, gated feed-forward, residual adds, rotary positions, the loss.

    from trine.optim.runtime import regions

    x = regions.bias_dropout_residual(self.mlp(regions.rms_norm(x, weight, eps)), None, x, 0.1, self.training)
    loss = regions.linear_cross_entropy(hidden, head.weight, targets)

A chain of elementwise operators reads and writes memory once an operator; a region does once. Each function takes
the best implementation for where its tensors lie (:func:`implementation`): Liger's kernels on CUDA where installed, a
region compiled by ``torch.compile``, or PyTorch's own kernel where that is as good or nothing can compile. Under an
outer ``torch.compile`` they are plain operators, which that one fuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from trine.optim.runtime.regions import _bodies as bodies
from trine.optim.runtime.regions._bodies import ACTIVATIONS
from trine.optim.runtime.regions._compiled import Compiled, compiler_missing, find_missing
from trine.optim.runtime.regions._cross_entropy import ChunkedLinearCrossEntropy, rows_of_a_chunk
from trine.optim.runtime.regions._dropout import BiasDropoutResidual
from trine.optim.runtime.regions._liger import kernel_for, liger
from trine.record.errors import UsageError

__all__ = [
    "ACTIVATIONS",
    "COMPILED",
    "bias_dropout_residual",
    "bodies",
    "compiler_missing",
    "find_missing",
    "gated",
    "gelu",
    "implementation",
    "layer_norm",
    "liger",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "rotary_tables",
]

COMPILED = {
    body.__name__: Compiled(body)
    for body in (
        bodies.layer_norm,
        bodies.rms_norm,
        bodies.gated,
        bodies.gelu,
        bodies.bias_dropout_residual,
        bodies.rotary,
    )
}

#: On CPUs the compiler's code is slower than PyTorch's own kernels for these (benchmarks/fused_regions.py).
_NOT_ON_CPU = frozenset({"layer_norm", "gelu", "bias_dropout_residual"})


def implementation(region: str, x: torch.Tensor) -> str:
    """``liger``, ``compiled`` or ``pytorch``: what computes ``region`` (a name in this module) on such a tensor."""
    if torch.compiler.is_compiling() or not x.is_floating_point() or type(x).__name__ == "DTensor":
        return "pytorch"
    kind = x.device.type
    if kernel_for(region, x) is not None:
        return "liger"
    if region not in COMPILED or (kind == "cpu" and region in _NOT_ON_CPU):
        return "pytorch"
    return "pytorch" if compiler_missing(kind) or COMPILED[region].failure else "compiled"


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5
) -> torch.Tensor:
    """Layer norm over the last dimension, (..., H) to the same; weight and bias (H)."""
    how = implementation("layer_norm", x)
    if how == "liger" and weight is not None and bias is not None:
        return _tensor(_kernel("layer_norm", x)(x, weight, bias, eps))
    if how != "compiled":
        return bodies.layer_norm(x, weight, bias, eps)
    rows = _rows(x)
    return _tensor(COMPILED["layer_norm"](((rows, (0,)),), rows, weight, bias, eps)).view(x.shape)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float | None = None, offset: float = 0.0
) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, (..., H) to the same; ``offset + weight`` scales (H).

    ``eps`` left out is the precision's own, as ``nn.RMSNorm`` has it. Gemma's norms have an ``offset`` of 1.
    """
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    how = implementation("rms_norm", x)
    if how == "liger" and weight is not None:
        return _tensor(_kernel("rms_norm", x)(x, weight, eps, offset))
    if how != "compiled":
        return bodies.rms_norm(x, weight, eps, offset)
    rows = _rows(x)
    return _tensor(COMPILED["rms_norm"](((rows, (0,)),), rows, weight, eps, offset)).view(x.shape)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """activation(gate) · up, elementwise over (..., H): SwiGLU, or GeGLU with ``gelu`` or ``gelu_tanh``.

    Raises ``ValueError`` for another activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {ACTIVATIONS}")
    how = implementation("gated", gate)
    if how == "liger" and activation != "gelu":  # its GeGLU is the one with tanh
        return _tensor(_kernel("gated", gate)(gate, up, activation))
    if how == "pytorch":
        return bodies.gated(gate, up, activation)
    gates, ups = _rows(gate), _rows(up)
    return _tensor(COMPILED["gated"](((gates, (0,)), (ups, (0,))), gates, ups, activation)).view(gate.shape)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The plain feed-forward's activation, elementwise; ``approximate="tanh"`` as GPT-2 had it."""
    if implementation("gelu", x) != "compiled":
        return bodies.gelu(x, approximate)
    rows = _rows(x)
    return _tensor(COMPILED["gelu"](((rows, (0,)),), rows, approximate)).view(x.shape)


def bias_dropout_residual(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float = 0.0, training: bool = True
) -> torch.Tensor:
    """residual + dropout(x + bias), (..., H) to the same; ``bias`` (H) or ``None`` where the linear layer adds it.

    On CPUs its random numbers are those of ``nn.Dropout``, and backward keeps a byte an element; compiled for other
    devices it draws others.
    """
    how = implementation("bias_dropout_residual", x)
    if how == "compiled":
        rows, added = _rows(x), _rows(residual)
        dynamic = ((rows, (0,)), (added, (0,)))
        done = COMPILED["bias_dropout_residual"](dynamic, rows, bias, added, p, training)
        return _tensor(done).view(residual.shape)
    own = x.device.type == "cpu" and training and 0.0 < p < 1.0 and not torch.compiler.is_compiling()
    if own and torch.is_grad_enabled() and type(x).__name__ != "DTensor":
        return _tensor(BiasDropoutResidual.apply(x, bias, residual, p))  # type: ignore[no-untyped-call]
    return bodies.bias_dropout_residual(x, bias, residual, p, training)


def rotary_tables(
    positions: torch.Tensor, size: int, base: float = 10000.0, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for heads of ``size``: of positions (S) as (S, size), of (B, S) as (B, 1, S, size).

    Angles are computed in at least fp32 and only then rounded to ``dtype``: in bf16, positions beyond 256 blur. Made
    anew a step, for a buffer would lose its precision with ``model.to(bfloat16)``.
    """
    dtype = torch.float32 if dtype is None else dtype
    wide = torch.promote_types(dtype, torch.float32)
    halves = torch.arange(0, size, 2, device=positions.device, dtype=wide) / size
    with torch.autocast(positions.device.type, enabled=False):
        angles = positions.to(wide)[..., None] * base**-halves
    angles = torch.cat((angles, angles), -1)
    if positions.dim() == 2:
        angles = angles[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotary(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate (B, heads, S, D) by tables that broadcast to it: (S, D) or (B, 1, S, D), as :func:`rotary_tables` makes.

    ``key`` may have fewer heads. Halves are rotated against each other, as in Llama; not even and odd places.
    """
    how = implementation("rotary", query)
    if how == "liger":
        rotated = _kernel("rotary", query)(query, key, cosine, sine)
    elif how == "compiled":
        tokens = (0, 2)
        free = tuple(range(cosine.dim() - 1)) if cosine.dim() == 2 else (0, 2)
        # Aliases, so that callers' tensors carry no marks.
        query, key, cosine, sine = (each.view_as(each) for each in (query, key, cosine, sine))
        dynamic = ((query, tokens), (key, tokens), (cosine, free), (sine, free))
        rotated = COMPILED["rotary"](dynamic, query, key, cosine, sine)
    else:
        rotated = bodies.rotary(query, key, cosine, sine)
    return rotated[0], rotated[1]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int | None = None,
) -> torch.Tensor:
    """Cross-entropy of ``linear(hidden, weight, bias)`` without all of its logits, in nats, in at least fp32.

    (..., H), (V, H), (...) and (V) to a scalar: the mean, or ``"sum"``, over targets other than ``ignore_index``.
    ``chunk`` rows at a time; left out, as many as make their logits about as big as the hidden states. Under autocast
    matmuls compute in its precision. Backward works once: a second one through the same loss raises ``RuntimeError``.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction {reduction!r} is none of ('mean', 'sum')")
    if "DTensor" in (type(hidden).__name__, type(weight).__name__):
        raise UsageError(
            'compute.fuse = ["cross_entropy"]: the head\'s weight is sharded where the loss is computed: compute it '
            "inside the forward of the module that is sharded with the head, or take cross_entropy out"
        )
    # An outer torch.compile would unroll the loop over chunks: its graph ends here instead.
    run = _uncompiled if torch.compiler.is_compiling() else _linear_cross_entropy
    return run(hidden, weight, targets, bias, ignore_index, reduction == "mean", chunk)


def _linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    ignored: int,
    mean: bool,
    chunk: int | None,
) -> torch.Tensor:
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    kind = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        if mean and implementation("linear_cross_entropy", hidden) == "liger":
            bias = None if bias is None else bias.to(dtype)
            kernel = _kernel("linear_cross_entropy", hidden)
            return _tensor(kernel(rows.to(dtype), weight.to(dtype), wanted, bias, ignored))
        size = chunk or rows_of_a_chunk(len(rows), rows.shape[1], len(weight))
        training = torch.is_grad_enabled()
        loss = ChunkedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, wanted, ignored, size, dtype, mean, training
        )
    return _tensor(loss)


#: The decorator of torch.compiler would import the compiler, seconds of it, with this module.
_uncompiled = _disable_dynamo(_linear_cross_entropy)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(N, H), a new tensor over the same memory where that is possible: batches and lengths are one dimension."""
    return x.reshape(-1, x.shape[-1])


def _kernel(region: str, x: torch.Tensor) -> Callable[..., Any]:
    kernel = kernel_for(region, x)
    assert kernel is not None
    return kernel


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value
