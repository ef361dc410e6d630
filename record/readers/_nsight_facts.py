"""What an export says about itself: devices, host, versions, its clock, and what went wrong while it was made."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..model import DeviceInfo, Rank
from ._nsight_database import Database
from ._nsight_ranges import Ranges
from ._nsight_ranks import Place
from ._nsight_tables import Calls
from ._nsight_work import Work

__all__ = ["describe", "say_what_was_odd", "zero_ns"]

#: Where versions keep the devices, and what they call their memory.
_GPUS = ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_GPU")
_MEMORY_COLUMNS = ("totalMemory", "globalMemory", "memorySize")
_EXPORT_TABLES = ("META_DATA_EXPORT", "EXPORT_META_DATA")
#: Schemas that this reader was written against; others are read all the same, and said.
_OLDEST, _NEWEST = (2, 9), (3, 25)
#: A time beyond this is Unix time already (``--ts-normalize``): no capture lasts three years.
_UNIX_NS = 10**17
#: Severities of ``ENUM_DIAGNOSTIC_SEVERITY_LEVEL``.
_WARNING, _ERROR = 2, 3
_MOST_DIAGNOSTICS = 5

#: Tables of work that are not read, and what they hold.
_UNUSED = {
    "OSRT_API": "calls of the operating system",
    "SCHED_EVENTS": "thread scheduling",
    "COMPOSITE_EVENTS": "samples of the host's stacks",
    "CUDNN_EVENTS": "cuDNN calls",
    "CUBLAS_EVENTS": "cuBLAS calls",
    "MPI_COLLECTIVES_EVENTS": "MPI collectives",
    "NET_NIC_METRIC": "network metrics",
    "CUDA_UM_CPU_PAGE_FAULT_EVENTS": "page faults of unified memory",
    "CUDA_UM_GPU_PAGE_FAULT_EVENTS": "page faults of unified memory",
}  # fmt: skip


def zero_ns(database: Database) -> int:
    """Unix time of the export's zero, ns; 0 where it is not known or times are Unix time already."""
    found = database.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), limit=1)
    start = found[0][0] if found else None
    if not isinstance(start, int) or not 0 < start < 1 << 62:
        return 0
    for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"):
        if database.has(table, "start"):
            first = database.ask(table, f"SELECT start FROM {table} WHERE start IS NOT NULL LIMIT 1")
            if first and isinstance(first[0][0], int):
                return 0 if first[0][0] > _UNIX_NS else start
    return start


def describe(rank: Rank, database: Database, place: Place) -> None:
    """Fill what is known of the rank's device, host and versions."""
    rank.devices = _devices(database, place)
    system = _pairs(database, "TARGET_INFO_SYSTEM_ENV")
    rank.host_name = system.get("Hostname")
    exported = next((found for name in _EXPORT_TABLES if (found := _pairs(database, name))), {})
    versions = {
        "nsight": exported.get("EXPORT_PRODUCT_VERSION"),
        "nsight_schema": exported.get("EXPORT_SCHEMA_VERSION"),
        "driver": system.get("NvDriverVersion"),
    }
    rank.metadata["versions"] = {name: value for name, value in versions.items() if value}
    schema = _schema(exported.get("EXPORT_SCHEMA_VERSION"))
    if schema is not None and not _OLDEST <= schema <= _NEWEST:
        rank.note(
            "nsight-schema",
            "info",
            f"the export has schema {schema[0]}.{schema[1]}; read as the nearest of those known"
            f" ({_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST[0]}.{_NEWEST[1]})",
        )


def _pairs(database: Database, table: str) -> dict[str, str]:
    rows = database.rows(table, ("name", "value"))
    return {str(name): str(value) for name, value in rows if name is not None and value not in (None, "")}


def _schema(text: str | None) -> tuple[int, int] | None:
    parts = (text or "").split(".")
    return (
        (int(parts[0]), int(parts[1]))
        if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit()
        else None
    )


def _devices(database: Database, place: Place) -> tuple[DeviceInfo, ...]:
    table = next((name for name in _GPUS if database.has(name, "name")), _GPUS[0])
    memory = next((name for name in _MEMORY_COLUMNS if database.has(table, name)), "")
    number = "cuDevice" if database.has(table, "cuDevice") else "id"
    found = []
    rows = database.rows(table, (number, "name", memory, "smCount"))
    for position, (index, name, size, processors) in enumerate(rows):
        if isinstance(name, str) and name:
            own = index if isinstance(index, int) and 0 <= index < 1 << 20 else position
            found.append(DeviceInfo(own, name, _positive(size), _positive(processors)))
    mine = [info for info in found if place.device is None or info.index == place.device]
    return tuple(mine or found)


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


# --- what is odd ---------------------------------------------------------------------------------


def say_what_was_odd(
    rank: Rank, database: Database, place: Place, work: Work, calls: Calls, ranges: Ranges
) -> None:
    """Everything unusual in an export as notes of its rank."""
    _say_what_is_absent(rank, database)
    _say_what_was_broken(rank, database, work.broken + calls.broken, ranges.unfinished)
    _say_launches(rank)
    _say_diagnostics(rank, database)
    unused = [f"{what} ({table})" for table, what in _UNUSED.items() if database.holds_rows(table)]
    if unused:
        rank.note("nsight-not-used", "info", f"the export also holds what is not used: {', '.join(unused)}")
    if work.graphs:
        text = (
            f"{work.graphs} CUDA graphs were recorded whole, so the kernels in them are not known;"
            " profile with --cuda-graph-trace=node to see them"
        )
        rank.note("graphs-whole", "warning", text)
    if place.device is not None and place.process is not None:
        text = "the host's calls and ranges are those of the whole process, which drives several devices"
        rank.note("shared-host", "info", text)


def _say_what_is_absent(rank: Rank, database: Database) -> None:
    absent = [
        f"{what} ({option})"
        for table, what, option in (
            ("CUPTI_ACTIVITY_KIND_KERNEL", "kernels", "--trace=cuda"),
            ("CUPTI_ACTIVITY_KIND_RUNTIME", "runtime calls", "--trace=cuda"),
            ("NVTX_EVENTS", "NVTX ranges", "--trace=nvtx"),
        )
        if table not in database.tables
    ]
    if absent:
        text = f"the export holds no {' and no '.join(absent)}: what rests on them cannot be said"
        rank.note("nsight-tables-absent", "warning", text)
    if not rank.devices:
        text = "the export does not name its devices (no TARGET_INFO_GPU), so their peaks are not known"
        rank.note("nsight-no-device-name", "info", text)


def _say_what_was_broken(rank: Rank, database: Database, broken: int, unfinished: int) -> None:
    cut = database.missing_bytes()
    if cut:
        text = (
            f"the file was cut off: {cut} of its bytes are missing; copy it again from where it was exported"
        )
        rank.note("truncated-file", "error", text)
    for table, why in sorted(database.damaged.items()):
        text = f"{table} is damaged ({why}); what could be read of it is used; export the report again"
        rank.note("damaged-table", "error", text)
    if broken:
        rank.note(
            "impossible-times", "warning", f"{broken} events end before they start or have no time; left out"
        )
    if unfinished:
        text = f"{unfinished} NVTX ranges were still open when the capture ended, and are left out"
        rank.note("unfinished-ranges", "info", text)


def _say_launches(rank: Rank) -> None:
    if rank.device is None or rank.host is None or not len(rank.device):
        return
    lost = int((rank.device["launch"] < 0).sum())
    if lost:
        text = f"{lost} of {len(rank.device)} device events have no launch record: their step and idle cause are unknown"
        rank.note("no-launch-record", "info" if lost < len(rank.device) * 0.01 else "warning", text)
    launch = rank.device["launch"]
    known = launch >= 0
    early = rank.device["start_ns"][known] < rank.host["start_ns"][launch[known]]
    if len(early) and float(np.mean(early)) > 0.01:
        text = f"{int(early.sum())} device events begin before their launch: the clocks of host and device disagree"
        rank.note("device-before-launch", "warning", text)


def _say_diagnostics(rank: Rank, database: Database) -> None:
    """What the profiler itself complained about: dropped events above all."""
    rows: list[Any] = database.rows("DIAGNOSTIC_EVENT", ("severity", "text"))
    said = dict.fromkeys(
        (severity, " ".join(str(text).split()))
        for severity, text in rows
        if text and severity in (_WARNING, _ERROR)
    )
    for severity, text in list(said)[:_MOST_DIAGNOSTICS]:
        level = "error" if severity == _ERROR else "warning"
        rank.note("nsight-diagnostic", "warning", f"Nsight Systems said ({level}): {text[:300]}")
    if len(said) > _MOST_DIAGNOSTICS:
        more = len(said) - _MOST_DIAGNOSTICS
        rank.note("nsight-diagnostic", "info", f"Nsight Systems said {more} more warnings and errors")
