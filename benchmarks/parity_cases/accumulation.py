"""Micro-batches: stated, gathered, picked by memory."""

from __future__ import annotations

from parity_cases.case import Case

__all__ = ["CASES"]

CASES = (
    Case("accumulation 2", {"accumulation.steps": 2}, optimizer="sgd"),
    Case("accumulation 2 on 2", {"accumulation.steps": 2}, ranks=2, optimizer="sgd"),
    Case("micro-batch 3 of 8", {"accumulation.micro_batch": 3}, optimizer="sgd"),
    Case("micro-batch 3 of 4 on 2", {"accumulation.micro_batch": 3}, ranks=2, optimizer="sgd"),
    Case(
        "global batch in micro-batches on 2",
        {"accumulation.global_batch": 8, "accumulation.micro_batch": 2},
        ranks=2,
        optimizer="sgd",
    ),
    Case("automatic micro-batch", {"accumulation.steps": "auto"}, optimizer="sgd"),
    Case(
        "automatic micro-batch in little memory",
        {"accumulation.micro_batch": "auto", "offload.device_bytes": 3_000_000},
        optimizer="sgd",
    ),
    Case(
        "automatic micro-batch in little memory on 2",
        {"accumulation.micro_batch": "auto", "offload.device_bytes": 2_200_000},
        ranks=2,
    ),
    Case(
        "accumulation 2 + bf16 + fused optimizer",
        {"accumulation.steps": 2, "precision.dtype": "bf16", "compute.fuse": ["optimizer"]},
        dtype="float32",
        tolerance=2e-3,
    ),
    Case(
        "micro-batch 1 + small buckets + gradient as view on 2",
        {
            "accumulation.micro_batch": 1,
            "communication.bucket_mib": 0.05,
            "communication.gradient_as_view": True,
        },
        ranks=2,
        optimizer="sgd",
    ),
    Case(
        "accumulation 2 + ZeRO 1 on 2",
        {"accumulation.steps": 2, "zero.stage": 1},
        ranks=2,
    ),
    Case(
        "micro-batch 2 + ZeRO 2 on 2",
        {"accumulation.micro_batch": 2, "zero.stage": 2},
        ranks=2,
    ),
    Case(
        "automatic micro-batch + ZeRO 3 on 2",
        {"accumulation.micro_batch": "auto", "offload.device_bytes": 2_200_000, "zero.stage": 3},
        ranks=2,
    ),
    Case(
        "micro-batch 1 + full checkpointing on 2",
        {"accumulation.micro_batch": 1, "checkpointing.mode": "full"},
        ranks=2,
    ),
)
