"""Training state off a CUDA device: ``pytest -m gpu``. Skipped, and said, where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trine
from trine.samples.gpt import GPT, GPTConfig, loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def train(changes: dict[str, Any], steps: int = 6) -> tuple[list[float], int, Any]:
    """Losses, bytes that stay on the device between steps, and the engine."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = GPT(GPTConfig(layers=4, hidden=512, heads=8, sequence=64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 256, (4, 65), generator=generator)
        losses.append(float(engine.train_step((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))))
    return losses, torch.cuda.memory_allocated() - before, engine


@pytest.mark.parametrize("which", ["tiles", "cpu", "disk", "all on the cpu", "all on disk", "masters"])
def test_near_the_plain_run_with_fewer_bytes(which: str, tmp_path: Path) -> None:
    disk = {"offload.optimizer": "nvme", "offload.path": str(tmp_path), "offload.tile_mib": 1.0}
    masters = {"precision.dtype": "bf16", "precision.master_weights": True}
    cpu = {"offload.optimizer": "cpu", "offload.tile_mib": 1.0}
    changes: dict[str, Any] = {
        "tiles": {"offload.tile_mib": 1.0},
        "cpu": cpu,
        "disk": disk,
        "all on the cpu": {**cpu, "offload.parameters": "cpu"},
        "all on disk": {**disk, "offload.parameters": "nvme"},
        "masters": {**masters, **cpu},
    }[which]
    plain, whole, first = train(masters if which == "masters" else {})
    first.close()
    losses, kept, engine = train(changes)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))
    assert worst == 0.0 if which == "tiles" else worst <= (2e-3 if which == "masters" else 1e-5)
    if which != "tiles":
        moments = sum(2 * 4 * p.numel() for p in engine.model.parameters())
        assert whole - kept >= 0.9 * moments
    engine.close()
    assert all(parameter.is_cuda for parameter in engine.model.parameters())
