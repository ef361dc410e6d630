"""Accelerate's YAML, which ``accelerate launch --config_file`` reads: FSDP2, DeepSpeed, Megatron-LM or plain replicas.

Keys are those of ``accelerate/commands/config/config_args.py`` and of the arguments in ``accelerate/commands/launch.py`` that
its tables become (github.com/huggingface/accelerate, 1.15). What a configuration says decides which of the four it is:

    MEGATRON_LM   a pipeline; tensor ranks whose optimizer state alone is in host memory
    DEEPSPEED     ``engine = "deepspeed"``, state on a disk, or zero.stage 1 alone: what FSDP has not
    FSDP          zero.stage 2 and 3, and degrees beside data parallelism (``parallelism_config``)
    MULTI_GPU     replicas; NO for one process
"""

from __future__ import annotations

from typing import Any

from trine.optim.exports._account import Account, Written
from trine.optim.exports._exported import Exported
from trine.optim.exports._from_layout import stage_layers
from trine.optim.exports._megatron_model import say_selective
from trine.optim.exports._text import yaml_text

__all__ = ["NAME", "TOOL", "export"]

NAME = "accelerate"
TOOL = "Accelerate 1"

_PROGRAM = "the program's"
Tables = dict[str, Any]


def export(exported: Exported) -> Written:
    """``accelerate.yaml``."""
    account = Account(exported, TOOL)
    kind = _kind(exported)
    found: Tables = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind}
    found |= _processes(exported, account)
    if kind == "DEEPSPEED":
        found["deepspeed_config"] = _deepspeed(exported, account)
    elif kind == "FSDP":
        found["fsdp_config"] = _fsdp(exported, account)
        found |= _degrees(exported, account)
    elif kind == "MEGATRON_LM":
        found["megatron_lm_config"] = _megatron(exported, account)
    else:
        account.says("parallel.data", "zero.stage")
    found |= _precision(exported, account, kind)
    found |= _compilation(exported, account)
    _name_the_program(exported, account)
    return account.written({"accelerate.yaml": yaml_text(found)}, kind)


def _kind(exported: Exported) -> str:
    config = exported.config
    parallel, offload, stage = config.parallel, config.offload, exported.zero_stage
    moves_state_alone = offload.optimizer == "cpu" != offload.parameters and stage == 1
    if parallel.pipeline > 1 or (parallel.tensor > 1 and moves_state_alone):
        return "MEGATRON_LM"
    if config.engine == "deepspeed" or "nvme" in (offload.optimizer, offload.parameters):
        return "DEEPSPEED"
    if stage >= 2 or parallel.tensor > 1 or parallel.context > 1:
        return "FSDP"
    if stage == 1:
        return "DEEPSPEED"
    return "NO" if exported.devices == 1 else "MULTI_GPU"


def _processes(exported: Exported, account: Account) -> Tables:
    account.says("engine")
    if exported.devices is None:
        account.notes("num_processes: not known: give --devices, or accelerate launch --num_processes")
        return {"num_processes": -1, "num_machines": exported.nodes or 1, "machine_rank": 0}
    found = {"num_processes": exported.devices, "num_machines": exported.nodes or 1, "machine_rank": 0}
    if (exported.nodes or 1) > 1:
        account.notes(
            "machine_rank is 0, and main_process_ip is not in it: give both to accelerate launch on each machine"
        )
    return found


# --- FSDP --------------------------------------------------------------------------------------


def _fsdp(exported: Exported, account: Account) -> Tables:
    """Of the second version; parameters' blocks are the program's to name, or Transformers' own."""
    zero = exported.config.zero
    if zero.stage == 0:
        account.notes(
            "zero.stage = 0: degrees beside data parallelism go with FSDP alone there: written as stage 2"
        )
    if zero.stage == 1:
        account.misses("zero.stage", "it shards gradients beside optimizer state: written as stage 2")
    account.says("zero.stage")
    frees = zero.stage == 3 and zero.reshard_after_forward is not False
    if zero.stage == 3 and not frees:
        account.misses(
            "zero.reshard_after_forward", "parameters that are kept are stage 2 there: written as that"
        )
    if zero.reshard_after_forward is True and zero.stage == 3:
        account.says("zero.reshard_after_forward")
    account.misses(
        "zero.reshard_after_forward", "it frees parameters or keeps them, and knows no second group"
    )
    account.misses("zero.prefetch", "FSDP2 fetches a block ahead by itself")
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": frees,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    } | _fsdp_memory(exported, account)


def _fsdp_memory(exported: Exported, account: Account) -> Tables:
    """What FSDP moves to host memory, and what is recomputed."""
    offload, checkpointing = exported.config.offload, exported.config.checkpointing
    moves = offload.optimizer == offload.parameters == "cpu"
    if moves:
        account.says("offload.optimizer", "offload.parameters")
    for key in ("optimizer", "parameters"):
        account.misses(
            f"offload.{key}", "it puts parameters, gradients and optimizer state into host memory, or none"
        )
    full = checkpointing.mode == "full"
    found: Tables = {"fsdp_offload_params": moves, "fsdp_activation_checkpointing": full}
    if full:
        account.says("checkpointing.mode")
    if full and offload.activations == "cpu":
        account.says("offload.activations")
        found["fsdp_activation_checkpointing_offload"] = True
    account.misses("offload.activations", 'it has host memory, of what checkpointing.mode = "full" keeps')
    account.misses("checkpointing.mode", "it recomputes whole blocks, or none")
    account.misses("checkpointing.every", "it recomputes all blocks: written so")
    return found


def _degrees(exported: Exported, account: Account) -> Tables:
    """All of them, or none where they say nothing: replicas × shards × tensor × context make the processes."""
    parallel = exported.config.parallel
    if parallel.expert > 1:
        account.misses("parallel.expert", "it spreads no experts: its ranks are counted as shards")
    shards = (
        1
        if exported.replicas is None or exported.data_ranks is None
        else exported.data_ranks // exported.replicas
    )
    replicas = exported.replicas
    if exported.config.zero.stage == 0:
        shards, replicas = (exported.data_ranks or 1), 1
    account.says("parallel.tensor", "parallel.context", "parallel.data")
    if parallel.shard != "auto":
        account.says("parallel.shard")
    account.misses("parallel.shard", "links are not measured: write the number of shards")
    if parallel.tensor == parallel.context == 1 and (replicas or 1) == 1:
        return {}
    if exported.devices is None and parallel.shard is None:
        account.notes("dp_shard_size: the number of ranks is not known: give --devices")
    sizes = {"tp": parallel.tensor, "cp": parallel.context, "dp_replicate": replicas or 1, "dp_shard": shards}
    return {"parallelism_config": {f"parallelism_config_{name}_size": size for name, size in sizes.items()}}


# --- DeepSpeed ---------------------------------------------------------------------------------


def _deepspeed(exported: Exported, account: Account) -> Tables:
    """The few keys that Accelerate has for it; the others are in a file of DeepSpeed's own (``trine export --to deepspeed``)."""
    config = exported.config
    offload, stage = config.offload, exported.zero_stage
    account.says("zero.stage", "parallel.data")
    found: Tables = {"zero_stage": stage, "zero3_init_flag": stage == 3}
    for ours, theirs, least in (("optimizer", "offload_optimizer", 1), ("parameters", "offload_param", 3)):
        device = getattr(offload, ours)
        if device in ("cpu", "nvme") and stage >= least:
            account.says(f"offload.{ours}")
            found[f"{theirs}_device"] = device
            if device == "nvme":
                account.says("offload.path")
                found[f"{theirs}_nvme_path"] = offload.path
        account.misses(
            f"offload.{ours}", f"DeepSpeed has host memory and a disk for it, from zero.stage = {least} on"
        )
    if exported.batch.count is not None:
        found["gradient_accumulation_steps"] = exported.batch.count
        account.says("accumulation.steps")
    for key in ("tensor", "context", "expert"):
        account.leaves(
            f"parallel.{key}",
            "is in DeepSpeed's own file: trine export --to deepspeed, and deepspeed_config_file",
        )
    account.misses("parallel.shard", "DeepSpeed shards over all data-parallel ranks")
    account.misses("offload.path", "is of a disk, and nothing lies there")
    return found


# --- Megatron-LM -------------------------------------------------------------------------------


def _megatron(exported: Exported, account: Account) -> Tables:
    """Fields of ``MegatronLMPlugin``."""
    config = exported.config
    parallel = config.parallel
    account.says("parallel.tensor", "parallel.context", "parallel.expert", "parallel.data")
    account.says("parallel.loss")  # its head is always cut over the vocabulary
    found: Tables = {"tp_degree": parallel.tensor}
    if parallel.context > 1:
        found["context_parallel_size"] = parallel.context
    if parallel.expert > 1:
        found["expert_model_parallel_size"] = parallel.expert
    if exported.is_mixture and parallel.tensor > 1:
        found["expert_tensor_parallel_size"] = exported.expert_parts
    if parallel.tensor == 1:
        account.misses(
            "parallel.sequence", "the sequence is split over tensor ranks, and parallel.tensor is 1"
        )
    found["sequence_parallelism"] = parallel.sequence and parallel.tensor > 1
    account.says("parallel.sequence")
    found |= _megatron_pipeline(exported, account)
    found["use_distributed_optimizer"] = exported.zero_stage >= 1
    if config.zero.stage > 1:
        account.misses("zero.stage", "the distributed optimizer shards optimizer state alone: written as 1")
    account.says("zero.stage")
    account.misses("parallel.shard", "state is sharded over all data-parallel ranks")
    found["gradient_clipping"] = 0.0
    account.notes("gradient_clipping is written as 0.0, which clips nothing: set it to your norm")
    found |= _megatron_recomputation(exported, account)
    if config.offload.optimizer == "cpu" and exported.zero_stage:
        account.says("offload.optimizer")
        found |= {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
    return {f"megatron_lm_{name}": value for name, value in found.items()}


def _megatron_pipeline(exported: Exported, account: Account) -> Tables:
    parallel, batch, workload = exported.config.parallel, exported.batch, exported.workload
    account.says("parallel.pipeline")
    found: Tables = {"pp_degree": parallel.pipeline}
    if batch.count is not None:
        account.says("parallel.microbatches", "accumulation.steps")
        found["num_micro_batches"] = batch.count
    account.misses("parallel.microbatches", "how many is not known")
    if (parallel.schedule or "1f1b").lower() == "1f1b":
        account.says("parallel.schedule")
    account.misses("parallel.schedule", "it has 1F1B: written as that")
    account.misses(
        "parallel.chunks",
        "interleaved stages are no key of the file: num_layers_per_virtual_pipeline_stage of the plugin",
    )
    account.misses("parallel.split", "stages are equal")
    if workload is not None and workload.layers % parallel.pipeline:
        account.notes(
            f"{workload.layers} layers do not divide over {parallel.pipeline} stages, which Megatron-LM wants: "
            "other_megatron_args of the plugin has pipeline_model_parallel_layout"
        )
    return found


def _megatron_recomputation(exported: Exported, account: Account) -> Tables:
    wanted, workload = exported.config.checkpointing, exported.workload
    if wanted.mode == "selective":
        say_selective(exported, account)
        return {"recompute_granularity": "selective"}
    if wanted.mode == "full" and wanted.every == 1:
        account.says("checkpointing.mode")
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if wanted.mode == "full" and workload is not None:
        account.says("checkpointing.mode", "checkpointing.every")
        layers = -(-stage_layers({"pipeline": exported.config.parallel.pipeline}, workload) // wanted.every)
        if exported.layout is not None and int(exported.layout["recomputed_layers"]):
            layers = int(exported.layout["recomputed_layers"])
            account.says_column("recomputed_layers")
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    account.misses(
        "checkpointing.mode", "how many layers of a stage that is is not known: recompute_num_layers"
    )
    account.misses("checkpointing.every", "the model's layers are not known: recompute_num_layers")
    return {}


# --- all of them -------------------------------------------------------------------------------


def _precision(exported: Exported, account: Account, kind: str) -> Tables:
    precision = exported.config.precision
    dtype = precision.dtype if precision.dtype in ("bf16", "fp16") else None
    account.says("precision.dtype")
    masters = kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    if masters or dtype is None:
        account.says("precision.master_weights")
    account.misses("precision.master_weights", "replicas train by autocast over float32 parameters there")
    if masters and dtype is not None and not precision.master_weights:
        account.notes(f"precision.master_weights: parameters are {dtype} there, beside float32 masters")
    if precision.float8:
        if kind == "DEEPSPEED":
            account.misses("precision.float8", "DeepSpeed computes in bf16: written as that")
            return {"mixed_precision": dtype or "bf16"}
        account.says("precision.float8")
        return {"mixed_precision": "fp8", "fp8_config": {"fp8_backend": "ao"}}
    if precision.loss_scale == "auto":
        account.says("precision.loss_scale")
    return {"mixed_precision": dtype or "no"}


def _compilation(exported: Exported, account: Account) -> Tables:
    wanted = exported.config.compute.compile
    account.says("compute.compile")
    if not wanted:
        return {}
    return {
        "dynamo_config": {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": "default",
            "dynamo_use_regional_compilation": wanted == "blocks",
        }
    }


def _name_the_program(exported: Exported, account: Account) -> None:
    """What Accelerate takes as objects in the program."""
    batch = exported.batch
    account.misses("accumulation.micro_batch", "the loader's batch_size")
    for key in ("accumulation.global_batch", "accumulation.steps"):
        account.misses(key, f"{_PROGRAM}: Accelerator(gradient_accumulation_steps={batch.count or '…'})")
    account.misses("precision.loss_scale", f"{_PROGRAM}: GradScalerKwargs(init_scale=…)")
    for key in (
        *("communication.bucket_mib", "communication.gradient_as_view", "communication.static_graph"),
        *("communication.compression", "communication.compression_rank"),
    ):
        account.misses(key, f"{_PROGRAM}: DistributedDataParallelKwargs(…), of replicas")
    for key in ("data.workers", "data.prefetch", "data.pin_memory"):
        account.misses(key, f"{_PROGRAM}: the loader's")
    for key in ("checkpointing.mode", "checkpointing.every"):
        account.misses(key, f"{_PROGRAM}: model.gradient_checkpointing_enable(), of Transformers")
    account.misses("compute.attention", f"{_PROGRAM}: from_pretrained(…, attn_implementation=…)")
