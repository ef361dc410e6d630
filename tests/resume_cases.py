"""What the tests of checkpoints run on each rank to save, to resume and to read another sharding's."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import optim_cases
import torch
from refusals import refusal_of
from zero_cases import digest, made_engine, mean_over_ranks, ranks_of

__all__: list[str] = []


def resumed(rank: int, changes: dict[str, Any], folder: str, in_memory: bool = False) -> Any:
    """Losses and bits of the run that went on, and of one that was resumed in another engine."""
    data = ranks_of(optim_cases.batches(7, 8), rank)
    torch.manual_seed(100 + rank)
    first = made_engine(changes)
    for batch in first.steps(data[:4]):
        first.train_step(batch)
        if first.step_index == 3:  # inside the loop, after its fourth step
            saved = _copied(first.state_dict()) if in_memory else first.save(folder)
    went_on = [float(first.train_step(batch)) for batch in data[4:]]
    second = made_engine(changes)
    torch.manual_seed(7)
    second.train_step(data[6])  # what it did before must not matter
    if in_memory:
        second.load_state_dict(saved)
    else:
        second.load(saved)
    step = second.step_index
    again = [float(second.train_step(batch)) for batch in data[4:]]
    rates = [[group["lr"] for group in engine.optimizer.param_groups] for engine in (first, second)]
    return step, went_on, again, digest(first.model), digest(second.model), rates


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_copied(value) for value in state)
    return state


def saved_by(rank: int, changes: dict[str, Any], folder: str) -> tuple[str, str, list[float]]:
    """Train, save; the digests of model and moments, and the losses that follow on the whole batch."""
    data = optim_cases.batches(6, 8)
    engine = made_engine(changes, dropout=0.0)
    for batch in ranks_of(data[:4], rank):
        engine.train_step(batch)
    engine.save(folder)
    bits = digest(engine.model), moments(engine)
    return *bits, mean_over_ranks([float(engine.train_step(b)) for b in ranks_of(data[4:], rank)])


def loaded_by(rank: int, changes: dict[str, Any], folder: str) -> tuple[str, str, list[float], list[str]]:
    """Another sharding reads it and goes on."""
    data = optim_cases.batches(6, 8)
    engine = made_engine(changes, dropout=0.0)
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trine").addHandler(handler)
    try:
        engine.load(folder)
    finally:
        logging.getLogger("trine").removeHandler(handler)
    bits = digest(engine.model), moments(engine)
    losses = mean_over_ranks([float(engine.train_step(b)) for b in ranks_of(data[4:], rank)])
    return *bits, losses, [line for line in warned if "checkpoint" in line]


def moments(engine: Any) -> str:
    """Of the bits of every moment, in the names' order."""
    found = hashlib.sha256()
    for name, held in sorted(engine.parameters().items()):
        for key, value in sorted(engine.optimizer.state[held].items()):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(f"{name}/{key}".encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def no_room_on_one_rank(rank: int, folder: str) -> tuple[str, bool]:
    """Rank 1 cannot write: every rank says so, and what was there before is still whole."""
    from unittest import mock

    engine = made_engine({"zero.stage": 1})
    engine.save(folder)
    real = torch.save

    def failing(*arguments: Any, **named: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return real(*arguments, **named)

    with mock.patch("torch.save", failing):
        said = refusal_of(lambda: engine.save(folder))
    engine.load(folder)
    return said, (Path(folder) / "trine.json").exists()
