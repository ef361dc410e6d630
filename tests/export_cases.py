"""What the tests of exports share: models, and layouts and configurations at random."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hypothesis import strategies as st

from trine.optim.config import Config
from trine.optim.exports import Exported, Written, write
from trine.optim.exports._reading import exported_of_layout
from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.cluster_json import cluster_to_dict
from trine.optim.plan.constants import stack_named
from trine.optim.plan.layouts import COMPRESSIONS, OFFLOADS, PRECISIONS, SCHEDULES, Layouts
from trine.optim.plan.workload import LatentAttention, Workload

DENSE = Workload(
    name="llama3-8b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    gated=True,
    vocab=128256,
    sequence=8192,
    bias=False,
    norm_bias=False,
    tied_embeddings=False,
)
MIXTURE = Workload(
    name="a-mixture",
    layers=61,
    hidden=7168,
    heads=128,
    head_size=128,
    ffn=18432,
    gated=True,
    vocab=129280,
    sequence=4096,
    bias=False,
    norm_bias=False,
    tied_embeddings=False,
    latent=LatentAttention(kv_rank=512, query_rank=1536),
    experts=256,
    experts_per_token=8,
    expert_ffn=2048,
    shared_experts=1,
    dense_layers=3,
)


def plan_of(
    *rows: dict[str, Any],
    model: Workload = MIXTURE,
    software: str = "megatron-core",
    devices: int = 64,
    **changes: Any,
) -> dict[str, Any]:
    """A plan for 64 sequences a step as its file has it, each row with every column; ``changes`` replace whole parts."""
    plan = {
        "schema": "trine.plan/1",
        "workload": asdict(model),
        "cluster": cluster_to_dict(cluster_of("dgx-h100", devices)),
        "stack": {"name": software},
        "options": {"global_batch": 64, "memory_headroom": 0.1, "pins": {"zero_stage": [0, 1, 3]}},
        "rows": [{"layout": {**Layouts.of().row(0), **row}, "step_s": 1.0} for row in rows],
    }
    return plan | changes


_POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def layout_rows(draw: st.DrawFn) -> dict[str, int | str]:
    """Layouts that the planner would weigh: degrees of powers of two, all else free."""
    data = draw(st.sampled_from([1, 2, 4, 8, 16]))
    tensor, pipeline = draw(_POWERS), draw(_POWERS)
    stage = draw(st.sampled_from([0, 1, 2, 3]))
    shards = [n for n in (1, 2, 4, 8, 16) if data % n == 0]
    schedule = draw(st.sampled_from(SCHEDULES))
    several = schedule not in ("gpipe", "1f1b", "zb-h1", "zb-h2")
    chunks = [2] if schedule in ("zb-v", "dualpipe-v") else [2, 3, 4] if several else [1]
    recompute = draw(st.sampled_from(["none", "selective", "full", "budget"]))
    context = draw(st.sampled_from([1, 1, 2, 4]))
    alone = data * context == 1
    return {
        "data": data,
        "shard": draw(st.sampled_from([0, *shards])) if stage else 0,
        "zero_stage": stage,
        "tensor": tensor,
        "sequence": draw(st.sampled_from([0, 1])) if tensor > 1 else 0,
        "context": context,
        "expert": draw(st.sampled_from([1, 1, 2, 8, 32])),
        "pipeline": pipeline,
        "chunks": draw(st.sampled_from(chunks)) if pipeline > 1 else 1,
        "schedule": schedule,
        "micro_batch": draw(st.integers(1, 4)),
        "microbatches": pipeline * 2 * draw(st.integers(1, 4)),
        "recompute": recompute,
        "recomputed_layers": draw(st.integers(1, max(1, 32 // pipeline))) if recompute == "budget" else 0,
        "precision": draw(st.sampled_from(PRECISIONS)),
        "optimizer_offload": draw(st.sampled_from(OFFLOADS)) if stage or alone else "none",
        "parameter_offload": draw(st.sampled_from(OFFLOADS)) if stage == 3 or alone else "none",
        "activation_offload": draw(st.sampled_from(OFFLOADS)),
        "bucket_bytes": draw(st.sampled_from([0, 25 * 2**20, 10**9])),
        "compression": draw(st.sampled_from(COMPRESSIONS)),
        "two_level": draw(st.sampled_from([0, 1])),
    }


@st.composite
def exported_layouts(draw: st.DrawFn) -> Exported:
    """Of one of both models, on nodes of eight devices, for software that splits experts, recomputes operators, or neither."""
    stack = draw(st.sampled_from([None, "megatron-core", "megatron-bridge", "trine", "torchtitan"]))
    known = None if stack is None else stack_named(stack)
    return exported_of_layout(draw(layout_rows()), draw(st.sampled_from([DENSE, MIXTURE])), 8, known)


#: Every key that is not bound to another, with values that it takes.
VALUES: dict[str, list[Any]] = {
    "precision.tf32": [True],
    "compute.compile": ["blocks", "model"],
    "compute.attention": ["sdpa", "flash"],
    "compute.fuse": [("cross_entropy",), ("optimizer", "norm")],
    "data.workers": [4],
    "data.packing": [True],
    "accumulation.delayed": [True],
    "parallel.tensor": [2, 4],
    "parallel.context": [2],
    "parallel.expert": [2, 4],
    "parallel.pipeline": [2, 4],
    "parallel.schedule": ["1f1b", "interleaved", "zbv", "gpipe", "unheard-of"],
    "parallel.microbatches": [8],
    "parallel.plan": [{"*.out": "row"}],
    "parallel.split": ["layers", ("layers.3",)],
    "parallel.loss": [True],
    "parallel.sequence": [True],
    "zero.prefetch": [2],
    "zero.reshard_after_forward": [True, False, 8],
    "zero.stage": [1, 2, 3],
    "zero.quantized_weights": [True],
    "communication.overlap": [True, False],
    "communication.bucket_mib": [25.0, "auto"],
    "communication.static_graph": [True],
    "communication.compression": ["bf16", "powersgd"],
    "communication.algorithm": ["two_level"],
    "communication.nccl": [{"algo": "Ring"}],
    "checkpointing.mode": ["full", "selective", "auto"],
    "checkpointing.every": [2],
    "checkpointing.modules": [("layers.*",)],
    "offload.optimizer": ["cpu", "auto"],
    "offload.parameters": ["cpu"],
    "offload.activations": ["cpu"],
    "offload.tile_mib": [64.0],
    "activations.dtype": ["fp8"],
    "activations.pool": [True],
    "engine": ["deepspeed"],
}


@st.composite
def configurations(draw: st.DrawFn) -> Config:
    """Of keys at random, together or not: an export has to be written for what a file may hold."""
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=8, unique=True))
    changes = {name: draw(st.sampled_from(VALUES[name])) for name in names}
    dtype = draw(st.sampled_from([None, "bf16", "fp16", "fp32"]))
    if dtype is not None:
        changes["precision.dtype"] = dtype
        changes["precision.master_weights"] = draw(st.booleans())
    if dtype == "fp16":
        changes["precision.loss_scale"] = draw(st.sampled_from([None, "auto", 512.0]))
    return Config().with_changes(changes)


def sayable(exported: Exported, written: Written) -> Config:
    """What of the configuration the export says."""
    return Config().with_changes({key: exported.config[key] for key in written.said})


def flags_of(text: str) -> dict[str, str]:
    """Flag → its value, "" where it takes none."""
    return {flag: value for flag, _, value in (line.partition(" ") for line in text.splitlines())}


def named(written: Written) -> set[str]:
    """Keys and columns that are named as not said."""
    return {line.partition(" = ")[0] for line in written.cannot}


__all__ = [
    "DENSE",
    "MIXTURE",
    "configurations",
    "exported_layouts",
    "flags_of",
    "layout_rows",
    "named",
    "plan_of",
    "sayable",
    "write",
]
