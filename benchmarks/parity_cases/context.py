"""Sequences cut over ranks, against whole ones in one process."""

from __future__ import annotations

from typing import Any

from parity_cases.case import Case

__all__ = ["CASES"]

_TWO, _FOUR = {"parallel.context": 2}, {"parallel.context": 4}
_SDPA: dict[str, Any] = {"attention": "sdpa"}
_LLAMA: dict[str, Any] = {"attention": "sdpa", "mlp": "swiglu", "norm": "rms", "positions": "rotary"}

CASES = (
    Case("context 2 on 2", _TWO, ranks=2, model=_SDPA, slow=True),
    Case("context 2 sgd on 2", _TWO, ranks=2, model=_SDPA, optimizer="sgd"),
    Case("context 2 fp32 on 2", _TWO, ranks=2, model=_SDPA, dtype="float32", tolerance=1e-5),
    Case("context 2 from attention by hand on 2", _TWO, ranks=2, slow=True),
    Case("context 2 with Llama's parts on 2", _TWO, ranks=2, model=_LLAMA),
    Case("context 4 on 4", _FOUR, ranks=4, model=_LLAMA, optimizer="sgd"),
    Case("context 2 by data 2 on 4", _TWO, ranks=4, model=_SDPA, optimizer="sgd", slow=True),
    *(
        Case(
            f"context 2 + zero {stage} on {ranks}",
            {**_TWO, "zero.stage": stage},
            ranks=ranks,
            model=_SDPA,
            optimizer="sgd",
        )
        for ranks in (2, 4)
        for stage in (2, 3)
    ),
    Case("context 2 + accumulation on 2", {**_TWO, "accumulation.steps": 2}, ranks=2, optimizer="sgd"),
    Case("context 2 + checkpointing on 2", {**_TWO, "checkpointing.mode": "full"}, ranks=2, optimizer="sgd"),
    Case(
        "context 2 + zero 3 + selective checkpointing on 4",
        {**_TWO, "zero.stage": 3, "checkpointing.mode": "selective"},
        ranks=4,
        model=_LLAMA,
        optimizer="sgd",
    ),
    Case(
        "context 2 + fused regions on 2",
        {**_TWO, "compute.fuse": ["mlp", "norm", "rotary", "cross_entropy", "optimizer"]},
        ranks=2,
        model=_LLAMA,
    ),
    Case(
        "context 2 + bf16 on 2",
        {**_TWO, "precision.dtype": "bf16"},
        ranks=2,
        dtype="float32",
        tolerance=2e-3,
        model=_SDPA,
    ),
    Case(
        "context 2 + tensor 2 on 4",
        {**_TWO, "parallel.tensor": 2},
        ranks=4,
        model=_SDPA,
        optimizer="sgd",
    ),
    Case(
        "context 2 + tensor 2 + sequence + loss on 4",
        {**_TWO, "parallel.tensor": 2, "parallel.sequence": True, "parallel.loss": True},
        ranks=4,
        model=_LLAMA,
        optimizer="sgd",
        slow=True,
    ),
    Case(
        "context 2 + expert 2 on 4",
        {**_TWO, "parallel.expert": 2},
        ranks=4,
        model={"experts": 4, "balance": 0.01, "balance_over": "all"},
        optimizer="sgd",
    ),
    Case(
        "context 2 + expert 2 + zero 3 on 8",
        {**_TWO, "parallel.expert": 2, "zero.stage": 3},
        ranks=8,
        model={"experts": 4, "balance": 0.01, "balance_over": "all"},
        optimizer="sgd",
        slow=True,
    ),
)
