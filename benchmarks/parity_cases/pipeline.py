"""Pipelines: every schedule, alone and beside the other techniques. Layouts with several kinds are in ``layouts.py``."""

from __future__ import annotations

from typing import Any

from parity_cases.case import Case

__all__ = ["CASES"]

_TWO: dict[str, Any] = {"parallel.pipeline": 2, "parallel.microbatches": 4}
_FOUR_RANKS: dict[str, Any] = {"parallel.pipeline": 4, "parallel.microbatches": 8}
_FOUR, _EIGHT = {"layers": 4}, {"layers": 8}
_SEVERAL = ("interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


def _by(schedule: str, **changes: Any) -> dict[str, Any]:
    return {**_TWO, "parallel.schedule": schedule, **{k.replace("__", "."): v for k, v in changes.items()}}


CASES = (
    Case("pipeline 1f1b on 2", _TWO, ranks=2),
    Case("pipeline gpipe on 2", _by("gpipe"), ranks=2),
    *(Case(f"pipeline {name} on 2", _by(name), ranks=2, model=_FOUR) for name in _SEVERAL),
    Case("pipeline in chosen micro-batches on 2", {"parallel.pipeline": 2}, ranks=2),
    Case(
        "pipeline in three chunks on 2",
        _by("interleaved", parallel__chunks=3),
        ranks=2,
        model={"layers": 6},
        slow=True,
    ),
    Case("pipeline 1f1b fp32 on 2", _TWO, ranks=2, dtype="float32", tolerance=1e-5),
    Case(
        "pipeline zbv sgd clipped on 2",
        _by("zbv"),
        ranks=2,
        model=_FOUR,
        optimizer="sgd",
        clip_norm=0.2,
        slow=True,
    ),
    Case("pipeline 1f1b + documents on 2", _TWO, ranks=2, data="documents"),
    Case("pipeline zbv + documents on 2", _by("zbv"), ranks=2, model=_FOUR, data="documents"),
    Case("pipeline 1f1b on 4", _FOUR_RANKS, ranks=4, model=_FOUR, slow=True),
    *(
        Case(
            f"pipeline {name} on 4",
            {**_FOUR_RANKS, "parallel.schedule": name},
            ranks=4,
            model=_EIGHT,
            slow=True,
        )
        for name in _SEVERAL
    ),
    Case(
        "pipeline split by layers on 2",
        {**_TWO, "parallel.split": "layers"},
        ranks=2,
        model={"layers": 3},
        slow=True,
    ),
    Case(
        "pipeline split by names on 2",
        {**_TWO, "parallel.split": ["blocks.1"]},
        ranks=2,
        model={"layers": 3},
        slow=True,
    ),
    *(
        Case(
            f"pipeline {name} + {mode} checkpointing on 2",
            _by(name, checkpointing__mode=mode),
            ranks=2,
            model=_FOUR,
        )
        for name in ("1f1b", "zbv")
        for mode in ("full", "selective")
    ),
    *(
        Case(
            f"pipeline {name} + offloaded activations on 2",
            _by(name, offload__activations="cpu"),
            ranks=2,
            model=_FOUR,
        )
        for name in ("1f1b", "zbv")
    ),
    Case(
        "pipeline + bf16 activations on 2",
        {**_TWO, "activations.dtype": "bf16"},
        ranks=2,
        dtype="float32",
        tolerance=2e-3,
    ),
    Case(
        "pipeline + bf16 on 2", {**_TWO, "precision.dtype": "bf16"}, ranks=2, dtype="float32", tolerance=2e-3
    ),
    Case(
        "pipeline + fp16 on 2", {**_TWO, "precision.dtype": "fp16"}, ranks=2, dtype="float32", tolerance=6e-4
    ),
    Case(
        "pipeline zbv + bf16 masters on 2",
        _by("zbv", precision__dtype="bf16", precision__master_weights=True),
        ranks=2,
        dtype="float32",
        tolerance=2e-3,
        model=_FOUR,
    ),
    Case("pipeline + fused optimizer on 2", {**_TWO, "compute.fuse": ["optimizer"]}, ranks=2),
    Case(
        "pipeline + fused regions on 2",
        {**_TWO, "compute.fuse": ["mlp", "cross_entropy"]},
        ranks=2,
        dtype="float32",
        tolerance=1e-5,
        slow=True,
    ),
    Case(
        "pipeline + sdpa on 2",
        {**_TWO, "compute.attention": "sdpa"},
        ranks=2,
        dtype="float32",
        tolerance=1e-5,
    ),
    *(
        Case(
            f"pipeline {name} + compiled blocks on 2",
            _by(name, compute__compile="blocks"),
            ranks=2,
            dtype="float32",
            tolerance=1e-5,
            model=_FOUR,
            slow=True,
        )
        for name in ("1f1b", "interleaved")
    ),
    Case(
        "pipeline + accumulation.steps on 2",
        {"parallel.pipeline": 2, "accumulation.steps": 4},
        ranks=2,
    ),
    Case(
        "pipeline + micro-batches of 2 on 2",
        {"parallel.pipeline": 2, "accumulation.micro_batch": 2},
        ranks=2,
    ),
    Case(
        "pipeline + global batch on 2",
        {"parallel.pipeline": 2, "accumulation.global_batch": 8},
        ranks=2,
    ),
    Case("pipeline + packing on 2", {**_TWO, "data.packing": True}, ranks=2, data="documents"),
    Case("pipeline + offloaded optimizer on 2", {**_TWO, "offload.optimizer": "cpu"}, ranks=2),
)
