"""Experts spread over ranks, against the mixture in one process."""

from __future__ import annotations

from typing import Any

from parity_cases.case import Case

__all__ = ["CASES"]

_TWO, _FOUR = {"parallel.expert": 2}, {"parallel.expert": 4}
_MIXTURE: dict[str, Any] = {"experts": 4}
#: Counted over all ranks' tokens, since the mean of ranks' own balance losses is another function.
_BALANCED: dict[str, Any] = {"experts": 4, "balance": 0.01, "balance_over": "all"}
_LLAMA: dict[str, Any] = {"experts": 4, "mlp": "swiglu", "norm": "rms", "positions": "rotary"}

CASES = (
    Case("expert 2 on 2", _TWO, ranks=2, model=_MIXTURE, slow=True),
    Case("expert 2 sgd on 2", _TWO, ranks=2, model=_MIXTURE, optimizer="sgd"),
    Case("expert 2 fp32 on 2", _TWO, ranks=2, model=_MIXTURE, dtype="float32", tolerance=1e-5),
    Case("expert 2 with the balance loss on 2", _TWO, ranks=2, model=_BALANCED, optimizer="sgd"),
    Case("expert 2 with Llama's parts on 2", _TWO, ranks=2, model=_LLAMA, slow=True),
    Case("expert 2 with one expert a token on 2", _TWO, ranks=2, model={"experts": 2, "top_k": 1}, slow=True),
    Case("expert 2 with documents on 2", _TWO, ranks=2, model=_MIXTURE, data="documents"),
    Case("expert 4 on 4", _FOUR, ranks=4, model=_MIXTURE, optimizer="sgd"),
    Case("expert 2 by data 2 on 4", _TWO, ranks=4, model=_MIXTURE, optimizer="sgd", slow=True),
    *(
        Case(
            f"expert 2 + zero {stage} on {ranks}",
            {**_TWO, "zero.stage": stage},
            ranks=ranks,
            model=_MIXTURE,
            optimizer="sgd",
        )
        for ranks in (2, 4)
        for stage in (2, 3)
    ),
    Case(
        "expert 2 + zero 3 by data and shard on 8",
        {**_TWO, "zero.stage": 3, "parallel.data": 2, "parallel.shard": 2},
        ranks=8,
        model=_BALANCED,
        optimizer="sgd",
        slow=True,
    ),
    Case(
        "expert 2 + zero 3, one expert over two shards, on 4",
        {**_TWO, "zero.stage": 3},
        ranks=4,
        model={"experts": 2},
        optimizer="sgd",
    ),
    Case(
        "expert 2 + zero 3 + accumulation on 4",
        {**_TWO, "zero.stage": 3, "accumulation.steps": 2},
        ranks=4,
        model=_MIXTURE,
        optimizer="sgd",
    ),
    *(
        Case(
            f"expert 2 + {name} on 4",
            {**_TWO, **changes},
            ranks=4,
            model=_MIXTURE,
            optimizer="sgd",
            slow=True,
        )
        for name, changes in {
            "tensor 2": {"parallel.tensor": 2},
            "tensor 2 + sequence": {"parallel.tensor": 2, "parallel.sequence": True},
            "pipeline 2": {"parallel.pipeline": 2},
            "pipeline 2 + zero 3": {"parallel.pipeline": 2, "zero.stage": 3},
        }.items()
    ),
    Case(
        "expert 2 + accumulation on 2",
        {**_TWO, "accumulation.steps": 2},
        ranks=2,
        model=_MIXTURE,
        optimizer="sgd",
    ),
    Case("expert 2 + fused on 2", {**_TWO, "compute.fuse": ["optimizer"]}, ranks=2, model=_MIXTURE),
    Case(
        "expert 2 + checkpointing on 2",
        {**_TWO, "checkpointing.mode": "full"},
        ranks=2,
        model=_BALANCED,
        optimizer="sgd",
    ),
    Case(
        "expert 2 + zero 3 + checkpointing on 4",
        {**_TWO, "zero.stage": 3, "checkpointing.mode": "full"},
        ranks=4,
        model=_BALANCED,
        optimizer="sgd",
    ),
    Case(
        "expert 2 + bf16 on 2",
        {**_TWO, "precision.dtype": "bf16"},
        ranks=2,
        model=_MIXTURE,
        dtype="float32",
        tolerance=4e-3,
    ),
    Case(
        "expert 2 + bf16 + masters + zero 3 on 4",
        {**_TWO, "precision.dtype": "bf16", "precision.master_weights": True, "zero.stage": 3},
        ranks=4,
        model=_MIXTURE,
        dtype="float32",
        tolerance=4e-3,
    ),
)
