"""From a job's records or traces to the graph of its steps.

Deep windows (or traces) give operators or kernels; the steps outside windows give how long phases usually are, to which the
windows' steps are scaled, since a profiler slows the host. Without windows a step is its phases and its collectives, and
what changes single operators cannot be said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from trine.optim.plan.whatif._host_tasks import steps_of_operators
from trine.optim.plan.whatif._kernel_tasks import steps_of_kernels
from trine.optim.plan.whatif._phase_tasks import steps_of_phases
from trine.optim.plan.whatif._steady import WARM_UP, Array, Steady, as_usual, steady_of
from trine.optim.plan.whatif._windows import completed
from trine.optim.plan.whatif.graph import LEAST_BYTES, LINK, Graph, Pipeline, RankStep, Step, Task
from trine.record.errors import UsageError
from trine.record.model import MISSING, Job, Rank, Table

__all__ = ["Array", "Part", "Steady", "graph_of", "joined", "part_of"]

#: Steps of deep windows or traces that are looked at; each is a graph of its own.
MOST_STEPS = 6
#: Ranks that are read; more say little more of a step.
MOST_RANKS = 16
#: What tasks are, the finest first.
_BASES = ("kernels", "operators", "phases")


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank's tables say, picklable: its steps as tasks, on the finest basis that it has, and as a table.

    ``profiled``: the steps that a profiler slowed, whether they are among ``steps`` or not.
    """

    rank: int
    basis: str
    steps: tuple[tuple[int, RankStep], ...]
    profiled: frozenset[int]
    table: Table | None
    host_name: str | None
    world: int | None
    metadata: Mapping[str, Any]
    work: Mapping[tuple[int, str], tuple[float, ...]]  # (stage, direction) → seconds of each micro-batch
    damage: tuple[str, ...] = ()  # what of its files could not be read


def part_of(rank: Rank, most_steps: int = MOST_STEPS, finest: bool = True) -> Part:
    """One rank, read. ``finest``: kernels or operators where there are any, else phases alone."""
    found: list[tuple[int, RankStep]] = []
    basis = "phases"
    parts = [completed(window, rank) for window in rank.windows] or [rank]
    for name, read in (("kernels", steps_of_kernels), ("operators", steps_of_operators)) if finest else ():
        found = [step for part in parts for step in read(part)][:most_steps]
        if found:
            basis = name
            break
    if not found:
        found = steps_of_phases(rank, WARM_UP)
    profiled = (part.steps["index"].tolist() for part in rank.windows if part.steps is not None)
    return Part(
        rank.rank,
        basis,
        tuple(found),
        frozenset(index for indices in profiled for index in indices),
        rank.steps,
        rank.host_name,
        rank.world_size,
        _metadata(rank),
        _work(rank),
        tuple(
            note.message
            for read in (rank, *rank.windows)
            for note in read.quality
            if note.severity == "error"
        ),
    )


def _metadata(rank: Rank) -> dict[str, Any]:
    """The record's; of a trace, the name of its device at least."""
    named = {"device": {"type": "cuda", "name": rank.devices[0].name}} if rank.devices else {}
    return {**named, **rank.metadata}


def _work(rank: Rank) -> dict[tuple[int, str], tuple[float, ...]]:
    table = rank.microbatches
    if table is None:
        return {}
    seconds = (table["end_ns"] - table["start_ns"]) / 1e9
    found: dict[tuple[int, str], list[float]] = {}
    rows = zip(table["stage"].tolist(), table.text("direction").tolist(), seconds.tolist(), strict=True)
    for stage, direction, each in rows:
        found.setdefault((stage, str(direction)), []).append(each)
    return {key: tuple(each) for key, each in found.items()}


def _pipeline(parts: Sequence[Part]) -> Pipeline | None:
    """Of the ranks that recorded micro-batches; None where a stage is missing, or no forward was recorded."""
    times: dict[tuple[int, str], list[float]] = {}
    for part in parts:
        for key, each in part.work.items():
            times.setdefault(key, []).extend(each)
    stages = sorted({stage for stage, _ in times})
    count = _microbatches(parts)
    if stages != list(range(len(stages))) or len(stages) < 2 or not count:
        return None

    def of(direction: str) -> list[float]:
        return [median(times.get((stage, direction), [0.0])) for stage in stages]

    whole, by_input, by_weight = of("backward"), of("backward_input"), of("backward_weight")
    ranks = max((len({stage for stage, _ in part.work}) for part in parts), default=1)
    return Pipeline(
        len(stages) // max(ranks, 1), count, tuple(of("forward")),
        tuple(a + b for a, b in zip(whole, by_input, strict=True)), tuple(by_weight),
    )  # fmt: skip


def _microbatches(parts: Sequence[Part]) -> int:
    """Of a step: as configured, else as many forwards as a stage ran in each of its rank's steps; 0 where it ran none."""
    configured: Any = parts[0].metadata
    for name in ("configuration", "parallel", "microbatches"):
        configured = configured.get(name) if isinstance(configured, Mapping) else None
    if isinstance(configured, int):
        return configured

    def counted(part: Part) -> int:
        forwards = [len(each) for (_, direction), each in part.work.items() if direction == "forward"]
        steps = (0 if part.table is None else len(part.table)) or 1
        return max(round(max(forwards) / steps), 1) if forwards else 0

    return max((counted(part) for part in parts), default=0)


def graph_of(job: Job) -> tuple[Graph, Steady]:
    """Raises ``UsageError`` where the job holds no step that could be replayed."""
    ranks = [job.rank(rank) for rank in job.rank_ids[:MOST_RANKS]]
    parts = [part_of(rank) for rank in ranks]
    name = str(job.name or job.path)
    try:
        return joined(parts, job.world_size, name)
    except UsageError:
        if all(part.basis == "phases" for part in parts):
            raise
    return joined([part_of(rank, finest=False) for rank in ranks], job.world_size, name)


def joined(parts: Sequence[Part], world: int | None, name: str) -> tuple[Graph, Steady]:
    """The parts with the finest tasks as one graph: of large jobs, one rank a node has windows.

    Raises ``UsageError`` where they share no step; ``name`` is the job's, for that.
    """
    basis = min((part.basis for part in parts), key=_BASES.index, default="phases")
    chosen = [part for part in parts if part.basis == basis]
    steps = _joined([part.steps for part in chosen], [part.steps for part in parts if part.basis != basis])
    if not steps:
        raise UsageError(
            f"{name} holds no whole step of every rank to replay: record a few steps with trine.profile, or give traces "
            "with ProfilerStep marks and operators or kernels"
        )
    world = world or len(parts)
    facts = {**parts[0].metadata, "hosts": _hosts(parts, world), "samples": _samples(chosen)}
    graph = Graph(tuple(steps), basis, world, facts, recorded=tuple(steps), pipeline=_pipeline(parts))
    if basis == "phases":
        graph = graph.with_note(
            "no deep window was read: phases and collectives only, nothing of single operators"
        )
    damage = [said for part in parts for said in part.damage]
    if damage:
        more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        graph = graph.with_note(
            f"the data is not whole, and what is missing counts as nothing: {damage[0]}{more}"
        )
    if len(chosen) < world:
        heard = len(parts) == world and all(_has_transfers(part) for part in parts)
        words = "of the others their collectives" if heard else "transfers may hold waiting for the others"
        graph = graph.with_note(f"{len(chosen)} of {world} ranks: {words}")
    profiled = frozenset[int]().union(*(part.profiled for part in parts))
    steady = steady_of([part.table for part in chosen], profiled)
    return as_usual(graph, steady), steady


def _has_transfers(part: Part) -> bool:
    return any(task.lane == LINK for _, step in part.steps for task in step.tasks)


def _hosts(parts: Sequence[Part], world: int) -> int | None:
    """Nodes of the job: of ranks of whom only the first are read, by how many the first node has; None where unknown."""
    ranks = Counter(part.host_name for part in parts)
    if None in ranks:
        return None if len(parts) < world else 1
    if len(parts) >= world:
        return len(ranks)
    if len(ranks) < 2 or [part.rank for part in parts] != list(range(len(parts))):
        return None
    return -(-world // ranks[parts[0].host_name])


def _samples(parts: Sequence[Part]) -> int | None:
    """Of a rank's step, the median; None where no rank knows."""
    found = [part.table["samples"] for part in parts if part.table is not None]
    known = [values[values != MISSING] for values in found]
    together = np.concatenate(known) if known else np.empty(0)
    return int(np.median(together)) if len(together) else None


def _joined(
    by_rank: Sequence[Sequence[tuple[int, RankStep]]], others: Sequence[Sequence[tuple[int, RankStep]]] = ()
) -> list[Step]:
    """Steps that every rank has, with the collectives that every rank entered; of ``others`` their times alone are taken."""
    found = []
    for index, _ in by_rank[0]:
        mine, theirs = (
            [next((step for at, step in steps if at == index), None) for steps in all_steps]
            for all_steps in (by_rank, others)
        )
        if all(step is not None for step in mine):
            found.append(_matched(index, [step for step in mine if step], [step for step in theirs if step]))
    return found


def _matched(index: int, ranks: Sequence[RankStep], others: Sequence[RankStep] = ()) -> Step:
    """Transfers last as long as on the rank that came last; what some ranks of a group lack is no transfer of theirs alone."""
    recorded = {each.rank for each in ranks}
    partners: dict[str, int] = {}
    for task in _transfers(ranks):
        entering = len(recorded.intersection(task.group)) if task.group else len(ranks)
        partners[task.key] = 2 if task.channel else entering
    entered = Counter(task.key for task in _transfers(ranks))
    own = {key: float("inf") for key, count in entered.items() if count == partners[key]}
    for task in _transfers((*ranks, *others)):
        if task.key in own:
            own[task.key] = min(own[task.key], task.seconds)
    return Step(index, tuple(replace(each, tasks=_cleaned(each.tasks, own)) for each in ranks))


def _transfers(ranks: Iterable[RankStep]) -> Iterator[Task]:
    return (task for each in ranks for task in each.tasks if task.lane == LINK)


def _cleaned(tasks: Sequence[Task], transfers: Mapping[str, float]) -> tuple[Task, ...]:
    """Tasks with these transfers alone, by key, each as long as is said; nothing waits for the others."""
    kept = [task for task in tasks if task.lane != LINK or task.key in transfers]
    known = {task.number for task in kept}
    gradients = _gradients(kept)

    def cleaned(task: Task) -> Task:
        if not all(number in known for number in task.after):
            task = replace(task, after=tuple(number for number in task.after if number in known))
        if task.lane != LINK:
            return task
        return replace(task, seconds=transfers[task.key], of_gradients=task.number in gradients)

    return tuple(cleaned(task) for task in kept)


def _gradients(tasks: Sequence[Task]) -> set[int]:
    """All-reduces of gradients, by number: behind a backward, and not what a tensor-parallel layer's backward exchanges, which
    is as large as what its forward does in the same group."""

    def ahead(task: Task) -> bool:
        return task.phase in ("data", "forward")

    reduced = [task for task in tasks if task.carries("all_reduce") and task.bytes >= LEAST_BYTES]
    layers = {(task.group, task.bytes) for task in reduced if ahead(task)}
    return {task.number for task in reduced if not ahead(task) and (task.group, task.bytes) not in layers}
