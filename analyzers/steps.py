"""Step times: of one rank, and of the job, whose step takes as long as its slowest rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, PHASES, Table

from .results import StepStatistics
from .statistics import bootstrap_median, find_outliers, find_warm_up

__all__ = ["job_step_statistics", "job_steps", "phase_sums", "sampled_steps", "step_statistics"]

Array = npt.NDArray[Any]


def sampled_steps(steps: Table | None, metadata: Mapping[str, Any]) -> Table | None:
    """The steps that speak for the run: all but those that a roll-up kept because they were slow.

    ``metadata`` is the rank's; its ``rolled_up`` names the stretch. Where nothing else is left, all.
    """
    rolled_up = metadata.get("rolled_up")
    if steps is None or not isinstance(rolled_up, Mapping):
        return steps
    kept = (steps["index"] >= rolled_up["first"]) & (steps["index"] <= rolled_up["last"])
    return steps if kept.all() else steps.select(~kept)


def step_statistics(steps: Table | None) -> StepStatistics | None:
    """Statistics of a table of steps; ``None`` where it holds none with a length."""
    if steps is None:
        return None
    index, duration = _durations(steps)
    return _statistics(index, duration)


def job_step_statistics(tables: Sequence[Table | None]) -> StepStatistics | None:
    """Statistics over the slowest path, see :func:`job_steps`."""
    return _statistics(*job_steps(tables))


def job_steps(tables: Sequence[Table | None]) -> tuple[Array, Array]:
    """Step numbers, ascending, and per step the longest duration of the ranks that recorded it, in ns.

    Only steps that every rank with steps recorded count, so that a rank that stopped early does not
    make the others' later steps look faster; without such a step, all count.
    """
    ranks = [_durations(table) for table in tables if table is not None and len(table)]
    if not ranks:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    common = ranks[0][0]
    for index, _ in ranks[1:]:
        common = np.intersect1d(common, index)
    numbers = common if len(common) else np.unique(np.concatenate([index for index, _ in ranks]))
    longest = np.zeros(len(numbers), dtype=np.int64)
    for index, duration in ranks:
        place = np.searchsorted(numbers, index)
        held = (place < len(numbers)) & (numbers[np.minimum(place, len(numbers) - 1)] == index)
        np.maximum.at(longest, place[held], duration[held])
    return numbers, longest


def phase_sums(steps: Table | None) -> dict[str, int] | None:
    """Phases summed over the steps, ns; ``None`` where no step has them."""
    if steps is None:
        return None
    columns = {name: steps[f"phase_{name}_ns"] for name in PHASES}
    known = np.all([column != MISSING for column in columns.values()], axis=0)
    if not known.any():
        return None
    return {name: int(column[known].sum()) for name, column in columns.items()}


def _durations(steps: Table) -> tuple[Array, Array]:
    """Step numbers, ascending, and their lengths in ns; steps of no length are left out."""
    start, end = steps["start_ns"], steps["end_ns"]
    known = (start != MISSING) & (end != MISSING) & (end > start) & (steps["index"] != MISSING)
    index, duration = steps["index"][known], (end - start)[known]
    order = np.argsort(index, kind="stable")
    return index[order], duration[order]


def _statistics(index: Array, duration: Array) -> StepStatistics | None:
    if not len(duration):
        return None
    warm_up = find_warm_up(duration)
    steady, numbers = duration[warm_up:], index[warm_up:]
    median, low, high = bootstrap_median(steady)
    return StepStatistics(
        count=len(duration),
        median_ns=round(median),
        low_ns=round(low),
        high_ns=round(high),
        p95_ns=round(float(np.quantile(steady, 0.95))),
        warm_up=tuple(int(number) for number in index[:warm_up]),
        outliers=tuple(int(numbers[position]) for position in find_outliers(steady)),
    )
