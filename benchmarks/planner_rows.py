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
from planner_workloads import workload_of_row

from trine.optim.plan import Cluster, Device, Layouts, Workload
from trine.optim.plan.constants import Stack, stack_named
from trine.optim.plan.devices import device_named, facts_of
from trine.optim.plan.links import link_of
from trine.record.errors import TrineError, UnreadableInput

__all__ = ["Run", "Skipped", "read_runs"]

#: The day from which on a log's runs that could be in fp16 or bf16 were in bf16, as it says.
_BF16_FROM = "02-28"
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
    layout, batch = _layout(row, workload, stack, devices)
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
    if "megatron-lm fork" in text.lower():
        # What it keeps of a layer (published peaks) is with the scores.
        traits["fused_attention"] = False
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
    return "fsdp" if _zero_stage(row) == 3 else "pytorch"


# --- layout -------------------------------------------------------------------------------------------------------------


def _layout(row: Row, workload: Workload, stack: Stack, devices: int) -> tuple[dict[str, Any], int]:
    tensor, pipeline = row.count("tp"), row.count("pp")
    if tensor is None and pipeline is None and row.count("dp") is None and row.number("mbs") is None:
        raise Missing("no layout")
    tensor, pipeline = tensor or 1, pipeline or 1
    context, expert = row.count("cp") or 1, row.count("ep") or 1
    data = max(1, devices // (tensor * pipeline * context))
    if data * tensor * pipeline * context != devices:
        raise Missing("tensor, pipeline and context ranks do not divide the devices")
    stated = row.count("dp")
    if stated is not None and stated != data:
        row.assume(f"{data} data ranks, since {devices} devices are not {stated} of them")
    schedule, chunks = _schedule(row, workload, pipeline)
    micro_batch, microbatches = _batch(row, workload, data, pipeline)
    batch = row.count("gbs") or data * micro_batch * microbatches
    sequence = row.number("sp")
    layout = {
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "expert": min(expert, data * context * tensor, max(workload.experts, 1)),
        "chunks": chunks,
        "schedule": schedule,
        "micro_batch": micro_batch,
        "microbatches": microbatches,
        "zero_stage": max(_zero_stage(row), int(stack.split_optimizer)),
        "shard": _shard(row, data * context, context),
        "sequence": int(tensor > 1 and (sequence > 0 if sequence is not None else stack.sequence)),
        **_recompute(row, workload, stack, pipeline),
        "precision": _precision(row, stack),
    }
    return layout, batch


def _zero_stage(row: Row) -> int:
    text = row.text("zero_stage").lower()
    if "fsdp" in text or "hsdp" in text or "full" in text:
        return 3
    return min(int(row.number("zero_stage") or 0), 3)


def _shard(row: Row, ranks: int, context: int) -> int:
    """Data ranks that share state, 0 for all: where notes say how many, or a node's where state is sharded in groups."""
    said = re.search(
        r"\b(?:fsdp|shard)\s*=\s*(\d+)(?:\s*\((\d+) at (\d+) gpus\))?", row.text("notes").lower()
    )
    group = 0
    if said is not None:
        group = int(said[2]) if said[3] and int(said[3]) == row.count("n_gpus") else int(said[1])
    elif "hsdp" in row.text("zero_stage").lower():
        group = row.count("gpus_per_node") or 8
        row.assume(f"state shared by {group} ranks")
    fits = 0 < group < ranks and ranks % group == 0 and group % context == 0
    return group // context if fits else 0


def _schedule(row: Row, workload: Workload, pipeline: int) -> tuple[str, int]:
    text = row.text("pp_schedule").lower()
    chunks = row.count("vpp") or 1
    if pipeline == 1:
        return "1f1b", 1
    if "zb-2p" in text or "zb-h2" in text:
        return "zb-h2", 1
    if "zb-1p" in text or "zb-h1" in text:
        return "zb-h1", 1
    if "zb-v" in text or "zbv" in text:
        return "zb-v", 2
    if "gpipe" in text:
        return "gpipe", 1
    if "dualpipe" in text:
        return "dualpipe-v", 2
    if "bfs" in text or "breadth" in text:
        return "looped-bfs", max(chunks, 2)
    if re.search(r"interleaved.?zero.?bubble", text):
        return "interleaved-zb", max(chunks, 2)
    stage = -(-workload.layers // pipeline)
    if row.count("vpp") is None and text.startswith("1f1b-i"):
        row.assume(f"{stage} chunks a rank, one layer each")
        chunks = stage
    elif row.count("vpp") is None and "interleaved" in text and workload.layers % (2 * pipeline) == 0:
        row.assume("2 chunks a rank")
        chunks = 2
    return ("interleaved", chunks) if chunks > 1 else ("1f1b", 1)


def _batch(row: Row, workload: Workload, data: int, pipeline: int) -> tuple[int, int]:
    """Micro-batch, and micro-batches of a step and rank."""
    batch, micro_batch, steps = row.count("gbs"), row.count("mbs"), row.count("ga")
    if batch is None:
        if micro_batch is None:
            raise Missing("neither global batch nor micro-batch")
        if steps is None:
            steps = 1 if pipeline == 1 else 4 * pipeline
            row.assume(f"{steps} micro-batches a step")
        return micro_batch, steps
    own = max(1, round(batch / data))
    if micro_batch is None and steps is not None:
        micro_batch = max(1, own // steps)
    if micro_batch is None:
        micro_batch = 1
        # One sequence where a pipeline wants many micro-batches; else as many as keep a device busy.
        while pipeline == 1 and micro_batch * 2 * workload.sequence <= 16384 and own % (micro_batch * 2) == 0:
            micro_batch *= 2
        row.assume(f"micro-batch of {micro_batch}")
    return micro_batch, max(1, round(own / micro_batch))


def _recompute(row: Row, workload: Workload, stack: Stack, pipeline: int) -> dict[str, Any]:
    text = row.text("recompute").lower()
    if not text:
        row.assume(f"recomputation {stack.recompute}")
        return {"recompute": stack.recompute}
    if text.startswith(("none", "no ", "off", "false")) or text == "no":
        return {"recompute": "none"}
    if "selective layer" in text:
        # Every second layer.
        return {"recompute": "budget", "recomputed_layers": max(1, workload.layers // pipeline // 2)}
    if "selective" in text and "moe" in text.partition("(")[2].split(")")[0].replace("moe_act", ""):
        row.assume("full recomputation: experts are most of a layer")
        return {"recompute": "full"}
    if "selective" in text:
        return {"recompute": "selective"}
    if "full" in text or text in ("true", "yes", "block", "uniform"):
        return {"recompute": "full"}
    row.assume(f"recomputation {stack.recompute} for {text!r}")
    return {"recompute": stack.recompute}


def _precision(row: Row, stack: Stack) -> str:
    text = row.text("precision").lower()
    if "fp4" in text:
        row.assume("fp4 as fp8 with two thirds of its peak's gain")
        return "fp8"
    if "fp8" in text or "mxfp8" in text or "e4m3" in text:
        return "fp8"
    if text == "bf16/fp16" and (day := re.search(r"\b\d\d-\d\d\b", row.text("source_ref"))):
        return "bf16" if day[0] >= _BF16_FROM else "fp16"
    if found := re.search(r"bf16|bfloat16|fp16|float16|tf32|fp32|float32", text):
        return found[0].replace("bfloat", "bf").replace("float", "fp")
    half = "fp16" if "v100" in row.text("gpu").lower() else "bf16"
    half = stack.precision if half == "bf16" else half
    row.assume(f"precision {half}")
    return half
