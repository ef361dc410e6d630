"""What a batch is: tensors in tuples, lists and mappings, cut and joined along their first dimension."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch


__all__ = [
    "Divisible",
    "Gathered",
    "has_no_sample",
    "joined",
    "pieces_of",
    "pieces_of_size",
    "regrouped",
    "size_of",
    "tensors_of",
    "to_device",
    "tokens_of",
    "with_tensors",
]

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class Gathered:
    """Several batches of a loader that make one step. Not iterable: ``ids, targets = batch`` would take two batches."""

    parts: tuple[Any, ...]


class Divisible(ABC):
    """A batch that knows its samples better than its tensors' first dimension does, such as packed documents."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """How many there are."""

    @abstractmethod
    def rebuilt(self, change: Callable[[Any], Any]) -> Divisible:
        """The same with every value changed."""

    @abstractmethod
    def part(self, start: int, end: int) -> Divisible:
        """Some of the samples."""

    @abstractmethod
    def pieces(self, count: int) -> list[Any]:
        """So many pieces of about equal work."""

    @abstractmethod
    def joined(self, others: tuple[Any, ...]) -> Divisible:
        """One batch of this one's samples and theirs."""


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; the copy does not block the host from pinned memory."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, Gathered):
        return Gathered(tuple(to_device(part, device) for part in batch.parts))
    return _rebuilt(batch, lambda value: to_device(value, device))


def with_tensors(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The batch with ``change(tensor)`` in place of every tensor."""
    import torch

    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Gathered):
        return Gathered(tuple(with_tensors(part, change) for part in batch.parts))
    return _rebuilt(batch, lambda value: with_tensors(value, change))


def size_of(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor or array; ``None`` where a batch has none."""
    if isinstance(batch, Gathered):
        sizes = [size_of(part) for part in batch.parts]
        return None if None in sizes else sum(size for size in sizes if size)
    if isinstance(batch, Divisible):
        return batch.samples
    return next(_lengths(batch), None)


def has_no_sample(batch: Any) -> bool:
    """Whether all of its tensors are of length 0, and there are any."""
    if isinstance(batch, Gathered):
        return all(has_no_sample(part) for part in batch.parts)
    if isinstance(batch, Divisible):
        return batch.samples == 0
    lengths = list(_lengths(batch))
    return bool(lengths) and not any(lengths)


def tokens_of(batch: Any) -> int | None:
    """Elements of the first tensor when it is two-dimensional and of integers, as token ids are; else ``None``."""
    if isinstance(batch, Gathered):
        counts = [tokens_of(part) for part in batch.parts]
        return None if None in counts else sum(count for count in counts if count)
    first = next(tensors_of(batch), None)
    if first is None or first.dim() != 2 or first.is_floating_point() or first.is_complex():
        return None
    return int(first.numel())


def pieces_of(batch: Any, count: int, key: str = "accumulation.steps") -> list[Any]:
    """``count`` pieces along the first dimension, as equal as can be. Views, nothing is copied.

    Raises ``UsageError``, naming ``key``, when tensors differ in their first dimension or it is shorter than ``count``.
    """
    if count == 1:
        return [batch]
    if isinstance(batch, Divisible):
        return batch.pieces(count)
    size = _length(batch, f"{key} = {count}")
    if size < count:
        raise UsageError(f"{key} = {count}: a batch of {size} cannot be cut so often: use {max(size, 1)}")
    edges = [round(position * size / count) for position in range(count + 1)]
    return [_cut(batch, start, end, size) for start, end in pairwise(edges)]


def pieces_of_size(batch: Any, size: int, key: str = "accumulation.micro_batch") -> list[Any]:
    """Pieces of ``size`` samples along the first dimension, the last with what is left. Views, nothing is copied.

    Raises ``UsageError``, naming ``key``, when tensors differ in their first dimension.
    """
    whole = _length(batch, f"{key} = {size}")
    if whole <= size:
        return [batch]
    return [_cut(batch, start, min(start + size, whole), whole) for start in range(0, whole, size)]


def joined(parts: tuple[Any, ...], key: str) -> Any:
    """One batch from several, copied along the first dimension; ``key`` is what asks for it.

    Raises ``UsageError`` when they differ in structure or in their other dimensions, as batches that were padded each
    by itself do.
    """
    import torch

    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Divisible):
        return first.joined(parts[1:])
    if isinstance(first, torch.Tensor):
        shapes = {tuple(part.shape[1:]) if isinstance(part, torch.Tensor) else None for part in parts}
        if len(shapes) > 1:
            raise UsageError(
                f"{key}: the loader's batches differ in their shapes beyond the first dimension, so they cannot be "
                "joined: set accumulation.micro_batch to the loader's batch size or less"
            )
        return torch.cat(parts) if first.dim() else first
    if _is_array(first):
        return _joined_arrays(parts, key)
    if isinstance(first, Mapping):
        return _rebuilt(first, _columns({name: [part[name] for part in parts] for name in first}, key))
    if all(_is_plain_list(part) for part in parts) and len(first):
        return type(first)(value for part in parts for value in part)
    if isinstance(first, (tuple, list)):
        columns = iter([joined(column, key) for column in zip(*parts, strict=True)])
        return _rebuilt(first, lambda _: next(columns))
    return first


def _joined_arrays(parts: tuple[Any, ...], key: str) -> Any:
    import numpy

    if not parts[0].ndim:
        return parts[0]
    try:
        return numpy.concatenate(parts)
    except ValueError as error:
        raise UsageError(f"{key}: the loader's arrays cannot be joined: {error}") from error


def _columns(columns: Mapping[Any, list[Any]], key: str) -> Callable[[Any], Any]:
    values = iter([joined(tuple(column), key) for column in columns.values()])
    return lambda _: next(values)


def regrouped(batches: Iterable[Any], share: int, stated: str) -> Iterator[Any]:
    """Batches of ``share`` samples from a loader's: several are gathered, larger ones cut, equal ones passed on.

    The last may be smaller. ``stated`` is the beginning of errors: what asks for ``share``. Raises ``UsageError`` for a
    batch whose size neither divides ``share`` nor is a multiple of it, unless it is the last.
    """
    waiting: list[Any] = []
    held = 0
    first = True
    for batch in batches:
        size = _length(batch, stated)
        divides = size and (share % size == 0 if size <= share else size % share == 0)
        if (first and not divides) or (held and held + size > share):
            raise UsageError(
                f"{stated}, and the loader's batches hold {size}: give it a batch size that divides {share}, or a "
                "multiple of it"
            )
        first = False
        for piece in pieces_of_size(batch, share, stated):
            waiting.append(piece)
            held += min(size, share)
            size -= share
            if held == share:
                yield waiting[0] if len(waiting) == 1 else Gathered(tuple(waiting))
                waiting, held = [], 0
    if waiting:
        logger.warning(
            "the loader ended after %d of the %d samples of a step: the last step is smaller", held, share
        )
        yield waiting[0] if len(waiting) == 1 else Gathered(tuple(waiting))


def _length(batch: Any, stated: str) -> int:
    """The first dimension that all tensors of a batch share."""
    if isinstance(batch, Divisible):
        return batch.samples
    sizes = set(_lengths(batch))
    if len(sizes) != 1:
        found = "no tensor" if not sizes else f"first dimensions {sorted(sizes)}"
        raise UsageError(
            f"{stated}: the batch has {found}, and is cut along the first dimension that all "
            "its tensors share: use engine(batch), engine.backward(loss) and engine.step() with micro-batches"
        )
    return sizes.pop()


def _cut(batch: Any, start: int, end: int, whole: int) -> Any:
    """Samples ``start`` to ``end`` of ``whole``; a list of so many strings or numbers is cut too, as captions are."""
    import torch

    if isinstance(batch, torch.Tensor) or _is_array(batch):
        return batch[start:end] if batch.ndim else batch
    if isinstance(batch, Divisible):
        return batch.part(start, end)
    if _is_plain_list(batch) and len(batch) == whole:
        return batch[start:end]
    return _rebuilt(batch, lambda value: _cut(value, start, end, whole))


def _is_plain_list(batch: Any) -> bool:
    return type(batch) in (list, tuple) and all(
        isinstance(value, (str, bytes, int, float)) for value in batch
    )


def _rebuilt(batch: Any, change: Any) -> Any:
    if isinstance(batch, Divisible):
        return batch.rebuilt(change)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple takes its values one by one
        return type(batch)(*(change(value) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(change(value) for value in batch)
    if isinstance(batch, dict):
        return {key: change(value) for key, value in batch.items()}
    if isinstance(batch, Mapping):
        try:
            return type(batch)({key: change(value) for key, value in batch.items()})  # type: ignore[call-arg]
        except TypeError:
            return {key: change(value) for key, value in batch.items()}
    return batch


def _is_array(value: Any) -> bool:
    """Whether it is numpy's, which nobody imports for this."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _lengths(batch: Any) -> Iterator[int]:
    """First dimensions of its tensors and arrays; those without dimensions are left out."""
    import torch

    if isinstance(batch, torch.Tensor) or _is_array(batch):
        if batch.ndim:
            yield int(batch.shape[0])
        return
    values = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, (Mapping, tuple, list)):
        for value in values:
            yield from _lengths(value)


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in their order; none of a :class:`Divisible`, which has its own."""
    import torch

    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, Gathered):
        for part in batch.parts:
            yield from tensors_of(part)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)
