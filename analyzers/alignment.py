"""Lines of several ranks cut to the calls that all of them hold, in the same order.

By sequence numbers where the source has them, else by steps, else by the order alone: then the
shorter list lies somewhere inside the longer. The place is where operations and sizes agree, the ends
of the calls lie a constant apart (ranks leave a collective together, whatever their clocks say), and
steps agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, Quality

from ._drift import trend_of
from .lines import Line, kinds_of

__all__ = ["align", "share"]

Array = npt.NDArray[Any]

#: A rank that recorded less than this share of its group's median count is left out of the group.
_WORTH_MATCHING = 0.5
#: Places tried for the shorter list inside the longer, from either end.
_MOST_PLACES = 512
#: Calls compared at each place.
_MOST_COMPARED = 1024
#: Ends that scatter less than this (ns) agree equally well: below it, it is the links' own noise.
_END_NOISE_NS = 20_000


def align(label: str, lines: list[Line], *, named: bool) -> tuple[list[Line], list[Quality]]:
    """The lines cut to the calls that all of them hold, in the same order, and what to say about it."""
    quality: list[Quality] = []
    counts = np.array([len(line.rows) for line in lines])
    worth = counts >= _WORTH_MATCHING * np.median(counts)
    if not worth.all():
        left = [line.rank for line, keep in zip(lines, worth, strict=True) if not keep]
        quality.append(
            Quality(
                "collectives-left-out",
                "warning",
                f"{label}: ranks {left} recorded less than half of the others' calls and are left out",
            )
        )
        lines = [line for line, keep in zip(lines, worth, strict=True) if keep]
        if len(lines) < 2:
            return [], quality
    cut, how = _same_calls(lines, named=named)
    lost = {line.rank: len(line.rows) - len(kept.rows) for line, kept in zip(lines, cut, strict=True)}
    if any(lost.values()):
        counted = ", ".join(f"rank {rank} {count}" for rank, count in lost.items() if count)
        quality.append(
            Quality(
                "collectives-aligned",
                "info",
                f"{label}: ranks recorded different calls; {len(cut[0].rows)} matched by {how} "
                f"(left out: {counted})",
            )
        )
    return cut, quality


def _same_calls(lines: list[Line], *, named: bool) -> tuple[list[Line], str]:
    """The lines cut to their common calls, and by what they were recognised."""
    found = _by_sequence(lines)
    if found is not None:
        return found, "sequence numbers"
    candidates = lines if named else _in_common(lines)
    if len({len(line.rows) for line in candidates}) > 1:
        found = _by_step(candidates)
        if found is not None:
            return found, "step numbers"
    cut = _by_order(candidates)
    return cut, _place_in_words(lines, cut)


def _in_common(lines: list[Line]) -> list[Line]:
    """Calls of a kind (operation and size) that every rank makes. Where the source names no groups,
    calls of smaller groups lie among them, and those that only some ranks make are recognised so."""
    kinds = [kinds_of(line) for line in lines]
    common = kinds[0]
    for kind in kinds[1:]:
        common = common[np.isin(common, kind)]
    if not len(common):
        return lines
    return [line.taking(np.isin(kind, common)) for line, kind in zip(lines, kinds, strict=True)]


def _by_sequence(lines: list[Line]) -> list[Line] | None:
    """Cut to common sequence numbers; ``None`` where they are absent or contradict
    operations or times (an observer that began to count later)."""
    keys: list[Array] = []
    for line in lines:
        sequence = line.column("sequence")
        if (sequence == MISSING).any():
            return None
        keys.append(_numbered(sequence))
    common = keys[0]
    for key in keys[1:]:
        common = np.intersect1d(common, key)
    if not len(common):
        return None
    cut = []
    for line, key in zip(lines, keys, strict=True):
        order = np.argsort(key, kind="stable")
        cut.append(line.taking(order[np.searchsorted(key[order], common)]))
    return cut if all(_fits(cut[0], line, 0) for line in cut[1:]) else None


def _numbered(sequence: Array) -> Array:
    """Sequence numbers made unique: the calls of a coalesced batch share one."""
    order = np.argsort(sequence, kind="stable")
    ordered = sequence[order]
    first = np.searchsorted(ordered, ordered, side="left")
    repeat = np.empty(len(sequence), dtype=np.int64)
    repeat[order] = np.arange(len(sequence)) - first
    return np.asarray(sequence * (int(repeat.max(initial=0)) + 1) + repeat)


def _by_step(lines: list[Line]) -> list[Line] | None:
    """Cut to the steps in which all ranks made the same calls; ``None`` where steps are not known of
    all calls, or where fewer than half of the shortest list would be left."""
    steps = [line.column("step") for line in lines]
    if any((step == MISSING).any() or (np.diff(step) < 0).any() for step in steps):
        return None
    programs = [_by_number(line.operation, step) for line, step in zip(lines, steps, strict=True)]
    first = programs[0]
    common = [n for n in first if all(program.get(n) == first[n] for program in programs[1:])]
    masks = [np.isin(step, common) for step in steps]
    if masks[0].sum() < _WORTH_MATCHING * min(len(line.rows) for line in lines):
        return None
    return [line.taking(mask) for line, mask in zip(lines, masks, strict=True)]


def _by_number(operation: Array, step: Array) -> dict[int, bytes]:
    """Step number → the operations of its calls in order; ``step`` ascends."""
    numbers, first = np.unique(step, return_index=True)
    parts = np.split(operation, first[1:])
    return {int(number): part.tobytes() for number, part in zip(numbers, parts, strict=True)}


def _by_order(lines: list[Line]) -> list[Line]:
    """Cut all lines to the shortest one, at the place where each agrees with it best."""
    reference = min(lines, key=lambda line: (len(line.rows), line.rank))
    lags = [0 if line is reference else _best_lag(reference, line) for line in lines]
    # A lag below zero means that the shorter list begins with calls that the longer one lacks.
    first = max(-lag for lag in lags)
    last = min(len(line.rows) - lag for line, lag in zip(lines, lags, strict=True))
    last = min(last, len(reference.rows))
    return [line.taking(slice(first + lag, last + lag)) for line, lag in zip(lines, lags, strict=True)]


def _best_lag(reference: Line, line: Line) -> int:
    """Position in ``line`` of the first call of ``reference``."""
    spare = len(line.rows) - len(reference.rows)
    inside: list[int] = list(range(spare + 1))
    if len(inside) > _MOST_PLACES:
        inside = inside[: _MOST_PLACES // 2] + inside[-_MOST_PLACES // 2 :]

    def disagreement(lag: int) -> tuple[float, ...]:
        return _disagreement(reference, line, lag)

    best = int(min(inside, key=disagreement))
    if _fits(reference, line, best):
        return best
    # Neither list holds the other: both may have lost calls, at opposite ends.
    most = min(len(reference.rows) // 2, _MOST_PLACES // 2)
    outside = [*range(-most, 0), *range(spare + 1, spare + most + 1)]
    candidates = [best, *(lag for lag in outside if _fits(reference, line, lag))]
    return int(min(candidates, key=disagreement))


def _paired(reference: Line, line: Line, lag: int) -> tuple[Line, Line]:
    first, last = max(0, -lag), min(len(reference.rows), len(line.rows) - lag)
    return reference.taking(slice(first, last)), line.taking(slice(first + lag, last + lag))


def _sampled(line: Line) -> Line:
    """At most :data:`_MOST_COMPARED` calls, evenly spread: enough to tell a lag from another."""
    count = len(line.rows)
    if count <= _MOST_COMPARED:
        return line
    return line.taking(np.linspace(0, count - 1, _MOST_COMPARED).astype(np.int64))


def _ends(one: Line, other: Line) -> tuple[Array, Array]:
    """Ends of the calls that both know, and how far the other's lie behind."""
    first, second = one.column("end_ns"), other.column("end_ns")
    known = (first != MISSING) & (second != MISSING)
    return second[known], np.asarray(first[known] - second[known])


def _disagreement(reference: Line, line: Line, lag: int) -> tuple[float, float, float, float, float]:
    """How badly two lists fit at a lag, worst clue first: operations, sizes, the scatter of the end
    differences, steps, and last the clocks themselves, which only decide where nothing else can."""
    one, other = (_sampled(side) for side in _paired(reference, line, lag))
    times, apart = _ends(one, other)
    trend, scatter = trend_of(times, apart) if len(apart) else (None, 0)
    centre = trend.offset_ns if trend is not None else 0
    return (
        round(1 - share(one.operation == other.operation), 2),
        round(1 - share(one.column("bytes") == other.column("bytes")), 2),
        # In octaves: of two places that fit about equally well, the later clues decide.
        round(np.log2(max(scatter, _END_NOISE_NS) / _END_NOISE_NS)),
        round(1 - share(one.column("step") == other.column("step")), 2),
        abs(centre),
    )


def _fits(reference: Line, line: Line, lag: int) -> bool:
    """Whether two lists agree at a lag: the same operations, and each call's spans overlap once the
    clocks are set by the ends (nobody leaves a collective before the last has entered)."""
    one, other = (_sampled(side) for side in _paired(reference, line, lag))
    if not len(one.rows) or share(one.operation == other.operation) < 0.9:
        return False
    start_1, end_1 = one.column("start_ns"), one.column("end_ns")
    start_2, end_2 = other.column("start_ns"), other.column("end_ns")
    known = (start_1 != MISSING) & (end_1 != MISSING) & (start_2 != MISSING) & (end_2 != MISSING)
    if not known.any():
        return True
    start_1, end_1, start_2, end_2 = (column[known] for column in (start_1, end_1, start_2, end_2))
    offset = trend_of(end_2, end_1 - end_2)[0].at(end_2)
    return share((start_1 < end_2 + offset) & (start_2 + offset < end_1)) > 0.5


def share(mask: Array) -> float:
    """Share of a mask that is true; 0 of an empty one."""
    return float(mask.mean()) if len(mask) else 0.0


def _place_in_words(lines: list[Line], cut: list[Line]) -> str:
    from_start = all(line.rows[0] == kept.rows[0] for line, kept in zip(lines, cut, strict=True))
    from_end = all(line.rows[-1] == kept.rows[-1] for line, kept in zip(lines, cut, strict=True))
    where = "from the start" if from_start else "from the end" if from_end else "where their ends agree"
    return f"order, aligned {where}"
