"""Variable-length sequences in rows of one length: nothing is computed for padding but what is left at rows' ends.

The contract. ``engine.steps`` remakes the loader so that each batch's documents lie in fewer rows: a step sees the
documents that it would have seen, so it has the same loss and gradients but for the order of summation. A batch becomes a
:class:`Packed`, a dictionary of tensors (rows, length):

* ids and targets under the names that they had (``input_ids`` and ``labels``; ``ids`` and ``targets`` from a pair), and
  whatever else the batch held per token. A target that would make the loss cross a border is -100;
* what the model needs to keep documents apart, by the arguments of its ``forward``: ``positions`` and ``documents``
  (:class:`~trine.optim.runtime.documents.Documents`), or ``position_ids`` and a four-dimensional ``attention_mask``, as
  Transformers' decoders take them.

``loss_fn`` passes these on to the model, and returns the mean over the targets that are not -100, with their number.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from trine.optim.runtime.documents import Documents
from trine.optim.runtime.sequences import IGNORED, Sequences, sequences_of
from trine.record.errors import UsageError

__all__ = ["INPUTS", "Packed", "Packer", "best_fit"]

#: How a model is told of documents: its own ``documents``, a mask that is true where tokens see each other, one that is
#: added to scores, or positions alone.
INPUTS = ("documents", "mask", "bias", "positions")


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices: the longest first, each into the fullest row that has room. Empty sequences are in no row.

    Best-fit decreasing (Johnson et al. 1974): at most 11/9 of the fewest rows possible, and one more. Depends on the
    lengths alone. Rows come in the order of their first sequence, sequences in a row in theirs. Raises ``ValueError`` for
    a sequence above ``capacity``.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, row), least room first
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sequence of {length} tokens does not fit a row of {capacity}")
        if not length:
            continue
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            rows.append([index])
            insort(rooms, (capacity - length, len(rows) - 1))
        else:
            room, row = rooms.pop(place)
            rows[row].append(index)
            insort(rooms, (room - length, row))
    return sorted(sorted(row) for row in rows)


class Packed(dict[str, Any]):
    """Documents in rows of one length: tensors by name (see the module). ``lengths``: the documents', row by row."""

    lengths: tuple[tuple[int, ...], ...]
    length: int  # of every row
    slots_before: int  # tokens and padding of the batch that this was made from
    packer: Packer
    names: tuple[str, str]  # of ids and targets
    filler: int

    @property
    def document_lengths(self) -> list[int]:
        """Tokens of each document; what says how much of the rows is padding."""
        return [length for row in self.lengths for length in row]

    @property
    def slots(self) -> int:
        """Tokens and padding."""
        return len(self.lengths) * self.length

    def rebuilt(self, change: Callable[[Any], Any]) -> Packed:
        """The same with every value changed, as for another device."""
        return self._like({name: change(value) for name, value in self.items()}, self.lengths)

    def pieces(self, count: int) -> list[Packed]:
        """``count`` pieces: rows of them, or documents where there are fewer rows.

        Raises ``UsageError`` where there are fewer documents than pieces.
        """
        if count == 1:
            return [self]
        if len(self.lengths) >= count:
            edges = [round(position * len(self.lengths) / count) for position in range(count + 1)]
            return [self._rows(start, end) for start, end in pairwise(edges)]
        flat = self.document_lengths
        if len(flat) < count:
            raise UsageError(
                f"data.packing with accumulation: a batch of {len(flat)} documents cannot be cut into {count} "
                "micro-batches: use fewer, or larger batches"
            )
        edges = [round(position * len(flat) / count) for position in range(count + 1)]
        return [self._documents(start, end) for start, end in pairwise(edges)]

    def _rows(self, start: int, end: int) -> Packed:
        segments = [len(row) + (sum(row) < self.length) for row in self.lengths]
        first, last = sum(segments[:start]), sum(segments[:end])
        cut = {}
        for name, value in self.items():
            if isinstance(value, Documents):
                borders = value.cu_seqlens[first : last + 1]
                cut[name] = Documents(value.numbers[start:end], borders - borders[0], value.longest)
            else:
                cut[name] = value[start:end]
        return self._like(cut, self.lengths[start:end])

    def _documents(self, start: int, end: int) -> Packed:
        """Rows made anew of some of the documents."""
        begins = [
            row * self.length + within
            for row, lengths in enumerate(self.lengths)
            for within in accumulate(lengths, initial=0)
            if within < sum(lengths)
        ]
        lengths = self.document_lengths[start:end]
        spots = torch.cat(
            [
                torch.arange(begin, begin + length)
                for begin, length in zip(begins[start:end], lengths, strict=True)
            ]
        )
        made = self.packer.made
        fields = {
            name: value.flatten(0, 1)[spots.to(value.device)]
            for name, value in self.items()
            if name not in made
        }
        ids, targets = self.names
        sequences = Sequences(fields, lengths, self.slots_before, self.length, ids, targets, self.filler)
        device = self[ids].device
        packed = self.packer.lay_out(sequences, self.length)
        return packed.rebuilt(lambda value: _moved(value, device))

    def _like(self, values: dict[str, Any], lengths: tuple[tuple[int, ...], ...]) -> Packed:
        other = Packed(values)
        other.__dict__.update(self.__dict__, lengths=lengths)
        return other


@dataclass(frozen=True)
class Packer:
    """Batches → :class:`Packed`. ``length`` of the rows, or ``None``: as wide as the batch. ``inputs``: of :data:`INPUTS`."""

    length: int | None
    inputs: str = "documents"

    @property
    def made(self) -> tuple[str, ...]:
        """Names of the inputs that are added."""
        return (
            ("positions", "documents") if self.inputs == "documents" else ("position_ids", "attention_mask")
        )

    def __call__(self, batch: Any) -> Packed:
        """Raises ``UsageError`` for a batch without sequences, or with one longer than a row."""
        sequences = sequences_of(batch, "data.packing")
        length = self.length or max(sequences.width, 1)
        longest = max(sequences.lengths, default=0)
        if longest > length:
            raise UsageError(
                f"data.packed_length = {length}: a document has {longest} tokens, and cutting it would change what its "
                f"tokens see: set {longest} or more, or cut documents in the dataset"
            )
        _keep_within(sequences)
        return self.lay_out(sequences, length)

    def lay_out(self, sequences: Sequences, length: int) -> Packed:
        """Rows of ``length``; one row of padding where there is no token, so that ranks stay together."""
        plan = best_fit(sequences.lengths, length) or [[]]
        lengths = tuple(tuple(sequences.lengths[index] for index in row) for row in plan)
        source, target, positions = _places(sequences.lengths, plan, length)
        packed = Packed()
        for name, value in sequences.fields.items():
            fill = sequences.filler if name == sequences.ids else IGNORED if name == sequences.targets else 0
            rows = value.new_full((len(plan) * length, *value.shape[1:]), fill)
            rows[target.to(value.device)] = value[source.to(value.device)]
            packed[name] = rows.unflatten(0, (len(plan), length))
        self._add_inputs(packed, positions.view(len(plan), length), Documents.of(lengths, length))
        packed.lengths, packed.length, packed.slots_before = lengths, length, sequences.slots
        packed.packer, packed.names = self, (sequences.ids, sequences.targets)
        packed.filler = sequences.filler
        return packed

    def _add_inputs(self, packed: Packed, positions: torch.Tensor, documents: Documents) -> None:
        if self.inputs == "documents":
            packed["positions"], packed["documents"] = positions, documents
            return
        packed["position_ids"] = positions
        if self.inputs == "mask":
            packed["attention_mask"] = documents.mask()
        elif self.inputs == "bias":
            low = torch.finfo(torch.float32).min  # minus infinity would make a row without any target NaN
            packed["attention_mask"] = torch.zeros(()).where(documents.mask(), low)


def _places(
    lengths: Sequence[int], plan: Sequence[Sequence[int]], length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where tokens lie end to end, where they go in the rows, and the position of every slot in its document."""
    begins = [0, *accumulate(lengths)]
    source, target, positions = [], [], torch.zeros(len(plan) * length, dtype=torch.int64)
    for row, indices in enumerate(plan):
        place = row * length
        for index in indices:
            count = lengths[index]
            source.append(torch.arange(begins[index], begins[index] + count))
            target.append(torch.arange(place, place + count))
            positions[place : place + count] = torch.arange(count)
            place += count
    nothing = torch.empty(0, dtype=torch.int64)
    return torch.cat([nothing, *source]), torch.cat([nothing, *target]), positions


def _keep_within(sequences: Sequences) -> None:
    """Ignore each document's first label where labels are the ids themselves.

    A loss that shifts them would otherwise ask the last token of one document for the first of the next. Targets that are
    the next ids already stay inside their document. Raises ``UsageError`` for targets that are neither.
    """
    ids, targets = sequences.fields[sequences.ids], sequences.fields[sequences.targets]
    ends = torch.tensor([0, *accumulate(sequences.lengths)], device=ids.device)
    first = torch.zeros(len(ids) + 1, dtype=torch.bool, device=ids.device)
    first[ends] = True
    ignored = targets == IGNORED
    same = bool((ignored | (targets == ids)).all())
    following = bool((ignored | (targets == ids.roll(-1)) | first[1:]).all())
    if not same and not following:
        raise UsageError(
            f"data.packing: the batch's {sequences.targets!r} are neither its ids nor the next ones (-100 aside), so the "
            "loss cannot be kept from crossing documents' borders: take data.packing out"
        )
    if same and (sequences.targets == "labels" or not following):
        sequences.fields[sequences.targets] = targets.masked_fill(first[:-1], IGNORED)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Documents):
        return Documents(value.numbers.to(device), value.cu_seqlens.to(device), value.longest)
    return value.to(device)
