"""Kineto traces: what ``torch.profiler`` exports, torch 1.8 to today, CUDA, ROCm, XPU and CPU.

    job = open_job(Path("traces"))      a file, a folder of ranks, an archive
    rank = read_file(Path("rank0.json.gz"))

Facts about the format that the reader leans on are in ``docs/reading.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import UnreadableInput
from ..model import DEVICE_KINDS, MISSING, DeviceInfo, Job, Rank, RankSource, Strings
from ._kineto_collectives import collectives_table
from ._kineto_columns import Columns
from ._kineto_files import is_candidate, open_source
from ._kineto_quality import say_what_was_odd
from ._kineto_runs import job_of_paths
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

__all__ = ["FORMAT", "open_job", "open_paths", "read_file", "read_source", "recognizes"]

FORMAT = "kineto"

_COMMUNICATION = DEVICE_KINDS.index("communication")


def recognizes(path: Path) -> bool:
    """Whether the path may hold Kineto traces: a trace file by name or content, an archive, a folder of such."""
    return is_candidate(path)


def open_job(path: Path) -> Job:
    """The job of a file, a folder or an archive. Raises ``UnreadableInput`` when it holds no trace."""
    return open_paths([path], path)


def open_paths(paths: Sequence[Path], origin: Path) -> Job:
    """The job that several paths together make; ``origin`` is what the user named."""
    return job_of_paths(paths, origin, read_source)


def read_source(source: RankSource) -> Rank:
    """Read the rank of a source, of an archive's member as well."""
    where = f"{source.path}:{source.member}" if source.member else str(source.path)
    with open_source(source.path, source.member) as file:
        return _read(file, where, source.rank)


def read_file(path: Path, rank: int | None = None) -> Rank:
    """Read one trace file, ``.json`` or gzip of it.

    ``rank`` is what to call it; by default what the file says, else 0. Raises ``UnreadableInput``
    where nothing can be shown; all lesser faults become notes in ``Rank.quality``.
    """
    with open_source(path, None) as file:
        return _read(file, str(path), rank)


def _read(file: IO[bytes], where: str, rank: int | None) -> Rank:
    findings = Findings()
    strings = Strings()
    columns = Columns(strings)
    stream = TraceStream(blocks(file, findings), findings, where)
    for chunk in stream:
        if not columns.add(chunk):
            stream.exact = True
    _refuse_strangers(columns, findings, where)
    facts = stream.facts
    distributed = facts.distributedInfo if isinstance(facts.distributedInfo, dict) else {}
    said = _integer(distributed.get("rank"))
    result = Rank(
        rank=rank if rank is not None else (said if said is not None else 0),
        source=where,
        format=FORMAT,
        strings=strings,
        world_size=_integer(distributed.get("world_size")),
        host_name=str(facts.host_name) if facts.host_name else None,
        devices=tuple(_devices(facts.deviceProperties)),
        metadata=_metadata(facts, distributed),
    )
    base = _integer(facts.baseTimeNanoseconds)
    _fill(result, columns, base if base is not None and abs(base) < 2**62 else 0, distributed)
    say_what_was_odd(result, columns, findings, said)
    return result


def _refuse_strangers(columns: Columns, findings: Findings, where: str) -> None:
    if columns.events:
        return
    if findings.truncated or findings.damaged:
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
                position if index is None else index, entry["name"], _integer(entry.get("totalGlobalMem"))
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


def _fill(result: Rank, columns: Columns, base_ns: int, distributed: dict[str, Any]) -> None:
    """The tables of a rank from its columns, which are emptied."""
    strings = result.strings
    host_columns = joined(columns.host)
    if host_columns is not None:
        result.host = host_table(host_columns, base_ns, strings)
        result.steps, repeated = steps_table(result.host)
        if repeated:
            result.note(
                "repeated-steps",
                "warning",
                f"{repeated} step marks repeat a step's number; the first of each counts",
            )
        if result.steps is not None:
            result.host.columns["step"] = step_of(result.host["start_ns"], result.steps)
    device_columns = joined(columns.device)
    if device_columns is not None:
        result.device = device_table(device_columns, base_ns, strings)
        if result.host is not None:
            _join_launches(result)
    memory_columns = joined(columns.memory)
    if memory_columns is not None:
        result.memory = memory_table(memory_columns, base_ns, strings)
    sync_columns = joined(columns.syncs)
    if sync_columns is not None:
        result.synchronizations = synchronizations_table(sync_columns, base_ns, strings)
    result.collectives, seen = collectives_table(columns.collectives, result.device, result.host, strings)
    result.groups = groups_of(distributed, seen)


def _join_launches(result: Rank) -> None:
    device, host = result.device, result.host
    assert device is not None and host is not None
    device.columns["launch"] = launch = launches(device, host)
    mark_blocking_copies(device, host)
    if result.steps is not None:
        begun = host["start_ns"][np.maximum(launch, 0)]
        device.columns["step"] = np.where(launch >= 0, step_of(begun, result.steps), MISSING)
