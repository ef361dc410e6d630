"""What programs hand to the engine by mistake: one clear line, with nothing changed, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import input_cases
import numpy
import pytest
import torch
from input_cases import pairs, small, squared
from rank_pool import RankPool
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

import trine
from trine.optim.techniques import techniques
from trine.record.errors import TrineError, UnreadableInput, UsageError

BATCH = pairs(1)[0]


def _engine(loss_fn: Any = squared, changes: dict[str, Any] | None = None, **keys: Any) -> Any:
    model = keys.pop("model", None) or small()
    optimizer = keys.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = trine.Config().with_changes(changes or {})
    return trine.optimize(model, optimizer, config, loss_fn=loss_fn, **keys)


def _refusal(call: Any) -> str:
    with pytest.raises(TrineError) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said
    return said


LOSSES: tuple[tuple[str, Any, str], ...] = (
    ("None", lambda model, batch: None, "NoneType"),
    ("a vector", lambda model, batch: (model(batch[0]) - batch[1]) ** 2, "loss.mean()"),
    ("numpy", lambda model, batch: squared(model, batch).detach().numpy(), "ndarray"),
    ("a number", lambda model, batch: float(squared(model, batch).detach()), "float"),
    ("one of a tuple", lambda model, batch: (squared(model, batch),), "1 values"),
    ("three", lambda model, batch: (squared(model, batch), 6, model), "3 values"),
    ("a dictionary", lambda model, batch: {"loss": squared(model, batch)}, "dict"),
    ("detached", lambda model, batch: squared(model, batch).detach(), "no gradient"),
    ("whole", lambda model, batch: torch.tensor(3), "int64"),
    ("complex", lambda model, batch: squared(model, batch).to(torch.complex64), "complex64"),
    ("a word", lambda model, batch: (squared(model, batch), "six"), "token count is a str"),
    ("no count", lambda model, batch: (squared(model, batch), None), "token count is a NoneType"),
    ("negative", lambda model, batch: (squared(model, batch), -3), "-3"),
    ("negative tensor", lambda model, batch: (squared(model, batch), torch.tensor(-3)), "-3"),
    ("NaN", lambda model, batch: (squared(model, batch), float("nan")), "nan"),
    ("infinite", lambda model, batch: (squared(model, batch), torch.tensor(float("inf"))), "inf"),
    ("outputs", lambda model, batch: (squared(model, batch), model(batch[0])), "(6, 1)"),
    ("second loss", lambda model, batch: (squared(model, batch), squared(model, batch)), "second loss"),
)


@pytest.mark.parametrize(("loss_fn", "words"), [case[1:] for case in LOSSES], ids=[c[0] for c in LOSSES])
def test_losses_and_counts_that_are_none(loss_fn: Any, words: str) -> None:
    engine = _engine(loss_fn)
    before = [parameter.clone() for parameter in engine.model.parameters()]
    assert words in _refusal(lambda: engine.train_step(BATCH))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_what_counts_may_be() -> None:
    expected = float(_engine().train_step(BATCH))
    for count in (6, 6.0, numpy.int64(6), torch.tensor(6), torch.tensor([6.0])):
        found = _engine(lambda model, batch, count=count: (squared(model, batch), count)).train_step(BATCH)
        assert float(found) == pytest.approx(expected, rel=1e-6)


def test_counts_for_some_micro_batches_alone() -> None:
    calls = iter(range(9))

    def sometimes(model: Any, batch: Any) -> Any:
        loss = squared(model, batch)
        return (loss, 3) if next(calls) % 2 == 0 else loss

    assert "for all or for none" in _refusal(
        lambda: _engine(sometimes, {"accumulation.steps": 2}).train_step(BATCH)
    )


def test_batches_without_samples() -> None:
    empty = (torch.zeros(0, 4), torch.zeros(0, 1))
    assert "holds no sample" in _refusal(lambda: _engine().train_step(empty))
    said = _refusal(lambda: _engine(changes={"accumulation.steps": 2}).train_step(empty))
    assert "a batch of 0" in said and "use 1" in said
    said = _refusal(lambda: _engine(lambda m, b: (squared(m, b), len(b[0]))).train_step(empty))
    assert "valid token" in said


def test_arrays_are_cut_with_the_tensors() -> None:
    """Else the model would see half of the inputs beside all of the targets."""

    def loss_of(model: Any, batch: Any) -> Any:
        assert len(batch[0]) == len(batch[1]) == 3
        return ((model(batch[0]) - torch.from_numpy(batch[1])) ** 2).mean()

    mixed = (BATCH[0], BATCH[1].numpy())
    engine = _engine(loss_of, {"accumulation.steps": 2})
    assert float(engine.train_step(mixed)) == pytest.approx(float(_engine().train_step(BATCH)), rel=1e-6)


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(4), torch.ones(1))] * 8)


def test_loaders() -> None:
    assert len(list(_engine().steps(DataLoader(_Stream(), batch_size=4)))) == 2
    for changes in ({"data.shape_buckets": [8]}, {"data.packing": True}):
        if "data.packing" not in changes:
            engine = _engine(changes=changes)
            assert len(list(engine.steps(iter([torch.zeros(2, 8, dtype=torch.int64)] * 2)))) == 2
    for loader in (None, 3):
        assert "takes a loader" in _refusal(lambda loader=loader: list(_engine().steps(loader)))

    def failing() -> Iterator[Any]:
        yield BATCH
        raise OSError("the disk is gone")

    engine = _engine()
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in engine.steps(failing()):
            engine.train_step(batch)
    assert torch.isfinite(engine.train_step(BATCH))


def _frozen() -> Any:
    return small().requires_grad_(False)


def _on_meta() -> Any:
    with torch.device("meta"):
        return small()


SETTINGS: tuple[tuple[Any, str], ...] = (
    (lambda: _engine(model=_frozen()), "frozen"),
    (lambda: _engine(model=_on_meta()), "meta device"),
    (lambda: _engine(model=torch.nn.Sequential(torch.nn.LazyLinear(2))), "0.weight has no shape yet"),
    (lambda: _engine(3), "loss_fn is a int"),
    (lambda: _engine(clip_norm=0), "clip_norm = 0"),
    (lambda: _engine(clip_norm=-1.0), "clip_norm = -1.0"),
    (lambda: _engine(clip_norm=float("nan")), "clip_norm = nan"),
    (lambda: _engine(clip_norm="1"), "clip_norm = '1'"),
    (lambda: _engine(clip_norm=True), "clip_norm = True"),
    (lambda: _engine(nonfinite="ignore"), "nonfinite = 'ignore'"),
    (lambda: _engine(scheduler="cosine"), "scheduler is a str"),
    (lambda: trine.optimize(small(), torch.optim.SGD([torch.zeros(1)], lr=1), 3), "config is a int"),  # type: ignore[arg-type]
    (lambda: trine.Config.from_dict({"precision.dtype": "bf16"}), "the table precision with the key dtype"),
)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.float32))
def test_whatever_the_default_dtype_of_the_program(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = small()
        engine = trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=squared)
        batch = tuple(each.to(dtype) if each.is_floating_point() else each for each in BATCH)
        assert torch.isfinite(engine.train_step(batch))
        engine.close()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("call", "words"), SETTINGS, ids=[case[1] for case in SETTINGS])
def test_settings(call: Any, words: str) -> None:
    assert words in _refusal(call)


SCHEDULERS: tuple[Any, ...] = (
    lambda o: lr_scheduler.StepLR(o, 2),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
)


@pytest.mark.parametrize("make", SCHEDULERS, ids=range(len(SCHEDULERS)))
def test_schedulers_step_as_by_hand(make: Any) -> None:
    rates = []
    for by_engine in (False, True):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        seen = []
        engine = trine.optimize(model, optimizer, loss_fn=squared, scheduler=scheduler if by_engine else None)
        for batch in pairs(4):
            engine.train_step(batch)
            if not by_engine:
                scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        rates.append(seen)
    assert rates[0] == rates[1] and len(set(rates[0])) > 1


def test_schedulers_that_cannot_be_stepped() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    said = _refusal(lambda: _engine(model=model, optimizer=optimizer, scheduler=plateau))
    assert "ReduceLROnPlateau" in said and "scheduler.step(metrics) yourself" in said
    other = lr_scheduler.StepLR(torch.optim.SGD(small().parameters(), lr=0.1), 1)
    said = _refusal(lambda: _engine(model=model, optimizer=optimizer, scheduler=other))
    assert "of another optimizer" in said
    short = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    engine = _engine(model=model, optimizer=optimizer, scheduler=short)
    engine.train_step(BATCH)
    with pytest.raises(trine.TrineError, match="OneCycleLR failed"):
        for _ in range(3):
            engine.train_step(BATCH)


def test_optimizers_with_a_closure() -> None:
    model = small()
    assert "LBFGS.step() evaluates the loss itself" in _refusal(
        lambda: _engine(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    )


def test_steps_out_of_order() -> None:
    engine = _engine(None)
    assert "nothing to apply" in _refusal(engine.step)
    assert "loss.mean()" in _refusal(lambda: engine.backward(engine(BATCH[0])))
    loss = squared(engine, BATCH)
    engine.close()
    for call in (lambda: engine.backward(loss), engine.step, lambda: engine(BATCH[0])):
        assert "was closed" in _refusal(call)


def test_checkpoints_of_others(tmp_path: Path) -> None:
    engine = _engine()
    engine.train_step(BATCH)
    assert "takes the path of a folder" in _refusal(lambda: engine.save(None))
    assert "takes the path of a folder" in _refusal(lambda: engine.save(""))
    assert "takes the path of a folder" in _refusal(lambda: trine.latest_checkpoint(b"runs"))  # type: ignore[arg-type]
    assert "asynchronous is True or False, not 'yes'" in _refusal(
        lambda: engine.save("runs", asynchronous="yes")
    )
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for call in (engine.save, engine.load, trine.latest_checkpoint):
        for path in (circle, "runs\0"):
            assert "is no path that can be followed" in _refusal(lambda call=call, path=path: call(path))
    engine.save(tmp_path / "one")
    model = small()
    descent = _engine(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UnreadableInput, match="of another optimizer"):
        descent.load(tmp_path / "one")
    assert _engine().load(tmp_path / "one") == 1


def test_every_technique_states_its_tolerance() -> None:
    assert all(callable(getattr(technique, "tolerance", None)) for technique in techniques())


DIFFERENT: tuple[tuple[list[dict[str, Any]], str], ...] = (
    (
        [{"config": {"precision": {"dtype": "bf16"}}}, {}],
        'precision.dtype differs between ranks, "bf16" on rank 0',
    ),
    (
        [{"config": {"accumulation": {"steps": s}}} for s in (2, 3)],
        "accumulation.steps differs between ranks",
    ),
    (
        [{"config": {"zero": {"stage": s}}} for s in (3, 1)],
        "zero.stage differs between ranks, 3 on rank 0 and 1",
    ),
    ([{}, {"config": "absent.toml"}], "on rank 1: cannot read the configuration absent.toml"),
    ([{"clip_norm": 1.0}, {}], "clip_norm differs between ranks"),
    ([{"clip_norm": -1.0}, {}], "on rank 0: clip_norm = -1.0"),
    ([{"loss_fn": None}, {}], "loss_fn differs between ranks"),
    ([{}, {"frozen": True}], "the model differs between ranks"),
    ([{"environment": {"TRINE_RANKS_PER_NODE": "7"}}, {}], "on rank 0: TRINE_RANKS_PER_NODE=7"),
    ([{"environment": {"TRINE_RANKS_PER_NODE": s}} for s in ("1", "2")], "ranks per node differs"),
)


@pytest.mark.parametrize(("by_rank", "words"), DIFFERENT, ids=[case[1] for case in DIFFERENT])
def test_ranks_that_are_given_other_things(
    two_ranks: RankPool, by_rank: list[dict[str, Any]], words: str
) -> None:
    first, second = two_ranks.run("input_cases:differing", by_rank)
    assert words in first and first == second and "\n" not in first


def test_a_second_engine_for_the_same_model(two_ranks: RankPool) -> None:
    plain = two_ranks.run("input_cases:losses_of", {})
    assert two_ranks.run("input_cases:twice", {}, {}) == plain
    assert two_ranks.run("input_cases:twice", {}, {"zero.stage": 3}) == plain
    for said in two_ranks.run("input_cases:twice", {"zero.stage": 3}, {}):
        assert "sharded already" in said
    for said in two_ranks.run("input_cases:twice", {"zero.stage": 1}, {}):
        assert "give trine.optimize each pair once" in said


def test_a_budget_that_is_enough_on_one_rank_alone(two_ranks: RankPool) -> None:
    """Batches of 6 and of 600 samples: rank 0 would go on, and wait for rank 1, which has refused."""
    first, second = two_ranks.run("input_cases:budget_over_unequal_batches", 4_000)
    assert first == second and "checkpointing.budget_bytes = 4000: full checkpointing" in first
    plans = two_ranks.run("input_cases:budget_over_unequal_batches", 10_000_000)
    assert all("0 of 2 modules recomputed" in plan[0] for plan in plans)


def test_one_process_says_the_same() -> None:
    assert input_cases.losses_of(0, {}) == input_cases.losses_of(0, {"accumulation.steps": 1})
    with pytest.raises(UsageError):
        input_cases.losses_of(0, {"zero.stage": 2})
