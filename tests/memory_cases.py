"""Models and runs for the tests of checkpointing and of saved activations; importable by spawned ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optim_cases
import torch
from torch import nn
from torch.nn import functional

import trine
from trine.optim.runtime.saved_tensors import SavedTensors
from trine.record import events
from trine.samples.gpt import loss_of

__all__ = ["Sums", "Trained", "held_by", "on_ranks", "train"]


class Trained:
    """What a run came to."""

    def __init__(self, engine: Any, losses: list[float], metrics: list[dict[str, float]]) -> None:
        self.losses = losses
        self.metrics = metrics  # by step
        self.effects = engine.effects
        self.model = engine.model
        self.parameters = [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for p in engine.model.parameters()
        ]

    def is_bitwise(self, other: Trained) -> bool:
        return self.losses == other.losses and all(
            torch.equal(a, b) for a, b in zip(self.parameters, other.parameters, strict=True)
        )


def train(
    changes: Mapping[str, Any],
    model: nn.Module | None = None,
    batches: list[Any] | None = None,
    loss_fn: Callable[..., Any] = loss_of,
    **shape: Any,
) -> Trained:
    """Three steps of SGD with momentum, seeded; dropout 0.1 in the GPT unless told otherwise."""
    if model is None:
        model = optim_cases.small_gpt(**{"layers": 4, "dropout": 0.1, **shape})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    metrics: list[dict[str, float]] = [{}]

    def listen(kind: str, values: dict[str, Any]) -> None:
        if kind == "metric":
            metrics[-1][values["name"]] = values["value"]
        elif kind == "step_end":
            metrics.append({})

    stop = events.listen(listen)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_fn)
    torch.manual_seed(3)
    try:
        losses = [float(engine.train_step(batch)) for batch in batches or optim_cases.batches(3, 4)]
        return Trained(engine, losses, metrics)
    finally:
        stop()
        engine.close()


def held_by(model: nn.Module, batch: Any, store: Any = None) -> SavedTensors:
    """Count what one forward saves; then backward, which gives it back."""
    saved = SavedTensors(model)
    saved.always_counting = True
    saved.store = store
    with saved():
        loss = loss_of(model, batch)
    loss.backward()
    return saved


class Sums(nn.Module):
    """Blocks that are called by names, with a batch norm and dropout, and one output from several tensors."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x, scale=2.0)
        return x


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(batch), batch.roll(1))


def on_ranks(rank: int, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[bool, str]]:
    """Of each pair of configurations, whether this rank's dropout, losses and parameters are the same bits."""
    found = []
    for plain, changed in pairs:
        runs = []
        for changes in (plain, changed):
            model = optim_cases.small_gpt(layers=2, dropout=0.1)
            torch.manual_seed(100 + rank)
            runs.append(train(changes, model, optim_cases.batches(2, 2, rank, 2)))
        found.append((runs[0].is_bitwise(runs[1]), f"{changed}: {runs[0].losses} {runs[1].losses}"))
    return found


def stored_under_sharding(rank: int) -> tuple[int, int]:
    """Saved tensors that a store was given under ZeRO-3, and how many of them had a parameter's shape."""
    from trine.optim.runtime.low_precision import LowPrecision

    seen: list[tuple[int, ...]] = []
    choose = LowPrecision.choose

    def noting(store: LowPrecision, tensor: torch.Tensor) -> Any:
        found = choose(store, tensor)
        if found is not None:
            seen.append(tuple(tensor.shape))
        return found

    put = LowPrecision.put
    stored: list[tuple[int, ...]] = []

    def noting_put(store: LowPrecision, flat: torch.Tensor) -> Any:
        stored.append(seen[-1])
        return put(store, flat)

    model = optim_cases.small_gpt(hidden=48)  # no activation has a parameter's shape
    shapes = {tuple(p.shape) for p in model.parameters()} | {
        tuple(reversed(p.shape)) for p in model.parameters()
    }
    LowPrecision.choose, LowPrecision.put = noting, noting_put  # type: ignore[method-assign]
    try:
        train({"zero.stage": 3, "activations.dtype": "bf16"}, model, optim_cases.batches(2, 2, rank, 2))
    finally:
        LowPrecision.choose, LowPrecision.put = choose, put  # type: ignore[method-assign]
    return len(stored), sum(shape in shapes for shape in stored)


def scheduled_on_ranks(rank: int, budget: int) -> tuple[list[bool | None], bool]:
    """What a rank does with each block, where its blocks take longer than the other's; and whether bits stay."""
    import time

    runs = []
    changes: dict[str, Any] = {
        "checkpointing.mode": "budget",
        "checkpointing.budget_bytes": budget,
        "offload.activations": "cpu",
    }
    chosen: list[bool | None] = []
    for each in ({}, changes):
        model = optim_cases.small_gpt(layers=4, dropout=0.1)
        if rank:
            for block in model.blocks:
                block.register_forward_pre_hook(lambda *_: time.sleep(0.002))
        torch.manual_seed(100 + rank)
        runs.append(train(each, model, optim_cases.batches(5, 2, rank, 2)))
        chosen = [
            (region.active, region.moves)
            for block in model.blocks
            for region in getattr(block.forward, "args", ())[1:]
        ]
    return chosen, runs[0].is_bitwise(runs[1])
