"""Replay: how long a step of these tasks takes, on all ranks together.

Every lane runs its tasks in their order; a task starts when the one before it on its lane has ended and all that it waits
for has. A transfer begins once every rank's has come to the head of its lane, and ends on all at once. While a rank's
transfer is under way its host computes at the rate 1 − slowdown: threads that move bytes take cores from it. That is
simulated as a fluid: between two events every task that runs has a constant rate. Without a slow-down it is a longest path,
and each task is looked at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from trine.optim.plan.whatif.graph import HOST, LINK, RankStep, Step, Task
from trine.record.errors import UsageError

__all__ = ["Replayed", "replay"]

#: Seconds left below which a task counts as done.
_NOTHING = 1e-12


@dataclass(frozen=True, slots=True)
class Replayed:
    """``seconds`` of the step (the slowest rank's), ``rank_s`` of each, ``waited_s`` what each host stood still."""

    seconds: float
    rank_s: tuple[float, ...]
    waited_s: tuple[float, ...]


class _Lane:
    """Tasks of one lane of one rank that are still to run."""

    __slots__ = ("left", "running", "tasks")

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks = deque(tasks)
        self.left = tasks[0].seconds if tasks else 0.0
        self.running = False

    def pop(self) -> Task:
        task = self.tasks.popleft()
        self.left = self.tasks[0].seconds if self.tasks else 0.0
        self.running = False
        return task


def replay(step: Step, slowdown: float = 0.0) -> Replayed:
    """Raises ``UsageError`` where tasks wait for each other in a circle, as where it is not on record to whom a message goes."""
    return _fluid(step, slowdown) if slowdown > 0 else _longest_path(step)


def _fluid(step: Step, slowdown: float) -> Replayed:
    """Event by event; every event looks at all lanes, of which there are few where hosts compute."""
    ranks = [_lanes_of(each) for each in step.ranks]
    waits_for = _partners(step)
    done: list[set[int]] = [set() for _ in ranks]
    now, ends = 0.0, [0.0] * len(ranks)
    busy = [0.0] * len(ranks)
    while True:
        _start(ranks, done, waits_for)
        active = [
            (place, name, lane)
            for place, lanes in enumerate(ranks)
            for name, lane in lanes.items()
            if lane.running
        ]
        if not active:
            break
        rates = [_rate(name, ranks[place], slowdown) for place, name, _ in active]
        passed = min(lane.left / rate for (_, _, lane), rate in zip(active, rates, strict=True))
        now += passed
        for (place, name, lane), rate in zip(active, rates, strict=True):
            lane.left -= passed * rate
            if name == HOST:
                busy[place] += passed
            if lane.left <= _NOTHING:
                done[place].add(lane.pop().number)
                ends[place] = now
    left = [
        (place, lane.tasks[0]) for place, lanes in enumerate(ranks) for lane in lanes.values() if lane.tasks
    ]
    _require_nothing(step, left)
    waited = tuple(end - worked for end, worked in zip(ends, busy, strict=True))
    return Replayed(max(ends, default=0.0), tuple(ends), waited)


def _lanes_of(each: RankStep) -> dict[str, _Lane]:
    by_lane: dict[str, list[Task]] = {}
    tasks = _merged(each.tasks)
    for task in tasks:
        by_lane.setdefault(task.track, []).append(task)
    return {name: _Lane(found) for name, found in by_lane.items()}


def _merged(tasks: tuple[Task, ...]) -> list[Task]:
    """Runs of host tasks that nothing waits for and that wait for nothing, as one."""
    awaited = {number for task in tasks for number in task.after}
    found: list[Task] = []
    run, last = 0.0, None
    for task in tasks:
        if task.lane != HOST:
            found.append(task)
            continue
        if task.after and last is not None:
            found.append(_of(last, run))
            run, last = 0.0, None
        if task.after:
            found.append(task)
            continue
        run, last = run + task.seconds, task
        if task.number in awaited:
            found.append(_of(task, run))
            run, last = 0.0, None
    if last is not None:
        found.append(_of(last, run))
    return found


def _of(last: Task, seconds: float) -> Task:
    return Task(seconds, last.phase, number=last.number)


def _partners(step: Step) -> dict[str, int]:
    """How many ranks enter each collective."""
    counts: dict[str, int] = {}
    for each in step.ranks:
        for task in each.tasks:
            if task.lane == LINK:
                counts[task.key] = counts.get(task.key, 0) + 1
    return counts


def _start(ranks: list[dict[str, _Lane]], done: list[set[int]], partners: dict[str, int]) -> None:
    """Mark as running what may begin; what takes no time ends at once, so it is looked at again."""
    while True:
        entered: dict[str, list[_Lane]] = {}
        again = False
        for place, lanes in enumerate(ranks):
            for lane in lanes.values():
                if lane.running or not lane.tasks:
                    continue
                task = lane.tasks[0]
                if not all(number in done[place] for number in task.after):
                    continue
                if task.lane == LINK:
                    entered.setdefault(task.key, []).append(lane)
                elif task.seconds <= _NOTHING:
                    done[place].add(lane.pop().number)
                    again = True
                else:
                    lane.running = True
        for key, entering in entered.items():
            if len(entering) == partners[key]:
                longest = max(lane.left for lane in entering)
                for lane in entering:
                    lane.left, lane.running = max(longest, 2 * _NOTHING), True
        if not again:
            return


def _rate(name: str, lanes: dict[str, _Lane], slowdown: float) -> float:
    """Of a host beside a transfer; everything else runs at its own pace."""
    if name != HOST or slowdown <= 0:
        return 1.0
    busy = any(lane.running for track, lane in lanes.items() if track.startswith(LINK))
    return max(1.0 - slowdown, 1e-3) if busy else 1.0


# --- without a slow-down: a longest path -----------------------------------------------------------------


class _Pass:
    """One rank, task after task: when each ends is known as soon as what it waits for is known."""

    __slots__ = ("backlog", "ends", "free", "links", "place", "tasks", "waited")

    def __init__(self, tasks: list[Task], backlog: float) -> None:
        self.tasks, self.place, self.backlog = tasks, 0, backlog
        self.free: dict[str, float] = {}  # lane → when its last task ends
        self.ends: dict[int, float] = {}
        self.links: dict[
            str, deque[tuple[Task, float]]
        ] = {}  # by track: transfers that were issued, and when
        self.waited = 0.0

    def advance(self) -> bool:
        """Go on until something waits for a transfer whose end is not known yet; whether anything was done."""
        begun, ends, free = self.place, self.ends, self.free
        while self.place < len(self.tasks):
            task = self.tasks[self.place]
            ready = 0.0
            for number in task.after:
                if number not in ends:
                    return self.place > begun
                ready = max(ready, ends[number])
            self.place += 1
            if task.lane == LINK:
                self.links.setdefault(task.track, deque()).append((task, ready))
                continue
            before = free.get(task.lane, 0.0 if task.lane == HOST else self.backlog)
            if task.lane == HOST and ready > before:
                self.waited += ready - before
            free[task.lane] = ends[task.number] = max(ready, before) + task.seconds
        return self.place > begun

    def meet(self, track: str, start: float, seconds: float) -> None:
        """Its first transfer of a track begins at ``start`` and takes ``seconds``."""
        task, _ = self.links[track].popleft()
        self.free[track] = self.ends[task.number] = start + seconds


def _longest_path(step: Step) -> Replayed:
    """Each rank is passed through once, its transfers in the order of their issue."""
    passes = [_Pass(_merged(each.tasks), each.backlog_s) for each in step.ranks]
    partners = _partners(step)
    moved = True
    while moved:
        moved = False
        entered: dict[tuple[str, str], list[_Pass]] = {}
        for each in passes:
            moved |= each.advance()
            for track, issued in each.links.items():
                if issued:
                    entered.setdefault((track, issued[0][0].key), []).append(each)
        for (track, key), entering in entered.items():
            if len(entering) == partners[key]:
                first = [each.links[track][0] for each in entering]
                start = max(
                    max(ready, each.free.get(track, 0.0))
                    for each, (_, ready) in zip(entering, first, strict=True)
                )
                seconds = max(task.seconds for task, _ in first)
                for each in entering:
                    each.meet(track, start, seconds)
                moved = True
    left = [
        (place, each.tasks[each.place]) for place, each in enumerate(passes) if each.place < len(each.tasks)
    ]
    _require_nothing(
        step,
        left
        + [
            (place, issued[0][0])
            for place, each in enumerate(passes)
            for issued in each.links.values()
            if issued
        ],
    )
    ends = tuple(max(max(each.free.values(), default=0.0) - each.backlog, 0.0) for each in passes)
    return Replayed(max(ends, default=0.0), ends, tuple(each.waited for each in passes))


def _require_nothing(step: Step, left: list[tuple[int, Task]]) -> None:
    if left:
        place, task = left[0]
        raise UsageError(
            f"step {step.index} cannot be replayed: {len(left)} streams and threads would wait for each other, rank "
            f"{step.ranks[place].rank} before {task.key or task.name or task.kind}; gains of changes are estimated "
            "without a replay"
        )
