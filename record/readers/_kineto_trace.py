"""One trace file: its events as columns, its processes, and the rank that each of them is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import UnreadableInput
from ..model import MISSING, DeviceInfo, Rank, Strings
from ._kineto_collectives import collectives_table
from ._kineto_columns import PROCESS, SECTION, Columns
from ._kineto_processes import Part, parts_of
from ._kineto_quality import say_what_was_odd
from ._kineto_stream import Findings, TraceStream, blocks
from ._kineto_tables import (
    device_table,
    host_table,
    joined,
    launches,
    mark_blocking_copies,
    memory_table,
    step_of,
    steps_table,
    synchronizations_table,
)
from ._kineto_terms import groups_of
from ._names import MOST_RANKS

__all__ = ["Trace", "parse", "rank_of"]

FORMAT = "kineto"

#: Elements without a phase, and ten times as many as events, after which a file is given up.
_MOST_ELEMENTS = 500_000

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Trace:
    """A file that was read. Building the rank of its only part empties ``tables``."""

    where: str
    columns: Columns
    findings: Findings
    facts: Any
    distributed: dict[str, Any]
    tables: dict[str, dict[str, Any] | None]
    parts: list[Part]
    bare_list: bool

    def devices(self, part: Part) -> set[int]:
        """The devices that a process' work ran on."""
        device, rows = self.tables["device"], part.rows.get("device")
        return set() if device is None or rows is None else set(np.unique(device["device"][rows]).tolist())


def parse(file: IO[bytes], where: str) -> Trace:
    """Read a file's events. Raises ``UnreadableInput`` where there are none."""
    findings = Findings()
    columns = Columns(Strings())
    stream = TraceStream(blocks(file, findings), findings, where)
    for chunk in stream:
        if not columns.add(chunk):
            stream.exact = True
        if columns.elements - columns.events > max(_MOST_ELEMENTS, 10 * columns.events):
            stream.give_up(f"more than {_MOST_ELEMENTS:,} elements that are no events")
    _refuse_strangers(columns, findings, where)
    facts = stream.facts
    distributed = facts.distributedInfo if isinstance(facts.distributedInfo, dict) else {}
    tables = {
        name: joined(parts)
        for name, parts in (
            ("host", columns.host),
            ("device", columns.device),
            ("memory", columns.memory),
            ("syncs", columns.syncs),
        )
    }
    several = columns.closed > 1 or max(columns.named.values(), default=0) > 1
    parts = parts_of(tables, several, columns.processes.names, columns.threads.process)
    return Trace(where, columns, findings, facts, distributed, tables, parts, stream.is_list)


def rank_of(trace: Trace, number: int, rank: int | None) -> Rank:
    """The rank that a part of a trace is; ``rank`` is what to call it, by default what the file says, else 0."""
    facts, distributed = trace.facts, trace.distributed
    said = _integer(distributed.get("rank"))
    world = _integer(distributed.get("world_size"))
    result = Rank(
        rank=rank if rank is not None else (said if said is not None else 0),
        source=trace.where,
        format=FORMAT,
        strings=trace.columns.strings,
        world_size=world if world is None or world <= MOST_RANKS else None,
        host_name=str(facts.host_name) if facts.host_name else None,
        devices=tuple(_devices(facts.deviceProperties)),
        metadata=_metadata(facts, distributed),
    )
    if world is not None and world > MOST_RANKS:
        text = f"the file states a world of more than {MOST_RANKS:,} ranks; the world size counts as unknown"
        result.note("world-size-implausible", "warning", text)
    base = _integer(facts.baseTimeNanoseconds)
    shapes = _shapes(trace, trace.parts[number])
    tables, marked = _own(trace, trace.parts[number])
    _fill(result, tables, marked, base if base is not None and abs(base) < 2**62 else 0, distributed)
    _complete_launch_shapes(result, *shapes)
    single = len(trace.parts) == 1
    say_what_was_odd(result, trace.columns, trace.findings, said if single else None, trace.bare_list)
    _say_what_is_shared(result, trace.parts[number])
    return result


def _say_what_is_shared(result: Rank, part: Part) -> None:
    if part.strays:
        some = ", ".join(part.strays[:5])
        result.note(
            "several-process-ids",
            "info",
            f"some host spans stand under other process ids ({some}) than its operators and calls; they count as its own",
        )
    if part.unclear:
        result.note(
            "unclear-owner",
            "warning",
            f"{part.unclear:,} device events of the file may be this process' or another's and are left out of both",
        )


def _own(trace: Trace, part: Part) -> tuple[dict[str, dict[str, Any] | None], list[Any]]:
    """A part's columns without their origins, and its collectives; of the only part all there is."""
    if len(trace.parts) == 1:
        own = dict(trace.tables)
        trace.tables.clear()
        marked = trace.columns.collectives
    else:
        own = {}
        for name, columns in trace.tables.items():
            rows = part.rows.get(name)
            own[name] = None
            if columns is not None and rows is not None and len(rows):
                own[name] = {key: column[rows] for key, column in columns.items()}
        marked = []
        for side, row, arguments in trace.columns.collectives:
            rows = part.rows[side]
            position = int(np.searchsorted(rows, row))
            if position < len(rows) and rows[position] == row:
                marked.append((side, position, arguments))
    for columns in own.values():
        for origin in (PROCESS, SECTION):
            if columns is not None:
                columns.pop(origin, None)
    return own, marked


def _refuse_strangers(columns: Columns, findings: Findings, where: str) -> None:
    if columns.events:
        return
    if findings.damaged:
        raise UnreadableInput(
            f"{where} is damaged ({findings.damaged}) before its first complete event; copy it again from where it was "
            "written"
        )
    if findings.truncated:
        raise UnreadableInput(
            f"{where} was cut off before its first complete event; copy it again from where it was written"
        )
    if findings.dropped:
        raise UnreadableInput(
            f"{where} has {findings.dropped} elements in traceEvents and none is an event; export the trace again"
        )
    raise UnreadableInput(
        f"{where} holds no events; profile at least one step (torch.profiler.profile around it) and export again"
    )


def _integer(value: Any) -> int | None:
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _devices(properties: Any) -> Iterator[DeviceInfo]:
    for position, entry in enumerate(properties if isinstance(properties, list) else ()):
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            index = _integer(entry.get("id"))
            yield DeviceInfo(
                position if index is None else index,
                entry["name"],
                _integer(entry.get("totalGlobalMem")),
                _integer(entry.get("numSms")),
            )


def _metadata(facts: Any, distributed: dict[str, Any]) -> dict[str, Any]:
    versions = {
        "cuda_runtime": facts.cuda_runtime_version,
        "cuda_driver": facts.cuda_driver_version,
        "hip_runtime": facts.hip_runtime_version,
        "nccl": distributed.get("nccl_version"),
    }
    found = {
        "backend": distributed.get("backend"),
        "trace_id": facts.trace_id,
        "trace_name": facts.traceName,
        "base_time_ns": _integer(facts.baseTimeNanoseconds),
        "versions": {name: value for name, value in versions.items() if value} or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _fill(
    result: Rank,
    tables: dict[str, dict[str, Any] | None],
    marked: list[Any],
    base_ns: int,
    distributed: dict[str, Any],
) -> None:
    """The tables of a rank from its columns, which are used up."""
    strings = result.strings
    if (columns := tables.pop("host", None)) is not None:
        result.host = host_table(columns, base_ns, strings)
        result.steps, repeated = steps_table(result.host)
        if repeated:
            result.note(
                "repeated-steps",
                "warning",
                f"{repeated} step marks repeat a step's number; the first of each counts",
            )
        if result.steps is not None:
            result.host.columns["step"] = step_of(result.host["start_ns"], result.steps)
    if (columns := tables.pop("device", None)) is not None:
        result.device = device_table(columns, base_ns, strings)
        if result.host is not None:
            _join_launches(result)
    if (columns := tables.pop("memory", None)) is not None:
        result.memory = memory_table(columns, base_ns, strings)
    if (columns := tables.pop("syncs", None)) is not None:
        result.synchronizations = synchronizations_table(columns, base_ns, strings)
    configured = groups_of(distributed, ())
    world = configured[0].ranks if len(configured) == 1 else ()
    ranks = (0, 1) if result.world_size == 2 else world
    other = sum(ranks) - result.rank if len(ranks) == 2 and result.rank in ranks else MISSING
    result.collectives, seen = collectives_table(marked, result.device, result.host, strings, world, other)
    result.groups = groups_of(distributed, seen)


def _shapes(trace: Trace, part: Part) -> tuple[Array | None, Array | None]:
    """Of a part's host rows the launch shapes, and of its device rows the occupancy, that stand elsewhere than is usual."""
    none = np.empty(0, np.int64)
    calls = trace.columns.call_shapes.of(part.rows.get("host", none))
    resident = trace.columns.residents.of(part.rows.get("device", none))
    properties = trace.facts.deviceProperties
    most = {
        _integer(entry.get("maxThreadsPerMultiprocessor"))
        for entry in (properties if isinstance(properties, list) else ())
        if isinstance(entry, dict)
    }
    limit = most.pop() if len(most) == 1 else None
    if resident is None or not limit or limit < 0:
        return calls, None
    return calls, np.where(resident[:, 0] == MISSING, np.nan, np.minimum(resident[:, 0] / limit, 1.0))


def _complete_launch_shapes(result: Rank, calls: Array | None, occupancy: Array | None) -> None:
    """ROCm writes grid and block at the call; the newest Kineto what would fit beside what was achieved."""
    device = result.device
    if device is None:
        return
    if occupancy is not None:
        own = device["occupancy"]
        device.columns["occupancy"] = np.where(np.isnan(own), occupancy, own)
    if calls is not None:
        launch = device["launch"]
        for position, name in enumerate(("grid_blocks", "block_threads")):
            missing = (device[name] == MISSING) & (launch >= 0)
            device[name][missing] = calls[launch[missing], position]


def _join_launches(result: Rank) -> None:
    device, host = result.device, result.host
    assert device is not None and host is not None
    joined_calls = launches(device, host)
    device.columns["launch"] = launch = joined_calls.rows
    if joined_calls.unclear:
        result.note(
            "colliding-correlations",
            "warning",
            f"{joined_calls.shared:,} correlations belong to more than one call, as where processes that share an id were "
            f"merged into one file; {joined_calls.unclear:,} device events that either could have launched have no launch",
        )
    mark_blocking_copies(device, host)
    if result.steps is not None:
        begun = host["start_ns"][np.maximum(launch, 0)]
        device.columns["step"] = np.where(launch >= 0, step_of(begun, result.steps), MISSING)
