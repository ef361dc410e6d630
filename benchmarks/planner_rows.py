"""Published runs as the planner takes them: a row of a table becomes a workload, a cluster, a software stack and a layout.

What a row does not say is derived where it can be (data ranks from devices, micro-batches from the global batch) and else
assumed, and every assumption is kept beside the run. A row that cannot be read is skipped with its reason; none fails.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_cells import Missing, Row
from planner_clusters import cluster_of_row
from planner_contradictions import check_layout
from planner_errata import erratum_of
from planner_layouts import layout_of
from planner_stacks import stack_of_row
from planner_workloads import workload_of_row

from trine.optim.plan import Cluster, Layouts, Workload
from trine.optim.plan.constants import Stack
from trine.record.errors import TrineError, UnreadableInput

__all__ = ["Run", "Skipped", "read_rows", "read_runs"]

#: What a cell without a number says of a run that ran out of memory.
_OUT_OF_MEMORY = ("true", "yes", "y", "oom", "out of memory", "out-of-memory", "cuda oom")
#: Cells that say so.
_TRUTHS = ("oom", "step_time_s", "tokens_per_s_gpu", "mem_gib")

#: A longer cell has swallowed other rows: notes of published runs have hundreds of characters.
_LONGEST = 2**16


@dataclass(frozen=True, slots=True)
class Run:
    """One run and its truth. ``layout``: columns by name as :meth:`Layouts.of` takes them. ``memory_gib`` and ``oom``: as
    published, ``memory_is`` of "used" (by the device's own count), "reserved" (by PyTorch's allocator) or "allocated" (its tensors);
    ``seconds`` None where only memory is known. ``assumed``: what the row does not say. ``countable``: see :class:`Skipped`."""

    table: str
    row: str
    workload: Workload
    cluster: Cluster
    stack: Stack
    layout: Mapping[str, Any]
    frozen: bool
    seconds: float | None
    memory_gib: float | None
    oom: bool
    batch: int
    memory_is: str
    assumed: tuple[str, ...] = ()
    countable: bool = True

    @property
    def group(self) -> tuple[Any, ...]:
        """Runs of one model, batch and device count: those that a choice of layout is between."""
        work = self.workload
        return (
            self.table,
            work.name,
            work.layers,
            work.hidden,
            work.heads,
            work.sequence,
            self.devices,
            self.batch,
            self.cluster.device.name,
        )

    @property
    def devices(self) -> int:
        """Of the job."""
        return int(self.layouts.devices[0])

    @property
    def layouts(self) -> Layouts:
        """Of length one."""
        return Layouts.of(**self.layout)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is not predicted. ``countable``: it has truth, layers and a layout, so it counts against coverage."""

    table: str
    row: str
    reason: str
    countable: bool = False


def read_runs(path: Path, *, as_stated: bool = False) -> tuple[list[Run], list[Skipped]]:
    """All rows of a CSV file in the schema of published runs; ``as_stated``: without errata. Raises ``UnreadableInput``."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file, _cells_of_any_length():
            reader = csv.DictReader(file)
            columns, rows = reader.fieldnames or (), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableInput(f"{path} cannot be read as CSV: {error}") from error
    if "hidden" not in columns:
        raise UnreadableInput(f"{path} has no column 'hidden': a table of runs has a header and a row a run")
    if not rows:
        raise UnreadableInput(f"{path} has a header and no runs: add a row a run")
    return read_rows(rows, as_stated=as_stated)


@contextmanager
def _cells_of_any_length() -> Iterator[None]:
    """Within, no cell is too long for the reader: a row of one is skipped, not its table."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def read_rows(
    rows: Iterable[Mapping[str, Any]], *, as_stated: bool = False
) -> tuple[list[Run], list[Skipped]]:
    """As :func:`read_runs`, from rows that are read already."""
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for position, cells in enumerate(rows):
        row = Row({str(key): str(value) for key, value in cells.items() if value is not None and key})
        table = row.text("table") or "runs"
        name = row.text("row_id") or f"{table}-{position + 1}"
        try:
            _check_lengths(row)
            runs.append(_run(row, table, name, as_stated))
        except (Missing, TrineError, ValueError, ArithmeticError) as error:
            skipped.append(Skipped(table, name, _reason(error), _countable(row)))
    return runs, skipped


def _check_lengths(row: Row) -> None:
    """Raises ``Missing`` for a cell that holds more than one."""
    for name, text in row.cells.items():
        if len(text) > _LONGEST:
            raise Missing(f"{name[:30]} has more than {_LONGEST:,} characters: is a quote left open?")


def _reason(error: Exception) -> str:
    """One line, without what differs from row to row."""
    return str(error).splitlines()[0][:100] if str(error) else type(error).__name__


def _countable(row: Row) -> bool:
    """Whether coverage counts the row: truth, layers and a layout are published."""
    try:
        truth = row.number("step_time_s") or row.number("tokens_per_s_gpu")
        layout = row.count("tp") is not None and row.count("pp") is not None
        return bool(truth and row.count("layers") and layout)
    except Missing:  # a number that is none
        return False


def _run(row: Row, table: str, name: str, as_stated: bool) -> Run:
    workload = workload_of_row(row)
    row.sequence = workload.sequence
    placed = cluster_of_row(row)
    cluster, devices = placed.cluster, placed.devices
    stack = stack_of_row(row, cluster.device)
    layout, batch = layout_of(row, workload, stack, devices)
    check_layout(row, workload, layout, batch)
    erratum = None if as_stated else erratum_of(table, str(layout["recompute"]), stack.fused_attention)
    if erratum is not None:
        layout |= erratum[0]
        row.assume(erratum[1])
    cluster.device.peak(str(layout["precision"]))  # which a device may not have
    seconds = row.number("step_time_s")
    rate = row.number("tokens_per_s_gpu")
    oom = (row.number("oom") or 0) > 0 or any(row.text(cell).lower() in _OUT_OF_MEMORY for cell in _TRUTHS)
    if seconds is None and rate:
        seconds = batch * workload.sequence / (rate * devices / placed.parts)
    memory = row.number("mem_gib")
    if not seconds and memory is None and not oom:
        raise Missing("no truth: neither step time, tokens a second, memory nor an out-of-memory")
    text = f"{row.text('notes')} {row.text('source_ref')}".lower()
    return Run(
        table=table,
        row=name,
        workload=workload,
        cluster=cluster,
        stack=stack,
        layout=layout,
        frozen="lora" in text,
        seconds=seconds or None,
        memory_gib=memory,
        oom=oom,
        batch=batch,
        memory_is="used" if "nvidia-smi" in text else "allocated" if "allocated" in text else "reserved",
        assumed=tuple(row.assumed),
        countable=_countable(row),
    )
