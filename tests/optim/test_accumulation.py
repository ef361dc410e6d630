"""Micro-batches stated, gathered and picked by measured memory: the numbers stay those of the whole batch."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import accumulation_cases as cases
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import RankPool

import trine
from trine.optim.batches import Gathered, joined, pieces_of_size, regrouped, size_of
from trine.optim.techniques.accumulation import plan_of
from trine.record.errors import TrainingError, UsageError

torch = pytest.importorskip("torch")


def _config(**accumulation: Any) -> trine.Config:
    return trine.Config.from_dict({"accumulation": accumulation})


# --- arithmetic --------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    share=st.integers(1, 24),
)
def test_regrouping_keeps_every_sample_once_and_in_order(sizes: list[int], share: int) -> None:
    edges = [sum(sizes[:position]) for position in range(len(sizes) + 1)]
    batches = [torch.arange(a, b) for a, b in pairwise(edges)]
    found: list[int] = []
    try:
        for step in regrouped(batches, share, "accumulation.global_batch = …"):
            parts = step.parts if isinstance(step, Gathered) else (step,)
            assert size_of(step) == sum(len(part) for part in parts)
            assert len(found) % share == 0  # only the last is smaller
            found += [int(value) for part in parts for value in part]
    except UsageError as error:
        assert str(share) in str(error)
        assert found == list(range(len(found)))
    else:
        assert found == list(range(edges[-1]))


@given(size=st.integers(1, 40), micro=st.integers(1, 40))
def test_pieces_of_a_size(size: int, micro: int) -> None:
    pieces = pieces_of_size({"a": torch.arange(size), "n": 3}, micro)
    assert torch.equal(torch.cat([piece["a"] for piece in pieces]), torch.arange(size))
    assert all(len(piece["a"]) == micro for piece in pieces[:-1]) and 0 < len(pieces[-1]["a"]) <= micro


def test_batches_of_every_form_are_cut_and_joined() -> None:
    batch = {"ids": torch.arange(6).view(3, 2), "names": ["a", "b", "c"], "scale": torch.tensor(2.0)}
    pieces = pieces_of_size(batch, 2)
    assert [piece["names"] for piece in pieces] == [["a", "b"], ["c"]]
    again = joined(tuple(pieces), "key")
    assert torch.equal(again["ids"], batch["ids"]) and again["names"] == batch["names"]
    nested = ((torch.zeros(4, 2), [torch.ones(4)]), torch.zeros(4))
    assert size_of(joined(tuple(pieces_of_size(nested, 3)), "key")) == 4
    with pytest.raises(UsageError, match="differ in their shapes"):
        joined((torch.zeros(2, 3), torch.zeros(2, 4)), "accumulation.micro_batch")


def test_a_gathered_batch_cannot_be_taken_for_a_pair() -> None:
    with pytest.raises(TypeError):
        _ids, _targets = Gathered((torch.zeros(1), torch.zeros(1)))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("keys", "ranks", "expected"),
    [
        ({"steps": 4}, 2, None),
        ({"micro_batch": 3}, 2, (None, 3, None)),
        ({"global_batch": 16}, 2, (8, None, None)),
        ({"global_batch": 16, "micro_batch": 2}, 2, (8, 2, 4)),
        ({"global_batch": 16, "steps": 2}, 2, (8, 4, 2)),
        ({"global_batch": 16, "steps": 2, "micro_batch": 4}, 2, (8, 4, 2)),
        ({"global_batch": 16, "steps": "auto", "micro_batch": 4}, 2, (8, 4, 2)),
    ],
)
def test_what_the_keys_say_together(keys: dict[str, Any], ranks: int, expected: Any) -> None:
    plan = plan_of(_config(**keys), ranks)
    assert (None if plan is None else (plan.share, plan.micro, plan.steps)) == expected


@pytest.mark.parametrize(
    ("keys", "ranks", "words"),
    [
        ({"global_batch": 15}, 2, r"global_batch = 15 does not divide by the 2 ranks: use 14"),
        ({"global_batch": 16, "micro_batch": 3}, 2, r"micro_batch = 3 does not divide"),
        ({"global_batch": 16, "steps": 3}, 2, r"steps = 3 does not divide"),
        ({"global_batch": 16, "steps": 2, "micro_batch": 2}, 2, r"drop one of the three"),
    ],
)
def test_what_does_not_divide_is_refused_with_names(keys: dict[str, Any], ranks: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_of(_config(**keys), ranks)


def test_steps_and_micro_batch_alone_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="keep one of them"):
        _config(steps=2, micro_batch=2)


# --- one process -------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"accumulation.micro_batch": n} for n in (1, 3, 5, 8, 99)], ids=str)
def test_a_smaller_last_piece_weighs_what_it_holds(changes: dict[str, Any]) -> None:
    plain, split = cases.regression(), cases.regression()
    engine = cases.engine_of(split, changes)
    for seed in range(3):
        expected = cases.plain_step(plain, cases.samples(8, seed))
        assert float(engine.train_step(cases.samples(8, seed))) == pytest.approx(expected, rel=1e-13)
    torch.testing.assert_close(cases.weights(split), cases.weights(plain), rtol=1e-13, atol=1e-14)


def test_the_loader_brings_parts_of_a_step_or_several(caplog: pytest.LogCaptureFixture) -> None:
    """Six steps of 8 samples from batches of 4, of 8 and of 24; then one of the 5 samples that are left."""
    whole = cases.samples(53)
    results = []
    for size in (4, 8, 24):
        model = cases.regression()
        engine = cases.engine_of(model, {"accumulation.global_batch": 8})
        batches = [tuple(t[start : start + size] for t in whole) for start in range(0, 53, size)]
        with caplog.at_level(logging.WARNING, logger="trine"):
            losses = [float(engine.train_step(batch)) for batch in engine.steps(batches)]
        assert len(losses) == 7 and "after 5 of the 8 samples" in caplog.text
        caplog.clear()
        results.append(cases.weights(model))
    plain = cases.regression()
    for start in range(0, 53, 8):
        cases.plain_step(plain, tuple(t[start : start + 8] for t in whole))
    for result in results:
        torch.testing.assert_close(result, cases.weights(plain), rtol=1e-12, atol=1e-13)


def test_what_cannot_be_gathered_or_cut() -> None:
    engine = cases.engine_of(cases.regression(), {"accumulation.global_batch": 8})
    with pytest.raises(UsageError, match=r"8 samples a rank.*batches hold 3"):
        list(engine.steps([cases.samples(3)]))
    with pytest.raises(UsageError, match=r"train_step got 4: take the batches from engine\.steps"):
        engine.train_step(cases.samples(4))
    engine = cases.engine_of(cases.regression(), {"accumulation.micro_batch": 2})
    with pytest.raises(UsageError, match=r"accumulation\.micro_batch = 2.*first dimensions \[4, 6\]"):
        engine.train_step((torch.zeros(6, 4), torch.zeros(4)))
    assert float(engine.train_step(cases.samples(4))) > 0  # still usable


def test_own_loops_with_the_new_keys() -> None:
    """The loader yields micro-batches; a step takes as many as the global batch says."""
    plain = cases.regression()
    cases.plain_step(plain, cases.samples(8))
    for changes in (
        {"accumulation.global_batch": 8, "accumulation.micro_batch": 2},
        {"accumulation.global_batch": 8},
    ):
        model = cases.regression()
        engine = cases.engine_of(model, changes, loss_fn=None)
        stepped = []
        for inputs, targets in engine.steps(pieces_of_size(cases.samples(8), 2)):
            engine.backward(torch.nn.functional.cross_entropy(engine(inputs), targets))
            stepped.append(engine.step())
        assert stepped == [False, False, False, True]
        torch.testing.assert_close(cases.weights(model), cases.weights(plain), rtol=1e-13, atol=1e-14)
    with pytest.raises(UsageError, match=r"micro_batch = 2: engine\(…\) got 4 samples and cannot cut them"):
        cases.engine_of(model, {"accumulation.micro_batch": 2})(cases.samples(4)[0])
    with pytest.raises(UsageError, match=r"8 samples a rank, and engine\(…\) got 3"):
        cases.engine_of(model, {"accumulation.global_batch": 8})(cases.samples(3)[0])


def test_automatic_needs_train_step_but_evaluates() -> None:
    engine = cases.engine_of(cases.regression(), {"accumulation.steps": "auto"}, loss_fn=None)
    with pytest.raises(UsageError, match=r'accumulation\.steps = "auto" needs engine\.train_step'):
        engine(cases.samples(4)[0])
    with torch.no_grad():
        assert engine(cases.samples(4)[0]).shape == (4, 3)


# --- picked by memory --------------------------------------------------------------------------

#: Parameters, gradients and two moments of ``regression`` are 515 × 8 × 4 bytes.
RESIDENT = 16_480


def _pieces(extra_bytes: int, **keys: Any) -> tuple[Any, Any]:
    model = cases.regression(**keys)
    limit = RESIDENT + extra_bytes
    engine = cases.engine_of(model, {"accumulation.micro_batch": "auto", "offload.device_bytes": limit})
    engine.train_step(cases.samples(64))
    return engine._assembly.fitting, engine


def test_more_memory_gives_larger_micro_batches() -> None:
    sizes = [_pieces(extra)[0].size for extra in (4_000, 12_000, 40_000, 400_000)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[1] < sizes[2] < sizes[3] == 64


def test_what_was_picked_fits_and_twice_as_much_does_not() -> None:
    """The memory is measured again, by itself, at the size that was picked."""
    from trine.optim.runtime.memory_fit import measured_bytes, untouched

    extra = 12_000
    fitting, engine = _pieces(extra)
    model = engine.model

    def needed(samples: int) -> int:
        batch = cases.samples(samples)
        with untouched(model, [], torch.device("cpu")):
            return measured_bytes(torch.device("cpu"), lambda: cases.loss_of(model, batch).backward())

    assert needed(fitting.size) <= extra < needed(2 * fitting.size)


def test_one_sample_that_does_not_fit_is_said() -> None:
    with pytest.raises(UsageError, match=r'micro_batch = "auto": one sample needs about .* checkpointing'):
        _pieces(100)


def test_a_batch_of_one_sample() -> None:
    model, plain = cases.regression(), cases.regression()
    engine = cases.engine_of(model, {"accumulation.steps": "auto"})
    assert float(engine.train_step(cases.samples(1))) == cases.plain_step(plain, cases.samples(1))
    assert torch.equal(cases.weights(model), cases.weights(plain))


def test_measuring_leaves_random_numbers_gradients_and_buffers_alone() -> None:
    """With one piece in the end, the step after measuring is bitwise the plain one: dropout, batch norm and all."""
    import random

    plain, measured = (cases.regression(dropout=0.3, norm=True) for _ in range(2))
    torch.manual_seed(5)
    expected = cases.plain_step(plain, cases.samples(16))
    after = (torch.rand(1), random.random())
    engine = cases.engine_of(measured, {"accumulation.steps": "auto"})
    torch.manual_seed(5)
    state = random.getstate()
    assert float(engine.train_step(cases.samples(16))) == expected
    assert torch.equal(torch.rand(1), after[0]) and random.getstate() == state
    assert torch.equal(cases.weights(measured), cases.weights(plain))
    for ours, theirs in zip(measured.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert len(engine._assembly.fitting._points) >= 2  # it did measure


def test_gradients_that_were_there_are_kept() -> None:
    from trine.optim.runtime.memory_fit import untouched

    model = cases.regression()
    cases.loss_of(model, cases.samples(4)).backward()
    before = [p.grad for p in model.parameters()]
    values = [grad.clone() for grad in before]
    with untouched(model, [], torch.device("cpu")):
        cases.loss_of(model, cases.samples(9)).backward()
    for parameter, grad, value in zip(model.parameters(), before, values, strict=True):
        assert parameter.grad is grad and torch.equal(grad, value)


def test_the_micro_batch_grows_when_memory_is_freed() -> None:
    """The same losses as without: only the pieces change. The configuration's limit stands for what is free."""
    model, plain = cases.regression(), cases.regression()
    limit = RESIDENT + 8_000
    engine = cases.engine_of(model, {"accumulation.micro_batch": "auto", "offload.device_bytes": limit})
    fitting = engine._assembly.fitting
    sizes = []
    for step in range(9):
        if step == 3:
            engine._assembly.config = engine.config.with_changes({"offload.device_bytes": RESIDENT + 24_000})
        if step == 7:
            engine._assembly.config = engine.config.with_changes({"offload.device_bytes": RESIDENT + 6_000})
        loss = float(engine.train_step(cases.samples(64, step)))
        assert loss == pytest.approx(cases.plain_step(plain, cases.samples(64, step)), rel=1e-12)
        sizes.append(fitting.size)
    assert (
        sizes[0] == sizes[3] < sizes[4] == sizes[7] > sizes[8] < sizes[0]
    )  # looked at in steps 0, 2, 4 and 8
    said = [str(effect) for effect in engine.effects]
    assert any(f"{sizes[0]} → " in line and f"of {sizes[4]} (measured" in line for line in said)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_runs_the_step_again_in_smaller_pieces(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = cases.regression(dropout=0.0), cases.regression()
    too_large = {"size": 99}

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Any, size: int) -> Any:
            ctx.size = size
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if ctx.size >= too_large["size"]:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)\nmore")
            return gradient, None

    def failing(model: Any, batch: Any) -> Any:
        loss = cases.loss_of(model, batch)
        if where == "forward" and len(batch[0]) >= too_large["size"]:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)\nmore")
        return Fails.apply(loss, len(batch[0]) if where == "backward" else 0)

    engine = cases.engine_of(model, {"accumulation.micro_batch": "auto"}, loss_fn=failing)
    sizes = []
    with caplog.at_level(logging.WARNING, logger="trine"):
        for step in range(5):
            if step == 1:
                too_large["size"] = 10
            loss = float(engine.train_step(cases.samples(32, step)))
            assert loss == pytest.approx(cases.plain_step(plain, cases.samples(32, step)), rel=1e-12)
            sizes.append(engine._assembly.fitting.size)
    torch.testing.assert_close(cases.weights(model), cases.weights(plain), rtol=1e-12, atol=1e-13)
    assert sizes == [32, 8, 8, 8, 8]  # and it is not tried again where it failed
    assert engine._assembly.fitting.out_of_memory == 2
    assert "out of memory with micro-batches of 32: the step is run again with 16" in caplog.text


def test_out_of_memory_restores_what_the_failed_try_changed() -> None:
    """Running statistics are updated once, and dropout draws what it would have drawn."""
    models = [cases.regression(norm=True, dropout=0.3) for _ in range(2)]
    outcomes = []
    for model, fails in zip(models, (False, True), strict=True):
        calls = 0

        def failing(model: Any, batch: Any) -> Any:
            nonlocal calls
            calls -= 1
            loss = cases.loss_of(model, batch)
            if calls == 0:
                raise torch.OutOfMemoryError("injected")
            return loss

        keys = {"accumulation.micro_batch": "auto", "offload.device_bytes": 40_000}
        engine = cases.engine_of(model, keys, loss_fn=failing)
        fitting = engine._assembly.fitting
        torch.manual_seed(0)
        engine.train_step(cases.samples(64))
        assert fitting.pieces > 1
        fitting._shrink = lambda *_: None  # the same pieces again, so that numbers can be compared
        calls = 2 if fails else 0  # in the second micro-batch
        torch.manual_seed(1)
        outcomes.append(float(engine.train_step(cases.samples(64))))
        assert not fails or calls < 0
    assert outcomes[0] == outcomes[1]
    for ours, theirs in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_one_sample_that_runs_out_of_memory_ends_the_run_with_a_word() -> None:
    def failing(model: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError("injected")

    engine = cases.engine_of(cases.regression(), {"accumulation.steps": "auto"}, loss_fn=failing)
    with pytest.raises(UsageError, match="checkpointing"):
        engine.train_step(cases.samples(8))


def test_out_of_memory_in_the_optimizer_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = cases.engine_of(cases.regression(), {"accumulation.steps": "auto"})
    engine.train_step(cases.samples(8))

    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(engine.optimizer, "step", fails)
    with pytest.raises(TrainingError, match="in the optimizer step"):
        engine.train_step(cases.samples(8))


def test_metrics_tell_the_micro_batch() -> None:
    from trine.record import events

    told: dict[str, Any] = {}
    stop = events.listen(
        lambda kind, values: told.update({values["name"]: values["value"]}) if kind == "metric" else None
    )
    try:
        fitting, _ = _pieces(12_000)
    finally:
        stop()
    assert told["accumulation/micro_batch"] == fitting.size
    assert told["accumulation/steps"] == -(-64 // fitting.size) and told["accumulation/out_of_memory"] == 0


def test_another_profiler_leaves_what_autograd_saves_to_count() -> None:
    from trine.optim.runtime.memory_fit import measured_bytes

    model, batch = cases.regression(), cases.samples(32)

    def run() -> None:
        cases.loss_of(model, batch).backward()

    whole = measured_bytes(torch.device("cpu"), run)
    with torch.autograd.profiler.profile():
        saved = measured_bytes(torch.device("cpu"), run)
    assert 0 < saved <= whole


@given(
    fixed=st.integers(0, 10**6),
    slope=st.integers(1, 10**4),
    capacity=st.integers(0, 10**8),
    most=st.integers(1, 4096),
)
def test_the_largest_that_fits(fixed: int, slope: int, capacity: int, most: int) -> None:
    from trine.optim.runtime.memory_fit import line_through

    line = line_through([(2, fixed + 2 * slope), (4, fixed + 4 * slope)])
    found = line.largest(capacity, most)
    assert 0 <= found <= most
    assert found == 0 or fixed + slope * found <= capacity + 1e-3
    assert found == most or fixed + slope * (found + 1) > capacity - 1e-3


# --- two ranks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_two(two_ranks: RankPool) -> list[dict[str, Any]]:
    return two_ranks.run("accumulation_cases:everything_on_two")


def _plain_epoch(size: int = 16) -> Any:
    model = cases.regression()
    for seed in range(4):
        cases.plain_step(model, cases.samples(size, seed))
    return cases.weights(model)


@pytest.mark.parametrize("how", ["gathered", "cut"])
def test_a_global_batch_over_two_ranks(on_two: list[dict[str, Any]], how: str) -> None:
    for each in on_two:
        found, steps, reduced = each[how]
        assert steps == 4
        assert reduced == 0  # DDP's own alone: nothing is agreed on where nothing is counted
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), _plain_epoch(), rtol=1e-12, atol=1e-13
        )


def test_ranks_take_what_fits_on_all_of_them(on_two: list[dict[str, Any]]) -> None:
    (first, a), (second, b) = (each["automatic"] for each in on_two)
    assert first == second < 32
    assert a == b


def test_one_rank_out_of_memory_does_not_stop_the_others(on_two: list[dict[str, Any]]) -> None:
    (sizes, none, a), (smaller, one, b) = (each["out_of_memory"] for each in on_two)
    assert (none, one) == (0, 1)
    assert smaller[1] < sizes[1] and smaller[2] == sizes[2]  # agreed on again in the third step
    assert a == b
    model = cases.regression()
    for seed in range(3):
        cases.plain_step(model, cases.samples(64, seed))
    torch.testing.assert_close(
        torch.tensor(a, dtype=torch.float64), cases.weights(model), rtol=1e-12, atol=1e-13
    )


def test_the_small_numbers_of_a_step_travel_together(on_two: list[dict[str, Any]]) -> None:
    """Token count, loss and the rest of three micro-batches: one all-reduce; without counts none."""
    assert [each["all_reduces"] for each in on_two] == [[1, 0], [1, 0]]


def test_measuring_leaves_replicas_alike(on_two: list[dict[str, Any]]) -> None:
    (a, pieces), (b, _) = (each["buffers"] for each in on_two)
    assert pieces > 1
    assert a == b


@pytest.mark.slow
def test_a_failed_step_leaves_the_engine_usable_or_it_says_that_it_is_not() -> None:
    import optim_cases

    for said in optim_cases.on_ranks(2, cases.failures_on_ranks):
        assert said[:4] == ["fine", "in forward", "fine", "in backward"]
        assert "failed while gradients were exchanged (ValueError: in backward)" in said[4]


def test_fsdp_reduces_at_the_last_micro_batch_alone(two_ranks: RankPool) -> None:
    """Four micro-batches reduce-scatter as often as one does."""
    one, four = two_ranks.run("accumulation_cases:reduce_scatters")[0]
    assert one == four > 0
