"""How much of a batch is padding, and how long its sequences are: read in host memory, never from a device.

What says it, first come first taken:

* documents that Trine packed: the batch's ``lengths``, row by row, and the ``length`` of its rows;
* ``attention_mask``, two-dimensional: zeros are padding;
* ``cu_seqlens`` (of packed sequences): tokens behind the last boundary are padding;
* ``lengths`` of the rows;
* ``position_ids`` that begin anew within a row (packed): zeros that repeat at the end of a row are padding;
* ``labels`` of -100 at the end of rows, where ``input_ids`` repeat one id: that id is padding. (A -100 elsewhere is a
  prompt that is not learned, and no padding.)

Only plain tensors in host memory and numpy arrays of at most :data:`MOST_ELEMENTS` are looked at, through numpy: no
operator runs that a profiler, a compiler or the random numbers could notice, and the tensors stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["MOST_ELEMENTS", "Padded", "SequenceLengths", "padding_of"]

Array = npt.NDArray[Any]

#: Of a mask: 8 MiB of int64 are counted in about a millisecond; a batch of that size trains for far longer.
MOST_ELEMENTS = 1 << 20
#: Sequences whose lengths are kept, spread evenly over the run.
MOST_LENGTHS = 2_048
_IGNORED = -100  # torch.nn.CrossEntropyLoss's ignore_index

_BOUNDARIES = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seqlens_q")
_LENGTHS = ("lengths", "length", "seq_lens", "seqlens")
_INTEGERS = frozenset("biu")
#: What numpy calls the types that it has.
_TYPES = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    **{
        getattr(torch, name): np.dtype(name).str
        for name in ("int16", "int32", "int64", "float16", "float32", "float64")
    },
}


class Padded(NamedTuple):
    """``lengths`` of the sequences, without padding; ``slots``: tokens with padding; ``rows`` of ``width`` slots."""

    padding: int
    lengths: Array
    slots: int
    rows: int
    width: int
    packed: bool
    source: str


def padding_of(batch: Any) -> Padded | None:
    """What a batch says of its padding, ``None`` where it does not say. Never raises on strange batches."""
    packed = _by_documents(batch)
    if packed is not None:
        return packed
    for named in _named(batch):
        tokens = _host(named.get("input_ids"), 2)
        shape = None if tokens is None else tokens.shape
        found = (
            _by_mask(_host(named.get("attention_mask"), 2), shape)
            or _by_boundaries(named, shape)
            or _by_lengths(named, shape)
            or _by_positions(_host(named.get("position_ids"), 2), shape)
            or _by_labels(_host(named.get("labels"), 2), tokens)
        )
        if found is not None:
            return found
    return None


def _by_documents(batch: Any) -> Padded | None:
    """A batch that says it with attributes, not tensors (``trine.optim.runtime.packing.Packed``)."""
    rows, width = getattr(batch, "lengths", None), getattr(batch, "length", None)
    if not isinstance(batch, Mapping) or not isinstance(rows, tuple) or not isinstance(width, int):
        return None
    lengths = np.array([length for row in rows for length in row], dtype=np.int64)
    slots = len(rows) * width
    return Padded(slots - int(lengths.sum()), lengths, slots, len(rows), width, True, "documents")


def _named(batch: Any) -> Iterator[Mapping[str, Any]]:
    """The batch as a mapping, or the first mappings in it."""
    if isinstance(batch, Mapping):
        yield batch
    elif isinstance(batch, (list, tuple)):
        yield from (item for item in batch[:4] if isinstance(item, Mapping))
    elif hasattr(batch, "input_ids"):
        yield _Attributes(batch)


class _Attributes(Mapping[str, Any]):
    """An object's attributes by name."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._of, name)
        except AttributeError as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._of))

    def __len__(self) -> int:
        return len(vars(self._of))


def _host(value: Any, dimensions: int) -> Array | None:
    """A small array of numbers in host memory, without a copy."""
    if type(value) is torch.Tensor:  # a subclass may be anywhere, or nowhere
        if value.dtype not in _TYPES or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        if value.dim() != dimensions or not 0 < value.numel() <= MOST_ELEMENTS:
            return None
        value = _seen(value)
    if type(value) is not np.ndarray or value.ndim != dimensions or not 0 < value.size <= MOST_ELEMENTS:
        return None
    return value if value.dtype.kind in "biuf" else None


class _Memory:
    """Where a tensor lies, as ``numpy`` is told of it (``__array_interface__``, version 3)."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: torch.Tensor) -> None:
        size = owner.element_size()
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (owner.data_ptr(), True),
            "typestr": _TYPES[owner.dtype],
            "shape": tuple(owner.shape),
            "strides": tuple(step * size for step in owner.stride()),
        }


def _seen(tensor: torch.Tensor) -> Array | None:
    """A tensor's memory, to read. ``Tensor.numpy()`` would forbid its owner to resize it ever after, as buffers that are
    used again are (``out=``), and modes and profilers would see what it calls."""
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    # Memory may have been freed, as that of a shard that is gathered anew.
    if tensor.is_neg() or tensor.untyped_storage().nbytes() < needed:
        return None
    return np.asarray(_Memory(tensor))


def _by_mask(mask: Array | None, shape: tuple[int, ...] | None) -> Padded | None:
    if mask is None or (shape is not None and mask.shape != shape):
        return None
    lengths = np.count_nonzero(mask, axis=1)
    return _rows(lengths, mask.shape[0], mask.shape[1], "attention_mask")


def _rows(lengths: Array, rows: int, width: int, source: str) -> Padded:
    slots = rows * width
    return Padded(slots - int(lengths.sum()), lengths, slots, rows, width, False, source)


def _by_boundaries(named: Mapping[str, Any], shape: tuple[int, ...] | None) -> Padded | None:
    for name in _BOUNDARIES:
        bounds = _host(named.get(name), 1)
        if bounds is None or shape is None or bounds.dtype.kind not in _INTEGERS or len(bounds) < 2:
            continue
        lengths = np.diff(bounds.astype(np.int64))
        lengths = lengths[lengths != 0]
        slots, used = shape[0] * shape[1], int(bounds[-1]) - int(bounds[0])
        if bounds[0] == 0 and 0 < used <= slots and (lengths > 0).all():
            return Padded(slots - used, lengths, slots, shape[0], shape[1], True, name)
    return None


def _by_lengths(named: Mapping[str, Any], shape: tuple[int, ...] | None) -> Padded | None:
    for name in _LENGTHS:
        lengths = _host(named.get(name), 1)
        if lengths is None or shape is None or lengths.dtype.kind not in _INTEGERS:
            continue
        if len(lengths) == shape[0] and lengths.min() >= 0 and lengths.max() <= shape[1]:
            return _rows(lengths.astype(np.int64), shape[0], shape[1], name)
    return None


def _by_positions(positions: Array | None, shape: tuple[int, ...] | None) -> Padded | None:
    """Packed rows: where a position is zero again, a sequence begins."""
    if positions is None or positions.shape != shape or positions.dtype.kind not in _INTEGERS:
        return None
    zero = positions == 0
    if not zero[:, 0].all() or not zero[:, 1:].any():
        return None  # not packed: positions alone then say nothing of padding
    rows, width = positions.shape
    trailing = _trailing(zero)
    trailing[trailing < 2] = 0  # a sequence of one token
    lengths = []
    for row in range(rows):
        begins = np.flatnonzero(zero[row, : width - int(trailing[row])])
        lengths.append(np.diff(np.append(begins, width - int(trailing[row]))))
    padding = int(trailing.sum())
    return Padded(padding, np.concatenate(lengths), rows * width, rows, width, True, "position_ids")


def _by_labels(labels: Array | None, tokens: Array | None) -> Padded | None:
    if labels is None or tokens is None or labels.shape != tokens.shape or labels.shape[1] < 2:
        return None
    if not (labels[:, -1] == _IGNORED).any():  # as in most batches, and far quicker to see
        return None
    ignored = _trailing(labels == _IGNORED)
    longest = int(ignored.argmax())
    if ignored[longest] < 2:
        return None
    filler = tokens[longest, -1]
    padding = np.minimum(ignored, _trailing(tokens == filler))
    if padding[longest] < 2:
        return None
    return _rows(labels.shape[1] - padding, labels.shape[0], labels.shape[1], "labels")


def _trailing(mask: Array) -> Array:
    """How many at the end of each row are true."""
    backwards = mask[:, ::-1]
    return np.asarray(np.where(mask.all(axis=1), mask.shape[1], (~backwards).argmax(axis=1)))


class SequenceLengths:
    """Lengths of at most :data:`MOST_LENGTHS` sequences, of every n-th batch: n doubles as they fill up."""

    def __init__(self) -> None:
        self._every = 1
        self._batches = 0
        self._kept: list[Padded] = []
        self._held = 0
        self._excluded = False

    def take(self, batch: Any, tokens: int | None) -> int | None:
        """Padding of a batch that counted ``tokens``; ``None`` where it is unknown or the two do not fit."""
        found = padding_of(batch)
        if found is None or tokens not in (found.slots, found.slots - found.padding):
            return None
        self._excluded |= found.padding > 0 and tokens != found.slots
        if self._batches % self._every == 0 and len(found.lengths) <= MOST_LENGTHS:
            self._kept.append(found)
            self._held += len(found.lengths)
            while self._held > MOST_LENGTHS and len(self._kept) > 1:
                self._kept = self._kept[::2]
                self._held = sum(len(kept.lengths) for kept in self._kept)
                self._every *= 2
        self._batches += 1
        return found.padding

    def facts(self) -> dict[str, Any] | None:
        """For the record: lengths by batch, and how they were known."""
        if not self._kept:
            return None
        return {
            "source": self._kept[-1].source,
            "packed": any(kept.packed for kept in self._kept),
            # A function of the user's counted the tokens, without padding.
            "tokens_exclude_padding": self._excluded,
            "sampled_every": self._every,
            "sequences": [len(kept.lengths) for kept in self._kept],
            "rows": [kept.rows for kept in self._kept],
            "widths": [kept.width for kept in self._kept],
            "lengths": [int(length) for kept in self._kept for length in kept.lengths],
        }
