"""Accelerate's YAML (``accelerate config``), read into our configuration.

A file of Accelerate says how to start processes, and what wraps the model in each. The first is a launcher's; the second
is translated: FSDP of both versions, DeepSpeed (inline or in a file of its own), parallel degrees, compilation. The
arguments of DistributedDataParallel are no part of the file: Accelerate takes them as an object in the program, and so
does ``ddp`` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from trine.optim.dialects.accelerate_keys import DDP_ROWS_BY_PATH, ROWS_BY_PATH
from trine.optim.dialects.deepspeed import imported_from, read_tables
from trine.optim.dialects.reading import Imported, Reading, announce, mapping_of, spelled
from trine.record.errors import UsageError

__all__ = ["read_accelerate"]

#: FSDP's strategies, by number as by name → stage, and whether shards stay inside a node.
_STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
_NUMBERED = tuple(_STRATEGIES)


def read_accelerate(
    source: str | Path | Mapping[str, Any], *, ranks: int | None = None, ddp: Any = None
) -> Imported:
    """An Accelerate configuration in our words.

    ``source`` is the path of its YAML file (read by PyYAML, which comes with Accelerate), or the dictionary. ``ranks``: of
    the job, instead of the file's ``num_processes``. ``ddp``: the program's ``DistributedDataParallelKwargs``, or a
    dictionary of its fields, with the communication hook in them. Raises ``UsageError`` in one line that names every key
    that is unknown or has no counterpart, with what to write instead; ``UnreadableInput`` for what is no YAML.
    """
    tables, name = mapping_of(source, "Accelerate", _parsed)
    reading = Reading(name, ROWS_BY_PATH)
    reading.walk(_normalised(tables))
    processes = reading.pop("num_processes", int)
    ranks = processes if ranks is None else ranks
    kind = str(reading.pop("distributed_type", str, "NO")).upper()
    precision = str(reading.pop("mixed_precision", str, "no")).lower()
    fsdp = {
        path: reading.values.pop(path) for path in list(reading.values) if path.startswith("fsdp_config.")
    }
    if kind == "DEEPSPEED":
        folder = None if isinstance(source, Mapping) else Path(source).parent
        _read_deepspeed(reading, tables, precision, ranks, folder)
    elif kind in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        _read_precision(reading, precision, kind == "FSDP")
        if kind == "FSDP":
            _read_fsdp(reading, fsdp)
    else:
        reading.errors.append(_other_kind(kind))
    reading.values = {
        path: value for path, value in reading.values.items() if not path.startswith("deepspeed_config.")
    }
    _read_parallel(reading)
    _read_dynamo(reading)
    if ddp is not None:
        _read_ddp(reading, ddp)
    imported = reading.finished()
    announce(imported, name)
    return imported


def _parsed(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "reading YAML needs PyYAML, which comes with Accelerate: pip install 'trine[accelerate]', or pass the "
            "configuration as a dictionary"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _normalised(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Prefixes inside the tables put in, ``"true"`` made true, and older spellings that Accelerate converts itself."""
    found: dict[str, Any] = {}
    prefixes = {
        "fsdp_config": "fsdp_",
        "dynamo_config": "dynamo_",
        "parallelism_config": "parallelism_config_",
    }
    for name, value in tables.items():
        if isinstance(value, Mapping):
            prefix = prefixes.get(name, "")
            found[name] = {
                (key if str(key).startswith(prefix) else f"{prefix}{key}"): _truth(inner)
                for key, inner in value.items()
            }
        else:
            found[name] = _truth(value)
    if "fp16" in found:
        found.setdefault("mixed_precision", "fp16" if found["fp16"] else "no")
        del found["fp16"]
    if "dynamo_backend" in found:
        found["dynamo_config"] = {"dynamo_backend": found.pop("dynamo_backend")}
    return found


def _truth(value: Any) -> Any:
    """YAML's quoted booleans, which Accelerate writes and reads."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def _other_kind(kind: str) -> str:
    if kind == "MEGATRON_LM":
        return (
            "distributed_type = MEGATRON_LM: write parallel.tensor, parallel.pipeline, parallel.sequence and "
            "parallel.microbatches here, which cut the model by PyTorch's own means"
        )
    return (
        f"distributed_type = {kind}: it is NO, MULTI_CPU, MULTI_GPU, FSDP or DEEPSPEED that can be taken over"
    )


def _read_precision(reading: Reading, precision: str, sharded: bool) -> None:
    if precision in ("bf16", "fp16"):
        reading.set("precision.dtype", precision, "mixed_precision")
        if sharded:  # FSDP gathers parameters in it, from shards in float32
            reading.set("precision.master_weights", True, "mixed_precision")
    elif precision == "fp8":
        reading.set("precision.dtype", "bf16", "mixed_precision")
        reading.set("precision.float8", True, "mixed_precision")
    elif precision not in ("no", "fp32", "false", "none"):
        reading.errors.append(
            f'mixed_precision = {spelled(precision)}: it takes "no", "fp16", "bf16" or "fp8"'
        )


# --- FSDP --------------------------------------------------------------------------------------


def _read_fsdp(reading: Reading, fsdp: dict[str, Any]) -> None:
    values = {path.removeprefix("fsdp_config.fsdp_"): value for path, value in fsdp.items()}
    version = str(values.get("version", 1))
    if version not in ("1", "2"):
        reading.errors.append(f"fsdp_version = {spelled(values['version'])}: it takes 1 or 2")
    after = values.get("reshard_after_forward")
    strategy = values.get("sharding_strategy", None if isinstance(after, bool) else after)
    if version == "2" and (isinstance(after, bool) or after is None):
        reading.set("zero.stage", 2 if after is False else 3, "fsdp_reshard_after_forward")
    else:
        stage, hybrid = _strategy_of(reading, strategy)
        if stage:
            reading.set("zero.stage", stage, "fsdp_sharding_strategy")
        if hybrid:
            reading.set("parallel.shard", "auto", "fsdp_sharding_strategy")
    if _is_true(reading, values, "offload_params"):
        reading.set("offload.parameters", "cpu", "fsdp_offload_params")
        reading.set("offload.optimizer", "cpu", "fsdp_offload_params")
    if _is_true(reading, values, "activation_checkpointing"):
        reading.set("checkpointing.mode", "full", "fsdp_activation_checkpointing")
    if _is_true(reading, values, "activation_checkpointing_offload"):
        reading.set("offload.activations", "cpu", "fsdp_activation_checkpointing_offload")
    if _is_true(reading, values, "forward_prefetch"):
        reading.set("zero.prefetch", 1, "fsdp_forward_prefetch")


def _is_true(reading: Reading, values: Mapping[str, Any], name: str) -> bool:
    """As Accelerate reads it (``str_to_bool``): a quoted "no" is not true for being a string."""
    value = values.get(name)
    word = str(value).lower()
    if value is None or word in ("n", "no", "f", "false", "off", "0"):
        return False
    if word not in ("y", "yes", "t", "true", "on", "1"):
        reading.errors.append(f"fsdp_{name} = {spelled(value)}: it takes true or false")
    return True


def _strategy_of(reading: Reading, given: Any) -> tuple[int, bool]:
    name = "FULL_SHARD" if given is None else str(given).upper()
    if name.isdigit() and 1 <= int(name) <= len(_NUMBERED):
        name = _NUMBERED[int(name) - 1]
    if name not in _STRATEGIES:
        reading.errors.append(f"fsdp_sharding_strategy = {spelled(given)}: it takes {', '.join(_STRATEGIES)}")
        return 0, False
    return _STRATEGIES[name]


# --- DeepSpeed ---------------------------------------------------------------------------------


def _read_deepspeed(
    reading: Reading, tables: Mapping[str, Any], precision: str, ranks: int | None, folder: Path | None
) -> None:
    """By the other dialect: the file that is named, or the few keys that stand here."""
    given = tables.get("deepspeed_config") or {}
    inline = _normalised(given if isinstance(given, Mapping) else {})  # what is no table, the walk has named
    file = inline.get("deepspeed_config_file")
    if isinstance(file, str):
        path = Path(file) if folder is None else folder / file
        described, name = read_tables(path)
    else:
        described, name = _inline(inline), f"{reading.source}: deepspeed_config"
        if precision in ("bf16", "fp16"):
            described = {**described, precision: {"enabled": True}}
    try:
        found = imported_from(described, name, ranks)
    except UsageError as error:
        reading.errors.append(str(error))
        return
    for key, value in found.config.changes().items():
        reading.set(key, value, "deepspeed_config")
    reading.arguments |= found.arguments
    reading.to_do += found.to_do
    reading.notes += found.notes


def _inline(values: Mapping[str, Any]) -> dict[str, Any]:
    """Accelerate's short keys as DeepSpeed's; stage 2 where none is said, as its plugin has it."""
    zero: dict[str, Any] = {"stage": values.get("zero_stage", 2)}
    for table in ("offload_optimizer", "offload_param"):
        device = values.get(f"{table}_device")
        if device is not None:
            zero[table] = {"device": device}
            if values.get(f"{table}_nvme_path") not in (None, "none"):
                zero[table]["nvme_path"] = values[f"{table}_nvme_path"]
    found: dict[str, Any] = {"zero_optimization": zero}
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        if values.get(key) is not None:
            found[key] = values[key]
    return found


# --- the rest ----------------------------------------------------------------------------------


def _read_parallel(reading: Reading) -> None:
    prefix = "parallelism_config.parallelism_config_"
    names = {
        "dp_replicate_size": "parallel.data",
        "dp_shard_size": "parallel.shard",
        "tp_size": "parallel.tensor",
        "cp_size": "parallel.context",
        "sp_size": "parallel.context",
    }
    for theirs, ours in names.items():
        size = reading.pop(prefix + theirs, int)
        if size is not None and size > 1:
            reading.set(ours, size, theirs)


def _read_dynamo(reading: Reading) -> None:
    prefix = "dynamo_config.dynamo_"
    backend = str(reading.pop(f"{prefix}backend", str, "NO")).upper()
    regional = reading.pop(f"{prefix}use_regional_compilation", bool, False)
    mode = reading.pop(f"{prefix}mode", str, "default")
    if backend == "NO":
        return
    if backend != "INDUCTOR":
        reading.errors.append(
            f"dynamo_backend = {backend}: regions are compiled by Inductor here: write INDUCTOR, or NO"
        )
        return
    if mode not in ("default", None):
        reading.errors.append(
            f"dynamo_mode = {spelled(mode)}: torch.compile's default mode is used: take it out"
        )
    reading.set("compute.compile", "blocks" if regional else "model", "dynamo_backend")


def _read_ddp(reading: Reading, given: Any) -> None:
    """The fields of ``DistributedDataParallelKwargs`` that differ from PyTorch's defaults."""
    fields = asdict(given) if is_dataclass(given) and not isinstance(given, type) else given
    if not isinstance(fields, Mapping):
        raise UsageError(
            f"ddp is a {type(given).__name__}: it takes Accelerate's DistributedDataParallelKwargs, or a dictionary of its fields"
        )
    inner = Reading("ddp", DDP_ROWS_BY_PATH)
    inner.walk({key: getattr(value, "value", value) for key, value in fields.items()})
    hook = str(inner.pop("comm_hook", str, "no"))
    wrapper = str(inner.pop("comm_wrapper", str, "no"))
    options = inner.pop("comm_state_option", dict, {})
    bucket = inner.pop("bucket_cap_mb", (int, float))
    if bucket not in (None, 25):
        reading.set("communication.bucket_mib", float(bucket), "bucket_cap_mb")
    for theirs, ours in (("gradient_as_bucket_view", "gradient_as_view"), ("static_graph", "static_graph")):
        if inner.pop(theirs, bool, False):
            reading.set(f"communication.{ours}", True, theirs)
    if inner.pop("find_unused_parameters", bool, False):
        inner.to_do.append(
            "wrap the model in DistributedDataParallel(…, find_unused_parameters=True) before trine.optimize, which adopts it"
        )
    _read_hook(reading, inner, hook, wrapper, options)
    for name in ("errors", "notes", "to_do"):
        getattr(reading, name).extend(getattr(inner, name))
    reading.left_out |= inner.left_out


def _read_hook(reading: Reading, inner: Reading, hook: str, wrapper: str, options: Mapping[str, Any]) -> None:
    if hook == "no":
        return
    if hook in ("fp16", "bf16"):
        reading.set("communication.compression", hook, "comm_hook")
    elif hook == "power_sgd":
        reading.set("communication.compression", "powersgd", "comm_hook")
        for theirs, ours in (
            ("matrix_approximation_rank", "communication.compression_rank"),
            ("start_powerSGD_iter", "communication.compression_warmup_steps"),
        ):
            if theirs in options:
                reading.set(ours, options[theirs], f"comm_state_option.{theirs}")
        others = [
            str(name) for name in options if name not in ("matrix_approximation_rank", "start_powerSGD_iter")
        ]
        if others:
            inner.notes.append(
                f"comm_state_option.{', '.join(others)} is left out: the error feedback is always on"
            )
    else:
        inner.errors.append(
            f'comm_hook = {spelled(hook)}: it fails inside PyTorch; "power_sgd" is its sound relative'
        )
    if wrapper != "no":
        inner.errors.append(f"comm_wrapper = {spelled(wrapper)}: one compression at a time: take it out")
