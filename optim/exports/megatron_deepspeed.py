"""Megatron-DeepSpeed: flags of ``pretrain_gpt.py``, and DeepSpeed's JSON beside them.

Flags are those of ``megatron/arguments.py`` of Megatron-DeepSpeed (github.com/deepspeedai/Megatron-DeepSpeed), which left
Megatron-LM in 2023 and has names of its own for experts (``--moe-expert-parallel-size``), for sequences over ranks
(``--ds-sequence-parallel-size``, Ulysses) and for recomputation (``--checkpoint-activations``).
"""

from __future__ import annotations

import json
from dataclasses import replace

from trine.optim.exports._account import Account, Written
from trine.optim.exports._exported import Exported
from trine.optim.exports._megatron_model import (
    add_batch,
    add_rotary,
    add_sizes,
    name_kinds,
    say_selective,
)
from trine.optim.exports._text import Flags
from trine.optim.exports.deepspeed import moves_checkpoints, tables_of
from trine.optim.plan.workload import Workload

__all__ = ["NAME", "TOOL", "export"]

NAME = "megatron-deepspeed"
TOOL = "Megatron-DeepSpeed"

_CONFIG = "ds_config.json"


def export(exported: Exported) -> Written:
    """``megatron.flags`` and ``ds_config.json``, which the flags name."""
    account = Account(exported, TOOL)
    flags = Flags()
    _add_model(flags, exported, account)
    _add_parallel(flags, exported, account)
    _add_pipeline(flags, exported, account)
    add_batch(flags, exported, account)
    _add_recomputation(flags, exported, account)
    _add_precision(flags, exported, account)
    config = exported.config
    flags.add("--deepspeed")
    flags.add("--deepspeed_config", _CONFIG)
    stage = min(exported.zero_stage, 1) if config.parallel.pipeline > 1 else exported.zero_stage
    flags.add("--zero-stage", stage)
    if config.offload.optimizer in ("cpu", "nvme") and stage:
        flags.add("--cpu-optimizer")
    if config.offload.parameters in ("cpu", "nvme") and stage == 3:
        flags.add("--remote-device", config.offload.parameters)
    if isinstance(config.data.workers, int) and account.takes("data.workers"):
        flags.add("--num-workers", config.data.workers)
    if stage < config.zero.stage:
        account.misses("zero.stage", "beside a pipeline DeepSpeed shards optimizer state alone: written as 1")
    tables = tables_of(
        replace(exported, config=config.with_changes({"zero.stage": stage})), account, apart=_FLAGS
    )
    # Clipping is a flag there, and the JSON's has to agree with it.
    flags.add("--clip-grad", 0.0)
    account.notes(
        "--clip-grad and gradient_clipping are written as 0.0, which clips nothing: set both to your norm"
    )
    return account.written({"megatron.flags": flags.text, _CONFIG: json.dumps(tables, indent=2) + "\n"})


#: What flags say here, which the JSON does for DeepSpeed alone.
_FLAGS = frozenset(
    {
        "checkpointing.every",
        "checkpointing.mode",
        "compute.attention",
        "data.workers",
        "parallel.context",
        "parallel.expert",
        "parallel.tensor",
    }
)


def _add_model(flags: Flags, exported: Exported, account: Account) -> None:
    workload = add_sizes(flags, exported, account)
    if workload is None:
        return
    if workload.latent is not None:
        account.notes("the model: it has no multi-head latent attention")
    elif workload.kv_heads != workload.heads:
        flags.add("--num-key-value-heads", workload.kv_heads)
    if workload.window:
        account.notes("the model: it has no sliding window")
    if workload.position_kind == "none":
        flags.add("--no-position-embedding")
    elif not workload.learned_positions:
        flags.add("--use-rotary-position-embeddings")
    add_rotary(flags, workload, "--rotary-position-embeddings-theta")
    if not workload.norm_bias:
        flags.add("--normalization", "rmsnorm")
    if not workload.dropout:
        flags.add("--attention-dropout", 0.0)
        flags.add("--hidden-dropout", 0.0)
    unlike = (
        ("norms over queries and keys", bool(workload.query_key_norm)),
        ("biases of queries, keys and values alone", bool(workload.attention_bias) and not workload.bias),
    )
    words = tuple(word for word, has in unlike if has)
    name_kinds(workload, account, "--rotary-position-embeddings-theta", words)
    if workload.is_mixture:
        _add_experts(flags, workload, account)


def _add_experts(flags: Flags, workload: Workload, account: Account) -> None:
    flags.add("--num-experts", workload.experts)
    flags.add("--topk", workload.experts_per_token)
    flags.add("--expert-interval", 1)  # every layer
    flags.add("--create-moe-param-group")  # ZeRO wants experts in a group of their own
    for word, has in (
        ("an expert's own size: --ffn-hidden-size is that of all", workload.expert_ffn != workload.ffn),
        ("shared experts", bool(workload.shared_experts)),
        ("dense layers before the mixtures", bool(workload.dense_layers)),
        ("more than two experts a token", workload.experts_per_token > 2),
    ):
        if has:
            account.notes(f"the model: it does not have {word}")


def _add_parallel(flags: Flags, exported: Exported, account: Account) -> None:
    parallel = exported.config.parallel
    if account.takes("parallel.tensor"):
        flags.add("--tensor-model-parallel-size", parallel.tensor)
    account.says("parallel.loss")  # its head and loss are always cut over the vocabulary
    if account.takes("parallel.context"):
        flags.add(
            "--ds-sequence-parallel-size", parallel.context
        )  # by heads, with all-to-all (Jacobs et al. 2023)
    if parallel.context > 1 and (parallel.tensor > 1 or parallel.pipeline > 1):
        account.notes(
            "--ds-sequence-parallel-size: it refuses sequence ranks beside tensor ranks and pipelines: take a layout without"
        )
    if parallel.context > 1:
        account.misses("parallel.sequence", "it cannot stand beside --ds-sequence-parallel-size")
    elif parallel.tensor == 1:
        account.misses(
            "parallel.sequence", "the sequence is split over tensor ranks, and parallel.tensor is 1"
        )
    elif account.takes("parallel.sequence"):
        flags.add("--sequence-parallel")
        account.notes("CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment: --sequence-parallel insists on it")
    if account.takes("parallel.expert"):
        flags.add("--moe-expert-parallel-size", parallel.expert)
    if parallel.pipeline > 1 and (exported.is_mixture or parallel.expert > 1):
        account.notes(
            "--num-experts beside --pipeline-model-parallel-size: its mixtures have no pipeline (examples_deepspeed/MoE): take a "
            "layout without"
        )
    account.misses("parallel.plan", "its own modules know how they are cut")
    if account.takes("compute.attention") and exported.config.compute.attention == "flash":
        flags.add("--use-flash-attn-v2")
    elif exported.config.compute.attention is not None:
        account.misses("compute.attention", "it has its own, and FlashAttention")


def _add_pipeline(flags: Flags, exported: Exported, account: Account) -> None:
    parallel = exported.config.parallel
    if not account.takes("parallel.pipeline"):
        flags.add("--no-pipeline-parallel")
        return
    flags.add("--pipeline-model-parallel-size", parallel.pipeline)
    account.says("parallel.microbatches")
    planned = None if exported.layout is None else exported.layout["schedule"]
    if planned == "zb-h1" and flags.has("--sequence-parallel"):  # what fits comes first
        account.says_column("schedule")
        account.says("parallel.schedule")
        account.notes(
            "schedule = zb-h1: --enable-zbh1-pipeline refuses --sequence-parallel beside it: written as 1F1B"
        )
    elif planned == "zb-h1":
        flags.add("--enable-zbh1-pipeline")
        account.says_column("schedule")
        account.says("parallel.schedule")
    elif (parallel.schedule or "1f1b").lower() == "1f1b":
        account.says("parallel.schedule")
    else:
        account.misses("parallel.schedule", "DeepSpeed's pipeline is 1F1B, or ZB-H1: written as 1F1B")
    account.misses("parallel.chunks", "DeepSpeed's pipeline has one stage a rank")
    if parallel.split == "auto":
        account.says("parallel.split")
    account.misses(
        "parallel.split", "it cuts by parameters: PipelineModule(partition_method=…) of the program"
    )


def _add_recomputation(flags: Flags, exported: Exported, account: Account) -> None:
    wanted = exported.config.checkpointing
    planned = "none" if exported.layout is None else str(exported.layout["recompute"])
    if wanted.mode == "full" and planned != "budget" and wanted.every == 1 and not wanted.modules:
        account.says("checkpointing.mode")
        flags.add("--checkpoint-activations")
        flags.add("--deepspeed-activation-checkpointing")
    elif wanted.mode == "selective":
        say_selective(exported, account)
        flags.add("--recompute-granularity", "selective")
    elif wanted.mode == "full":
        account.misses("checkpointing.mode", "all layers or none: written as all")
        account.misses(
            "checkpointing.every", "its --checkpoint-num-layers counts layers that are recomputed together"
        )
        flags.add("--checkpoint-activations")
        flags.add("--deepspeed-activation-checkpointing")
    else:
        account.misses("checkpointing.mode", "it has all layers, attention, or none")
    if flags.has("--deepspeed-activation-checkpointing") and moves_checkpoints(exported.config):
        account.says("offload.activations")
        flags.add("--checkpoint-in-cpu")
    account.misses("checkpointing.modules", "it has names of no modules")
    account.misses("checkpointing.operators", "it knows no operators")
    account.misses("checkpointing.budget_bytes", "it counts no bytes")


def _add_precision(flags: Flags, exported: Exported, account: Account) -> None:
    precision = exported.config.precision
    if precision.dtype in ("bf16", "fp16") and precision.master_weights:
        flags.add(f"--{precision.dtype}")
        account.says("precision.dtype")
