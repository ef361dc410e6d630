"""Ranks of layouts that exchange in every forward, of which one fails, or has another batch; importable by spawned processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import started_ranks
import torch
from refusals import refusal_of
from torch import nn

import trine
from trine.optim.runtime import path_store
from trine.record.errors import TrineError
from trine.samples.gpt import loss_of

path_store.PATIENCE_S = 3.0  # tests do not wait for a program that might go on after its error

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32}


def model_for(changes: dict[str, Any]) -> nn.Module:
    """A mixture of experts where they are to be spread, else a GPT; the same on every rank."""
    from trine.samples.gpt import GPT, GPTConfig
    from trine.samples.moe import MixtureConfig, MixtureGPT

    torch.manual_seed(0)
    if "parallel.expert" in changes:
        return MixtureGPT(MixtureConfig(**SHAPE, experts=4))
    return GPT(GPTConfig(**SHAPE))


def batch_of(seed: int, size: int = 4, length: int = 16) -> Any:
    ids = torch.randint(0, 64, (size, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


class Nested(nn.Module):
    """A model in one module, which so holds all that is sharded on its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.inner(*arguments, **named)


class Failing:
    """A loss function that raises once when it is told to, before or after the model is called."""

    def __init__(self, failure: type[Exception], calls_model: bool) -> None:
        self._failure, self._calls_model = failure, calls_model
        self.fails = False

    def __call__(self, model: Any, batch: Any) -> Any:
        fails, self.fails = self.fails, False
        if fails and not self._calls_model:
            raise self._failure("a bad sample")
        loss = loss_of(model, batch)
        if fails:
            raise self._failure("a bad sample")
        return loss


def engine_of(changes: dict[str, Any], loss_fn: Any = loss_of) -> Any:
    model = model_for(changes)
    if "inner" in changes.get("checkpointing.modules", ()):
        model = Nested(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_fn)


def skipping(
    rank: int, changes: dict[str, Any], failing: Sequence[int], out_of_memory: bool = False, steps: int = 4
) -> list[str]:
    """What each step says where the ranks of ``failing`` fail in step 1, before the model is called, and go on.

    ``out_of_memory``: after the model was called, as a device says it.
    """
    failure = torch.OutOfMemoryError if out_of_memory else ValueError
    loss_fn = Failing(failure, calls_model=out_of_memory)
    engine = engine_of(changes, loss_fn)
    said = []
    for step in range(steps):
        loss_fn.fails = step == 1 and rank in failing
        try:
            engine.train_step(batch_of(10 * step + engine.data_rank))
            said.append("trained")
        except (ValueError, TrineError) as error:
            said.append(f"{type(error).__name__}: {error}")
    if not any("start again" in each for each in said):
        engine.close()
    elif engine._assembly.paths is not None:
        engine._assembly.paths.close()
    return said


def sizes(rank: int, changes: dict[str, Any], of_rank: Sequence[Sequence[int]]) -> list[float]:
    """Losses on batches of so many samples."""
    engine = engine_of(changes)
    losses = [float(engine.train_step(batch_of(engine.data_rank, size))) for size in of_rank[rank]]
    engine.close()
    return losses


def on_two_ranks(function: str, *arguments: Any) -> list[Any]:
    """What a function of this module returns on each rank of a group that nobody uses afterwards."""
    return started_ranks.on_ranks(
        2, globals()[function], *arguments, timeout_s=90.0, collective_timeout_s=60, grace_s=0.0
    )


def lengths(rank: int, changes: dict[str, Any], of_rank: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Losses on batches of so many tokens a sample, how many modules each step recomputed, and what the engine says."""
    torch.manual_seed(rank)
    engine = engine_of(changes)
    losses, recomputed = [], []
    for step, length in enumerate(of_rank[rank]):
        losses.append(float(engine.train_step(batch_of(10 * step + engine.data_rank, 2, length))))
        recomputed.append(engine._assembly.metrics.get("checkpointing/modules", lambda: 0.0)())
    engine.close()
    return {"losses": losses, "recomputed": recomputed, "effects": [str(each) for each in engine.effects]}


def refused(rank: int, changes: dict[str, Any]) -> str:
    """What is said to these changes."""
    return refusal_of(lambda: engine_of(changes).close())
