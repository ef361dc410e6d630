"""Where a run stands in its data: passes over the loader, and batches of the present one that were trained on.

A resumed run's first ``engine.steps(loader)`` begins behind the batches that were trained on, in the order that the pass
had: random streams and a sampler's epoch are set as they were when it began, and the batches are left out by their
indices, unread, where the loader is PyTorch's DataLoader over a dataset with indices; else they are read and dropped. On
other ranks batches begin at the sample behind those, where PyTorch's own BatchSampler makes them; else whole batches are
left out, and how many samples that leaves out or repeats is said. A loader that keeps its own state (``state_dict`` and
``load_state_dict``, as torchdata's StatefulDataLoader) is asked for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

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
        #: (samples, batches) of this pass where batches begin that do not begin there in a whole pass.
        self._cut: tuple[int, int] | None = None
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
            self.batches, self.samples, self._cut = 0, 0, None
        self._begun = True
        self._sampler = _with_epoch(given)
        self._generators = _generators_of(given)
        self._loader = given if given is loader and _keeps_state(given) else None
        left = length_of(loader)
        if resumed is None:
            self._start = self._streams()
            return iter(loader), left
        return self._goes_on(loader, resumed, left)

    def passed(self, samples: int | None) -> None:
        """A batch is done with."""
        self.batches += 1
        self.samples = None if samples is None or self.samples is None else self.samples + samples

    def ended(self) -> None:
        """The loader has no further batch."""
        self.epoch += 1
        self.batches, self.samples, self._cut = 0, 0, None
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
            "cut": self._cut,
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
        self._cut = state.get("cut")
        self._resumed = state if self.batches or self.samples else None

    # --- going on ------------------------------------------------------------------------------

    def _streams(self) -> dict[str, Any]:
        return {
            "random": random_streams(_HOST),
            "generators": [generator.get_state() for generator in self._generators],
            "epoch": getattr(self._sampler, "epoch", None),
        }

    def _goes_on(
        self, loader: Iterable[Any], state: Mapping[str, Any], left: int | None
    ) -> tuple[Iterator[Any], int | None]:
        start = state["start"]
        self._start = dict(start)
        if self._sampler is not None and start["epoch"] is not None:
            self._sampler.set_epoch(start["epoch"])
        if self._tells:
            logger.info("data goes on behind %d batches of epoch %d", self.batches, self.epoch)
        if self._loader is not None and "loader" in state and state["data_ranks"] == self._data_ranks:
            self._loader.load_state_dict(state["loader"])
            return iter(self._loader), None if left is None else max(0, left - self.batches)
        skip = self._skip(state)
        now = random_streams(_HOST)
        restore_random_streams(_HOST, start["random"])
        for generator, each in zip(self._generators, start["generators"], strict=False):
            generator.set_state(each)
        try:
            if type(loader) is DataLoader and _has_indices(loader):
                rest = _Rest(loader, skip, self._generators)
                iterator: Iterator[Any] = iter(remade(loader, batch_sampler=rest))
                rest.settle()
                self._stands_behind(rest.passed, skip, state)
                return iterator, None if left is None else len(rest)
            iterator, passed = _behind(iter(loader), skip, lambda batch: size_of(batch) or 0)
            self._stands_behind(passed, skip, state)
            return iterator, None if left is None else max(0, left - self.batches)
        finally:
            restore_random_streams(_HOST, now)

    def _skip(self, state: Mapping[str, Any]) -> _Skip:
        """What was trained on, as it is to be passed over. Of other ranks, samples count."""
        before, wanted = int(state["data_ranks"]), state["samples"]
        if before == self._data_ranks:
            samples, batches = state.get("cut") or (0, 0)
            return _Skip(samples, int(state["batches"]) - batches)
        if wanted is None:
            raise UsageError(
                f"the checkpoint is of {before} ranks with data of their own, this run has {self._data_ranks}, and its "
                "batches do not say how many samples they hold: skip them in the program, with engine.load(…, data=False)"
            )
        return _Skip(int(wanted) * before // self._data_ranks, 0)

    def _stands_behind(self, passed: _Passed, skip: _Skip, state: Mapping[str, Any]) -> None:
        self.batches, self.samples = passed.batches, passed.samples
        self._cut = passed.cut if skip.samples else None
        before = int(state["data_ranks"])
        if before == self._data_ranks or passed.ended or not self._tells:
            return
        more = passed.cut[0] * self._data_ranks - int(state["samples"]) * before
        if more:
            logger.warning(
                "the checkpoint is of %d ranks with data of their own and this run has %d, whose batches do not begin where "
                "those ended: %d samples of epoch %d are %s",
                before,
                self._data_ranks,
                abs(more),
                self.epoch,
                "left out" if more > 0 else "trained on again",
            )


@dataclass(frozen=True, slots=True)
class _Skip:
    """What a pass begins behind: so many samples of this rank, then so many batches."""

    samples: int
    batches: int


@dataclass(frozen=True, slots=True)
class _Passed:
    """What was passed over, and whether nothing is left; ``cut``: (samples, batches) before :attr:`_Skip.batches`."""

    batches: int
    samples: int
    cut: tuple[int, int]
    ended: bool


def _behind(
    batches: Iterator[Any], skip: _Skip, size: Callable[[Any], int], cut: tuple[int, int] | None = None
) -> tuple[Iterator[Any], _Passed]:
    """What is left, and what was passed over: in whole batches from the first, or from ``cut``.

    One more is read: what draws random numbers for its order has drawn them then.
    """
    samples, count = cut or (0, 0)
    for batch in batches:
        if cut is None and samples >= skip.samples:
            cut = samples, count
        if cut is not None and count - cut[1] >= skip.batches:
            return chain([batch], batches), _Passed(count, samples, cut, False)
        samples, count = samples + size(batch), count + 1
    return iter(()), _Passed(count, samples, cut or (samples, count), True)


class _Rest:
    """A batch sampler behind the batches that were trained on.

    For one pass. DataLoader asks for its iterator before it draws the seed of its workers, and again after that where it
    has workers; without the skipping the seed is drawn before the order. So it is drawn here too, and generators are put
    back for DataLoader to draw it again.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        skip: _Skip,
        generators: list[torch.Generator],
    ) -> None:
        self._batches: Any = loader.batch_sampler
        self._loader = loader
        self._skip = skip
        self._generators = generators
        self._behind: list[torch.Tensor] = []
        self._iterator: Iterator[Any] | None = None
        self.passed = _Passed(0, 0, (0, 0), False)

    def __len__(self) -> int:
        if not self._is_cut_anew:
            return max(0, len(self._batches) - self.passed.batches)
        samples, batches = self.passed.cut
        size = self._batches.batch_size
        left = len(self._batches.sampler) - samples + (0 if self._batches.drop_last else size - 1)
        return max(0, int(left) // int(size) - (self.passed.batches - batches))

    @property
    def _is_cut_anew(self) -> bool:
        """Whether the first batch begins behind so many samples, wherever a batch of the whole pass would."""
        return self._skip.samples > 0 and type(self._batches) is BatchSampler

    def __iter__(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self._behind_them()
        return self._iterator

    def _behind_them(self) -> Iterator[Any]:
        before = random_streams(_HOST), [each.get_state() for each in self._generators]
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        batches, cut = iter(self._batches), None
        if self._is_cut_anew:
            indices = iter(self._batches.sampler)
            samples = sum(1 for _ in islice(indices, self._skip.samples))
            cut = samples, samples // self._batches.batch_size
            batches = iter(BatchSampler(indices, self._batches.batch_size, self._batches.drop_last))
        rest, self.passed = _behind(batches, self._skip, len, cut)
        self._behind = [each.get_state() for each in self._generators]
        restore_random_streams(_HOST, before[0])
        for generator, state in zip(self._generators, before[1], strict=True):
            generator.set_state(state)
        return rest

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
