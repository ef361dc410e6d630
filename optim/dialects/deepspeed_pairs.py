"""What one key of ours and one of DeepSpeed's mean alike: one table, used to read their file and to write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trine.optim.config import Config
from trine.optim.dialects.reading import Reading, spelled

__all__ = ["BESIDE", "PAIRS", "SAID", "Pair", "read_path"]

_MIB = 2**20

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
class Pair:
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
    return max(1, round(float(value) * _MIB / _element_bytes(config)))


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


def read_path(value: Any, reading: Reading) -> str | None:
    """Only where something is offloaded to disk; files often keep the key."""
    devices = {reading.changes.get("offload.optimizer"), reading.changes.get("offload.parameters")}
    return str(value) if "nvme" in devices else None


PAIRS = (
    Pair("zero.stage", "zero_optimization.stage", (int,)),
    Pair("accumulation.global_batch", "train_batch_size", (int,)),
    Pair("accumulation.micro_batch", "train_micro_batch_size_per_gpu", (int,)),
    Pair("accumulation.steps", "gradient_accumulation_steps", (int,)),
    Pair(
        "zero.reshard_after_forward",
        "zero_optimization.zero_hpz_partition_size",
        (int,),
        read=lambda value, reading: value if value > 1 else None,
    ),
    Pair(
        "zero.quantized_weights",
        "zero_optimization.zero_quantized_weights",
        (bool,),
        read=lambda value, reading: value or None,
    ),
    Pair("communication.overlap", "zero_optimization.overlap_comm", (bool,), read=_read_overlap),
    Pair(
        "communication.bucket_mib",
        "zero_optimization.reduce_bucket_size",
        (int,),
        _write_bucket,
        _read_bucket,
    ),
    Pair("offload.optimizer", "zero_optimization.offload_optimizer.device", (str,), read=_read_device),
    Pair("offload.parameters", "zero_optimization.offload_param.device", (str,), read=_read_device),
)

#: Keys of ours that DeepSpeed has a counterpart for.
SAID = frozenset(pair.ours for pair in PAIRS) | {
    "communication.compression",
    "offload.path",
    "precision.dtype",
    "precision.loss_scale",
    "precision.master_weights",
}
