"""What programs hand to the engine by mistake, for ranks that stay alive; importable by spawned processes."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from refusals import refusal_of

__all__ = ["budget_over_unequal_batches", "differing", "losses_of", "pairs", "small", "twice"]


def small(seed: int = 0) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def pairs(steps: int = 3, rank: int = 0) -> list[Any]:
    """Inputs (6, 4) and targets (6, 1)."""
    import torch

    generator = torch.Generator().manual_seed(5 + rank)
    return [
        (torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)) for _ in range(steps)
    ]


def squared(model: Any, batch: Any) -> Any:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def losses_of(rank: int, changes: dict[str, Any], **keys: Any) -> list[float]:
    import torch

    import trine

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes(changes), **{"loss_fn": squared, **keys}
    )
    losses = [float(engine.train_step(batch)) for batch in pairs(3, rank)]
    engine.close()
    return losses


def differing(rank: int, by_rank: list[dict[str, Any]]) -> str:
    """What ranks say that are given other things; then they still train together."""
    import torch

    import trine

    given = dict(by_rank[rank])
    model = small(1 if given.pop("wider", False) else 0)
    if given.pop("frozen", False):
        model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    environment = given.pop("environment", {})
    config = given.pop("config", {})
    with mock.patch.dict(os.environ, environment):
        said = refusal_of(lambda: trine.optimize(model, optimizer, config, **{"loss_fn": squared, **given}))
    if said != "not refused":
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        losses_of(rank, {})
    return said


def twice(rank: int, first: dict[str, Any], second: dict[str, Any]) -> Any:
    """Losses of a run that another engine takes over after a step, or the refusal."""
    import torch

    import trine

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = pairs(3, rank)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(first), loss_fn=squared)
    losses = [float(engine.train_step(data[0]))]
    engine.close()

    def go_on() -> None:
        later = trine.optimize(model, engine.optimizer, trine.Config().with_changes(second), loss_fn=squared)
        losses.extend(float(later.train_step(batch)) for batch in data[1:])
        later.close()

    return refusal_of(go_on, "") or losses


def budget_over_unequal_batches(rank: int, budget_bytes: int) -> Any:
    """What becomes of a budget that is enough for rank 0's small batches alone: the refusal, or what is recomputed."""
    import torch

    import trine

    model = torch.nn.Sequential(small(), torch.nn.Linear(1, 4), small())
    config = {"mode": "budget", "budget_bytes": budget_bytes, "modules": ["0", "2"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = trine.optimize(model, optimizer, {"checkpointing": config}, loss_fn=squared)
    inputs, targets = pairs(1, rank)[0]
    batch = (inputs.repeat(1 + 99 * rank, 1), targets.repeat(1 + 99 * rank, 1))
    said = refusal_of(lambda: engine.train_step(batch), "", closing=engine)
    return said or [str(effect) for effect in engine.effects if "modules recomputed" in str(effect)]
