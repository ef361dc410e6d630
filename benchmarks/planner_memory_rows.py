"""Published memory as the planner can be held to it: what a figure counts, and what the planner says of the same run.

A figure counts tensors, or also what PyTorch's allocator reserved, or all that the device gave. Tables:
published runs with memory or an out-of-memory; activations and state by recomputation (Korthikanti et al.
2022); ZeRO's formulas; fine-tuning of adapters.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner_rows import Run

from trine.optim.plan import Cluster, Layouts, Workload
from trine.optim.plan.closed_form import in_flight
from trine.optim.plan.constants import Stack, stack_named
from trine.optim.plan.devices import device_named
from trine.optim.plan.layouts import SCHEDULES
from trine.optim.plan.links import link_of
from trine.optim.plan.memory import MemoryEstimate, memory_of
from trine.optim.plan.memory_traits import MemoryTraits, memory_traits
from trine.optim.plan.workload_files import workload_of

__all__ = ["Case", "fine_tuning", "of_runs", "recomputation", "sharding", "too_large"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """One figure. ``counts``: "tensors", "reserved" or "used". Bytes; ``measured`` None where it ran out of memory.

    ``tensors`` and ``framework`` are predicted, without the constants that a fit moves. ``capacity``: of the
    device, as its driver gives.
    """

    table: str
    name: str
    kind: str
    counts: str
    measured: float | None
    tensors: float
    framework: float = 0.0
    capacity: float = 0.0

    def predicted(self, fragmentation: float, fixed_bytes: float) -> float:
        """Bytes of what the figure counts."""
        if self.counts == "tensors":
            return self.tensors
        reserved = self.tensors * (1 + fragmentation) + fixed_bytes
        return reserved + (self.framework if self.counts == "used" else 0.0)

    def runs_out(self, fragmentation: float, fixed_bytes: float) -> bool:
        """Whether the prediction is above what the device gives."""
        return self.tensors * (1 + fragmentation) + fixed_bytes + self.framework > self.capacity


def bare(traits: MemoryTraits) -> MemoryTraits:
    """Without what a fit moves."""
    return replace(traits, fragmentation=0.0, fixed_bytes=0.0)


def of_runs(runs: Sequence[Run]) -> list[Case]:
    """Of published runs that state memory or ran out of it."""
    found = []
    for run in runs:
        if run.memory_gib is None and not run.oom:
            continue
        traits = memory_traits(run.stack)
        estimate = memory_of(
            run.workload, run.cluster, run.stack, run.layouts, frozen=run.frozen, traits=bare(traits)
        )
        found.append(
            Case(
                table=run.table,
                name=run.row,
                kind=traits.family,
                counts=run.memory_is,
                measured=None if run.memory_gib is None or run.oom else run.memory_gib * GIB,
                tensors=float(estimate.allocated_bytes[0]),
                framework=float(estimate.parts["framework"][0]),
                capacity=estimate.capacity_bytes,
            )
        )
    return found


def too_large(runs: Sequence[Run]) -> dict[str, dict[str, int]]:
    """By table: runs that went, and how many of them are predicted not to fit.

    Many state no recomputation and cannot have run without any, so this is an upper bound on what is the planner's fault.
    """
    found: dict[str, dict[str, int]] = {}
    for run in runs:
        if run.oom:
            continue
        line = found.setdefault(run.table, {"rows": 0, "too_large": 0})
        estimate = memory_of(run.workload, run.cluster, run.stack, run.layouts, frozen=run.frozen)
        line["rows"] += 1
        line["too_large"] += int(estimate.peak_bytes[0] > estimate.capacity_bytes)
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _node(name: str, devices: int = 8) -> Cluster:
    device = device_named(name)
    inside = link_of("", device, devices_per_node=devices) if devices > 1 else None
    return Cluster(
        device=device, devices_per_node=devices, inside=inside, between=link_of("", device, between=True)
    )


# --- Korthikanti et al. 2022 --------------------------------------------------------------------------------------------

#: Layers, hidden size and heads of the paper's models (its table 3). Figures are of layers, without embedding
#: and head.
_MODELS = {
    "22B": (48, 6144, 64),
    "175B": (96, 12288, 96),
    "530B": (105, 20480, 128),
    "1T": (128, 25600, 160),
}
_MODES: Mapping[str, Mapping[str, object]] = {
    "none": {},
    "none(no SP, no recompute)": {},
    "seq": {"sequence": 1},
    "sel": {"recompute": "selective"},
    "seqsel": {"recompute": "selective", "sequence": 1},
    "seq+selective": {"recompute": "selective", "sequence": 1},
    "full": {"recompute": "full"},
}


def recomputation(path: Path) -> list[Case]:
    """State, activations, and activations over those without recomputation."""
    stack = stack_named("megatron-lm-2022")
    found = []
    for row in _rows(path):
        estimate = _of_paper(row, stack, _MODES[row["mode"]])
        name = f"{row['model']} {row['mode']}"
        kept = _of_layers(row, estimate, _MODES[row["mode"]])
        state = sum(float(estimate.parts[part][0]) for part in ("parameters", "gradients", "optimizer"))
        pairs = [
            ("state", row["params_plus_opt_gib"], GIB, state),
            ("activations", row["activation_gib"], GIB, kept),
        ]
        if row["act_pct_of_none"]:
            whole = _of_layers(row, _of_paper(row, stack, {}), {})
            pairs.append(("share", row["act_pct_of_none"], 0.01, kept / whole))
        found += [
            Case(f"recomputation: {what}", name, "megatron", "tensors", float(text) * unit, ours)
            for what, text, unit, ours in pairs
            if text
        ]
    return found


def _of_layers(row: Mapping[str, str], estimate: MemoryEstimate, mode: Mapping[str, object]) -> float:
    """Activations without the mask of the embedding's dropout, which the figures leave out, too."""
    _, hidden, _ = _MODELS[row["model"]]
    stages, chunks = int(row["pp"]), int(row["vpp"])
    held = float(in_flight(_schedule(chunks), stages, chunks, 1024, 0)[0])
    split = int(row["tp"]) if "sequence" in mode else 1
    return float(estimate.parts["activations"][0]) - held * 2048 * int(row["mbs"]) * hidden / split


def _schedule(chunks: int) -> int:
    return SCHEDULES.index("interleaved" if chunks > 1 else "1f1b")


def _of_paper(row: Mapping[str, str], stack: Stack, mode: Mapping[str, object]) -> MemoryEstimate:
    layers, hidden, heads = _MODELS[row["model"]]
    workload = Workload(
        name=row["model"],
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        vocab=1,
        sequence=2048,
        dropout=True,
    )
    chunks = int(row["vpp"])
    layouts = Layouts.of(
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        chunks=chunks,
        schedule=_schedule(chunks),
        micro_batch=int(row["mbs"]),
        microbatches=1024,
        **mode,
    )
    return memory_of(workload, _node("A100-SXM4-80GB"), stack, layouts)


# --- ZeRO ---------------------------------------------------------------------------------------------------------------


def sharding(path: Path) -> list[Case]:
    """Bytes of state by stage and ranks, scaled to the paper's sizes. Rows of an estimator with a formula of
    its own are left out."""
    workload, stack = workload_of("gpt3-6_7b"), stack_named("deepspeed")
    found = []
    for row in _rows(path):
        if row["table"].startswith("DeepSpeed estimator"):
            continue
        layouts = Layouts.of(data=int(row["n_dp"]), zero_stage=int(row["stage"]), precision="fp16")
        estimate = memory_of(workload, _node("V100-SXM2-32GB"), stack, layouts)
        state = sum(float(estimate.parts[part][0]) for part in ("parameters", "gradients", "optimizer"))
        ours = state / workload.parameters * float(row["params_b"]) * 1e9
        name = f"{row['case']} stage {row['stage']}"
        found.append(Case("sharding", name, "deepspeed", "tensors", float(row["per_gpu"]) * 1e9, ours))
    return found


# --- fine-tuning --------------------------------------------------------------------------------------------------------


def _stablelm() -> Workload:
    return Workload(
        name="stablelm-alpha-3b",
        layers=16,
        hidden=4096,
        heads=32,
        ffn=16384,
        vocab=50688,
        sequence=4096,
        norms=2,
        tied_embeddings=False,
    )


def _phi() -> Workload:
    return Workload(
        name="phi-1.5",
        layers=24,
        hidden=2048,
        heads=32,
        ffn=8192,
        vocab=51200,
        sequence=2048,
        norms=1,
        tied_embeddings=False,
    )


#: The models, and tokens of the data set's longest example with each one's tokeniser, as the table says.
_TUNED: Mapping[tuple[str, str], tuple[Callable[[], Workload], int]] = {
    ("phi-1.5", "1.3 B"): (_phi, 1044),
    ("StableLM Alpha", "3 B"): (_stablelm, 1034),
    ("Llama 2", "7 B"): (lambda: workload_of("llama2-7b"), 1304),
    ("Llama 2", "13 B"): (lambda: workload_of("llama2-13b"), 1304),
    ("Falcon", "40 B"): (lambda: workload_of("falcon-40b"), 1079),
}


def fine_tuning(path: Path) -> list[Case]:
    """Low-rank adapters on 16-bit weights that are not quantised. Tensors alone are counted
    (``max_memory_allocated``)."""
    stack = stack_named("pytorch")
    found = []
    for row in _rows(path):
        if row["quant"] or not row["mode"].startswith("Finetuning with LoRA") or not row["max_gpu_ram"]:
            continue
        make, tokens = _TUNED[row["model"], row["size"]]
        devices = int(row["gpus"].split()[0])
        cluster = _node("A100-SXM4-40GB", devices)
        layouts = Layouts.of(data=devices, zero_stage=3 if devices > 1 else 0, micro_batch=int(row["mbs"]))
        workload = make().with_changes(sequence=tokens)
        estimate = memory_of(workload, cluster, stack, layouts, frozen=True)
        stated = row["max_gpu_ram"]
        # Before the first step: loading a checkpoint into sharded 16-bit weights makes them whole once on every device.
        loading = 2.0 * workload.parameters * (1 + 1 / devices) if devices > 1 else 0.0
        found.append(
            Case(
                table="fine-tuning",
                name=f"{row['model']} {row['size']} batch {row['mbs']} on {devices}",
                kind="pytorch",
                counts="tensors",
                measured=None if stated == "OOM" else float(stated.split()[0]) * 1e9,
                tensors=max(float(estimate.allocated_bytes[0]), loading),
                framework=float(estimate.parts["framework"][0]),
                capacity=estimate.capacity_bytes,
            )
        )
    return found
