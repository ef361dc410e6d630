"""Models and runs for the tests of offloaded training state; importable by spawned ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optim_cases
import torch
from refusals import refusal_of
from torch import nn

import trine
from trine.record import events
from trine.samples.gpt import loss_of

__all__ = ["Odd", "Trained", "damaged", "disk", "flip", "on_ranks", "refused", "squares", "train", "whole"]


def disk(folder: Path, **more: Any) -> dict[str, Any]:
    """The optimizer's state on disk, in tiles far smaller than the tensors."""
    return {"offload.optimizer": "nvme", "offload.path": str(folder), "offload.tile_mib": 0.01, **more}


def whole(folder: Path) -> dict[str, Any]:
    """The parameters with it."""
    return disk(folder, **{"offload.parameters": "nvme"})


class Odd(nn.Module):
    """Blocks with parameters of every shape that optimizers meet: a number, a vector of odd length, one laid out otherwise."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(37, 37, dtype=dtype) for _ in range(3))
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(37, 11, dtype=dtype).t())  # dense, in another order
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return (self.turned @ x.t()) * self.scale + self.shift


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class Trained:
    """What a run came to: losses, parameters and the optimizer's state, all of it in memory."""

    def __init__(self, engine: Any, losses: list[float], metrics: list[dict[str, float]]) -> None:
        self.losses = losses
        self.metrics = metrics  # by step
        self.effects = [str(effect) for effect in engine.effects]
        self.parameters = [_whole(p) for p in engine.model.parameters()]
        optimizer = engine.optimizer
        self.state = [
            {
                key: _whole(value) if isinstance(value, torch.Tensor) else value
                for key, value in optimizer.state[p].items()
            }
            for group in optimizer.param_groups
            for p in group["params"]
            if p in optimizer.state
        ]

    def is_bitwise(self, other: Trained) -> bool:
        return (
            self.losses == other.losses
            and all(torch.equal(a, b) for a, b in zip(self.parameters, other.parameters, strict=True))
            and len(self.state) == len(other.state)
            and all(_same(a, b) for a, b in zip(self.state, other.state, strict=True))
        )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return list(ours) == list(theirs) and all(
        torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]
        for key, value in ours.items()
    )


def train(
    changes: Mapping[str, Any],
    model: nn.Module | None = None,
    batches: list[Any] | None = None,
    loss_fn: Callable[..., Any] = loss_of,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] | None = None,
    act: Callable[[Any, int], None] | None = None,
    **settings: Any,
) -> Trained:
    """Three steps of AdamW on the small GPT, unless told otherwise; ``act(engine, step)`` is called after each."""
    model = optim_cases.small_gpt(layers=4) if model is None else model
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer_of is None else optimizer_of(model)
    )
    metrics: list[dict[str, float]] = []

    def listen(kind: str, values: dict[str, Any]) -> None:
        if kind == "step_begin":
            metrics.append({})
        elif kind == "metric":
            metrics[-1][values["name"]] = values["value"]

    stop = events.listen(listen)
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_fn, **settings
    )
    try:
        torch.manual_seed(3)
        losses = []
        for step, batch in enumerate(optim_cases.batches(3, 4) if batches is None else batches):
            losses.append(float(engine.train_step(batch)))
            if act is not None:
                act(engine, step)
        return Trained(engine, losses, metrics)
    finally:
        stop()
        engine.close()


def on_ranks(
    rank: int, pairs: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
) -> list[tuple[bool, str]]:
    """Of each pair (configuration, what is added to it, settings): whether this rank trains the same bits with it."""
    ranks = torch.distributed.get_world_size()
    found = []
    for plain, added, settings in pairs:
        runs = []
        for changes in (plain, plain | added):
            torch.manual_seed(100 + rank)
            runs.append(train(changes, batches=optim_cases.batches(3, 4, rank, ranks), **settings))
        found.append((runs[0].is_bitwise(runs[1]), f"{plain} {added}: {runs[0].losses} {runs[1].losses}"))
    return found


def damaged(rank: int, changes: dict[str, Any], flip_on: int | None, what: str) -> tuple[str, str, bool]:
    """The error of this rank after a byte of one rank's file was flipped, its kind, and whether a step is refused after it.

    ``what``: the ``state`` of the optimizer, or a block's ``parameters``.
    """
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    model = optim_cases.small_gpt(layers=4)
    engine = trine.optimize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        trine.Config().with_changes(changes),
        loss_fn=loss_of,
    )
    data = optim_cases.batches(4, 4, rank, ranks)
    try:
        engine.train_step(data[0])
        if flip_on == rank:
            flip(engine, what)
        try:
            for batch in data[1:3]:
                engine.train_step(batch)
        except trine.TrineError as error:
            try:
                engine.train_step(data[3])
            except trine.TrineError as refused:
                return str(error), type(error).__name__, "start again" in str(refused)
            return str(error), type(error).__name__, False
        return "", "", False
    finally:
        engine.close()


def flip(engine: Any, what: str) -> None:
    """One bit in the file, past the engine's back."""
    if what == "state":
        held = engine.optimizer.param_groups[0]["params"][3]
        tensor = engine.optimizer.state[held]["exp_avg"]
    else:
        wanted = "blocks.1.attention.qkv.weight"
        tensor = next(p for name, p in engine.model.named_parameters() if name.endswith(wanted))
    tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    tensor.detach().view(-1).view(torch.uint8).numpy()[5] ^= 4


def refused(rank: int, changes: dict[str, Any]) -> str:
    """Our refusal of these changes on two ranks."""
    return optim_cases.refused(rank, 2, changes)


def refused_where_stages_are_unequal(rank: int, device_bytes: int, folder: str) -> str:
    """Our refusal, if any, where three of four blocks lie on the first of two stages."""
    changes: dict[str, Any] = {
        "parallel.pipeline": 2,
        "parallel.split": ["blocks.3"],
        "offload.optimizer": "auto",
        "offload.path": folder,
        "offload.device_bytes": device_bytes,
    }
    model = optim_cases.small_gpt(layers=4)
    config = trine.Config().with_changes(changes)
    optimizer = torch.optim.AdamW(model.parameters())
    return refusal_of(lambda: trine.optimize(model, optimizer, config, loss_fn=loss_of).close(), "")
