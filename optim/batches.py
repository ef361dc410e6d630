"""What a batch is: tensors in tuples, lists and mappings, cut along their first dimension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["pieces_of", "size_of", "to_device", "tokens_of"]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; the copy does not block the host from pinned memory."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    return _rebuilt(batch, lambda value: to_device(value, device))


def size_of(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor; ``None`` where a batch has none."""
    for tensor in _tensors(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    return None


def tokens_of(batch: Any) -> int | None:
    """Elements of the first tensor when it is two-dimensional and of integers, as token ids are; else ``None``."""
    first = next(_tensors(batch), None)
    if first is None or first.dim() != 2 or first.is_floating_point() or first.is_complex():
        return None
    return int(first.numel())


def pieces_of(batch: Any, count: int) -> list[Any]:
    """``count`` pieces along the first dimension, as equal as can be. Views, nothing is copied.

    Raises ``UsageError`` when tensors differ in their first dimension or it is shorter than ``count``.
    """
    if count == 1:
        return [batch]
    sizes = {int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.dim()}
    if len(sizes) != 1:
        found = "no tensor" if not sizes else f"first dimensions {sorted(sizes)}"
        raise UsageError(
            f"accumulation.steps = {count}: the batch has {found}, and is cut along the first dimension that all "
            "its tensors share: use engine(batch), engine.backward(loss) and engine.step() with micro-batches"
        )
    size = sizes.pop()
    if size < count:
        raise UsageError(
            f"accumulation.steps = {count}: a batch of {size} cannot be cut so often: use {size}"
        )
    edges = [round(position * size / count) for position in range(count + 1)]
    return [_cut(batch, start, end) for start, end in pairwise(edges)]


def _cut(batch: Any, start: int, end: int) -> Any:
    import torch

    if isinstance(batch, torch.Tensor):
        return batch[start:end] if batch.dim() else batch
    return _rebuilt(batch, lambda value: _cut(value, start, end))


def _rebuilt(batch: Any, change: Any) -> Any:
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


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _tensors(value)
