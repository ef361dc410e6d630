"""Lateness that a rank only passes on: it came late into one group's call because it had waited in another's.

In a grid of groups a rank that sleeps holds up its tensor-parallel group, and each of those then arrives late in its
data-parallel one. Only the first is late for reasons of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .collectives import Blame
    from .results import RankSummary

__all__ = ["Meanwhile", "PassedOn", "meanwhile", "passed_on"]

Array = npt.NDArray[Any]

#: A call and a column of it, and rows of its calls → ns of waiting passed on, shape (rows,); None where there is one group.
PassedOn = Callable[["Blame", int, Array], Array]

#: The same → for each row what took the rank longest beyond the others since its own group's call before, for how
#: long, and an example; nothing where it made no call of another group in between.
Meanwhile = Callable[["Blame", int, Array], list[tuple[str, float, str | None] | None]]

#: Ranks whose median stands for all others': more change little and cost time.
_MOST_OTHERS = 16


def passed_on(blames: Sequence[Blame]) -> PassedOn | None:
    """How much longer than the other ranks of a call one waited in calls of *other* groups since its own group's
    call before; ``None`` where there is one group alone, so that nothing can be passed on."""
    groups: dict[tuple[str, tuple[int, ...]], list[Blame]] = defaultdict(list)
    for one in blames:
        if len(one.transfer):
            groups[one.calls.group, one.calls.ranks].append(one)
    if len(groups) < 2:
        return None
    parts: dict[int, list[tuple[Array, Array, int]]] = defaultdict(list)
    numbers = {key: number for number, key in enumerate(groups)}
    for key, members in groups.items():
        for one in members:
            for column, rank in enumerate(one.calls.ranks):
                parts[rank].append((one.calls.start_ns[:, column], one.wait[:, column], numbers[key]))
    lines: dict[int, tuple[Array, Array, Array]] = {}

    def elsewhere(rank: int, group: int, start: Array) -> Array:
        """What a rank waited in other groups' calls before each of these starts of calls, since the one before."""
        if rank not in lines:
            starts = np.concatenate([part[0] for part in parts[rank]])
            order = np.argsort(starts, kind="stable")
            of = np.concatenate([np.full(len(part[0]), part[2]) for part in parts[rank]])
            lines[rank] = starts[order], np.concatenate([part[1] for part in parts[rank]])[order], of[order]
        starts, wait, of = lines[rank]
        own = of == group
        waited = np.concatenate([[0], np.cumsum(np.where(own, 0, wait))])
        before = np.searchsorted(starts[own], start, side="left") - 1
        first = np.where(before >= 0, np.searchsorted(starts, starts[own][np.maximum(before, 0)]), 0)
        return np.asarray(waited[np.searchsorted(starts, start, side="left")] - waited[first])

    def waited_longer(one: Blame, column: int, rows: Array) -> Array:
        group = numbers[one.calls.group, one.calls.ranks]
        others = [place for place in range(len(one.calls.ranks)) if place != column]
        others = others[:: -(-len(others) // _MOST_OTHERS)]
        start = one.calls.start_ns[rows]
        own = elsewhere(one.calls.ranks[column], group, start[:, column])
        usual = [elsewhere(one.calls.ranks[place], group, start[:, place]) for place in others]
        return np.asarray(own - np.median(np.stack(usual), axis=0)) if usual else own

    return waited_longer


def meanwhile(blames: Sequence[Blame], summaries: Mapping[int, RankSummary]) -> Meanwhile:
    """What ranks did between two calls of one group, calls of other groups between them left out: lateness that
    grew over several of those has its reason before them, not only in the last stretch."""
    rows_of: dict[tuple[str, tuple[int, ...], int], Array] = {}
    parts: dict[tuple[str, tuple[int, ...]], list[Array]] = defaultdict(list)
    for one in blames:
        if len(one.transfer):
            parts[one.calls.group, one.calls.ranks].append(one.calls.rows)

    def before(one: Blame, column: int, rows: Array) -> Array:
        """The table row of the group's call before each of these, -1 where there is none."""
        key = one.calls.group, one.calls.ranks
        if (*key, column) not in rows_of:
            rows_of[(*key, column)] = np.sort(np.concatenate([part[:, column] for part in parts[key]]))
        of = rows_of[(*key, column)]
        at = np.searchsorted(of, rows) - 1
        return np.asarray(np.where(at >= 0, of[np.maximum(at, 0)], -1))

    def took(one: Blame, column: int, guilty: Array, name: str) -> Array:
        values = summaries[one.calls.ranks[column]].activity_ns.get(name)
        if values is None:
            return np.zeros(len(guilty))
        rows = one.calls.rows[guilty, column]
        total = np.concatenate([[0], np.cumsum(values)])
        return np.asarray(total[rows + 1] - total[before(one, column, rows) + 1], dtype=np.float64)

    def longest(one: Blame, column: int, guilty: Array) -> list[tuple[str, float, str | None] | None]:
        summary = summaries[one.calls.ranks[column]]
        names = list(summary.activity_ns)
        others = [
            place
            for place, rank in enumerate(one.calls.ranks)
            if place != column and summaries[rank].activity_ns
        ]
        others = others[:: -(-len(others) // _MOST_OTHERS)] if others else []
        if not names or not others:
            return [None] * len(guilty)
        excess = np.stack(
            [
                took(one, column, guilty, name)
                - np.median([took(one, place, guilty, name) for place in others], axis=0)
                for name in names
            ],
            axis=1,
        )
        rows = one.calls.rows[guilty, column]
        first = before(one, column, rows) + 1
        found: list[tuple[str, float, str | None] | None] = []
        for place, (since, row) in enumerate(zip(first.tolist(), rows.tolist(), strict=True)):
            if row == since:
                found.append(None)
                continue
            most = int(excess[place].argmax())
            values = summary.activity_ns[names[most]][since : row + 1]
            example = summary.activity_spans.get(names[most], {}).get(since + int(np.argmax(values)))
            found.append((names[most], float(excess[place, most]), example))
        return found

    return longest
