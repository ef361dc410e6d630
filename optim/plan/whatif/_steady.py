"""What steps usually are: those outside windows, and host time that is scaled to them, since a profiler slows the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from trine.optim.plan.whatif.graph import HOST, PHASES, Graph, RankStep, Step, is_pipeline
from trine.record.model import MISSING, Table

__all__ = ["WARM_UP", "Array", "Steady", "as_usual", "steady_of"]

#: Steps that warm up, at a record's start.
WARM_UP = 3

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Steady:
    """Steps outside windows and after the warm-up: seconds of each, the slowest rank's, and by phase each rank's own.

    ``seconds`` of shape (steps,), ``phases`` maps a phase to (ranks, steps); empty where the source has no such steps.
    """

    seconds: Array
    phases: Mapping[str, Array]


def steady_of(tables: Sequence[Table | None], profiled: Collection[int]) -> Steady:
    """Steps that every rank recorded outside of windows, which hold the ``profiled`` ones; a rank a row of ``phases``."""
    # The window is written after its last step.
    apart = {*profiled, *(index + 1 for index in profiled)}
    found = [table for table in tables if table is not None and (table["phase_forward_ns"] != MISSING).any()]
    if len(found) < len(tables):
        return Steady(np.empty(0), {})
    rows = [_rows(table, apart) for table in found]
    shared = sorted(set.intersection(*(set(each) for each in rows)))
    shared = shared[WARM_UP:] if len(shared) > WARM_UP + 2 else shared
    if not shared:
        return Steady(np.empty(0), {})

    def column(name: str) -> Array:
        return np.array(
            [[table[name][mine[index]] for index in shared] for table, mine in zip(found, rows, strict=True)],
            dtype=np.float64,
        )

    seconds = (column("end_ns") - column("start_ns")).max(axis=0) / 1e9
    phases = {name: column(f"phase_{name}_ns") / 1e9 for name in PHASES}
    # As in the graph, where the loader's time alone is of ``data``.
    phases["forward"] = phases["forward"] + column("phase_copy_ns").clip(0) / 1e9
    return Steady(seconds, phases)


def _rows(table: Table, apart: Collection[int]) -> dict[int, int]:
    """Rows of whole steps with phases, by the steps' numbers."""
    known = (table["end_ns"] != MISSING) & (table["phase_forward_ns"] != MISSING)
    numbers = table["index"].tolist()
    return {int(index): row for row, index in enumerate(numbers) if known[row] and index not in apart}


def as_usual(graph: Graph, steady: Steady) -> Graph:
    """Host time as long as outside windows, where hosts compute; ``steady`` has a row of phases for each of its ranks."""
    if not len(steady.seconds):
        return graph
    if graph.basis == "kernels":
        return graph.with_note("host time is as in the recorded windows, whose profiler slows it")
    if graph.basis != "operators":
        return graph
    return _evenly_scaled(graph, steady) if is_pipeline(graph) else _scaled(graph, steady)


def _evenly_scaled(graph: Graph, steady: Steady) -> Graph:
    """By whole steps: a pipeline's forward and backward take turns, and its phases hold what a rank waits for."""
    factor = float(np.median(steady.seconds)) / median(step.measured_s for step in graph.steps)
    return _by_phase(graph, lambda place, each: dict.fromkeys(PHASES, factor)).with_note(
        "host time is scaled by the median step outside windows over those inside"
    )


def _scaled(graph: Graph, steady: Steady) -> Graph:
    """Each phase of each rank: the profiler's own time goes, in proportion, and a rank that is slower stays so."""
    usual = {name: np.median(values, axis=1).tolist() for name, values in steady.phases.items()}

    def factors(place: int, each: RankStep) -> dict[str, float]:
        now = each.phase_s()
        return {name: usual[name][place] / now[name] if now[name] > 0 else 1.0 for name in PHASES}

    return _by_phase(graph, factors).with_note(
        "host time of each phase is scaled to the rank's median of the steps outside windows"
    )


def _by_phase(graph: Graph, factors: Callable[[int, RankStep], Mapping[str, float]]) -> Graph:
    """Host time by factors of a rank's phases, of which each rank's place is asked for."""

    def scaled(place: int, each: RankStep) -> RankStep:
        by = factors(place, each)
        tasks = tuple(task.times(by[task.phase]) if task.lane == HOST else task for task in each.tasks)
        return replace(each, tasks=tasks)

    def of_step(step: Step) -> Step:
        return replace(step, ranks=tuple(scaled(place, each) for place, each in enumerate(step.ranks)))

    return replace(graph, steps=tuple(of_step(step) for step in graph.steps))
