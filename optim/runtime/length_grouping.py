"""Batches of samples of like length: what a sampler gives, regrouped.

As Transformers' ``LengthGroupedSampler``: mega-batches of :data:`MEGA_BATCH` batches' worth of samples, in the order in which
the sampler draws them, are sorted by length and cut into batches, and the batches are shuffled. It keeps what the sampler
decides: its shuffling, its epoch, its share of the samples on each rank, its repeats where ranks must come out even.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from trine.optim.runtime.loaders import remade
from trine.record.errors import UsageError

__all__ = ["MEGA_BATCH", "MOST_READ", "LengthGroupedBatches", "length_grouped", "lengths_of_dataset"]

#: Batches whose samples are sorted together, at most; and into how many mega-batches an epoch is divided, at least: else a
#: small dataset's batches would be the same in every epoch.
MEGA_BATCH = 50
LEAST_MEGA_BATCHES = 4
#: Samples that are read to measure them where the dataset does not say its lengths.
MOST_READ = 20_000


class LengthGroupedBatches:
    """A batch sampler. As many batches as without grouping, each sample as often as ``sampler`` gives it.

    Batches are shuffled within a mega-batch by ``sampler.seed`` and ``sampler.epoch`` where it has them
    (``DistributedSampler``), so that every rank has batches of like length at the same step; else by the samples drawn.
    """

    def __init__(
        self, sampler: Iterable[int], lengths: Sequence[int], batch_size: int, drop_last: bool
    ) -> None:
        self.sampler = sampler
        self.lengths = lengths
        self.batch_size = batch_size
        self.drop_last = drop_last
        #: Slots of the batches given so far, each padded to its longest, had they been in the sampler's order.
        self.slots_before = 0

    def __len__(self) -> int:
        samples = len(self.sampler)  # type: ignore[arg-type]
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        self.slots_before = 0
        indices = iter(self.sampler)
        size = self.batch_size
        together = max(1, min(MEGA_BATCH, len(self) // LEAST_MEGA_BATCHES)) * size
        for mega in iter(lambda: list(islice(indices, together)), []):
            if self.drop_last:  # what the sampler gave last, not what is shortest
                mega = mega[: len(mega) // size * size]
            before = [
                max(self.lengths[index] for index in mega[at : at + size]) * len(mega[at : at + size])
                for at in range(0, len(mega), size)
            ]
            ordered = sorted(mega, key=lambda index: -self.lengths[index])
            batches = [ordered[at : at + size] for at in range(0, len(ordered), size)]
            self._shuffler(mega).shuffle(batches)
            for batch, slots in zip(batches, before, strict=True):
                self.slots_before += slots
                yield batch

    def _shuffler(self, mega: Sequence[int]) -> random.Random:
        seed, epoch = getattr(self.sampler, "seed", None), getattr(self.sampler, "epoch", None)
        if isinstance(seed, int) and isinstance(epoch, int):
            return random.Random(f"{seed} {epoch}")
        return random.Random(",".join(map(str, mega)))


def length_grouped(loader: Any) -> tuple[DataLoader[Any], LengthGroupedBatches]:
    """The loader with its samples regrouped. Raises ``UsageError``, with the way out, where that cannot be done."""
    if type(loader) is not DataLoader:
        raise UsageError(
            f"data.length_grouped: engine.steps got a {type(loader).__name__}, and only a torch DataLoader can be "
            "regrouped: pass the DataLoader itself, or take the key out"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "data.length_grouped: an iterable dataset has an order of its own: give it an order by index, or take the "
            "key out (data.packing needs no order)"
        )
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        kind = "no batches" if batches is None else f"batches by its own {type(batches).__name__}"
        raise UsageError(
            f"data.length_grouped: the loader makes {kind}: give it batch_size and a sampler, or take the key out"
        )
    lengths = lengths_of_dataset(loader.dataset)
    grouped = LengthGroupedBatches(batches.sampler, lengths, batches.batch_size, batches.drop_last)
    return remade(loader, batch_sampler=grouped), grouped


def lengths_of_dataset(dataset: Dataset[Any]) -> Sequence[int]:
    """Tokens of every sample: ``dataset.lengths``, a ``length`` column, else measured where there are few samples.

    Reading draws no random number from the run's. Raises ``UsageError`` with the way out.
    """
    count = len(dataset) if isinstance(dataset, Sized) else 0
    stated = getattr(dataset, "lengths", None)
    if stated is None and "length" in (getattr(dataset, "column_names", None) or ()):
        stated = dataset["length"]  # as Transformers' length_column_name
    if stated is not None:
        lengths = [int(length) for length in stated]
        if len(lengths) != count:
            raise UsageError(
                f"data.length_grouped: the dataset has {count} samples and states {len(lengths)} lengths"
            )
        return lengths
    if count > MOST_READ:
        raise UsageError(
            f"data.length_grouped: the dataset does not say its samples' lengths, and {count} are too many to read first: "
            "give it a lengths attribute, one whole number a sample"
        )
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        found = [_length(dataset[index]) for index in range(count)]
    random.setstate(state)
    return found


def _length(sample: Any) -> int:
    if isinstance(sample, dict):
        sample = next((sample[name] for name in ("input_ids", "ids") if name in sample), None)
    elif isinstance(sample, (tuple, list)) and sample and isinstance(sample[0], (torch.Tensor, list, tuple)):
        sample = sample[0]
    if isinstance(sample, Sized) and not (isinstance(sample, torch.Tensor) and sample.dim() != 1):
        return len(sample)
    raise UsageError(
        "data.length_grouped: a sample is no sequence of token ids, no pair of them and no mapping with input_ids: give "
        "the dataset a lengths attribute, one whole number a sample"
    )
