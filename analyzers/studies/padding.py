"""Padding: how many tokens only fill sequences up, and what grouping by length or packing would leave of them.

Padding waste is padded tokens over all tokens (design: Definitions). The predictions replay the recorded lengths:

* grouped by length, as ``transformers``' ``group_by_length`` does: within each
  :data:`GROUPED_BATCHES` batches' worth of sequences, sorted by length, batches are formed in order and
  padded to their longest;
* packed first-fit (Johnson 1974), in the order in which they came, into rows as wide as the widest batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers._tabular import Tabular
from trine.record.model import MISSING

from ._scope import Scope, Whole

__all__ = ["GROUPED_BATCHES", "KEY", "LengthBin", "Padding", "join", "reduce", "to_json"]

KEY = "padding"

Array = npt.NDArray[Any]

#: Batches whose sequences are sorted together (``LengthGroupedSampler``'s mega-batch of 50).
GROUPED_BATCHES = 50
#: Bars of the histogram of lengths, and different lengths that a rank tells.
BINS = 12
MOST_LENGTHS = 256


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Sequences of ``first`` to ``last`` tokens."""

    first: int
    last: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Padding(Tabular):
    """All ranks' selected steps. ``waste`` is padding over all tokens; ``grouped_waste`` and ``packed_waste`` what
    would be left, replayed from ``sampled_sequences`` lengths; None where no lengths were kept, or where batches are packed
    already. ``worst`` is the rank that wastes most."""

    tokens: int
    padding_tokens: int
    waste: float
    steps: int
    ranks: int
    worst: int
    worst_waste: float
    packed: bool
    source: str | None
    width: int | None
    fixed_width: bool | None
    sampled_sequences: int
    sampled_waste: float | None
    grouped_waste: float | None
    packed_waste: float | None
    lengths: tuple[LengthBin, ...]


@dataclass(frozen=True, slots=True)
class _Replay:
    """One rank's recorded lengths: slots as they were, grouped and packed, and the real tokens in them."""

    slots: int
    grouped_slots: int
    packed_slots: int
    real: int
    sequences: int
    width: int
    fixed_width: bool
    lengths: tuple[tuple[int, int], ...]  # (length, sequences), at most MOST_LENGTHS


@dataclass(frozen=True, slots=True)
class _Part:
    tokens: int
    padding: int
    steps: int
    packed: bool
    source: str | None
    replay: _Replay | None


def reduce(scope: Scope) -> _Part | None:
    """One rank's tokens, and its recorded lengths replayed."""
    steps = scope.rank.steps
    if steps is None or not len(steps):
        return None
    known = np.isin(steps["index"], np.array(scope.selected.steps, dtype=np.int64))
    known &= (
        (steps["padding_tokens"] != MISSING) & (steps["tokens"] != MISSING) & (steps["padding_tokens"] >= 0)
    )
    facts = scope.rank.metadata.get("padding")
    facts = facts if isinstance(facts, Mapping) else {}
    padding = steps["padding_tokens"][known]
    tokens = steps["tokens"][known] + (padding if facts.get("tokens_exclude_padding") else 0)
    fits = padding <= tokens
    if not fits.any() or not int(tokens[fits].sum()):
        return None
    counts = (int(tokens[fits].sum()), int(padding[fits].sum()), int(fits.sum()))
    return _Part(*counts, bool(facts.get("packed")), facts.get("source"), _replayed(facts))


def _replayed(facts: Mapping[str, Any]) -> _Replay | None:
    try:
        lengths = np.asarray(facts["lengths"], dtype=np.int64)
        rows, widths, sequences = (
            np.asarray(facts[name], dtype=np.int64) for name in ("rows", "widths", "sequences")
        )
    except (KeyError, TypeError, ValueError):
        return None
    lengths = lengths[lengths > 0]
    if not len(lengths) or not len(rows) or len(rows) != len(widths):
        return None
    slots, width = rows * widths, int(widths.max())
    if int(lengths.max()) > int(slots.max()):
        return None
    batch = max(int(np.median(sequences)), 1)
    return _Replay(
        slots=int(slots.sum()),
        grouped_slots=_grouped_slots(lengths, batch),
        packed_slots=_first_fit_rows(lengths, width) * width,
        real=int(lengths.sum()),
        sequences=len(lengths),
        width=width,
        fixed_width=bool((widths == width).all()),
        lengths=_counted(lengths),
    )


def _counted(lengths: Array) -> tuple[tuple[int, int], ...]:
    low = int(lengths.min())
    step = (int(lengths.max()) - low) // MOST_LENGTHS + 1
    values, counts = np.unique(lengths - (lengths - low) % step, return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


def _grouped_slots(lengths: Array, batch: int) -> int:
    """Slots of batches of ``batch`` sequences, sorted within each mega-batch and padded to their longest."""
    slots = 0
    for first in range(0, len(lengths), batch * GROUPED_BATCHES):
        ordered = np.sort(lengths[first : first + batch * GROUPED_BATCHES])[::-1]
        longest = ordered[::batch]
        sizes = np.full(len(longest), batch, dtype=np.int64)
        sizes[-1] = len(ordered) - batch * (len(longest) - 1)
        slots += int((longest * sizes).sum())
    return slots


def _first_fit_rows(lengths: Array, width: int) -> int:
    """Rows of ``width`` slots that first-fit opens."""
    room = np.full(len(lengths), width, dtype=np.int64)
    for length in np.minimum(lengths, width).tolist():
        room[int((room >= length).argmax())] -= length
    return int((room < width).sum())


def join(parts: Mapping[int, _Part], whole: Whole) -> Padding | str:
    """All ranks' tokens together."""
    if not parts:
        return _reason(whole)
    tokens, padding = (
        sum(part.tokens for part in parts.values()),
        sum(part.padding for part in parts.values()),
    )
    worst = max(parts, key=lambda rank: (parts[rank].padding / parts[rank].tokens, -rank))
    replayed = [part.replay for part in parts.values() if part.replay is not None]
    packed = any(part.packed for part in parts.values())
    slots, real = sum(part.slots for part in replayed), sum(part.real for part in replayed)

    def left(in_slots: int) -> float | None:
        return 1 - real / in_slots if in_slots and not packed else None

    return Padding(
        tokens=tokens,
        padding_tokens=padding,
        waste=padding / tokens,
        steps=max(part.steps for part in parts.values()),
        ranks=len(parts),
        worst=worst,
        worst_waste=parts[worst].padding / parts[worst].tokens,
        packed=packed,
        source=next((part.source for part in parts.values() if part.source), None),
        width=max((part.width for part in replayed), default=None),
        fixed_width=all(part.fixed_width for part in replayed) if replayed else None,
        sampled_sequences=sum(part.sequences for part in replayed),
        sampled_waste=1 - real / slots if slots else None,
        grouped_waste=left(sum(part.grouped_slots for part in replayed)),
        packed_waste=left(sum(part.packed_slots for part in replayed)),
        lengths=_histogram([pair for part in replayed for pair in part.lengths]),
    )


def _histogram(pairs: list[tuple[int, int]]) -> tuple[LengthBin, ...]:
    if not pairs:
        return ()
    low, high = min(length for length, _ in pairs), max(length for length, _ in pairs)
    size = max(-(-(high - low + 1) // BINS), 1)
    counts: dict[int, int] = {}
    for length, sequences in pairs:
        place = (length - low) // size
        counts[place] = counts.get(place, 0) + sequences
    return tuple(
        LengthBin(low + place * size, min(low + (place + 1) * size - 1, high), counts.get(place, 0))
        for place in range(max(counts) + 1)
    )


def _reason(whole: Whole) -> str:
    if whole.job.format != "trine":
        return "how many tokens are padding is known from records of trine.profile alone"
    if any(s.steps is not None and bool((s.steps["tokens"] > 0).any()) for s in whole.summaries.values()):
        return (
            "batches did not say what of them is padding; they do by an attention_mask, cu_seqlens or lengths beside "
            "input_ids, in host memory"
        )
    return "this run counted no tokens: no batch held a two-dimensional tensor of token ids (tokens=… tells)"


def to_json(result: Padding) -> dict[str, Any]:
    """The result as plain values."""
    return asdict(result)
