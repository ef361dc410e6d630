"""Training state off the device, and the update in tiles: the same bits as without."""

from __future__ import annotations

from tempfile import gettempdir
from typing import Any

from parity_cases.case import Case

__all__ = ["CASES"]

_CPU = {"offload.optimizer": "cpu", "offload.tile_mib": 0.02}
_DISK = {"offload.optimizer": "nvme", "offload.path": gettempdir(), "offload.tile_mib": 0.02}
_HEAT = {
    "offload.optimizer": "auto",
    "offload.parameters": "auto",
    "offload.path": gettempdir(),
    "offload.device_bytes": 600_000,
    "offload.cpu_bytes": 500_000,
}
_DROPOUT: dict[str, Any] = {"dropout": 0.1, "layers": 4}


def _exact(name: str, changes: dict[str, Any], **more: Any) -> Case:
    return Case(name, changes, tolerance=0.0, model=_DROPOUT, **more)


CASES = (
    _exact("update in tiles", {"offload.tile_mib": 0.02}),
    _exact("optimizer on the cpu", {"offload.optimizer": "cpu"}),
    _exact("optimizer on disk", {"offload.optimizer": "nvme", "offload.path": gettempdir()}),
    _exact("optimizer in tiles on disk", _DISK, dtype="float32", slow=True),
    _exact("optimizer in tiles on disk, one after the other", {**_DISK, "offload.overlap": False}, slow=True),
    _exact("optimizer and parameters on the cpu", {**_CPU, "offload.parameters": "cpu"}, slow=True),
    _exact(
        "optimizer and parameters on disk",
        {**_DISK, "offload.parameters": "nvme"},
        dtype="float32",
        slow=True,
    ),
    _exact("tiers by heat", _HEAT, slow=True),
    _exact("tiers by heat fp32", _HEAT, dtype="float32", slow=True),
    _exact("optimizer on disk sgd", _DISK, optimizer="sgd", slow=True),
    _exact(
        "optimizer and parameters on disk + checkpointing full",
        {**_DISK, "offload.parameters": "nvme", "checkpointing.mode": "full"},
    ),
    _exact(
        "optimizer and parameters on the cpu + activations on the cpu",
        {**_CPU, "offload.parameters": "cpu", "offload.activations": "cpu"},
    ),
    # Several ranks sum in another order than the plain run: against it they are as near as without offload, and
    # tests/optim/test_offload.py holds them to the bits of the same run without.
    Case("optimizer on disk on 2", _DISK, ranks=2),
    Case(
        "optimizer and parameters on disk on 2", {**_DISK, "offload.parameters": "nvme"}, ranks=2, slow=True
    ),
    *(
        Case(f"optimizer on disk + zero {stage} on 2", {**_DISK, "zero.stage": stage}, ranks=2)
        for stage in (1, 2, 3)
    ),
    *(
        Case(f"optimizer on the cpu + zero {stage} on 4", {**_CPU, "zero.stage": stage}, ranks=4)
        for stage in (1, 2, 3)
    ),
    Case("parameters on the cpu + zero 3 on 2", {"offload.parameters": "cpu", "zero.stage": 3}, ranks=2),
    Case(
        "parameters on the cpu, optimizer on disk + zero 3 in groups of 2 on 4",
        {**_DISK, "offload.parameters": "cpu", "zero.stage": 3, "parallel.shard": 2},
        ranks=4,
    ),
    Case(
        "optimizer on disk + accumulation on 2", {**_DISK, "accumulation.steps": 2}, ranks=2, optimizer="sgd"
    ),
    Case(
        "optimizer on disk + zero 1 + bf16 masters on 2",
        {**_DISK, "zero.stage": 1, "precision.dtype": "bf16", "precision.master_weights": True},
        ranks=2,
        dtype="float32",
        tolerance=2e-3,
    ),
    Case("optimizer on the cpu + tensor 2 on 2", {**_CPU, "parallel.tensor": 2}, ranks=2),
    Case(
        "optimizer on disk + zero 2 + pipeline 2 + tensor 2 on 8",
        {**_DISK, "zero.stage": 2, "parallel.pipeline": 2, "parallel.tensor": 2},
        ranks=8,
        slow=True,
    ),
)
