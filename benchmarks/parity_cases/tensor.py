"""Tensor, sequence and loss parallelism, alone and beside sharding, replicas, recomputation and precision."""

from __future__ import annotations

from typing import Any

from parity_cases.case import Case

__all__ = ["CASES"]

_TENSOR: dict[str, Any] = {"parallel.tensor": 2}
_SEQUENCE = {**_TENSOR, "parallel.sequence": True}
_LOSS = {**_TENSOR, "parallel.loss": True}
_ALL = {**_SEQUENCE, "parallel.loss": True}
_LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rotary"}

CASES = (
    Case("tensor on 2", _TENSOR, ranks=2),
    Case("tensor + sequence on 2", _SEQUENCE, ranks=2),
    Case("tensor + loss on 2", _LOSS, ranks=2),
    Case("tensor + sequence + loss sgd on 2", _ALL, ranks=2, optimizer="sgd"),
    Case("tensor + sequence + loss fp32 on 2", _ALL, ranks=2, dtype="float32", tolerance=1e-5),
)
