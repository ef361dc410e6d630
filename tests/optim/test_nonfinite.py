"""Gradients that are not finite, batches without a valid token: a clear error or a step left out, never wrong numbers."""

from __future__ import annotations

import logging
import math
from typing import Any

import nonfinite_cases as cases
import optim_cases
import pytest

import trine
from trine.record import events
from trine.record.errors import TrainingError, UsageError

torch = pytest.importorskip("torch")


def test_an_infinity_raises_before_the_update_and_names_the_first_parameter() -> None:
    model = cases.model_of()
    engine = cases.engine_of(model, cases.ignoring_loss)
    engine.train_step(cases.tokens(0, 6))
    before = cases.values(model)
    with pytest.raises(TrainingError) as raised:
        engine.train_step(cases.tokens(1, 6, bad=math.inf))
    said = str(raised.value)
    assert said.startswith("optimizer step 1: the gradient of 0.weight is not finite (")
    assert 'nonfinite="skip"' in said and "\n" not in said
    assert cases.values(model) == before
    # The gradients are gone: who catches the error goes on as if the batch had not been there.
    loss = float(engine.train_step(cases.tokens(2, 6)))
    assert math.isfinite(loss)


def test_a_skipped_step_leaves_parameters_state_and_schedule_alone(caplog: pytest.LogCaptureFixture) -> None:
    def run(bad: bool) -> tuple[Any, Any, float, list[Any]]:
        seen: list[Any] = []
        stop = events.listen(lambda kind, told: seen.append(told) if kind == "metric" else None)
        model = cases.model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        engine = trine.optimize(
            model, optimizer, loss_fn=cases.ignoring_loss, scheduler=scheduler, nonfinite="skip"
        )
        batches = [
            cases.tokens(0, 6),
            *([cases.tokens(1, 6, bad=math.inf)] if bad else []),
            cases.tokens(2, 6),
        ]
        for batch in batches:
            engine.train_step(batch)
        stop()
        return cases.values(model), optimizer.state_dict(), scheduler.get_last_lr()[0], seen

    sound, faulty = run(False), run(True)
    assert faulty[0] == sound[0] and faulty[2] == sound[2]
    for a, b in zip(faulty[1]["state"].values(), sound[1]["state"].values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert [told["value"] for told in faulty[3] if told["name"] == "skipped_steps"] == [0.0, 1.0, 1.0]
    assert "optimizer step 1 was skipped: the gradient of 0.weight is not finite" in caplog.text


def test_allowed_gradients_go_through() -> None:
    model = cases.model_of()
    engine = cases.engine_of(model, cases.ignoring_loss, nonfinite="allow")
    engine.train_step(cases.tokens(1, 6, bad=math.inf))
    assert not all(math.isfinite(value) for values in cases.values(model) for value in values)


def test_an_infinite_input_behind_a_saturated_activation_is_seen() -> None:
    """tanh(inf) is 1: the loss is finite and so is every bias's gradient, but 0·inf in the first matrix's is not."""
    model = cases.model_of()
    loss, _ = cases.ignoring_loss(model, cases.tokens(1, 6, bad=math.inf))
    loss.backward()
    assert math.isfinite(float(loss.detach())) and bool(torch.isfinite(model[0].bias.grad).all())
    assert not bool(torch.isfinite(model[0].weight.grad).all())


def test_skip_reads_every_number() -> None:
    """One number in the middle of a matrix; the default would see it in the parameters' next gradients."""
    for nonfinite in ("skip", "raise"):
        model = cases.model_of()
        before = cases.values(model)
        hook = model[2].weight.register_hook(_with_one_infinity)
        engine = cases.engine_of(model, cases.ignoring_loss, nonfinite=nonfinite)
        engine.train_step(cases.tokens(0, 6))
        hook.remove()
        if nonfinite == "skip":
            assert cases.values(model) == before
        else:
            with pytest.raises(TrainingError, match=r"optimizer step 1: .*the loss was not finite"):
                engine.train_step(cases.tokens(1, 6))


def _with_one_infinity(gradient: Any) -> Any:
    changed = gradient.clone()
    changed[1, 3] = math.inf
    return changed


def test_a_model_without_biases_is_watched_too() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 3, bias=False)).double()
    engine = cases.engine_of(model, cases.ignoring_loss)
    with pytest.raises(TrainingError, match=r"gradient of 0\.weight is not finite"):
        engine.train_step(cases.tokens(0, 6, bad=math.inf))


def test_a_word_that_is_no_policy() -> None:
    with pytest.raises(UsageError, match=r"nonfinite = 'ignore'"):
        cases.engine_of(cases.model_of(), cases.ignoring_loss, nonfinite="ignore")


def test_looking_changes_no_bit() -> None:
    runs = []
    for nonfinite in ("raise", "skip", "allow"):
        model = optim_cases.small_gpt()
        engine = trine.optimize(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn=_gpt_loss, nonfinite=nonfinite
        )
        runs.append([float(engine.train_step(batch)) for batch in optim_cases.batches(4, 2)])
    assert runs[0] == runs[1] == runs[2] == optim_cases.train_plain(4, 2)[0]


def _gpt_loss(model: Any, batch: Any) -> Any:
    from trine.samples.gpt import loss_of

    return loss_of(model, batch)


# --- no valid token ----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ignoring", "divided"])
def test_a_micro_batch_without_valid_tokens_weighs_nothing(loss: str) -> None:
    """Six tokens in three micro-batches, the second all masked: the numbers of the four others at once."""
    inputs, targets = cases.tokens(0, 6)
    targets[2:4] = -100
    plain = cases.model_of()
    exact, _ = cases.ignoring_loss(plain, (inputs, targets))
    exact.backward()
    model = cases.model_of()
    engine = cases.engine_of(model, cases.LOSSES[loss], {"accumulation.steps": 3})
    said = float(engine.train_step((inputs, targets)))
    assert said == pytest.approx(float(exact.detach()), rel=1e-12)
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference - 0.1 * reference.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", ["ignoring", "divided"])
def test_a_batch_without_any_valid_token(loss: str) -> None:
    nothing = cases.masked(*cases.tokens(0, 6), 0)
    model = cases.model_of()
    before = cases.values(model)
    with pytest.raises(TrainingError, match=r"optimizer step 0: the batch holds no valid token"):
        cases.engine_of(model, cases.LOSSES[loss]).train_step(nothing)
    engine = cases.engine_of(model, cases.LOSSES[loss], nonfinite="skip")
    assert math.isnan(float(engine.train_step(nothing)))  # there is no mean to tell
    assert cases.values(model) == before
    assert math.isfinite(float(engine.train_step(cases.tokens(1, 6))))


RANKS = [
    pytest.param({}, id="ddp"),
    pytest.param({"communication.bucket_mib": 0.0001}, id="buckets"),
    pytest.param({"zero.stage": 1}, id="zero 1"),
    pytest.param({"zero.stage": 3}, id="zero 3"),
    pytest.param({"accumulation.steps": 2}, id="accumulation"),
]


@pytest.mark.parametrize("loss", ["ignoring", "divided"])
@pytest.mark.parametrize("changes", RANKS)
def test_a_rank_without_valid_tokens_adds_exactly_nothing(two_ranks: Any, changes: Any, loss: str) -> None:
    for nothing_on in ([1], [0]):
        by_rank = two_ranks.run("nonfinite_cases:no_valid_token", 2, loss, changes, nothing_on)
        losses, parameters = cases.whole_losses(2, nothing_on)
        for rank, (said, error, found) in enumerate(by_rank):
            assert error == "" and all(map(math.isfinite, said))
            if rank in nothing_on:  # it has no mean of its own, and tells that of all ranks' tokens
                assert said[1] == pytest.approx(losses[1], rel=1e-10)
            for ours, exact in zip(found, parameters, strict=True):
                assert ours == pytest.approx(exact, rel=1e-10, abs=1e-14)
        assert by_rank[0][2] == by_rank[1][2]  # the same bits


def test_no_rank_has_a_valid_token(two_ranks: Any) -> None:
    for _, error, _ in two_ranks.run("nonfinite_cases:no_valid_token", 2, "divided", {}, [0, 1]):
        assert "optimizer step 1: no rank's batch holds a valid token" in error


# --- all ranks agree ---------------------------------------------------------------------------


@pytest.mark.parametrize("changes", RANKS)
def test_all_ranks_raise_together_and_name_the_one(two_ranks: Any, changes: Any) -> None:
    for losses, error, before, after in two_ranks.run("nonfinite_cases:bad_gradients", changes, "raise", 1):
        assert len(losses) == 2 and before == after
        assert "optimizer step 2: the gradient of 0.weight is not finite" in error
        assert "the loss of rank 1 was not finite" in error


@pytest.mark.parametrize("changes", [RANKS[0], RANKS[3]])
def test_all_ranks_skip_together(two_ranks: Any, changes: Any) -> None:
    by_rank = two_ranks.run("nonfinite_cases:bad_gradients", changes, "skip", 0)
    assert by_rank[0][3] == by_rank[1][3]
    for losses, error, before, after in by_rank:
        assert error == "" and len(losses) == 5 and math.isfinite(losses[4])
        assert before != after  # later steps train on


def test_an_overflow_storm_on_one_rank_ends_both(two_ranks: Any) -> None:
    for said in two_ranks.run("nonfinite_cases:storm"):
        assert "precision.loss_scale is down to 1" in said and 'precision.dtype = "bf16"' in said


def test_looking_costs_well_under_a_hundredth_of_a_step() -> None:
    """Of a step of 10 ms and more; measured beside each other, since other work runs on the machine."""
    import time

    from trine.optim.runtime.nonfinite import Watch

    model = optim_cases.small_gpt(layers=4, hidden=128, heads=4, sequence=128)
    engine = trine.optimize(model, torch.optim.AdamW(model.parameters()), loss_fn=_gpt_loss)
    batch = optim_cases.batches(1, 2, sequence=128)[0]
    watch = Watch(engine._assembly, "raise")
    ratios = []
    for _ in range(5):
        began = time.perf_counter()
        engine.train_step(batch)
        step = time.perf_counter() - began
        _gpt_loss(model, batch).backward()
        began = time.perf_counter()
        watch.look()
        ratios.append((time.perf_counter() - began) / step)
        model.zero_grad()
    logging.getLogger("trine").debug("shares of a step: %s", ratios)
    assert sorted(ratios)[1] < 0.01


# --- as on a device, where nothing is read before its time -----------------------------------


@pytest.fixture
def device_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that are tensors are not read, and flags are read one step late: the path of CUDA devices."""
    from trine.optim.runtime import nonfinite, update

    def is_tensor(value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    monkeypatch.setattr(nonfinite, "unread", is_tensor)
    monkeypatch.setattr(update, "unread", is_tensor)
    monkeypatch.setattr(nonfinite.Watch, "waits", property(lambda watch: watch._policy == "skip"))


@pytest.mark.usefixtures("device_like")
def test_what_is_read_late_says_so() -> None:
    model = cases.model_of()
    engine = cases.engine_of(model, cases.divided_loss)
    engine.train_step(cases.tokens(0, 6))
    engine.train_step(cases.tokens(1, 6, bad=math.inf))  # not known yet
    with pytest.raises(TrainingError) as raised:
        engine.train_step(cases.tokens(2, 6))
    said = str(raised.value)
    assert said.startswith("optimizer step 1: the gradient of 0.weight was not finite (1 of 5")
    assert "read one step late" in said and "checkpoint" in said


@pytest.mark.usefixtures("device_like")
@pytest.mark.parametrize("loss", ["ignoring", "divided"])
def test_a_count_that_is_not_read_can_be_zero(loss: str) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        mean, count = cases.LOSSES[loss](model, batch)
        return mean, torch.as_tensor(count, dtype=torch.float64)

    inputs, targets = cases.tokens(0, 6)
    targets[2:4] = -100
    plain = cases.model_of()
    exact, _ = cases.ignoring_loss(plain, (inputs, targets))
    exact.backward()
    model = cases.model_of()
    engine = cases.engine_of(model, loss_fn, {"accumulation.steps": 3})
    assert float(engine.train_step((inputs, targets))) == pytest.approx(float(exact.detach()), rel=1e-12)
    for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference - 0.1 * reference.grad, rtol=1e-12, atol=1e-14)
    before = cases.values(model)
    engine.train_step(cases.masked(inputs, targets, 0))
    assert cases.values(model) == before  # zero gradients, not NaN
    with pytest.raises(TrainingError, match="optimizer step 1: no batch held a valid token"):
        engine.train_step((inputs, targets))
