"""Megatron-LM's flags, a line each: ``torchrun … pretrain_gpt.py $(cat megatron.flags) …``.

Names and checks are those of ``megatron/training/arguments.py`` of Megatron-LM (github.com/NVIDIA/Megatron-LM), and of the
configuration classes of Megatron-Core 0.16 and later that most of these flags fill (``ModelParallelConfig``,
``TransformerConfig``, ``DistributedDataParallelConfig``, ``OptimizerConfig``).
"""

from __future__ import annotations

from trine.optim.exports._account import Account, Written
from trine.optim.exports._exported import Exported
from trine.optim.exports._from_layout import stage_layers
from trine.optim.exports._megatron_model import add_batch, add_model, say_selective
from trine.optim.exports._text import Flags
from trine.optim.plan.schedules.interleaved import round_size
from trine.optim.plan.stages import stage_counts

__all__ = ["NAME", "TOOL", "export"]

NAME = "megatron"
TOOL = "Megatron-LM"

_FSDP = "Megatron-FSDP"
#: Schedules that it has, and the stages a rank that they need.
_VIRTUAL_STAGES = {"1f1b": 1, "interleaved": 2, "interleaved1f1b": 2}
#: Elements of gradients are float32 in Megatron's buckets: bf16 sets --accumulate-allreduce-grads-in-fp32 by itself,
#: but for --grad-reduce-in-bf16.
_GRADIENT_BYTES, _SHORT_GRADIENT_BYTES = 4, 2


def export(exported: Exported) -> Written:
    """Flags of the layout and, where the workload is known, of the model."""
    account = Account(exported, TOOL)
    flags = Flags()
    add_model(flags, exported, account)
    _add_parallel(flags, exported, account)
    _add_pipeline(flags, exported, account)
    add_batch(flags, exported, account)
    _add_sharding(flags, exported, account)
    _add_precision(flags, exported, account)
    _add_recomputation(flags, exported, account)
    _add_offload(flags, exported, account)
    _add_rest(flags, exported, account)
    return account.written({"megatron.flags": flags.text})


def _add_parallel(flags: Flags, exported: Exported, account: Account) -> None:
    parallel = exported.config.parallel
    for key, flag, degree in (
        ("parallel.tensor", "--tensor-model-parallel-size", parallel.tensor),
        ("parallel.context", "--context-parallel-size", parallel.context),
        ("parallel.expert", "--expert-model-parallel-size", _expert_degree(exported, account)),
    ):
        account.says(key)
        if degree > 1:
            flags.add(flag, degree)
    if parallel.tensor == 1:
        account.misses(
            "parallel.sequence", "the sequence is split over tensor ranks, and parallel.tensor is 1"
        )
    elif account.takes("parallel.sequence"):
        flags.add("--sequence-parallel")
    elif exported.is_mixture:
        account.notes(
            "parallel.tensor beside experts: Megatron-LM trains them under --sequence-parallel alone"
        )
    if parallel.tensor > 1 and (exported.is_mixture or _expert_degree(exported, account) > 1):
        flags.add("--expert-tensor-parallel-size", exported.expert_parts)
    if (parallel.tensor > 1 or parallel.context > 1) and exported.config.zero.stage < 2:
        account.notes(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment: on devices before Blackwell it insists, beside tensor or "
            "context ranks"
        )
    account.says("parallel.loss")  # its head and loss are always cut over the vocabulary
    account.misses("parallel.plan", "its own modules know how they are cut")


def _expert_degree(exported: Exported, account: Account) -> int:
    """Experts are folded over data, context and tensor ranks there, as the planner counts them."""
    if exported.layout is None:
        return exported.config.parallel.expert
    if exported.workload is None or exported.workload.is_mixture:
        account.says_column("expert")
        return int(exported.layout["expert"])
    return 1


def _add_pipeline(flags: Flags, exported: Exported, account: Account) -> None:
    parallel = exported.config.parallel
    if not account.takes("parallel.pipeline"):
        return
    flags.add("--pipeline-model-parallel-size", parallel.pipeline)
    schedule = parallel.schedule or ("interleaved" if parallel.chunks > 1 else "1f1b")
    chunks = _chunks(exported)
    if schedule.lower() in _VIRTUAL_STAGES:
        account.says("parallel.schedule")
    else:
        account.misses("parallel.schedule", "Megatron-LM has 1F1B, and interleaved stages: written as that")
    account.says("parallel.chunks")
    _add_stages(flags, exported, chunks)
    if chunks > 1:
        _add_rounds(flags, exported, account)
    if parallel.split in ("auto", "layers"):
        account.says("parallel.split")
    account.misses("parallel.split", "it takes counts of layers: --pipeline-model-parallel-layout says any")


def _add_rounds(flags: Flags, exported: Exported, account: Account) -> None:
    """Micro-batches of a round of interleaved stages: as many as ranks by itself, and it refuses fewer in the last round."""
    ranks, count = exported.config.parallel.pipeline, exported.batch.count
    if count is None or count % ranks == 0:
        return
    size = round_size(ranks, count)
    if count < ranks or count % size:
        account.notes(
            f"interleaved stages run in rounds of {ranks} micro-batches or more, and a step has {count}"
        )
    else:
        flags.add("--microbatch-group-size-per-virtual-pipeline-stage", size)


def _chunks(exported: Exported) -> int:
    """Stages a rank: what is said, or two where the schedule wants several."""
    parallel = exported.config.parallel
    if parallel.pipeline == 1:
        return 1
    return max(parallel.chunks, _VIRTUAL_STAGES.get((parallel.schedule or "1f1b").lower(), 1))


def _add_stages(flags: Flags, exported: Exported, chunks: int) -> None:
    """Equal stages by their layers, which older releases take too; unequal ones one by one; by number where layers are not known.

    Megatron refuses layers that do not divide, unless a layout says where each is: E embedding, t layers, L loss, | between
    stages (``pipeline_parallel_layer_layout.py``).
    """
    stages = exported.config.parallel.pipeline * chunks
    layers = None if exported.workload is None else exported.workload.layers
    if layers is not None and layers % stages:
        counts = stage_counts(layers, stages)
        middle = "|".join(f"t*{count}" if count else "" for count in counts)
        flags.add("--pipeline-model-parallel-layout", f"E{middle}L")
    elif chunks > 1 and layers is not None:
        flags.add("--num-layers-per-virtual-pipeline-stage", layers // stages)
    elif chunks > 1:
        flags.add("--num-virtual-stages-per-pipeline-rank", chunks)


def _add_sharding(flags: Flags, exported: Exported, account: Account) -> None:
    """Stage 1 is the distributed optimizer, 2 and 3 are Megatron-FSDP (its README, "Megatron-LM")."""
    zero = exported.config.zero
    account.says("parallel.data", "zero.stage")
    if exported.zero_stage == 0:
        account.misses("parallel.shard", "nothing is sharded")
        return
    flags.add("--use-distributed-optimizer")
    if zero.stage >= 2:
        reshards = zero.stage == 3 and zero.reshard_after_forward is not False
        flags.add("--use-megatron-fsdp")
        flags.add("--data-parallel-sharding-strategy", "optim_grads_params" if reshards else "optim_grads")
        flags.add("--ckpt-format", "fsdp_dtensor")  # the one that it takes
        flags.add("--no-gradient-accumulation-fusion")
        account.notes(f"{_FSDP} wants CUDA_DEVICE_MAX_CONNECTIONS unset, or above 1, in the environment")
    if isinstance(zero.reshard_after_forward, bool):
        account.says("zero.reshard_after_forward")
    account.misses(
        "zero.reshard_after_forward", f"{_FSDP} frees parameters or keeps them, and knows no second group"
    )
    account.misses("zero.prefetch", "it prefetches by elements: --suggested-communication-unit-size")
    replicas = exported.replicas
    if exported.config.parallel.shard is None:
        return
    if replicas is None:
        account.misses("parallel.shard", "how many replicas that leaves is not known: give --devices")
        return
    account.says("parallel.shard")
    if replicas > 1:
        flags.add("--num-distributed-optimizer-instances", replicas)


def _add_precision(flags: Flags, exported: Exported, account: Account) -> None:
    precision = exported.config.precision
    if account.takes("precision.dtype") and precision.dtype in ("bf16", "fp16"):
        flags.add(f"--{precision.dtype}")
        account.says("precision.master_weights")
        if not precision.master_weights:
            account.notes(
                f"precision.master_weights: parameters are {precision.dtype} there, beside float32 masters"
            )
    account.misses("precision.master_weights", 'it needs precision.dtype = "bf16" or "fp16"')
    if account.takes("precision.loss_scale") and precision.loss_scale not in (None, "auto"):
        flags.add("--loss-scale", float(precision.loss_scale or 0))
    if account.takes("precision.float8"):
        flags.add("--fp8-format", "hybrid")  # e4m3 forward, e5m2 backward
        flags.add("--fp8-recipe", "tensorwise")  # current scaling, as torchao's
    account.misses(
        "precision.tf32",
        "set torch.backends.cuda.matmul.allow_tf32, or NVIDIA_TF32_OVERRIDE in the environment",
    )


def _add_recomputation(flags: Flags, exported: Exported, account: Account) -> None:
    wanted = exported.config.checkpointing
    layers = (
        None
        if exported.workload is None
        else stage_layers({"pipeline": exported.config.parallel.pipeline}, exported.workload)
    )
    planned = "none" if exported.layout is None else str(exported.layout["recompute"])
    if planned == "budget" and exported.layout is not None:
        account.says_column("recomputed_layers")
        account.says_column("recompute")
        account.says("checkpointing.mode", "checkpointing.every")
        _add_blocks(flags, exported, account, int(exported.layout["recomputed_layers"]))
    elif wanted.mode == "full" and wanted.every == 1 and not wanted.modules:
        account.says("checkpointing.mode")
        flags.add("--recompute-granularity", "full")
        flags.add("--recompute-method", "uniform")
        flags.add("--recompute-num-layers", 1)
    elif wanted.mode == "full" and not wanted.modules and layers is not None:
        account.says("checkpointing.mode", "checkpointing.every")
        _add_blocks(flags, exported, account, -(-layers // wanted.every))
    elif wanted.mode == "selective":
        say_selective(exported, account)
        flags.add("--recompute-granularity", "selective")
        flags.add("--recompute-modules", "core_attn")
    else:
        account.misses(
            "checkpointing.mode", "how many layers of a stage that is is not known: --recompute-num-layers"
        )
        account.misses("checkpointing.every", "the model's layers are not known: --recompute-num-layers")
    account.misses("checkpointing.modules", "it has names of its own: --recompute-modules")
    account.misses("checkpointing.operators", "it recomputes modules: --recompute-modules")
    account.misses("checkpointing.budget_bytes", "it counts layers: --recompute-num-layers")


def _add_blocks(flags: Flags, exported: Exported, account: Account, layers: int) -> None:
    """The first so many layers of each stage. Megatron counts them in every virtual stage (``transformer_block.py``)."""
    if not layers:
        return
    chunks = _chunks(exported)
    each = -(-layers // chunks)
    flags.add("--recompute-granularity", "full")
    flags.add("--recompute-method", "block")
    flags.add("--recompute-num-layers", each)
    if each * chunks != layers:
        account.notes(
            f"recomputation: {layers} layers do not divide over {chunks} virtual stages: written as {each} of each"
        )


def _add_offload(flags: Flags, exported: Exported, account: Account) -> None:
    offload = exported.config.offload
    if offload.optimizer == "cpu" and exported.zero_stage >= 1:
        account.says("offload.optimizer")
        flags.add("--optimizer-cpu-offload")
        flags.add("--use-precision-aware-optimizer")  # it insists
        if offload.overlap is not False:
            flags.add("--overlap-cpu-optimizer-d2h-h2d")
        account.says("offload.overlap")
    account.misses(
        "offload.optimizer", "it has host memory, under the distributed optimizer: zero.stage of 1 or more"
    )
    account.misses("offload.parameters", "parameters stay on the device")
    layers = 1 if exported.workload is None else exported.workload.layers
    alone = exported.config.parallel.pipeline == 1 and not flags.has("--recompute-granularity")
    if offload.activations == "cpu" and layers > 1 and alone:
        account.says("offload.activations")
        flags.add("--cpu-offloading-num-layers", layers - 1)  # the last is needed at once
    account.misses(
        "offload.activations",
        "it has host memory, by layers (--cpu-offloading-num-layers), without a pipeline or recomputation",
    )
    for key in ("path", "tile_mib", "device_bytes", "cpu_bytes", "overlap"):
        account.misses(f"offload.{key}", "is of tiers that Megatron-LM has not")


def _has_short_gradients(exported: Exported) -> bool:
    """Whether gradients are summed in bf16: asked for, or what the plan's memory and traffic count."""
    config = exported.config
    asked = config.communication.compression == "bf16" or exported.gradient_bytes == _SHORT_GRADIENT_BYTES
    return asked and config.precision.dtype == "bf16"


def _add_gradients(flags: Flags, exported: Exported, account: Account) -> None:
    communication = exported.config.communication
    is_short = _has_short_gradients(exported)
    if is_short:
        flags.add("--grad-reduce-in-bf16")
        if communication.compression == "bf16":
            account.says("communication.compression")
        else:  # nobody asked for sums that are less exact than its default
            account.notes(
                "gradients are summed in bf16, as the plan counts them: without --grad-reduce-in-bf16 in fp32, "
                "at twice their memory"
            )
    if isinstance(communication.bucket_mib, int | float):
        account.says("communication.bucket_mib")
        width = _SHORT_GRADIENT_BYTES if is_short else _GRADIENT_BYTES
        flags.add("--ddp-bucket-size", max(1, round(communication.bucket_mib * 2**20 / width)))


def _add_rest(flags: Flags, exported: Exported, account: Account) -> None:
    config = exported.config
    communication = config.communication
    account.says("engine", "communication.overlap")
    if communication.overlap is not False and _is_replicated(exported):
        flags.add("--overlap-grad-reduce")  # as PyTorch does by default
        if config.zero.stage:
            flags.add("--overlap-param-gather")
    _add_gradients(flags, exported, account)
    account.misses("communication.bucket_mib", "it takes a number: --ddp-bucket-size")
    account.misses(
        "communication.compression", "gradients travel in float32, or in bf16 beside precision.dtype = bf16"
    )
    if communication.algorithm in ("ring", "tree", "two_level", "auto"):
        account.misses("communication.algorithm", "NCCL chooses: NCCL_ALGO in the environment")
    account.misses("communication.nccl", "a file of its own: --nccl-communicator-config-path")
    backend = {"flash": "flash", "sdpa": "fused", "auto": "auto"}.get(str(config.compute.attention))
    if backend is not None and account.takes("compute.attention"):
        flags.add("--attention-backend", backend)
    if "cross_entropy" in config.compute.fuse:
        flags.add("--cross-entropy-loss-fusion")
    if set(config.compute.fuse) <= {
        "cross_entropy",
        "bias_dropout_residual",
        "mlp",
        "norm",
        "rotary",
        "optimizer",
    }:
        account.says("compute.fuse")  # all but the first it does by itself
    if isinstance(config.data.workers, int) and account.takes("data.workers"):
        flags.add("--num-workers", config.data.workers)


def _is_replicated(exported: Exported) -> bool:
    return exported.data_ranks != 1
