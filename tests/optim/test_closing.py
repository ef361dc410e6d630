"""What an engine leaves behind when it is closed, and when it could not be made: nothing."""

from __future__ import annotations

import logging
from typing import Any

import optim_cases
import pytest
import torch
from rank_pool import RankPool
from torch import nn

import trine
from trine.optim.techniques import loading
from trine.record.errors import UsageError


def _engine(changes: dict[str, Any], model: Any = None) -> Any:
    model = nn.Linear(4, 4) if model is None else model
    config = trine.Config().with_changes(changes)
    return trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("changes", [{"precision.dtype": "bf16"}, {"data.packing": True}], ids=str)
def test_hooks_are_taken_off_the_model(changes: dict[str, Any]) -> None:
    model = optim_cases.small_gpt()
    engine = _engine(changes, model)
    assert _hooks(model) > 0
    engine.close()
    assert _hooks(model) == 0


def test_parameters_are_offloaded_by_one_engine_at_a_time() -> None:
    """The first, closed late, would bring its own copies back over what the second has trained."""
    away = {"offload.parameters": "cpu", "offload.optimizer": "cpu"}
    model = optim_cases.small_gpt()
    first = _engine(away, model)
    with pytest.raises(UsageError, match=r"offload\.parameters: another engine .* call its close\(\) first"):
        _engine(away, model)
    first.close()
    _engine(away, model).close()


def test_one_closer_that_fails_keeps_none_of_the_others() -> None:
    engine = _engine({})
    ran: list[str] = []

    def fail() -> None:
        raise OSError("the disk is gone")

    engine._assembly.closers += [lambda: ran.append("first"), fail, lambda: ran.append("last")]
    with pytest.raises(OSError, match="the disk is gone"):
        engine.close()
    assert ran == ["last", "first"]


def test_what_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing's hook is on the model when a later technique fails."""
    model = optim_cases.small_gpt()
    seen: list[int] = []

    def fail(assembly: Any) -> None:
        seen.append(_hooks(model))
        raise RuntimeError("no memory")

    monkeypatch.setattr(loading, "apply", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        _engine({"data.packing": True}, model)
    assert seen[0] > 0
    assert _hooks(model) == 0


@pytest.mark.filterwarnings("ignore")
def test_the_recompile_limit_is_put_back() -> None:
    limits: Any = torch._dynamo.config
    before = limits.recompile_limit
    engine = _engine({"compute.compile": "model", "data.shape_buckets": list(range(8, 8 + 2 * before))})
    assert limits.recompile_limit > before
    engine.close()
    assert limits.recompile_limit == before


@pytest.mark.parametrize(
    "changes",
    [{"accumulation": {"steps": 2}}, {"accumulation": {"delayed": True, "delayed_warmup_steps": 0}}],
    ids=str,
)
def test_replicas_are_synchronised_again(two_ranks: RankPool, changes: dict[str, Any]) -> None:
    """A program that goes on without the engine would otherwise train its replicas apart."""
    for before, during, after, groups_left in two_ranks.run(
        "closing_cases:synchronised_after_closing", changes
    ):
        assert before
        assert not during
        assert after
        assert groups_left == 0


def test_a_thread_that_closes_itself(two_ranks: RankPool) -> None:
    for sound, alive in two_ranks.run("closing_cases:closed_by_its_own_thread"):
        assert sound
        assert not alive


def test_closing_twice_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = _engine({})
    with caplog.at_level(logging.WARNING, logger="trine"):
        engine.close()
        engine.close()
    assert not caplog.records
