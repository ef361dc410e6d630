"""Colossal-AI's plugins, as Python: ``booster = Booster(plugin=plugin())``.

Arguments are those of ``colossalai/booster/plugin`` of release 0.5 (github.com/hpcaitech/ColossalAI): ``HybridParallelPlugin``
for most layouts, ``MoeHybridParallelPlugin`` where experts are spread, ``GeminiPlugin`` where parameters are sharded.
"""

from __future__ import annotations

from typing import Any

from trine.optim.exports._account import Account, Written
from trine.optim.exports._exported import Exported

__all__ = ["NAME", "TOOL", "export"]

NAME = "colossalai"
TOOL = "Colossal-AI 0.5"

_HYBRID, _EXPERTS, _GEMINI = "HybridParallelPlugin", "MoeHybridParallelPlugin", "GeminiPlugin"
_STYLES = {
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "interleaved1f1b": "interleaved",
    "zbv": "zbv",
    "zbvzerobubble": "zbv",
}
#: ``zero_bucket_size_in_m`` counts 2²⁰ elements, of two bytes each in low precision.
_ELEMENT_BYTES = 2
Arguments = dict[str, Any]


def export(exported: Exported) -> Written:
    """``trine_colossalai.py`` with a function ``plugin()``."""
    account = Account(exported, TOOL)
    account.says("engine")
    name = _plugin_of(exported)
    arguments = _gemini(exported, account) if name == _GEMINI else _hybrid(exported, account, name)
    arguments |= _precision(exported, account, name, sharded=arguments.get("zero_stage", 3) > 0)
    if name != _GEMINI:
        arguments |= _replicas(exported, account, name, arguments["zero_stage"])
    _name_the_program(exported, account)
    return account.written({"trine_colossalai.py": _module(name, arguments)})


def _plugin_of(exported: Exported) -> str:
    parallel = exported.config.parallel
    if parallel.expert > 1:
        return _EXPERTS
    alone = parallel.pipeline == 1 and parallel.context == 1
    return _GEMINI if exported.zero_stage == 3 and alone else _HYBRID


def _module(name: str, arguments: Arguments) -> str:
    scheduled = "scheduler_nodes" in arguments
    lines = [
        '"""A plugin of Colossal-AI 0.5, written by trine export."""',
        "",
        f"from colossalai.booster.plugin import {name}",
        "",
        "",
        f"def plugin({'scheduler_nodes' if scheduled else ''}) -> {name}:",
        '    """For Booster(plugin=…); after colossalai.launch_from_torch()."""',
        f"    return {name}(",
        *(
            f"        {key}={value if key == 'scheduler_nodes' else repr(value)},"
            for key, value in arguments.items()
        ),
        "    )",
    ]
    return "".join(f"{line}\n" for line in lines)


def _hybrid(exported: Exported, account: Account, name: str) -> Arguments:
    config = exported.config
    parallel = config.parallel
    account.says("parallel.tensor", "parallel.pipeline", "parallel.data", "parallel.expert", "parallel.loss")
    found: Arguments = {"tp_size": parallel.tensor, "pp_size": parallel.pipeline}
    if name == _EXPERTS:
        found["ep_size"] = parallel.expert
    found["zero_stage"] = _stage(exported, account, name)
    found |= _sequence(exported, account, name)
    found |= _pipeline(exported, account)
    if config.offload.optimizer == "cpu" and found["zero_stage"]:
        account.says("offload.optimizer")
        found["cpu_offload"] = True
    account.misses(
        "offload.parameters", "parameters stay on the device: GeminiPlugin moves them, without a pipeline"
    )
    account.misses("parallel.shard", "state is sharded over all data-parallel ranks")
    account.misses("parallel.plan", "a policy of its own says how a model is cut: custom_policy")
    return found


def _stage(exported: Exported, account: Account, name: str) -> int:
    """The stage that both constructors take; without one, experts are left to DistributedDataParallel, which they refuse."""
    parallel, stage = exported.config.parallel, exported.zero_stage
    most = 1 if parallel.pipeline > 1 or name == _EXPERTS else 2
    if stage > most:
        account.misses("zero.stage", f"beside these degrees it shards up to stage {most}: written as {most}")
    account.says("zero.stage")
    if name == _EXPERTS and parallel.pipeline == 1 and stage == 0:
        account.notes("zero.stage: experts without a pipeline want optimizer state sharded: written as 1")
        return 1
    return min(stage, most)


def _sequence(exported: Exported, account: Account, name: str) -> Arguments:
    """Over tensor ranks ("split_gather", as Korthikanti's), or over ranks of their own; one of them.

    The latter exchange keys and values in a ring ("ring_attn"), for which the plugin of experts has no case: it has
    "all_to_all", over heads. Its models refuse either beside a pipeline (``colossalai/shardformer/policies/mixtral.py``).
    """
    parallel = exported.config.parallel
    if name == _EXPERTS and parallel.pipeline > 1:
        why = "its mixtures split no sequence beside a pipeline: left out"
        account.misses("parallel.context", f"{why}, and these ranks see batches of their own there")
        account.misses("parallel.sequence", why)
        return {}
    if name == _EXPERTS and parallel.context > 1:
        account.notes(
            "parallel.context: experts' plugin has no ring attention: written as all_to_all, over heads"
        )
    if account.takes("parallel.context"):
        account.misses(
            "parallel.sequence", "one way to split the sequence at a time: that over context ranks is written"
        )
        return {
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "all_to_all" if name == _EXPERTS else "ring_attn",
            "sp_size": parallel.context,
        }
    if parallel.tensor == 1:
        account.misses(
            "parallel.sequence", "the sequence is split over tensor ranks, and parallel.tensor is 1"
        )
    elif account.takes("parallel.sequence"):
        return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
    return {}


def _pipeline(exported: Exported, account: Account) -> Arguments:
    parallel, batch = exported.config.parallel, exported.batch
    if parallel.pipeline == 1:
        return {}
    schedule = (parallel.schedule or ("interleaved" if parallel.chunks > 1 else "1f1b")).lower()
    style = _STYLES.get(schedule)
    if style is None:
        account.misses("parallel.schedule", "it has 1f1b, interleaved and zbv: written as 1f1b")
    account.says("parallel.schedule")
    found: Arguments = {"pp_style": style or "1f1b"}
    if style in ("interleaved", "zbv"):
        found["num_model_chunks"] = 2 if style == "zbv" else max(2, parallel.chunks)
        account.says("parallel.chunks")
    account.misses("parallel.chunks", "several stages a rank are of its interleaved style")
    if style == "zbv":
        found["scheduler_nodes"] = "scheduler_nodes"
        account.notes(
            "scheduler_nodes: its order for zbv is made from measured times, by colossalai.pipeline.schedule.v_schedule: "
            "pass it to plugin(…)"
        )
    if parallel.microbatches is not None or batch.count is not None:
        account.says("parallel.microbatches")
        found["num_microbatches"] = parallel.microbatches or batch.count
    elif batch.micro is not None:
        found["microbatch_size"] = batch.micro
    else:
        found["num_microbatches"] = 2 * parallel.pipeline
        account.notes(f"num_microbatches: not known: written as {2 * parallel.pipeline}, twice the stages")
    if parallel.split == "auto":
        account.says("parallel.split")
    account.misses("parallel.split", "it takes counts of layers: num_layers_per_stage")
    return found


def _gemini(exported: Exported, account: Account) -> Arguments:
    """ZeRO-3 by chunks (Fang et al. 2021); its static policy says which share of what lies in host memory."""
    config = exported.config
    parallel, offload = config.parallel, config.offload
    account.says("zero.stage", "parallel.tensor", "parallel.loss")
    found: Arguments = {"placement_policy": "static", "shard_param_frac": 1.0, "tp_size": parallel.tensor}
    if offload.optimizer == "cpu" or offload.parameters == "cpu":
        found["offload_optim_frac"] = 1.0
    if offload.parameters == "cpu":
        account.says("offload.parameters")
        found["offload_param_frac"] = 1.0
        if offload.optimizer != "cpu":
            account.notes("offload.parameters: optimizer state goes to host memory with them there")
    if offload.optimizer == "cpu":
        account.says("offload.optimizer")
    if parallel.tensor == 1:
        account.misses(
            "parallel.sequence", "the sequence is split over tensor ranks, and parallel.tensor is 1"
        )
    elif account.takes("parallel.sequence"):
        found["enable_sequence_parallelism"] = True
    account.says("parallel.data")
    replicas = exported.replicas
    if parallel.shard is not None and replicas is not None:
        account.says("parallel.shard")
        found["extra_dp_size"] = replicas
    account.misses("parallel.shard", "how many replicas that leaves is not known: give --devices")
    if isinstance(config.zero.prefetch, int) and account.takes("zero.prefetch"):
        found["max_prefetch"] = config.zero.prefetch
    if (exported.batch.count or 1) > 1:
        found["enable_gradient_accumulation"] = True
    if account.takes("zero.reshard_after_forward") and config.zero.reshard_after_forward is not True:
        account.notes(
            "zero.reshard_after_forward: Gemini frees chunks by itself: shard_param_frac below 1.0 keeps some"
        )
    return found


def _precision(exported: Exported, account: Account, name: str, sharded: bool) -> Arguments:
    precision = exported.config.precision
    dtype = precision.dtype or "fp32"
    if sharded and dtype == "fp32":
        why = f"{'Gemini' if name == _GEMINI else 'its ZeRO'} has bf16 and fp16: written as bf16"
        if precision.dtype is None:
            account.notes(f"precision.dtype: {why}")
        account.misses("precision.dtype", why)
        dtype = "bf16"
    account.says("precision.dtype", "precision.master_weights")
    found: Arguments = {"precision": dtype}
    if dtype in ("bf16", "fp16") and not precision.master_weights:
        account.notes(f"precision.master_weights: parameters are {dtype} there, beside float32 masters")
    if isinstance(precision.loss_scale, int | float) and account.takes("precision.loss_scale"):
        found["initial_scale"] = float(precision.loss_scale)
        account.notes("precision.loss_scale: it begins there, and moves")
    account.says("precision.loss_scale")
    if account.takes("precision.float8"):
        found["use_fp8"] = True
    return found


def _replicas(exported: Exported, account: Account, name: str, stage: int) -> Arguments:
    communication = exported.config.communication
    found: Arguments = {}
    if isinstance(communication.bucket_mib, int | float) and account.takes("communication.bucket_mib"):
        if stage == 0:
            found["ddp_bucket_cap_mb"] = max(1, round(communication.bucket_mib))
        else:
            found["zero_bucket_size_in_m"] = max(1, round(communication.bucket_mib / _ELEMENT_BYTES))
    if name == _EXPERTS and communication.overlap is True:  # which it turns off, and shards besides
        account.misses("communication.overlap", "experts that no token visits would have it wait for ever")
    if stage and communication.overlap is not None and account.takes("communication.overlap"):
        found["overlap_communication"] = communication.overlap and name != _EXPERTS
    elif communication.overlap is True:
        account.says("communication.overlap")
    for ours, theirs in (("gradient_as_view", "gradient_as_bucket_view"), ("static_graph", "static_graph")):
        if getattr(communication, ours) is not None and account.takes(f"communication.{ours}"):
            found[theirs] = getattr(communication, ours)
    return found


def _name_the_program(exported: Exported, account: Account) -> None:
    """What the program, or the model, says there."""
    batch = exported.batch
    sizes = f"micro-batches of {batch.micro or '…'}, {batch.count or '…'} a step"
    for key in ("accumulation.micro_batch", "accumulation.global_batch", "accumulation.steps"):
        account.misses(key, f"the loader's and the loop's: {sizes}")
    for key in ("checkpointing.mode", "checkpointing.every"):
        account.misses(
            key,
            "the model's: model.gradient_checkpointing_enable(); gradient_checkpoint_config says of which layers",
        )
    account.misses("compute.attention", "enable_flash_attention=True, where the model has it")
    account.misses(
        "compute.fuse", "enable_fused_normalization=True and enable_jit_fused=True, where the model has them"
    )
    account.misses(
        "communication.compression",
        "gradients travel in the parameters' type: fp8_communication=True is its own",
    )
