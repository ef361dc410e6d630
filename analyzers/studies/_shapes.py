"""Shapes and types of an operator's inputs, as PyTorch's profiler writes them.

``Input Dims`` is a list with an entry per argument: a tensor's dimensions, a list of those for a list of
tensors, ``[]`` for a scalar. ``Input type`` names each: ``c10::BFloat16``, ``float``, ``TensorList``,
``Scalar``, an empty string for an argument that was not given. Old writers left the types away.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["DTYPES", "Tensor", "broadcast", "by_position", "numel", "short_shapes", "tensors_of"]

Dims = tuple[int, ...]

#: The source's word for a type → (bytes, the name in which peaks are given; None where no product runs in it).
DTYPES: dict[str, tuple[int, str | None]] = {
    "float": (4, "fp32"),
    "double": (8, "fp64"),
    "c10::half": (2, "fp16"),
    "half": (2, "fp16"),
    "c10::bfloat16": (2, "bf16"),
    "bfloat16": (2, "bf16"),
    "long int": (8, None),
    "long": (8, None),
    "long long": (8, None),
    "int": (4, None),
    "short": (2, None),
    "short int": (2, None),
    "signed char": (1, "int8"),
    "unsigned char": (1, None),
    "char": (1, "int8"),
    "bool": (1, None),
    "c10::complex<float>": (8, None),
    "c10::complex<double>": (16, None),
}
#: No tensor of a device is larger; what says so was mutilated.
_MOST_ELEMENTS = 2**50
_FLOAT8 = re.compile(r"float8|e4m3|e5m2", re.IGNORECASE)
_FLOATING = ("float", "double", "half", "bfloat16")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that an operator was given. ``size`` is bytes an element, None where the type is unknown;
    ``member`` tells a tensor of a list, ``argument`` its position."""

    dims: Dims
    size: int | None
    dtype: str | None
    argument: int
    floating: bool = False
    member: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return numel(self.dims)

    @property
    def bytes(self) -> int | None:
        """Bytes if each element is held once."""
        return None if self.size is None else self.elements * self.size


def numel(dims: Dims) -> int:
    """Number of elements of a shape; 1 for a scalar."""
    return math.prod(dims)


def broadcast(shapes: Sequence[Dims]) -> Dims | None:
    """The shape that all of these broadcast to, None where they do not."""
    result: list[int] = []
    for dims in shapes:
        for place, dim in enumerate(reversed(dims)):
            if place == len(result):
                result.append(dim)
            elif result[place] == 1:
                result[place] = dim
            elif dim not in (1, result[place]):
                return None
    return tuple(reversed(result))


def by_position(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Argument → tensor, members of lists left out."""
    return {tensor.argument: tensor for tensor in tensors if not tensor.member}


@lru_cache(maxsize=8192)
def tensors_of(shapes: str | None, types: str | None) -> tuple[Tensor, ...] | None:
    """The tensors among an operator's inputs; None where the shapes were not recorded or make no sense.

    A scalar argument and a tensor without dimensions look alike; neither has a shape, and both are left out.
    """
    entries, names = _list(shapes), _list(types)
    if entries is None:
        return None
    found: list[Tensor] = []
    for position, entry in enumerate(entries):
        name = str(names[position]) if names is not None and position < len(names) else ""
        if not isinstance(entry, list) or not entry:
            continue
        if all(isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0 for dim in entry):
            found.append(_tensor(tuple(entry), name, position, False))
        elif all(isinstance(dims, list) for dims in entry):
            # Types of a list's members are not written one by one; newer writers list them.
            inner = names[position] if names is not None and position < len(names) else None
            members = inner if isinstance(inner, list) else [""] * len(entry)
            for dims, member in zip(entry, members, strict=False):
                if all(isinstance(dim, int) and dim >= 0 for dim in dims):
                    found.append(_tensor(tuple(dims), str(member), position, True))
        else:
            return None
    return tuple(found) if all(tensor.elements <= _MOST_ELEMENTS for tensor in found) else None


def _tensor(dims: Dims, name: str, argument: int, member: bool) -> Tensor:
    plain = name.lower().strip()
    if _FLOAT8.search(plain):
        return Tensor(dims, 1, "fp8", argument, True, member)
    size, dtype = DTYPES.get(plain, (None, None))
    floating = any(word in plain for word in _FLOATING)
    return Tensor(dims, size, dtype, argument, floating, member)


def _list(text: str | None) -> list[Any] | None:
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


@lru_cache(maxsize=8192)
def short_shapes(shapes: str | None, most: int = 4) -> str:
    """Shapes as people write them: ``[8944, 1024] × [1024, 1024]``; empty where unknown."""
    entries = _list(shapes)
    if entries is None:
        return ""
    words = [_words(entry) for entry in entries if isinstance(entry, list) and entry]
    if len(words) > most:
        words = [*words[:most], "…"]
    return " × ".join(words)


def _words(entry: list[Any]) -> str:
    if any(isinstance(dim, list) for dim in entry):
        first = next(dim for dim in entry if isinstance(dim, list))
        return f"{len(entry)} of {first}" if len(entry) > 1 else str(first)
    return str(entry)
