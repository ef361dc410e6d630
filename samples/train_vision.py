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
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trine.samples.training import add_arguments, place, share_of, train
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
    parser.add_argument(
        "--read-ms", type=float, default=0.0, metavar="MS", help="what fetching an image costs"
    )
    add_arguments(parser, rate=1e-3)
    return parser.parse_args(argv)


def build(
    arguments: argparse.Namespace, rank: int, ranks: int, device: torch.device
) -> tuple[VisionTransformer, torch.optim.Optimizer, Loader]:
    """Model, optimizer and loader, the same on every call with the same seed; ``rank`` of ``ranks`` shares of the data."""
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
        model, optimizer, loader = build(arguments, *share_of(arguments, rank, ranks), device)
        train(arguments, model, optimizer, loader, loss_of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
