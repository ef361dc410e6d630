"""What the tests of memory prediction run on real ranks; importable by spawned processes."""

from __future__ import annotations

import gc
from typing import Any

import optim_cases
import torch

import trine
from trine.optim.runtime import meshes, sharding
from trine.optim.runtime.counted_steps import counted
from trine.optim.runtime.memory_fit import measured_bytes
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
    "prefetch": {"zero.stage": 3, "zero.prefetch": 2},
    "tensor parallel": {"parallel.tensor": 2},
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


def by_the_profiler(rank: int, changes: dict[str, Any]) -> tuple[int, int, int]:
    """Peak of the third step above what was there before it, on this rank: by the allocator's own events, by the ledger;
    and what kernels had for themselves at most.

    In the second, DistributedDataParallel makes its buckets anew, and lets go of the old ones when it comes to it.
    """
    config = trine.Config().with_changes(changes)

    def engine_of() -> tuple[Any, Any]:
        model, optimizer, batch = made()
        return trine.optimize(model, optimizer, config, loss_fn=loss_of), batch

    engine, batch = engine_of()
    for _ in range(2):
        engine.train_step(batch)
    gc.collect()
    gc.disable()
    try:
        events = measured_bytes(torch.device("cpu"), lambda: engine.train_step(batch))
        engine, batch = engine_of()
        for _ in range(2):
            engine.train_step(batch)
        gc.collect()
        ledger = Ledger()
        ledger.tag_model(engine.model)
        ledger.tag_optimizer(engine.optimizer)
        ledger.tag(batch, "batch")
        before = sum(ledger.at_end().values())
        with ledger:
            engine.train_step(batch)
    finally:
        gc.enable()
    return events, sum(ledger.peak().values()) - before, before


def by_pytorchs_tracker() -> tuple[int, int]:
    """Peaks of the second step of a sharded model, predicted: by the ledger and by FSDPMemTracker. In a fork."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools import FSDPMemTracker

    from trine.optim.runtime import pretended_ranks as pretended

    pretended.pretend(4, 0)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, optimizer, batch = made()
    batch = pretended.faked_batch(batch, mode)
    pretended.faked_optimizer(optimizer, pretended.faked_model(model, mode), mode)
    config = trine.Config().with_changes({"zero.stage": 3})
    peaks = []
    with mode:
        ledger = pretended.PretendedLedger()
        ledger.tag_model(model)
        ledger.tag(batch, "batch")
        with ledger:
            engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
            ledger.tag_model(engine.model)
            engine.train_step(batch)
            gc.collect()
            since = ledger.mark()
            tracker = FSDPMemTracker(engine.model, engine.optimizer)
            tracker.track_inputs(batch)
            tracker.track_external(*engine.model.buffers())
            with tracker:
                engine.train_step(batch)
        peaks.append(sum(ledger.peak(since).values()))
        peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    return peaks[0], peaks[1]
