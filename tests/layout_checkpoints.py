"""What the tests of checkpoints and layouts run on each rank; importable by spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optim_cases
import torch
from torch import distributed

import trine
from trine.samples.gpt import GPT, GPTConfig, loss_of
from trine.samples.moe import MixtureConfig, MixtureGPT

__all__ = ["content", "engine_of", "loaded_and_saved", "model_of", "plain_steps", "saved"]

STEPS, MORE = 3, 3


def model_of(changes: dict[str, Any], seed: int) -> Any:
    """A GPT of four blocks whose head is its embedding, or with ``experts`` a mixture of them."""
    shape = {"layers": 4, "hidden": 32, "heads": 2, "sequence": 32, **changes}
    torch.manual_seed(seed)
    model: Any = MixtureGPT(MixtureConfig(**shape)) if "experts" in shape else GPT(GPTConfig(**shape))
    return model.double()


def engine_of(changes: dict[str, Any], model: dict[str, Any], seed: int = 0) -> Any:
    gpt = model_of(model, seed)
    optimizer, scheduler = _stepping(gpt)
    config = trine.Config().with_changes(changes)
    return trine.optimize(gpt, optimizer, config, loss_fn=loss_of, scheduler=scheduler)


def _stepping(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)


def plain_steps(model: Any) -> dict[str, torch.Tensor]:
    """The parameters after the steps that are saved, by the loop that people write in one process."""
    optimizer, scheduler = _stepping(model)
    for batch in optim_cases.batches(STEPS, 8):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(engine: Any, first: int, steps: int) -> list[float]:
    """Losses over all samples of steps of eight, of which each data rank sees its share."""
    losses = []
    for batch in optim_cases.batches(STEPS + MORE, 8)[first : first + steps]:
        share = tuple(t.chunk(engine.data_ranks)[engine.data_rank] for t in batch)
        loss = engine.train_step(share).detach().double().reshape(1)
        distributed.all_reduce(loss)
        losses.append(float(loss) / distributed.get_world_size())
    return losses


def saved(
    rank: int, changes: dict[str, Any], model: dict[str, Any], folder: str, asynchronous: bool = False
) -> list[float]:
    """Train, save; the losses that follow."""
    engine = engine_of(changes, model)
    trained(engine, 0, STEPS)
    handle = engine.save(folder, asynchronous=True) if asynchronous else engine.save(folder)
    losses = trained(engine, STEPS, MORE)
    if asynchronous:
        handle.result()
    engine.close()
    return losses


def loaded_and_saved(
    rank: int, changes: dict[str, Any], model: dict[str, Any], folder: str, again: str
) -> list[float]:
    """Another layout reads it, writes what it has read, and goes on."""
    engine = engine_of(changes, model, seed=9)
    trained(engine, 0, 1)  # what it did before must not matter
    assert engine.load(folder) == STEPS
    engine.save(again)
    losses = trained(engine, STEPS, MORE)
    engine.close()
    return losses


def content(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by PyTorch's own reader."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _load_state_dict(found, FileSystemReader(folder), no_dist=True, planner=planner)
    return found
