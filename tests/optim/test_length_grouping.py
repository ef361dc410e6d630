"""Batches of like length: the sampler's samples, as many batches, less padding; what cannot be regrouped is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_cases import Documents, engine_losses, gpt, optimizer_of, packed_loader
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import trine
from trine.optim.runtime import length_grouping
from trine.optim.runtime.length_grouping import LengthGroupedBatches, lengths_of_dataset
from trine.optim.techniques import tolerance_of
from trine.record.errors import UsageError
from trine.record.events import listen
from trine.samples.text import pad_documents

GROUPED = {"data.length_grouped": True}


def spread(count: int) -> list[int]:
    return [(7 * n * n + 3 * n) % 60 + 1 for n in range(count)]


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch]


def batches_of(loader: Any) -> list[Any]:
    model = gpt()
    engine = trine.optimize(model, optimizer_of(model), trine.Config().with_changes(GROUPED))
    try:
        return list(engine.steps(loader))
    finally:
        engine.close()


def waste(batches: list[Any]) -> float:
    slots = sum(batch["attention_mask"].numel() for batch in batches)
    return 1 - float(sum(batch["attention_mask"].sum() for batch in batches)) / slots


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=400), st.integers(1, 9), st.booleans())
def test_every_sample_once_in_as_many_batches(lengths: list[int], size: int, drop: bool) -> None:
    plain = list(torch.utils.data.BatchSampler(range(len(lengths)), size, drop))
    grouped = LengthGroupedBatches(range(len(lengths)), lengths, size, drop)
    batches = list(grouped)
    assert len(batches) == len(grouped) == len(plain)
    assert sorted(map(len, batches)) == sorted(map(len, plain))
    assert sorted(flat(batches)) == sorted(flat(plain))
    assert batches == list(grouped)  # the same on resume

    def slots(of: list[list[int]]) -> int:
        return sum(max(lengths[index] for index in batch) * len(batch) for batch in of)

    assert grouped.slots_before == slots(plain)
    whole = len(lengths) % size == 0 or drop
    assert not whole or slots(batches) <= slots(plain)


def test_less_padding_of_the_same_samples() -> None:
    lengths = spread(800)
    loader = packed_loader(lengths, 8)
    plain, grouped = list(loader), batches_of(loader)
    assert len(plain) == len(grouped) == 100

    def rows(batches: list[Any]) -> list[tuple[int, ...]]:
        return sorted(
            tuple(ids[mask.bool()].tolist())
            for batch in batches
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        )

    assert rows(plain) == rows(grouped)
    assert waste(plain) > 0.35 and waste(grouped) < 0.1
    order = [int(batch["attention_mask"].sum()) for batch in grouped]
    assert order not in (sorted(order), sorted(order, reverse=True))  # the batches are shuffled


def test_a_random_sampler_draws_what_it_would_have_drawn() -> None:
    """The generator goes on as without grouping: what else draws from it is not moved."""

    def state_after(use: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        use(packed_loader(spread(40), 4, shuffle=True, generator=generator))
        return generator.get_state()

    assert torch.equal(state_after(list), state_after(batches_of))
    one, two = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    first = batches_of(packed_loader(spread(40), 4, shuffle=True, generator=one))
    again = batches_of(packed_loader(spread(40), 4, shuffle=True, generator=two))
    other = batches_of(packed_loader(spread(40), 4, shuffle=True, generator=two))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))
    assert {tuple(map(tuple, a["input_ids"].tolist())) for a in first} != {  # other batches in the next epoch
        tuple(map(tuple, b["input_ids"].tolist())) for b in other
    }


@pytest.mark.parametrize("drop", [False, True])
def test_ranks_have_as_many_batches_of_like_length_and_share_the_samples(drop: bool) -> None:
    lengths = spread(1603)
    documents = Documents(lengths)
    by_rank = []
    for rank in range(4):
        sampler: DistributedSampler[Any] = DistributedSampler(documents, 4, rank, seed=3, drop_last=drop)
        sampler.set_epoch(2)
        grouped = LengthGroupedBatches(sampler, lengths, 4, drop)
        by_rank.append((list(grouped), list(sampler)))
    assert len({len(batches) for batches, _ in by_rank}) == 1
    for batches, drawn in by_rank:
        kept = drawn[: len(drawn) // 4 * 4] if drop else drawn
        assert sorted(flat(batches)) == sorted(kept)
    longest = [[max(lengths[i] for i in batch) for batch in batches] for batches, _ in by_rank]
    apart = [max(step) - min(step) for step in zip(*longest, strict=True)]
    assert sorted(apart)[len(apart) // 2] <= 4  # ranks wait little for each other; lengths are 1 to 60
    sampler.set_epoch(3)
    assert list(grouped) != by_rank[3][0]


def test_other_samplers_keep_their_say() -> None:
    lengths = spread(30)
    weighted = WeightedRandomSampler([1.0] * 10 + [0.0] * 20, 24, generator=torch.Generator().manual_seed(1))
    grouped = list(LengthGroupedBatches(weighted, lengths, 4, False))
    assert len(grouped) == 6 and max(flat(grouped)) < 10
    ordered = LengthGroupedBatches(SequentialSampler(range(30)), lengths, 4, False)
    assert sorted(flat(ordered)) == list(range(30))


def test_the_waste_is_told_before_and_after() -> None:
    told: dict[str, list[float]] = {}
    stop = listen(
        lambda kind, values: (
            told.setdefault(values["name"], []).append(values["value"]) if kind == "metric" else None
        )
    )
    loader = packed_loader(spread(320), 8)
    engine_losses(GROUPED, loader)
    stop()
    assert told["padding/waste_before"][-1] == pytest.approx(waste(list(loader)))
    assert sum(told["padding/waste"]) / 40 < told["padding/waste_before"][-1] * 0.7


class Unstated(Dataset[Any]):
    """Says no lengths, and draws random numbers for each sample."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        random.random()
        torch.rand(1)
        return self.samples[index]


def test_lengths_are_read_where_they_are_not_stated() -> None:
    ids = [torch.zeros(n, dtype=torch.long) for n in (3, 5, 1)]
    before = torch.get_rng_state(), random.getstate()
    for samples in (
        ids,
        [(i, i) for i in ids],
        [{"input_ids": i} for i in ids],
        [[7] * n for n in (3, 5, 1)],
    ):
        assert lengths_of_dataset(Unstated(list(samples))) == [3, 5, 1]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()

    class Column(Unstated):
        column_names = ("input_ids", "length")

        def __getitem__(self, index: Any) -> Any:
            return [3, 5, 1] if index == "length" else self.samples[index]

    assert lengths_of_dataset(Column(ids)) == [3, 5, 1]


def test_lengths_that_cannot_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no sequence of token ids"):
        lengths_of_dataset(Unstated([torch.zeros(2, 2)]))
    wrong = Documents([3, 4])
    wrong.lengths = [3]
    with pytest.raises(UsageError, match="2 samples and states 1 lengths"):
        lengths_of_dataset(wrong)
    monkeypatch.setattr(length_grouping, "MOST_READ", 2)
    assert lengths_of_dataset(Documents([3, 4], states_lengths=False)) == [3, 4]
    with pytest.raises(UsageError, match=r"3 are too many to read first: give it a lengths attribute"):
        lengths_of_dataset(Documents([3, 4, 5], states_lengths=False))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Documents([3, 4]))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Stream(), batch_size=2, collate_fn=pad_documents), "iterable dataset"),
        ([1, 2], "got a list"),
        (DataLoader(Documents([3, 4]), batch_size=None), "no batches"),
        (DataLoader(Documents([3, 4]), batch_sampler=[[0, 1]]), "batches by its own list"),
    ],
    ids=["iterable", "list", "samples", "batch sampler"],
)
def test_loaders_that_cannot_be_regrouped(loader: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"data.length_grouped.*{words}"):
        batches_of(loader)


def test_with_workers_and_with_packing() -> None:
    lengths = spread(48)
    plain = batches_of(packed_loader(lengths, 8))
    model = gpt()
    changes = {**GROUPED, "data.workers": 1}
    engine = trine.optimize(model, optimizer_of(model), trine.Config().with_changes(changes))
    worked = list(engine.steps(packed_loader(lengths, 8)))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(plain, worked, strict=True))
    engine.close()
    both = {**GROUPED, "data.packing": True}
    assert engine_losses(both, packed_loader(lengths, 8)) == pytest.approx(
        engine_losses(GROUPED, packed_loader(lengths, 8)), rel=1e-10
    )


def test_steps_with_other_samples_are_not_verified() -> None:
    with pytest.raises(UsageError, match=r"data\.length_grouped.*verify the configuration without this key"):
        tolerance_of(trine.Config().with_changes(GROUPED))
    assert tolerance_of(trine.Config().with_changes({"data.packing": True})).loss == 1e-5
