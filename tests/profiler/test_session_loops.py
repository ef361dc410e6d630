"""Loops as people write them: each is recorded as they would count it."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from profiled_loops import LENGTH, VOCABULARY, TinyModel, Training, phase, read, steps_of

import trine
from trine.record import events
from trine.record.errors import UsageError

MS = 1_000_000


def forget_compilation() -> None:
    """As if nothing had been compiled in this process: FLOPs are not counted where something was."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def test_a_plain_loop(tmp_path: Path) -> None:
    training = Training()
    losses = []
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            loss = training.step(ids)
            losses.append(loss.item())
            prof.log(loss=loss, lr=0.01)
    rank = read(tmp_path / "run")
    steps = rank.steps
    assert steps is not None and rank.samples is not None
    assert steps["index"].tolist() == list(range(6))
    assert steps["loss"].tolist() == losses
    assert steps["tokens"].tolist() == [2 * LENGTH] * 6
    assert steps["samples"].tolist() == [2] * 6
    for name in ("data", "forward", "backward", "optimizer", "other"):
        assert (phase(steps, name) > 0).all(), name
    assert (phase(steps, "exposed_communication") == 0).all()
    metrics = set(rank.samples.text("metric"))
    assert {"lr", "memory/resident_bytes", "memory/parameters_bytes", "memory/optimizer_bytes"} <= metrics
    assert rank.metadata["state"] == "finished"
    assert rank.metadata["model"]["class"] == "TinyModel"
    assert rank.metadata["loader"]["batch_size"] == 2
    assert rank.metadata["optimizer"] == {
        "class": "AdamW",
        "implementation": "for-loop",
        "parameter_groups": 1,
    }
    assert not rank.quality


def test_phases_are_where_the_time_goes(tmp_path: Path) -> None:
    training = Training(batches=6)

    def slow_loader() -> Iterator[torch.Tensor]:
        for ids in training.loader:
            time.sleep(0.02)
            yield ids

    class SlowHead(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.03)
            x.register_hook(lambda gradient: time.sleep(0.04)) if x.requires_grad else None
            return x

    training.model.layers.append(SlowHead())
    handle = training.optimizer.register_step_pre_hook(lambda *_: time.sleep(0.05))
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(slow_loader()):
            training.step(ids)
            time.sleep(0.06)
    handle.remove()
    steps = steps_of(tmp_path / "run")
    for name, slept in (("data", 20), ("forward", 30), ("backward", 40), ("optimizer", 50), ("other", 60)):
        least = int(phase(steps, name).min())
        assert slept * MS <= least < (slept + 20) * MS, (name, least)


@pytest.mark.parametrize("given", [None, 3])
def test_accumulated_batches_are_one_step(tmp_path: Path, given: int | None) -> None:
    training = Training(batches=7)
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader, accumulate=given)):
            training.loss(ids).backward()
            if number % 3 == 2:
                training.optimizer.step()
                training.optimizer.zero_grad()
    rank = read(tmp_path / "run")
    assert rank.steps is not None
    assert rank.steps["tokens"].tolist() == [3 * 2 * LENGTH] * 2
    assert [note.id for note in rank.quality] == ["unfinished-steps"]  # the seventh batch


def test_accumulation_inside_one_batch_is_one_step(tmp_path: Path) -> None:
    training = Training(batches=4, batch_size=4)
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            for piece in ids.chunk(2):
                training.loss(piece).backward()
            training.optimizer.step()
    assert len(steps_of(tmp_path / "run")) == 4


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    first, second = Training(), Training()
    with trine.profile(
        tmp_path / "run",
        model={"generator": first.model, "critic": second.model},
        optimizer=[first.optimizer, second.optimizer],
        windows=None,
        flops=False,
    ) as prof:
        for number, ids in enumerate(prof.steps(first.loader)):
            second.step(ids)
            if number % 2:
                first.step(ids)
    rank = read(tmp_path / "run")
    assert rank.steps is not None and len(rank.steps) == 6
    assert rank.metadata["model"]["class"] == "TinyModel + TinyModel"
    assert phase(rank.steps, "optimizer")[1::2].mean() > 0


def test_evaluation_inside_the_loop_is_other(tmp_path: Path) -> None:
    training = Training()
    slow = torch.nn.Identity()
    slow.forward = lambda x: (None if slow.training else time.sleep(0.05), x)[1]  # type: ignore[method-assign]
    training.model.layers.append(slow)
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
            training.model.eval()
            with torch.no_grad():
                training.model(ids)
            training.model.train()
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 6
    assert (phase(steps, "other") >= 50 * MS).all()
    assert np.median(phase(steps, "forward")) < 50 * MS


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_loop_that_never_calls_backward(tmp_path: Path, with_gradients: bool) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof, torch.set_grad_enabled(with_gradients):
        for ids in prof.steps(training.loader):
            training.model(ids)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 6
    assert (phase(steps, "forward") > 0).all()
    assert (phase(steps, "backward") == 0).all()


def test_epochs_and_a_loader_that_ends_early(tmp_path: Path) -> None:
    training = Training(batches=3)
    with training.profile(tmp_path / "run") as prof:
        for _ in range(2):
            for ids in prof.steps(training.loader):
                training.step(ids)
            time.sleep(0.05)  # between epochs: in no step
        for _ in prof.steps(iter([])):
            raise AssertionError("an empty loader has no batch")
    steps = steps_of(tmp_path / "run")
    assert steps["index"].tolist() == list(range(6))
    assert steps["start_ns"][3] - steps["end_ns"][2] >= 50 * MS


@pytest.mark.parametrize("worked", [True, False])
def test_break(tmp_path: Path, worked: bool) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            if number == 3 and not worked:
                break
            training.step(ids)
            if number == 3:
                break
    gc.collect()
    assert len(steps_of(tmp_path / "run")) == (4 if worked else 3)


def test_a_break_while_flops_are_counted_leaves_nothing_behind(tmp_path: Path) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    training = Training()
    inside = []
    with training.profile(tmp_path / "run", flops=True) as prof:
        for number, _ in enumerate(prof.steps(training.loader)):
            inside.append(_get_current_dispatch_mode())
            if number == 1:
                break
            training.step(_)
        assert _get_current_dispatch_mode() is None
        for ids in prof.steps(training.loader):
            training.step(ids)
    assert inside[1] is not None  # it was being counted
    assert _get_current_dispatch_mode() is None
    assert len(steps_of(tmp_path / "run")) == 7


def test_an_exception_passes_unchanged_and_is_said(tmp_path: Path) -> None:
    training = Training()
    mistake = RuntimeError("the loop's own")
    with pytest.raises(RuntimeError) as raised, training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            if number == 2:
                raise mistake
            training.step(ids)
    assert raised.value is mistake
    rank = read(tmp_path / "run")
    assert rank.steps is not None and len(rank.steps) == 2
    assert rank.metadata["state"] == "failed"


def test_an_exception_of_the_loader_passes_unchanged(tmp_path: Path) -> None:
    training = Training()

    def broken() -> Iterator[torch.Tensor]:
        yield from list(training.loader)[:2]
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"), training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(broken()):
            training.step(ids)
    assert len(steps_of(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("error", "state"),
    [(KeyboardInterrupt(), "stopped"), (SystemExit(0), "finished"), (SystemExit(3), "failed")],
)
def test_how_it_ended(tmp_path: Path, error: BaseException, state: str) -> None:
    training = Training()
    with pytest.raises(type(error)), training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
            raise error
    assert read(tmp_path / "run").metadata["state"] == state


def test_step_for_loops_without_steps(tmp_path: Path) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        prof.begin_step()
        for ids in training.loader:
            loss = training.step(ids)
            prof.step(loss=loss, tokens=99)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 6
    assert steps["tokens"].tolist() == [99] * 6
    assert (phase(steps, "data") > 0).all()  # the DataLoader is seen all the same


def test_explicit_steps(tmp_path: Path) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(training.loader):
            prof.begin_step(100 + number)
            with prof.phase("copy"):
                time.sleep(0.005)
            training.step(ids)
            prof.end_step(tokens=5)
    steps = steps_of(tmp_path / "run")
    assert steps["index"].tolist() == list(range(100, 106))
    assert (phase(steps, "copy") >= 5 * MS).all()


def test_without_steps_nothing_is_written_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with training.profile(tmp_path / "run"):
        for ids in training.loader:
            training.step(ids)
    assert not (tmp_path / "run").exists()
    assert "no step was seen" in caplog.text


def test_nested_sessions_record_in_the_outer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with training.profile(tmp_path / "outer"), training.profile(tmp_path / "inner") as inner:
        for ids in inner.steps(training.loader):
            inner.log(loss=training.step(ids))
    assert "open already" in caplog.text
    assert len(steps_of(tmp_path / "outer")) == 6
    assert not (tmp_path / "inner").exists()
    with training.profile(tmp_path / "after") as prof:  # and the next one is free
        for ids in prof.steps(training.loader):
            training.step(ids)
    assert len(steps_of(tmp_path / "after")) == 6


def test_loops_inside_and_beside_are_part_of_the_step(tmp_path: Path) -> None:
    training, other = Training(), Training()
    with training.profile(tmp_path / "inside") as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
            with torch.no_grad():
                for more in prof.steps(other.loader):
                    training.model(more)
    with training.profile(tmp_path / "beside") as prof:
        for ids, _ in zip(prof.steps(training.loader), prof.steps(other.loader), strict=True):
            training.step(ids)
    for name in ("inside", "beside"):
        assert steps_of(tmp_path / name)["index"].tolist() == list(range(6))


def test_steps_without_the_with_block_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(batches=2)
    prof = training.profile(tmp_path / "run")
    assert len([training.step(ids) for ids in prof.steps(training.loader)]) == 2
    assert "before its with block" in caplog.text
    with prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
    assert len([training.step(ids) for ids in prof.steps(training.loader)]) == 2
    assert "after its with block" in caplog.text
    assert len(steps_of(tmp_path / "run")) == 2


def test_no_model_and_no_optimizer(tmp_path: Path) -> None:
    training = Training()
    with trine.profile(tmp_path / "run", windows=None, flops=False) as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
    rank = read(tmp_path / "run")
    assert rank.steps is not None and len(rank.steps) == 6
    assert (phase(rank.steps, "forward") > 0).all()
    assert rank.metadata["optimizer"]["class"] == "AdamW"
    assert "model" not in rank.metadata


def test_an_update_by_hand_is_a_step(tmp_path: Path) -> None:
    training = Training()
    with trine.profile(tmp_path / "run", model=training.model, windows=None, flops=False) as prof:
        for ids in prof.steps(training.loader):
            training.loss(ids).backward()
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
    assert len(steps_of(tmp_path / "run")) == 6


def test_a_closure_keeps_its_forward_and_backward(tmp_path: Path) -> None:
    training = Training(batches=3)
    optimizer = torch.optim.LBFGS(training.model.parameters(), max_iter=2)
    with trine.profile(
        tmp_path / "run", model=training.model, optimizer=optimizer, windows=None, flops=False
    ) as prof:
        for ids in prof.steps(training.loader):

            def closure(ids: torch.Tensor = ids) -> torch.Tensor:
                optimizer.zero_grad()
                loss = training.loss(ids)
                loss.backward()
                return loss

            optimizer.step(closure)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 3
    for name in ("forward", "backward", "optimizer"):
        assert (phase(steps, name) > 0).all(), name


def test_a_skipped_optimizer_step_is_a_step(tmp_path: Path) -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)  # overflows at first
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            scaler.scale(training.loss(ids) * 1e30).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
    assert len(steps_of(tmp_path / "run")) == 6


def test_checkpointed_forward_is_not_counted_twice(tmp_path: Path) -> None:
    training = Training()
    plain = training.model.forward
    training.model.forward = lambda ids: torch.utils.checkpoint.checkpoint(plain, ids, use_reentrant=False)  # type: ignore[method-assign]
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
    assert len(steps_of(tmp_path / "run")) == 6


def test_workers_of_a_loader_write_nothing(tmp_path: Path) -> None:
    training = Training(batches=8)
    loader = torch.utils.data.DataLoader(
        training.loader.dataset, batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(loader):
            training.step(ids)
    rank = read(tmp_path / "run")
    assert rank.steps is not None and len(rank.steps) == 8
    assert rank.metadata["loader"]["workers"] == 2
    assert [path.name for path in (tmp_path / "run").glob("rank-*")] == ["rank-00000"]
    assert not list((tmp_path / "run").glob("attempt-*"))


def test_steps_has_the_loaders_length_and_attributes(tmp_path: Path) -> None:
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        steps = prof.steps(training.loader)
        assert len(steps) == 6
        assert steps.batch_size == 2
        with pytest.raises(AttributeError):
            _ = steps.nonsense
        with pytest.raises(UsageError, match="at least one batch"):
            prof.steps(training.loader, accumulate=0)
        for ids in steps:
            training.step(ids)


def test_models_can_be_copied_and_pickled_inside(tmp_path: Path) -> None:
    training = Training(batches=2)
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
            average = copy.deepcopy(training.model)
            pickle.loads(pickle.dumps(training.model))
    assert training.model(ids).shape == average(ids).shape  # hooks of a copy are harmless afterwards
    assert not training.model._forward_hooks and not training.model._forward_pre_hooks


@pytest.mark.slow
def test_a_model_that_was_saved_inside_loads_where_trine_is_not_installed(tmp_path: Path) -> None:
    training = Training(batches=2)
    training.model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    saved = tmp_path / "model.pt"
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
            torch.save(training.model, saved)
    code = (
        "import sys; sys.modules['trine'] = None; import torch; "
        f"print(torch.load({str(saved)!r}, weights_only=False)(torch.zeros(2, 3, dtype=torch.long)).shape)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert f"torch.Size([2, 3, {VOCABULARY}])" in loaded.stdout, loaded.stderr


def test_everything_is_put_back(tmp_path: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def state() -> tuple[Any, ...]:
        return (
            torch.autograd.backward,
            torch.amp.grad_scaler.GradScaler.step,
            _BaseDataLoaderIter.__next__,
            len(_global_optimizer_pre_hooks),
            len(_global_optimizer_post_hooks),
        )

    before = state()
    training = Training()
    with training.profile(tmp_path / "run") as prof:
        assert state() != before
        for ids in prof.steps(training.loader):
            training.step(ids)
    assert state() == before


def test_an_engine_s_steps_count(tmp_path: Path) -> None:
    training = Training(batches=8)
    with training.profile(tmp_path / "run") as prof:
        for number, ids in enumerate(prof.steps(training.loader)):
            if number % 2 == 0:
                events.emit("step_begin", index=40 + number // 2)
            events.emit("phase", name="forward")
            loss = training.loss(ids)
            events.emit("phase", name="backward")
            loss.backward()
            if number % 2:
                training.optimizer.step()
                events.emit("metric", name="norm", value=2.5)
                events.emit("step_end", index=40 + number // 2, loss=loss, tokens=7, samples=None)
    rank = read(tmp_path / "run")
    assert rank.steps is not None and rank.samples is not None
    assert rank.steps["index"].tolist() == [40, 41, 42, 43]
    assert rank.steps["tokens"].tolist() == [2 * LENGTH + 7] * 4
    assert not np.isnan(rank.steps["loss"]).any()
    assert "norm" in set(rank.samples.text("metric"))


def test_a_wrong_argument_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_bytes"):
        trine.profile(tmp_path / "run", max_bytes=1)
    with pytest.raises(UsageError, match="windows"):
        trine.profile(tmp_path / "run", windows="sometimes")


def test_user_metadata_of_any_kind_is_kept(tmp_path: Path) -> None:
    training = Training(batches=2)
    with training.profile(
        tmp_path / "run", metadata={"configuration": {"dtype": torch.bfloat16}, "note": "one"}
    ) as prof:
        for ids in prof.steps(training.loader):
            training.step(ids)
        prof.describe(later=[1, 2])
    metadata = read(tmp_path / "run").metadata
    assert metadata["configuration"] == {"dtype": "torch.bfloat16"}
    assert (metadata["note"], metadata["later"]) == ("one", [1, 2])


def test_autocast_is_seen(tmp_path: Path) -> None:
    training = Training(batches=2)
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = training.loss(ids)
            loss.backward()
            training.optimizer.step()
    assert read(tmp_path / "run").metadata["precision"]["autocast_dtype"] == "bfloat16"


def test_a_compiled_model_keeps_its_graph(tmp_path: Path) -> None:
    training = Training(batches=3)
    compiled = torch.compile(training.model, backend="eager", fullgraph=True)
    with trine.profile(
        tmp_path / "run", model=training.model, optimizer=training.optimizer, windows=None, flops=False
    ) as prof:
        for ids in prof.steps(training.loader):
            # Given unwrapped, its hooks are traced: they must be nothing there.
            torch.nn.functional.cross_entropy(compiled(ids).flatten(0, 1), ids.flatten()).backward()
            training.optimizer.step()
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 3
    assert (phase(steps, "forward") > 0).all()
    forget_compilation()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_optimizer_step_is_a_step(tmp_path: Path) -> None:
    training = Training(batches=3)
    step = torch.compile(training.optimizer.step, backend="eager")
    with training.profile(tmp_path / "run") as prof:
        for ids in prof.steps(training.loader):
            training.loss(ids).backward()
            step()
    assert len(steps_of(tmp_path / "run")) == 3
    forget_compilation()


def test_tiny_model_is_what_tests_say() -> None:
    assert sum(p.numel() for p in TinyModel().parameters()) < 3_000
