"""Train a small GPT on the standard library's sources, as people first write it.

    python -m trine.samples.train_gpt
    torchrun --nproc-per-node 2 -m trine.samples.train_gpt --record runs/plain
    torchrun --nproc-per-node 2 -m trine.samples.train_gpt --record runs/tuned --config tuned.toml
    torchrun --nproc-per-node 2 -m trine.samples.train_gpt --data documents --config gpt_fast
    trine run samples/train_gpt.py --steps 30

Without ``--config``: fp32, attention by hand, default AdamW, DistributedDataParallel with its default
buckets, batches made in the training process. With it, the same model and data by ``trine.optimize``; a name without
a path is a configuration that lies beside this file. Gradients are averaged over ranks with NCCL when each
rank has a GPU of its own, else with gloo; on many nodes it is the same program.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trine.samples.gpt import FEED_FORWARDS, GPT, NORMS, POSITIONS, Attention, GPTConfig, loss_of
from trine.samples.text import SourceDocuments, SourceText, pad_documents, standard_library
from trine.samples.training import add_arguments, place, share_of, train

__all__ = ["arguments_of", "build", "loader_of", "main", "parsed", "parser_of", "shape_of"]


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    return parsed(parser_of("train_gpt", (__doc__ or "").splitlines()[0]), argv)


def parser_of(program: str, description: str) -> argparse.ArgumentParser:
    """The flags that every GPT here has."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    shape = GPTConfig()
    for name in ("layers", "hidden", "heads", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=getattr(shape, name), metavar="N")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P")
    parser.add_argument("--attention", choices=("manual", "sdpa"), default="manual")
    for name, choices in (("norm", NORMS), ("mlp", FEED_FORWARDS), ("positions", POSITIONS)):
        parser.add_argument(f"--{name}", choices=choices, default=getattr(shape, name))
    parser.add_argument(
        "--data",
        choices=("windows", "documents"),
        default="windows",
        help="windows of text, all of one length; or functions and classes of their own length, padded",
    )
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="samples a rank and step")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="train on FILE, not on the standard library"
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="with --config: a checkpoint at the end")
    parser.add_argument(
        "--resume", type=Path, metavar="FOLDER", help="with --config: go on from a checkpoint"
    )
    add_arguments(parser, rate=3e-4)
    return parser


def parsed(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """What was written; the parser's error and exit where flags contradict each other."""
    arguments = parser.parse_args(argv)
    if arguments.config is None and (arguments.save or arguments.resume):
        parser.error("--save and --resume are the engine's: give a --config too")
    return arguments


def build(
    arguments: argparse.Namespace, rank: int, ranks: int, device: torch.device
) -> tuple[GPT, torch.optim.Optimizer, DataLoader[Any]]:
    """Model, optimizer and loader, the same on every call with the same seed; ``rank`` of ``ranks`` shares of the data."""
    torch.manual_seed(arguments.seed)
    model = GPT(GPTConfig(**shape_of(arguments))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
    return model, optimizer, loader_of(arguments, rank, ranks)


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of the GPT's configuration."""
    names = ("layers", "hidden", "heads", "sequence", "dropout", "attention", "norm", "mlp", "positions")
    return {name: getattr(arguments, name) for name in names}


def loader_of(arguments: argparse.Namespace, rank: int, ranks: int) -> DataLoader[Any]:
    """This rank's batches of its share of the text."""
    text = arguments.text.read_bytes() if arguments.text else standard_library()
    of_documents = arguments.data == "documents"
    data: Any = (SourceDocuments if of_documents else SourceText)(text, arguments.sequence)
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, seed=arguments.seed)
    loader: DataLoader[Any] = DataLoader(
        data,
        batch_size=arguments.batch,
        sampler=sampler,
        num_workers=arguments.workers,
        drop_last=True,
        collate_fn=pad_documents if of_documents else None,
    )
    return loader


def main(argv: list[str] | None = None) -> int:
    """Train and return 0."""
    arguments = arguments_of(argv)
    with place() as (rank, ranks, device):
        model, optimizer, loader = build(arguments, *share_of(arguments, rank, ranks), device)

        def facts() -> dict[str, Any]:  # once the configuration has changed them
            return {"attention": next(m.implementation for m in model.modules() if isinstance(m, Attention))}

        train(arguments, model, optimizer, loader, loss_of, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
