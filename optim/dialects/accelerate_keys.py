"""Every key that a file of Accelerate 1 may have, and what becomes of it here.

From ``ClusterConfig``, the questions of ``accelerate config`` and the arguments of ``accelerate launch`` that the file's
tables become; a test holds the table equal to the installed package.
"""

from __future__ import annotations

from collections.abc import Mapping

from trine.optim.dialects.rows import Row, accepted, refused, translated

__all__ = ["DDP_ROWS", "DDP_ROWS_BY_PATH", "ROWS", "ROWS_BY_PATH"]

_LAUNCHER = "how processes are started: torchrun's, or Accelerate's own launcher still"
_STRUCTURE = "blocks are found by the model's structure"
_STATE = "engine.save writes sharded state that any layout reads"

_PROCESSES = (
    translated("distributed_type", "zero.stage, or what its own table says"),
    translated("mixed_precision", "precision.dtype, precision.master_weights, precision.float8"),
    translated("num_processes", "ranks, for what depends on them"),
    refused("compute_environment", "jobs of SageMaker are not started here", "LOCAL_MACHINE", 0, None),
    *(
        accepted(name, _LAUNCHER)
        for name in (
            *(
                "num_machines",
                "machine_rank",
                "gpu_ids",
                "main_process_ip",
                "main_process_port",
                "rdzv_backend",
            ),
            *("same_network", "main_training_function", "enable_cpu_affinity", "num_cpu_threads_per_process"),
            *("command_file", "commands", "use_cpu"),
        )
    ),
    accepted("mpirun_config", _LAUNCHER, whole=True),
    accepted("debug", "collectives are always watched: trine.profile"),
    *(
        refused(name, "TPUs are not trained on here: take it out", None, False, "", "no", [])
        for name in (
            "tpu_name",
            "tpu_zone",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_env",
            "downcast_bf16",
        )
    ),
)

_FSDP = (
    translated("fsdp_config.fsdp_version", "zero.stage"),
    translated("fsdp_config.fsdp_sharding_strategy", "zero.stage, parallel.shard"),
    translated("fsdp_config.fsdp_reshard_after_forward", "zero.stage"),
    translated("fsdp_config.fsdp_offload_params", "offload.parameters, offload.optimizer"),
    translated("fsdp_config.fsdp_activation_checkpointing", "checkpointing.mode"),
    translated("fsdp_config.fsdp_activation_checkpointing_offload", "offload.activations"),
    translated("fsdp_config.fsdp_forward_prefetch", "zero.prefetch"),
    *(
        accepted(f"fsdp_config.fsdp_{name}", _STRUCTURE)
        for name in ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params")
    ),
    accepted(
        "fsdp_config.fsdp_backward_prefetch",
        "FSDP2 fetches a block ahead by itself: zero.prefetch says how many",
    ),
    accepted("fsdp_config.fsdp_state_dict_type", _STATE),
    accepted("fsdp_config.fsdp_use_orig_params", "parameters keep their names and the optimizer its groups"),
    accepted(
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "how the program loads a model; ranks begin as rank 0 is",
    ),
    accepted("fsdp_config.fsdp_sync_module_states", "ranks always begin as rank 0 is"),
    accepted("fsdp_config.fsdp_limit_all_gathers", "FSDP2 needs no limit"),
    refused(
        "fsdp_config.fsdp_ignored_modules",
        "freeze these modules in the program, or leave them in",
        None,
        "",
        whole=True,
    ),
    refused("fsdp_config.fsdp_mixed_precision_policy", "say it by mixed_precision", None, whole=True),
)

_DEEPSPEED = (
    translated("deepspeed_config.deepspeed_config_file", "what DeepSpeed's file says"),
    translated("deepspeed_config.zero_stage", "zero.stage"),
    translated("deepspeed_config.offload_optimizer_device", "offload.optimizer"),
    translated("deepspeed_config.offload_param_device", "offload.parameters"),
    translated("deepspeed_config.offload_optimizer_nvme_path", "offload.path"),
    translated("deepspeed_config.offload_param_nvme_path", "offload.path"),
    translated("deepspeed_config.gradient_accumulation_steps", "accumulation.steps"),
    translated("deepspeed_config.gradient_clipping", "clip_norm of trine.optimize"),
    accepted(
        "deepspeed_config.zero3_init_flag",
        "how the program makes a large model: under torch.device('meta') here",
    ),
    accepted("deepspeed_config.zero3_save_16bit_model", _STATE),
    accepted("deepspeed_config.deepspeed_moe_layer_cls_names", _STRUCTURE),
    *(
        accepted(f"deepspeed_config.deepspeed_{name}", _LAUNCHER)
        for name in ("hostfile", "exclusion_filter", "inclusion_filter", "multinode_launcher")
    ),
)

_PARALLEL = (
    *(
        translated(f"parallelism_config.parallelism_config_{theirs}", ours)
        for theirs, ours in {
            "dp_replicate_size": "parallel.data",
            "dp_shard_size": "parallel.shard",
            "tp_size": "parallel.tensor",
            "cp_size": "parallel.context",
            "sp_size": "parallel.context",
        }.items()
    ),
    *(
        accepted(
            f"parallelism_config.parallelism_config_{name}", "PyTorch's context parallelism decides by itself"
        )
        for name in (
            *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length"),
            *("sp_seq_length_is_variable", "sp_attn_implementation"),
        )
    ),
)

_COMPUTE = (
    translated("dynamo_config.dynamo_backend", "compute.compile"),
    translated("dynamo_config.dynamo_use_regional_compilation", "compute.compile"),
    translated("dynamo_config.dynamo_mode", "compute.compile"),
    accepted("dynamo_config.dynamo_use_fullgraph", "breaks in a graph are told: docs/fused.md"),
    accepted("dynamo_config.dynamo_use_dynamic", "recompilations are told; data.shape_buckets bounds them"),
    accepted("fp8_config", "float8 is torchao's here, with dynamic scales", whole=True),
    accepted("megatron_lm_config", "only for distributed_type = MEGATRON_LM", whole=True),
)

ROWS: tuple[Row, ...] = (*_PROCESSES, *_FSDP, *_DEEPSPEED, *_PARALLEL, *_COMPUTE)
ROWS_BY_PATH: Mapping[str, Row] = {row.path: row for row in ROWS}

#: Fields of ``DistributedDataParallelKwargs``.
DDP_ROWS: tuple[Row, ...] = (
    translated("bucket_cap_mb", "communication.bucket_mib"),
    translated("gradient_as_bucket_view", "communication.gradient_as_view"),
    translated("static_graph", "communication.static_graph"),
    translated("comm_hook", "communication.compression"),
    translated("comm_wrapper", "communication.compression"),
    translated(
        "comm_state_option",
        "communication.compression_rank, communication.compression_warmup_steps",
        whole=True,
    ),
    translated("find_unused_parameters", "a DistributedDataParallel of the program's own"),
    accepted("dim", "batches are cut along their first dimension"),
    accepted("broadcast_buffers", "as DistributedDataParallel does by default"),
    accepted("check_reduction", "PyTorch ignores it"),
)
DDP_ROWS_BY_PATH: Mapping[str, Row] = {row.path: row for row in DDP_ROWS}
