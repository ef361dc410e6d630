"""What was simulated, as a record: every analysis, report and timeline takes it as it takes a real run.

job = job_of(simulate(...))         in memory, with each rank's streams
write_record(simulation, folder)    on disk: steps, micro-batches and collectives; ``trine analyze FOLDER`` reads it
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.optim.plan.schedules import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from trine.optim.plan.simulator import OPTIMIZER, Meeting, Simulation
from trine.record.model import DEVICE_KINDS, PHASES, Group, Job, Rank, RankSource, Strings, Table
from trine.record.store import RankWriter

__all__ = ["job_of", "write_record"]

#: No reader's: what there is stands in the tables, and no file lies behind it.
_FORMAT = "simulated"

#: Streams of the simulated devices, as timelines number them.
_COMPUTE_STREAM, _COLLECTIVE_STREAM, _SEND_STREAM, _RECEIVE_STREAM = 7, 20, 24, 28

#: Columns of times; others in nanoseconds are durations.
_MOMENTS = ("start_ns", "end_ns", "issued_ns")

_BACKWARDS = (BACKWARD, INPUT, WEIGHT)


def job_of(simulation: Simulation) -> Job:
    """The simulation as a job: tables ``steps``, ``microbatches``, ``collectives`` and ``device`` of every rank."""
    ranks = _ranks(simulation)
    sources = tuple(RankSource(rank.rank, Path("simulated"), _Held(rank)) for rank in ranks)
    return Job(Path("simulated"), _FORMAT, sources, simulation.ranks, metadata={"simulated": True})


def write_record(simulation: Simulation, folder: Path) -> None:
    """A record of the simulation in an empty or new ``folder``, as of a run that begins now. Raises ``OSError`` where it cannot be
    written."""
    begin_ns = time.time_ns()
    for place, rank in enumerate(_ranks(simulation)):
        writer = RankWriter(folder, place, simulation.ranks)
        groups = [{"id": group.id, "name": group.name, "ranks": list(group.ranks)} for group in rank.groups]
        tables = {
            name: _plain(getattr(rank, name), begin_ns) for name in ("steps", "microbatches", "collectives")
        }
        parts = tables.pop("steps")
        parts["complete"] = np.ones(len(parts["index"]), dtype=np.int64)
        writer.append({"parts": parts, **tables})
        if place == 0:
            writer.describe_run({"world_size": simulation.ranks, "simulated": True})
        writer.close({"groups": groups, "metadata": rank.metadata, "state": "finished"})


def _plain(table: Table, begin_ns: int) -> dict[str, Any]:
    """Columns with texts in place of their codes, by a clock that began then; references to rows of tables that are not written
    are left out."""
    found: dict[str, Any] = {}
    for name, column in table.columns.items():
        if name in _MOMENTS:
            found[name] = column + begin_ns
        elif name not in ("device_row", "host_row"):
            found[name] = list(table.text(name)) if column.dtype == np.int32 else column
    return found


@dataclass(frozen=True, slots=True)
class _Held:
    """A reader that holds what it reads."""

    rank: Rank

    def __call__(self, source: RankSource) -> Rank:
        return self.rank


@dataclass(frozen=True, slots=True)
class _Rows:
    """What one rank did, in the order of time: rows of ``Simulation.work``, its meetings, and whole nanoseconds.

    ``computed_s`` of a row: when its computing ends, and the collectives begin that it holds; where nobody says, there are none.
    """

    work: dict[str, npt.NDArray[Any]]
    meetings: Sequence[Meeting]


def _ns(seconds: Any) -> npt.NDArray[np.int64]:
    return np.rint(np.asarray(seconds, dtype=np.float64) * 1e9).astype(np.int64)


def _ranks(simulation: Simulation) -> list[Rank]:
    meetings: dict[int, list[Meeting]] = {rank: [] for rank in range(simulation.ranks)}
    for met in sorted(simulation.meetings, key=lambda met: (met.entered_s, met.end_s)):
        meetings[met.rank].append(met)
    groups = _groups(simulation)
    return [_rank(simulation, place, met, groups) for place, met in meetings.items()]


def _rank(simulation: Simulation, place: int, meetings: Sequence[Meeting], groups: tuple[Group, ...]) -> Rank:
    chosen = simulation.work["rank"] == place
    work = {name: column[chosen] for name, column in simulation.work.items()}
    rows = _Rows(
        {
            name: _ns(column) if name.endswith("_s") else column.astype(np.int64)
            for name, column in ({"computed_s": work["end_s"]} | work).items()
        },
        meetings,
    )
    strings = Strings()
    rank = Rank(
        place, "simulated", _FORMAT, strings, world_size=simulation.ranks, metadata={"simulated": True}
    )
    rank.microbatches = _microbatches(rows, strings)
    rank.device = _device(rows, strings)
    rank.collectives = _collectives(rows, strings)
    rank.steps = _steps(simulation, rows)
    rank.groups = groups
    return rank


def _microbatches(rows: _Rows, strings: Strings) -> Table:
    chosen = rows.work["kind"] != OPTIMIZER
    work = {name: column[chosen] for name, column in rows.work.items()}
    codes = np.array([strings.code(name) for name in KINDS])
    return Table(
        "microbatches",
        {
            "stage": work["stage"],
            "index": work["microbatch"],
            "direction": codes[work["kind"]],
            "start_ns": work["start_s"],
            "end_ns": work["end_s"],
            "step": work["step"],
        },
        strings,
    )


def _device(rows: _Rows, strings: Strings) -> Table:
    """Computing, then collectives and messages in the order of ``_Rows.meetings``."""
    codes = np.array([strings.code(name) for name in (*KINDS, "optimizer")])
    met, streams = rows.meetings, {"send": _SEND_STREAM, "recv": _RECEIVE_STREAM}
    computing = len(rows.work["kind"])
    kinds = [DEVICE_KINDS.index("compute")] * computing + [DEVICE_KINDS.index("communication")] * len(met)
    names = [strings.code(each.operation) for each in met]
    stream = [_COMPUTE_STREAM] * computing
    stream += [streams.get(each.operation, _COLLECTIVE_STREAM) for each in met]
    return Table(
        "device",
        {
            "start_ns": np.concatenate([rows.work["start_s"], _ns([each.entered_s for each in met])]),
            "end_ns": np.concatenate([rows.work["computed_s"], _ns([each.end_s for each in met])]),
            "kind": kinds,
            "device": np.zeros(len(kinds), dtype=np.int64),
            "stream": stream,
            "name": np.concatenate([codes[rows.work["kind"]], np.array(names, dtype=np.int64)]),
            "step": np.concatenate(
                [rows.work["step"], np.array([each.step for each in met], dtype=np.int64)]
            ),
        },
        strings,
    )


def _collectives(rows: _Rows, strings: Strings) -> Table:
    met, counts = rows.meetings, dict[tuple[str, str, int], int]()
    sequences = []
    for each in met:
        line = (each.group, each.operation, each.peer) if each.peer >= 0 else (each.group, "", -1)
        sequences.append(counts.setdefault(line, 0))
        counts[line] += 1
    entered, end = _ns([each.entered_s for each in met]), _ns([each.end_s for each in met])
    return Table(
        "collectives",
        {
            "operation": [strings.code(each.operation) for each in met],
            "group": [strings.code(each.group) for each in met],
            "sequence": np.array(sequences, dtype=np.int64),
            "peer": np.array([each.peer for each in met], dtype=np.int64),
            "bytes": np.array([each.bytes for each in met], dtype=np.int64),
            "issued_ns": entered,
            "start_ns": entered,
            "end_ns": end,
            "device_row": len(rows.work["kind"]) + np.arange(len(met)),
            "step": np.array([each.step for each in met], dtype=np.int64),
        },
        strings,
    )


def _steps(simulation: Simulation, rows: _Rows) -> Table:
    """A step lasts from the end of the one before to its own last action; phases add up to it."""
    columns: dict[str, list[int]] = {name: [] for name in ("index", "start_ns", "end_ns")}
    phases: dict[str, list[int]] = {name: [] for name in PHASES}
    start = 0
    for step in range(simulation.steps):
        chosen = rows.work["step"] == step
        met = [each for each in rows.meetings if each.step == step]
        end = int(max(rows.work["end_s"][chosen].max(), *_ns([each.end_s for each in met] or [0.0])))
        for name, value in zip(columns, (step, start, end), strict=True):
            columns[name].append(value)
        found = _phases(rows, chosen, met, start, end)
        for name in PHASES:
            phases[name].append(found.get(name, 0))
        start = end
    named = {f"phase_{name}_ns": column for name, column in phases.items()}
    return Table("steps", {**columns, **named}, Strings())


def _phases(
    rows: _Rows, chosen: npt.NDArray[np.bool_], met: Sequence[Meeting], start: int, end: int
) -> dict[str, int]:
    lasted = (rows.work["computed_s"] - rows.work["start_s"])[chosen]
    kinds = rows.work["kind"][chosen]
    found = {
        "forward": int(lasted[kinds == FORWARD].sum()),
        "backward": int(lasted[np.isin(kinds, _BACKWARDS)].sum()),
        "optimizer": int(lasted[kinds == OPTIMIZER].sum()),
    }
    busy = np.stack([rows.work["start_s"][chosen], rows.work["computed_s"][chosen]], axis=1)
    waits = np.stack([_ns([each.entered_s for each in met]), _ns([each.end_s for each in met])], axis=1)
    found["exposed_communication"] = _length(np.concatenate([busy, waits]), start, end) - _length(
        busy, start, end
    )
    found["other"] = end - start - sum(found.values())
    return found


def _length(spans: npt.NDArray[np.int64], start: int, end: int) -> int:
    """Of the union of spans within the step."""
    total, reached = 0, start
    for begin, until in sorted(np.clip(spans, start, end).tolist()):
        total += max(until - max(begin, reached), 0)
        reached = max(reached, until)
    return total


def _groups(simulation: Simulation) -> tuple[Group, ...]:
    members: dict[str, set[int]] = {}
    for met in simulation.meetings:
        members.setdefault(met.group, set()).add(met.rank)
    return tuple(Group(name, name, None, tuple(sorted(ranks))) for name, ranks in sorted(members.items()))
