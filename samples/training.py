"""What the sample programs share: their place among the ranks, the loop that people write, and the one by the engine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import trine
from trine.samples import configuration, configurations

__all__ = ["add_arguments", "configuration_of", "place", "share_of", "train"]

#: ``loss_of(model, batch)``: the mean loss, or that and the tokens it is the mean of.
LossFunction = Callable[[Any, Any], Any]


def add_arguments(parser: argparse.ArgumentParser, rate: float) -> None:
    """Those that every sample has."""
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="loader processes a rank")
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    parser.add_argument("--rate", type=float, default=rate, metavar="LR", help="learning rate")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--config",
        metavar="TOML",
        help=f"apply a Trine configuration: a file, or one of {', '.join(configurations())}",
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="profile into FOLDER")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write this rank 0's losses as JSON")


@contextmanager
def place() -> Iterator[tuple[int, int, torch.device]]:
    """(rank, ranks, device) as torchrun says; a process group for as long as there are several ranks."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks == 1:
        yield rank, ranks, device
        return
    distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield rank, ranks, device
    finally:
        distributed.destroy_process_group()


def configuration_of(arguments: argparse.Namespace) -> Path | None:
    """The file that ``--config`` means: one of that name here, else one that comes with the samples."""
    if arguments.config is None:
        return None
    named = arguments.config in configurations() and not Path(arguments.config).exists()
    return configuration(arguments.config) if named else Path(arguments.config)


def share_of(arguments: argparse.Namespace, rank: int, ranks: int) -> tuple[int, int]:
    """Which share of the data this rank takes, and how many there are: ranks of a tensor or pipeline group share theirs."""
    layout = trine.layout_of(configuration_of(arguments), rank, ranks)
    return layout.data_rank, layout.data_ranks


def train(
    arguments: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    loss_of: LossFunction,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Train as the arguments say, and print what became of the loss. ``facts`` are kept in the record."""
    device = next(iter(model.parameters())).device
    by = _train_plain if arguments.config is None else _train_by_engine
    losses = [float(loss) for loss in by(arguments, model, optimizer, loader, loss_of, device, facts)]
    grouped = distributed.is_available() and distributed.is_initialized()
    ranks = distributed.get_world_size() if grouped else 1
    if not grouped or distributed.get_rank() == 0:
        print(f"{len(losses)} steps on {ranks} x {device.type}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        if arguments.losses:
            arguments.losses.write_text(json.dumps(losses))


def _train_plain(
    arguments: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    loss_of: LossFunction,
    device: torch.device,
    facts: Callable[[], Mapping[str, Any]],
) -> list[torch.Tensor]:
    """The loop that people write."""
    replica = DistributedDataParallel(model) if distributed.is_initialized() else model
    losses: list[torch.Tensor] = []
    with _profile(arguments, replica, optimizer, facts) as prof:
        for batch in prof.steps(islice(loader, arguments.steps)):
            result = loss_of(replica, _on(device, batch))
            loss = result[0] if isinstance(result, tuple) else result
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            prof.log(loss=losses[-1])
    return losses


def _train_by_engine(
    arguments: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    loss_of: LossFunction,
    device: torch.device,
    facts: Callable[[], Mapping[str, Any]],
) -> list[torch.Tensor]:
    """The same with a configuration applied."""
    engine = trine.optimize(model, optimizer, configuration_of(arguments), loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    resumed = getattr(arguments, "resume", None)
    if resumed is not None:
        engine.load(resumed)
    with _profile(arguments, engine.model, engine.optimizer, facts) as prof:
        prof.describe(configuration=engine.config.to_dict())
        for batch in prof.steps(islice(engine.steps(loader), arguments.steps)):
            losses.append(engine.train_step(batch))
            prof.log(loss=losses[-1])
    if getattr(arguments, "save", None) is not None:
        engine.save(arguments.save)
    engine.close()
    return losses


def _on(device: torch.device, batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return tuple(tensor.to(device) for tensor in batch)


class _NoProfile:
    """What stands in where nothing is recorded."""

    def steps(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    def log(self, **values: Any) -> None:
        pass

    def describe(self, **facts: Any) -> None:
        pass


@contextmanager
def _profile(
    arguments: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: Callable[[], Mapping[str, Any]],
) -> Iterator[Any]:
    if arguments.record is None:
        yield _NoProfile()
        return
    recording: AbstractContextManager[Any] = trine.profile(
        arguments.record, model=model, optimizer=optimizer, metadata=dict(facts())
    )
    with recording as prof:
        yield prof
