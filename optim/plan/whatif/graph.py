"""The dependency graph of a step: what the host did in its order, what ran beside it, and who waits for whom.

    lane "host"      operators and the time between them, one after another
    lane "stream n"  kernels, each after the host has launched it and after what its stream ran before
    lane "link"      collectives, one after another; each begins once all ranks have issued it. Messages between two ranks
                     pass beside them, those of one sender to one receiver one after another

A task starts when the one before it on its lane and everything in ``after`` have ended. Tasks keep their order: a
transformation changes durations, takes tasks out or puts tasks in, and :mod:`~trine.optim.plan.whatif.replay` says what
becomes of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from trine.optim.plan.whatif.operators import Operator

__all__ = [
    "HOST",
    "LEAST_BYTES",
    "LINK",
    "PHASES",
    "Graph",
    "Pipeline",
    "RankStep",
    "Step",
    "Task",
    "fresh",
    "is_pipeline",
    "mapped",
    "renumbered",
]

HOST, LINK = "host", "link"
#: Smaller transfers are flags and counts, neither gradients nor what layers exchange.
LEAST_BYTES = 4096
#: Of host tasks, as records divide a step; what is waited for is no phase of its own here: the replay finds it.
PHASES = ("data", "forward", "backward", "optimizer", "other")

_GLUE = Operator("glue", None, None, 0, "fp32")
_numbers = count(1)


def fresh() -> int:
    """A number that no task has."""
    return next(_numbers)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A piece of work of ``seconds``. ``after``: numbers of what must have ended besides the one before on its lane.

    ``issued``: of a transfer, the collective's name; ``key`` names it alike on all ranks that enter it; ``group``: these
    ranks, empty where that is not on record; ``channel``: of a message between two ranks, who sends it to whom;
    ``of_gradients``: of an all-reduce, whether it is of parameters' gradients. ``gradient_bytes``: of a task at whose end
    parameters' gradients are ready. ``sequence``: autograd's number, which a forward operator and its backward share, -1
    for none. ``events``: rows of the trace in it. ``recomputed``: work of the forward, again in backward.
    """

    seconds: float
    phase: str
    lane: str = HOST
    operator: Operator = _GLUE
    name: str = ""
    after: tuple[int, ...] = ()
    number: int = field(default_factory=fresh)
    sequence: int = -1
    events: int = 0
    issued: str = ""
    key: str = ""
    group: tuple[int, ...] = ()
    channel: str = ""
    of_gradients: bool = False
    bytes: int = 0
    gradient_bytes: int = 0
    recomputed: bool = False

    @property
    def kind(self) -> str:
        """``product``, ``memory``, ``glue``, ``wait`` or ``transfer``."""
        return self.operator.kind

    @property
    def track(self) -> str:
        """What it waits its turn on: its lane, of a message its own of the rank's links."""
        return f"{LINK} {self.channel}" if self.channel else self.lane

    def carries(self, operation: str) -> bool:
        """Whether it is a transfer of this collective (``all_reduce``), by its name or its kernel's."""
        return self.lane == LINK and operation.replace("_", "") in self.issued.replace("_", "").lower()

    def times(self, factor: float) -> Task:
        """The same, ``factor`` times as long."""
        return replace(self, seconds=self.seconds * factor)


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's step: tasks in the order in which they were begun, and how long the step was measured to be.

    ``backlog_s``: how long streams are still at the step before when the host begins this one. A host that runs ahead hides
    behind it, and the step lasts from its end.
    """

    rank: int
    tasks: tuple[Task, ...]
    measured_s: float
    backlog_s: float = 0.0

    def phase_s(self) -> dict[str, float]:
        """Host time by phase, without waiting."""
        found = dict.fromkeys(PHASES, 0.0)
        for task in self.tasks:
            if task.lane == HOST:
                found[task.phase] += task.seconds
        return found


@dataclass(frozen=True, slots=True)
class Step:
    """The same step of every rank that was recorded."""

    index: int
    ranks: tuple[RankStep, ...]

    @property
    def measured_s(self) -> float:
        """Of the slowest rank."""
        return max(each.measured_s for each in self.ranks)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Medians of a stage's work on one micro-batch, in the order of the stages; ``weight_s`` is nought where a backward was
    recorded whole, and ``input_s`` then all of it."""

    ranks: int
    microbatches: int
    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """Steps of a run, and what is known of it.

    ``basis``: ``kernels``, ``operators`` (no device work was recorded: the host computes), or ``phases`` (no deep
    window: a task a phase). ``slowdown``: seconds of computing that a second of transfer beside it costs. ``facts``: the
    record's metadata. ``notes`` say what is assumed. ``recorded`` are the steps as they were recorded, unscaled.
    ``pipeline`` is there where micro-batches were recorded.
    """

    steps: tuple[Step, ...]
    basis: str
    world: int
    facts: Mapping[str, Any]
    slowdown: float = 0.0
    notes: tuple[str, ...] = ()
    recorded: tuple[Step, ...] = ()
    pipeline: Pipeline | None = None

    def with_note(self, text: str) -> Graph:
        """The same, with one thing more that is assumed; once."""
        return self if text in self.notes else replace(self, notes=(*self.notes, text))


def is_pipeline(graph: Graph) -> bool:
    """Whether ranks send each other messages: their parts of a step are not alike."""
    return any(task.channel for each in graph.steps[0].ranks for task in each.tasks)


def renumbered(tasks: Iterable[Task]) -> list[Task]:
    """The same work once more: its tasks wait for each other as these do, and for nothing else."""
    tasks = list(tasks)
    numbers = {task.number: fresh() for task in tasks}
    return [
        replace(
            task,
            number=numbers[task.number],
            after=tuple(numbers[number] for number in task.after if number in numbers),
        )
        for task in tasks
    ]


def mapped(graph: Graph, change: Callable[[RankStep], Iterable[Task]]) -> Graph:
    """Every rank's step by ``change``, which returns its new tasks."""

    def changed(each: RankStep) -> RankStep:
        return replace(each, tasks=tuple(change(each)))

    steps: Sequence[Step] = [
        replace(step, ranks=tuple(changed(each) for each in step.ranks)) for step in graph.steps
    ]
    return replace(graph, steps=tuple(steps))
