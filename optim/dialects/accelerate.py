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

from trine.optim.dialects.accelerate_deepspeed import read_inside
from trine.optim.dialects.accelerate_keys import DDP_ROWS_BY_PATH, ROWS_BY_PATH
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
    tables = _normalised(tables, reading.errors)
    reading.walk(tables)
    processes = _processes(reading)
    ranks = processes if ranks is None else ranks
    kind = _word(reading, "distributed_type", "NO").upper()
    precision = _precision_of(reading)
    fsdp = _only_for(reading, "FSDP", "fsdp_config", kind)
    _only_for(reading, "DEEPSPEED", "deepspeed_config", kind)
    if kind == "DEEPSPEED":
        folder = None if isinstance(source, Mapping) else Path(source).parent
        read_inside(reading, tables, precision, ranks, folder)
    elif kind in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        _read_precision(reading, precision, kind == "FSDP")
        if kind == "FSDP":
            _read_fsdp(reading, fsdp)
    else:
        reading.errors.append(_other_kind(kind))
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


def _normalised(tables: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    """Prefixes inside the tables put in, ``"true"`` made true, and older spellings that Accelerate converts itself."""
    found: dict[str, Any] = {}
    prefixes = {
        "fsdp_config": "fsdp_",
        "dynamo_config": "dynamo_",
        "parallelism_config": "parallelism_config_",
    }
    for name, value in tables.items():
        if not isinstance(value, Mapping):
            found[name] = _truth(value)
            continue
        prefix = prefixes.get(name, "")
        found[name] = {}
        for key, inner in value.items():
            whole = key if str(key).startswith(prefix) else f"{prefix}{key}"
            if whole in found[name]:
                errors.append(f"{name}.{whole} stands in it with and without {prefix}: keep one of them")
            found[name][whole] = _truth(inner)
    if "fp16" in found:
        older = "fp16" if found.pop("fp16") else "no"
        if older == "fp16" and found.get("mixed_precision") not in (None, older):
            errors.append("fp16 is an older spelling of what mixed_precision says: keep one of them")
        found.setdefault("mixed_precision", older)
    if "dynamo_backend" in found:
        if found.get("dynamo_config"):
            errors.append("dynamo_backend is an older spelling of what dynamo_config says: keep one of them")
        found["dynamo_config"] = {"dynamo_backend": found.pop("dynamo_backend")}
    return found


def _only_for(reading: Reading, of: str, name: str, kind: str) -> dict[str, Any]:
    """The values of a table, taken out of ``reading``; left out with a reason where another ``kind`` is asked for."""
    found = {path: reading.values.pop(path) for path in list(reading.values) if path.startswith(f"{name}.")}
    if found and kind != of:
        reading.leave_out(f"only for distributed_type = {of}", *found)
    return found


def _processes(reading: Reading) -> int | None:
    """Of the job; ``None`` where the file leaves it to the launcher, by -1 or by saying nothing."""
    processes: int | None = reading.pop("num_processes", int)
    if processes == -1:
        return None
    if processes is not None and processes < 1:
        reading.errors.append(f"num_processes = {processes}: it takes 1 or more, or -1 for the launcher's")
    return processes


def _word(reading: Reading, path: str, default: str) -> str:
    """A word; YAML reads an unquoted ``no`` as false."""
    if reading.values.get(path) is False:
        reading.values[path] = "no"
    return str(reading.pop(path, str, default))


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


def _precision_of(reading: Reading) -> str:
    """``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``, of whatever kind."""
    given = _word(reading, "mixed_precision", "no").lower()
    if given in ("no", "fp32", "false", "none"):
        return "no"
    if given not in ("fp16", "bf16", "fp8"):
        reading.errors.append(f'mixed_precision = {spelled(given)}: it takes "no", "fp16", "bf16" or "fp8"')
        return "no"
    return given


def _read_precision(reading: Reading, precision: str, sharded: bool) -> None:
    if precision in ("bf16", "fp16"):
        reading.set("precision.dtype", precision, "mixed_precision")
        if sharded:  # FSDP gathers parameters in it, from shards in float32
            reading.set("precision.master_weights", True, "mixed_precision")
    elif precision == "fp8":
        reading.set("precision.dtype", "bf16", "mixed_precision")
        reading.set("precision.float8", True, "mixed_precision")


# --- FSDP --------------------------------------------------------------------------------------


def _read_fsdp(reading: Reading, fsdp: dict[str, Any]) -> None:
    values = {path.removeprefix("fsdp_config.fsdp_"): value for path, value in fsdp.items()}
    version = str(values.get("version", 1))
    if version not in ("1", "2"):
        reading.errors.append(f"fsdp_version = {spelled(values['version'])}: it takes 1 or 2")
    _read_strategy(reading, values, version)
    if _is_true(reading, values, "offload_params"):
        reading.set("offload.parameters", "cpu", "fsdp_offload_params")
        reading.set("offload.optimizer", "cpu", "fsdp_offload_params")
    if _is_true(reading, values, "activation_checkpointing"):
        reading.set("checkpointing.mode", "full", "fsdp_activation_checkpointing")
    if _is_true(reading, values, "activation_checkpointing_offload"):
        reading.set("offload.activations", "cpu", "fsdp_activation_checkpointing_offload")
    if _is_true(reading, values, "forward_prefetch"):
        reading.set("zero.prefetch", 1, "fsdp_forward_prefetch")


def _read_strategy(reading: Reading, values: Mapping[str, Any], version: str) -> None:
    """The second version says by true or false whether parameters are freed; the first names a strategy, in either key."""
    strategy, after = values.get("sharding_strategy"), values.get("reshard_after_forward")
    unused = "fsdp_config.fsdp_sharding_strategy"
    if version == "2":
        stage = 3 if after is None or _is_true(reading, values, "reshard_after_forward") else 2
        reading.set("zero.stage", stage, "fsdp_reshard_after_forward")
    else:
        unused = "fsdp_config.fsdp_reshard_after_forward"
        if strategy is None and not isinstance(after, bool):
            strategy, after = after, None
        stage, hybrid = _strategy_of(reading, strategy)
        if stage:
            reading.set("zero.stage", stage, "fsdp_sharding_strategy")
        if hybrid:
            reading.set("parallel.shard", "auto", "fsdp_sharding_strategy")
    if (strategy if version == "2" else after) is not None:
        reading.leave_out(f"fsdp_version = {version} has another key for it", unused)


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
    sizes = {theirs: reading.pop(prefix + theirs, int, 1) for theirs in names}
    for theirs, size in sizes.items():
        if size < 1:
            reading.errors.append(f"{theirs} = {size}: it takes 1 or more")
        elif size > 1:
            reading.set(names[theirs], size, theirs)
    if sizes["cp_size"] > 1 and sizes["sp_size"] > 1:
        reading.errors.append("cp_size and sp_size exclude each other: keep one of them")


def _read_dynamo(reading: Reading) -> None:
    prefix = "dynamo_config.dynamo_"
    backend = _word(reading, f"{prefix}backend", "NO").upper()
    given = [
        path for path in (f"{prefix}use_regional_compilation", f"{prefix}mode") if path in reading.values
    ]
    regional = reading.pop(f"{prefix}use_regional_compilation", bool, False)
    mode = reading.pop(f"{prefix}mode", str, "default")
    if backend == "NO":
        if given:
            reading.leave_out("nothing is compiled: dynamo_backend is NO", *given)
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
