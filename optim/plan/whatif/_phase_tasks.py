"""Steps as phases and collectives, where nothing finer was recorded."""

from __future__ import annotations

import numpy as np

from trine.optim.plan.whatif._host_tasks import key_of
from trine.optim.plan.whatif.graph import LINK, RankStep, Task, fresh
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
        Task((length["data"] + length["copy"]) / 1e9, "data"),
        Task(length["forward"] / 1e9, "forward"),
    ]
    at, calls = 0, []
    for transfer, issued in _transfers(rank, int(steps["index"][row])):
        begin = min(max(issued - backward, at), length["backward"])
        tasks.append(Task((begin - at) / 1e9, "backward"))
        tasks.append(Task(transfer.seconds, "backward", LINK, TRANSFER, transfer.name, (tasks[-1].number,),
                          transfer.number, issued=transfer.name, key=transfer.key, channel=transfer.channel,
                          bytes=transfer.bytes))  # fmt: skip
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
    counts: dict[str, int] = {}
    found = []
    for row, name in zip(rows.tolist(), table.text("operation")[rows].tolist(), strict=True):
        key, channel = key_of(str(name), rank.rank, int(table["peer"][row]), counts)
        seconds = (int(table["end_ns"][row]) - int(table["start_ns"][row])) / 1e9
        task = Task(seconds, "backward", LINK, TRANSFER, str(name), number=fresh(), key=key, channel=channel,
                    bytes=max(int(table["bytes"][row]), 0))  # fmt: skip
        found.append((task, int(issued[row])))
    return found
