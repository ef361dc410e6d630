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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import Any

import torch

from trine.optim.batches import Divisible, to_device
from trine.optim.runtime.documents import Documents
from trine.optim.runtime.sequences import IGNORED, Sequences, sequences_of
from trine.record.errors import UsageError

__all__ = ["INPUTS", "Packed", "Packer", "balanced", "best_fit"]

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


def balanced(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """As many rows, about equally full: the longest first, each into the emptiest row (Graham 1969).

    For rows that need no stated length: they are as long as the fullest.
    """
    emptiest = [(0, row) for row in range(rows)]
    filled: list[list[int]] = [[] for _ in range(rows)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if lengths[index]:
            tokens, row = heappop(emptiest)
            filled[row].append(index)
            heappush(emptiest, (tokens + lengths[index], row))
    return sorted(sorted(row) for row in filled)


class Packed(dict[str, Any], Divisible):
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

    @property
    def samples(self) -> int:
        """The documents."""
        return len(self.document_lengths)

    def rebuilt(self, change: Callable[[Any], Any]) -> Packed:
        """The same with every value changed, as for another device."""
        return self._like({name: change(value) for name, value in self.items()}, self.lengths)

    def pieces(self, count: int) -> list[Packed]:
        """``count`` pieces: rows of them, or documents where there are fewer rows."""
        rows = len(self.lengths)
        if count == 1:
            return [self]
        if rows >= count:
            return [self._rows(start, end) for start, end in _edges(rows, count)]
        return [self.part(start, end) for start, end in _edges(self.samples, count)]

    def part(self, start: int, end: int) -> Packed:
        """Documents ``start`` to ``end``, counted row by row, packed anew; a row of padding where there is none."""
        return self._packed_anew(self._flat(start, end), self.document_lengths[start:end])

    def joined(self, others: tuple[Any, ...]) -> Packed:
        """All documents, packed anew."""
        parts: tuple[Packed, ...] = (self, *others)
        flat = [part._flat(0, part.samples) for part in parts]
        fields = {name: torch.cat([each[name] for each in flat]) for name in flat[0]}
        whole = self._packed_anew(fields, [length for part in parts for length in part.document_lengths])
        whole.slots_before = sum(part.slots_before for part in parts)
        return whole

    def _flat(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Some documents' tokens end to end."""
        begins = [
            row * self.length + within
            for row, lengths in enumerate(self.lengths)
            for within in list(accumulate(lengths, initial=0))[:-1]
        ]
        lengths = self.document_lengths
        spots = _spans((begins[index], lengths[index]) for index in range(start, end))
        return {name: value.flatten(0, 1)[spots.to(value.device)] for name, value in self._tokens().items()}

    def _tokens(self) -> dict[str, torch.Tensor]:
        """What the batch held, without what the packer added."""
        return {name: value for name, value in self.items() if name not in self.packer.made}

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

    def _packed_anew(self, fields: dict[str, torch.Tensor], lengths: list[int]) -> Packed:
        ids, targets = self.names
        length = max([self.length, *lengths])
        sequences = Sequences(fields, lengths, self.slots_before, length, ids, targets, self.filler)
        packed = self.packer.lay_out(sequences, length)
        return packed.rebuilt(lambda value: to_device(value, self[ids].device))

    def _like(self, values: dict[str, Any], lengths: tuple[tuple[int, ...], ...]) -> Packed:
        other = Packed(values)
        other.__dict__.update(self.__dict__, lengths=lengths)
        return other


@dataclass(frozen=True)
class Packer:
    """Batches → :class:`Packed`. ``length`` of the rows, or ``None``: the batch's width at most. ``inputs``: of
    :data:`INPUTS`.
    """

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
        """Rows of ``length``, or of less where none is stated; one row of padding where there is no token, so that ranks
        stay together."""
        plan = best_fit(sequences.lengths, length) or [[]]
        if self.length is None:
            even = balanced(sequences.lengths, len(plan))
            longest = max(sum(sequences.lengths[index] for index in row) for row in even)
            if longest <= length:
                plan, length = even, max(longest, 1)
        lengths = tuple(tuple(sequences.lengths[index] for index in row) for row in plan)
        source, target, positions = _places(sequences.lengths, plan, length)
        packed = Packed()
        for name, value in sequences.fields.items():
            fill = sequences.filler if name == sequences.ids else IGNORED if name == sequences.targets else 0
            rows = value.new_full((len(plan) * length, *value.shape[1:]), fill)
            rows[target.to(value.device)] = value[source.to(value.device)]
            packed[name] = rows.view(len(plan), length, *value.shape[1:])
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
            packed["attention_mask"] = torch.zeros((), dtype=torch.float32).where(documents.mask(), low)


def _places(
    lengths: Sequence[int], plan: Sequence[Sequence[int]], length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where tokens lie end to end, where they go in the rows, and the position of every slot in its document."""
    begins = [0, *accumulate(lengths)]
    source, target = [], []
    for row, indices in enumerate(plan):
        place = row * length
        for index in indices:
            source.append((begins[index], lengths[index]))
            target.append((place, lengths[index]))
            place += lengths[index]
    to = _spans(target)
    positions = torch.zeros(len(plan) * length, dtype=torch.int64)
    positions[to] = _spans((0, count) for _, count in target)
    return _spans(source), to, positions


def _spans(spans: Iterable[tuple[int, int]]) -> torch.Tensor:
    """The whole numbers of each (first, count), one span behind the other."""
    nothing = torch.empty(0, dtype=torch.int64)
    return torch.cat([nothing, *(torch.arange(first, first + count) for first, count in spans)])


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


def _edges(whole: int, count: int) -> list[tuple[int, int]]:
    return list(pairwise([round(position * whole / count) for position in range(count + 1)]))
