"""Documents, models and loops for the tests of packing, grouping and buckets; importable by spawned ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plain_loop
import torch
from torch.utils.data import DataLoader, Dataset

import trine
from trine.samples.gpt import GPT, GPTConfig, loss_of
from trine.samples.text import pad_documents

__all__ = ["Documents", "engine_losses", "gpt", "plain_losses", "share_of_rank"]


class Documents(Dataset[Any]):
    """Documents of given lengths, their tokens drawn from a seed."""

    def __init__(self, lengths: Sequence[int], seed: int = 0, states_lengths: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = [torch.randint(1, 256, (length,), generator=generator) for length in lengths]
        if states_lengths:
            self.lengths = list(lengths)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def gpt(**changes: Any) -> GPT:
    """A float64 GPT for sequences of up to 64 tokens, seeded."""
    torch.manual_seed(0)
    return GPT(GPTConfig(**{"layers": 2, "hidden": 32, "heads": 2, "sequence": 64, **changes})).double()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Steps in proportion to gradients: a wrong scale shows."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_losses(batches: Any, model: torch.nn.Module | None = None, loss_fn: Any = loss_of) -> list[float]:
    """The loop that people write."""
    model = gpt() if model is None else model
    return plain_loop.plain_losses(model, optimizer_of(model), batches, loss_fn)


def engine_losses(
    changes: Mapping[str, Any],
    batches: Any,
    model: torch.nn.Module | None = None,
    loss_fn: Any = loss_of,
    seen: list[Any] | None = None,
) -> list[float]:
    """The same by the engine; ``seen`` collects its batches."""
    model = gpt() if model is None else model
    engine = trine.optimize(model, optimizer_of(model), trine.Config().with_changes(changes), loss_fn=loss_fn)
    try:
        losses = []
        for batch in engine.steps(batches):
            if seen is not None:
                seen.append(batch)
            losses.append(float(engine.train_step(batch)))
        return losses
    finally:
        engine.close()


def share_of_rank(rank: int, ranks: int, changes: dict[str, Any], lengths: list[int]) -> Any:
    """On a rank: train on its share of each batch of 8 documents; parameters at the end and its tokens by step."""
    documents = Documents(lengths)
    model = gpt()
    seen: list[Any] = []
    batches = [
        pad_documents([documents[index] for index in range(at + rank, at + 8, ranks)])
        for at in range(0, len(lengths), 8)
    ]
    engine_losses(changes, batches, model, seen=seen)
    return (
        torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        [sum(batch.document_lengths) for batch in seen],
    )


def packed_loader(lengths: Sequence[int], size: int, **keys: Any) -> DataLoader[Any]:
    """Batches as people collate them."""
    return DataLoader(Documents(lengths), batch_size=size, collate_fn=pad_documents, **keys)
