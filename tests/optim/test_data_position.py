"""Where a run stands in its data: a resumed one goes on with the next batch, in the order that the pass had."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.record.errors import UsageError

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from trine.optim.runtime.data_position import DataPosition
from trine.optim.runtime.random_streams import random_streams, restore_random_streams

HOST = torch.device("cpu")
PASSES = 3


class Numbers(Dataset[Any]):
    """Reads are counted: batches that were trained on are left out unread."""

    reads = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        Numbers.reads += 1
        return torch.tensor([index])


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(self.count).tolist():
            yield torch.tensor([index])


class Kept:
    """A loader that keeps its own state, as torchdata's StatefulDataLoader does."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.seed = count, 0, 0
        self.begun_at: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        self.begun_at.append(self.at)
        order = random.Random(self.seed).sample(range(self.count), self.count)
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([order[self.at - 1]])
        self.at, self.seed = 0, self.seed + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.seed = state["at"], state["seed"]


def seeded(seed: int) -> Any:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


LOADERS: dict[str, Callable[[int, int], Any]] = {
    "in order": lambda n, size: DataLoader(Numbers(n), size),
    "shuffled": lambda n, size: DataLoader(Numbers(n), size, shuffle=True),
    "by a generator": lambda n, size: DataLoader(Numbers(n), size, shuffle=True, generator=seeded(5)),
    "distributed": lambda n, size: DataLoader(
        Numbers(n), size, sampler=DistributedSampler(Numbers(n), 2, 1, shuffle=True)
    ),
    "stream": lambda n, size: DataLoader(Stream(n), size),
    "list": lambda n, size: list(torch.arange(n).split(size)),
    "keeps its state": lambda n, size: Kept(n),
}

Seen = list[tuple[int, list[int]]]


def passes(
    loader: Any,
    seed: int,
    save_after: int | None = None,
    state: dict[str, Any] | None = None,
    streams: dict[str, Any] | None = None,
) -> tuple[Seen, Any]:
    """Everything that passes over a loader give, in a program that draws random numbers at each step."""
    torch.manual_seed(seed)
    random.seed(seed)
    position = DataPosition(1, False)
    if state is not None and streams is not None:
        position.load(state)
        restore_random_streams(HOST, streams)
    seen: Seen = []
    saved = None
    for epoch in range(position.epoch, PASSES):
        sampler = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        iterator, left = position.begin(loader, loader)
        count = 0
        for batch in iterator:
            torch.rand(3)
            random.random()
            position.passed(len(batch))
            seen.append((epoch, batch.flatten().tolist()))
            count += 1
            if len(seen) == save_after:
                saved = pickle.loads(pickle.dumps((position.state(-1, False), random_streams(HOST))))
        assert left is None or left == count
        position.ended()
    return seen, saved


@pytest.mark.parametrize("kind", LOADERS)
@given(count=st.integers(1, 12), size=st.integers(1, 4), at=st.integers(1, 40))
def test_it_goes_on_with_the_next_batch(kind: str, count: int, size: int, at: int) -> None:
    make = LOADERS[kind]
    whole, saved = passes(make(count, size), 1, at)
    if saved is None:  # there were fewer
        return
    rest, _ = passes(make(count, size), 77, None, *saved)
    assert rest == whole[at:]


@pytest.mark.parametrize("kind", ["shuffled", "by a generator", "distributed"])
def test_with_workers(kind: str) -> None:
    """Which draw the order ahead, and a seed of their own before it."""

    def make() -> Any:
        loader = LOADERS[kind](12, 2)
        return DataLoader(
            loader.dataset, 2, sampler=loader.sampler, num_workers=1, generator=loader.generator
        )

    whole, saved = passes(make(), 1, 4)
    assert passes(make(), 77, None, *saved)[0] == whole[4:]


def test_batches_that_were_trained_on_are_not_read() -> None:
    _, saved = passes(LOADERS["shuffled"](12, 2), 1, 4)
    Numbers.reads = 0
    passes(LOADERS["shuffled"](12, 2), 77, None, *saved)
    assert Numbers.reads == 12 * PASSES - 8


def test_a_loader_that_keeps_its_state_is_asked_for_it() -> None:
    _, saved = passes(Kept(6), 1, 4)
    loader = Kept(6)
    passes(loader, 77, None, *saved)
    assert loader.begun_at[0] == 4


def test_a_pass_that_was_left_early_is_over_in_the_same_run() -> None:
    position = DataPosition(1, False)
    for _ in range(2):
        iterator, left = position.begin([1, 2, 3], [1, 2, 3])
        assert left == 3 and next(iterator) == 1
        position.passed(None)
    assert (position.epoch, position.batches) == (1, 1)


class Whole(BatchSampler):
    """A batch sampler of the program's own, whose batches mean something to it."""


def shares(
    ranks: int,
    size: int,
    states: list[Any] | None = None,
    steps: int | None = None,
    kind: Callable[..., Any] = BatchSampler,
    count: int = 48,
    drop_last: bool = False,
) -> tuple[list[list[int]], list[Any]]:
    """What each of so many ranks sees of an epoch, in batches of ``size``, and where it stands after so many of them."""
    found, kept = [], []
    for rank in range(ranks):
        sampler = DistributedSampler(Numbers(count), ranks, rank, shuffle=True, seed=3)
        position = DataPosition(ranks, rank == 0)
        if states is not None:
            position.load(pickle.loads(pickle.dumps(states[rank % len(states)])))
        batches = (BatchSampler if kind is list else kind)(sampler, size, drop_last)
        loader: Any = DataLoader(Numbers(count), batch_sampler=batches)
        if kind is list:
            loader = list(loader)
        iterator, left = position.begin(loader, loader)
        seen: list[int] = []
        given = 0
        for batch in iterator if steps != 0 else ():
            assert len(batch) == size or given + 1 == left
            seen += batch.flatten().tolist()
            position.passed(len(batch))
            given += 1
            if given == steps:
                break
        assert steps is not None or given == left
        found.append(seen)
        kept.append(position.state(-1, False))
    return found, kept


def together(*parts: list[list[int]]) -> list[int]:
    return sorted(index for part in parts for share in part for index in share)


@pytest.mark.parametrize(
    ("before", "size", "steps", "after", "size_after"),
    [
        (4, 2, 2, 2, 4),
        (2, 4, 2, 4, 2),
        (1, 8, 2, 4, 2),
        (2, 4, 2, 2, 4),
        (2, 8, 1, 4, 8),  # behind half a batch
        (2, 8, 2, 4, 8),
        (4, 3, 1, 2, 4),
        (2, 8, 1, 1, 7),
        (1, 6, 2, 4, 4),
    ],
)
def test_other_ranks_share_what_is_left(
    before: int, size: int, steps: int, after: int, size_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an epoch of 48 samples some were trained on; the rest is given once, to whomever there is."""
    first, states = shares(before, size, None, steps)
    rest, _ = shares(after, size_after, states)
    assert len(together(first)) == before * size * steps
    assert together(first, rest) == list(range(48))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("kind", [BatchSampler, Whole, list])
def test_a_run_that_begins_behind_half_a_batch_is_resumed_again(steps: int, kind: Any) -> None:
    """On as many ranks it goes on with the next batch, on others the rest is shared anew."""
    first, states = shares(2, 6, None, 1, kind)
    through, _ = shares(4, 4, states, None, kind)
    second, states = shares(4, 4, states, steps, kind)
    same, _ = shares(4, 4, states, None, kind)
    assert [a + b for a, b in zip(second, same, strict=True)] == through
    if kind is BatchSampler:
        others, _ = shares(2, 5, states)
        assert together(first, second, same) == together(first, second, others) == list(range(48))


def test_a_last_batch_that_is_not_whole_is_left_out_where_the_loader_does_so() -> None:
    first, states = shares(2, 8, None, 1)
    rest, _ = shares(4, 3, states, drop_last=True)  # 8 a rank are left
    assert [len(share) for share in rest] == [6] * 4 and len(set(together(first, rest))) == 40


@pytest.mark.parametrize(
    ("kind", "before", "size", "after", "size_after", "words"),
    [
        (Whole, 2, 8, 4, 8, "16 samples of epoch 0 are left out"),
        (list, 2, 8, 4, 8, "16 samples of epoch 0 are left out"),
        (BatchSampler, 3, 2, 4, 2, "2 samples of epoch 0 are trained on again"),  # 6 do not divide by 4
        (Whole, 2, 8, 4, 4, ""),
    ],
)
def test_samples_that_cannot_be_shared_exactly_are_told(
    kind: Any,
    before: int,
    size: int,
    after: int,
    size_after: int,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, states = shares(before, size, None, 1, kind)
    shares(after, size_after, states, None, kind)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == bool(words)  # on one rank
    assert all(words in each and "\n" not in each and f"of {before} ranks" in each for each in said)


def test_batches_that_do_not_say_their_samples_cannot_be_shared_anew() -> None:
    position = DataPosition(2, False)
    position.begin([1, 2], [1, 2])
    position.passed(None)
    other = DataPosition(4, False)
    other.load(position.state(-1, False))
    with pytest.raises(UsageError, match=r"of 2 ranks .* this run has 4, .*data=False"):
        other.begin([1, 2], [1, 2])


# --- the engine --------------------------------------------------------------------------------


def rows(count: int) -> list[Any]:
    return [torch.full((2, 4), float(place)) for place in range(count)]


def engine_that_sees() -> tuple[Any, list[float]]:
    import trine

    seen: list[float] = []
    model = torch.nn.Linear(4, 1)

    def loss_of(running: Any, batch: Any) -> Any:
        seen.append(float(batch[0, 0]))
        return running(batch).square().mean()

    return trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_of), seen


@pytest.mark.parametrize("before_training", [True, False])
def test_saving_inside_the_loop(before_training: bool, tmp_path: Path) -> None:
    """Before its batch was trained on, or after."""
    engine, seen = engine_that_sees()
    for place, batch in enumerate(engine.steps(rows(5))):
        if place == 2 and before_training:
            engine.save(tmp_path / "run")
        engine.train_step(batch)
        if place == 2 and not before_training:
            assert engine.position == (0, 3)
            engine.save(tmp_path / "run")
    assert (engine.epoch, engine.position) == (1, (1, 0))
    again, seen = engine_that_sees()
    assert again.load(tmp_path / "run") == (2 if before_training else 3)
    for batch in again.steps(rows(5)):
        again.train_step(batch)
    assert seen == ([2.0, 3.0, 4.0] if before_training else [3.0, 4.0])
    for batch in again.steps(rows(2)):  # the next pass is whole
        again.train_step(batch)
    assert seen[-2:] == [0.0, 1.0]


def test_a_program_that_finds_its_place_by_itself(tmp_path: Path) -> None:
    engine, _ = engine_that_sees()
    for batch in engine.steps(rows(3)):
        engine.train_step(batch)
        if engine.position == (0, 2):
            engine.save(tmp_path / "run")
    again, seen = engine_that_sees()
    again.load(tmp_path / "run", data=False)
    for batch in again.steps(rows(3)[2:]):
        again.train_step(batch)
    assert seen == [2.0]


def test_gathered_batches(tmp_path: Path) -> None:
    """Of which each is two of the loader's."""
    import trine

    def made() -> tuple[Any, list[float]]:
        seen: list[float] = []
        model = torch.nn.Linear(4, 1)

        def loss_of(running: Any, batch: Any) -> Any:
            seen.append(float(batch[0, 0]))
            return running(batch).square().mean()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return trine.optimize(model, optimizer, {"accumulation": {"global_batch": 4}}, loss_fn=loss_of), seen

    engine, _ = made()
    for batch in engine.steps(rows(6)):
        engine.train_step(batch)
        if engine.position == (0, 2):
            engine.save(tmp_path / "run")
    again, seen = made()
    again.load(tmp_path / "run")
    for batch in again.steps(rows(6)):
        again.train_step(batch)
    assert seen == [4.0, 5.0] or seen == [4.0]


def test_a_loader_that_keeps_its_state_waits_for_the_training(tmp_path: Path) -> None:
    engine = checkpoint_cases.plain_engine()
    for _ in engine.steps(Kept(3)):
        with pytest.raises(UsageError, match=r"call it after engine\.train_step"):
            engine.save(tmp_path / "run")
        break
