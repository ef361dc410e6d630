"""Evaluation and checkpoints are seen without the user's help, in their own words too, and nothing else is."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from profiled_loops import Training, read

from trine.profiler.after_import import call_after_import
from trine.profiler.session import Session
from trine.record.errors import UsageError
from trine.record.model import Table


def evaluate(training: Training, batches: int = 3) -> None:
    training.model.eval()
    with torch.no_grad():
        for _, ids in zip(range(batches), training.loader, strict=False):
            training.loss(ids)
    training.model.train()


def regions_of(path: Path) -> list[tuple[str, str]]:
    """(kind, name) of what was recorded, the profiler's own work left out; all within the record's bounds."""
    table = read(path).regions
    if table is None:
        return []
    assert isinstance(table, Table)
    assert (table["end_ns"] >= table["start_ns"]).all()
    return [
        pair for pair in zip(table.text("kind"), table.text("name"), strict=True) if pair[0] != "profiling"
    ]


def test_evaluation_and_checkpoints_are_seen(tmp_path: Path) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            training.step(ids)
            if number == 2:
                evaluate(training)
                torch.save(training.model.state_dict(), tmp_path / "in_step.pt")
        evaluate(training)
        evaluate(training)
        torch.save(training.model.state_dict(), tmp_path / "after.pt")
    evaluation, checkpoint = ("evaluation", "forward without gradients"), ("checkpoint", "torch.save")
    assert regions_of(tmp_path / "run") == [evaluation, checkpoint, evaluation, evaluation, checkpoint]
    assert torch.load(tmp_path / "in_step.pt").keys() == training.model.state_dict().keys()


def lengths_ms(path: Path) -> list[float]:
    table = read(path).regions
    assert table is not None
    evaluation = table["kind"] == table.strings.find("evaluation")
    return [float(length) / 1e6 for length in (table["end_ns"] - table["start_ns"])[evaluation]]


def test_an_evaluation_lasts_from_eval_to_train(tmp_path: Path) -> None:
    """Work before the first forward and behind the last one counts, what comes before ``eval()`` does not."""
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            training.step(ids)
            time.sleep(0.03)
            if number == 1:
                began = time.perf_counter()
                training.model.eval()
                with torch.no_grad():
                    for _ in range(3):
                        time.sleep(0.02)
                        training.model(ids)
                        time.sleep(0.02)
                training.model.train()
                took = 1e3 * (time.perf_counter() - began)
            training.model.train()  # as some loops do in every step
    (length,) = lengths_ms(tmp_path / "run")
    assert 120 <= length <= took


def test_evaluation_mode_alone_is_none_and_training_in_it_ends_it(tmp_path: Path) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            training.step(ids)  # with frozen statistics, from the second on
            training.model.eval()
            time.sleep(0.03)
            if number == 0:
                training.model.train()
        training.model.train()
        training.model.eval()
        with prof.region("work"):
            time.sleep(0.05)
        began = time.perf_counter()
        with torch.no_grad():
            training.model(ids)
    took = 1e3 * (time.perf_counter() - began)
    (length,) = lengths_ms(tmp_path / "run")
    assert length <= took, "what the user named counts as that, and not as evaluation too"


def test_modes_are_switched_as_before(tmp_path: Path) -> None:
    before = torch.nn.Module.train
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
            assert torch.nn.Module.train is before, (
                "it calls itself for each module: in a step that trains it is free"
            )
            assert training.model.eval() is training.model
            assert torch.nn.Module.train is not before
            assert inspect.signature(torch.nn.Module.train) == inspect.signature(before)
            assert not any(module.training for module in training.model.modules())
            assert training.model.train(mode=True) is training.model
            with pytest.raises(ValueError, match="boolean"):
                training.model.train("yes")  # type: ignore[arg-type]
            assert torch.nn.Module.train is before
            assert not {"train", "eval"} & vars(training.model).keys()
            training.model.eval()
            training.model.eval().train()
    assert torch.nn.Module.train is before


def test_a_healthy_loop_has_no_regions(tmp_path: Path) -> None:
    """A teacher's forward, forwards without gradients in training mode, and saving in another thread."""
    training, teacher = Training(), Training().model.eval()
    with Session(
        tmp_path / "run", models=[training.model, teacher], optimizers=[training.optimizer], windows=None
    ) as prof:
        for ids in prof.steps(training.loader):
            with torch.no_grad():
                teacher(ids)
                training.model(ids)
            training.step(ids)
            thread = threading.Thread(target=torch.save, args=(ids, tmp_path / "thread.pt"))
            thread.start()
            thread.join(10)
    assert regions_of(tmp_path / "run") == []


def test_the_users_own_words_count_and_the_outermost_wins(tmp_path: Path) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            training.step(ids)
            if number == 1:
                with prof.region("work"):  # a rollout
                    evaluate(training)
            if number == 2:
                with prof.region("evaluation"):
                    evaluate(training)
                    torch.save(ids, tmp_path / "predictions.pt")
        with pytest.raises(UsageError, match="a region is evaluation, checkpoint"), prof.region("lunch"):  # type: ignore[arg-type]
            pass
    assert regions_of(tmp_path / "run") == [("work", "region"), ("evaluation", "region")]


def test_what_another_thread_does_holds_nobody_up(tmp_path: Path) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:

        def write() -> None:
            with prof.region("checkpoint"):
                pass

        for ids in prof.steps(training.loader):
            training.step(ids)
            thread = threading.Thread(target=write)
            thread.start()
            thread.join(10)
    assert regions_of(tmp_path / "run") == []


def test_a_failing_save_raises_its_own_error_and_is_recorded(tmp_path: Path) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
        with pytest.raises(RuntimeError, match="Parent directory"):
            torch.save(ids, tmp_path / "no" / "folder.pt")
    assert regions_of(tmp_path / "run") == [("checkpoint", "torch.save")]


def test_saving_is_left_as_it_was(tmp_path: Path) -> None:
    """Pickled by name, as processes that are spawned are told what to do: what the script looks up, and what it
    imported before."""
    before = torch.save
    signature = inspect.signature(before)
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
            assert torch.save is not before and inspect.signature(torch.save) == signature
            assert pickle.loads(pickle.dumps(torch.save)) is torch.save
            assert pickle.loads(pickle.dumps(before)) is before
    assert torch.save is torch.serialization.save is before
    assert not any(type(finder).__name__ == "_Finder" for finder in sys.meta_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_are_seen(tmp_path: Path) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            training.step(ids)
            if number == 1:
                import torch.distributed.checkpoint as checkpoints

                checkpoints.save(training.model.state_dict(), checkpoint_id=tmp_path / "checkpoint")
    assert regions_of(tmp_path / "run") == [("checkpoint", "torch.distributed.checkpoint.save")]
    assert checkpoints.save is checkpoints.state_dict_saver.save


def test_a_module_that_is_imported_late_is_waited_for_until_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    calls: list[str] = []
    for name in ("imported_late_one", "imported_late_two"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
    call_after_import("imported_late_one", lambda: calls.append("one"))
    give_up = call_after_import("imported_late_two", lambda: calls.append("two"))
    give_up()
    give_up()
    for name in ("imported_late_one", "imported_late_two"):
        assert importlib.import_module(name).value == 1
    assert calls == ["one"]


class _ClosedLoader(importlib.abc.Loader):
    """A loader that takes no attribute."""

    __slots__ = ()

    def exec_module(self, module: Any) -> None:
        module.value = 1


class _StrangeFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, _ClosedLoader()) if name == "imported_strangely" else None


def test_a_loader_that_cannot_be_watched_loads_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [_StrangeFinder(), *sys.meta_path])
    calls: list[str] = []
    give_up = call_after_import("imported_strangely", lambda: calls.append("one"))
    assert importlib.import_module("imported_strangely").value == 1
    give_up()
    assert calls in ([], ["one"])


def test_losses_are_bitwise_the_same_with_masks_evaluation_and_checkpoints(tmp_path: Path) -> None:
    def train(path: Path | None) -> list[float]:
        training = Training()
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[1, 7:] = 0
        loader = [{"input_ids": ids, "attention_mask": mask} for ids in training.loader]
        losses = []

        def body(batch: dict[str, torch.Tensor]) -> None:
            losses.append(training.step(batch["input_ids"]).item())
            evaluate(training, 1)
            torch.save(training.model.state_dict(), tmp_path / "checkpoint.pt")

        if path is None:
            for batch in loader:
                body(batch)
        else:
            with training.profile(path) as prof:
                for batch in prof.steps(loader):
                    body(batch)
        return losses

    assert train(tmp_path / "run") == train(None)
    steps = read(tmp_path / "run").steps
    assert steps is not None
    assert steps["padding_tokens"].tolist() == [5] * 6
    assert steps["tokens"].tolist() == [24] * 6
