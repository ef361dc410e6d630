"""Steps as phases and collectives, where nothing finer was recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trine.optim.plan.whatif._names import Names
from trine.optim.plan.whatif.graph import LINK, RankStep, Task
from trine.optim.plan.whatif.operators import TRANSFER, WAIT
from trine.record.model import MISSING, Rank, Table

__all__ = ["steps_of_phases"]

#: Steps that are looked at.
MOST_STEPS = 40


def steps_of_phases(rank: Rank, warm_up: int) -> list[tuple[int, RankStep]]:
    """(index, step) of a record's steps whose phases are known, without the first ``warm_up``."""
    steps = rank.steps
    if steps is None:
        return []
    known = np.flatnonzero((steps["phase_forward_ns"] != MISSING) & (steps["end_ns"] != MISSING))
    known = known[warm_up:] if len(known) > warm_up + 2 else known
    return [(int(steps["index"][row]), _step(rank, steps, int(row))) for row in known[:MOST_STEPS].tolist()]


def _step(rank: Rank, steps: Table, row: int) -> RankStep:
    length = {
        name: max(int(steps[f"phase_{name}_ns"][row]), 0)
        for name in ("data", "copy", "forward", "backward", "optimizer", "other")
    }
    start, end = int(steps["start_ns"][row]), int(steps["end_ns"][row])
    backward = start + length["data"] + length["copy"] + length["forward"]
    tasks = [
        Task(length["data"] / 1e9, "data"),
        Task((length["copy"] + length["forward"]) / 1e9, "forward"),
    ]
    at, calls = 0, []
    for transfer, issued in _transfers(rank, int(steps["index"][row])):
        begin = min(max(issued - backward, at), length["backward"])
        tasks.append(Task((begin - at) / 1e9, "backward"))
        phase = "forward" if issued < backward else "backward"
        tasks.append(replace(transfer, phase=phase, after=(tasks[-1].number,)))
        at = begin
        calls.append(transfer.number)
    tasks.append(Task((length["backward"] - at) / 1e9, "backward"))
    tasks.append(Task(0.0, "backward", operator=WAIT, after=tuple(calls)))
    tasks.append(Task(length["optimizer"] / 1e9, "optimizer"))
    tasks.append(Task(length["other"] / 1e9, "other"))
    return RankStep(rank.rank, tuple(tasks), (end - start) / 1e9)


def _transfers(rank: Rank, step: int) -> list[tuple[Task, int]]:
    """A step's collectives as transfers, and when each was issued."""
    table = rank.collectives
    if table is None:
        return []
    rows = np.flatnonzero(
        (table["step"] == step) & (table["start_ns"] != MISSING) & (table["end_ns"] != MISSING)
    )
    issued = np.where(table["issued_ns"] == MISSING, table["start_ns"], table["issued_ns"])
    rows = rows[np.argsort(issued[rows], kind="stable")]
    operations, groups = (table.text(name)[rows].tolist() for name in ("operation", "group"))
    names = Names(rank)
    found = []
    for row, operation, group in zip(rows.tolist(), operations, groups, strict=True):
        size = max(int(table["bytes"][row]), 0)
        name = names.next(str(operation), group, int(table["peer"][row]), size)
        seconds = (int(table["end_ns"][row]) - int(table["start_ns"][row])) / 1e9
        task = Task(seconds, "backward", LINK, TRANSFER, str(operation), issued=str(operation), key=name.key,
                    group=name.group, channel=name.channel, bytes=size)  # fmt: skip
        found.append((task, int(issued[row])))
    return found
