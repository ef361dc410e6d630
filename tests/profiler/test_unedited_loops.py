"""Loops that nobody edited, inside ``recording``: where their steps end, what is not a step, and that no number changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import trine
from trine.profiler import automatic, session
from trine.profiler.unedited import recording
from trine.record.model import MISSING, PHASES, Rank


def dataset(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (samples, 6), generator=generator)
    return TensorDataset(tokens, torch.randint(0, 2, (samples,), generator=generator))


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.dropout(self.embedding(tokens).mean(1), 0.1, self.training))


def train_on(model: Any, optimizer: Any, tokens: Any, labels: Any) -> float:
    loss = torch.nn.functional.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """Runs a loop under ``recording`` and reads the record back."""
    before = (
        torch.optim.Optimizer.__init__,
        torch.nn.Module.__call__,
        torch.autograd.backward,
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
    )

    def run(loop: Callable[[], Any], windows: Any = None) -> Rank:
        torch.manual_seed(0)
        with recording(tmp_path / "run", windows=windows):
            loop()
        return next(iter(trine.load(tmp_path / "run")))

    yield run
    after = (
        torch.optim.Optimizer.__init__,
        torch.nn.Module.__call__,
        torch.autograd.backward,
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
    )
    assert after == before, "a patch stayed behind"
    assert session._current is None


def steps_of(rank: Rank) -> int:
    """How many steps there are; each is partitioned by its phases."""
    steps = rank.steps
    assert steps is not None
    phases = sum(steps[f"phase_{name}_ns"] for name in PHASES)
    assert (phases == steps["end_ns"] - steps["start_ns"]).all()
    assert (steps["start_ns"][1:] >= steps["end_ns"][:-1]).all()
    assert steps["index"].tolist() == list(range(len(steps)))
    return len(steps)


def test_an_epoch_with_evaluation_between(record: Callable[..., Rank]) -> None:
    evaluated: list[int] = []

    def loop() -> None:
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        training, validation = DataLoader(dataset(), batch_size=8), DataLoader(dataset(), batch_size=4)

        def evaluate() -> None:
            evaluated.append(1)
            model.eval()
            with torch.no_grad():
                for tokens, _ in validation:
                    model(tokens)
            model.train()

        evaluate()
        for _ in range(3):
            for index, (tokens, labels) in enumerate(training):
                if index == 2:
                    evaluate()  # after its batch was fetched
                train_on(model, optimizer, tokens, labels)
            evaluate()

    rank = record(loop)
    assert len(evaluated) == 7
    assert steps_of(rank) == 12
    assert rank.metadata["model"]["class"] == "Classifier"
    assert rank.metadata["loader"]["batch_size"] == 8
    assert rank.metadata["optimizer"]["class"] == "AdamW"
    assert rank.metadata["flops"]["counted"] > 0
    assert rank.steps is not None
    fetched = rank.steps["tokens"] != MISSING
    assert set(rank.steps["tokens"][fetched].tolist()) == {48}
    assert fetched.sum() >= 9  # all but those whose evaluation came between fetch and training
    assert (rank.steps["phase_forward_ns"] > 0).all()
    assert (rank.steps["phase_backward_ns"] > 0).all()


def test_accumulated_batches_are_one_step(record: Callable[..., Rank]) -> None:
    def loop() -> None:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index, (tokens, labels) in enumerate(DataLoader(dataset(), batch_size=4)):
            torch.nn.functional.cross_entropy(model(tokens), labels).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    rank = record(loop)
    assert steps_of(rank) == 4
    assert rank.steps is not None
    assert rank.steps["samples"].tolist() == [8] * 4


@pytest.mark.parametrize("fed", [True, False], ids=["loader", "no loader"])
def test_two_optimizers_of_an_iteration_are_one_step(record: Callable[..., Rank], fed: bool) -> None:
    def loop() -> None:
        generator, critic = torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
        both = torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())
        batches = (
            DataLoader(torch.randn(40, 6), batch_size=4) if fed else [torch.randn(4, 6) for _ in range(10)]
        )
        for batch in batches:
            for optimizer, fakes in ((both[0], generator(batch).detach()), (both[1], generator(batch))):
                optimizer.zero_grad()
                critic(fakes).mean().backward()
                optimizer.step()

    rank = record(loop)
    assert steps_of(rank) == 10
    assert rank.metadata["model"]["class"] == "Linear + Linear"


def test_batches_that_come_from_no_loader(record: Callable[..., Rank]) -> None:
    def loop() -> None:
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        tokens, labels = dataset().tensors
        for _ in range(9):
            chosen = torch.randint(0, len(tokens), (4,))
            train_on(model, optimizer, tokens[chosen], labels[chosen])

    assert steps_of(record(loop)) == 9


def test_several_optimizer_steps_on_one_batch(record: Callable[..., Rank]) -> None:
    def loop() -> None:
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        for tokens, labels in DataLoader(dataset(), batch_size=16):
            for _ in range(4):
                train_on(model, optimizer, tokens, labels)

    # The first repetition is learnt from: its two iterations are one step.
    assert steps_of(record(loop)) in (7, 8)


def test_an_update_by_hand_without_an_optimizer(record: Callable[..., Rank]) -> None:
    def loop() -> None:
        model = Classifier()
        for tokens, labels in DataLoader(dataset(), batch_size=8):
            torch.nn.functional.cross_entropy(model(tokens), labels).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    # Without an optimizer the first sign of training is the first backward: its fetch was not seen.
    assert steps_of(record(loop)) == 4


def test_a_loader_made_anew_for_each_epoch_and_a_loop_left_by_break(record: Callable[..., Rank]) -> None:
    def loop() -> None:
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            for index, (tokens, labels) in enumerate(DataLoader(dataset(), batch_size=8)):
                train_on(model, optimizer, tokens, labels)
                if index == 2:
                    break

    assert steps_of(record(loop)) == 9


def test_two_loaders_that_feed_one_step(record: Callable[..., Rank]) -> None:
    def loop() -> None:
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        loaders = DataLoader(dataset(), batch_size=8), DataLoader(dataset(), batch_size=4)
        for (tokens, labels), (more, more_labels) in zip(*loaders, strict=False):
            train_on(model, optimizer, torch.cat([tokens, more]), torch.cat([labels, more_labels]))

    rank = record(loop)
    assert steps_of(rank) == 4
    assert rank.steps is not None
    assert rank.steps["samples"].tolist() == [12] * 4


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*dataset().tensors, strict=True))


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] for tensor in dataset().tensors)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [Stream, Slow])
def test_streams_and_workers(record: Callable[..., Rank], data: Any, workers: int) -> None:
    def loop() -> None:
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(
            data(), batch_size=4, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forking beside threads
            for tokens, labels in loader:
                train_on(model, optimizer, tokens, labels)

    assert steps_of(record(loop)) == (8 if data is Stream else 4)


def test_a_gradient_scaler_tells_twice_and_counts_once(record: Callable[..., Rank]) -> None:
    def loop() -> None:
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1)
        for tokens, labels in DataLoader(dataset(), batch_size=4):
            loss = torch.nn.functional.cross_entropy(model(tokens), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert steps_of(record(loop)) == 8


def test_the_last_step_does_not_hold_what_comes_after_it(record: Callable[..., Rank]) -> None:
    import time

    def loop() -> None:
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        for _, (tokens, labels) in zip(range(3), DataLoader(dataset(), batch_size=8), strict=False):
            train_on(model, optimizer, tokens, labels)
        time.sleep(0.5)  # a checkpoint

    rank = record(loop)
    assert steps_of(rank) == 3
    assert rank.steps is not None
    assert rank.steps["end_ns"][-1] - rank.steps["start_ns"][-1] < 400_000_000


def test_an_exception_passes_and_the_steps_before_it_stay(tmp_path: Path) -> None:
    model = Classifier()
    with pytest.raises(ZeroDivisionError), recording(tmp_path / "run", windows=None):
        optimizer = torch.optim.AdamW(model.parameters())
        for index, (tokens, labels) in enumerate(DataLoader(dataset(), batch_size=8)):
            train_on(model, optimizer, tokens, labels)
            1 / (2 - index)
    rank = next(iter(trine.load(tmp_path / "run")))
    assert steps_of(rank) == 3
    assert rank.metadata["state"] == "failed"


def test_losses_are_bitwise_equal(tmp_path: Path) -> None:
    def losses() -> list[float]:
        torch.manual_seed(5)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(dataset(), batch_size=8, shuffle=True)
        return [train_on(model, optimizer, *batch) for _ in range(4) for batch in loader]

    plain = losses()
    with recording(tmp_path / "run"):
        recorded = losses()
    assert recorded == plain
    assert list((tmp_path / "run" / "rank-00000").glob("window-*.gz"))


def test_a_script_that_records_itself_keeps_its_own_record(tmp_path: Path) -> None:
    model = Classifier()
    with recording(tmp_path / "ours"):
        optimizer = torch.optim.AdamW(model.parameters())
        with trine.profile(tmp_path / "theirs", model=model, optimizer=optimizer, windows=None) as prof:
            for tokens, labels in prof.steps(DataLoader(dataset(), batch_size=8)):
                train_on(model, optimizer, tokens, labels)
    assert not (tmp_path / "ours").exists()
    assert steps_of(next(iter(trine.load(tmp_path / "theirs")))) == 4


def test_inference_alone_is_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with recording(tmp_path / "run"), torch.no_grad():
        Classifier()(torch.zeros(2, 6, dtype=torch.int64))
    assert not (tmp_path / "run").exists()
    line = capsys.readouterr().err
    assert "no training step was seen" in line
    assert "else use trine.profile" in line


def test_a_fault_of_ours_costs_the_record_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Any, *arguments: Any) -> None:
        raise RuntimeError("a fault of ours")

    for name in ("_before_fetch", "_add_batch", "_after_optimizer", "_after_backward", "_in_forward"):
        monkeypatch.setattr(automatic.AutomaticSession, name, broken)
    model = Classifier()
    with recording(tmp_path / "run", windows=None):
        optimizer = torch.optim.AdamW(model.parameters())
        trained = [train_on(model, optimizer, *batch) for batch in DataLoader(dataset(), batch_size=8)]
    assert len(trained) == 4
    assert len([line for line in caplog.records if "a fault of ours" in line.message]) == 2  # one a collector


def test_a_start_that_fails_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(optimizers: Any) -> Any:
        raise RuntimeError("no modules today")

    monkeypatch.setattr(automatic, "outermost_modules", broken)
    model = Classifier()
    with recording(tmp_path / "run"):
        optimizer = torch.optim.AdamW(model.parameters())
        trained = [train_on(model, optimizer, *batch) for batch in DataLoader(dataset(), batch_size=8)]
    assert len(trained) == 4
    assert len(caplog.records) == 1
