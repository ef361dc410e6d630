"""The session: what ``trine.profile`` gives, from the first step to the last flush.

In the training thread it opens and closes *parts* (a step, or one batch of a step whose gradients accumulate); all
else happens in the background. Whatever fails inside is logged once and goes quiet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Self

from trine.record import events
from trine.record.model import PHASES
from trine.record.store import DEFAULT_MAX_BYTES, RankWriter

from . import describe
from .background import Background
from .engine_events import EngineEvents
from .hooks import Hooks
from .marks import EventPool
from .parts import Parts, Size
from .regions import Kind, check_kind
from .steps import Steps

__all__ = ["Session"]

logger = logging.getLogger("trine")

_current: Session | None = None


class Session(Parts):
    """A profiled stretch of training; use it as a context manager. Made by :func:`trine.profile`.

    Loops say where their steps are in one of four ways: ``steps(loader)``; ``step()`` at the end of each;
    ``begin_step()`` and ``end_step()``; or an engine that speaks through ``trine.record.events``.
    """

    def __init__(
        self,
        path: Path,
        *,
        models: Sequence[Any] = (),
        optimizers: Sequence[Any] = (),
        windows: Any = "default",
        tokens: Size = None,
        samples: Size = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        flops: bool = True,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(path, models, optimizers, (tokens, samples), metadata or {})
        # What hooks read (hooks.Watcher).
        self.exposes_backward = False
        self.watches_loaders = True
        self._hooks = Hooks(self, self.models)
        self._events: EventPool | None = None
        self._windows, self._max_bytes, self._counts_flops = windows, max_bytes, flops
        self._outer: Session | None = None
        self._writer: RankWriter | None = None
        self._stop_listening: Callable[[], None] | None = None

    # The context.

    def __enter__(self) -> Self:
        """Start observing. Folders and files are made at the first step, when the process group is there."""
        global _current
        if _current is not None and _current.is_alive():
            self._outer = _current
            logger.warning(
                "a profile of %s is open already: steps of %s are recorded there", _current.path, self.path
            )
            return self
        _current = self
        self._state = "open"
        self.guard.run("hooks", self._hooks.install)
        self._stop_listening = events.listen(EngineEvents(self).on_event)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the record; an exception of the loop passes through unchanged."""
        global _current
        if _current is self:
            _current = None
        if self._outer is not None or self._state == "closed" or os.getpid() != self._process:
            return
        self.guard.run("end", self._close, error)

    @property
    def folder(self) -> Path | None:
        """This rank's folder, ``None`` before the first step."""
        return None if self._writer is None else self._writer.folder

    # What a loop calls.

    def steps(self, loader: Iterable[Any], *, accumulate: int | None = None) -> Steps:
        """The loader's batches; a step is what lies between two of them.

        A step ends where the optimizer has stepped, so that accumulated batches are one step; ``accumulate=k`` says
        instead that k batches are a step. A loop without backward counts each batch. Raises ``UsageError`` when
        ``accumulate`` is below one.
        """
        return Steps(self, loader, accumulate)

    def step(self, **values: Any) -> None:
        """A step has ended here: for loops that do not use :meth:`steps`. ``values`` as in :meth:`log`."""
        session = self.target()
        session.log(**values)
        if session.part is None:
            session.begin_step()
        elif session.watches_loaders:
            session.end_step()
            session.begin_step()
        else:
            session.progress.stepped = True

    def log(
        self, *, loss: Any = None, tokens: int | None = None, samples: int | None = None, **metrics: Any
    ) -> None:
        """What the current step knows about itself. A loss on a device is copied without waiting and read later."""
        session = self.target()
        if session.is_alive():
            session.guard.run("log", session.take_values, session.part, loss, tokens, samples, metrics)

    def begin_step(self, index: int | None = None) -> None:
        """A step begins; one that is open ends. ``index`` counts up by itself."""
        session = self.target()
        if session.part is not None:
            session.end_step()
        if index is not None:
            session.progress.index = index
        session.guard.run("steps", session.begin_part)

    def end_step(self, *, loss: Any = None, tokens: int | None = None, samples: int | None = None) -> None:
        """The open step ends."""
        session = self.target()
        session.log(loss=loss, tokens=tokens, samples=samples)
        session.guard.run("steps", session.end_part, True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the enclosed code is: one of data, copy, forward, backward, optimizer, other."""
        marker = self.target().marker
        marker.enter(PHASES.index(name))
        try:
            yield
        finally:
            marker.leave()

    @contextmanager
    def region(self, kind: Kind) -> Iterator[None]:
        """Say that the enclosed code is ``evaluation``, a ``checkpoint``, ``setup`` or ``other``, so that goodput leaves
        it out; or that it is ``work``, whatever it looks like (a rollout is no evaluation). In a step or between two.

        In another thread than the one that trains it says nothing: that holds nobody up. Raises ``UsageError`` for
        another kind.
        """
        check_kind(kind)
        target = self.target()
        if target.marker.thread != get_ident():
            yield
            return
        with target.regions.inside(kind, "region"):
            yield

    def describe(self, **metadata: Any) -> None:
        """Keep facts in the record's metadata, for example ``configuration={…}``."""
        self.target().facts.update(metadata)

    # For Steps and events.

    def target(self) -> Session:
        """The session that records: this one, or the one around it."""
        return self if self._outer is None else self._outer.target()

    def warn_when_closed(self) -> None:
        """Silence would look like success."""
        if self._state in ("new", "closed") and os.getpid() == self._process:
            when = "before its with block" if self._state == "new" else "after its with block"
            logger.warning(
                "steps of the profile of %s were asked for %s: they are not recorded", self.path, when
            )

    # Inside.

    def _open_events(self) -> EventPool | None:
        return None if self.device[0] == "cpu" else EventPool.of_device(self.device[0])

    def _start(self) -> None:
        place = self.rank, self.world_size, self.local_rank = describe.place()
        try:
            self._writer = RankWriter(self.path, self.rank, self.world_size, max_bytes=self._max_bytes)
        except OSError as error:
            logger.warning("%s cannot be written (%s): this run is not recorded", self.path, error)
            self._hooks.remove()
            return
        self.device = describe.device_of(self.models, self.optimizers)
        self._events = self.guard.run("device events", self._open_events)
        self.marker.stamp_with(self._events)
        self.guard.run("losses", self._losses.prepare, self.device[0])
        self.exposes_backward = self._events is not None and self.world_size > 1
        self._witness = describe.witness_of(self.models, self.optimizers)
        self.collectors.start(
            folder=self._writer.folder,
            place=place,
            windows=self._windows,
            flops=self._counts_flops,
            device=self.device,
        )
        self.facts |= self.guard.run("facts", describe.facts_at_start, self) or {}
        self.guard.run("description", describe.write_run, self, self._writer)
        self.background = Background(
            self._writer,
            self.collectors.source,
            self._events,
            self.anchor,
            self.guard,
            self.regions,
            lambda: describe.description(self),
        )
        self.background.start()

    def _close(self, error: BaseException | None) -> None:
        run = self.guard.run
        never = self._state == "open"
        run("steps", self._close_last_step)
        self.regions.training_goes_on()
        self._state = "closed"
        if self._stop_listening is not None:
            run("events", self._stop_listening)
        run("removing hooks", self._hooks.remove)
        self.collectors.stop()
        final = describe.final(error)
        if self.background is not None:
            self.facts |= run("facts", describe.facts_in_training, self) or {}
            if not self.background.finish(final):
                logger.warning("%s took too long to write the last steps; they may be missing", self.path)
        elif self._writer is not None:
            run("record", self._writer.close, {**final, "notes": self.guard.notes})
        elif never:
            describe.warn_without_steps(self)

    def _close_last_step(self) -> None:
        if self.part is not None and self.progress.stepped:
            self.end_part(True)
        self.close_step()
