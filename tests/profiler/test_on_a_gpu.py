"""What only a CUDA device can show: ``pytest -m gpu``. Skipped, and said, where there is none."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import trine
from trine.record.model import PHASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 30


def train(record: Path | None) -> list[float]:
    """Losses of a small model on the device, recorded where a folder is given."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(4096, 1024)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = torch.randn(STEPS, 256, 1024, generator=torch.Generator().manual_seed(1))
    losses = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch.cuda(non_blocking=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if record is None:
        return [step(batch).item() for batch in batches]
    with trine.profile(record, model=model, optimizer=optimizer) as prof:
        for batch in prof.steps(batches):
            losses.append(step(batch))
            prof.log(loss=losses[-1])
    return [loss.item() for loss in losses]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("gpu") / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own; as errors inside it they end the process
        return folder, train(folder)


def test_losses_are_bitwise_equal_with_and_without(record: tuple[Path, list[float]]) -> None:
    assert record[1] == train(None)


def test_device_times_partition_every_step(record: tuple[Path, list[float]]) -> None:
    rank = trine.load(record[0]).rank(0)
    assert rank.steps is not None and len(rank.steps) == STEPS
    phases = sum(rank.steps[f"phase_{name}_ns"] for name in PHASES)
    assert np.array_equal(phases, rank.steps["end_ns"] - rank.steps["start_ns"])
    assert (rank.steps["phase_forward_ns"] > 0).all() and (rank.steps["phase_backward_ns"] > 0).all()
    assert rank.steps["loss"].tolist() == pytest.approx(record[1])


def test_memory_of_the_device_and_a_breakdown_by_kernels(record: tuple[Path, list[float]]) -> None:
    analysis = trine.analyze(trine.load(record[0]))
    summary = analysis.ranks[0].summary
    assert summary.memory is not None and summary.memory.kind == "device"
    assert summary.memory.peak_bytes is not None and summary.memory.peak_bytes > 0
    breakdown = summary.breakdown
    assert breakdown is not None and breakdown.basis == "device"
    parts = (
        breakdown.compute_ns
        + breakdown.exposed_communication_ns
        + breakdown.exposed_copy_ns
        + breakdown.idle_ns
    )
    assert parts == breakdown.window_ns and breakdown.compute_ns > 0
