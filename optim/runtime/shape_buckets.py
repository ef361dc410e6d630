"""Padding to one of few widths, so that compiled code is compiled for few shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trine.optim.runtime.sequences import IGNORED, lengths_of
from trine.record.errors import UsageError

__all__ = ["LEAST_BUCKET", "ShapeBuckets", "automatic_bucket"]

#: Of automatic buckets: shorter sequences cost little, padded or not.
LEAST_BUCKET = 64


def automatic_bucket(width: int) -> int:
    """The least of 64, 96, 128, 192, 256, … (2ⁿ and 3·2ⁿ⁻¹) that holds ``width``: at most a third of it is added."""
    power = 1 << (max(width, LEAST_BUCKET) - 1).bit_length()
    return power * 3 // 4 if width <= power * 3 // 4 and power > LEAST_BUCKET else power


@dataclass(frozen=True)
class ShapeBuckets:
    """A batch → the same, padded on the right to the next bucket. ``buckets`` ascending; ``None``: automatic ones, up to
    ``most`` where the model has a longest sequence.

    What is padded is every tensor of the shape (batch, width) of the token ids: targets with -100, ids with the id that
    their padding has, all else (masks) with nought. ``position_ids`` go on.
    """

    buckets: tuple[int, ...] | None
    most: int | None = None

    def __call__(self, batch: Any) -> Any:
        """Raises ``UsageError`` for a batch wider than the last bucket, or without token ids."""
        ids = _ids(batch)
        if ids is None:
            raise UsageError(
                "data.shape_buckets: the batch is no mapping with input_ids and no tuple that begins with token ids, "
                "(batch, width): take the key out"
            )
        width = self._bucket(ids.shape[1])
        if width == ids.shape[1]:
            return batch
        if isinstance(batch, torch.Tensor):
            return functional.pad(batch, (0, width - batch.shape[1]))
        filler = _filler(batch, ids)
        if isinstance(batch, Mapping):
            return {name: _padded(str(name), value, ids, width, filler) for name, value in batch.items()}
        names = ("ids", *("targets",) * (len(batch) - 1))
        values = [_padded(name, value, ids, width, filler) for name, value in zip(names, batch, strict=True)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)

    def _bucket(self, width: int) -> int:
        if self.buckets is None:
            bucket = automatic_bucket(width)
            return bucket if self.most is None or width > self.most else min(bucket, self.most)
        for bucket in self.buckets:
            if width <= bucket:
                return bucket
        raise UsageError(
            f"data.shape_buckets: a batch is {width} wide, and the last bucket {self.buckets[-1]}: add a bucket of {width} "
            "or more, or cut samples in the dataset"
        )


def _ids(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in ("input_ids", "ids") if name in batch), None)
    else:
        found = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    is_ids = isinstance(found, torch.Tensor) and found.dim() == 2 and not found.is_floating_point()
    return found if is_ids else None


def _filler(batch: Any, ids: torch.Tensor) -> int:
    """The id of the batch's padding, else nought."""
    found = lengths_of(batch)
    row = next((row for row, length in enumerate(found[0]) if length < ids.shape[1]), None) if found else None
    return 0 if row is None else int(ids[row, -1])


def _padded(name: str, value: Any, ids: torch.Tensor, width: int, filler: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != ids.shape:
        return value
    more = width - value.shape[1]
    if name == "position_ids":
        return torch.cat([value, value[:, -1:] + torch.arange(1, more + 1, device=value.device)], 1)
    fill = IGNORED if name in ("labels", "targets") else filler if name in ("input_ids", "ids") else 0
    return functional.pad(value, (0, more), value=fill)
