"""Train a small vision transformer on drawn digits; its input pipeline can be slow.

    python -m trine.samples.train_vision
    python -m trine.samples.train_vision --read-ms 5                       images come from slow storage
    python -m trine.samples.train_vision --read-ms 5 --config vision       the same with loader workers
    torchrun --nproc-per-node 2 -m trine.samples.train_vision --record runs/tuned --config vision

Without ``--config``: fp32, attention by hand, default AdamW, images fetched in the training process. With it, the same
model and data by ``trine.optimize``; ``vision`` is the configuration that lies beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import trine
from trine.samples import configuration, configurations
from trine.samples.train_gpt import place
from trine.samples.vision import Digits, VisionConfig, VisionTransformer, loss_of

__all__ = ["arguments_of", "build", "main"]

Loader = DataLoader[Any]


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(
        prog="train_vision", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    shape = VisionConfig()
    for name in ("layers", "hidden", "heads", "image", "patch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(shape, name), metavar="N")
    parser.add_argument("--images", type=int, default=4096, metavar="N", help="images of an epoch")
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="images a rank and step")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="loader processes a rank")
    parser.add_argument(
        "--read-ms", type=float, default=0.0, metavar="MS", help="what fetching an image costs"
    )
    parser.add_argument("--steps", type=int, default=40, metavar="N")
    parser.add_argument("--rate", type=float, default=1e-3, metavar="LR", help="learning rate")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--config", metavar="TOML", help="a Trine configuration: a file, or the name of a packaged one"
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="profile into FOLDER")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write this rank 0's losses as JSON")
    return parser.parse_args(argv)


def build(
    arguments: argparse.Namespace, rank: int, ranks: int, device: torch.device
) -> tuple[VisionTransformer, torch.optim.Optimizer, Loader]:
    """Model, optimizer and loader, the same on every call with the same seed."""
    torch.manual_seed(arguments.seed)
    shape = VisionConfig(
        arguments.layers, arguments.hidden, arguments.heads, arguments.image, arguments.patch
    )
    model = VisionTransformer(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
    data = Digits(arguments.images, arguments.image, arguments.read_ms, arguments.seed)
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, seed=arguments.seed)
    loader: Loader = DataLoader(
        data, arguments.batch, sampler=sampler, num_workers=arguments.workers, drop_last=True
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
    model: VisionTransformer,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    device: torch.device,
    ranks: int,
) -> list[float]:
    """The loop that people write."""
    replica = DistributedDataParallel(model) if ranks > 1 else model
    losses: list[torch.Tensor] = []
    with _profile(arguments, model, optimizer) as prof:
        for batch in prof.steps(islice(loader, arguments.steps)):
            images, labels = (tensor.to(device) for tensor in batch)
            loss = loss_of(replica, (images, labels))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            prof.log(loss=losses[-1])
    return [float(loss) for loss in losses]


def _train_by_engine(
    arguments: argparse.Namespace,
    model: VisionTransformer,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    device: torch.device,
    ranks: int,
) -> list[float]:
    """The same with a configuration applied."""
    named = arguments.config in configurations() and not Path(arguments.config).exists()
    config = trine.Config.from_toml(configuration(arguments.config) if named else arguments.config)
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    with _profile(arguments, model, optimizer) as prof:
        prof.describe(configuration=config.to_dict())
        for batch in prof.steps(islice(engine.steps(loader), arguments.steps)):
            losses.append(engine.train_step(batch))
            prof.log(loss=losses[-1])
    engine.close()
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
def _profile(
    arguments: argparse.Namespace, model: VisionTransformer, optimizer: torch.optim.Optimizer
) -> Iterator[Any]:
    if arguments.record is None:
        yield _NoProfile()
        return
    with trine.profile(arguments.record, model=model, optimizer=optimizer) as prof:
        yield prof


if __name__ == "__main__":
    sys.exit(main())
