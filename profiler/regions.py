"""What a run does beside training: evaluation, checkpoints, the profiler's own work; for goodput.

Three ways in, all of them in the training thread:

* ``torch.save``, ``torch.distributed.checkpoint.save`` and ``async_save`` are timed while a session lasts (the wrappers
  are put in place and taken out by :mod:`trine.profiler.hooks`). Of ``async_save`` that is the time that it blocks;
* forwards without gradients of a model in evaluation mode that has been trained before: from ``model.eval()``, where
  nothing was trained since, else from the first of them, to ``model.train()``, else to the end of the last before the
  next forward with gradients. A teacher or a reference model is never trained, so it never counts;
* ``prof.region("evaluation")``, in the user's own words.

Where in doubt nothing is counted: time that is not seen here stays with the steps, or between them.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch

from trine.record.errors import UsageError

__all__ = ["KINDS", "Kind", "Region", "Regions", "check_kind", "saving", "turning"]

Kind = Literal["evaluation", "checkpoint", "setup", "other", "work"]
KINDS: tuple[str, ...] = get_args(Kind)

#: Shorter stretches of our own work are not worth a row.
_LEAST_NS = 1_000_000
#: Of regions that wait for the background thread.
_MOST_WAITING = 50_000


class Region(NamedTuple):
    """A stretch of time, in ``perf_counter_ns``."""

    kind: str
    name: str
    start_ns: int
    end_ns: int


class Regions:
    """Collects regions in the training thread; the background thread takes them from :attr:`finished`."""

    def __init__(self) -> None:
        self.finished: deque[Region] = deque()
        self.lost = 0
        self._trained: set[int] = set()
        self._evaluation: list[int] = []  # start, and end of the last forward
        self._turned: dict[
            int, int
        ] = {}  # model → when it was put into evaluation mode, nothing trained since
        self._inside = 0  # of a region that says what it is

    def add(self, kind: str, name: str, start_ns: int, end_ns: int) -> None:
        """Keep a region."""
        if len(self.finished) < _MOST_WAITING:
            self.finished.append(Region(kind, name, start_ns, end_ns))
        else:
            self.lost += 1

    def add_long(self, kind: str, name: str, start_ns: int) -> None:
        """Keep a region that ends now, if it is worth it."""
        end_ns = time.perf_counter_ns()
        if end_ns - start_ns >= _LEAST_NS:
            self.add(kind, name, start_ns, end_ns)

    @contextmanager
    def inside(self, kind: str, name: str) -> Iterator[None]:
        """A region in which nothing else is looked for. The innermost of several says nothing."""
        began = time.perf_counter_ns()
        self._inside += 1
        if kind != "checkpoint":  # the user says what this is, so what comes behind began behind
            self._turned.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self.add(kind, name, began, time.perf_counter_ns())

    # What hooks tell.

    def before_forward(self, module: Any, with_gradients: bool) -> None:
        """A model is called."""
        if with_gradients:
            if module.training:
                self._trained.add(id(module))
            self.training_goes_on()
        elif (
            not self._evaluation and not self._inside and not module.training and id(module) in self._trained
        ):
            now = time.perf_counter_ns()
            self._evaluation = [self._turned.get(id(module), now), now]

    def after_forward(self) -> None:
        """A model was called."""
        if self._evaluation:
            self._evaluation[1] = time.perf_counter_ns()

    def knows(self, module: Any) -> bool:
        """Whether a model is one that was trained."""
        return id(module) in self._trained

    def turned(self, module: Any, when_ns: int) -> None:
        """A model that was trained was put into training or evaluation mode, or left in it."""
        if self._inside:
            return
        if not module.training:
            self._turned.setdefault(id(module), when_ns)
            return
        if self._evaluation:
            self._evaluation[1] = when_ns
        self.training_goes_on()

    def training_goes_on(self) -> None:
        """A forward with gradients, or the end: an evaluation is over, with its last forward."""
        self._turned.clear()
        if self._evaluation:
            start, end = self._evaluation
            self._evaluation = []
            self.add("evaluation", "forward without gradients", start, end)


def saving(
    original: Callable[..., Any], package: str, name: str, here: Callable[[], Regions | None]
) -> Callable[..., Any]:
    """``package.name``, which saves, timed. ``here`` says where to note it: None in other threads and without a session.

    It is found, and so pickled, as ``package.name``.
    """

    @functools.wraps(original)
    def save(*arguments: Any, **keywords: Any) -> Any:
        regions = None if torch.compiler.is_compiling() else here()
        if regions is None:
            return original(*arguments, **keywords)
        with regions.inside("checkpoint", f"{package}.{name}"):
            return original(*arguments, **keywords)

    save.__module__ = package
    return save


def turning(
    original: Callable[..., Any],
    here: Callable[[], Regions | None],
    before: Callable[[], None],
    after: Callable[[], None],
) -> Callable[..., Any]:
    """``Module.eval`` or ``Module.train``, noted for models that were trained; ``before`` and ``after`` are called then."""

    @functools.wraps(original)
    def turn(self: Any, *arguments: Any, **keywords: Any) -> Any:
        regions = None if torch.compiler.is_compiling() else here()
        if regions is None or not regions.knows(self):
            return original(self, *arguments, **keywords)
        before()
        began = time.perf_counter_ns()
        result = original(self, *arguments, **keywords)
        regions.turned(self, began)
        after()
        return result

    return turn


def check_kind(kind: str) -> None:
    """Raises ``UsageError`` for a kind of region that does not exist."""
    if kind not in KINDS:
        raise UsageError(f"a region is {', '.join(KINDS)}; not {str(kind)[:40]!r}")
