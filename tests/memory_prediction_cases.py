"""What the tests of memory prediction run on real ranks; importable by spawned processes."""

from __future__ import annotations

from typing import Any

import optim_cases
import torch

import trine
from trine.optim.runtime import meshes, sharding
from trine.optim.runtime.counted_steps import counted
from trine.optim.runtime.memory_ledger import Ledger
from trine.samples.gpt import loss_of

__all__ = ["CASES", "allocated", "made"]

#: Name → configuration. Those with ``parallel.shard`` are for four ranks.
CASES: dict[str, dict[str, Any]] = {
    "plain replicas": {},
    "small buckets": {"communication.bucket_mib": 0.05},
    "gradients as views": {"communication.gradient_as_view": True},
    "zero 1": {"zero.stage": 1},
    "zero 2": {"zero.stage": 2},
    "zero 3": {"zero.stage": 3},
    "hybrid shards": {"zero.stage": 3, "parallel.shard": 2},
    "zero 3 + full checkpointing": {"zero.stage": 3, "checkpointing.mode": "full"},
    "selective checkpointing": {"checkpointing.mode": "selective"},
    "bf16": {"precision.dtype": "bf16"},
    "bf16 masters": {"precision.dtype": "bf16", "precision.master_weights": True},
    "zero 3 + bf16 masters": {
        "zero.stage": 3,
        "precision.dtype": "bf16",
        "precision.master_weights": True,
    },
    "micro-batches": {"accumulation.steps": 2},
    "zero 2 + micro-batches": {"zero.stage": 2, "accumulation.steps": 2},
    "fp16": {"precision.dtype": "fp16"},
    "fused": {"compute.fuse": ["optimizer", "norm", "mlp", "cross_entropy"]},
    "sdpa": {"compute.attention": "sdpa"},
    "low-precision activations": {"activations.dtype": "bf16"},
    "compressed": {"communication.compression": "int8"},
    "prefetch": {"zero.stage": 3, "zero.prefetch": 2},
    "quantized weights": {"zero.stage": 3, "zero.quantized_weights": True},
}


def made() -> tuple[Any, Any, Any]:
    """Model, optimizer and a batch of four."""
    model = optim_cases.small_gpt()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), optim_cases.batches(1, 4)[0]


def allocated(rank: int, changes: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes by kind of real tensors on this rank."""
    sharding._meshes.clear()  # a mesh that an earlier case made would be in no ledger
    meshes._made.clear()
    model, optimizer, batch = made()
    config = trine.Config().with_changes(changes)
    return counted(Ledger(), (model, optimizer), config, loss_of, batch)
