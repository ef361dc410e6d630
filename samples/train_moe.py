"""Train a small GPT with a mixture of experts on the standard library's sources, as people first write it.

    python -m trine.samples.train_moe
    torchrun --nproc-per-node 4 -m trine.samples.train_moe --record runs/plain
    torchrun --nproc-per-node 4 -m trine.samples.train_moe --record runs/spread --config moe

The same data, flags and loop as train_gpt.py, and the experts': how many, how many a token is sent to, and what weighs the
loss that keeps them equally busy. Without ``--config`` every rank has all experts. With ``moe`` two ranks share them, and
the record shows how equally tokens are spread.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

from trine.samples.gpt import loss_of
from trine.samples.moe import BALANCES, MixtureConfig, MixtureGPT
from trine.samples.train_gpt import loader_of, parsed, parser_of, shape_of
from trine.samples.training import place, share_of, train

__all__ = ["arguments_of", "build", "main"]


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = parser_of("train_moe", (__doc__ or "").splitlines()[0])
    shape = MixtureConfig()
    parser.add_argument("--experts", type=int, default=shape.experts, metavar="N", help="of each layer")
    parser.add_argument("--top-k", type=int, default=shape.top_k, metavar="N", help="experts of a token")
    parser.add_argument("--balance", type=float, default=0.01, metavar="W", help="weight of the balance loss")
    parser.add_argument(
        "--balance-over",
        choices=BALANCES,
        default="rank",
        help="what the balance loss counts: each rank's tokens by themselves, or those of all",
    )
    return parsed(parser, argv)


def build(
    arguments: argparse.Namespace, rank: int, ranks: int, device: torch.device
) -> tuple[MixtureGPT, torch.optim.Optimizer, DataLoader[Any]]:
    """Model, optimizer and loader, the same on every call with the same seed."""
    torch.manual_seed(arguments.seed)
    shape = MixtureConfig(
        **shape_of(arguments),
        experts=arguments.experts,
        top_k=arguments.top_k,
        balance=arguments.balance,
        balance_over=arguments.balance_over,
    )
    model = MixtureGPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
    return model, optimizer, loader_of(arguments, rank, ranks)


def main(argv: list[str] | None = None) -> int:
    """Train and return 0."""
    arguments = arguments_of(argv)
    with place() as (rank, ranks, device):
        model, optimizer, loader = build(arguments, *share_of(arguments, rank, ranks), device)
        train(arguments, model, optimizer, loader, loss_of)
    return 0


if __name__ == "__main__":
    sys.exit(main())
