"""``launch_queue``: is the device fed? How much launched work waits on it, over time.

The host runs ahead of a healthy device: work is launched long before the device gets to it, and what the
host does costs nothing. Where the queue runs empty, every moment of the host is a moment of the step. Three
states: *fed*, work waits (launched, not started); *last*, something runs and nothing waits behind it, so the
host must hurry, unless it waits itself; *starved*, nothing is launched that has not ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trine.analyzers._tabular import Columns, Tabular
from trine.analyzers.breakdown import device_rows, has_device_work
from trine.analyzers.selection import Selected
from trine.record.model import MISSING, Rank

from ._scope import Scope, Whole

__all__ = ["KEY", "LaunchQueue", "QueuePart", "RankQueue", "StepQueue", "join", "reduce", "to_json"]

Array = npt.NDArray[Any]

KEY = "launch_queue"

#: Points of the series that a part keeps, and steps.
MOST_POINTS = 200
MOST_STEPS = 64
#: Ranks with a series in the result: those whose queue is empty most.
MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class StepQueue:
    """A step's work: share of the time from its first launch-to-run to its last end with nothing waiting, and
    the median time from launch to start."""

    step: int
    nothing_waits_share: float
    median_lead_ns: int


@dataclass(frozen=True, slots=True)
class QueuePart(Tabular):
    """One rank's queue over ``window_ns`` (the breakdown's window; of several deep windows the sum).

    ``starved_ns`` nothing launched had not ended; ``last_ns`` something ran and nothing waited behind it;
    ``fed_ns`` work waited. They sum to the window. ``series`` is (ns from the window's begin, mean number of
    waiting pieces of work since the point before). ``without_launch`` counts work that no launch is known of:
    it is left out, and where it is much the queue looks emptier than it was.
    """

    COLUMNS: ClassVar[Columns] = {"series": ("since_begin_ns", "waiting")}

    window_ns: int
    starved_ns: int
    last_ns: int
    fed_ns: int
    median_lead_ns: int
    p90_lead_ns: int
    median_length_ns: int
    work: int
    without_launch: int
    deepest: int
    steps: tuple[StepQueue, ...]
    series: tuple[tuple[int, float], ...]

    @property
    def host_bound_share(self) -> float:
        """Share of the window in which nothing launched was left to run: there the host set the pace."""
        return self.starved_ns / self.window_ns if self.window_ns else 0.0


@dataclass(frozen=True, slots=True)
class RankQueue:
    """A rank and its queue."""

    rank: int
    queue: QueuePart


@dataclass(frozen=True, slots=True)
class LaunchQueue(Tabular):
    """All ranks. ``host_bound_share`` (nothing launched was left to run) and ``last_share`` (something ran, and
    nothing waited behind it) are of all their windows together; ``ranks`` are those whose device starved most."""

    host_bound_share: float
    last_share: float
    median_lead_ns: int
    ranks: tuple[RankQueue, ...]
    ranks_left_out: int


# --- one rank ------------------------------------------------------------------------------------------


def reduce(scope: Scope) -> QueuePart | None:
    """The queue of a rank; None where no device work has a launch."""
    parts = [part for rank, selected in scope.traced if (part := _part(rank, selected)) is not None]
    return _together(parts) if parts else None


def _part(rank: Rank, selected: Selected) -> QueuePart | None:
    device, host = rank.device, rank.host
    if device is None or host is None or not has_device_work(rank):
        return None
    rows = np.flatnonzero(device_rows(rank, selected))
    launch_row = device["launch"][rows]
    known = launch_row >= 0
    lost, rows, launch_row = int((~known).sum()), rows[known], launch_row[known]
    if not len(rows):
        return None
    start, end = device["start_ns"][rows], device["end_ns"][rows]
    # Host and device clocks differ by a microsecond or two: nothing starts before its launch.
    launch = np.minimum(host["start_ns"][launch_row], start)
    lead = start - launch
    begin, stop = int(start.min()), int(end.max())
    times, waiting, running = _depths(launch, start, end, begin, stop)
    length = np.diff(times, append=stop)
    fed = waiting > 0
    return QueuePart(
        window_ns=stop - begin,
        starved_ns=int(length[~fed & (running == 0)].sum()),
        last_ns=int(length[~fed & (running > 0)].sum()),
        fed_ns=int(length[fed].sum()),
        median_lead_ns=int(np.median(lead)),
        p90_lead_ns=int(np.quantile(lead, 0.9)),
        median_length_ns=int(np.median(end - start)),
        work=len(rows),
        without_launch=lost,
        deepest=int(waiting.max()),
        steps=_steps(device["step"][rows], start, end, lead, times, fed),
        series=_thinned(times, waiting, begin, stop),
    )


def _depths(launch: Array, start: Array, end: Array, begin: int, stop: int) -> tuple[Array, Array, Array]:
    """Instants from ``begin`` on, and from each on how much work waits and how much runs."""
    count = len(launch)
    times = np.concatenate((launch, start, end))
    waits = np.repeat(np.array([1, -1, 0]), count)
    runs = np.repeat(np.array([0, 1, -1]), count)
    order = np.argsort(times, kind="stable")
    times = np.maximum(times[order], begin)
    waiting, running = np.cumsum(waits[order]), np.cumsum(runs[order])
    keep = np.append(times[1:] > times[:-1], True) & (times < stop)
    return times[keep], waiting[keep], running[keep]


def _steps(
    step: Array, start: Array, end: Array, lead: Array, times: Array, fed: Array
) -> tuple[StepQueue, ...]:
    """Each step's own stretch of the device."""
    numbers = np.unique(step[step != MISSING])[:MOST_STEPS]
    until = np.append(0, np.cumsum(np.diff(times) * fed[:-1])) if len(times) else np.zeros(1)
    found = []
    for number in numbers.tolist():
        mine = step == number
        low, high = int(start[mine].min()), int(end[mine].max())
        fed_ns = float(np.interp(high, times, until) - np.interp(low, times, until))
        share = 1 - fed_ns / (high - low) if high > low else 0.0
        found.append(StepQueue(int(number), round(max(share, 0.0), 4), int(np.median(lead[mine]))))
    return tuple(found)


def _thinned(times: Array, waiting: Array, begin: int, stop: int) -> tuple[tuple[int, float], ...]:
    """Mean depth over equal stretches of the window."""
    edges = np.linspace(begin, stop, MOST_POINTS + 1)
    knots = np.append(times, stop)
    area = np.append(0.0, np.cumsum(np.diff(knots) * waiting))
    mean = np.diff(np.interp(edges, knots, area)) / max((stop - begin) / MOST_POINTS, 1e-9)
    return tuple((round(float(edge) - begin), round(float(value), 2)) for edge, value in zip(edges[1:], mean, strict=True))  # fmt: skip


def _together(parts: list[QueuePart]) -> QueuePart:
    """Several deep windows: sums; medians of the window with most work; the series of the first."""
    if len(parts) == 1:
        return parts[0]
    most = max(parts, key=lambda part: part.work)
    return QueuePart(
        window_ns=sum(part.window_ns for part in parts),
        starved_ns=sum(part.starved_ns for part in parts),
        last_ns=sum(part.last_ns for part in parts),
        fed_ns=sum(part.fed_ns for part in parts),
        median_lead_ns=most.median_lead_ns,
        p90_lead_ns=most.p90_lead_ns,
        median_length_ns=most.median_length_ns,
        work=sum(part.work for part in parts),
        without_launch=sum(part.without_launch for part in parts),
        deepest=max(part.deepest for part in parts),
        steps=tuple(step for part in parts for step in part.steps)[:MOST_STEPS],
        series=parts[0].series,
    )


# --- all ranks -----------------------------------------------------------------------------------------


def join(parts: Mapping[int, QueuePart], whole: Whole) -> LaunchQueue | str:
    """The queues of all ranks."""
    if not parts:
        return "no device work with a launch was recorded; it takes a trace with CUDA or ROCm runtime calls"
    window = sum(part.window_ns for part in parts.values())
    ordered = sorted(parts, key=lambda rank: (-parts[rank].host_bound_share, rank))
    starved = sum(part.starved_ns for part in parts.values())
    return LaunchQueue(
        host_bound_share=starved / window if window else 0.0,
        last_share=sum(part.last_ns for part in parts.values()) / window if window else 0.0,
        median_lead_ns=int(np.median([part.median_lead_ns for part in parts.values()])),
        ranks=tuple(RankQueue(rank, parts[rank]) for rank in ordered[:MOST_RANKS]),
        ranks_left_out=max(len(ordered) - MOST_RANKS, 0),
    )


def to_json(result: LaunchQueue) -> dict[str, Any]:
    """The result in the contract's terms."""
    found = asdict(result)
    for rank, given in zip(found["ranks"], result.ranks, strict=True):
        rank["queue"]["host_bound_share"] = given.queue.host_bound_share
    return found
