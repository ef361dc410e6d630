"""Layouts of published runs: degrees, schedule, batch, recomputation and precision, as a row's cells say or leave open."""

from __future__ import annotations

import re
from typing import Any

from planner_cells import Missing, Row

from trine.optim.plan import Workload
from trine.optim.plan.constants import Stack

__all__ = ["layout_of", "zero_stage_of"]

#: The day from which on a log's runs that could be in fp16 or bf16 were in bf16, as it says.
_BF16_FROM = "02-28"
#: Software whose stated batch is a rank's whole one, also under a pipeline (torchtitan's ``local_batch_size`` and
#: ``pipeline_parallel_microbatch_size``).
_CUTS_LOCAL_BATCHES = "torchtitan"
#: Software that recomputes where a recipe asks for nothing (MaxText's ``remat_policy: full``).
_RECOMPUTES_UNASKED = "maxtext"


def layout_of(row: Row, workload: Workload, stack: Stack, devices: int) -> tuple[dict[str, Any], int]:
    """A run's layout, columns by name as :meth:`Layouts.of` takes them, and its global batch.

    Raises ``Missing`` where the row says none, or degrees that do not divide its devices.
    """
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
    if stack.name == _CUTS_LOCAL_BATCHES and pipeline > 1 and microbatches == 1:
        micro_batch, microbatches = _cut(row, micro_batch, pipeline)
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
        "zero_stage": max(zero_stage_of(row), int(stack.split_optimizer)),
        "shard": _shard(row, data * context, context),
        "sequence": int(tensor > 1 and (sequence > 0 if sequence is not None else stack.sequence)),
        **_recompute(row, workload, stack, pipeline),
        "precision": _precision(row, stack),
    }
    return layout, batch


def zero_stage_of(row: Row) -> int:
    """What of the training state is sharded over data ranks: 0 to 3, as its cell says or, where that is empty, the framework's."""
    text = row.text("zero_stage").lower()
    if not text:
        said = re.search(r"zero[- ]?([1-3])\b|(fsdp|fully.?shard)", row.text("framework").lower())
        return 0 if said is None else int(said[1] or 3)
    if "no_shard" in text or text == "ddp":
        return 0
    if "shard_grad_op" in text or "zero2" in text:
        return 2
    if re.search(r"fsdp|hsdp|full|hybrid|zero ?(?:\+\+|pp\b)|mics", text):
        return 3
    if re.search(r"dist\w*.?opt", text):
        return 1
    return min(int(row.number("zero_stage") or 0), 3)


def _shard(row: Row, ranks: int, context: int) -> int:
    """Data ranks that share state, 0 for all: where notes say how many, or a node's where state is sharded in groups."""
    said = re.search(
        r"\b(?:fsdp|shard)\s*=\s*(\d+)(?:\s*\((\d+) at (\d+) gpus\))?", row.text("notes").lower()
    )
    group = 0
    if said is not None:
        group = int(said[2]) if said[3] and int(said[3]) == row.count("n_gpus") else int(said[1])
    elif re.search(r"hsdp|hybrid|mics", row.text("zero_stage").lower()):
        group = row.count("gpus_per_node") or 8
        row.assume(f"state shared by {group} ranks")
    fits = 0 < group < ranks and ranks % group == 0 and group % context == 0
    return group // context if fits else 0


def _schedule(row: Row, workload: Workload, pipeline: int) -> tuple[str, int]:
    text = row.text("pp_schedule").lower()
    chunks = row.count("vpp") or 1
    if pipeline == 1:
        return "1f1b", 1
    if "zb-2p" in text or "zb2p" in text or "zb-h2" in text:
        return "zb-h2", 1
    if re.search(r"zb-?v|zero.?bubble.?v\b", text):
        return "zb-v", 2
    if re.search(r"zb-?1p|zb-?h1", text) or re.fullmatch(r"zero.?bubble|zb", text):
        return "zb-h1", 1
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
    elif row.count("vpp") is None and "interleaved" in text and _is_even(workload.layers, 2 * pipeline):
        row.assume("2 chunks a rank")
        chunks = 2
    return ("interleaved", chunks) if chunks > 1 else ("1f1b", 1)


def _is_even(layers: int, stages: int) -> bool:
    """Whether stages are even, or would be with the embedding and the head as a layer each."""
    return layers % stages == 0 or (layers + 2) % stages == 0


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


def _cut(row: Row, batch: int, pipeline: int) -> tuple[int, int]:
    """Micro-batch, and micro-batches, of a local batch that the software itself cuts: into as many as there are stages."""
    parts = next(count for count in range(min(pipeline, batch), 0, -1) if batch % count == 0)
    row.assume(f"the local batch of {batch} cut into {parts} micro-batches")
    return batch // parts, parts


def _recompute(row: Row, workload: Workload, stack: Stack, pipeline: int) -> dict[str, Any]:
    text = row.text("recompute").lower()
    if not text:
        row.assume(f"recomputation {stack.recompute}")
        return {"recompute": stack.recompute}
    if "default" in text and stack.name == _RECOMPUTES_UNASKED:
        row.assume(f"recomputation {stack.recompute}, {stack.name}'s own")
        return {"recompute": stack.recompute}
    if text in ("0", "disabled") or text.startswith(("none", "no ", "off", "false")) or text == "no":
        return {"recompute": "none"}
    if "selective layer" in text:
        # Every second layer.
        return {"recompute": "budget", "recomputed_layers": max(1, workload.layers // pipeline // 2)}
    if "selective" in text and "moe" in text.partition("(")[2].split(")")[0].replace("moe_act", ""):
        row.assume("full recomputation: experts are most of a layer")
        return {"recompute": "full"}
    if "selective" in text:
        return {"recompute": "selective"}
    if layers := re.search(r"\b(\d+) of (\d+) layers", text):
        return {"recompute": "budget", "recomputed_layers": max(1, round(int(layers[1]) / pipeline))}
    if re.search(r"\bsac\b|core_attn|mla_up_proj|layernorm|\bmoe_act\b", text):
        return {"recompute": "selective"}
    if "full" in text or "activation checkpoint" in text or text in ("true", "yes", "block", "uniform"):
        return {"recompute": "full"}
    row.assume(f"recomputation {stack.recompute} for {text!r}")
    return {"recompute": stack.recompute}


def _precision(row: Row, stack: Stack) -> str:
    text = row.text("precision").lower()
    if "fp4" in text:
        row.assume("fp4 as fp8 with two thirds of its peak's gain")
        return "fp8"
    if re.search(r"fp8|float8|mx-?fp8|fp-8|e4m3", text):
        return "fp8"
    if text == "bf16/fp16" and (day := re.search(r"\b\d\d-\d\d\b", row.text("source_ref"))):
        return "bf16" if day[0] >= _BF16_FROM else "fp16"
    if found := re.search(r"bf16|bfloat16|fp16|float16|tf32|fp32|float32", text):
        return found[0].replace("bfloat", "bf").replace("float", "fp")
    half = "fp16" if "v100" in row.text("gpu").lower() else "bf16"
    half = stack.precision if half == "bf16" else half
    row.assume(f"precision {half}")
    return half
