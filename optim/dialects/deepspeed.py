"""DeepSpeed's JSON: read into our configuration, and written from it.

What one key of theirs and one of ours mean alike stands once, in ``_PAIRS``, and is used in both directions; precision
and gradient compression, which are several keys on one side, have a function a direction. What becomes of every other
key of theirs is in :mod:`trine.optim.dialects.deepspeed_keys`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.dialects.deepspeed_keys import ROWS_BY_PATH
from trine.optim.dialects.reading import Imported, Reading, announce, mapping_of, spelled
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Facts

__all__ = ["BESIDE", "SAID", "no_counterpart", "read_deepspeed", "to_deepspeed"]

_MIB = 2**20
#: DeepSpeed clips to this norm where its file says nothing of clipping (``runtime/constants.py``).
_CLIPS_AT = 1.0

#: Keys of ours that Trine applies itself, to the model and the loader, whoever runs the step.
BESIDE = frozenset(
    {
        "accumulation.global_batch",
        "accumulation.micro_batch",
        "accumulation.steps",
        "checkpointing.every",
        "checkpointing.mode",
        "checkpointing.modules",
        "checkpointing.operators",
        "compute.attention",
        "data.length_grouped",
        "data.pin_memory",
        "data.prefetch",
        "data.shape_buckets",
        "data.workers",
        "precision.tf32",
    }
)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Our key and theirs. ``write`` and ``read`` return ``None`` for what the other side says by leaving it out."""

    ours: str
    theirs: str
    kinds: tuple[type, ...]
    write: Callable[[Any, Config], Any] = lambda value, config: value
    read: Callable[[Any, Reading], Any] = lambda value, reading: value


def _element_bytes(config: Config) -> int:
    """Of the gradients that DeepSpeed exchanges: the parameters' type."""
    return 2 if config.precision.master_weights else 4


def _write_bucket(value: Any, config: Config) -> int:
    return max(1, round(value * _MIB / _element_bytes(config)))


def _read_bucket(value: Any, reading: Reading) -> float | None:
    if reading.changes.get("zero.stage", 0) >= 2:
        reading.notes.append(
            "zero_optimization.reduce_bucket_size is left out: from stage 2 on gradients travel a block at a time"
        )
        return None
    size = 2 if reading.changes.get("precision.master_weights") else 4
    return float(value * size / _MIB)


def _read_overlap(value: Any, reading: Reading) -> bool | None:
    if value or reading.changes.get("zero.stage", 0) >= 2:
        reading.notes.append("zero_optimization.overlap_comm is left out: communication overlaps by itself")
        return None
    return False


def _read_device(value: Any, reading: Reading) -> str | None:
    if value not in ("none", "cpu", "nvme"):
        reading.errors.append(f'offload device {spelled(value)}: it takes "none", "cpu" or "nvme"')
        return None
    return None if value == "none" else str(value)


def _read_path(value: Any, reading: Reading) -> str | None:
    """Only where something is offloaded to disk; files often keep the key."""
    devices = {reading.changes.get("offload.optimizer"), reading.changes.get("offload.parameters")}
    return str(value) if "nvme" in devices else None


_PAIRS = (
    _Pair("zero.stage", "zero_optimization.stage", (int,)),
    _Pair("accumulation.global_batch", "train_batch_size", (int,)),
    _Pair("accumulation.micro_batch", "train_micro_batch_size_per_gpu", (int,)),
    _Pair("accumulation.steps", "gradient_accumulation_steps", (int,)),
    _Pair(
        "zero.reshard_after_forward",
        "zero_optimization.zero_hpz_partition_size",
        (int,),
        read=lambda value, reading: value if value > 1 else None,
    ),
    _Pair(
        "zero.quantized_weights",
        "zero_optimization.zero_quantized_weights",
        (bool,),
        read=lambda value, reading: value or None,
    ),
    _Pair("communication.overlap", "zero_optimization.overlap_comm", (bool,), read=_read_overlap),
    _Pair(
        "communication.bucket_mib",
        "zero_optimization.reduce_bucket_size",
        (int,),
        _write_bucket,
        _read_bucket,
    ),
    _Pair("offload.optimizer", "zero_optimization.offload_optimizer.device", (str,), read=_read_device),
    _Pair("offload.parameters", "zero_optimization.offload_param.device", (str,), read=_read_device),
)

#: Keys of ours that DeepSpeed has a counterpart for.
SAID = frozenset(pair.ours for pair in _PAIRS) | {
    "communication.compression",
    "offload.path",
    "precision.dtype",
    "precision.loss_scale",
    "precision.master_weights",
}


# --- reading -----------------------------------------------------------------------------------


def read_deepspeed(source: str | Path | Mapping[str, Any], *, ranks: int | None = None) -> Imported:
    """A DeepSpeed configuration in our words.

    ``source`` is the path of its JSON file, or the dictionary. ``ranks``, of the job it is for, is only needed where the
    file gives micro-batch and accumulation without ``train_batch_size``. ``"auto"``, as Transformers' Trainer fills in,
    is left to the program. Raises ``UsageError`` in one line that names every key that is unknown, was removed, or has
    no counterpart, with what to write instead; ``UnreadableInput`` for what is no JSON.
    """
    tables, name = mapping_of(source, "DeepSpeed", _parsed)
    reading = Reading(name, ROWS_BY_PATH)
    reading.walk(_normalised(tables))
    _read_precision(reading)
    _read_pairs(reading)
    _read_compression(reading)
    _read_parallel(reading)
    _read_batch(reading, ranks)
    _tell(reading, tables)
    imported = reading.finished()
    announce(imported, name)
    return imported


def _parsed(text: str) -> Any:
    """JSON in which no key stands twice, as DeepSpeed wants it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice} stands in it twice")
        return found

    return json.loads(text, object_pairs_hook=unique)


def _normalised(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Old spellings that DeepSpeed still reads, in the new one."""
    found = dict(tables)
    if "bfloat16" in found and "bf16" not in found:
        found["bf16"] = found.pop("bfloat16")
    stage = found.get("zero_optimization")
    if isinstance(stage, bool):
        found["zero_optimization"] = {"stage": int(stage)}
    return found


def _read_precision(reading: Reading) -> None:
    masters = [name for name in ("bf16", "fp16") if reading.pop(f"{name}.enabled", bool, False)]
    reading.pop("bfloat16")
    autocast = reading.pop("torch_autocast.enabled", bool, False)
    dtype = reading.pop("torch_autocast.dtype", str)
    scale = reading.pop("fp16.loss_scale", (int, float), 0)
    if len(masters) > 1 or (masters and autocast):
        both = [f"{name}.enabled" for name in masters] + (["torch_autocast.enabled"] if autocast else [])
        reading.errors.append(f"{' and '.join(both)} exclude each other: keep one of them")
    elif masters:
        reading.set("precision.dtype", masters[0], f"{masters[0]}.enabled")
        reading.set("precision.master_weights", True, f"{masters[0]}.enabled")
        if masters[0] == "fp16" and scale:
            reading.set("precision.loss_scale", float(scale), "fp16.loss_scale")
    elif autocast:
        short = {"bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "fp16": "fp16"}
        short |= {"float16": "fp16", "torch.float16": "fp16", "half": "fp16", None: "bf16"}
        if dtype not in short:
            reading.errors.append(
                f'torch_autocast.dtype = {spelled(dtype)}: it takes "bfloat16" or "float16"'
            )
            return
        reading.set("precision.dtype", short[dtype], "torch_autocast.dtype")


def _read_pairs(reading: Reading) -> None:
    for pair in _PAIRS:
        value = reading.pop(pair.theirs, pair.kinds)
        if value is None:
            continue
        ours = pair.read(value, reading)
        if ours is not None:
            reading.set(pair.ours, ours, pair.theirs)
    for table in ("offload_optimizer", "offload_param"):
        path = reading.pop(f"zero_optimization.{table}.nvme_path", str)
        found = None if path is None else _read_path(path, reading)
        if found is not None:
            reading.set("offload.path", found, f"zero_optimization.{table}.nvme_path")


def _read_compression(reading: Reading) -> None:
    dtype = reading.pop("communication_data_type", str)
    low = reading.changes.get("precision.dtype") if reading.changes.get("precision.master_weights") else None
    if dtype in ("bf16", "fp16"):
        if low not in (None, dtype):
            reading.errors.append(
                f"communication_data_type = {spelled(dtype)} over {low} parameters: gradients travel as the parameters are "
                "here: take it out"
            )
        elif low is None:
            reading.set("communication.compression", dtype, "communication_data_type")
    elif dtype == "fp32":
        if low is not None and reading.changes.get("zero.stage", 0) < 2:
            reading.errors.append(
                f'communication_data_type = "fp32" over {low} parameters: gradients travel as the parameters are here, and in '
                "float32 under zero stage 2 and 3: raise the stage, or take it out"
            )
    elif dtype is not None:
        reading.errors.append(
            f'communication_data_type = {spelled(dtype)}: it takes "fp16", "bf16" or "fp32"'
        )
    if reading.pop("zero_optimization.zero_quantized_gradients", bool):
        reading.set("communication.compression", "int8", "zero_optimization.zero_quantized_gradients")


def _read_parallel(reading: Reading) -> None:
    for theirs, ours in (
        ("sequence_parallel_size", "parallel.context"),
        ("tensor_parallel.autotp_size", "parallel.tensor"),
        ("tensor_parallel.tp.tp_size", "parallel.tensor"),
        ("tensor_parallel.tensor_parallel.tp_size", "parallel.tensor"),
    ):
        size = reading.pop(theirs, int)
        if size is not None and size > 1:
            reading.set(ours, size, theirs)
    experts = reading.pop("expert_parallel")
    if isinstance(experts, Mapping) and experts.get("enabled"):
        size = experts.get("autoep_size", 1)
        if isinstance(size, int) and size > 1:
            reading.set("parallel.expert", size, "expert_parallel.autoep_size")
        others = [name for name in experts if name not in ("enabled", "autoep_size")]
        if others:
            reading.notes.append(
                f"expert_parallel.{', '.join(others)}: experts are found by the model's structure"
            )
    compiling = reading.pop("compile")
    if isinstance(compiling, Mapping) and compiling.get("deepcompile"):
        reading.set("compute.compile", "blocks", "compile.deepcompile")
        others = [name for name, value in compiling.items() if name != "deepcompile" and value]
        if others:
            reading.notes.append(f"compile.{', '.join(others)}: torch.compile alone is used")


def _read_batch(reading: Reading, ranks: int | None) -> None:
    """``train_batch_size`` = micro-batch × accumulation × ranks; two of them and the ranks give the third."""
    changes = reading.changes
    keys = ("accumulation.global_batch", "accumulation.micro_batch", "accumulation.steps")
    whole, micro, steps = (changes.get(key) for key in keys)
    if any(value is not None and value < 1 for value in (whole, micro, steps)):
        reading.errors.append(
            "train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps take 1 or more"
        )
        return
    if steps == 1:
        del changes[keys[2]]
    if whole is not None and micro is not None and steps is not None:
        over = whole % (micro * steps)
        if over or (ranks is not None and whole != micro * steps * ranks):
            on = "any number of" if ranks is None else str(ranks)
            reading.errors.append(
                f"train_batch_size = {whole} is not train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks = "
                f"{micro} × {steps} × {on} ranks: drop one of them"
            )
    elif whole is None and micro is not None and steps is not None and steps > 1:
        if ranks is not None:
            changes[keys[0]] = micro * steps * ranks
            return
        del changes[keys[1]]
        reading.to_do.append(
            f"give the loader {micro * steps} samples a batch: a step is {steps} micro-batches of {micro}, and engine.train_step "
            f"cuts its batch into {steps} (or pass ranks=… here, and batches are gathered to a step's size)"
        )


def _tell(reading: Reading, tables: Mapping[str, Any]) -> None:
    """What belongs into the program: clipping, optimizer, scheduler, what becomes of gradients that are not finite."""
    norm = reading.pop("gradient_clipping", (int, float))
    if norm is None and tables.get("gradient_clipping") != "auto":
        norm = _CLIPS_AT
        reading.notes.append(f"without gradient_clipping DeepSpeed clips at {_CLIPS_AT}")
    if norm is not None and norm > 0:
        reading.arguments["clip_norm"] = float(norm)
        reading.to_do.append(
            f"pass clip_norm={float(norm)} to trine.optimize: DeepSpeed clips gradients to this norm"
        )
    checks = reading.pop("bf16.check_grad_overflow", bool)
    if checks is False and reading.changes.get("precision.dtype") == "bf16":
        reading.arguments["nonfinite"] = "allow"
        reading.to_do.append('pass nonfinite="allow" to trine.optimize: bf16.check_grad_overflow is off')
    for name, default in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        table = reading.pop(name)
        if isinstance(table, Mapping):
            _tell_of_object(reading, name, str(table.get("type", default)), table.get("params") or {})


#: Types of DeepSpeed's optimizers → the torch optimizer that computes the same.
_OPTIMIZERS = {
    "adam": "torch.optim.AdamW",  # DeepSpeed's Adam decays as AdamW unless adam_w_mode is false
    "adamw": "torch.optim.AdamW",
    "adagrad": "torch.optim.Adagrad",
    "muon": "torch.optim.Muon",
    "sgd": "torch.optim.SGD",
}
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")


def _tell_of_object(reading: Reading, name: str, kind: str, params: Mapping[str, Any]) -> None:
    given = ", ".join(
        f"{key}={value!r}"
        for key, value in params.items()
        if value != "auto" and key not in ("torch_adam", "adam_w_mode")
    )
    if name == "scheduler":
        reading.to_do.append(
            f"make the scheduler in the program ({kind}: {given}) and pass scheduler=… to trine.optimize"
        )
        return
    if kind.lower() in _ONE_BIT:
        reading.errors.append(
            f'optimizer.type = "{kind}" was removed from DeepSpeed: set communication.compression = "onebit" here and use '
            "torch.optim.AdamW"
        )
        return
    plain = kind.lower() == "adam" and params.get("adam_w_mode") is False
    ours = "torch.optim.Adam" if plain else _OPTIMIZERS.get(kind.lower(), kind)
    arguments = f", {given}" if given else ""
    reading.to_do.append(f"pass trine.optimize the optimizer: {ours}(model.parameters(){arguments})")


# --- writing -----------------------------------------------------------------------------------


def no_counterpart(config: Config) -> str | None:
    """Why DeepSpeed cannot be handed ``config``: the first key, or value, that it has no counterpart for."""
    for key, value in config.changes().items():
        if key == "engine" or key in BESIDE or key in SAID:
            reason = _cannot_say(config, key, value)
            if reason:
                return reason
        else:
            return f'{key} has no counterpart in DeepSpeed: take it out, or train with engine = "torch"'
    return None


def _cannot_say(config: Config, key: str, value: Any) -> str | None:
    torch_engine = 'or train with engine = "torch"'
    stage = config.zero.stage
    if value == "auto" and key in (
        "accumulation.steps",
        "accumulation.micro_batch",
        "communication.bucket_mib",
    ):
        return f'{key} = "auto" is measured by Trine\'s own engine: write a number under engine = "deepspeed", {torch_engine}'
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
    for pair in _PAIRS:
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
