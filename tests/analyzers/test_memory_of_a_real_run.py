"""Categories inferred from a trace against those of PyTorch's own memory profiler, which sees the tensors."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from trine.analyzers.analysis import analyze
from trine.analyzers.studies import result_of
from trine.analyzers.studies.memory_owners import MemoryOwners, RankMemory
from trine.record.loading import load

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of AdamW on the CPU: a trace, and the profiler's own memory timeline in three forms."""
    folder = tmp_path_factory.mktemp("recorded")
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        warnings.catch_warnings(),
        torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True, with_stack=True
        ) as profiler,
    ):
        warnings.simplefilter("ignore")
        for _ in range(4):
            loss = model(torch.randn(64, 256)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the export is deprecated, and what people still have
        for name in ("timeline.json", "timeline.json.gz", "timeline.raw.json.gz"):
            profiler.export_memory_timeline(str(folder / name), device="cpu")
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return folder


def memory_of(path: Path) -> RankMemory:
    found = result_of(analyze(load(path)), "memory_owners", MemoryOwners)
    assert found is not None
    return found.ranks[0]


def highest(part: RankMemory, category: str) -> int:
    return max(part.levels[part.categories.index(category)])


def test_state_and_gradients_are_those_of_pytorchs_profiler(recorded: Path) -> None:
    inferred, told = memory_of(recorded / "trace.json"), memory_of(recorded / "timeline.raw.json.gz")
    for category in ("gradients", "optimizer_state"):
        assert highest(inferred, category) == pytest.approx(highest(told, category), rel=0.02), category
    numbers = 256 * 512 + 512 + 512 * 10 + 10
    assert highest(inferred, "gradients") == pytest.approx(4 * numbers, rel=0.01)
    assert highest(inferred, "optimizer_state") == pytest.approx(8 * numbers, rel=0.01)
    assert inferred.leaks == ()
    named = {owned.owner for owned in inferred.owners if owned.category == "optimizer_state"}
    assert any(owner and "test_memory_of_a_real_run.py" in owner for owner in named)


def test_all_forms_of_the_timeline_agree(recorded: Path) -> None:
    forms = [
        memory_of(recorded / name) for name in ("timeline.json", "timeline.json.gz", "timeline.raw.json.gz")
    ]
    assert forms[0] == forms[1]
    # Within a microsecond the sums by category know no order; the raw form does.
    assert forms[0].peak_bytes <= forms[2].peak_bytes <= forms[0].peak_bytes * 1.2
    for category in ("parameters", "gradients", "optimizer_state"):
        assert highest(forms[0], category) == highest(forms[2], category)
