"""A run that was interrupted goes on bit for bit, whatever was applied to it; on other ranks, as near as can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layout_checkpoints
import pytest
from rank_pool import RankPool

torch = pytest.importorskip("torch")

T = {"parallel.tensor": 2}
P = {"parallel.pipeline": 2, "parallel.microbatches": 2}

#: One of each family, on two ranks: (changes, model's changes).
FAMILIES: dict[str, Any] = {
    "nothing": ({}, {}),
    "zero 3": ({"zero.stage": 3}, {}),
    "zero 1 + accumulation": ({"zero.stage": 1, "accumulation.steps": 2}, {}),
    "late updates": ({"accumulation.delayed": True, "accumulation.delayed_warmup_steps": 2}, {}),
    "tensor": (T, {}),
    "pipeline": (P, {}),
    "pipeline in a V": ({**P, "parallel.chunks": 2, "parallel.schedule": "zbv"}, {}),
    "expert": ({"parallel.expert": 2}, {"experts": 4}),
    "context": ({"parallel.context": 2, "compute.attention": "sdpa"}, {"dropout": 0.0}),
    "recomputation": ({"checkpointing.mode": "full"}, {}),
    "state in the host's memory": ({"offload.optimizer": "cpu"}, {}),
    "fused": ({"compute.fuse": ["optimizer"]}, {}),
    "workers": ({"data.workers": 1}, {}),
}
QUICK = ("zero 3", "pipeline")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_it_goes_on_bit_for_bit(two_ranks: RankPool, family: str, tmp_path: Path) -> None:
    """With dropout, a schedule, two groups, and samples shuffled over epochs."""
    changes, model = FAMILIES[family]
    for step, whole, rest in two_ranks.run("checkpoint_cases:resumed", changes, model, str(tmp_path)):
        assert step == 8 and rest == whole and len(rest) == 10
    one, two = (layout_checkpoints.content(tmp_path / name) for name in ("whole", "resumed"))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.mark.slow
def test_state_on_disk_goes_on_bit_for_bit(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    changes = {"offload.optimizer": "nvme", "offload.path": str(tmp_path / "disk"), "zero.stage": 2}
    for _, whole, rest in two_ranks.run("checkpoint_cases:resumed", changes, {}, str(tmp_path)):
        assert rest == whole


@pytest.mark.slow
def test_workers_read_on(two_ranks: RankPool, tmp_path: Path) -> None:
    for _, whole, rest in two_ranks.run("checkpoint_cases:resumed", {"zero.stage": 1}, {}, str(tmp_path), 1):
        assert rest == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "powersgd"])
def test_error_feedback_goes_on_on_other_ranks(
    two_ranks: RankPool, four_ranks: RankPool, kind: str, tmp_path: Path
) -> None:
    """Its mean over ranks, by parameter, is what is added to the next mean gradient: it is the same."""
    changes = {"communication.compression": kind}
    saved = four_ranks.run("checkpoint_cases:redistributed", changes, str(tmp_path / "run"), True)[0]
    assert any(saved)
    for found in two_ranks.run("checkpoint_cases:redistributed", changes, str(tmp_path / "run"), False):
        assert found == pytest.approx(saved, rel=1e-4, abs=1e-5)
