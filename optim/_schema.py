"""Rules for one configuration key, TOML spelling, and the names that other tools give the same thing."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trine.record.errors import UsageError

__all__ = ["Key", "foreign_name", "spell"]


@dataclass(frozen=True, slots=True)
class Key:
    """What a key takes: types, or choices, or a list of members; ``None`` where it is the default."""

    kinds: tuple[type, ...]
    default: Any
    choices: tuple[Any, ...] = ()
    members: tuple[str, ...] = ()
    ascending: bool = (
        False  # a list of whole numbers, each above the one before it, the first at least ``least``
    )
    least: float | None = None
    above: float | None = None
    auto: bool = False

    def check(self, path: str, value: Any) -> None:
        """Raise ``UsageError`` that names ``path``, what it got and what it takes."""
        if (value is None and self.default is None) or (self.auto and value == "auto"):
            return
        foreign = _foreign_kind(value)
        if foreign is not None:
            holds = "not a" if foreign == type(value).__name__ else "and is given one that holds a"
            raise UsageError(f"{path} takes {self._takes()}, {holds} {foreign}")
        if self.choices:
            if not any(value == choice and type(value) is type(choice) for choice in self.choices):
                raise UsageError(f"{path} = {spell(value)}: it takes {self._takes()}{self._near(value)}")
            return
        if not any(_is(value, kind) for kind in self.kinds):
            raise UsageError(f"{path} = {spell(value)}: it takes {self._takes()}")
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise UsageError(f"{path} = {spell(value)}: the keys of a table are strings")
        if isinstance(value, tuple):
            self._check_members(path, value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{path} = {spell(value)}: it takes a finite number")
            if self.least is not None and not value >= self.least:
                raise UsageError(f"{path} = {spell(value)}: it takes {self.least:g} or more")
            if self.above is not None and not value > self.above:
                raise UsageError(f"{path} = {spell(value)}: it takes more than {self.above:g}")

    def _check_members(self, path: str, value: tuple[Any, ...]) -> None:
        if self.ascending:
            numbers = all(_is(member, int) for member in value)
            if not numbers or any(a >= b for a, b in pairwise((int(self.least or 1) - 1, *value))):
                raise UsageError(f"{path} = {spell(value)}: it takes {self._takes()}")
            return
        for member in value:
            if not isinstance(member, str):
                raise UsageError(f"{path}: {spell(member)} is not a string")
            if self.members and member not in self.members:
                listed = ", ".join(f'"{name}"' for name in self.members)
                near = difflib.get_close_matches(member, self.members, n=1)
                guess = f'; did you mean "{near[0]}"?' if near else ""
                raise UsageError(f'{path}: "{member}" is none of {listed}{guess}')
        if len(set(value)) != len(value):
            raise UsageError(f"{path} names something twice: {spell(value)}")

    def _takes(self) -> str:
        words = [spell(choice) for choice in self.choices]
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        names |= {tuple: "a list of ascending whole numbers"} if self.ascending else {}
        words += [names.get(kind, "a list of strings" if kind is tuple else "a table") for kind in self.kinds]
        if self.auto:
            words.append('"auto"')
        return " or ".join(words)

    def _near(self, value: Any) -> str:
        texts = [choice for choice in self.choices if isinstance(choice, str)]
        near = difflib.get_close_matches(value, texts, n=1) if isinstance(value, str) else []
        return f'; did you mean "{near[0]}"?' if near else ""


def spell(value: Any) -> str:
    """A value as TOML writes it. Raises ``UsageError`` for what TOML cannot say."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(spell(member) for member in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spell(str(key))} = {spell(item)}" for key, item in value.items()) + "}"
    if value is None:
        return "none"
    raise UsageError(f"{value!r} cannot stand in a configuration")


def _foreign_kind(value: Any) -> str | None:
    """The type of what TOML cannot say, numpy's numbers, tensors or bytes: of the value, or of a member."""
    if isinstance(value, (tuple, list, dict)):
        members = value.values() if isinstance(value, dict) else value
        return next((kind for member in members if (kind := _foreign_kind(member)) is not None), None)
    return None if value is None or isinstance(value, (bool, str, int, float)) else type(value).__name__


def foreign_name(path: str) -> str | None:
    """What a key of DeepSpeed, torchtitan, Accelerate, Megatron or PyTorch is called here."""
    last = path.rpartition(".")[2]
    if path in ("bf16", "bf16.enabled", "fp16", "fp16.enabled"):
        return f'precision.dtype = "{path.partition(".")[0]}"'
    return _FOREIGN.get(path) or _FOREIGN.get(last)


#: Their name → ours. From DeepSpeed's configuration page, torchtitan's config manager, Accelerate's
#: plugins and Megatron-LM's arguments.
_FOREIGN = {
    "mixed_precision": "precision.dtype",
    "mixed_precision_param": "precision.dtype",
    "gradient_accumulation_steps": "accumulation.steps",
    "train_micro_batch_size_per_gpu": "accumulation.micro_batch",
    "micro_batch_size": "accumulation.micro_batch",
    "train_batch_size": "accumulation.global_batch",
    "global_batch_size": "accumulation.global_batch",
    "bucket_cap_mb": "communication.bucket_mib",
    "reduce_bucket_size": "communication.bucket_mib (in MiB, not elements)",
    "gradient_as_bucket_view": "communication.gradient_as_view",
    "overlap_comm": "communication.overlap",
    "overlap_grad_reduce": "communication.overlap",
    "comm_hook": "communication.compression",
    "matrix_approximation_rank": "communication.compression_rank",
    "freeze_step": "communication.compression_warmup_steps",
    "zero_optimization": "[zero] with zero.stage",
    "zero_optimization.stage": "zero.stage",
    "zero_quantized_weights": "zero.quantized_weights",
    "zero_quantized_gradients": 'communication.compression = "int8" beside zero.stage',
    "tensor_parallel_degree": "parallel.tensor",
    "tensor_model_parallel_size": "parallel.tensor",
    "tp_size": "parallel.tensor",
    "pipeline_parallel_degree": "parallel.pipeline",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "pp_size": "parallel.pipeline",
    "pipeline_parallel_schedule": "parallel.schedule",
    "num_microbatches": "parallel.microbatches",
    "context_parallel_degree": "parallel.context",
    "sequence_parallel": "parallel.sequence",
    "data_parallel_shard_degree": "parallel.shard",
    "data_parallel_replicate_degree": "parallel.data",
    "recompute_granularity": "checkpointing.mode",
    "activation_checkpoint": "checkpointing.mode",
    "num_workers": "data.workers",
    "prefetch_factor": "data.prefetch",
    "offload_optimizer": "offload.optimizer",
    "offload_param": "offload.parameters",
    "nvme_path": "offload.path",
    "fused": 'compute.fuse = ["optimizer"]',
    "attn_implementation": "compute.attention",
}


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
