"""Train a small GPT on the standard library's sources, as people first write it.

    python -m trine.samples.train_gpt
    torchrun --nproc-per-node 2 -m trine.samples.train_gpt --record runs/plain
    torchrun --nproc-per-node 2 -m trine.samples.train_gpt --record runs/tuned --config tuned.toml
    trine run samples/train_gpt.py --steps 30

Without ``--config``: fp32, attention by hand, default AdamW, DistributedDataParallel with its default
buckets, batches made in the training process. With it, the same model and data by ``trine.optimize``.
Gradients are averaged over ranks with NCCL when each rank has a GPU of its own, else with gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import trine
from trine.samples.gpt import GPT, Attention, GPTConfig, loss_of
from trine.samples.text import SourceText, standard_library

__all__ = ["arguments_of", "build", "main", "place"]


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(prog="train_gpt", description=__doc__.splitlines()[0] if __doc__ else "")
    shape = GPTConfig()
    for name in ("layers", "hidden", "heads", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=getattr(shape, name), metavar="N")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P")
    parser.add_argument("--attention", choices=("manual", "sdpa"), default="manual")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="samples a rank and step")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="loader processes a rank")
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    parser.add_argument("--rate", type=float, default=3e-4, metavar="LR", help="learning rate")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="train on FILE, not on the standard library"
    )
    parser.add_argument("--config", type=Path, metavar="TOML", help="apply a Trine configuration")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="profile into FOLDER")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write this rank 0's losses as JSON")
    return parser.parse_args(argv)


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


def build(
    arguments: argparse.Namespace, rank: int, ranks: int, device: torch.device
) -> tuple[GPT, torch.optim.Optimizer, DataLoader[Any]]:
    """Model, optimizer and loader, the same on every call with the same seed."""
    torch.manual_seed(arguments.seed)
    shape = GPTConfig(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        sequence=arguments.sequence,
        dropout=arguments.dropout,
        attention=arguments.attention,
    )
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
    text = arguments.text.read_bytes() if arguments.text else standard_library()
    data = SourceText(text, arguments.sequence)
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, seed=arguments.seed)
    loader = DataLoader(
        data, batch_size=arguments.batch, sampler=sampler, num_workers=arguments.workers, drop_last=True
    )
    return model, optimizer, loader


def main(argv: list[str] | None = None) -> int:
    """Train and return 0."""
    arguments = arguments_of(argv)
    with place() as (rank, ranks, device):
        model, optimizer, loader = build(arguments, rank, ranks, device)
        train = _train_plain if arguments.config is None else _train_by_engine
        losses = train(arguments, model, optimizer, loader, device, ranks)
    if rank == 0:
        print(f"{len(losses)} steps on {ranks} x {device.type}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        if arguments.losses:
            arguments.losses.write_text(json.dumps(losses))
    return 0


def _train_plain(
    arguments: argparse.Namespace,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    device: torch.device,
    ranks: int,
) -> list[float]:
    """The loop that people write."""
    replica = DistributedDataParallel(model) if ranks > 1 else model
    losses: list[torch.Tensor] = []
    with _profile(arguments, model, optimizer) as prof:
        for batch in prof.steps(islice(loader, arguments.steps)):
            ids, targets = (tensor.to(device) for tensor in batch)
            loss = loss_of(replica, (ids, targets))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            prof.log(loss=losses[-1])
    return [float(loss) for loss in losses]


def _train_by_engine(
    arguments: argparse.Namespace,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    device: torch.device,
    ranks: int,
) -> list[float]:
    """The same with a configuration applied."""
    config = trine.Config.from_toml(arguments.config)
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    with _profile(arguments, model, optimizer) as prof:
        prof.describe(configuration=config.to_dict())
        for batch in prof.steps(islice(engine.steps(loader), arguments.steps)):
            losses.append(engine.train_step(batch))
            prof.log(loss=losses[-1])
    return [float(loss) for loss in losses]


class _NoProfile:
    """What stands in where nothing is recorded."""

    def steps(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    def log(self, **values: Any) -> None:
        pass

    def describe(self, **facts: Any) -> None:
        pass


@contextmanager
def _profile(arguments: argparse.Namespace, model: GPT, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    if arguments.record is None:
        yield _NoProfile()
        return
    # The configuration may have changed it.
    attention = next(module.implementation for module in model.modules() if isinstance(module, Attention))
    with trine.profile(
        arguments.record, model=model, optimizer=optimizer, metadata={"attention": attention}
    ) as prof:
        yield prof


if __name__ == "__main__":
    sys.exit(main())
