"""Models whose ranks take different paths, for the tests of the guard against them; importable by spawned processes."""

from __future__ import annotations

import statistics
import time
from typing import Any

import started_ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trine
from trine.optim.runtime import path_store
from trine.record.errors import TrineError

path_store.PATIENCE_S = 3.0  # tests do not wait for a program that might go on after its error


class Skipping(nn.Module):
    """Blocks of which each rank can be told to leave some out."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        self.outputs = nn.Linear(width, 4)
        self.order: list[int] = list(range(blocks))
        self.fails: int | None = None
        self.failure: type[BaseException] = ValueError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for place in self.order:
            if place == self.fails:
                raise self.failure("a block that fails")
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
                inner.failure = options.get("fails_with", ValueError)
            batch = (torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator))
            losses.append(float(engine.train_step(batch)))
            if options.get("evaluates") == step and rank == 0:
                with torch.no_grad():
                    engine(batch[0])
    except TrineError as error:
        said = f"{type(error).__name__}: {error}"
    except (ValueError, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        time.sleep(options.get("lingers_s", 0.0))
    seconds = time.monotonic() - began
    paths = engine._assembly.paths
    if paths is not None:
        paths.close()
    return {"said": said, "losses": losses, "seconds": seconds}


def case(
    rank: int, ranks: int, runs: list[tuple[dict[str, Any], Any, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Several one after the other in one process group; the last may leave it unusable."""
    return [run(rank, changes, orders, **options) for changes, orders, options in runs]


def cost(rank: int, ranks: int, changes: dict[str, Any], steps: int) -> tuple[float, float]:
    """Seconds that the guard takes of a forward, and those of a step, of a model whose steps take milliseconds."""
    torch.manual_seed(0)
    inner = Skipping(width=256, blocks=8)
    config = trine.Config().with_changes(changes)
    engine = trine.optimize(inner, torch.optim.SGD(inner.parameters(), lr=0.1), config, loss_fn=loss_of)
    batch = (torch.randn(256, 8), torch.randint(0, 4, (256,)))
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.train_step(batch)
        taken.append(time.perf_counter() - began)
    paths = engine._assembly.paths
    assert paths is not None
    path = list(paths._before["training"])
    guard = []
    for _ in range(50):
        began = time.perf_counter()
        with paths.forward():
            for unit in path:
                paths.enter(unit)
        guard.append(time.perf_counter() - began)
    paths.close()
    return statistics.median(guard), statistics.median(taken)


def on_ranks(ranks: int, function: str, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """What a function of this module returns on each rank of a gloo group that nobody uses afterwards, by rank."""
    settings = {"collective_timeout_s": 90, "grace_s": 0.0}
    return started_ranks.on_ranks(
        ranks, globals()[function], ranks, *arguments, timeout_s=timeout_s, **settings
    )
