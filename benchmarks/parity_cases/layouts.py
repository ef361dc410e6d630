"""Several kinds of parallelism in one mesh."""

from __future__ import annotations

from typing import Any

from parity_cases.case import Case

__all__ = ["CASES"]

_TENSOR = {"parallel.tensor": 2}
_PIPELINE = {"parallel.pipeline": 2, "parallel.microbatches": 2}
_3D = {**_PIPELINE, **_TENSOR}
#: Four blocks, so that two stages have two chunks each.
_FOUR: dict[str, Any] = {"layers": 4}

CASES = (
    Case("tensor 2 x data 2 on 4", _TENSOR, ranks=4),
    Case("tensor 2 x data 2 clipped on 4", _TENSOR, ranks=4, optimizer="sgd", clip_norm=0.2),
    Case("tensor 2 x zero 3 on 4", {**_TENSOR, "zero.stage": 3}, ranks=4),
    Case(
        "tensor 2 x zero 3 clipped + accumulation on 4",
        {**_TENSOR, "zero.stage": 3, "accumulation.steps": 2},
        ranks=4,
        optimizer="sgd",
        clip_norm=0.2,
    ),
    Case("pipeline 2 x data 2 on 4", _PIPELINE, ranks=4),
    Case("pipeline 2 x data 2 clipped on 4", _PIPELINE, ranks=4, optimizer="sgd", clip_norm=0.2),
    Case("pipeline 2 x zero 2 on 4", {**_PIPELINE, "zero.stage": 2}, ranks=4),
    Case("pipeline 2 x zero 3 on 4", {**_PIPELINE, "zero.stage": 3}, ranks=4),
    Case(
        "pipeline 2 zbv x zero 3 that frees nothing on 4",
        {**_PIPELINE, "parallel.schedule": "zbv", "zero.stage": 3, "zero.reshard_after_forward": False},
        ranks=4,
        model=_FOUR,
        slow=True,
    ),
    Case("pipeline 2 x tensor 2 on 4", _3D, ranks=4),
    Case("pipeline 2 x tensor 2 + documents on 4", _3D, ranks=4, data="documents"),
    Case("pipeline 2 x data 2 x tensor 2 on 8", _3D, ranks=8),
    Case(
        "pipeline 2 x data 2 x tensor 2 fp32 on 8", _3D, ranks=8, dtype="float32", tolerance=1e-5, slow=True
    ),
    Case(
        "pipeline 2 x data 2 x tensor 2 clipped on 8",
        _3D,
        ranks=8,
        optimizer="sgd",
        clip_norm=0.2,
        slow=True,
    ),
    Case("pipeline 2 x zero 3 x tensor 2 on 8", {**_3D, "zero.stage": 3}, ranks=8, slow=True),
    Case(
        "pipeline 2 x data 2 x tensor 2 + checkpointing on 8",
        {**_3D, "checkpointing.mode": "full"},
        ranks=8,
        slow=True,
    ),
    Case(
        "pipeline 2 interleaved x data 2 x tensor 2 on 8",
        {**_3D, "parallel.chunks": 2, "parallel.schedule": "interleaved"},
        ranks=8,
        model=_FOUR,
        slow=True,
    ),
    Case(
        "pipeline 2 zbv x zero 2 x tensor 2 on 8",
        {**_3D, "parallel.chunks": 2, "parallel.schedule": "zbv", "zero.stage": 2},
        ranks=8,
        model=_FOUR,
        slow=True,
    ),
    Case(
        "pipeline 2 x zero 2 x tensor 2 + bf16 on 8",
        {**_3D, "zero.stage": 2, "precision.dtype": "bf16"},
        ranks=8,
        dtype="float32",
        tolerance=2e-3,
        slow=True,
    ),
)
