"""Every key that DeepSpeed 0.19 reads, and what becomes of it here.

From its pydantic models and constants (``deepspeed/runtime/config.py`` and what that reads) and from what older releases
had; a test holds the table equal to the installed package.
"""

from __future__ import annotations

from collections.abc import Mapping

from trine.optim.dialects.rows import Row, accepted, refused, removed, told, translated

__all__ = ["ROWS", "ROWS_BY_PATH"]

_ENGINE = 'or train with engine = "deepspeed" and the key in a file of DeepSpeed\'s own'
_RECORD = "Trine records this by itself: trine.profile"
_PINNED = "copies between host and device use pinned memory wherever there is a device"
_TUNING = "FSDP2 frees and fetches a block at a time, so there is nothing to tune"
_NO_MODEL = "how DeepSpeed prepares modules; FSDP2 needs none of it"

_BATCH = (
    translated("train_batch_size", "accumulation.global_batch"),
    translated("train_micro_batch_size_per_gpu", "accumulation.micro_batch"),
    translated("gradient_accumulation_steps", "accumulation.steps"),
    refused(
        "managed_gradient_accumulation",
        "the program would step when it likes: use engine(batch), engine.backward(loss) and engine.step(), and take the key out",
        True,
        None,
    ),
    accepted("dataloader_drop_last", "the loader is the program's: DataLoader(drop_last=…)"),
    accepted("vocabulary_size", "DeepSpeed only warns by it"),
    told("gradient_clipping", "pass clip_norm to trine.optimize"),
    told("optimizer", "make it in the program and pass it to trine.optimize", "type params legacy_fusion"),
    told("scheduler", "make it in the program and pass scheduler to trine.optimize", "type params"),
)

_PRECISION = (
    translated("bfloat16", "the old name of bf16", whole=True),
    translated("bf16.enabled", "precision.dtype, precision.master_weights"),
    accepted("bf16.immediate_grad_update", "when DeepSpeed moves gradients; the sum is the same"),
    told("bf16.check_grad_overflow", "nonfinite in trine.optimize"),
    refused(
        "bf16.bf16_master_weights_and_grads",
        "keeps no float32 copy of the parameters: convert the model with model.bfloat16() and leave precision.master_weights out",
    ),
    refused(
        "bf16.bf16_optimizer_states",
        "keeps Adam's moments in bf16: the optimizer is the program's, use one that does",
    ),
    translated("fp16.enabled", "precision.dtype, precision.master_weights"),
    accepted("fp16.auto_cast", "inputs are cast by autocast"),
    translated("fp16.loss_scale", "precision.loss_scale"),
    accepted("fp16.initial_scale_power", "the scale begins at 65536 and finds its place"),
    accepted("fp16.loss_scale_window", "the scale doubles after 2000 good steps, as torch.amp.GradScaler's"),
    accepted("fp16.hysteresis", "the scale halves at the first overflow, as torch.amp.GradScaler's"),
    accepted("fp16.consecutive_hysteresis", "there is no hysteresis"),
    accepted("fp16.min_loss_scale", "the scale has no floor"),
    refused(
        "fp16.fp16_master_weights_and_grads",
        "updates in float16 lose small gradients: leave it out, precision.master_weights keeps float32 copies",
    ),
    translated("torch_autocast.enabled", "precision.dtype"),
    translated("torch_autocast.dtype", "precision.dtype"),
    refused(
        "torch_autocast.lower_precision_safe_modules",
        "autocast decides by operator here: take it out, or put torch.autocast(enabled=False) into the modules to keep in float32",
        None,
        whole=True,
    ),
    refused(
        "data_types.grad_accum_dtype",
        "gradients add up in the parameters' precision, or in float32 under zero.stage 2 and 3: take it out",
        None,
    ),
    refused("data_types.param_dtype", "say it by bf16.enabled or fp16.enabled alone", None),
    refused("data_types.buffer_dtype", "buffers keep their types: convert them in the program", None),
    accepted("data_types.keep_in_fp32_modules", "buffers keep their types, and masters are float32"),
)

_ZERO = (
    translated("zero_optimization.stage", "zero.stage"),
    translated("zero_optimization.overlap_comm", "communication.overlap"),
    translated("zero_optimization.reduce_bucket_size", "communication.bucket_mib"),
    translated("zero_optimization.zero_hpz_partition_size", "zero.reshard_after_forward"),
    translated("zero_optimization.zero_quantized_weights", "zero.quantized_weights"),
    translated("zero_optimization.zero_quantized_gradients", 'communication.compression = "int8"'),
    translated("zero_optimization.offload_optimizer.device", "offload.optimizer"),
    translated("zero_optimization.offload_optimizer.nvme_path", "offload.path"),
    accepted("zero_optimization.offload_optimizer.pin_memory", _PINNED),
    accepted(
        "zero_optimization.offload_optimizer.buffer_count",
        "buffers follow from the tiles in flight: offload.tile_mib",
    ),
    accepted("zero_optimization.offload_optimizer.pipeline_read", "reading ahead is on: offload.overlap"),
    accepted("zero_optimization.offload_optimizer.pipeline_write", "writing behind is on: offload.overlap"),
    accepted("zero_optimization.offload_optimizer.fast_init", "state is made where it will lie"),
    refused(
        "zero_optimization.offload_optimizer.ratio",
        "leaves a part of the state on the device: set offload.device_bytes, by which state is placed here",
        1,
        None,
    ),
    refused(
        "zero_optimization.offload_optimizer.super_offload",
        f"is made for Grace-Hopper: leave it out, {_ENGINE}",
    ),
    accepted("zero_optimization.offload_optimizer.cpuadam_cores_perc", "only for super_offload"),
    translated("zero_optimization.offload_param.device", "offload.parameters"),
    translated("zero_optimization.offload_param.nvme_path", "offload.path"),
    accepted("zero_optimization.offload_param.pin_memory", _PINNED),
    accepted("zero_optimization.offload_param.buffer_count", "buffers follow from the blocks in flight"),
    accepted("zero_optimization.offload_param.buffer_size", "buffers follow from the blocks in flight"),
    accepted(
        "zero_optimization.offload_param.max_in_cpu",
        "set offload.cpu_bytes to bound what stays in host memory",
    ),
    accepted("zero_optimization.sub_group_size", "the tile of an offloaded update is offload.tile_mib"),
    *(
        accepted(f"zero_optimization.{name}", _TUNING)
        for name in (
            *("prefetch_bucket_size", "stage3_prefetch_bucket_size"),
            *("param_persistence_threshold", "stage3_param_persistence_threshold"),
            *("model_persistence_threshold", "stage3_model_persistence_threshold"),
            *("max_live_parameters", "stage3_max_live_parameters"),
            *("max_reuse_distance", "stage3_max_reuse_distance"),
            *("module_granularity_threshold", "stage3_module_granularity_threshold"),
            *("use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params"),
            *(
                "allgather_sequential",
                "stage3_allgather_sequential",
                "leaf_module.classes",
                "leaf_module.names",
            ),
            *("leaf_module.name_suffixes", "allgather_bucket_size", "allgather_partitions", "reduce_scatter"),
            *("contiguous_gradients", "use_multi_rank_bucket_allreduce", "round_robin_gradients"),
        )
    ),
    *(
        accepted(f"zero_optimization.{name}", _NO_MODEL)
        for name in ("memory_efficient_linear", "override_module_apply", "parameter_alignment")
    ),
    *(
        accepted(
            f"zero_optimization.{name}",
            "engine.save and engine.load write and read whole or sharded state by themselves",
        )
        for name in (
            *("load_from_fp32_weights", "gather_16bit_weights_on_model_save"),
            *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
            *("elastic_checkpoint", "pipeline_loading_checkpoint"),
        )
    ),
    accepted(
        "zero_optimization.ignore_unused_parameters", "parameters without a gradient are left as they are"
    ),
    accepted("zero_optimization.compute_grad_norm", "the norm is computed where clip_norm asks for it"),
    accepted("zero_optimization.log_trace_cache_warnings", "there is no trace of fetches"),
    accepted("zero_optimization.enable_sanity_checks", "ranks are compared when the engine is made"),
    accepted("zero_optimization.save_muon_momentum_buffer_in_memory", "the optimizer is the program's"),
    refused("zero_optimization.legacy_stage1", "DeepSpeed itself refuses it: take it out"),
    refused(
        "zero_optimization.zenflow",
        f"applies most gradients late: accumulation.delayed = true is the nearest here, {_ENGINE}",
        None,
        whole=True,
    ),
    refused(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "stores frozen weights in fewer bits: quantize them in the program, for instance by torchao",
    ),
    refused("zero_optimization.cpu_offload", 'write "offload_optimizer": {"device": "cpu"} instead'),
    refused("zero_optimization.cpu_offload_param", 'write "offload_param": {"device": "cpu"} instead'),
    accepted("zero_optimization.cpu_offload_use_pin_memory", _PINNED),
    *(
        removed(f"zero_optimization.{name}", words)
        for name, words in {
            "mics_shard_size": "(MiCS) was removed from DeepSpeed: parallel.shard = N shards inside groups of N ranks here",
            "mics_hierarchical_params_gather": "(MiCS) was removed from DeepSpeed: take it out",
            "zeropp_loco_param": "(LoCo) was removed from DeepSpeed: communication.compression keeps an error feedback here",
        }.items()
    ),
    accepted("zero_allow_untested_optimizer", "any torch optimizer is taken"),
    accepted("zero_force_ds_cpu_optimizer", "the optimizer is the program's"),
)

_COMMUNICATION = (
    translated("communication_data_type", "communication.compression"),
    accepted("prescale_gradients", "when to divide; the mean is the same"),
    accepted("gradient_predivide_factor", "when to divide; the mean is the same"),
    refused(
        "gradient_allreduce_op",
        "gradients are averaged over ranks: multiply the learning rate, or the loss, by their number instead",
        "mean",
        None,
    ),
    refused("disable_allgather", "DeepSpeed ignores it: take it out"),
    accepted(
        "comms_logger",
        f"{_RECORD} (DeepSpeed's ends the process at some collectives)",
        "enabled prof_all prof_ops verbose debug",
    ),
    accepted("seq_parallel_communication_data_type", "context parallelism sends in the activations' type"),
)

_PARALLEL = (
    translated("sequence_parallel_size", "parallel.context"),
    accepted("data_parallel_size", "parallel.data is every rank that is left over"),
    translated("tensor_parallel.autotp_size", "parallel.tensor"),
    translated("tensor_parallel.tp.tp_size", "parallel.tensor"),
    translated("tensor_parallel.tensor_parallel.tp_size", "parallel.tensor"),
    *(
        accepted(f"tensor_parallel.{name}", "plans are found by the model's structure")
        for name in (
            *("dtype", "preset_model", "keep_module_on_host", "tp_overlap_comm"),
            *("vocab_parallel_lm_head", "vocab_parallel_ce_backend"),
            *(
                "replace_with_kernel_inject",
                "kernel_inject",
                "tp.tp_grain_size",
                "tensor_parallel.tp_grain_size",
            ),
        )
    ),
    *(
        refused(
            f"tensor_parallel.{name}",
            "a plan of one's own is an object of the program here: take it out",
            None,
            whole=True,
        )
        for name in (
            *("partition_config", "injection_policy_tuple", "tp.mpu", "tp.tp_group"),
            *("tensor_parallel.mpu", "tensor_parallel.tp_group"),
        )
    ),
    translated("expert_parallel", "parallel.expert", whole=True),
    accepted(
        "use_data_before_expert_parallelism", "where expert groups lie follows from the ranks of a node"
    ),
    refused(
        "pipeline",
        "is for a model made as a PipelineModule: set parallel.pipeline and parallel.schedule, which cut any model",
        None,
        inner="stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
    ),
)

_MEMORY = (
    refused(
        "activation_checkpointing.cpu_checkpointing",
        'take the key out, and set checkpointing.mode = "full" and offload.activations = "cpu"',
    ),
    refused(
        "activation_checkpointing.partition_activations",
        "cuts saved activations over tensor-parallel ranks: take the key out, and with parallel.tensor set "
        "parallel.sequence = true, which does",
    ),
    *(
        accepted(
            f"activation_checkpointing.{name}",
            "only for calls of deepspeed.checkpointing; here it is checkpointing.mode",
        )
        for name in (
            *("number_checkpoints", "contiguous_memory_optimization"),
            *("synchronize_checkpoint_boundary", "profile"),
        )
    ),
    accepted(
        "aio",
        "reads and writes of offloaded state are sized by offload.tile_mib",
        "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds thread_count",
    ),
    translated("compile", "compute.compile", whole=True),
)

_REST = (
    *(
        accepted(name, _RECORD)
        for name in ("wall_clock_breakdown", "memory_breakdown", "dump_state", "steps_per_print")
    ),
    accepted(
        "flops_profiler",
        _RECORD,
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    accepted("timers", _RECORD, "throughput"),
    accepted("log_level", "DeepSpeed's log is of no use here"),
    accepted("tensorboard", _RECORD, "enabled output_path job_name"),
    accepted("wandb", _RECORD, "enabled group team project"),
    accepted("csv_monitor", _RECORD, "enabled output_path job_name"),
    accepted(
        "comet",
        _RECORD,
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
    accepted(
        "checkpoint",
        "engine.save writes checkpoints its own way",
        "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer",
    ),
    accepted("datastates_ckpt", "engine.save writes checkpoints its own way", whole=True),
    refused("disable_python_gc", "call gc.disable() in the program"),
    refused(
        "autotuning",
        'micro-batches are picked by measured memory: accumulation.micro_batch = "auto"',
        None,
        inner="enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric_path tuner_type "
        "tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
        "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size "
        "metric model_info model_info_path",
    ),
    refused(
        "data_efficiency",
        "curricula, routing and dynamic batches change what is trained: sample so in the program; data.packing packs "
        "documents of unequal length",
        None,
        inner="enabled seed data_sampling data_routing",
    ),
    refused(
        "hybrid_engine",
        "is for generating text while training: call the model under torch.no_grad() instead",
        None,
        inner="enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph",
    ),
    refused("weight_quantization", "is for inference: take it out", None, whole=True),
)

_REMOVED = (
    *(
        removed(name, f"was removed from DeepSpeed: {words}")
        for name, words in {
            "nebula": "engine.save writes checkpoints in the background here; take it out",
            "compression_training": "the model would train uncompressed; take it out",
            "amp": 'write "bf16": {"enabled": true} instead',
            "quantize_training": "the model would train unquantized; take it out",
            "sparse_gradients": "embeddings made with sparse=True need no key; take it out",
            "eigenvalue": "take it out",
            "sparse_attention": 'set compute.attention = "sdpa", or use a sparse attention in the model',
            "elasticity": "set the batch keys, and engine.load on another number of ranks",
            "graph_harvesting": 'take it out; compute.compile = "blocks" compiles regions',
            "curriculum_learning": "sample so in the program; take it out",
            "progressive_layer_drop": "drop layers in the model; take it out",
            "fp32_allreduce": "communication_data_type is its successor",
            "allgather_size": "it belonged to an older form of zero_optimization; take it out",
        }.items()
    ),
)

ROWS: tuple[Row, ...] = (
    *_BATCH,
    *_PRECISION,
    *_ZERO,
    *_COMMUNICATION,
    *_PARALLEL,
    *_MEMORY,
    *_REST,
    *_REMOVED,
)
ROWS_BY_PATH: Mapping[str, Row] = {row.path: row for row in ROWS}
