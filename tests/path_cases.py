"""Models whose ranks take different paths, for the tests of the guard against them; importable by spawned processes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trine
from trine.record.errors import TrineError


class Skipping(nn.Module):
    """Blocks of which each rank can be told to leave some out."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        self.outputs = nn.Linear(width, 4)
        self.order: list[int] = list(range(blocks))
        self.fails: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for place in self.order:
            if place == self.fails:
                raise ValueError("a block that fails")
            x = x + self.blocks[place](x)
        result: torch.Tensor = self.outputs(x)
        return result


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def run(
    rank: int,
    changes: dict[str, Any],
    orders: dict[int, dict[int, list[int]]],
    steps: int = 5,
    **options: Any,
) -> dict[str, Any]:
    """``orders``: step → rank → blocks in their order, from that step on. What came of it on this rank."""
    torch.manual_seed(0)
    inner = Skipping()
    model: nn.Module = inner
    if options.get("finds_unused"):
        model = DistributedDataParallel(inner, find_unused_parameters=True)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    generator = torch.Generator().manual_seed(rank)
    said, losses = "", []
    began = time.monotonic()
    try:
        for step in range(steps):
            inner.order = orders.get(step, {}).get(rank, inner.order)
            if options.get("fails_at") == (step, rank):
                inner.fails = options["fails_in"]
            batch = (torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator))
            losses.append(float(engine.train_step(batch)))
            if options.get("evaluates") == step and rank == 0:
                with torch.no_grad():
                    engine(batch[0])
    except TrineError as error:
        said = f"{type(error).__name__}: {error}"
    except ValueError as error:
        said = f"ValueError: {error}"
        time.sleep(options.get("lingers_s", 0.0))
    seconds = time.monotonic() - began
    engine._assembly.paths and engine._assembly.paths.close()
    return {"said": said, "losses": losses, "seconds": seconds}


def on_own_ranks(rank: int, ranks: int, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The same, for groups that are broken afterwards."""
    return run(rank, *arguments, **options)


def case(rank: int, ranks: int, changes: dict[str, Any], orders: Any, options: dict[str, Any]) -> Any:
    return run(rank, changes, orders, **options)
