"""Loops round the engine: leftovers, evaluation, exceptions, closing, and what a step costs."""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

import accumulation_cases as cases
import pytest

import trine
from trine.record import events
from trine.record.errors import UsageError

torch = pytest.importorskip("torch")


def _own_step(engine: Any, batch: Any) -> bool:
    inputs, targets = batch
    engine.backward(torch.nn.functional.cross_entropy(engine(inputs), targets))
    stepped: bool = engine.step()
    return stepped


def test_micro_batches_that_are_left_are_said_and_count_in_the_next_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A loader of unknown length ends in mid-step: the next epoch completes it, and nothing is lost."""
    batches = [cases.samples(2, seed) for seed in range(6)]
    model, plain = cases.regression(), cases.regression()
    engine = cases.engine_of(model, {"accumulation.steps": 3}, loss_fn=None)
    with caplog.at_level(logging.WARNING, logger="trine"):
        stepped = [_own_step(engine, batch) for batch in engine.steps(iter(batches[:4]))]
    assert "the loader ended after 1 of 3 micro-batches" in caplog.text
    stepped += [_own_step(engine, batch) for batch in engine.steps(iter(batches[4:]))]
    assert stepped == [False, False, True, False, False, True]
    for start in (0, 3):
        cases.plain_step(plain, tuple(map(torch.cat, zip(*batches[start : start + 3], strict=True))))
    torch.testing.assert_close(cases.weights(model), cases.weights(plain), rtol=1e-12, atol=1e-13)


def test_evaluation_inside_the_loop_breaks_no_counting() -> None:
    plain, evaluated = cases.regression(dropout=0.2), cases.regression(dropout=0.2)
    results = []
    for model, evaluates in ((plain, False), (evaluated, True)):
        torch.manual_seed(4)
        engine = cases.engine_of(model, {"accumulation.steps": 2}, loss_fn=None)
        stepped = []
        for batch in engine.steps([cases.samples(4, seed) for seed in range(4)]):
            stepped.append(_own_step(engine, batch))
            if evaluates:
                engine.model.eval()
                with torch.no_grad():
                    engine(batch[0])
                engine.model.train()
        results.append((stepped, cases.weights(model)))
    assert results[0][0] == results[1][0] == [False, True] * 2
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_leaves_no_trace(where: str) -> None:
    """The second of two micro-batches fails: the first one's gradients are dropped with it."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Any) -> Any:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise ValueError("in backward")

    calls = 0

    def failing(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = cases.loss_of(model, batch)
        if calls == 2:
            if where == "forward":
                raise ValueError("in forward")
            return Fails.apply(loss)
        return loss

    model, plain = cases.regression(), cases.regression()
    engine = cases.engine_of(model, {"accumulation.steps": 2}, loss_fn=failing)
    kinds: list[str] = []
    stop = events.listen(lambda kind, _: kinds.append(kind))
    try:
        with pytest.raises(ValueError, match=f"in {where}"):
            engine.train_step(cases.samples(8))
    finally:
        stop()
    assert "step_begin" in kinds and kinds[-1] == "step_cancel"
    assert all(p.grad is None for p in model.parameters())
    engine.train_step(cases.samples(8))
    cases.plain_step(plain, cases.samples(8))
    torch.testing.assert_close(cases.weights(model), cases.weights(plain), rtol=1e-13, atol=1e-14)


def test_a_failure_inside_the_optimizer_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parameters may have been updated, others not: going on would be silent corruption."""
    engine = cases.engine_of(cases.regression(), {})
    engine.train_step(cases.samples(4))

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("half done")

    monkeypatch.setattr(engine.optimizer, "step", fails)
    with pytest.raises(RuntimeError, match="half done"):
        engine.train_step(cases.samples(4))
    monkeypatch.undo()
    with pytest.raises(
        UsageError, match=r"failed in the optimizer step \(RuntimeError: half done\).*checkpoint"
    ):
        engine.train_step(cases.samples(4))


def test_own_loops_discard_what_failed_with_its_weight() -> None:
    model, plain = cases.regression(), cases.regression()
    engine = cases.engine_of(model, {"accumulation.steps": 2}, loss_fn=None)
    inputs, _ = cases.samples(4, 9)
    engine.backward(engine(inputs).square().mean(), count=4)
    engine.discard()
    first, second = cases.samples(4, 0), cases.samples(4, 1)
    assert [_own_step(engine, first), _own_step(engine, second)] == [False, True]
    cases.plain_step(plain, tuple(map(torch.cat, zip(first, second, strict=True))))
    torch.testing.assert_close(cases.weights(model), cases.weights(plain), rtol=1e-12, atol=1e-13)


def test_a_closed_engine_says_so() -> None:
    engine = cases.engine_of(cases.regression(), {})
    engine.train_step(cases.samples(4))
    engine.close()
    engine.close()  # twice is once
    for use in (lambda: engine.train_step(cases.samples(4)), lambda: engine(cases.samples(4)[0])):
        with pytest.raises(UsageError, match="was closed"):
            use()


def test_batches_in_dictionaries() -> None:
    def loss_of(model: Any, batch: Any) -> Any:
        assert len(batch["names"]) == len(batch["inputs"])
        return cases.loss_of(model, (batch["inputs"], batch["targets"]))

    inputs, targets = cases.samples(6)
    batch = {"inputs": inputs, "targets": targets, "names": list("abcdef"), "temperature": 2.0}
    model, plain = cases.regression(), cases.regression()
    cases.engine_of(model, {"accumulation.micro_batch": 4}, loss_fn=loss_of).train_step(batch)
    cases.plain_step(plain, (inputs, targets))
    torch.testing.assert_close(cases.weights(model), cases.weights(plain), rtol=1e-13, atol=1e-14)


@pytest.mark.slow
@pytest.mark.timing
def test_what_the_engine_adds_to_a_step() -> None:
    """Less than what a perceptron's own step takes, about 0.15 ms: processor time of this thread, alternated."""
    batches = [cases.samples(4, seed) for seed in range(100)]
    plain = cases.regression()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    engine = cases.engine_of(cases.regression(), {}, rate=0.01)

    def by_hand() -> None:
        for batch in batches:
            cases.loss_of(plain, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def by_engine() -> None:
        for batch in engine.steps(batches):
            engine.train_step(batch)

    least = [float("inf")] * 2
    gc.disable()
    try:
        for _ in range(20):
            for place, loop in enumerate((by_hand, by_engine)):
                begin = time.thread_time()
                loop()
                least[place] = min(least[place], time.thread_time() - begin)
    finally:
        gc.enable()
    assert least[1] - least[0] < 0.9 * least[0]


def test_a_missing_loss_function_is_said_before_anything_moves() -> None:
    engine = cases.engine_of(cases.regression(), {}, loss_fn=None)
    with pytest.raises(trine.TrineError, match="loss_fn"):
        engine.train_step(cases.samples(2))
