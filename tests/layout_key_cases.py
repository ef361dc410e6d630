"""Every key of the configuration under every kind of parallelism on two ranks; importable by spawned ranks.

A row says what is set for a key, and how near to the plain run, on the whole batch in one process, losses must stay.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import parity

__all__ = ["LAYOUTS", "ROWS", "Row", "case_of", "run", "run_plain", "run_replicated"]

#: Kind of parallelism → its configuration, what it makes of the sample's model, and the dtype it is exact in.
LAYOUTS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": ({"parallel.tensor": 2}, {}),
    "pipeline": ({"parallel.pipeline": 2}, {"layers": 4}),
    "expert": ({"parallel.expert": 2}, {"experts": 4}),
    "context": ({"parallel.context": 2}, {"attention": "sdpa"}),
}


@dataclass(frozen=True)
class Row:
    """What is set for ``key``, with what else it needs to mean anything."""

    key: str
    changes: Mapping[str, Any]
    tolerance: float = 1e-10
    dtype: str = "float64"
    data: str = "windows"
    model: Mapping[str, Any] = field(default_factory=dict)
    #: Keys of ``changes`` that a refusal may name instead: it needs them.
    needs: tuple[str, ...] = ()
    #: Compiles.
    is_long: bool = False

    @property
    def must_round(self) -> bool:
        """Whether a run in which every bit is the plain one's shows that the key did nothing."""
        return self.key in _ROUNDING


def _row(key: str, value: Any, needs: Mapping[str, Any] | None = None, **others: Any) -> Row:
    return Row(key, {key: value, **(needs or {})}, needs=tuple(needs or ()), **others)


_ROUNDING = ("precision.dtype", "activations.dtype", "communication.compression", "zero.quantized_weights")
_LOW: dict[str, Any] = {"dtype": "float32", "tolerance": 5e-3}
_SINGLE: dict[str, Any] = {"dtype": "float32", "tolerance": 1e-5}
_DOCUMENTS: dict[str, Any] = {"data": "documents"}
_FULL = {"checkpointing.mode": "full"}
_DISK = {"offload.path": gettempdir()}
_ON_CPU = {"offload.optimizer": "cpu"}
_TIERS = {"offload.optimizer": "nvme", **_DISK}
_LATE = {"accumulation.delayed": True}

ROWS: tuple[Row, ...] = (
    _row("engine", "deepspeed"),
    _row("precision.dtype", "bf16", **_LOW),
    _row("precision.dtype", "fp16", **_LOW),
    _row("precision.master_weights", True, {"precision.dtype": "bf16"}, **_LOW),
    _row("precision.loss_scale", 1024.0, {"precision.dtype": "fp16"}, **_LOW),
    _row("precision.tf32", True),
    _row("precision.float8", True, dtype="float32", tolerance=5e-2),
    _row("compute.compile", "blocks", is_long=True, **_SINGLE),
    _row("compute.compile", "model", is_long=True, **_SINGLE),
    _row("compute.attention", "sdpa"),
    _row("compute.attention", "flash"),
    _row("compute.attention", "auto"),
    _row("compute.fuse", ["optimizer"]),
    _row("compute.fuse", ["mlp", "norm"], is_long=True, **_SINGLE),
    _row("compute.fuse", ["cross_entropy"], is_long=True, **_SINGLE),
    _row("compute.fuse", ["bias_dropout_residual"], is_long=True, **_SINGLE),
    _row("data.packing", True, **_DOCUMENTS),
    _row("data.packed_length", 64, {"data.packing": True}, **_DOCUMENTS),
    _row("data.length_grouped", True, **_DOCUMENTS),
    _row("data.shape_buckets", [16, 32], **_DOCUMENTS),
    _row("data.workers", 1),
    _row("data.pin_memory", True),
    _row("data.prefetch", 2, {"data.workers": 1}),
    _row("accumulation.steps", 2),
    _row("accumulation.steps", "auto"),
    _row("accumulation.micro_batch", 2),
    _row("accumulation.micro_batch", "auto"),
    _row("accumulation.global_batch", 8),
    _row("accumulation.delayed", True),
    _row("accumulation.delayed_warmup_steps", 1, _LATE),
    _row("parallel.data", 1),
    _row("parallel.shard", 1),
    _row("parallel.sequence", True),
    _row("parallel.loss", True),
    _row("parallel.plan", {"blocks.*.up": "column", "blocks.*.down": "row"}),
    _row("parallel.schedule", "gpipe"),
    _row("parallel.schedule", "zbv"),
    _row("parallel.chunks", 2, {"parallel.schedule": "interleaved"}),
    _row("parallel.microbatches", 4),
    _row("parallel.split", "layers"),
    _row("zero.stage", 1),
    _row("zero.stage", 2),
    _row("zero.stage", 3),
    _row("zero.quantized_weights", True, {"zero.stage": 3}, **_LOW),
    _row("zero.reshard_after_forward", True, {"zero.stage": 3}),
    _row("zero.prefetch", 1, {"zero.stage": 3}),
    _row("communication.bucket_mib", 1.0),
    _row("communication.bucket_mib", "auto"),
    _row("communication.first_bucket_mib", 1.0),
    _row("communication.gradient_as_view", True),
    _row("communication.static_graph", True),
    _row("communication.overlap", False),
    *(
        _row("communication.compression", kind)
        for kind in ("bf16", "fp16", "int8", "qsgd", "powersgd", "onebit", "terngrad")
    ),
    _row("communication.compression_levels", 16, {"communication.compression": "qsgd"}),
    _row("communication.compression_rank", 2, {"communication.compression": "powersgd"}),
    _row("communication.compression_warmup_steps", 2, {"communication.compression": "onebit"}),
    *(_row("communication.algorithm", name) for name in ("ring", "tree", "two_level", "auto")),
    _row("communication.nccl", {"algo": "ring"}),
    _row("checkpointing.mode", "full"),
    _row("checkpointing.mode", "selective"),
    _row("checkpointing.mode", "auto"),
    _row("checkpointing.every", 2, _FULL),
    _row("checkpointing.modules", ["blocks.*"], _FULL),
    _row("checkpointing.operators", ["matmul"], {"checkpointing.mode": "selective"}),
    _row("checkpointing.budget_bytes", 3_000_000, {"checkpointing.mode": "budget"}),
    _row(
        "checkpointing.budget_bytes",
        2_500_000,
        {"checkpointing.mode": "budget", "offload.activations": "cpu"},
    ),
    _row("offload.optimizer", "cpu"),
    _row("offload.optimizer", "nvme", _DISK),
    _row("offload.parameters", "cpu"),
    _row("offload.parameters", "nvme", _DISK),
    _row("offload.activations", "cpu"),
    _row("offload.activations", "nvme", _DISK),
    _row("offload.path", gettempdir(), {"offload.activations": "nvme"}),
    _row("offload.tile_mib", 1.0, _ON_CPU),
    _row("offload.overlap", False, _ON_CPU),
    _row("offload.device_bytes", 10**9, {"accumulation.micro_batch": "auto"}),
    _row("offload.device_bytes", 100_000, _TIERS),
    _row("offload.cpu_bytes", 100_000, _TIERS),
    _row("activations.dtype", "bf16", **_LOW),
    _row("activations.dtype", "fp8", dtype="float32", tolerance=2e-2),
    _row("activations.pool", True, {"offload.activations": "cpu"}),
)


def case_of(row: Row, layout: str) -> parity.Case:
    """The row under a layout."""
    changes, model = LAYOUTS[layout]
    return parity.Case(
        f"{row.key} under {layout}",
        {**changes, **row.changes},
        ranks=2,
        dtype=row.dtype,
        tolerance=row.tolerance,
        optimizer="sgd",
        data=row.data,
        model={**model, **row.model},
    )


def run(rank: int, number: int, layout: str, steps: int) -> Any:
    """What a rank's losses and parameters came to, or the refusal in words."""
    return _told(rank, case_of(ROWS[number], layout), steps)


def run_plain(rank: int, number: int, layout: str, steps: int) -> Any:
    """The same without the row's keys."""
    return _told(rank, replace(case_of(ROWS[number], layout), changes=LAYOUTS[layout][0]), steps)


def run_replicated(rank: int, number: int, layout: str, steps: int) -> Any:
    """The same model with the row's keys on two replicas."""
    return _told(rank, replace(case_of(ROWS[number], layout), changes=ROWS[number].changes), steps)


def _told(rank: int, case: parity.Case, steps: int) -> Any:
    import torch
    from torch import distributed

    from trine.record.errors import UsageError

    torch.set_num_threads(1)
    found: Any
    try:
        found = parity.run_rank(rank, 2, case, steps)
    except UsageError as error:
        found = str(error)
    refused = torch.tensor(float(isinstance(found, str)))
    distributed.all_reduce(refused)
    if float(refused) == 1.0:
        raise AssertionError(
            f"rank {rank} alone {'was refused' if isinstance(found, str) else 'went on'}: {found}"
        )
    return found
