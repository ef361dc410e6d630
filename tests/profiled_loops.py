"""Small training loops for the profiler's tests, and reading back what they recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import trine
from trine.profiler import Session
from trine.record.model import MISSING, PHASES, Rank, Table

VOCABULARY, LENGTH = 50, 12


class TinyModel(torch.nn.Module):
    """Embedding, two layers, output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)
        )
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids)))


class Training:
    """A model, an optimizer, a loader of ``batches`` batches, and the usual body."""

    def __init__(self, batches: int = 6, batch_size: int = 2) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)  # a dozen threads for a tiny model would measure the machine
        self.model = TinyModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, VOCABULARY, (batches * batch_size, LENGTH), generator=generator)
        self.loader = torch.utils.data.DataLoader(list(ids), batch_size=batch_size)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.loss(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def profile(self, path: Path, **options: Any) -> Session:
        defaults: dict[str, Any] = {"windows": None, "flops": False}
        return trine.profile(path, model=self.model, optimizer=self.optimizer, **{**defaults, **options})


def read(path: Path, rank: int = 0) -> Rank:
    """The recorded rank, its steps checked for what holds of every record."""
    recorded = trine.load(path).rank(rank)
    if recorded.steps is not None:
        check_partition(recorded.steps)
    return recorded


def steps_of(path: Path, rank: int = 0) -> Table:
    """The recorded steps."""
    steps = read(path, rank).steps
    assert steps is not None
    return steps


def check_partition(steps: Table) -> None:
    """Phases are known and sum to the step; steps do not overlap."""
    phases = np.stack([steps[f"phase_{name}_ns"] for name in PHASES])
    assert (phases != MISSING).all()
    assert (phases >= 0).all()
    assert (phases.sum(axis=0) == steps["end_ns"] - steps["start_ns"]).all()
    assert (steps["start_ns"][1:] >= steps["end_ns"][:-1]).all()


def phase(steps: Table, name: str) -> Any:
    """A phase's column, ns."""
    return steps[f"phase_{name}_ns"]
