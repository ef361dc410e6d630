"""What the tests of DeepSpeed run on ranks of their own: importable by spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optim_cases


def engine_of(changes: dict[str, Any], scheduled: bool = False, **settings: Any) -> Any:
    """A small GPT under ``engine = "deepspeed"``; the engine and its model."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = settings.pop("model", None) or optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if scheduled:
        settings["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    settings.setdefault("loss_fn", loss_of)
    config = trine.Config().with_changes({"engine": "deepspeed", **changes})
    return trine.optimize(model, optimizer, config, **settings), model


def losses(engine: Any, rank: int, ranks: int, first: int, last: int) -> list[float]:
    data = optim_cases.batches(last, 4, rank, ranks)[first:]
    return [float(engine.train_step(batch)) for batch in engine.steps(data)]


def resumed(rank: int, changes: dict[str, Any], folder: str, ranks: int) -> dict[str, Any]:
    """Losses of steps 4 to 8: of a run that went through, and of one that was saved after 4 and loaded by another engine."""
    engine, _ = engine_of(changes, scheduled=True)
    losses(engine, rank, ranks, 0, 4)
    path = engine.save(Path(folder) / "saved")
    through = losses(engine, rank, ranks, 4, 8)
    engine.load(path)
    again = losses(engine, rank, ranks, 4, 8)
    engine.close()
    engine, _ = engine_of(changes, scheduled=True)
    step = engine.load(path)
    resumed = losses(engine, rank, ranks, 4, 8)
    engine.close()
    return {
        "through": through,
        "again": again,
        "resumed": resumed,
        "step": step,
        "files": sorted(p.name for p in Path(path).iterdir()),
    }
