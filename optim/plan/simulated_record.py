"""What was simulated, as a record: every analysis, report and timeline takes it as it takes a real run.

job = job_of(simulate(...))         in memory, with each rank's streams
write_record(simulation, folder)    on disk: steps, micro-batches and collectives; ``trine analyze FOLDER`` reads it
write_record(simulation, folder, described(…))      with what a plan knows of its ranks
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.optim.plan.schedules import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from trine.optim.plan.simulator import OPTIMIZER, Meeting, Simulation
from trine.record.model import DEVICE_KINDS, MISSING, PHASES, Group, Job, Rank, RankSource, Strings, Table
from trine.record.store import RankWriter

__all__ = ["Described", "job_of", "write_record"]

#: No reader's: what there is stands in the tables, and no file lies behind it.
_FORMAT = "simulated"

#: Streams of the simulated devices, as timelines number them.
_COMPUTE_STREAM, _COLLECTIVE_STREAM, _SEND_STREAM, _RECEIVE_STREAM = 7, 20, 24, 28

#: Columns of times; others in nanoseconds are durations.
_MOMENTS = ("start_ns", "end_ns", "issued_ns", "time_ns")

_BACKWARDS = (BACKWARD, INPUT, WEIGHT)


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of a simulated job beside its times (a plan knows it: :mod:`trine.optim.plan.described`).

    ``numbers``, ``hosts`` and ``facts`` (metadata): of each simulated rank, whose number in a job of ``world_size`` it is.
    ``groups``: by the names that meetings have. ``run``: for ``run.json``. ``samples``: place → metric → value. ``tokens``: of a
    step and rank. ``note``: how the analysis differs from who knows this.
    """

    numbers: tuple[int, ...]
    hosts: tuple[str | None, ...]
    world_size: int
    groups: tuple[Group, ...]
    run: Mapping[str, Any]
    facts: tuple[Mapping[str, Any], ...]
    samples: Mapping[int, Mapping[str, float]]
    tokens: int = MISSING
    note: str | None = None

    @classmethod
    def nothing(cls, simulation: Simulation) -> Described:
        """Of a simulation that stands for itself."""
        ranks = range(simulation.ranks)
        nothing: tuple[Mapping[str, Any], ...] = ({},) * len(ranks)
        return cls(tuple(ranks), (None,) * len(ranks), len(ranks), _groups(simulation), {}, nothing, {})


def job_of(simulation: Simulation, about: Described | None = None) -> Job:
    """The simulation as a job: tables ``steps``, ``microbatches``, ``collectives`` and ``device`` of every rank."""
    about = about or Described.nothing(simulation)
    ranks = _ranks(simulation, about)
    sources = tuple(RankSource(rank.rank, Path("simulated"), _Held(rank)) for rank in ranks)
    metadata = {"simulated": True, **about.run}
    return Job(Path("simulated"), _FORMAT, sources, about.world_size, metadata=metadata)


def write_record(simulation: Simulation, folder: Path, about: Described | None = None) -> None:
    """A record of the simulation in an empty or new ``folder``, as of a run that begins now. Raises ``OSError`` where it cannot be
    written."""
    about = about or Described.nothing(simulation)
    begin_ns = time.time_ns()
    for place, rank in enumerate(_ranks(simulation, about)):
        writer = RankWriter(folder, rank.rank, about.world_size)
        names = ("steps", "microbatches", "collectives", "samples")
        tables = {
            name: _plain(table, begin_ns) for name in names if (table := getattr(rank, name)) is not None
        }
        parts = tables.pop("steps")
        parts["complete"] = np.ones(len(parts["index"]), dtype=np.int64)
        writer.append({"parts": parts, **tables})
        if place == 0:
            writer.describe_run({"world_size": about.world_size, "simulated": True, **about.run})
        writer.close(_description(rank))


def _description(rank: Rank) -> dict[str, Any]:
    """``rank.json``: that of a process which is none."""
    groups = [
        {"id": group.id, "name": group.name, "description": group.description, "ranks": list(group.ranks)}
        for group in rank.groups
    ]
    notes = [{"id": note.id, "severity": note.severity, "message": note.message} for note in rank.quality]
    host = {} if rank.host_name is None else {"host": rank.host_name}
    return {**host, "groups": groups, "metadata": rank.metadata, "notes": notes, "state": "finished"}


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


def _ranks(simulation: Simulation, about: Described) -> list[Rank]:
    meetings: dict[int, list[Meeting]] = {rank: [] for rank in range(simulation.ranks)}
    for met in sorted(simulation.meetings, key=lambda met: (met.entered_s, met.end_s)):
        peer = about.numbers[met.peer] if met.peer >= 0 else met.peer
        meetings[met.rank].append(replace(met, peer=peer))
    return [_rank(simulation, place, met, about) for place, met in meetings.items()]


def _rank(simulation: Simulation, place: int, meetings: Sequence[Meeting], about: Described) -> Rank:
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
        about.numbers[place],
        "simulated",
        _FORMAT,
        strings,
        world_size=about.world_size,
        host_name=about.hosts[place],
        metadata={"simulated": True, **about.facts[place]},
    )
    rank.microbatches = _microbatches(rows, strings)
    rank.device = _device(rows, strings)
    rank.collectives = _collectives(rows, strings)
    rank.steps = _steps(simulation, rows, about.tokens)
    rank.samples = _samples(about.samples.get(place), rank.steps, strings)
    used = {met.group for met in meetings}
    rank.groups = tuple(group for group in about.groups if group.id in used)
    if place == 0 and about.note is not None:
        rank.note("planned", "info", about.note)
    return rank


def _samples(readings: Mapping[str, float] | None, steps: Table, strings: Strings) -> Table | None:
    """The same at the end of each step."""
    if not readings:
        return None
    times = np.repeat(steps["end_ns"], len(readings))
    metrics = [strings.code(name) for name in readings] * len(steps)
    values = np.tile(np.array(list(readings.values())), len(steps))
    return Table("samples", {"time_ns": times, "metric": metrics, "value": values}, strings)


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


def _steps(simulation: Simulation, rows: _Rows, tokens: int) -> Table:
    """A step lasts from the end of the one before to its own last action and what rests behind it; phases add up to it."""
    columns: dict[str, list[int]] = {name: [] for name in ("index", "start_ns", "end_ns")}
    phases: dict[str, list[int]] = {name: [] for name in PHASES}
    start = 0
    for step in range(simulation.steps):
        chosen = rows.work["step"] == step
        met = [each for each in rows.meetings if each.step == step]
        end = int(max(rows.work["end_s"][chosen].max(), *_ns([each.end_s for each in met] or [0.0])))
        end += int(_ns(simulation.rest_s))
        for name, value in zip(columns, (step, start, end), strict=True):
            columns[name].append(value)
        found = _phases(rows, chosen, met, start, end)
        for name in PHASES:
            phases[name].append(found.get(name, 0))
        start = end
    named = {f"phase_{name}_ns": column for name, column in phases.items()}
    known = {**columns, **named, "tokens": [tokens] * simulation.steps}
    return Table("steps", known, Strings())


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
