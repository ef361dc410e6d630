"""Recomputed activations that differ from the original are found and named, which PyTorch itself does not do."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import memory_cases
import optim_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trine
from trine.optim.runtime.recomputation import RecomputationWatch, _checksums
from trine.optim.techniques.checkpointing import WATCH
from trine.record.errors import UsageError

_generator = torch.Generator()


def python_random(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def own_generator(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape, generator=_generator)


def flipping(x: torch.Tensor, state: list[bool] = [False]) -> torch.Tensor:  # noqa: B006 - the fault
    state[0] = not state[0]
    return x.sin() if state[0] else x.cos()


def repeated(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.3, True)


class Noise(nn.Module):
    def __init__(self, noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(x)


class Noisy(nn.Module):
    def __init__(self, noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.noise = Noise(noise)
        self.second = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.second(self.noise(self.first(x)).tanh()))


class Stack(nn.Module):
    """Four blocks, the second and the fourth with the noise; ``own``: the model checkpoints by itself."""

    def __init__(self, noise: Callable[[torch.Tensor], torch.Tensor], own: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy(noise if n % 2 else repeated) for n in range(4))
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.own else block(x)
        return x


def engine_of(model: nn.Module, **changes: Any) -> Any:
    keys = {f"checkpointing.{key}": value for key, value in changes.items()}
    return trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        trine.Config().with_changes(keys),
        loss_fn=lambda m, batch: m(batch).square().mean(),
    )


@pytest.mark.parametrize(
    ("noise", "mode"),
    [
        (python_random, "full"),
        (python_random, "selective"),
        (own_generator, "full"),
        (own_generator, "selective"),
        (flipping, "full"),  # selective checkpointing itself notices that other operators ran
    ],
)
def test_the_modules_at_fault_are_named_in_order(noise: Any, mode: str) -> None:
    torch.manual_seed(0)
    model = Stack(noise)
    engine = engine_of(model, mode=mode)
    with RecomputationWatch(model) as watch:
        engine.train_step(torch.randn(8, 16))  # PyTorch says nothing
    assert [name for name, _ in watch.differences] == ["blocks.1", "blocks.3"]
    assert watch.regions == 4
    what = watch.differences[0][1]
    assert what.startswith("recomputed activations differ from the original: a float32 tensor (8, 16)")
    assert "Python's random" in what
    assert ("first in blocks.1.noise" in what) == (noise is own_generator)  # the others save nothing in there
    assert "\n" not in what


def test_gradients_are_wrong_where_it_says_so() -> None:
    def gradient(mode: str) -> torch.Tensor:
        torch.manual_seed(0)
        random.seed(0)
        model = Stack(python_random)
        engine = engine_of(model, mode=mode)
        found: list[torch.Tensor] = []
        parameter = model.blocks[1].first.weight
        engine._assembly.inspect.append(lambda: found.append(parameter.grad.clone()))
        engine.train_step(torch.randn(8, 16))
        return found[0]

    plain = gradient("none")
    assert float((gradient("full") - plain).norm() / plain.norm()) > 0.01


@pytest.mark.parametrize("mode", ["full", "selective", "budget"])
def test_a_healthy_model_with_dropout_differs_nowhere(mode: str) -> None:
    model = optim_cases.small_gpt(layers=3, dropout=0.2)
    keys = {"budget_bytes": 10**6} if mode == "budget" else {}
    config = {f"checkpointing.{key}": value for key, value in {"mode": mode, **keys}.items()}
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        trine.Config().with_changes(config),
        loss_fn=memory_cases.loss_of,
    )
    with RecomputationWatch(model) as watch:
        for batch in optim_cases.batches(2, 4):
            engine.train_step(batch)
    assert watch.differences == []
    assert watch.regions == 3 and watch.compared > 20


def test_nothing_checkpointed_is_nothing_compared() -> None:
    model = Stack(python_random)
    with RecomputationWatch(model) as watch:
        engine_of(model).train_step(torch.randn(8, 16))
    assert (watch.regions, watch.compared, watch.differences) == (0, 0, [])


@pytest.mark.parametrize(("noise", "names"), [(python_random, ["blocks.1", "blocks.3"]), (repeated, [])])
def test_checkpoints_of_the_models_own(noise: Any, names: list[str]) -> None:
    model = Stack(noise, own=True)
    with RecomputationWatch(model) as watch:
        engine_of(model).train_step(torch.randn(8, 16))
    assert [name for name, _ in watch.differences] == names
    assert watch.regions == 4


def test_watching_changes_no_number() -> None:
    results = []
    for watched in (False, True):
        model = optim_cases.small_gpt(layers=2, dropout=0.2)
        if watched:
            with RecomputationWatch(model):
                results.append(memory_cases.train({"checkpointing.mode": "selective"}, model))
        else:
            results.append(memory_cases.train({"checkpointing.mode": "selective"}, model))
    assert results[0].is_bitwise(results[1])


def test_afterwards_everything_is_as_before() -> None:
    from torch.utils import checkpoint as module

    before = module._allowed_determinism_checks_to_fns["default"], module._checkpoint_hook
    with pytest.raises(ZeroDivisionError), RecomputationWatch(nn.Linear(2, 2)):
        1 / 0  # noqa: B018
    assert (module._allowed_determinism_checks_to_fns["default"], module._checkpoint_hook) == before
    with (
        RecomputationWatch(nn.Linear(2, 2)),
        pytest.raises(RuntimeError, match="entered already"),
        RecomputationWatch(nn.Linear(2, 2)),
    ):
        pass


def test_another_shape_is_still_pytorchs_error() -> None:
    lengths = iter((4, 5))

    def region(x: torch.Tensor) -> torch.Tensor:
        return x[: next(lengths)].sin().cos()

    x = torch.randn(8, requires_grad=True)
    with RecomputationWatch(nn.Linear(2, 2)), pytest.raises(RuntimeError, match="different metadata"):
        checkpoint(region, x, use_reentrant=False).sum().backward()


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=40),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool]),
)
def test_checksums_tell_any_change_of_one_element(
    values: list[float], place: int, dtype: torch.dtype
) -> None:
    tensor = torch.tensor(values).to(dtype)
    changed = tensor.clone()
    place %= len(values)
    changed[place] = ~changed[place] if dtype == torch.bool else changed[place] + 1
    same = torch.equal(tensor.view(torch.uint8), changed.view(torch.uint8))  # 1e30 + 1, in few bits
    assert torch.equal(_checksums(tensor)[:2], _checksums(changed)[:2]) == same
    assert torch.equal(_checksums(tensor), _checksums(tensor.clone()))


def test_the_size_of_a_difference_is_estimated_and_can_be_tolerated() -> None:
    def run(tolerance: float) -> list[tuple[str, str]]:
        torch.manual_seed(0)
        calls = [0]

        def region(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return (x + 1e-4 * calls[0]).sin().cos()

        x = torch.randn(10_000, requires_grad=True)
        with RecomputationWatch(nn.Linear(2, 2), tolerance) as watch:
            checkpoint(region, x, use_reentrant=False).sum().backward()
        return watch.differences

    measured = float(run(0.0)[0][1].partition("by about ")[2].partition(" ")[0])
    assert 2e-5 < measured < 5e-4  # it is 1e-4
    assert run(1e-2) == []


def test_an_engine_watches_every_so_many_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WATCH, "2")
    torch.manual_seed(0)
    engine = engine_of(Stack(python_random), mode="full")
    read = engine._assembly.metrics["checkpointing/recomputation_differences"]
    counts = []
    with caplog.at_level(logging.ERROR, "trine"):
        for _ in range(4):
            engine.train_step(torch.randn(8, 16))
            counts.append(read())
    engine.close()
    assert counts == [2, 2, 4, 4]  # steps 0 and 2
    assert [record.message.split(":")[0] for record in caplog.records] == ["blocks.1"]
    monkeypatch.setenv(WATCH, "often")
    with pytest.raises(UsageError, match=WATCH):
        engine_of(Stack(repeated), mode="full")
