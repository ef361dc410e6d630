"""How much a batch holds: tokens and samples, read from shapes alone, never from a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["BatchSize", "measure_batch"]

#: What language model batches call their token ids, likeliest first.
_TOKEN_NAMES = ("input_ids", "tokens", "token_ids", "ids", "inputs", "input", "idx", "x")

BatchSize = tuple[int | None, int | None, int | None, bool]


def measure_batch(
    batch: Any,
    tokens: int | Callable[[Any], int] | None = None,
    samples: int | Callable[[Any], int] | None = None,
) -> BatchSize:
    """(tokens, samples, sequence length, in host memory) of a batch; ``None`` where it does not show.

    Tokens are the elements of a two-dimensional integer tensor: the one under a usual name (``input_ids``, …), else
    the batch's first tensor. Samples are the first tensor's leading dimension. Numbers or functions override.
    """
    named = _by_name(batch)
    first = named if named is not None else next(_tensors(batch, 0), None)
    shape = tuple(getattr(first, "shape", ()) or ())
    counted = sequence = None
    if len(shape) == 2 and _is_integer(first):
        counted, sequence = int(shape[0]) * int(shape[1]), int(shape[1])
    size = int(shape[0]) if shape else None
    if tokens is not None:
        counted = int(tokens(batch)) if callable(tokens) else int(tokens)
    if samples is not None:
        size = int(samples(batch)) if callable(samples) else int(samples)
    device = getattr(getattr(first, "device", None), "type", "cpu")
    return counted, size, sequence, first is not None and device == "cpu"


def _by_name(batch: Any) -> Any:
    for name in _TOKEN_NAMES:
        value = batch.get(name) if isinstance(batch, Mapping) else None
        if value is not None and len(getattr(value, "shape", ())) == 2:
            return value
    # Objects with attributes, such as a packed batch of a library.
    value = None if isinstance(batch, (list, tuple)) else getattr(batch, "input_ids", None)
    return value if len(getattr(value, "shape", ())) == 2 else None


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    if depth > 4:
        return
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value[:16]:
            yield from _tensors(item, depth + 1)


def _is_integer(tensor: Any) -> bool:
    name = str(getattr(tensor, "dtype", ""))
    return "int" in name
