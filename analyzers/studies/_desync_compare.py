"""Where ranks called different things under one sequence number, and which of them left the way.

The rank to blame is the one in the minority. Where there is no majority, what each rank did before
decides: training repeats itself, so that a call which never followed these calls before is the odd one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from trine.record.model import Array

from ._desync_lines import ABSENT, GroupLine, Vocabulary
from ._desync_result import Call, Culprit, Kind, call_of
from ._desync_ring import COMPLETED, Ring

__all__ = ["find_call", "mismatch_of", "shown_calls"]

#: How many calls back the past is asked what used to follow.
LONGEST_CONTEXT = 8
#: Calls of ranks that agree, shown beside the culprits'.
MOST_SHOWN = 8

Certainty = Literal["high", "medium", "low"]


def mismatch_of(line: GroupLine, vocabulary: Vocabulary, rings: Mapping[int, Ring]) -> tuple[Culprit, ...]:
    """The first disagreement that is not yet completed, and the first that went through nevertheless."""
    kinds = _disagreements(line, vocabulary)
    live = _pending_columns(line)
    found = []
    for completed, chosen in ((False, live), (True, ~live)):
        columns = [column for column in sorted(kinds) if chosen[column]]
        if columns:
            found.append(_culprit(line, columns[0], kinds[columns[0]], completed, vocabulary, rings))
    return tuple(found)


def _pending_columns(line: GroupLine) -> Array:
    return np.asarray(((line.state != COMPLETED) & (line.call != ABSENT)).any(axis=0))


def _disagreements(line: GroupLine, vocabulary: Vocabulary) -> dict[int, Kind]:
    """Column → what differs in it first: the operation, else the sizes, else the dtypes."""
    found: dict[int, Kind] = {}
    held = line.call != ABSENT
    keys: tuple[tuple[Kind, list[int]], ...] = (
        ("types", vocabulary.types),
        ("elements", vocabulary.elements),
        ("operation", vocabulary.family),
    )
    for kind, values in keys:
        if not values:
            continue
        key = np.where(held, np.array(values, dtype=np.int64)[np.where(held, line.call, 0)], 0)
        least = np.where(key > 0, key, np.iinfo(np.int64).max).min(axis=0, initial=np.iinfo(np.int64).max)
        for column in np.flatnonzero(least < key.max(axis=0, initial=0)):
            found[int(column)] = kind
    return found


def _culprit(
    line: GroupLine,
    column: int,
    kind: Kind,
    completed: bool,
    vocabulary: Vocabulary,
    rings: Mapping[int, Ring],
) -> Culprit:
    rows = np.flatnonzero(line.call[:, column] != ABSENT)
    keys = {int(row): _key(int(line.call[row, column]), kind, vocabulary) for row in rows}
    odd, usual, certainty, hint = _odd_ones(line, column, keys)
    if odd and usual:
        hint = _shift(line, odd[0], usual[0], column, vocabulary) or hint
    sequence = int(line.sequences[column])
    shown = [*odd[:MOST_SHOWN], *usual[:MOST_SHOWN]]
    calls = tuple(_shown(rings[line.ranks[row]], line, sequence) for row in shown)
    first = usual[0] if usual else next(iter(keys))
    operation = vocabulary.calls[int(line.call[first, column])][0].operation
    return Culprit(
        kind=kind,
        ranks=tuple(line.ranks[row] for row in (odd or list(keys))),
        group=line.id,
        description=line.description,
        sequence=sequence,
        operation=operation,
        waiting=tuple(line.ranks[row] for row in usual),
        calls=calls,
        certainty=certainty,
        hint=hint,
        completed=completed,
    )


def _key(call: int, kind: Kind, vocabulary: Vocabulary) -> tuple[int, ...]:
    """What rows are told apart by. Keys of 0 agree with everything and are left out."""
    family = vocabulary.family[call]
    if kind == "operation":
        return (family,)
    return (family, vocabulary.elements[call] if kind == "elements" else vocabulary.types[call])


def _odd_ones(
    line: GroupLine, column: int, keys: Mapping[int, tuple[int, ...]]
) -> tuple[list[int], list[int], Certainty, str | None]:
    """Rows to blame, the others, how sure, and how it was told. No row to blame where it cannot be told."""
    counts = Counter(keys.values()).most_common()
    if len(counts) == 1:
        return [], list(keys), "low", None
    usual, most = counts[0]
    if most > counts[1][1]:
        odd = [row for row, key in keys.items() if key != usual]
        sure: Certainty = "high" if most > len(keys) / 2 else "medium"
        return odd, [row for row, key in keys.items() if key == usual], sure, None
    expected = {row: _used_to_follow(line.call[row, : column + 1]) for row in keys}
    broke = [row for row, as_before in expected.items() if as_before is False]
    kept = [row for row, as_before in expected.items() if as_before]
    if broke and kept and not {keys[row] for row in broke} & {keys[row] for row in kept}:
        odd_keys = {keys[row] for row in broke}
        odd = [row for row, key in keys.items() if key in odd_keys]
        return odd, [row for row in keys if row not in odd], "medium", "history"
    return [], list(keys), "low", None


def _used_to_follow(calls: Array) -> bool | None:
    """Whether the last call followed the calls before it earlier too; None where those never came before."""
    past, last = calls[:-1], int(calls[-1])
    known = len(past) - int(np.argmax((past == ABSENT)[::-1])) if (past == ABSENT).any() else 0
    past = past[known:]
    for length in range(min(LONGEST_CONTEXT, len(past) - 1), 0, -1):
        context = past[-length:]
        windows = np.lib.stride_tricks.sliding_window_view(past[:-1], length)
        before = np.flatnonzero((windows == context).all(axis=1))
        if len(before):
            return last in past[before + length].tolist()
    return None


def _shift(line: GroupLine, odd: int, usual: int, column: int, vocabulary: Vocabulary) -> str | None:
    """Whether one of two rows made a call more or less than the other, or two in the other order."""
    family = np.array([*vocabulary.family, 0], dtype=np.int64)
    own, other = family[line.call[odd, column : column + 3]], family[line.call[usual, column : column + 3]]
    next_own = int(own[1]) if len(own) > 1 else 0
    next_other = int(other[1]) if len(other) > 1 else _next_before(line.call[usual, : column + 1], family)
    if own[0] == other[0]:
        return None
    if next_own and next_own == other[0] and next_other == own[0]:
        return "swapped"
    if next_own and next_own == other[0]:
        return "extra_call"
    if next_other and next_other == own[0]:
        return "skipped_call"
    return None


def _next_before(calls: Array, family: Array) -> int:
    """The family of what always followed the last call earlier; 0 where that varied or it never came before."""
    before = np.flatnonzero(calls[:-1] == calls[-1])
    followers = {int(family[calls[place + 1]]) for place in before.tolist() if calls[place + 1] != ABSENT}
    return followers.pop() if len(followers) == 1 else 0


def find_call(ring: Ring, line: GroupLine, sequence: int) -> int | None:
    """The row of a ring's entry for a sequence number of a group; the first of a coalesced call."""
    rows = np.flatnonzero((ring.sequence == sequence) & ~ring.peer)
    names = [int(row) for row in rows if ring.groups[int(ring.group[row])].id == line.id]
    return names[0] if names else None


def _shown(ring: Ring, line: GroupLine, sequence: int) -> Call:
    row = find_call(ring, line, sequence)
    assert row is not None
    same = (ring.sequence == sequence) & ~ring.peer & (ring.group == ring.group[row])
    parts = [ring.signatures[int(place)].family for place in ring.signature[same]]
    return replace(call_of(ring, row), parts=max(sum(family != "coalesced" for family in parts), 1))


def shown_calls(
    rings: Mapping[int, Ring], line: GroupLine, ranks: Sequence[int], sequence: int
) -> tuple[Call, ...]:
    """Some ranks' entries for a sequence number."""
    rows = [(rings[rank], find_call(rings[rank], line, sequence)) for rank in ranks[:MOST_SHOWN]]
    return tuple(call_of(ring, row) for ring, row in rows if row is not None)
