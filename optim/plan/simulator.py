"""A training step, simulated: the ranks of a pipeline, their streams, and the collectives in which they meet.

    order = order_of("zb-h1", Shape(ranks=8, chunks=1, microbatches=32))
    result = simulate(order, Work.even(8, forward_s=0.010, input_s=0.010, weight_s=0.008, message_s=0.0005))
    result.bubble_ratio            part of the step in which a rank has nothing to do, mean over ranks

Each rank has a stream that computes, one that reduces gradients, and a link to every neighbour. A collective starts when all
members have entered it. Gradient buckets become ready in the course of a chunk's last backward and are reduced beside what
follows, which slows both (:class:`Contention`). ``replicas`` pipelines that share gradients wait for each other, and
``speeds`` makes some of them late.

:func:`trine.optim.plan.simulated_record.job_of` gives the result as a record, which every analysis and the timeline take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trine.optim.plan._events import COMMUNICATION, COMPUTE, MARK, NO_CONTENTION, Contention, Program
from trine.optim.plan.schedules import BACKWARD, FORWARD, WEIGHT, Order, Work
from trine.record.errors import UsageError

__all__ = ["Contention", "Gradients", "Meeting", "Simulation", "StepEnd", "simulate"]

Times = npt.NDArray[np.float64]

_COMPUTING, _REDUCING, _FIRST_LINK = 0, 1, 2

#: A row of ``Simulation.work`` that is no micro-batch's: the optimizer.
OPTIMIZER = 4


@dataclass(frozen=True, slots=True)
class Gradients:
    """How a stage's gradients are reduced: ``bucket_s`` of its buckets in the order in which they become ready.

    ``overlapped``: a bucket is reduced as soon as the part of the last backward that fills it is done; else all are when
    the rank has no work left. ``bucket_bytes``: for the record alone.
    """

    bucket_s: tuple[float, ...]
    bucket_bytes: tuple[int, ...] = ()
    overlapped: bool = True


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What follows a step's last backward, in seconds.

    ``tied_s``: the first and the last stage's ranks add up the gradients of embeddings that they share. ``norm_s``: all
    ranks wait for each other and exchange the norm of the gradients; None where nobody waits (Qi et al. 2023, section 4).
    ``gather_s``: every rank's new parameters are gathered among replicas before its next step.
    """

    optimizer_s: float = 0.0
    norm_s: float | None = None
    tied_s: float = 0.0
    gather_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective or a message as one rank saw it. ``entered_s``: when it was ready for the others."""

    rank: int
    step: int
    operation: str
    group: str
    peer: int
    bytes: int
    entered_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened. Ranks are numbered stage by stage, replicas side by side (Megatron-LM's order).

    ``work``: columns ``rank``, ``step``, ``kind`` (of ``schedules.KINDS``, or 4 for the optimizer), ``stage``,
    ``microbatch``, ``start_s``, ``end_s``, one row an action. ``meetings``: collectives and messages.
    ``rest_s``: of every step, what follows its last action before the next step begins.
    """

    order: Order
    replicas: int
    steps: int
    work: dict[str, npt.NDArray[np.float64]]
    meetings: tuple[Meeting, ...]
    rest_s: float = 0.0

    @property
    def ranks(self) -> int:
        """Of all replicas."""
        return self.order.shape.ranks * self.replicas

    @property
    def step_s(self) -> Times:
        """Of each step, from the end of the one before (on any rank) to its own: a row a step."""
        ends = [float(self.work["end_s"][self.work["step"] == step].max()) for step in range(self.steps)]
        ends = [
            max(end, *(each.end_s for each in self.meetings if each.step == step), 0.0) + self.rest_s
            for step, end in enumerate(ends)
        ]
        return np.diff(np.array([0.0, *ends]))

    def _windows(self, step: int) -> tuple[Times, Times, Times]:
        """By rank: first start, last end and seconds of computing on micro-batches."""
        chosen = (self.work["step"] == step) & (self.work["kind"] != OPTIMIZER)
        ranks = self.work["rank"][chosen].astype(np.int64)
        start, end = self.work["start_s"][chosen], self.work["end_s"][chosen]
        first, last = np.full(self.ranks, np.inf), np.zeros(self.ranks)
        np.minimum.at(first, ranks, start)
        np.maximum.at(last, ranks, end)
        busy: Times = np.bincount(ranks, weights=end - start, minlength=self.ranks).astype(np.float64)
        return first, last, busy

    def span_s(self, step: int = 0) -> float:
        """From the first forward to the last backward of all ranks."""
        first, last, _ = self._windows(step)
        return float(last.max() - first.min())

    def longest_rank_s(self, step: int = 0) -> float:
        """The longest that a rank is at it, from its own first forward to its own last backward."""
        first, last, _ = self._windows(step)
        return float((last - first).max())

    @property
    def bubble_ratio(self) -> float:
        """The part of the first step's span in which a rank computes nothing, mean over ranks; what an analysis shows."""
        _, _, busy = self._windows(0)
        return float(1 - busy.mean() / self.span_s())

    def bubble_rate(self, bypassed: bool = True) -> float:
        """As Qi et al. 2023 give it: (cost − m (F + B + W)) / cost, cost the longest rank's, work the mean rank's.

        ``bypassed`` False: cost is the span of all ranks.
        """
        _, _, busy = self._windows(0)
        cost = self.longest_rank_s() if bypassed else self.span_s()
        return float(1 - busy.mean() / cost)


def simulate(
    order: Order,
    work: Work,
    *,
    gradients: Gradients | Sequence[Gradients] | None = None,
    end: StepEnd = StepEnd(),
    replicas: int = 1,
    speeds: Times | None = None,
    contention: Contention = NO_CONTENTION,
    steps: int = 1,
) -> Simulation:
    """Run ``steps`` steps of an order of work.

    ``gradients``: of every stage alike, or of each stage. ``speeds``: (replicas, ranks), what a rank's computing is
    multiplied by: 1.1 is a tenth slower. Raises ``UsageError`` where arguments do not fit the order.
    """
    stages = order.shape.stages
    if len(work.forward_s) != stages:
        raise UsageError(f"the order has {stages} stages, and times are given for {len(work.forward_s)}")
    each = _by_stage(gradients, stages)
    wanted = (replicas, order.shape.ranks)
    factors = np.ones(wanted) if speeds is None else np.asarray(speeds, dtype=np.float64)
    if factors.shape != wanted or not (factors > 0).all():
        raise UsageError(f"speeds must be {wanted[0]} x {wanted[1]} positive factors, not {factors.shape}")
    builder = _Builder(order, work, each, end, factors)
    for step in range(steps):
        builder.add_step(step)
    return builder.result(contention, steps)


def _by_stage(given: Gradients | Sequence[Gradients] | None, stages: int) -> tuple[Gradients, ...] | None:
    if given is None:
        return None
    each = (given,) * stages if isinstance(given, Gradients) else tuple(given)
    if len(each) != stages:
        raise UsageError(f"gradients are given for {len(each)} of {stages} stages")
    return each


@dataclass(slots=True)
class _Row:
    """An action and the tasks that it is cut into."""

    rank: int
    step: int
    kind: int
    stage: int
    microbatch: int
    first: int
    last: int


@dataclass(slots=True)
class _Met:
    """A collective or a message before its times are known. ``entries``: (rank, peer, task that ends on entering)."""

    step: int
    operation: str
    group: str
    bytes: int
    task: int
    entries: list[tuple[int, int, int]]


@dataclass(slots=True)
class _Builder:
    """Turns steps into tasks."""

    order: Order
    work: Work
    gradients: tuple[Gradients, ...] | None
    end: StepEnd
    speeds: Times
    program: Program = field(default_factory=Program)
    rows: list[_Row] = field(default_factory=list)
    met: list[_Met] = field(default_factory=list)
    #: rank → what its next step waits for
    before: dict[int, list[int]] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        return len(self.speeds)

    def global_rank(self, replica: int, place: int) -> int:
        """Replicas side by side, the pipeline outermost."""
        return place * self.replicas + replica

    def add_step(self, step: int) -> None:
        """All tasks of one step."""
        ready: dict[tuple[int, int, int], list[int]] = {}
        for replica in range(self.replicas):
            found: dict[tuple[bool, int, int], _Row] = {}
            for place, actions in enumerate(self.order.actions):
                self._compute(step, replica, place, actions, found, ready)
            self._connect(replica, found)
        reduced = self._reduce(step, ready)
        self._finish(step, reduced)

    def _compute(
        self,
        step: int,
        replica: int,
        place: int,
        actions: Sequence[tuple[int, int, int]],
        found: dict[tuple[bool, int, int], _Row],
        ready: dict[tuple[int, int, int], list[int]],
    ) -> None:
        """A rank's actions, one behind the other; the last backward of a chunk is cut at its buckets."""
        rank, speed = self.global_rank(replica, place), float(self.speeds[replica, place])
        stream = [(rank, _COMPUTING)]
        last_of = {chunk: at for at, (kind, chunk, _) in enumerate(actions) if kind in (BACKWARD, WEIGHT)}
        begin = self.before.pop(rank, [])
        for at, (kind, chunk, index) in enumerate(actions):
            stage = self.order.stage_of(place, chunk)
            buckets = self.gradients[stage].bucket_s if self.gradients is not None else ()
            parts = max(len(buckets), 1) if last_of.get(chunk) == at else 1
            seconds = self.work.of(kind, stage) * speed / parts
            tasks = [self.program.add(COMPUTE, seconds, stream, begin)]
            tasks += [self.program.add(COMPUTE, seconds, stream) for _ in range(parts - 1)]
            begin = []
            row = _Row(rank, step, kind, stage, index, tasks[0], tasks[-1])
            self.rows.append(row)
            if kind != WEIGHT:
                found[kind == FORWARD, stage, index] = row
            if last_of.get(chunk) == at:
                ready[replica, place, chunk] = tasks

    def _connect(self, replica: int, found: dict[tuple[bool, int, int], _Row]) -> None:
        """Forwards wait for the stage before, backwards for the one behind, through a message where it is elsewhere."""
        last = self.order.shape.stages - 1
        for (forward, stage, index), row in found.items():
            if stage == (last if forward else 0):
                continue
            to = found[forward, stage + 1 if forward else stage - 1, index]
            sent = row.last
            if to.rank != row.rank and self.work.message_s > 0:
                link = (row.rank, _FIRST_LINK + to.rank)
                sent = self.program.add(MARK, self.work.message_s, [link], [row.last])
                name = f"pipeline {replica}"
                entries = [(row.rank, to.rank, row.last), (to.rank, row.rank, row.last)]
                self.met.append(_Met(row.step, "send", name, 0, sent, entries))
            self.program.wait(to.first, sent)

    def _meet(
        self,
        step: int,
        operation: str,
        group: str,
        seconds: float,
        size: int,
        members: Sequence[tuple[int, list[int]]],
    ) -> int:
        """A collective of ``members``, each (rank, what it waits for); it starts when all have entered."""
        entries = []
        for rank, after in members:
            entries.append((rank, -1, self.program.add(MARK, 0.0, [(rank, _REDUCING)], after)))
        streams = [(rank, _REDUCING) for rank, _ in members]
        task = self.program.add(COMMUNICATION, seconds, streams, [entry for _, _, entry in entries])
        self.met.append(_Met(step, operation, group, size, task, entries))
        return task

    def _reduce(self, step: int, ready: dict[tuple[int, int, int], list[int]]) -> dict[int, list[int]]:
        """Gradients among replicas; rank → what its optimizer waits for."""
        reduced: dict[int, list[int]] = {self.global_rank(replica, place): [] for replica, place, _ in ready}
        for (replica, place, _), tasks in ready.items():
            reduced[self.global_rank(replica, place)].append(tasks[-1])
        if self.gradients is None:
            return reduced
        for place in range(self.order.shape.ranks):
            chunks = [chunk for replica, at, chunk in ready if replica == 0 and at == place]
            # In the order in which they become ready, which is that of the chunks' last backwards.
            for chunk in sorted(chunks, key=lambda chunk: ready[0, place, chunk][-1]):
                self._reduce_chunk(step, place, chunk, ready, reduced)
        return reduced

    def _reduce_chunk(
        self,
        step: int,
        place: int,
        chunk: int,
        ready: dict[tuple[int, int, int], list[int]],
        reduced: dict[int, list[int]],
    ) -> None:
        assert self.gradients is not None
        given = self.gradients[self.order.stage_of(place, chunk)]
        for number, seconds in enumerate(given.bucket_s):
            members = []
            for replica in range(self.replicas):
                rank = self.global_rank(replica, place)
                own = ready[replica, place, chunk][number]
                after = [own] if given.overlapped else [*reduced[rank], ready[replica, place, chunk][-1]]
                members.append((rank, after))
            size = given.bucket_bytes[number] if given.bucket_bytes else 0
            task = self._meet(step, "all_reduce", f"data {place}", seconds, size, members)
            for rank, _ in members:
                reduced[rank].append(task)

    def _finish(self, step: int, reduced: dict[int, list[int]]) -> None:
        """Tied embeddings, the norm, the optimizer and the gathering of parameters."""
        ranks = sorted(reduced)
        if self.end.tied_s > 0 and self.order.shape.ranks > 1:
            stages = (0, self.order.shape.stages - 1)
            for replica in range(self.replicas):
                holders = {self.global_rank(replica, self.order.rank_of(stage)) for stage in stages}
                if len(holders) > 1:
                    members = [(rank, reduced[rank]) for rank in sorted(holders)]
                    task = self._meet(step, "all_reduce", "embedding", self.end.tied_s, 0, members)
                    for rank in holders:
                        reduced[rank].append(task)
        if self.end.norm_s is not None:
            members = [(rank, reduced[rank]) for rank in ranks]
            task = self._meet(step, "all_reduce", "all", self.end.norm_s, 4, members)
            reduced = {rank: [task] for rank in ranks}
        for rank in ranks:
            task = self.program.add(COMPUTE, self.end.optimizer_s, [(rank, _COMPUTING)], reduced[rank])
            self.rows.append(_Row(rank, step, OPTIMIZER, -1, -1, task, task))
            self.before[rank] = [task]
        if self.end.gather_s > 0:
            for place in range(self.order.shape.ranks):
                group = [self.global_rank(replica, place) for replica in range(self.replicas)]
                members = [(rank, list(self.before[rank])) for rank in group]
                task = self._meet(step, "all_gather", f"data {place}", self.end.gather_s, 0, members)
                for rank in group:
                    self.before[rank] = [task]

    def result(self, contention: Contention, steps: int) -> Simulation:
        """Run it all."""
        start, end = self.program.run(contention)
        columns = {
            "rank": [row.rank for row in self.rows],
            "step": [row.step for row in self.rows],
            "kind": [row.kind for row in self.rows],
            "stage": [row.stage for row in self.rows],
            "microbatch": [row.microbatch for row in self.rows],
            "start_s": start[[row.first for row in self.rows]],
            "end_s": end[[row.last for row in self.rows]],
        }
        meetings = []
        for met in self.met:
            for place, (rank, peer, entered) in enumerate(met.entries):
                operation = "recv" if met.operation == "send" and place else met.operation
                times = float(end[entered]), float(start[met.task]), float(end[met.task])
                meetings.append(Meeting(rank, met.step, operation, met.group, peer, met.bytes, *times))
        work = {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}
        return Simulation(self.order, self.replicas, steps, work, tuple(meetings))
