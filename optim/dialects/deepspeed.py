"""DeepSpeed's JSON, read into our configuration.

What one key of theirs and one of ours mean alike stands in :mod:`trine.optim.dialects.deepspeed_pairs`, for both directions;
precision and gradient compression, which are several keys on one side, have a function a direction. What becomes of every
other key of theirs is in :mod:`trine.optim.dialects.deepspeed_keys`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trine.optim.dialects.deepspeed_keys import ROWS_BY_PATH
from trine.optim.dialects.deepspeed_pairs import PAIRS, read_path
from trine.optim.dialects.reading import Imported, Reading, announce, mapping_of, spelled

__all__ = ["CLIPS_AT", "imported_from", "read_deepspeed", "read_tables"]

#: DeepSpeed clips to this norm where its file says nothing of clipping (``runtime/constants.py``).
CLIPS_AT = 1.0


def read_deepspeed(source: str | Path | Mapping[str, Any], *, ranks: int | None = None) -> Imported:
    """A DeepSpeed configuration in our words.

    ``source`` is the path of its JSON file, or the dictionary. ``ranks``, of the job it is for, is only needed where the
    file gives micro-batch and accumulation without ``train_batch_size``. ``"auto"``, as Transformers' Trainer fills in,
    is left to the program. Raises ``UsageError`` in one line that names every key that is unknown, was removed, or has
    no counterpart, with what to write instead; ``UnreadableInput`` for what is no JSON.
    """
    tables, name = read_tables(source)
    imported = imported_from(tables, name, ranks)
    announce(imported, name)
    return imported


def read_tables(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The tables of a file of DeepSpeed's, or the dictionary, and what to call it in errors."""
    return mapping_of(source, "DeepSpeed", _parsed)


def imported_from(tables: Mapping[str, Any], name: str, ranks: int | None) -> Imported:
    """As :func:`read_deepspeed`, from its tables, and says nothing on the logger."""
    reading = Reading(name, ROWS_BY_PATH)
    reading.walk(_normalised(tables))
    _read_precision(reading)
    _read_pairs(reading)
    _read_compression(reading)
    _read_parallel(reading)
    _read_batch(reading, ranks)
    _tell(reading, tables)
    _tell_of_objects(reading)
    return reading.finished()


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
    if reading.pop("bfloat16") is not None:
        reading.errors.append("bfloat16 is the old name of bf16: keep one of them")
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
        short: dict[Any, str] = {"bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "fp16": "fp16"}
        short |= {"float16": "fp16", "torch.float16": "fp16", "half": "fp16"}
        if dtype is None:
            reading.errors.append(
                "torch_autocast without dtype is float16 on CUDA and bfloat16 on a CPU: say which in torch_autocast.dtype"
            )
            return
        if dtype not in short:
            reading.errors.append(
                f'torch_autocast.dtype = {spelled(dtype)}: it takes "bfloat16" or "float16"'
            )
            return
        reading.set("precision.dtype", short[dtype], "torch_autocast.dtype")
    if scale and "fp16" not in masters:
        reading.leave_out("fp16.enabled is off", "fp16.loss_scale")
    if dtype is not None and not autocast:
        reading.leave_out("torch_autocast.enabled is off", "torch_autocast.dtype")


def _read_pairs(reading: Reading) -> None:
    for pair in PAIRS:
        value = reading.pop(pair.theirs, pair.kinds)
        if value is None:
            continue
        ours = pair.read(value, reading)
        if ours is not None:
            reading.set(pair.ours, ours, pair.theirs)
    for table in ("offload_optimizer", "offload_param"):
        path = reading.pop(f"zero_optimization.{table}.nvme_path", str)
        if path is None:
            continue
        key = f"zero_optimization.{table}.nvme_path"
        found = read_path(path, reading)
        if found is None:
            reading.leave_out("nothing is offloaded to disk", key)
        else:
            reading.set("offload.path", found, key)


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
        else:
            reading.leave_out("gradients travel as the parameters are", "communication_data_type")
    elif dtype == "fp32":
        if low is not None and reading.changes.get("zero.stage", 0) < 2:
            reading.errors.append(
                f'communication_data_type = "fp32" over {low} parameters: gradients travel as the parameters are here, and in '
                "float32 under zero stage 2 and 3: raise the stage, or take it out"
            )
        else:
            reading.leave_out("gradients travel in float32", "communication_data_type")
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
    experts = reading.pop_table("expert_parallel")
    if experts.get("enabled"):
        reading.values["expert_parallel.autoep_size"] = experts.get("autoep_size", 1)
        size = reading.pop("expert_parallel.autoep_size", int, 1)
        if size > 1:
            reading.set("parallel.expert", size, "expert_parallel.autoep_size")
        else:
            reading.leave_out("every rank has all experts", "expert_parallel.enabled")
    elif "autoep_size" in experts:
        reading.leave_out("expert_parallel.enabled is off", "expert_parallel.autoep_size")
    others = [name for name in experts if name not in ("enabled", "autoep_size")]
    if others:
        reading.notes.append(
            f"expert_parallel.{', '.join(others)}: experts are found by the model's structure"
        )
    compiling = reading.pop_table("compile")
    if compiling.get("deepcompile"):
        reading.set("compute.compile", "blocks", "compile.deepcompile")
    others = [name for name, value in compiling.items() if name != "deepcompile" and value]
    if others:
        reading.notes.append(f"compile.{', '.join(others)}: torch.compile alone is used")


def _read_batch(reading: Reading, ranks: int | None) -> None:
    """``train_batch_size`` = micro-batch × accumulation × ranks; two of them and the ranks give the third.

    Ranks that share a sequence or matrices share their samples, and count as one.
    """
    changes = reading.changes
    if ranks is not None:
        ranks = max(1, ranks // (changes.get("parallel.context", 1) * changes.get("parallel.tensor", 1)))
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
    """What belongs into the program: clipping, and what becomes of gradients that are not finite."""
    norm = reading.pop("gradient_clipping", (int, float))
    if norm is None and tables.get("gradient_clipping") != "auto":
        norm = CLIPS_AT
        reading.notes.append(f"without gradient_clipping DeepSpeed clips at {CLIPS_AT}")
    if norm is not None and norm > 0:
        reading.arguments["clip_norm"] = float(norm)
        reading.to_do.append(
            f"pass clip_norm={float(norm)} to trine.optimize: DeepSpeed clips gradients to this norm"
        )
    checks = reading.pop("bf16.check_grad_overflow", bool)
    is_bf16 = reading.changes.get("precision.dtype") == "bf16"
    if checks is False and is_bf16:
        reading.arguments["nonfinite"] = "allow"
        reading.to_do.append('pass nonfinite="allow" to trine.optimize: bf16.check_grad_overflow is off')
    elif checks is not None:
        why = "gradients are looked at by default: nonfinite" if is_bf16 else "bf16.enabled is off"
        reading.leave_out(why, "bf16.check_grad_overflow")


def _tell_of_objects(reading: Reading) -> None:
    """The optimizer and the scheduler, which the program makes."""
    for name, default in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        if name not in reading.values:
            continue
        table = reading.pop_table(name)
        reading.values[f"{name}.params"] = table.get("params")
        params = reading.pop_table(f"{name}.params")
        if table.get("legacy_fusion"):
            reading.leave_out("the optimizer's kernels are PyTorch's", f"{name}.legacy_fusion")
        if "torch_adam" in params:
            reading.leave_out("the optimizer's kernels are PyTorch's", f"{name}.params.torch_adam")
        if table:
            _tell_of_object(reading, name, str(table.get("type") or default), params)


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
            f"make the scheduler in the program ({kind}{': ' if given else ''}{given}) and pass scheduler=… to trine.optimize"
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
