"""Checkpoints: resumed bit for bit, read by another sharding, whole or not there at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import optim_cases
import pytest
import zero_cases
from rank_pool import RankPool

import trine
from trine.record.errors import UnreadableInput, UsageError
from trine.samples.gpt import loss_of

torch = pytest.importorskip("torch")


def _engine(**changes: Any) -> Any:
    return zero_cases.made_engine(changes)


# --- resumed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "in_memory", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["folder", "memory"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero.stage": 1},
        {"zero.stage": 3},
        {"zero.stage": 1, "precision.dtype": "bf16", "precision.master_weights": True},
        {"zero.stage": 2, "precision.dtype": "fp16", "accumulation.steps": 2},
    ],
    ids=str,
)
def test_a_resumed_run_goes_on_bit_for_bit(
    two_ranks: RankPool, changes: dict[str, Any], in_memory: bool, tmp_path: Path
) -> None:
    """With dropout, a schedule, two groups and clipping."""
    for found in two_ranks.run("resume_cases:resumed", changes, str(tmp_path / "run"), in_memory):
        step, went_on, again, bits, other, rates = found
        assert step == 4
        assert went_on == again and bits == other and rates[0] == rates[1]


def test_error_feedback_resumes(two_ranks: RankPool, tmp_path: Path) -> None:
    """Nearly bit for bit: residuals are saved so that they do not depend on buckets, which adds them up otherwise."""
    changes = {"communication.compression": "int8"}
    for step, went_on, again, *_ in two_ranks.run("resume_cases:resumed", changes, str(tmp_path / "run")):
        assert step == 4 and again == pytest.approx(went_on, rel=1e-6)


def test_one_process_resumes_bit_for_bit(tmp_path: Path) -> None:
    changes = {"precision.dtype": "bf16", "precision.master_weights": True}
    data = optim_cases.batches(6, 4)
    first = zero_cases.made_engine(changes)
    for batch in data[:3]:
        first.train_step(batch)
    first.save(tmp_path / "run")
    went_on = [float(first.train_step(batch)) for batch in data[3:]]
    second = zero_cases.made_engine(changes)
    assert second.load(tmp_path / "run") == 3
    assert [float(second.train_step(batch)) for batch in data[3:]] == went_on


# --- read by another sharding --------------------------------------------------------------------


@pytest.mark.slow
def test_every_sharding_reads_every_other(two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    saved = two_ranks.run("resume_cases:saved_by", {"zero.stage": 3}, folder)[0]
    readers: list[tuple[RankPool, dict[str, Any]]] = [
        (two_ranks, {}),
        (two_ranks, {"zero.stage": 1}),
        (four_ranks, {"zero.stage": 2, "parallel.shard": 2}),
    ]
    for pool, changes in readers:
        by_rank = pool.run("resume_cases:loaded_by", changes, folder)
        for rank, (bits, moments, losses, warned) in enumerate(by_rank):
            assert (bits, moments) == saved[:2]
            assert losses == pytest.approx(saved[2], rel=1e-5)
            assert bool(warned) == (pool is four_ranks and rank == 0)  # random streams are a rank's own
    saved = four_ranks.run("resume_cases:saved_by", {"zero.stage": 1}, folder)[0]  # replaces the other
    for bits, moments, losses, _ in two_ranks.run("resume_cases:loaded_by", {"zero.stage": 3}, folder):
        assert (bits, moments) == saved[:2]
        assert losses == pytest.approx(saved[2], rel=1e-5)


def test_a_sharded_checkpoint_is_evaluated_in_one_process(two_ranks: RankPool, tmp_path: Path) -> None:
    from trine.optim.runtime.checkpoints import load_model

    folder = tmp_path / "run"
    saved = two_ranks.run("resume_cases:saved_by", {"zero.stage": 3}, str(folder))[0]
    model = optim_cases.small_gpt(seed=9)
    assert load_model(folder, model) == 4
    assert zero_cases.digest(model) == saved[0]
    engine = trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_of)
    batch = optim_cases.batches(6, 8)[4]
    with torch.no_grad():
        assert float(loss_of(engine.model, batch)) == pytest.approx(saved[2][0], rel=1e-5)
    plain = zero_cases.made_engine({}, dropout=0.0)
    assert plain.load(folder) == 4
    assert float(plain.train_step(batch)) == pytest.approx(saved[2][0], rel=1e-5)


# --- whole or not there ----------------------------------------------------------------------------


def test_a_rank_that_cannot_write_stops_all_and_harms_nothing(two_ranks: RankPool, tmp_path: Path) -> None:
    for said, still_there in two_ranks.run("resume_cases:no_room_on_one_rank", str(tmp_path / "run")):
        assert "No space left on device" in said and "\n" not in said
        assert still_there


def test_a_closed_engine_is_neither_saved_nor_loaded_into(tmp_path: Path) -> None:
    engine = _engine()
    engine.save(tmp_path / "run")
    engine.close()
    for call in (engine.save, engine.load):
        with pytest.raises(UsageError, match=r"this engine was closed: save before engine\.close\(\)"):
            call(tmp_path / "run")
    assert _engine().load(tmp_path / "run") == 0


def test_a_save_that_was_cut_short_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trine.optim.runtime.checkpoints import writing

    engine = _engine()
    folder = tmp_path / "run"

    def killed(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_publish", killed)
        with pytest.raises(KeyboardInterrupt):
            engine.save(folder)
    with pytest.raises(UnreadableInput, match="interrupted before it was whole"):
        engine.load(folder)
    engine.save(folder)
    assert engine.load(folder) == 0
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.previous"))


def test_a_kill_between_two_names_leaves_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is loaded without anybody's help, and the next save does not put it at risk."""
    from trine.optim.runtime.checkpoints import writing

    engine = _engine()
    folder = engine.save(tmp_path / "run")
    folder.rename(tmp_path / "run.previous")
    assert engine.load(folder) == 0
    assert "the one before is whole, in" in caplog.text
    fails = mock.patch.object(writing, "renamed_when_whole", side_effect=OSError(5, "Input/output error"))
    with fails, pytest.raises(UsageError, match="Input/output error"):
        engine.save(folder)
    assert engine.load(folder) == 0
    engine.save(folder)
    assert not list(tmp_path.glob("*.previous"))


def test_what_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is there and is no checkpoint"):
        _engine().save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    model = optim_cases.small_gpt()
    engine = trine.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"accumulation": {"steps": 2}}
    )
    engine.backward(engine(optim_cases.batches(1, 2)[0][0]).square().mean())
    assert engine.step() is False
    for call in (lambda: engine.save(tmp_path / "run"), engine.state_dict):
        with pytest.raises(UsageError, match="gradients of 1 of 2 micro-batches"):
            call()


# --- not this one ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = zero_cases.made_engine({})
    engine.train_step(optim_cases.batches(1, 2)[0])
    return engine.save(tmp_path_factory.mktemp("checkpoints") / "run")


def _other_model(**changes: Any) -> Any:
    model = optim_cases.small_gpt(**changes)
    return trine.optimize(model, torch.optim.AdamW(zero_cases.groups_of(model), lr=1e-3))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: _other_model(layers=3), "another model: it has no blocks.2.norm1.weight"),
        (lambda: _other_model(layers=1), "another model: this one has no blocks.1.norm1.weight"),
        (
            lambda: _other_model(hidden=64),
            r"another model: tokens.weight is \(256, 32\) there and \(256, 64\) here",
        ),
    ],
    ids=["deeper", "shallower", "wider"],
)
def test_a_checkpoint_of_another_model(saved: Path, made: Any, words: str) -> None:
    engine = made()
    before = zero_cases.digest(engine.model)
    with pytest.raises(UnreadableInput, match=words) as raised:
        engine.load(saved)
    assert "\n" not in str(raised.value)
    assert zero_cases.digest(engine.model) == before


def test_a_checkpoint_of_other_groups(saved: Path) -> None:
    model = optim_cases.small_gpt()
    engine = trine.optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    before = zero_cases.digest(model)
    with pytest.raises(UnreadableInput, match="groups"):
        engine.load(saved)
    assert zero_cases.digest(model) == before


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "holds no checkpoint"),
        (lambda folder: (folder / "trine.json").write_text("{"), "holds no checkpoint"),
        (
            lambda folder: (folder / "trine.json").write_text(json.dumps({"schema": "trine.checkpoint/9"})),
            r"'trine\.checkpoint/9', and this version reads",
        ),
        (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04nonsense"), "ends after 10 of"),
        (lambda folder: (folder / "rank-00000.pt").write_bytes(b"PK"), "ends after 2 of"),
        (lambda folder: (folder / "rank-00000.pt").unlink(), "cannot be read"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "damaged"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b""), "damaged"),
    ],
    ids=["absent", "description", "newer", "metadata", "own", "own absent", "tensors absent", "tensors cut"],
)
def test_what_is_damaged_is_said_in_one_line(saved: Path, tmp_path: Path, harm: Any, words: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    _engine().load(folder)  # the control
    harm(folder)
    with pytest.raises(UnreadableInput, match=words) as raised:
        _engine().load(folder)
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value)


def test_a_scheduler_that_holds_more_than_plain_values_is_told_at_the_save(tmp_path: Path) -> None:
    class Rate:
        def __init__(self) -> None:
            self.source = Path("somewhere")

        def __call__(self, step: int) -> float:
            return 1.0

    model = optim_cases.small_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Rate())
    engine = trine.optimize(model, optimizer, loss_fn=loss_of, scheduler=scheduler)
    with pytest.raises(UsageError, match="a checkpoint holds tensors, numbers and strings"):
        engine.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_arguments_that_are_none_of_theirs(saved: Path) -> None:
    engine = zero_cases.made_engine({})
    for named in ({"newest": "no"}, {"data": 0}):
        with pytest.raises(UsageError, match=rf"^engine\.load: {next(iter(named))} is True or False, not "):
            engine.load(saved, **named)
    for state, words in (
        ({}, "without it"),
        (None, "a NoneType"),
        ({"tensors": {}, "common": {}, "own": {}}, "step"),
    ):
        with pytest.raises(
            UsageError, match=rf"^engine\.load_state_dict takes what engine\.state_dict gave.*{words}"
        ):
            engine.load_state_dict(state)
    engine.load_state_dict(engine.state_dict())


def test_values_that_are_rounded_are_told(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    from trine.optim.runtime.checkpoints import load_model

    zero_cases.made_engine({}).load(saved)
    assert "rounded" not in caplog.text
    model = optim_cases.small_gpt().bfloat16()
    load_model(saved, model)
    assert "are rounded to the model's type" in caplog.text and "bfloat16 here" in caplog.text


def test_rounding_is_told_once_and_only_where_it_happens(
    saved: Path, two_ranks: RankPool, caplog: pytest.LogCaptureFixture
) -> None:
    from trine.optim.runtime.checkpoints import load_model

    other = optim_cases.small_gpt().bfloat16()
    del other.blocks[-1]
    with pytest.raises(UnreadableInput, match="is of another model: this one has no"):
        load_model(saved, other)
    assert "rounded" not in caplog.text
    first, second = two_ranks.run("checkpoint_cases:rounding", str(saved))
    assert len(first) == 1 and "bfloat16 here" in first[0]
    assert second == []


@pytest.mark.parametrize(
    ("there", "here", "is_rounded"),
    [
        ("float32", "bfloat16", True),
        ("float16", "bfloat16", True),
        ("bfloat16", "float16", True),
        ("bfloat16", "float32", False),
        ("float8_e4m3fn", "bfloat16", False),
        ("bfloat16", "float8_e4m3fn", True),
        ("float8_e4m3fn", "float8_e5m2", True),
        ("int64", "float16", True),
        ("int32", "float32", True),
        ("uint8", "bfloat16", False),
        ("bool", "float16", False),
        ("complex64", "float32", True),
        ("float4_e2m1fn_x2", "float32", True),
        ("float32", "int64", False),  # what is no floating-point number is not trained
    ],
)
def test_types_that_do_not_hold_all_values(there: str, here: str, is_rounded: bool) -> None:
    from trine.optim.runtime.checkpoints.slots import rounded

    wanted, saved = (
        {"model/x": torch.empty(1, dtype=getattr(torch, name), device="meta")} for name in (here, there)
    )
    assert rounded(wanted, saved) == ({"x": (there, here)} if is_rounded else {})


def test_loading_inside_a_step_that_was_taken(saved: Path) -> None:
    engine = zero_cases.made_engine({})
    for batch in engine.steps(optim_cases.batches(1, 2)):
        engine.train_step(batch)
        with pytest.raises(UsageError, match="before the loop"):
            engine.load(saved)


def test_fused_kernels_read_what_loops_wrote(saved: Path) -> None:
    """How a group is computed stays this run's; the step count goes where its kernel reads it."""
    engine = zero_cases.made_engine({"compute.fuse": ["optimizer"]}, dropout=0.0)
    engine.load(saved)
    assert all(group["fused"] for group in engine.optimizer.param_groups)
    plain = zero_cases.made_engine({}, dropout=0.0)
    plain.load(saved)
    batch = optim_cases.batches(2, 2)[1]
    assert float(engine.train_step(batch)) == float(plain.train_step(batch))
    pairs = zip(engine.parameters().values(), plain.parameters().values(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("there", "here"), [("float64", "float32"), ("bfloat16", "float32")])
def test_state_that_is_of_its_parameters_type_follows_it(there: str, here: str, tmp_path: Path) -> None:
    """As with PyTorch's ``load_state_dict``; its loops and kernels refuse a parameter beside moments of another type."""

    def engine_of(dtype: str) -> Any:
        model = optim_cases.small_gpt().to(getattr(torch, dtype))
        return trine.optimize(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), trine.Config(), loss_fn=loss_of
        )

    (batch,) = optim_cases.batches(1, 4)
    engine = engine_of(there)
    engine.train_step(batch)
    engine.save(tmp_path / "saved")
    engine.close()
    engine = engine_of(here)
    engine.load(tmp_path / "saved")
    moments = [state["exp_avg"].dtype for state in engine.optimizer.state.values()]
    assert moments and set(moments) == {getattr(torch, here)}
    engine.train_step(batch)
    engine.close()
