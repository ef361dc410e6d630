"""``idle_gaps``: where the idle time comes from, gap by gap: its cause, what ended it, and what the host did.

The gaps and their causes are the breakdown's own (:mod:`trine.analyzers.idle`), so the groups' causes sum to
its idle time exactly. A gap that the host and the device share (launched late, and then not started) counts
in both causes, with its part of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers._tabular import Tabular
from trine.analyzers.breakdown import device_rows, has_device_work, host_parts, receive_rows
from trine.analyzers.idle import CAUSES, device_gaps, host_gaps
from trine.analyzers.intervals import complement, union
from trine.analyzers.selection import Selected
from trine.analyzers.unrecorded import is_unrecorded
from trine.record.model import HOST_KINDS, Rank, Table

from ._path_entries import where_of
from ._path_host import owners_of, step_marks
from ._scope import Scope, Whole

__all__ = ["KEY", "NAMELESS", "GapGroup", "GapPart", "IdleGaps", "RankGaps", "join", "reduce", "to_json"]

Array = npt.NDArray[Any]

KEY = "idle_gaps"

#: What ends a gap without being an event of its own: the window, and what runs on other threads.
NAMELESS = ("the end of the window", "a collective")
#: Groups a rank keeps, and the result.
MOST_GROUPS = 40
MOST_SHOWN = 20
#: Gaps of a group, the longest, by which it is told what the host did meanwhile.
MOST_PROBED = 64
#: Ranks whose totals are kept in the result.
MOST_RANKS = 64

_OPERATOR = HOST_KINDS.index("operator")


@dataclass(frozen=True, slots=True)
class GapGroup:
    """Gaps of one cause that end in work launched by one operator; ``ended_by`` is the kernel or copy that most
    of their time ended in. Where no operator launched it, gaps are told apart by ``ended_by`` alone.

    ``total_ns`` is that cause's part of them. ``doing`` is the host's innermost span that covers most of
    the longest gaps, None where nothing was recorded; ``where`` the user's own frame, or the annotation,
    around the launch.
    """

    cause: str
    ended_by: str
    operator: str | None
    doing: str | None
    where: str | None
    count: int
    total_ns: int
    longest_ns: int


@dataclass(frozen=True, slots=True)
class GapPart:
    """One rank: ``causes_ns`` are the breakdown's idle causes, of which the groups hold the largest part."""

    window_ns: int
    idle_ns: int
    causes_ns: Mapping[str, int]
    gaps: int
    groups: tuple[GapGroup, ...]


@dataclass(frozen=True, slots=True)
class RankGaps:
    """Idle time of a rank by cause, ns."""

    rank: int
    window_ns: int
    idle_ns: int
    causes_ns: Mapping[str, int]
    gaps: int


@dataclass(frozen=True, slots=True)
class IdleGaps(Tabular):
    """All ranks together: ``groups`` are summed over them, the longest first; ``shown_ns`` is their part of
    ``idle_ns``, ``window_ns`` the sum of the ranks' windows."""

    window_ns: int
    idle_ns: int
    shown_ns: int
    causes_ns: Mapping[str, int]
    groups: tuple[GapGroup, ...]
    ranks: tuple[RankGaps, ...]
    ranks_left_out: int


# --- one rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Gaps with what explains them; columns of shape (gaps,). ``until`` ends the part that is the host's,
    ``name`` codes what ended each, ``launch`` is the host row of its launch (-1)."""

    host: Table | None
    table: Table
    window: tuple[int, int]
    start: Array
    end: Array
    until: Array
    name: Array
    launch: Array
    causes: Mapping[str, Array]


def reduce(scope: Scope) -> GapPart | None:
    """The gaps of a rank; None where it has no breakdown, or where its device's work is missing."""
    if is_unrecorded(scope.quality):
        return None
    found = [one for rank, selected in scope.traced if (one := _gaps(rank, selected)) is not None]
    if not found:
        return None
    causes = {cause: sum(int(one.causes[cause].sum()) for one in found) for cause in CAUSES}
    groups = _merged([group for one in found for group in _groups(one)])[:MOST_GROUPS]
    return GapPart(
        window_ns=sum(one.window[1] - one.window[0] for one in found),
        idle_ns=sum(causes.values()),
        causes_ns=causes,
        gaps=sum(len(one.start) for one in found),
        groups=groups,
    )


def _gaps(rank: Rank, selected: Selected) -> _Found | None:
    return _of_device(rank, selected) if has_device_work(rank) else _of_host(rank, selected)


def _of_device(rank: Rank, selected: Selected) -> _Found | None:
    device = rank.device
    assert device is not None
    rows = np.flatnonzero(device_rows(rank, selected))
    if not len(rows):
        return None
    rows = rows[np.argsort(device["start_ns"][rows], kind="stable")]
    start, end = device["start_ns"][rows], device["end_ns"][rows]
    window = int(start[0]), int(end.max())
    receive = np.isin(rows, receive_rows(rank.collectives))
    gaps = device_gaps(
        complement(union(start, end), *window), start, device["launch"][rows], receive, rank.host
    )
    ending = rows[gaps.ending]
    return _Found(
        rank.host, device, window, gaps.spans.start, gaps.spans.end, gaps.launched_ns,
        device["name"][ending], device["launch"][ending], gaps.causes,
    )  # fmt: skip


def _of_host(rank: Rank, selected: Selected) -> _Found | None:
    parts, host = host_parts(rank, selected), rank.host
    if isinstance(parts, str) or host is None:
        return None
    window, compute, communication, _ = parts
    gaps = complement(compute | communication, *window)
    operators = np.flatnonzero((host["kind"] == _OPERATOR) & (host["end_ns"] > host["start_ns"]))
    # Outermost first, so that the operator that ended a gap is the one that the user called.
    order = operators[np.lexsort((-host["end_ns"][operators], host["start_ns"][operators]))]
    place = np.searchsorted(host["start_ns"][order], gaps.end)
    inside = place < len(order)
    row = (
        np.where(inside, order[np.minimum(place, max(len(order) - 1, 0))], -1)
        if len(order)
        else gaps.end * 0 - 1
    )
    row = np.where((row >= 0) & (host["start_ns"][np.maximum(row, 0)] == gaps.end), row, -1)
    name = np.where(row >= 0, host["name"][np.maximum(row, 0)], -1)
    return _Found(host, host, window, gaps.start, gaps.end, gaps.end, name, row, host_gaps(gaps, host))


def _groups(found: _Found) -> list[GapGroup]:
    """Gaps by cause, by what ended them and by the operator that launched that."""
    operator = np.full(len(found.start), -1, dtype=np.int64)
    if found.host is found.table:
        operator = found.name.astype(np.int64)
    elif found.host is not None:
        owner = np.where(found.launch >= 0, owners_of(found.host)[np.maximum(found.launch, 0)], -1)
        operator = np.where(owner >= 0, found.host["name"][np.maximum(owner, 0)], -1).astype(np.int64)
    key = np.where(operator >= 0, operator, -2 - found.name.astype(np.int64))
    groups: list[tuple[str, Array, Array]] = []
    for cause in CAUSES:
        amount = found.causes[cause]
        rows = np.flatnonzero(amount > 0)
        if not len(rows):
            continue
        inverse = np.unique(key[rows], return_inverse=True)[1]
        sums = np.bincount(inverse.reshape(-1), weights=amount[rows])
        for one in np.argsort(-sums, kind="stable")[:MOST_GROUPS].tolist():
            mine = rows[inverse.reshape(-1) == one]
            groups.append((cause, mine, amount[mine]))
    groups.sort(key=lambda group: -int(group[2].sum()))
    prober = _Prober(found)
    return [_group(found, prober, operator, *group) for group in groups[:MOST_GROUPS]]


def _group(
    found: _Found, prober: _Prober, operator: Array, cause: str, rows: Array, amount: Array
) -> GapGroup:
    host = found.host
    longest = rows[np.argsort(-amount, kind="stable")[:MOST_PROBED]]
    first = int(longest[0])
    launch = int(found.launch[first])
    said = None if host is None or operator[first] < 0 else host.strings.text(int(operator[first]))
    return GapGroup(
        cause=cause,
        ended_by=_ended_by(found, rows, amount),
        operator=said,
        # While work was queued and not started, what the host did explains nothing.
        doing=None if cause in ("dependency", "other", "bubble") else prober.doing(longest),
        where=None if host is None or launch < 0 else where_of(host, launch),
        count=len(rows),
        total_ns=int(amount.sum()),
        longest_ns=int(amount.max()),
    )  # fmt: skip


def _ended_by(found: _Found, rows: Array, amount: Array) -> str:
    """The name that most of the time of some gaps ended in."""
    sums = np.bincount(found.name[rows].astype(np.int64) + 1, weights=amount)
    name = found.table.strings.text(int(sums.argmax()) - 1)
    if name is not None:
        return name
    return NAMELESS[int(found.end[rows[0]]) != found.window[1]]


class _Prober:
    """Finds the host's innermost span that covers most of a gap, on the thread that then launched."""

    def __init__(self, found: _Found) -> None:
        self.found = found
        self._rows: dict[int, tuple[Array, Array]] = {}
        self._marks = set() if found.host is None else set(step_marks(found.host).tolist())

    def _thread(self, thread: int) -> tuple[Array, Array]:
        """Rows of a thread by start, the enclosing before the enclosed, and their starts."""
        if thread not in self._rows:
            host = self.found.host
            assert host is not None
            rows = np.flatnonzero(host["thread"] == thread)
            start = host["start_ns"][rows]
            if (np.diff(start) <= 0).any():
                order = np.lexsort((-host["end_ns"][rows], start))
                rows, start = rows[order], start[order]
            self._rows[thread] = rows, start
        return self._rows[thread]

    def doing(self, gaps: Array) -> str | None:
        """The name that covers most of the time of some gaps; None where nothing was recorded."""
        found, host = self.found, self.found.host
        if host is None:
            return None
        total: dict[str, int] = {}
        for gap in gaps.tolist():
            start, end = int(found.start[gap]), int(found.until[gap])
            launch = int(found.launch[gap])
            if end <= start or launch < 0:
                continue
            row = self._span(int(host["thread"][launch]), start, end)
            name = "(outside every recorded span)" if row < 0 else host.strings.text(int(host["name"][row]))
            total[name or "unnamed"] = total.get(name or "unnamed", 0) + end - start
        return max(total, key=lambda name: total[name], default=None)

    def _span(self, thread: int, start: int, end: int) -> int:
        """The innermost span that covers at least half of ``[start, end)``, -1 for none but a step's mark."""
        host = self.found.host
        assert host is not None
        rows, starts = self._thread(thread)
        place = int(np.searchsorted(starts, start + (end - start) // 2, side="right")) - 1
        row = int(rows[place]) if place >= 0 else -1
        while row >= 0:
            covered = min(int(host["end_ns"][row]), end) - max(int(host["start_ns"][row]), start)
            if 2 * covered >= end - start:
                break
            row = int(host["parent"][row])
        return -1 if row in self._marks else row


def _merged(groups: Sequence[GapGroup]) -> tuple[GapGroup, ...]:
    """Groups of one cause and name together, the longest first."""
    by_name: dict[tuple[str, str], list[GapGroup]] = {}
    for group in groups:
        by_name.setdefault((group.cause, group.operator or group.ended_by), []).append(group)
    found = []
    for (cause, _), same in by_name.items():
        most = max(same, key=lambda group: group.total_ns)
        found.append(
            GapGroup(
                cause=cause,
                ended_by=most.ended_by,
                operator=most.operator,
                doing=most.doing,
                where=most.where,
                count=sum(group.count for group in same),
                total_ns=sum(group.total_ns for group in same),
                longest_ns=max(group.longest_ns for group in same),
            )
        )
    return tuple(sorted(found, key=lambda group: (-group.total_ns, group.cause, group.ended_by)))


# --- all ranks -----------------------------------------------------------------------------------------


def join(parts: Mapping[int, GapPart], whole: Whole) -> IdleGaps | str:
    """The groups of all ranks together."""
    if not parts:
        reasons = (is_unrecorded(summary.quality) for summary in whole.summaries.values())
        if (reason := next((one for one in reasons if one), None)) is not None:
            return reason
        return "no rank has a breakdown; profile a few steps with torch.profiler, or record a deep window"
    groups = _merged([group for part in parts.values() for group in part.groups])[:MOST_SHOWN]
    ranks = tuple(
        RankGaps(rank, part.window_ns, part.idle_ns, part.causes_ns, part.gaps)
        for rank, part in sorted(parts.items(), key=lambda item: (-item[1].idle_ns, item[0]))[:MOST_RANKS]
    )
    return IdleGaps(
        window_ns=sum(part.window_ns for part in parts.values()),
        idle_ns=sum(part.idle_ns for part in parts.values()),
        shown_ns=sum(group.total_ns for group in groups),
        causes_ns={cause: sum(part.causes_ns[cause] for part in parts.values()) for cause in CAUSES},
        groups=groups,
        ranks=ranks,
        ranks_left_out=len(parts) - len(ranks),
    )


def to_json(result: IdleGaps) -> dict[str, Any]:
    """The result in the contract's terms."""
    return asdict(result)
