"""Activations: recomputed, stored in fewer bits, off the device, and together."""

from __future__ import annotations

from tempfile import gettempdir

from parity_cases.case import Case

__all__ = ["CASES"]

#: One rank repeats the plain run's dropout; two ranks draw their own, so they go without.
_DROPOUT = {"dropout": 0.1, "layers": 4}
_FUSED = {"compute.fuse": ["bias_dropout_residual", "mlp", "norm"]}
_CHECKPOINTING = (
    Case("checkpointing full", {"checkpointing.mode": "full"}, tolerance=0.0, model=_DROPOUT),
    Case(
        "checkpointing every second block",
        {"checkpointing.mode": "full", "checkpointing.every": 2},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case(
        "checkpointing of modules",
        {"checkpointing.mode": "full", "checkpointing.modules": ["blocks.*.attention"]},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case("checkpointing selective", {"checkpointing.mode": "selective"}, tolerance=0.0, model=_DROPOUT),
    Case(
        "checkpointing to a budget",
        {"checkpointing.mode": "budget", "checkpointing.budget_bytes": 2_400_000},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case("checkpointing auto", {"checkpointing.mode": "auto"}, tolerance=0.0, model=_DROPOUT),
    Case("checkpointing full on 2", {"checkpointing.mode": "full"}, ranks=2, optimizer="sgd"),
    Case("checkpointing selective on 2", {"checkpointing.mode": "selective"}, ranks=2, optimizer="sgd"),
)
_ACTIVATIONS = (
    Case("activations bf16", {"activations.dtype": "bf16"}, dtype="float32", tolerance=2e-3),
    Case("activations fp16", {"activations.dtype": "fp16"}, dtype="float32", tolerance=1e-3),
    Case("activations fp8", {"activations.dtype": "fp8"}, dtype="float32", tolerance=1e-2),
    Case("activations bf16 on 2", {"activations.dtype": "bf16"}, ranks=2, dtype="float32", tolerance=2e-3),
    Case("activations on the cpu", {"offload.activations": "cpu"}, tolerance=0.0, model=_DROPOUT),
    Case(
        "activations on disk",
        {"offload.activations": "nvme", "offload.path": gettempdir()},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case("activations on the cpu on 2", {"offload.activations": "cpu"}, ranks=2, optimizer="sgd"),
)
_MEMORY_TOGETHER = (
    Case(
        "checkpointing full + activations on disk",
        {"checkpointing.mode": "full", "offload.activations": "nvme", "offload.path": gettempdir()},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case(
        "checkpointing to a budget + activations on the cpu",
        {
            "checkpointing.mode": "budget",
            "checkpointing.budget_bytes": 900_000,
            "offload.activations": "cpu",
        },
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case(
        "checkpointing to a budget + activations on disk",
        {
            "checkpointing.mode": "budget",
            "checkpointing.budget_bytes": 900_000,
            "offload.activations": "nvme",
            "offload.path": gettempdir(),
        },
        tolerance=0.0,
        model=_DROPOUT,
        slow=True,
    ),
    Case(
        "checkpointing to a budget + activations on the cpu + zero 3 on 2",
        {
            "checkpointing.mode": "budget",
            "checkpointing.budget_bytes": 600_000,
            "offload.activations": "cpu",
            "zero.stage": 3,
        },
        ranks=2,
        slow=True,
    ),
    Case(
        "checkpointing every second block + activations bf16 on the cpu",
        {
            "checkpointing.mode": "full",
            "checkpointing.every": 2,
            "activations.dtype": "bf16",
            "offload.activations": "cpu",
        },
        dtype="float32",
        tolerance=2e-3,
        model=_DROPOUT,
    ),
    Case(
        "checkpointing full + accumulation 2 on 2",
        {"checkpointing.mode": "full", "accumulation.steps": 2},
        ranks=2,
        optimizer="sgd",
    ),
    Case(
        "checkpointing full + static graph on 2",
        {"checkpointing.mode": "full", "communication.static_graph": True},
        ranks=2,
        optimizer="sgd",
    ),
    Case(
        "checkpointing full + activations on the cpu + zero 3 on 2",
        {"checkpointing.mode": "full", "offload.activations": "cpu", "zero.stage": 3},
        ranks=2,
    ),
    Case(
        "checkpointing selective + zero 3 on 2",
        {"checkpointing.mode": "selective", "zero.stage": 3},
        ranks=2,
    ),
    Case(
        "activations bf16 + zero 3 on 2",
        {"activations.dtype": "bf16", "zero.stage": 3},
        ranks=2,
        dtype="float32",
        tolerance=2e-3,
    ),
    Case(
        "bf16 autocast + checkpointing full",
        {"precision.dtype": "bf16", "checkpointing.mode": "full"},
        dtype="float32",
        tolerance=2e-3,
        model=_DROPOUT,
    ),
    *(
        Case(name, changes, dtype="float32", tolerance=1e-5, slow=True)
        for name, changes in (
            ("fused regions + checkpointing selective", {**_FUSED, "checkpointing.mode": "selective"}),
            ("fused regions + activations on the cpu", {**_FUSED, "offload.activations": "cpu"}),
            (
                "compile blocks + checkpointing full",
                {"compute.compile": "blocks", "checkpointing.mode": "full"},
            ),
        )
    ),
    Case(
        "compile blocks + checkpointing selective",
        {"compute.compile": "blocks", "checkpointing.mode": "selective"},
        dtype="float32",
        tolerance=1e-5,
        slow=True,
    ),
    Case(
        "compile blocks + checkpointing to a budget",
        {
            "compute.compile": "blocks",
            "checkpointing.mode": "budget",
            "checkpointing.budget_bytes": 1_500_000,
        },
        dtype="float32",
        tolerance=1e-5,
        model={"layers": 4},
        slow=True,
    ),
    Case(
        "compile blocks + activations on the cpu",
        {"compute.compile": "blocks", "offload.activations": "cpu"},
        dtype="float32",
        tolerance=1e-5,
        slow=True,
    ),
)

_PIPELINE = {"parallel.pipeline": 2, "parallel.microbatches": 4}
_BESIDE = (
    *(
        Case(
            f"checkpointing {mode} + pipeline {schedule} on 2",
            {**_PIPELINE, "parallel.schedule": schedule, "checkpointing.mode": mode},
            ranks=2,
            model={"layers": 4},
            slow=True,
        )
        for schedule in ("1f1b", "zbv")
        for mode in ("full", "selective")
    ),
    Case(
        "checkpointing full + activations on disk + pipeline zbv on 2",
        {
            **_PIPELINE,
            "parallel.schedule": "zbv",
            "checkpointing.mode": "full",
            "offload.activations": "nvme",
            "offload.path": gettempdir(),
        },
        ranks=2,
        model={"layers": 4},
        slow=True,
    ),
    Case(
        "checkpointing to a budget + activations on the cpu + tensor 2 with sequences on 2",
        {
            "parallel.tensor": 2,
            "parallel.sequence": True,
            "checkpointing.mode": "budget",
            "checkpointing.budget_bytes": 800_000,
            "offload.activations": "cpu",
        },
        ranks=2,
        model={"layers": 4},
        slow=True,
    ),
    Case(
        "checkpointing full + activations on the cpu + zero 3 + tensor 2 on 4",
        {
            "parallel.tensor": 2,
            "zero.stage": 3,
            "checkpointing.mode": "full",
            "offload.activations": "cpu",
        },
        ranks=4,
        slow=True,
    ),
    Case(
        "activations bf16 + zero 3 + tensor 2 on 4",
        {"parallel.tensor": 2, "zero.stage": 3, "activations.dtype": "bf16"},
        ranks=4,
        dtype="float32",
        tolerance=2e-3,
        slow=True,
    ),
)
_POOLED = (
    Case(
        "activations on the cpu, pooled",
        {"offload.activations": "cpu", "activations.pool": True},
        tolerance=0.0,
        model=_DROPOUT,
    ),
    Case(
        "activations fp16, pooled",
        {"activations.dtype": "fp16", "activations.pool": True},
        dtype="float32",
        tolerance=1e-3,
    ),
)

CASES = (*_CHECKPOINTING, *_ACTIVATIONS, *_MEMORY_TOGETHER, *_BESIDE, *_POOLED)
