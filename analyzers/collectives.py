"""What each rank paid and caused in the collectives, and what the links carried.

All from matched calls alone. *Transfer* is what the exchange itself takes, *wait* what a rank spent
inside a call beyond it, *lateness* how much later than the second last a rank entered calls that
others had to wait in for it, and *caused wait* the others' wait over those.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, Group

from .clocks import Clock
from .matching import Calls
from .operations import bus_factor
from .passed_on import Meanwhile, PassedOn, meanwhile, passed_on
from .phase_excess import Doing, excess_phases
from .results import CollectiveResult, Communication, HeatCell, LateActivity, RankSummary

__all__ = ["Blame", "blame", "collective_results", "communications", "heat_cells"]

Array = npt.NDArray[Any]

#: Ranks whose median stands for all others': more change little and cost time.
_MOST_OTHERS = 16
#: What a rank did longer than the others before a call explains its lateness from this share of it on.
EXPLAINS = 0.5


@dataclass(frozen=True, slots=True)
class Blame:
    """One :class:`Calls` measured. Shapes (calls,) or (calls, ranks), ns.

    ``last`` is the column of the rank that entered last and that others had to wait in for, -1 where
    there is none; of two that entered last together it is the lower rank. ``late`` is how much later
    it entered than the second last.
    """

    calls: Calls
    transfer: Array
    wait: Array
    last: Array
    late: Array

    @property
    def culprit(self) -> Array:
        """The column of the rank that caused the others' wait, -1 where nobody did: ties cause none."""
        return np.asarray(np.where(self.late > 0, self.last, -1))

    @property
    def caused(self) -> Array:
        """The others' wait in each call with a culprit; the culprit's own is not counted."""
        culprit = self.culprit
        own = np.take_along_axis(self.wait, np.maximum(culprit, 0)[:, None], axis=1)[:, 0]
        return np.asarray(np.where(culprit >= 0, self.wait.sum(axis=1) - own, 0))


def blame(calls: Calls, clocks: Mapping[int, Clock]) -> Blame:
    """Transfer, wait and culprit of each call that has a start and an end on every rank; the others
    are left out."""
    known = ((calls.start_ns != MISSING) & (calls.end_ns != MISSING)).all(axis=1)
    calls = _rows(calls, known)
    duration = np.maximum(calls.end_ns - calls.start_ns, 0)
    start, end = _corrected(calls, calls.start_ns, clocks), _corrected(calls, calls.end_ns, clocks)
    if calls.pattern == "all":
        transfer = duration.min(axis=1)
    else:
        transfer = np.maximum(end.max(axis=1) - start.max(axis=1), 0)
    wait = np.maximum(duration - transfer[:, None], 0)
    last = start.argmax(axis=1)
    # The second last: the largest once the last is out.
    others = np.where(np.arange(start.shape[1]) == last[:, None], np.iinfo(np.int64).min, start)
    late = np.take_along_axis(start, last[:, None], axis=1)[:, 0] - others.max(axis=1)
    waited_for = (start.max(axis=1) > start.min(axis=1)) & _held_up_others(calls, last)
    if calls.pattern != "all":
        # A sender that left before its receiver came, its message buffered, waited for nobody.
        stayed = np.where(np.arange(end.shape[1]) == last[:, None], np.iinfo(np.int64).min, end).max(axis=1)
        waited_for &= stayed > start.max(axis=1)
    return Blame(calls, transfer, wait, np.where(waited_for, last, -1), np.where(waited_for, late, 0))


def _corrected(calls: Calls, times: Array, clocks: Mapping[int, Clock]) -> Array:
    """Times of shape (calls, ranks) on one clock."""
    columns = [
        clocks[rank].corrected(times[:, column]) if rank in clocks else times[:, column]
        for column, rank in enumerate(calls.ranks)
    ]
    return np.stack(columns, axis=1)


def _rows(calls: Calls, known: Array) -> Calls:
    if known.all():
        return calls
    return replace(
        calls,
        rows=calls.rows[known],
        start_ns=calls.start_ns[known],
        end_ns=calls.end_ns[known],
        root=calls.root[known],
        bytes=calls.bytes[known],
    )


def _held_up_others(calls: Calls, last: Array) -> Array:
    """Whether others had to wait in the call for the rank that entered last."""
    if calls.pattern in ("all", "pair"):
        return np.ones(len(last), dtype=bool)
    is_root = np.array(calls.ranks)[last] == calls.root
    known = calls.root >= 0
    return np.asarray(known & (is_root if calls.pattern == "from_root" else ~is_root))


# --- results -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    transfer: int = 0
    wait: int = 0
    caused: int = 0
    lateness: int = 0
    last_in: int = 0
    matched: int = 0
    steady_transfer: int = 0
    steady_wait: int = 0
    doing: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    examples: dict[str, tuple[int, str]] = field(default_factory=dict)


def communications(
    blames: Sequence[Blame],
    summaries: Mapping[int, RankSummary],
    beside: Sequence[Blame] | None = None,
) -> dict[int, Communication]:
    """Each rank's part in the matched calls; ranks without a matched call are absent. ``beside`` are all calls of the
    job where ``blames`` are some: a rank may be late because it waited in the others."""
    tallies: dict[int, _Tally] = defaultdict(_Tally)
    job = blames if beside is None else beside
    waited, did = passed_on(job), meanwhile(job, summaries)
    in_phases = excess_phases(summaries)
    for one in blames:
        if not len(one.transfer):
            continue
        transfer, caused = int(one.transfer.sum()), one.caused
        for column, rank in enumerate(one.calls.ranks):
            tally = tallies[rank]
            tally.transfer += transfer
            tally.wait += int(one.wait[:, column].sum())
            tally.matched += len(one.transfer)
            steady = _steady(summaries[rank], one.calls.rows[:, column])
            tally.steady_transfer += int(one.transfer[steady].sum())
            tally.steady_wait += int(one.wait[steady, column].sum())
            tally.last_in += int((one.last == column).sum())
            guilty = np.flatnonzero(one.culprit == column)
            if len(guilty):
                tally.caused += int(caused[guilty].sum())
                tally.lateness += int(one.late[guilty].sum())
                doings = _doings(one, column, guilty, summaries, in_phases)
                doings = _over_calls(doings, one, column, guilty, waited, did)
                _note_doings(tally, doings, one.late[guilty].tolist())
    return {rank: _communication(tally) for rank, tally in tallies.items()}


def _steady(summary: RankSummary, rows: Array) -> Array:
    """Which of a rank's collective rows lie in no warm-up step."""
    statistics, table = summary.step_statistics, summary.collectives
    if statistics is None or not statistics.warm_up or table is None:
        return np.ones(len(rows), dtype=bool)
    return ~np.isin(table["step"][rows], np.array(statistics.warm_up, dtype=np.int64))


def _doings(
    one: Blame,
    column: int,
    guilty: Array,
    summaries: Mapping[int, RankSummary],
    in_phases: Callable[[int, int], Doing],
) -> list[tuple[str, str | None]]:
    """What the rank of a column did before each of the calls that it is guilty of, with an example: the activity that
    took it longest beyond the others' median before the same call. Where the others are not known, the longest."""
    summary, rows = summaries[one.calls.ranks[column]], one.calls.rows[guilty, column]
    activities = [summary.activity[row] if summary.activity else "unknown" for row in rows.tolist()]
    examples = [summary.activity_example[row] if summary.activity_example else None for row in rows.tolist()]
    if summary.activity_ns:
        excess = _excess(one, column, guilty, summaries)
        if excess is not None:
            names = list(summary.activity_ns)
            worst, late = excess.argmax(axis=1), one.late[guilty]
            for place, (row, most) in enumerate(zip(rows.tolist(), worst.tolist(), strict=True)):
                more = excess[place, most]
                if activities[place] == "unknown":
                    continue
                if place and more < EXPLAINS * late[place] and guilty[place] == guilty[place - 1] + 1:
                    # It was late before that: calls issued one after the other are all as late as the first.
                    activities[place], examples[place] = activities[place - 1], examples[place - 1]
                elif more > 0:
                    activities[place] = names[most]
                    examples[place] = summary.activity_spans.get(names[most], {}).get(row)
    if "unknown" in activities:
        table = summary.collectives
        steps = table["step"][rows] if table is not None else np.full(len(rows), MISSING)
        for place, step in enumerate(steps.tolist()):
            if activities[place] == "unknown" and (found := in_phases(summary.rank, step)) is not None:
                activities[place], examples[place] = found
    return list(zip(activities, examples, strict=True))


def _over_calls(
    doings: list[tuple[str, str | None]],
    one: Blame,
    column: int,
    guilty: Array,
    waited: PassedOn | None,
    did: Meanwhile,
) -> list[tuple[str, str | None]]:
    """What made a rank late, over all it did since its group's call before: ``waiting`` in another group's calls, or what
    took it longer than the others in the stretches between those."""
    if waited is None:
        return doings
    enough = EXPLAINS * one.late[guilty]
    passed = (waited(one, column, guilty) >= enough).tolist()
    found = []
    for doing, least, waiting, longest in zip(
        doings, enough.tolist(), passed, did(one, column, guilty), strict=True
    ):
        if waiting:
            doing = "waiting", None
        elif longest is not None and longest[1] >= least:
            doing = longest[0], longest[2]
        found.append(doing)
    return found


def _excess(one: Blame, column: int, guilty: Array, summaries: Mapping[int, RankSummary]) -> Array | None:
    """Time in each activity before the calls beyond the other ranks' median, of shape (calls, activities)."""
    known = summaries[one.calls.ranks[column]].activity_ns
    others = [
        place for place, rank in enumerate(one.calls.ranks) if place != column and summaries[rank].activity_ns
    ]
    if not others:
        return None
    # Of many, some from all over: the median of those is the median of all, near enough.
    others = others[:: -(-len(others) // _MOST_OTHERS)]
    rows, own = one.calls.rows[guilty], []
    usual = np.zeros((len(others), len(guilty)), dtype=np.int64)
    for name in known:
        for line, place in enumerate(others):
            share = summaries[one.calls.ranks[place]].activity_ns.get(name)
            usual[line] = 0 if share is None else share[rows[:, place]]
        own.append(known[name][rows[:, column]] - np.median(usual, axis=0))
    return np.stack(own, axis=1)


def _note_doings(tally: _Tally, doings: list[tuple[str, str | None]], late: list[int]) -> None:
    for (activity, example), amount in zip(doings, late, strict=True):
        tally.doing[activity] += amount
        if example is not None and amount > tally.examples.get(activity, (0, ""))[0]:
            tally.examples[activity] = (amount, example)


def _communication(tally: _Tally) -> Communication:
    doing = sorted(tally.doing.items(), key=lambda item: (-item[1], item[0]))
    return Communication(
        transfer_ns=tally.transfer,
        wait_ns=tally.wait,
        caused_wait_ns=tally.caused,
        lateness_ns=tally.lateness,
        last_in=tally.last_in,
        matched=tally.matched,
        late_doing=tuple(
            LateActivity(activity, total, tally.examples.get(activity, (0, None))[1])
            for activity, total in doing
        ),
        steady_transfer_ns=tally.steady_transfer,
        steady_wait_ns=tally.steady_wait,
    )


def collective_results(blames: Sequence[Blame]) -> tuple[CollectiveResult, ...]:
    """Calls by operation and group, the longest in total first."""
    grouped: dict[tuple[str, str], list[Blame]] = defaultdict(list)
    for one in blames:
        if len(one.transfer):
            grouped[one.calls.operation, one.calls.group].append(one)
    results = [_collective(*key, parts) for key, parts in grouped.items()]
    return tuple(sorted(results, key=lambda r: (-(r.transfer_ns + r.wait_ns), r.op, r.group)))


def _collective(op: str, group: str, parts: list[Blame]) -> CollectiveResult:
    transfer = sum(int(part.transfer.sum()) for part in parts)
    caused: dict[int, int] = defaultdict(int)
    known = all((part.calls.bytes >= 0).all() for part in parts)
    total, bus = 0, 0.0
    for part in parts:
        for column, rank in enumerate(part.calls.ranks):
            waited = int(part.caused[part.culprit == column].sum())
            if waited:
                caused[rank] += waited
        if known:
            carried = int(part.calls.bytes.sum())
            total += carried
            bus += carried * bus_factor(op, part.calls.size or len(part.calls.ranks))
    # A rank alone of a group of unknown size: how much went over links is not known.
    sized = all(part.calls.size or len(part.calls.ranks) > 1 for part in parts)
    stated = {part.calls.size for part in parts}
    labels = {part.calls.label for part in parts}
    seconds = transfer / 1e9
    return CollectiveResult(
        op=op,
        group=group,
        ranks=tuple(sorted({rank for part in parts for rank in part.calls.ranks})),
        bytes=total if known else None,
        calls=sum(len(part.transfer) for part in parts),
        transfer_ns=transfer,
        wait_ns=sum(int(part.wait.sum()) for part in parts),
        algbw_bytes_per_s=total / seconds if known and seconds and total else None,
        busbw_bytes_per_s=bus / seconds if known and sized and seconds and total else None,
        label=labels.pop() if len(labels) == 1 else None,
        caused_by=dict(sorted(caused.items(), key=lambda item: (-item[1], item[0]))),
        group_size=stated.pop() if len(stated) == 1 else None,
    )


def heat_cells(blames: Sequence[Blame], groups: Iterable[Group] = ()) -> tuple[HeatCell, ...]:
    """Wait and transfer by rank and kind of collective, kinds with most wait first.

    Groups of one description (all tensor-parallel groups, say) are one kind, so that a rank has one
    cell in it.
    """
    named = {group.id: group.description for group in groups if group.description}
    timed = [one for one in blames if len(one.transfer)]
    kinds = [(one.calls.operation, named.get(one.calls.group, one.calls.group)) for one in timed]
    of_operation = Counter(operation for operation, _ in set(kinds))
    cells: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for one, (operation, group) in zip(timed, kinds, strict=True):
        several = of_operation[operation] > 1
        name = f"{operation} in {group or 'unnamed group'}" if several else operation
        for column, rank in enumerate(one.calls.ranks):
            cell = cells[name, rank]
            cell[0] += int(one.wait[:, column].sum())
            cell[1] += int(one.transfer.sum())
            cell[2] += len(one.transfer)
    weight: Counter[str] = Counter()
    for (name, _), cell in cells.items():
        weight[name] += cell[0]
    ordered = sorted(cells.items(), key=lambda item: (-weight[item[0][0]], item[0]))
    return tuple(HeatCell(rank, name, *cell) for (name, rank), cell in ordered)
