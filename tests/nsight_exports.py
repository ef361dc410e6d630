"""Exports of Nsight Systems as its versions write them, of a small training whose times are known.

Each process trains on its device: every step it loads a batch (a copy from pageable memory), multiplies, and
reduces the result over all processes; then it waits for the device. ``Training`` says what came out.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MILLISECOND = 1_000_000
SESSION_NS = 1_780_000_000_000_000_000
COMMUNICATOR = 0xABCDEF0123456789
OTHER_COMMUNICATOR = 0x1111222233334444

#: How long things take, ns.
STEP, COPY, MATMUL, REDUCE = 20 * MILLISECOND, 1 * MILLISECOND, 6 * MILLISECOND, 3 * MILLISECOND

KERNEL = "void at::native::elementwise_kernel<(int)128, (int)4, at::native::mul_functor<float>>(int, T1)"
GEMM = "ampere_sgemm_128x64_tn"
REDUCTION = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"

#: Columns that schema 2.9 lacks.
NEW_COLUMNS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": {"graphNodeId", "graphId"},
    "CUPTI_ACTIVITY_KIND_MEMCPY": {"graphNodeId"},
    "NVTX_EVENTS": {"binaryData", "jsonText"},
}


@dataclass(frozen=True)
class Training:
    """What an export should come to."""

    processes: int = 2
    devices_per_process: int = 1
    steps: int = 4
    late_ns: int = 0  # how much later the last process begins its reduction
    step_name: str = "step {}"
    payloads: str | None = "binary"  # or "json", or None
    communicator: int = COMMUNICATOR
    matmul_ns: int = MATMUL


def pid_of(process: int) -> int:
    """A globalPid: the process's number above 24 bits of thread."""
    return (1 << 48) + ((100 + process) << 24)


def payload(schema: int, *values: Any, form: str) -> bytes:
    """A blob as ``binaryData`` holds it: a header of 32 bytes, then the fields."""
    body = struct.pack(form, *values)
    return struct.pack("<IIIIQQ", 1, 0, schema, 0, len(body), 32 + len(body)) + body


class _Builder:
    def __init__(self, training: Training) -> None:
        self.training = training
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.strings: dict[str, int] = {}
        self.correlation = 0

    def add(self, table: str, **row: Any) -> None:
        self.rows.setdefault(table, []).append(row)

    def text(self, value: str) -> int:
        return self.strings.setdefault(value, 100 + len(self.strings))

    def nvtx(self, process: int, text: str, start: int, end: int, domain: int = 0, **more: Any) -> None:
        registered = domain == 1
        self.add(
            "NVTX_EVENTS",
            start=start,
            end=end,
            eventType=59,
            text=None if registered else text,
            textId=self.text(text) if registered else None,
            globalTid=pid_of(process) + 1,
            domainId=domain,
            **{"binaryData": None, "jsonText": None, **more},
        )

    def launch(self, process: int, name: str, start: int, length: int = 5_000) -> int:
        self.correlation += 1
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=start + length,
            globalTid=pid_of(process) + 1,
            correlationId=self.correlation,
            nameId=self.text(name),
        )
        return self.correlation

    def kernel(
        self, process: int, device: int, name: str, start: int, end: int, correlation: int, stream: int = 7
    ) -> None:
        self.add(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            start=start,
            end=end,
            deviceId=device,
            contextId=1,
            streamId=stream,
            correlationId=correlation,
            globalPid=pid_of(process),
            demangledName=self.text(name),
            shortName=self.text(name.split("<")[0].split("::")[-1].split("(")[0]),
            gridX=64,
            gridY=2,
            gridZ=1,
            blockX=128,
            blockY=1,
            blockZ=1,
            graphNodeId=None,
            graphId=0,
        )

    def collective(self, process: int, start: int) -> None:
        more: dict[str, Any] = {}
        number = self.training.communicator
        if self.training.payloads == "binary":
            more["binaryData"] = payload(16777223, number, 4096, 0, form="<QQQ")
        elif self.training.payloads == "json":
            content = {
                "NCCL communicator ID": number,
                "Message size [bytes]": 4096,
                "Reduction operation": "Sum",
            }
            more["jsonText"] = json.dumps(content)
        self.nvtx(process, "ncclAllReduce", start, start + 30_000, domain=1, **more)

    def step(self, process: int, device: int, number: int, begin: int) -> None:
        training = self.training
        place = process * training.devices_per_process + device
        late = training.late_ns if place == training.processes * training.devices_per_process - 1 else 0
        copied = self.launch(process, "cudaMemcpyAsync_v3020", begin + 10_000, COPY + 20_000)
        self.add(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start=begin + 20_000,
            end=begin + 20_000 + COPY,
            deviceId=place,
            contextId=1,
            streamId=7,
            correlationId=copied,
            globalPid=pid_of(process),
            bytes=1 << 20,
            copyKind=1,
            srcKind=0,
            dstKind=2,
            graphNodeId=None,
        )
        at = begin + 2 * MILLISECOND
        self.nvtx(
            process,
            f"aten::mm, seq = {number}, op_id = {place * 1000 + number}, sizes = [[64, 32], [32, 8]]",
            at,
            at + 60_000,
        )
        self.kernel(
            process,
            place,
            GEMM,
            at + 20_000,
            at + 20_000 + training.matmul_ns,
            self.launch(process, "cudaLaunchKernel_v7000", at + 10_000),
        )
        at = begin + 3 * MILLISECOND
        self.collective(process, at)
        started = begin + 10 * MILLISECOND + late
        end = begin + 10 * MILLISECOND + training.late_ns + REDUCE
        self.kernel(
            process, place, REDUCTION, started, end, self.launch(process, "cuLaunchKernelEx", at + 10_000), 15
        )
        self.launch(process, "cudaStreamSynchronize_v3020", begin + 4 * MILLISECOND, 12 * MILLISECOND)


def build(
    path: Path,
    training: Training | None = None,
    *,
    without: Collection[str] = (),
    lacking: Mapping[str, Collection[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    start_ns: int | None = SESSION_NS,
    extra: Mapping[str, list[dict[str, Any]]] | None = None,
) -> Path:
    """Write an export. ``without`` are tables that it has not, ``lacking`` table → columns that it has not,
    ``extra`` table → rows more."""
    training = training or Training()
    builder = _Builder(training)
    for process in range(training.processes):
        for number in range(training.steps):
            begin = number * STEP
            for device in range(training.devices_per_process):
                builder.step(process, device, number, begin)
            if training.step_name:
                builder.nvtx(
                    process, training.step_name.format(number + 10), begin, begin + STEP - MILLISECOND
                )
        if training.payloads == "binary":
            blob = payload(
                16777218, training.communicator, training.processes, process, process, form="<Qiii4x"
            )
            builder.nvtx(process, "ncclCommInitRank", -5_000, -1_000, domain=1, binaryData=blob)
    _add_facts(builder, environment or {}, start_ns)
    for table, rows in (extra or {}).items():
        for row in rows:
            builder.add(table, **row)
    _write(path, builder, without, lacking or {})
    return path


def _add_facts(builder: _Builder, environment: Mapping[str, str], start_ns: int | None) -> None:
    for name, value in (("EXPORT_PRODUCT_VERSION", "2026.2.1"), ("EXPORT_SCHEMA_VERSION", "3.25.0")):
        builder.add("META_DATA_EXPORT", name=name, value=value)
    for name, value in environment.items():
        builder.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=f'{name}="{value}"')
    for number in range(builder.training.processes * builder.training.devices_per_process):
        builder.add(
            "TARGET_INFO_GPU",
            id=number,
            name="NVIDIA A100-SXM4-80GB",
            totalMemory=85_899_345_920,
            smCount=108,
        )
    builder.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value="node-7")
    builder.add("TARGET_INFO_SYSTEM_ENV", name="NvDriverVersion", value="580.95.05")
    if start_ns is not None:
        builder.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=start_ns)
    entries = {
        16777218: (
            ("NCCL communicator ID", 18, None),
            ("No. of ranks", 5, 8),
            ("Rank", 5, 12),
            ("CUDA device", 5, 16),
        ),
        16777223: (
            ("NCCL communicator ID", 18, None),
            ("Message size [bytes]", 22, 8),
            ("Reduction operation", 18, 16),
        ),
        16777226: (("NCCL communicator ID", 18, None), ("Message size [bytes]", 22, 8), ("Peer rank", 5, 16)),
    }
    for schema, fields in entries.items():
        for place, (name, kind, offset) in enumerate(fields):
            builder.add(
                "NVTX_PAYLOAD_SCHEMA_ENTRIES",
                domainId=1,
                schemaId=schema,
                idx=place,
                type=kind,
                name=name,
                offset=offset,
            )


def _write(
    path: Path, builder: _Builder, without: Collection[str], lacking: Mapping[str, Collection[str]]
) -> None:
    builder.rows["StringIds"] = [{"id": code, "value": value} for value, code in builder.strings.items()]
    with sqlite3.connect(path) as connection:
        for table, rows in builder.rows.items():
            if table in without:
                continue
            columns = [
                name
                for name in dict.fromkeys(key for row in rows for key in row)
                if name not in lacking.get(table, ())
            ]
            kinds = ", ".join(
                f'"{name}"' + (" INTEGER PRIMARY KEY" if (table, name) == ("StringIds", "id") else "")
                for name in columns
            )
            connection.execute(f"CREATE TABLE {table} ({kinds})")
            marks = ", ".join("?" * len(columns))
            values = [[_stored(row.get(name)) for name in columns] for row in rows]
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
    connection.close()


def _stored(value: Any) -> Any:
    return value - (1 << 64) if isinstance(value, int) and value >= 1 << 63 else value
