"""Which row of one rank's collectives is the same call as which row of another's.

Within a group every rank issues the same calls in the same order, so the order (or the sequence
number, where the source records one) is the identity of a call. Ranks may have recorded different
counts, because their profilers did not start and stop at the same call. Then the shorter list lies
somewhere inside the longer: the place is where operations and sizes agree, the ends of the calls
lie a constant apart (ranks leave a collective together, whatever their clocks say), and steps agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, Quality, Table

from ._integers import integer_median
from .operations import Pattern, canonical_operation, pattern_of
from .results import RankSummary

__all__ = ["Calls", "match_collectives"]

Array = npt.NDArray[Any]

#: A rank that recorded less than this share of its group's median count is left out of the group.
_WORTH_MATCHING = 0.5
#: Places tried for the shorter list inside the longer, from either end.
_MOST_PLACES = 512
#: Calls compared at each place.
_MOST_COMPARED = 1024
#: More ranks than any job has, so that two of them fit into one int64.
_MOST_RANKS = 1 << 31
#: Larger than any buffer, small enough to leave room for an operation in one int64.
_MOST_BYTES = 1 << 50
#: Operations to which every rank brings the same number of bytes.
_SAME_SIZE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
#: Ends that scatter less than this (ns) agree equally well: below it, it is the links' own noise.
_END_NOISE_NS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Matched calls of one operation in one group, shape (calls, ranks) where two-dimensional.

    ``size`` is the group's size with absent ranks, ``None`` when unknown. ``start_ns`` and
    ``end_ns`` are on each rank's own clock, :data:`MISSING` where not recorded. ``root`` and
    ``bytes`` have one value a call, :data:`MISSING` where unknown. ``rows`` are rows of each rank's
    summary table.
    """

    operation: str
    pattern: Pattern
    group: str
    ranks: tuple[int, ...]
    size: int | None
    rows: Array
    start_ns: Array
    end_ns: Array
    root: Array
    bytes: Array
    label: str | None


@dataclass(frozen=True, slots=True)
class _Line:
    """One rank's calls of one group, in order."""

    rank: int
    table: Table
    rows: Array
    operation: Array  # codes shared by all ranks
    sized: Array  # whether every rank brings the same number of bytes to such a call

    def column(self, name: str) -> Array:
        return np.asarray(self.table[name][self.rows])


@dataclass(frozen=True, slots=True)
class _GroupKey:
    id: str
    ranks: tuple[int, ...] | None
    peers: tuple[int, int] | None = None  # (sender, receiver) of a point-to-point line


def match_collectives(
    summaries: Sequence[RankSummary],
) -> tuple[list[Calls], list[Calls], list[Quality]]:
    """Match the collectives of all ranks: ``(matched, alone, quality)``.

    Calls that not all recording ranks of their group hold are left out. ``alone`` are the calls of
    groups that one rank alone recorded. Matched calls whose spans never meet, whatever the clocks,
    were not the same calls: they are left out, and said.
    """
    codes: dict[str, int] = {}
    lines: dict[_GroupKey, list[_Line]] = defaultdict(list)
    known = _groups_of(summaries)
    for summary in summaries:
        if summary.collectives is not None and len(summary.collectives):
            for key, line in _lines_of(summary, known, codes):
                lines[key].append(line)
    names = list(codes)
    matched: list[Calls] = []
    alone: list[Calls] = []
    quality: list[Quality] = []
    for key in sorted(lines, key=lambda key: (key.id, key.ranks or (), key.peers or ())):
        members = sorted(lines[key], key=lambda line: line.rank)
        if len(members) > 1:
            cut, notes = _match_lines(_label_of(key), members, named=bool(key.id))
        else:
            cut, notes = members, []
        quality += notes
        if cut and len(cut[0].rows):
            calls, notes = _calls_of(key, cut, names)
            quality += notes
            (matched if len(cut) > 1 else alone).extend(calls)
    strangers = [call for call in matched if not _meet(call)]
    if strangers:
        groups = sorted({f"{call.operation} in group {call.group or 'unnamed'}" for call in strangers})
        quality.append(
            Quality(
                "collectives-unmatched",
                "warning",
                f"the ranks' calls of {', '.join(groups)} never overlap in time, so they cannot be the same calls; "
                "they are left out",
            )
        )
    return [call for call in matched if call not in strangers], alone, quality


def _meet(calls: Calls) -> bool:
    """Whether most calls that all must enter overlap on all ranks, once each clock is set by the ends."""
    known = ((calls.start_ns != MISSING) & (calls.end_ns != MISSING)).all(axis=1)
    if calls.pattern != "all" or not known.any():
        return True
    start, end = calls.start_ns[known], calls.end_ns[known]
    offset = np.array([integer_median(end[:, 0] - column) for column in end.T], dtype=np.int64)
    return _share((start + offset).max(axis=1) <= (end + offset).min(axis=1)) > 0.5


def _label_of(key: _GroupKey) -> str:
    return f"pair {key.peers[0]}→{key.peers[1]}" if key.peers else f"group {key.id or 'unnamed'}"


# --- lines -------------------------------------------------------------------------------------


def _groups_of(summaries: Sequence[RankSummary]) -> dict[str, set[tuple[int, ...]]]:
    """Every membership seen for a group's id. Disjoint groups may share one id."""
    known: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for summary in summaries:
        for group in summary.groups:
            if group.ranks:
                known[group.id].add(tuple(group.ranks))
    return known


def _lines_of(
    summary: RankSummary, known: dict[str, set[tuple[int, ...]]], codes: dict[str, int]
) -> Iterable[tuple[_GroupKey, _Line]]:
    table = summary.collectives
    assert table is not None
    names = [canonical_operation(text) for text in [*table.strings.values, None]]
    code_of = np.array([codes.setdefault(name, len(codes)) for name in names], dtype=np.int64)
    operation = code_of[table["operation"]]
    sized = np.isin(operation, [codes[name] for name in _SAME_SIZE if name in codes])
    pair = _pairs(summary.rank, table["peer"], operation, codes)
    # Both sides of a pair are one operation, so that they match each other.
    operation = np.where(pair >= 0, codes.setdefault("send_recv", len(codes)), operation)
    for code in np.unique(table["group"]):
        in_group = table["group"] == code
        id = table.strings.text(int(code)) or ""
        ranks = next((ranks for ranks in sorted(known.get(id, ())) if summary.rank in ranks), None)
        for one in np.unique(pair[in_group]):
            rows = np.flatnonzero(in_group & (pair == one))
            peers = None if one < 0 else (int(one) // _MOST_RANKS, int(one) % _MOST_RANKS)
            rows = rows[np.argsort(_order_in_group(table, rows), kind="stable")]
            yield _GroupKey(id, ranks, peers), _Line(summary.rank, table, rows, operation[rows], sized[rows])


def _pairs(rank: int, peer: Array, operation: Array, codes: dict[str, int]) -> Array:
    """Sender and receiver of each point-to-point row in one number; -1 elsewhere."""
    sends, receives = operation == codes.get("send", -1), operation == codes.get("recv", -1)
    known = (peer >= 0) & (sends | receives)
    other = np.where(known, peer, 0)
    pair = np.where(sends, rank * _MOST_RANKS + other, other * _MOST_RANKS + rank)
    return np.where(known, pair, -1)


def _order_in_group(table: Table, rows: Array) -> Array:
    """Issue order where it is known; several workers may start calls of one group out of order."""
    for name in ("issued_ns", "start_ns", "end_ns"):
        column = table[name][rows]
        if (column != MISSING).all():
            return np.asarray(column)
    return np.arange(len(rows))


# --- one group ---------------------------------------------------------------------------------


def _match_lines(label: str, lines: list[_Line], *, named: bool) -> tuple[list[_Line], list[Quality]]:
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


def _same_calls(lines: list[_Line], *, named: bool) -> tuple[list[_Line], str]:
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


def _in_common(lines: list[_Line]) -> list[_Line]:
    """Calls of a kind (operation and size) that every rank makes. Where the source names no groups,
    calls of smaller groups lie among them, and those that only some ranks make are recognised so."""
    kinds = [_kinds(line) for line in lines]
    common = kinds[0]
    for kind in kinds[1:]:
        common = common[np.isin(common, kind)]
    if not len(common):
        return lines
    return [_taking(line, np.isin(kind, common)) for line, kind in zip(lines, kinds, strict=True)]


def _kinds(line: _Line) -> Array:
    """Operation and size of each call in one number; ranks may bring different sizes to an all-to-all
    or to a rooted operation, so there the operation alone counts."""
    size = np.where(line.sized, np.maximum(line.column("bytes"), 0), 0)
    return np.asarray(line.operation * _MOST_BYTES + np.minimum(size, _MOST_BYTES - 1))


def _taking(line: _Line, positions: Array | slice) -> _Line:
    return replace(
        line,
        rows=line.rows[positions],
        operation=line.operation[positions],
        sized=line.sized[positions],
    )


def _by_sequence(lines: list[_Line]) -> list[_Line] | None:
    """Cut to common sequence numbers; ``None`` where they are absent or contradict the operations."""
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
        cut.append(_taking(line, order[np.searchsorted(key[order], common)]))
    agreement = min(_share(line.operation == cut[0].operation) for line in cut)
    return cut if agreement >= 0.9 else None


def _numbered(sequence: Array) -> Array:
    """Sequence numbers made unique: the calls of a coalesced batch share one."""
    order = np.argsort(sequence, kind="stable")
    ordered = sequence[order]
    first = np.searchsorted(ordered, ordered, side="left")
    repeat = np.empty(len(sequence), dtype=np.int64)
    repeat[order] = np.arange(len(sequence)) - first
    return np.asarray(sequence * (int(repeat.max(initial=0)) + 1) + repeat)


def _by_step(lines: list[_Line]) -> list[_Line] | None:
    """Cut to the steps in which all ranks made the same calls; ``None`` where steps are not known of
    all calls, or where fewer than half of the shortest list would be left."""
    steps = [line.column("step") for line in lines]
    if any((step == MISSING).any() or (np.diff(step) < 0).any() for step in steps):
        return None
    common: Array | None = None
    programs: dict[int, bytes] = {}
    for line, step in zip(lines, steps, strict=True):
        numbers, first = np.unique(step, return_index=True)
        parts = np.split(line.operation, first[1:])
        if common is None:
            programs = {int(n): part.tobytes() for n, part in zip(numbers, parts, strict=True)}
            common = numbers
        else:
            same = [programs.get(int(n)) == part.tobytes() for n, part in zip(numbers, parts, strict=True)]
            common = np.intersect1d(common, numbers[np.array(same, dtype=bool)])
    masks = [np.isin(step, common) for step in steps]
    if masks[0].sum() < _WORTH_MATCHING * min(len(line.rows) for line in lines):
        return None
    return [_taking(line, mask) for line, mask in zip(lines, masks, strict=True)]


def _by_order(lines: list[_Line]) -> list[_Line]:
    """Cut all lines to the shortest one, at the place where each agrees with it best."""
    reference = min(lines, key=lambda line: (len(line.rows), line.rank))
    lags = [0 if line is reference else _best_lag(reference, line) for line in lines]
    # A lag below zero means that the shorter list begins with calls that the longer one lacks.
    first = max(-lag for lag in lags)
    last = min(len(line.rows) - lag for line, lag in zip(lines, lags, strict=True))
    last = min(last, len(reference.rows))
    return [_taking(line, slice(first + lag, last + lag)) for line, lag in zip(lines, lags, strict=True)]


def _best_lag(reference: _Line, line: _Line) -> int:
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


def _paired(reference: _Line, line: _Line, lag: int) -> tuple[_Line, _Line]:
    first, last = max(0, -lag), min(len(reference.rows), len(line.rows) - lag)
    return _taking(reference, slice(first, last)), _taking(line, slice(first + lag, last + lag))


def _sampled(line: _Line) -> _Line:
    """At most :data:`_MOST_COMPARED` calls, evenly spread: enough to tell a lag from another."""
    count = len(line.rows)
    if count <= _MOST_COMPARED:
        return line
    return _taking(line, np.linspace(0, count - 1, _MOST_COMPARED).astype(np.int64))


def _end_differences(one: _Line, other: _Line) -> Array:
    first, second = one.column("end_ns"), other.column("end_ns")
    known = (first != MISSING) & (second != MISSING)
    return np.asarray(first[known] - second[known])


def _disagreement(reference: _Line, line: _Line, lag: int) -> tuple[float, float, float, float, float]:
    """How badly two lists fit at a lag, worst clue first: operations, sizes, the scatter of the end
    differences, steps, and last the clocks themselves, which only decide where nothing else can."""
    one, other = (_sampled(side) for side in _paired(reference, line, lag))
    ends = _end_differences(one, other)
    centre = integer_median(ends) if len(ends) else 0
    scatter = integer_median(np.abs(ends - centre)) if len(ends) else 0
    return (
        round(1 - _share(one.operation == other.operation), 2),
        round(1 - _share(one.column("bytes") == other.column("bytes")), 2),
        # In octaves: of two places that fit about equally well, the later clues decide.
        round(np.log2(max(scatter, _END_NOISE_NS) / _END_NOISE_NS)),
        round(1 - _share(one.column("step") == other.column("step")), 2),
        abs(centre),
    )


def _fits(reference: _Line, line: _Line, lag: int) -> bool:
    """Whether two lists agree at a lag: the same operations, and each call's spans overlap once the
    clocks are set by the ends (nobody leaves a collective before the last has entered)."""
    one, other = (_sampled(side) for side in _paired(reference, line, lag))
    if not len(one.rows) or _share(one.operation == other.operation) < 0.9:
        return False
    start_1, end_1 = one.column("start_ns"), one.column("end_ns")
    start_2, end_2 = other.column("start_ns"), other.column("end_ns")
    known = (start_1 != MISSING) & (end_1 != MISSING) & (start_2 != MISSING) & (end_2 != MISSING)
    if not known.any():
        return True
    offset = integer_median((end_1 - end_2)[known])
    meet = (start_1 < end_2 + offset) & (start_2 + offset < end_1)
    return _share(meet[known]) > 0.5


def _share(mask: Array) -> float:
    return float(mask.mean()) if len(mask) else 0.0


def _place_in_words(lines: list[_Line], cut: list[_Line]) -> str:
    from_start = all(line.rows[0] == kept.rows[0] for line, kept in zip(lines, cut, strict=True))
    from_end = all(line.rows[-1] == kept.rows[-1] for line, kept in zip(lines, cut, strict=True))
    where = "from the start" if from_start else "from the end" if from_end else "where their ends agree"
    return f"order, aligned {where}"


# --- calls -------------------------------------------------------------------------------------


def _calls_of(key: _GroupKey, lines: list[_Line], names: list[str]) -> tuple[list[Calls], list[Quality]]:
    """Matched lines as calls, one :class:`Calls` an operation."""
    operation = np.stack([line.operation for line in lines], axis=1)
    same = (operation == operation[:, :1]).all(axis=1)
    quality: list[Quality] = []
    if not same.all():
        quality.append(
            Quality(
                "collectives-disagree",
                "warning",
                f"{_label_of(key)}: in {int((~same).sum())} of {len(same)} calls the ranks name different "
                "operations; those are left out",
            )
        )
    start, end, size, peer = (
        np.stack([line.column(name) for line in lines], axis=1)
        for name in ("start_ns", "end_ns", "bytes", "peer")
    )
    rows = np.stack([line.rows for line in lines], axis=1)
    calls: list[Calls] = []
    for code in np.unique(operation[same, 0]):
        name = names[int(code)]
        chosen = same & (operation[:, 0] == code)
        pattern: Pattern = "pair" if key.peers else pattern_of(name)
        group_size = 2 if key.peers else len(key.ranks) if key.ranks else None
        part = Calls(
            operation=name,
            pattern=pattern,
            group=key.id,
            ranks=tuple(line.rank for line in lines),
            size=group_size,
            rows=rows[chosen],
            start_ns=start[chosen],
            end_ns=end[chosen],
            root=peer[chosen].max(axis=1),
            bytes=size[chosen].max(axis=1),
            label=_common_label(lines[0], chosen),
        )
        calls.append(part)
    return calls, quality


def _common_label(line: _Line, chosen: Array) -> str | None:
    labels = np.unique(line.column("label")[chosen])
    return line.table.strings.text(int(labels[0])) if len(labels) == 1 else None
