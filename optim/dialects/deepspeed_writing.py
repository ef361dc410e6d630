"""Our configuration as DeepSpeed's JSON, and what DeepSpeed has no counterpart for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.dialects.deepspeed_pairs import BESIDE, PAIRS, SAID
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Facts

__all__ = ["no_counterpart", "to_deepspeed", "without_counterpart"]


def no_counterpart(config: Config) -> str | None:
    """Why DeepSpeed cannot be handed ``config``: the first key, or value, that it has no counterpart for."""
    return next(iter(without_counterpart(config).values()), None)


def without_counterpart(config: Config) -> dict[str, str]:
    """Key → why DeepSpeed cannot be handed it, or its value; of all that ``config`` sets."""
    found: dict[str, str] = {}
    for key, value in config.changes().items():
        if key == "engine" or key in BESIDE or key in SAID:
            reason = _cannot_say(config, key, value)
        else:
            reason = f'{key} has no counterpart in DeepSpeed: take it out, or train with engine = "torch"'
        if reason:
            found[key] = reason
    return found


def _cannot_say(config: Config, key: str, value: Any) -> str | None:
    torch_engine = 'or train with engine = "torch"'
    stage = config.zero.stage
    if value == "auto" and key in (
        "accumulation.steps",
        "accumulation.micro_batch",
        "communication.bucket_mib",
    ):
        return f'{key} = "auto" is measured by Trine\'s own engine: write a number under engine = "deepspeed", {torch_engine}'
    if value == "auto" and key in ("offload.optimizer", "offload.parameters"):
        return f'{key} = "auto" places state by heat, as Trine\'s own engine does: write "cpu" or "nvme", {torch_engine}'
    if key == "zero.reshard_after_forward" and (isinstance(value, bool) or stage != 3):
        return (
            f"{key}: DeepSpeed takes the size of its second partition there (zero_hpz_partition_size), under zero.stage = 3: write a "
            f"number of ranks, {torch_engine}"
        )
    if key in ("communication.overlap", "communication.bucket_mib") and stage == 0:
        return f"{key} is a key of DeepSpeed's ZeRO: set zero.stage to 1 or more, {torch_engine}"
    if key == "zero.quantized_weights" and stage != 3:
        return f"{key} needs zero.stage = 3 under DeepSpeed, {torch_engine}"
    if key == "communication.compression":
        return _cannot_compress(config, str(value), torch_engine)
    if key == "offload.optimizer" and stage == 0:
        return f"{key} needs zero.stage = 1 or more under DeepSpeed, {torch_engine}"
    if key == "offload.parameters" and stage != 3:
        return f"{key} needs zero.stage = 3 under DeepSpeed, {torch_engine}"
    if key == "precision.master_weights" and config.precision.dtype not in ("bf16", "fp16"):
        return f'{key} needs precision.dtype = "bf16" or "fp16" under DeepSpeed, {torch_engine}'
    if key == "precision.loss_scale" and value != "auto" and not config.precision.master_weights:
        return f'{key} = {value:g}: DeepSpeed scales by itself under autocast: use "auto", or set precision.master_weights, {torch_engine}'
    if key == "checkpointing.mode" and value in ("budget", "auto"):
        return f'{key} = "{value}" measures Trine\'s own steps: use "full" or "selective", {torch_engine}'
    return None


def _cannot_compress(config: Config, value: str, torch_engine: str) -> str | None:
    key = "communication.compression"
    if value in ("bf16", "fp16"):
        if config.precision.master_weights and value != config.precision.dtype:
            return f'{key} = "{value}" over parameters in {config.precision.dtype}: DeepSpeed exchanges them as they are: drop it, {torch_engine}'
        return None
    if value == "int8" and config.zero.stage == 3:
        return None
    return (
        f'{key} = "{value}" has no counterpart in DeepSpeed, which has "bf16", "fp16" and, under zero.stage = 3, "int8": use one of '
        f"these, {torch_engine}"
    )


def to_deepspeed(config: Config, facts: Facts | None = None) -> dict[str, Any]:
    """``config`` as DeepSpeed's JSON. ``facts``, of the run it is for, decide what depends on ranks and device.

    Raises ``UsageError`` naming the first key that DeepSpeed has no counterpart for. Clipping belongs to
    ``trine.optimize``, so it is written as off, where DeepSpeed's own default would clip.
    """
    reason = no_counterpart(config)
    if reason:
        raise UsageError(reason)
    found: dict[str, Any] = {}
    for pair in PAIRS:
        if pair.ours in config.changes():
            _put(found, pair.theirs, pair.write(config[pair.ours], config))
    if config.offload.path is not None:
        for table, device in (
            ("offload_optimizer", config.offload.optimizer),
            ("offload_param", config.offload.parameters),
        ):
            if device == "nvme":
                _put(found, f"zero_optimization.{table}.nvme_path", config.offload.path)
    _write_precision(found, config)
    _write_compression(found, config)
    found["gradient_clipping"] = 0.0
    if config.zero.stage:  # any optimizer that PyTorch has, and its own kernels rather than compiled ones
        found |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if config.zero.stage == 3 and config.checkpointing.mode == "selective":
        # Its linear function adds the bias in place to the product that the recomputation keeps: it would be added twice.
        _put(found, "zero_optimization.memory_efficient_linear", False)
    if facts is not None:
        _write_for(found, config, facts)
    return found


def _write_precision(found: dict[str, Any], config: Config) -> None:
    dtype = config.precision.dtype
    if dtype in (None, "fp32"):
        return
    if not config.precision.master_weights:
        found["torch_autocast"] = {"enabled": True, "dtype": "bfloat16" if dtype == "bf16" else "float16"}
        return
    found[str(dtype)] = {"enabled": True}
    if dtype == "fp16":
        scale = config.precision.loss_scale
        found["fp16"]["loss_scale"] = 0 if scale in (None, "auto") else float(scale or 0)
        # torch.amp.GradScaler's: halve at the first overflow, double after 2000 good steps
        found["fp16"] |= {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}


def _write_compression(found: dict[str, Any], config: Config) -> None:
    compression = config.communication.compression
    if compression in ("bf16", "fp16"):
        found["communication_data_type"] = compression
    elif compression == "int8":
        _put(found, "zero_optimization.zero_quantized_gradients", True)


def _write_for(found: dict[str, Any], config: Config, facts: Facts) -> None:
    """The batch, all three of it, and host memory that is only pinned for a device."""
    from trine.optim.techniques.accumulation import plan_of

    plan = plan_of(config, facts.ranks)
    steps = config.accumulation.steps
    count = steps if isinstance(steps, int) else 1
    micro = 1  # the batches are the program's: DeepSpeed counts by this, and computes nothing from it
    if plan is not None:
        micro = plan.micro or plan.share or 1
        # Not known before the batch is: more than one, for which DeepSpeed keeps sums of offloaded gradients.
        count = plan.steps or (2 if plan.micro and plan.share is None else 1)
    found["train_micro_batch_size_per_gpu"] = micro
    found["gradient_accumulation_steps"] = count
    found["train_batch_size"] = micro * count * facts.ranks
    for table in ("offload_optimizer", "offload_param"):
        if table in found.get("zero_optimization", {}) and facts.device_type == "cpu":
            found["zero_optimization"][table]["pin_memory"] = False


def _put(found: dict[str, Any], path: str, value: Any) -> None:
    *tables, name = path.split(".")
    for table in tables:
        found = found.setdefault(table, {})
    found[name] = value
