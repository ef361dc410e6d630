"""``critical_path``: the chain of work and waiting that decides how long a step takes, and what each part of it holds.

Through host, launches, streams, kernels and collectives of each rank, and across ranks through the
collectives, with or without synchronisation events in the trace (:mod:`._path_graph` says how). Pieces of
the path follow each other without a gap, so they sum to the step exactly. What an operator, kernel,
collective or blocking call holds up is found by replaying the step without it (:mod:`._path_replay`):
time off the path gains nothing, and a part of the path gains only until another chain is the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers._tabular import Tabular
from trine.analyzers.selection import Selected
from trine.analyzers.unrecorded import is_unrecorded
from trine.record.model import MISSING, Rank, Table

from ._path_entries import Entry, Vanished, entries_of, host_bounds
from ._path_graph import Graph, graph_of
from ._path_host import Timeline, timeline_of
from ._path_links import Links, links_of
from ._path_pieces import Path, laid_out, sums_of
from ._path_ranks import JobPath, RankShare, Without, job_path, waits_on_path
from ._path_replay import measured, modelled, plan_of
from ._path_terms import CATEGORIES
from ._path_walk import Walker
from ._scope import Scope, Whole

__all__ = [
    "KEY",
    "CriticalPath",
    "Entry",
    "JobPath",
    "PathPart",
    "RankPath",
    "RankShare",
    "StepPath",
    "Without",
    "join",
    "reduce",
    "to_json",
]

Array = npt.NDArray[Any]

KEY = "critical_path"

#: Steps that are shown one by one; totals hold all.
MOST_STEPS = 32
#: Ranks whose own path is kept in the result: those that hold most of the job's path.
MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class StepPath:
    """One step: from the end of the step before it to the end of its own host and device work.
    ``segments_ns`` sum to ``length_ns``. ``step`` is None where the source marks no steps."""

    step: int | None
    length_ns: int
    segments_ns: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PathPart:
    """A stretch of one rank that has operators or kernels: the whole trace, or a deep window.

    ``replay_error`` is (length from the model's constants − measured) / measured. ``given`` and
    ``inferred`` count dependencies between streams. The ``without_`` times are the window's length if
    host work between launches took no time, if no blocking call waited, if communication took no time.
    """

    begin_ns: int
    end_ns: int
    steps: tuple[StepPath, ...]
    step_count: int
    segments_ns: Mapping[str, int]
    entries: tuple[Entry, ...]
    replay_error: float
    given: int
    inferred: int
    on_device: bool
    without_host_ns: int
    without_blocking_ns: int
    without_communication_ns: int
    links: Links | None

    @property
    def length_ns(self) -> int:
        """From the first selected step's begin to the end of its last work."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True)
class RankPath(Tabular):
    """The path of one rank; ``segments_ns`` sum to ``length_ns``. Of the communication in it, ``waiting``
    is what was spent on other ranks, where that is known."""

    rank: int
    length_ns: int
    step_count: int
    segments_ns: Mapping[str, int]
    steps: tuple[StepPath, ...]
    entries: tuple[Entry, ...]
    replay_error: float
    given: int
    inferred: int
    basis: str  # "device", or "host" where operators stand in for kernels
    without_host_ns: int
    without_blocking_ns: int
    without_communication_ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath(Tabular):
    """``ranks`` are those that hold most of the job's path (all where few), in order of that; ``left_out``
    counts the others. ``job`` is None for one rank, or where no collective joins them."""

    ranks: tuple[RankPath, ...]
    left_out: int
    job: JobPath | None


# --- one rank ------------------------------------------------------------------------------------------


def reduce(scope: Scope) -> tuple[PathPart, ...] | None:
    """The path of each traced part; None where there is neither device work nor an operator, or where a device's
    work is missing: operators that only launch are no path."""
    if is_unrecorded(scope.quality):
        return None
    parts = [part for rank, selected in scope.traced if (part := _part(rank, selected, scope.collectives))]
    return tuple(parts) or None


def _part(rank: Rank, selected: Selected, collectives: Table | None) -> PathPart | None:
    graph = graph_of(rank, selected)
    if graph is None or graph.end_ns <= graph.begin_ns:
        return None
    timeline = timeline_of(graph.host, graph.threads, graph.owner, graph.begin_ns, graph.host_end_ns)
    walker = Walker(graph)
    path = laid_out(graph, walker.whole())
    plan = plan_of(graph)
    base = measured(plan)
    vanished = Vanished(plan, base, timeline)
    extra = [modelled(plan), *host_bounds(vanished)]
    entries, lengths = entries_of(rank, vanished, path, extra)
    length = graph.end_ns - graph.begin_ns
    steps = _steps(rank, selected, graph, path, timeline)
    return PathPart(
        begin_ns=graph.begin_ns,
        end_ns=graph.end_ns,
        steps=steps[:MOST_STEPS],
        step_count=max(len(selected.steps), 1),
        segments_ns=_summed([step.segments_ns for step in steps]),
        entries=entries,
        replay_error=float(lengths[0] - length) / length,
        given=graph.given,
        inferred=graph.inferred,
        on_device=graph.on_device,
        without_host_ns=int(lengths[1]),
        without_blocking_ns=int(lengths[2]),
        without_communication_ns=int(lengths[3]),
        links=links_of(rank, graph, walker, timeline, path, collectives),
    )


def _steps(
    rank: Rank, selected: Selected, graph: Graph, path: Path, timeline: Timeline
) -> tuple[StepPath, ...]:
    """The path cut where each step's last work ended."""
    numbers, until = _completions(rank, selected, graph)
    table = sums_of(path, timeline, until[:-1])
    return tuple(
        StepPath(
            number, int(line.sum()), {name: int(v) for name, v in zip(CATEGORIES, line, strict=True) if v}
        )
        for number, line in zip(numbers, table, strict=True)
    )


def _completions(rank: Rank, selected: Selected, graph: Graph) -> tuple[list[int | None], Array]:
    """Step numbers, and when the host and device work of each had ended; the last is the window's end."""
    if rank.steps is None or not selected.steps:
        return [None], np.array([graph.end_ns])
    numbers = np.array(selected.steps, dtype=np.int64)
    ends = np.full(len(numbers), graph.begin_ns, dtype=np.int64)
    for index, end in zip(rank.steps["index"].tolist(), rank.steps["end_ns"].tolist(), strict=True):
        place = int(np.searchsorted(numbers, index))
        if place < len(numbers) and numbers[place] == index and end != MISSING:
            ends[place] = max(ends[place], end)
    if graph.on_device and len(graph):
        step = graph.table["step"][graph.source]
        at = np.minimum(np.searchsorted(numbers, step), len(numbers) - 1)
        held = numbers[at] == step
        np.maximum.at(ends, at[held], graph.end[held])
    ends = np.minimum(np.maximum.accumulate(ends), graph.end_ns)
    ends[-1] = graph.end_ns
    return [int(number) for number in numbers], ends


def _summed(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total = {name: sum(part.get(name, 0) for part in parts) for name in (*CATEGORIES, "waiting")}
    return {name: amount for name, amount in total.items() if amount}


# --- all ranks -----------------------------------------------------------------------------------------


def join(parts: Mapping[int, tuple[PathPart, ...]], whole: Whole) -> CriticalPath | str:
    """The paths of the ranks and of the job."""
    if not parts:
        reasons = (is_unrecorded(summary.quality) for summary in whole.summaries.values())
        if (reason := next((one for one in reasons if one), None)) is not None:
            return reason
        return "no rank holds kernels or operators; profile a few steps with torch.profiler, or record a deep window"
    job = _job(parts, whole)
    share = {} if job is None else {one.rank: one.on_path_ns for one in job.ranks}
    ordered = sorted(parts, key=lambda rank: (-share.get(rank, 0), rank))
    kept = ordered[:MOST_RANKS]
    return CriticalPath(
        tuple(_of_rank(rank, parts[rank], whole) for rank in kept), len(ordered) - len(kept), job
    )


def _job(parts: Mapping[int, tuple[PathPart, ...]], whole: Whole) -> JobPath | None:
    """Over the stretch that all ranks have: a deep window of each, else the trace."""
    links = {rank: part[0].links for rank, part in parts.items() if part[0].links is not None}
    return job_path(
        {rank: one for rank, one in links.items() if one}, whole.blames, whole.clocks, whole.summaries
    )


def _of_rank(rank: int, parts: tuple[PathPart, ...], whole: Whole) -> RankPath:
    segments = _summed([part.segments_ns for part in parts])
    length = sum(part.length_ns for part in parts)
    table = whole.summaries[rank].collectives
    rows = 0 if table is None else len(table)
    waiting = sum(
        waits_on_path(rank, part.links, whole.blames, rows) for part in parts if part.links is not None
    )
    waiting = min(waiting, segments.get("communication", 0))
    if waiting:
        segments["communication"] -= waiting
        segments["waiting"] = waiting
    return RankPath(
        rank=rank,
        length_ns=length,
        step_count=sum(part.step_count for part in parts),
        segments_ns={name: amount for name, amount in segments.items() if amount},
        steps=tuple(step for part in parts for step in part.steps)[:MOST_STEPS],
        entries=_added([entry for part in parts for entry in part.entries]),
        replay_error=sum(part.replay_error * part.length_ns for part in parts) / length,
        given=sum(part.given for part in parts),
        inferred=sum(part.inferred for part in parts),
        basis="device" if any(part.on_device for part in parts) else "host",
        without_host_ns=sum(part.without_host_ns for part in parts),
        without_blocking_ns=sum(part.without_blocking_ns for part in parts),
        without_communication_ns=sum(part.without_communication_ns for part in parts),
    )


def _added(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Entries of several windows by kind and name, those that gain most first."""
    by_name: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        by_name.setdefault((entry.kind, entry.name), []).append(entry)
    found = []
    for (kind, name), group in by_name.items():
        gains = [entry.gain_ns for entry in group if entry.gain_ns is not None]
        found.append(
            Entry(
                kind,
                name,
                sum(entry.count for entry in group),
                sum(entry.on_path_ns for entry in group),
                sum(entry.total_ns for entry in group),
                sum(gains) if gains else None,
                next((entry.where for entry in group if entry.where), None),
            )
        )
    return tuple(sorted(found, key=lambda entry: (-(entry.gain_ns or 0), -entry.on_path_ns, entry.name)))


def to_json(result: CriticalPath) -> dict[str, Any]:
    """The result in the contract's terms."""
    return {
        "job": None if result.job is None else asdict(result.job),
        "ranks": [asdict(rank) for rank in result.ranks],
        "ranks_left_out": result.left_out,
    }
