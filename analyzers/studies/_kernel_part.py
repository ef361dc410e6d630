"""One rank's work by operator, shape, class and precision; columns in, small rows out."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers.kernel_classes import classify
from trine.analyzers.precision import causal, matmul_dtype, on_tensor_cores
from trine.record.model import DEVICE_KINDS, MISSING

from ._attribution import dense
from ._gemm import Fit, fit_of
from ._grouped import NO_OPERATOR, Grouped, sums
from ._kernel_rows import MOST_ROWS, OperatorTime, ProductKernel, ShapeTime
from ._products import Work
from ._shapes import short_shapes

__all__ = [
    "kernel_word",
    "operator_rows",
    "precision_of",
    "product_rows",
    "shape_rows",
    "short_kernel",
]

Array = npt.NDArray[Any]

#: Rows that a rank keeps of each table.
KEPT = 2 * MOST_ROWS
#: Characters of a kernel's name that are kept.
_NAME_LENGTH = 160
_COPY = DEVICE_KINDS.index("copy")
_VECTOR = re.compile(r"gemv|gemmk1|dot_kernel", re.IGNORECASE)
_EVALUATE = "autograd::engine::evaluate_function: "


def _unqualified(name: str) -> str:
    return name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")


def short_kernel(name: str) -> str:
    """A kernel's name without what every one of them says, at a bounded length."""
    plain = _unqualified(name)
    return plain if len(plain) <= _NAME_LENGTH else plain[: _NAME_LENGTH - 1] + "…"


#: What a kernel of PyTorch's computes stands deep in its name, in one of these forms.
_WORDS = tuple(
    re.compile(pattern)
    for pattern in (
        r"CUDAFunctor(?:OnSelf)?_(\w+)",
        r"\b(?!Binary|Unary|AUnary|BUnary)(\w+?)(?:_f|F)unctor\b",
        r"\b(\w+?)_kernel_(?:cuda|impl)\b",
        r"\b(?!vectorized_elementwise|elementwise|unrolled_elementwise|reduce)(\w+?)_kernel\w*[(<]",
        r"\b(\w+?)Ops<",
        r"([A-Za-z_]\w*)",
    )
)


@lru_cache(maxsize=8192)
def kernel_word(name: str) -> str:
    """What a kernel computes, in a word: ``elementwise_kernel<…MulFunctor<float>…>`` → ``Mul``."""
    plain = _unqualified(name)
    found = next((match[1] for pattern in _WORDS if (match := pattern.search(plain)) is not None), plain)
    return found[:40]


def operator_rows(grouped: Grouped, outermost: bool) -> tuple[OperatorTime, ...]:
    """Work by the innermost operator's name, or by the outermost one's."""
    work, host = grouped.work, grouped.work.host
    if host is None:
        return ()
    rows = work.outermost if outermost else work.operator
    known = np.maximum(rows, 0)
    codes, inverse = dense(np.where(rows >= 0, host["name"][known], -1).astype(np.int64))
    backward = (rows >= 0) & _is_backward(grouped)
    ns, kernels = sums(inverse, work.ns, len(codes)), np.bincount(inverse)
    in_backward = sums(inverse, np.where(backward, work.ns, 0), len(codes))
    calls = np.bincount(inverse[grouped.first_rows(rows)], minlength=len(codes))
    calls += np.bincount(inverse[rows < 0], minlength=len(codes))
    top = np.argsort(-ns, kind="stable")[:KEPT]
    kinds = _class_of_groups(grouped, inverse, len(codes))
    return tuple(
        OperatorTime(
            (grouped.strings.text(int(codes[one])) or NO_OPERATOR).removeprefix(_EVALUATE)[:_NAME_LENGTH],
            kinds[one],
            int(calls[one]),
            int(kernels[one]),
            int(ns[one]),
            int(in_backward[one]),
        )
        for one in top.tolist()
    )


def _is_backward(grouped: Grouped) -> Array:
    """Of each row, whether autograd's engine called its outermost operator."""
    work, host = grouped.work, grouped.work.host
    assert host is not None
    top = np.maximum(work.outermost, 0)
    names, place = dense(host["name"][top].astype(np.int64))
    engine = np.array([(host.strings.text(code) or "").startswith(_EVALUATE) for code in names.tolist()])
    return np.asarray((host["forward_thread"][top] != MISSING) | engine[place])


def _class_of_groups(grouped: Grouped, groups: Array, count: int) -> list[str]:
    """Class of what took longest in each of ``groups``."""
    return [str(label) for label in grouped.classes[grouped.longest_in(groups, count)]]


def shape_rows(grouped: Grouped, multiprocessors: int | None) -> tuple[ShapeTime, ...]:
    """Work by operator, shapes and types, as far as shapes were recorded."""
    shaped = np.array(
        [
            one
            for one, code in enumerate(grouped.shapes.tolist())
            if code >= 0 and short_shapes(grouped.strings.text(code))
        ],
        dtype=np.int64,
    )
    top = shaped[np.argsort(-grouped.ns[shaped], kind="stable")[:KEPT]]
    kernels = np.bincount(grouped.key, minlength=len(grouped.names))
    flops = _counted_flops(grouped)
    return tuple(_shape_row(grouped, one, kernels, flops, multiprocessors) for one in top.tolist())


def _counted_flops(grouped: Grouped) -> Array:
    """Operations of each group as the profiler counted them, NaN where any call has none."""
    work, host = grouped.work, grouped.work.host
    if host is None:  # device work alone: an export of Nsight Systems without calls and ranges
        return np.zeros(len(grouped.names))
    first = grouped.first_rows(work.operator)
    counted = host["flops"][work.operator[first]]
    # A convolution is counted where the program called it, several operators above its kernels.
    above = host["flops"][work.outermost[first]]
    convolution = np.array([one is not None and one.kind == "convolution" for one in grouped.works])
    counted = np.where(np.isnan(counted) & convolution[grouped.key[first]], above, counted)
    return np.asarray(np.bincount(grouped.key[first], counted, len(grouped.names)))


def _shape_row(
    grouped: Grouped, one: int, kernels: Array, flops: Array, multiprocessors: int | None
) -> ShapeTime:
    text = grouped.strings.text
    work, calls = grouped.works[one], int(grouped.calls[one])
    row = int(grouped.longest[one])
    kernel = text(int(grouped.work.table["name"][grouped.work.rows[row]])) or "unnamed"
    on_device = grouped.work.basis == "device"
    counted = bool(flops[one] > 0)
    total = float(flops[one]) if counted else None
    if total is None and work is not None and work.flops is not None:
        total = float(work.flops * calls)
        if work.kind == "attention" and on_device and causal(kernel):
            total /= 2  # the kernel leaves out what the mask hides
    moved = (
        None
        if work is None or work.read_bytes is None or work.write_bytes is None
        else work.read_bytes + work.write_bytes
    )
    of_kernel = matmul_dtype(kernel) if on_device else None
    dtype = of_kernel or (work.dtype if work is not None else None)
    fit = None
    if on_device and work is not None and work.product is not None:
        fit = _fit(grouped, row, work, dtype, kernel, multiprocessors)
    types = text(int(grouped.types[one])) or ""
    return ShapeTime(
        operator=(text(int(grouped.names[one])) or NO_OPERATOR)[:_NAME_LENGTH],
        shapes=short_shapes(text(int(grouped.shapes[one])))[:_NAME_LENGTH],
        types=_short_types(types),
        kind=_kind(grouped, row, work),
        calls=calls,
        kernels=int(kernels[one]),
        ns=int(grouped.ns[one]),
        flops=total,
        bytes=None if moved is None else moved * calls,
        dtype=dtype,
        kernel=short_kernel(kernel) if on_device else "",
        tensor_cores=on_tensor_cores(kernel) if on_device else None,
        counted=counted,
        shortcut=one in grouped.shortcut,
        product=work.product if work is not None else None,
        fit=fit,
    )


def _kind(grouped: Grouped, row: int, work: Work | None) -> str:
    """What one call does; a copy by a copy engine is a ``transfer``: it may cross the bus, so memory is not its bound."""
    table = grouped.work.table
    if grouped.work.basis == "device" and table["kind"][grouped.work.rows[row]] == _COPY:
        return "transfer"
    return work.kind if work is not None else str(grouped.classes[row])


def _fit(
    grouped: Grouped, row: int, work: Work, dtype: str | None, kernel: str, multiprocessors: int | None
) -> Fit:
    assert work.product is not None
    table, place = grouped.work.table, grouped.work.rows[row]
    blocks, threads = int(table["grid_blocks"][place]), int(table["block_threads"][place])
    occupancy = float(table["occupancy"][place])
    return fit_of(
        work.product,
        dtype,
        kernel,
        None if blocks == MISSING else blocks,
        None if threads == MISSING else threads,
        occupancy,
        multiprocessors,
    )


def _short_types(types: str) -> str:
    words = re.findall(r'"([^"]*)"', types)
    named = [word.removeprefix("c10::") for word in words if word and word not in ("Scalar", "ScalarList")]
    return ", ".join(dict.fromkeys(named))[:60]


def precision_of(grouped: Grouped) -> dict[str, tuple[int, int]]:
    """Type → (time of products in it, time of the rest), ns; types that nothing tells are ``unknown``."""
    total: dict[str, tuple[int, int]] = {}
    for name, key, ns, _ in _pairs(grouped):
        work = grouped.works[key]
        of_inputs = work.dtype if work is not None else None
        product = classify(name) == "matmul"
        dtype = (
            (matmul_dtype(name) if product and grouped.work.basis == "device" else None)
            or of_inputs
            or "unknown"
        )
        before = total.get(dtype, (0, 0))
        total[dtype] = (before[0] + ns, before[1]) if product else (before[0], before[1] + ns)
    return total


def product_rows(grouped: Grouped) -> tuple[ProductKernel, ...]:
    """Kernels of products and convolutions, with whether they use tensor cores."""
    rows: dict[tuple[str, str | None], ProductKernel] = {}
    for name, key, ns, calls in _pairs(grouped):
        if classify(name) != "matmul":
            continue
        work = grouped.works[key]
        dtype = matmul_dtype(name) or (work.dtype if work is not None else None)
        used = on_tensor_cores(name)
        state = "vector" if _VECTOR.search(name) else {True: "used", False: "unused", None: "unknown"}[used]
        before = rows.get((name, dtype))
        rows[name, dtype] = ProductKernel(
            short_kernel(name),
            dtype,
            state,
            calls + (before.calls if before is not None else 0),
            ns + (before.ns if before is not None else 0),
        )
    return tuple(sorted(rows.values(), key=lambda row: -row.ns))


def _pairs(grouped: Grouped) -> list[tuple[str, int, int, int]]:
    """(kernel's name, group, ns, count) of every pair that occurs."""
    _, names, inverse = grouped.kernel_names
    groups = len(grouped.names)
    packed, place = np.unique(inverse.astype(np.int64) * groups + grouped.key, return_inverse=True)
    ns, count = sums(place, grouped.work.ns, len(packed)), np.bincount(place)
    return [
        (names[one // groups], one % groups, amount, calls)
        for one, amount, calls in zip(packed.tolist(), ns.tolist(), count.tolist(), strict=True)
    ]
