"""Published runs as the planner takes them: a row of a table becomes a workload, a cluster, a software stack and a layout.

What a row does not say is derived where it can be (data ranks from devices, micro-batches from the global batch) and else
assumed, and every assumption is kept beside the run. A row that cannot be read is skipped with its reason; none fails.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_cells import Missing, Row
from planner_errata import erratum_of
from planner_layouts import layout_of, zero_stage_of
from planner_workloads import workload_of_row

from trine.optim.plan import Cluster, Device, Layouts, Workload
from trine.optim.plan.constants import Stack, stack_named
from trine.optim.plan.devices import device_named, facts_of
from trine.optim.plan.links import link_of
from trine.record.errors import TrineError, UnreadableInput

__all__ = ["Run", "Skipped", "read_runs"]

#: Watts of a device of a family as it is usually sold.
_POWER = {"hopper": 700, "ampere": 400}
#: Rounds of MLPerf Training → the month of NVIDIA's containers that its NeMo submissions ran (their system names say so).
_CONTAINERS = {
    "v3.0": "23.04",
    "v3.1": "23.09",
    "v4.0": "24.04",
    "v4.1": "24.09",
    "v5.0": "25.04",
    "v5.1": "25.09",
}


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
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableInput(f"{path} cannot be read as CSV: {error}") from error
    if not rows or "hidden" not in rows[0]:
        raise UnreadableInput(f"{path} has no column 'hidden': a table of runs has a header and a row a run")
    return read_rows(rows, as_stated=as_stated)


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
            runs.append(_run(row, table, name, as_stated))
        except (Missing, TrineError, ValueError, ArithmeticError) as error:
            skipped.append(Skipped(table, name, _reason(error), _countable(row)))
    return runs, skipped


def _reason(error: Exception) -> str:
    """One line, without what differs from row to row."""
    return str(error).splitlines()[0][:100] if str(error) else type(error).__name__


def _countable(row: Row) -> bool:
    """Whether coverage counts the row: truth, layers and a layout are published."""
    truth = row.number("step_time_s") or row.number("tokens_per_s_gpu")
    layout = row.count("tp") is not None and row.count("pp") is not None
    return bool(truth and row.count("layers") and layout)


def _run(row: Row, table: str, name: str, as_stated: bool) -> Run:
    workload = workload_of_row(row)
    devices = row.needed("n_gpus")
    cluster = _cluster(row, devices)
    stack = _stack(row)
    layout, batch = layout_of(row, workload, stack, devices)
    erratum = None if as_stated else erratum_of(table, str(layout["recompute"]), stack.fused_attention)
    if erratum is not None:
        layout |= erratum[0]
        row.assume(erratum[1])
    cluster.device.peak(str(layout["precision"]))  # which a device may not have
    seconds = row.number("step_time_s")
    rate = row.number("tokens_per_s_gpu")
    oom = (row.number("oom") or 0) > 0 or row.text("oom").lower() in ("true", "yes")
    if seconds is None and rate:
        seconds = batch * workload.sequence / (rate * devices)
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


# --- cluster and software -----------------------------------------------------------------------------------------------


def _cluster(row: Row, devices: int) -> Cluster:
    device = _device(row)
    facts = facts_of(device)
    node = row.count("gpus_per_node") or (facts.node if facts else 8)
    here = min(node, devices)
    nodes = -(-devices // here)
    return Cluster(
        device=device,
        devices_per_node=here,
        nodes=nodes,
        inside=link_of(row.text("intra_link"), device, devices_per_node=node) if here > 1 else None,
        between=link_of(row.text("inter_link_per_gpu"), device, between=True, devices_per_node=node)
        if nodes > 1
        else None,
        name=f"{devices} × {device.name}",
    )


def _device(row: Row) -> Device:
    """The device; one whose stated power is below its family's runs at lower clocks."""
    device = device_named(row.text("gpu"))
    stated = re.search(r"\b(\d{3,4}) ?W\b", row.text("gpu"))
    nominal = _POWER.get(device.family)
    if stated is None or nominal is None or int(stated[1]) >= nominal:
        return device
    row.assume(f"clocks by the cube root of {stated[1]} of {nominal} W")
    share = (int(stated[1]) / nominal) ** (1 / 3)
    peaks = {name: value * share for name, value in device.flops_per_s.items()}
    rate = device.matmul_flops_per_s and device.matmul_flops_per_s * share
    return device.with_changes(flops_per_s=peaks, matmul_flops_per_s=rate)


def _stack(row: Row) -> Stack:
    text = row.text("framework")
    if round_ := re.search(r"mlperf[^v]*(v\d\.\d)", row.text("source"), re.IGNORECASE):
        text = f"{text} {_CONTAINERS.get(round_[1], '')}"
    elif not re.search(r"\d", text):
        # A name alone: software of the year of its publication.
        year = re.search(r"\b(20[12]\d)\b|[A-Z]{3,}(\d\d)\b", row.text("source"))
        text = f"{text} {year[1] or '20' + year[2]}" if year else text
    try:
        stack = stack_named(text)
    except TrineError:
        stack = stack_named(_usual_stack(row))
        row.assume(f"{text or 'no framework'} as {stack.name}")
    notes = row.text("notes").lower()
    traits: dict[str, Any] = {}
    if re.search(r"\beager\b", notes):
        traits["fused"] = False
    elif "compile" in notes:
        traits["fused"] = True
    if "torchtitan 2025" in text.lower() and traits.get("fused"):
        # Since 2025 its compilation takes in the loss.
        traits["fused_loss"] = True
    if re.search(r"async ?-?tp", notes):
        traits["tensor_overlap"] = True
    if "deepep" in notes or "hybridep" in notes:
        traits["expert_once"] = True
    if "a2a overlap" in notes:
        traits["expert_overlap"] = True
    if re.search(r"selective ?\((layer)?norm,(moe_)?act", row.text("recompute").lower()):
        # Matmuls' outputs are kept, what is element by element is repeated.
        traits["operators"] = "all"
    if "rowwise" in row.text("precision").lower():
        traits["fp8_gain"] = 0.0
    if "fp4" in row.text("precision").lower():
        traits["fp8_gain"] = 3.3 if "b300" in row.text("gpu").lower() else 2.0
    return stack.with_traits(**traits) if traits else stack


def _usual_stack(row: Row) -> str:
    """What trains in such a layout where nobody says what does."""
    if (row.count("tp") or 1) > 1 or (row.count("pp") or 1) > 1:
        return "megatron-core"
    return "fsdp" if zero_stage_of(row) == 3 else "pytorch"
