"""From a job's records or traces to the graph of its steps.

Deep windows (or traces) give operators or kernels; the steps outside windows give how long phases usually are, to which the
windows' steps are scaled, since a profiler slows the host. Without windows a step is its phases and its collectives, and
what changes single operators cannot be said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.optim.plan.whatif._host_tasks import steps_of_operators
from trine.optim.plan.whatif._kernel_tasks import steps_of_kernels
from trine.optim.plan.whatif._phase_tasks import steps_of_phases
from trine.optim.plan.whatif.graph import (
    HOST,
    LINK,
    PHASES,
    Graph,
    Pipeline,
    RankStep,
    Step,
    Task,
    is_pipeline,
)
from trine.record.errors import UsageError
from trine.record.model import MISSING, Job, Rank, Table

__all__ = ["Part", "Steady", "graph_of", "joined", "part_of"]

#: Steps that warm up, at a record's start.
WARM_UP = 3
#: Steps of deep windows or traces that are looked at; each is a graph of its own.
MOST_STEPS = 6
#: Ranks that are read; more say little more of a step.
MOST_RANKS = 16

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Steady:
    """Steps outside windows and after the warm-up: seconds of each, the slowest rank's, and by phase (ranks' mean).

    ``seconds`` of shape (steps,), ``phases`` maps a phase to the same; empty where the source has no such steps.
    """

    seconds: Array
    phases: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank's tables say, picklable: its steps as tasks, on the finest basis that it has, and as a table."""

    rank: int
    basis: str
    steps: tuple[tuple[int, RankStep], ...]
    table: Table | None
    host_name: str | None
    world: int | None
    metadata: Mapping[str, Any]
    work: Mapping[tuple[int, str], tuple[float, ...]]  # (stage, direction) → seconds of each micro-batch


def part_of(rank: Rank, most_steps: int = MOST_STEPS, finest: bool = True) -> Part:
    """One rank, read. ``finest``: kernels or operators where there are any, else phases alone."""
    found: list[tuple[int, RankStep]] = []
    basis = "phases"
    for name, read in (("kernels", steps_of_kernels), ("operators", steps_of_operators)) if finest else ():
        found = [step for part in (rank.windows or (rank,)) for step in read(part)][:most_steps]
        if found:
            basis = name
            break
    if not found:
        found = steps_of_phases(rank, WARM_UP)
    return Part(
        rank.rank,
        basis,
        tuple(found),
        rank.steps,
        rank.host_name,
        rank.world_size,
        dict(rank.metadata),
        _work(rank),
    )


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
    """Of the ranks that recorded micro-batches; None where a stage is missing."""
    times: dict[tuple[int, str], list[float]] = {}
    for part in parts:
        for key, each in part.work.items():
            times.setdefault(key, []).extend(each)
    stages = sorted({stage for stage, _ in times})
    if stages != list(range(len(stages))) or len(stages) < 2:
        return None

    def of(direction: str) -> list[float]:
        return [median(times.get((stage, direction), [0.0])) for stage in stages]

    whole, by_input, by_weight = of("backward"), of("backward_input"), of("backward_weight")
    ranks = max((len({stage for stage, _ in part.work}) for part in parts), default=1)
    known = parts[0].metadata.get("pipeline")
    count = known.get("microbatches") if isinstance(known, Mapping) else None
    # Each stage runs a forward of every micro-batch in every step that was recorded.
    steps = max((0 if part.table is None else len(part.table) for part in parts), default=0) or 1
    recorded = max(len(each) for (_, direction), each in times.items() if direction == "forward")
    return Pipeline(
        len(stages) // max(ranks, 1), int(count or max(round(recorded / steps), 1)), tuple(of("forward")),
        tuple(a + b for a, b in zip(whole, by_input, strict=True)), tuple(by_weight),
    )  # fmt: skip


def graph_of(job: Job) -> tuple[Graph, Steady]:
    """Raises ``UsageError`` where the job holds no step that could be replayed."""
    ranks = [job.rank(rank) for rank in job.rank_ids[:MOST_RANKS]]
    parts = [part_of(rank) for rank in ranks]
    if len({part.basis for part in parts}) > 1:
        parts = [part_of(rank, finest=False) for rank in ranks]
    return joined(parts, job.world_size, str(job.name or job.path))


def joined(parts: Sequence[Part], world: int | None, name: str) -> tuple[Graph, Steady]:
    """All ranks' parts as one graph. Raises ``UsageError`` where they share no step; ``name`` is the job's, for that."""
    steps = _joined([part.steps for part in parts]) if len({part.basis for part in parts}) == 1 else []
    if not steps:
        raise UsageError(
            f"{name} holds no whole step of every rank to replay: record a few steps with trine.profile, or give traces "
            "with ProfilerStep marks and operators or kernels"
        )
    basis, world = parts[0].basis, world or len(parts)
    steady = _steady(
        [part.table for part in parts], {step.index for step in steps} if basis != "phases" else ()
    )
    facts = {**parts[0].metadata, "hosts": len({part.host_name for part in parts if part.host_name}) or 1}
    graph = Graph(tuple(steps), basis, world, facts, recorded=tuple(steps), pipeline=_pipeline(parts))
    if basis == "phases":
        graph = graph.with_note("no deep window: phases and collectives only, nothing of single operators")
    if len(parts) < world:
        graph = graph.with_note(f"{len(parts)} of {world} ranks: transfers may hold waiting for the others")
    if is_pipeline(graph):
        graph = _evenly_scaled(graph, steady) if basis == "operators" and len(steady.seconds) else graph
    elif basis == "operators" and len(steady.seconds):
        graph = _scaled(graph, steady)
    return graph, steady


def _joined(by_rank: Sequence[Sequence[tuple[int, RankStep]]]) -> list[Step]:
    """Steps that every rank has, with the collectives that every rank entered."""
    found = []
    for index, _ in by_rank[0]:
        mine = [next((step for at, step in steps if at == index), None) for steps in by_rank]
        if all(step is not None for step in mine):
            found.append(_matched(index, [step for step in mine if step is not None]))
    return found


def _matched(index: int, ranks: Sequence[RankStep]) -> Step:
    """Transfers last as long as on the rank that came last; what some ranks lack is no transfer of theirs alone."""
    times: dict[str, list[float]] = {}
    partners: dict[str, int] = {}
    for task in (task for each in ranks for task in each.tasks if task.lane == LINK):
        times.setdefault(task.key, []).append(task.seconds)
        partners[task.key] = 2 if task.channel else len(ranks)
    shared = {key for key, found in times.items() if len(found) == partners[key]}
    own = {key: min(times[key]) for key in shared}

    def kept(task: Task) -> Task | None:
        if task.lane != LINK:
            return task
        return replace(task, seconds=own[task.key]) if task.key in shared else None

    cleaned = []
    for each in ranks:
        tasks = [task for task in (kept(task) for task in each.tasks) if task is not None]
        known = {task.number for task in tasks}
        cleaned.append(replace(each, tasks=tuple(_without(task, known) for task in tasks)))
    return Step(index, tuple(cleaned))


def _without(task: Task, known: set[int]) -> Task:
    if all(number in known for number in task.after):
        return task
    return replace(task, after=tuple(number for number in task.after if number in known))


# --- what steps usually are ---------------------------------------------------------------------------


def _steady(tables: Sequence[Table | None], inside: Iterable[int]) -> Steady:
    """Steps that every rank recorded outside of windows."""
    apart = set(inside)
    apart |= {index + 1 for index in apart}  # the window is written after its last step
    if any(table is None or (table["phase_forward_ns"] == MISSING).all() for table in tables):
        return Steady(np.empty(0), {})
    rows: list[dict[int, int]] = []
    for table in tables:
        assert table is not None
        known = (table["end_ns"] != MISSING) & (table["phase_forward_ns"] != MISSING)
        rows.append(
            {
                int(index): row
                for row, index in enumerate(table["index"].tolist())
                if known[row] and index not in apart
            }
        )
    shared = sorted(set.intersection(*(set(each) for each in rows)))
    shared = shared[WARM_UP:] if len(shared) > WARM_UP + 2 else shared

    def column(name: str) -> Array:
        return np.array(
            [
                [tables[r][name][rows[r][index]] for index in shared]  # type: ignore[index]
                for r in range(len(tables))
            ],
            dtype=np.float64,
        )

    if not shared:
        return Steady(np.empty(0), {})
    seconds = (column("end_ns") - column("start_ns")).max(axis=0) / 1e9
    phases = {name: column(f"phase_{name}_ns").mean(axis=0) / 1e9 for name in PHASES}
    phases["data"] = phases["data"] + column("phase_copy_ns").clip(0).mean(axis=0) / 1e9
    return Steady(seconds, phases)


def _evenly_scaled(graph: Graph, steady: Steady) -> Graph:
    """Host time as long as it usually is, by whole steps: a pipeline's forward and backward take turns, and its phases hold
    what a rank waits for."""
    factor = float(np.median(steady.seconds)) / median(step.measured_s for step in graph.steps)

    def scaled(each: RankStep) -> RankStep:
        return replace(
            each, tasks=tuple(task.times(factor) if task.lane == HOST else task for task in each.tasks)
        )

    steps = tuple(replace(step, ranks=tuple(scaled(each) for each in step.ranks)) for step in graph.steps)
    return replace(graph, steps=steps).with_note(
        "host time is scaled by the median step outside windows over those inside"
    )


def _scaled(graph: Graph, steady: Steady) -> Graph:
    """Host time of each phase as long as it usually is: the profiler's own time goes, in proportion."""

    def scaled(each: RankStep) -> RankStep:
        now = each.phase_s()
        usual = {name: median(values.tolist()) for name, values in steady.phases.items()}
        factor = {name: usual[name] / now[name] if now[name] > 0 else 1.0 for name in PHASES}
        tasks = tuple(task.times(factor[task.phase]) if task.lane == HOST else task for task in each.tasks)
        return replace(each, tasks=tasks)

    steps = tuple(replace(step, ranks=tuple(scaled(each) for each in step.ranks)) for step in graph.steps)
    return replace(graph, steps=steps).with_note(
        "host time of each phase is scaled to the median of the steps outside windows"
    )
