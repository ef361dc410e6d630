"""Where a run stands in its data: passes over the loader, and batches of the present one that were trained on.

A resumed run's first ``engine.steps(loader)`` begins behind the batches that were trained on, in the order that the pass
had: random streams and a sampler's epoch are set as they were when it began, and the batches are left out by their
indices, unread, where the loader is PyTorch's DataLoader over a dataset with indices; else they are read and dropped. A
loader that keeps its own state (``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader) is asked for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trine.optim._inputs import length_of
from trine.optim.batches import size_of
from trine.optim.runtime.loaders import remade
from trine.optim.runtime.random_streams import random_streams, restore_random_streams
from trine.record.errors import UsageError

__all__ = ["DataPosition"]

logger = logging.getLogger("trine")

_HOST = torch.device("cpu")


class DataPosition:
    """Counts what ``engine.steps`` gives, and begins where a checkpoint says. ``data_ranks``: shares that a batch has."""

    def __init__(self, data_ranks: int, tells: bool) -> None:
        self._data_ranks = data_ranks
        self._tells = tells  # this rank logs
        #: Passes over a loader that began before the present or next one.
        self.epoch = 0
        #: Batches of this pass that were trained on, on this rank.
        self.batches = 0
        #: Samples in them; ``None`` where a batch does not say how many it holds.
        self.samples: int | None = 0
        self._begun = False
        self._loader: Any = None  # that keeps its own state
        self._generators: list[torch.Generator] = []
        self._sampler: Any = None
        self._start: dict[str, Any] = {}
        self._resumed: Mapping[str, Any] | None = None

    # --- while it runs -------------------------------------------------------------------------

    def begin(self, given: Iterable[Any], loader: Iterable[Any]) -> tuple[Iterator[Any], int | None]:
        """A pass over ``loader``, which is ``given`` as the configuration has remade it; its batches, and how many are left."""
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            if self._begun:  # the one before was left early
                self.epoch += 1
            self.batches, self.samples = 0, 0
        self._begun = True
        self._sampler = _with_epoch(given)
        self._generators = _generators_of(given)
        self._loader = given if given is loader and _keeps_state(given) else None
        left = length_of(loader)
        if resumed is None:
            self._start = self._streams()
            return iter(loader), left
        iterator = self._goes_on(loader, resumed)
        return iterator, None if left is None else max(0, left - self.batches)

    def passed(self, samples: int | None) -> None:
        """A batch is done with."""
        self.batches += 1
        self.samples = None if samples is None or self.samples is None else self.samples + samples

    def ended(self) -> None:
        """The loader has no further batch."""
        self.epoch += 1
        self.batches, self.samples = 0, 0
        self._begun = False

    # --- checkpoints ---------------------------------------------------------------------------

    def state(self, trained: int | None, waits: bool) -> dict[str, Any]:
        """What a checkpoint holds. ``trained``: samples of the batch that is open and was trained on, -1 where there is none.

        ``waits``: a batch is open that was not trained on yet. Raises ``UsageError`` where the loader's own state would
        leave that one out.
        """
        inside = trained is None or trained >= 0
        samples = None if self.samples is None or trained is None else self.samples + max(trained, 0)
        found: dict[str, Any] = {
            "epoch": self.epoch,
            "batches": self.batches + (1 if inside else 0),
            "samples": samples,
            "data_ranks": self._data_ranks,
            "start": self._start,
        }
        if self._loader is not None:
            if waits:
                raise UsageError(
                    f"engine.save before the batch was trained on, and {type(self._loader).__name__} would go on behind it: "
                    "call it after engine.train_step"
                )
            found["loader"] = self._loader.state_dict()
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        """The next :meth:`begin` goes on from ``state``."""
        self._begun = False
        self.epoch = int(state.get("epoch", 0))
        self.batches, self.samples = int(state.get("batches", 0)), state.get("samples", 0)
        self._resumed = state if self.batches else None

    # --- going on ------------------------------------------------------------------------------

    def _streams(self) -> dict[str, Any]:
        return {
            "random": random_streams(_HOST),
            "generators": [generator.get_state() for generator in self._generators],
            "epoch": getattr(self._sampler, "epoch", None),
        }

    def _goes_on(self, loader: Iterable[Any], state: Mapping[str, Any]) -> Iterator[Any]:
        start = state["start"]
        self._start = dict(start)
        if self._sampler is not None and start["epoch"] is not None:
            self._sampler.set_epoch(start["epoch"])
        if self._tells:
            logger.info("data goes on behind %d batches of epoch %d", self.batches, self.epoch)
        if self._loader is not None and "loader" in state and state["data_ranks"] == self._data_ranks:
            self._loader.load_state_dict(state["loader"])
            return iter(self._loader)
        enough = self._left_out(state)
        now = random_streams(_HOST)
        restore_random_streams(_HOST, start["random"])
        for generator, each in zip(self._generators, start["generators"], strict=False):
            generator.set_state(each)
        try:
            if type(loader) is DataLoader and _has_indices(loader):
                batches = _Rest(loader, enough, self._generators)
                iterator: Iterator[Any] = iter(remade(loader, batch_sampler=batches))
                batches.settle()
                self.batches, self.samples = batches.left_out
                return iterator
            iterator = iter(loader)
            return self._read_behind(iterator, enough)
        finally:
            restore_random_streams(_HOST, now)

    def _left_out(self, state: Mapping[str, Any]) -> Callable[[int, int | None], bool]:
        """Whether so many batches, of so many samples, are what was trained on. Of other ranks, samples count."""
        before, wanted = int(state["data_ranks"]), state["samples"]
        if before == self._data_ranks:
            batches = int(state["batches"])
            return lambda count, samples: count >= batches
        if wanted is None:
            raise UsageError(
                f"the checkpoint is of {before} ranks with data of their own, this run has {self._data_ranks}, and its "
                "batches do not say how many samples they hold: skip them in the program, with engine.load(…, data=False)"
            )
        share = int(wanted) * before // self._data_ranks
        return lambda count, samples: samples is None or samples >= share

    def _read_behind(
        self, iterator: Iterator[Any], enough: Callable[[int, int | None], bool]
    ) -> Iterator[Any]:
        """Read what was trained on, and one more: what draws random numbers for its order has drawn them then."""
        count, samples = 0, 0
        for batch in iterator:
            if enough(count, samples):
                self.batches, self.samples = count, samples
                return chain([batch], iterator)
            count, samples = count + 1, samples + (size_of(batch) or 0)
        self.batches, self.samples = count, samples
        return iter(())


class _Rest:
    """A batch sampler behind the batches that were trained on.

    For one pass. DataLoader asks for its iterator before it draws the seed of its workers, and again after that where it
    has workers; without the skipping the seed is drawn before the order. So it is drawn here too, and generators are put
    back for DataLoader to draw it again.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        enough: Callable[[int, int | None], bool],
        generators: list[torch.Generator],
    ) -> None:
        self._batches: Any = loader.batch_sampler
        self._loader = loader
        self._enough = enough
        self._generators = generators
        self._behind: list[torch.Tensor] = []
        self._iterator: Iterator[Any] | None = None
        #: Batches, and samples in them.
        self.left_out = (0, 0)

    def __len__(self) -> int:
        return max(0, len(self._batches) - self.left_out[0])

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self._behind_them()
        return self._iterator

    def _behind_them(self) -> Iterator[Any]:
        before = random_streams(_HOST), [each.get_state() for each in self._generators]
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        batches = iter(self._batches)
        count = samples = 0
        first: list[Any] = []
        for batch in batches:
            if self._enough(count, samples):
                first.append(batch)
                break
            count, samples = count + 1, samples + len(batch)
        self.left_out = (count, samples)
        self._behind = [each.get_state() for each in self._generators]
        restore_random_streams(_HOST, before[0])
        for generator, state in zip(self._generators, before[1], strict=True):
            generator.set_state(state)
        return chain(first, batches)

    def settle(self) -> None:
        """Generators stand where the order and the seed have been drawn from them."""
        for generator, state in zip(self._generators, self._behind, strict=True):
            generator.set_state(state)


def _has_indices(loader: DataLoader[Any]) -> bool:
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def _keeps_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def _samplers_of(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def _with_epoch(loader: Any) -> Any:
    """The sampler whose order depends on an epoch that it is told, as DistributedSampler's."""
    samplers = _samplers_of(loader)
    return next(
        (each for each in samplers if hasattr(each, "epoch") and callable(getattr(each, "set_epoch", None))),
        None,
    )


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Those of the loader and its samplers, each once."""
    found = [getattr(each, "generator", None) for each in [loader, *_samplers_of(loader)]]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
