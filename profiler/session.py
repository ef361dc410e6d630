"""The session: what ``trine.profile`` gives, from the first step to the last flush.

In the training thread it opens and closes *parts* (a step, or one batch of a step whose gradients accumulate); all
else happens in the background. Whatever fails inside is logged once and goes quiet.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from trine.record import events
from trine.record.model import PHASES
from trine.record.store import DEFAULT_MAX_BYTES, RankWriter

from . import describe
from .background import MOST_WAITING, Background, Part
from .batches import measure_batch
from .clocks import Anchor
from .collectors import Collectors
from .engine_events import EngineEvents
from .guard import Guard
from .hooks import Hooks
from .losses import LossReader
from .marks import EventPool, Marker
from .progress import Progress
from .steps import Steps

__all__ = ["Session"]

logger = logging.getLogger("trine")

Size = int | Callable[[Any], int] | None

_current: Session | None = None


class Session:
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
        self.path = path
        self.models = [model for model in models if isinstance(model, torch.nn.Module)]
        self.optimizers = list(optimizers)
        self.guard = Guard()
        if len(self.models) < len(models):
            self.guard.note(
                "model-ignored", "warning", "a model that is no torch.nn.Module was given and is ignored"
            )
        self.anchor = Anchor()
        self.progress = Progress()
        self.collectors = Collectors(self.guard, self._sample)
        self.background: Background | None = None
        # What describe.py reads.
        self.facts: dict[str, Any] = dict(metadata or {})
        self.groups: list[dict[str, Any]] = []
        self.loader: Any = None
        self.sequence: int | None = None
        self.autocast: str | None = None
        self.tokens_per_step: int | None = None
        self.rank, self.world_size, self.local_rank = 0, 1, 0
        #: Type and index of the device that trains; known at the first step.
        self.device = ("cpu", 0)
        # What hooks read (hooks.Watcher).
        self.exposes_backward = False
        self.watches_loaders = True
        self._events: EventPool | None = None
        self.marker = Marker()
        self._hooks = Hooks(self, self.models)
        self._losses = LossReader()
        self._sizes = (tokens, samples)
        self._windows, self._max_bytes, self._counts_flops = windows, max_bytes, flops
        self._outer: Session | None = None
        self._state: Literal["new", "open", "recording", "off", "closed"] = "new"
        self._process = os.getpid()
        self._writer: RankWriter | None = None
        self._stop_listening: Callable[[], None] | None = None
        self.part: Part | None = None
        self.last_part: Part | None = None
        self._step_ns = 0
        self._step_tokens = 0
        self._witness: Any = None
        self._witness_version = 0

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

    def is_alive(self) -> bool:
        """Whether steps can still be recorded, in this process."""
        return self._state in ("open", "recording") and os.getpid() == self._process

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

    def describe(self, **metadata: Any) -> None:
        """Keep facts in the record's metadata, for example ``configuration={…}``."""
        self.target().facts.update(metadata)

    # Parts: what Steps, step() and events are made of.

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

    def begin_part(self) -> None:
        """Open a part in this thread; starts the recording at the first."""
        if self._state == "open":
            self._state = "off"
            self._start()
            self._state = "off" if self.background is None else "recording"
        if self._state != "recording" or self.background is None or os.getpid() != self._process:
            return
        progress = self.progress
        if progress.pending == 0:
            self._before_step()
        self.part = Part(progress.index, [])
        progress.begin()
        if self._witness is not None:
            self._witness_version = self._witness._version
        self.marker.begin()
        self.background.boundaries.append((self.marker.marks[1], progress.index))

    def end_part(self, complete: bool | None) -> None:
        """Close the part. ``complete``: whether its step ends with it; ``None`` to decide by what was seen."""
        part, self.part = self.part, None
        if part is None or self.background is None:
            return
        part.marks = self.marker.end()
        part.complete = self._ends_step(part) if complete is None else complete
        self._step_ns += part.marks[-2] - part.marks[1]
        self._step_tokens += part.tokens or 0
        self.collectors.read_memory(part.marks[-2])
        if part.complete:
            self.after_step(part)
        self.progress.end(part.complete)
        self.last_part = part
        if len(self.background.parts) < MOST_WAITING:
            self.background.parts.append(part)
        else:
            self.background.count_overflow("steps")

    def close_step(self) -> None:
        """No batch follows: the open part is forgotten, and accumulated ones before it are a step of their own."""
        if self.part is not None:
            self.part = None
            self.marker.end()
        if self.progress.pending:
            self.after_step(None)
            self.progress.end(True)

    def measure(self, batch: Any) -> None:
        """Note what the batch holds."""
        part = self.part
        if part is None:
            return
        tokens, samples, sequence, on_host = measure_batch(batch, *self._sizes)
        part.host_batch = on_host and self.device[0] != "cpu"
        self.sequence = self.sequence or sequence
        part.tokens = tokens if part.tokens is None else part.tokens
        part.samples = samples if part.samples is None else part.samples

    def has_worked(self) -> bool:
        """Whether the open part has done a step: by the optimizer, or by backward where none is known."""
        part = self.part
        if part is None:
            return False
        return self.progress.stepped or (part.has_backward and not self.optimizers)

    # What hooks tell (hooks.Watcher).

    def saw_forward(self) -> None:
        """Precision is what holds at the model's forward; the first steps tell."""
        if self.autocast is None and self.progress.index < 3:
            self.autocast = describe.autocast_dtype(self.device[0])

    def saw_backward(self) -> None:
        """Gradients have been added to."""
        if self.part is not None:
            self.part.has_backward = True

    def saw_optimizer(self, optimizer: Any) -> None:
        """The step may end with this part."""
        self.progress.optimizer_stepped()
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        if self.progress.optimizer_steps >= 2:
            self.collectors.read_holdings(self.models, describe.torch_optimizers(self.optimizers))

    def saw_loader(self, iterator: Any) -> None:
        """A torch ``DataLoader`` feeds a loop that does not use :meth:`steps`."""
        if self.loader is None:
            self.loader = getattr(iterator, "_loader", None) or iterator

    def saw_batch(self, iterator: Any, batch: Any) -> None:
        """A ``DataLoader`` gave the loop a batch."""
        self.guard.run("batch sizes", self.measure, batch)

    def saw_exhausted(self, iterator: Any) -> None:
        """A ``DataLoader`` had no further batch: the loop says itself where its steps end."""

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
            lambda: describe.description(self),
        )
        self.background.start()

    def _ends_step(self, part: Part) -> bool:
        updated = self._witness is not None and self._witness._version != self._witness_version
        ends, guess = self.progress.ends_step(
            has_backward=part.has_backward, updated=updated, knows_optimizer=bool(self.optimizers)
        )
        if guess:
            self.guard.note(
                "steps-guessed",
                "warning",
                f"no optimizer step was seen in {self.progress.pending + 1} batches: from step "
                f"{self.progress.index + 1} on each batch counts as a step; steps(loader, accumulate=…) tells",
            )
        return ends

    def _before_step(self) -> None:
        self._step_ns = self._step_tokens = 0
        self.collectors.before_step(self.progress.index)

    def after_step(self, part: Part | None) -> None:
        """A step has ended, with ``part`` where that is known."""
        index = self.progress.index
        self.tokens_per_step = self._step_tokens or self.tokens_per_step
        counted = self.collectors.after_step(index, self._step_ns)
        if counted:
            self.facts["flops"] = {**self.facts.get("flops", {}), **counted}
            if part is not None:
                part.flops = float(counted["counted"])
        if index in describe.FACTS_AFTER_STEPS:
            self.facts |= self.guard.run("facts", describe.facts_in_training, self) or {}

    def take_values(
        self, part: Part | None, loss: Any, tokens: int | None, samples: int | None, metrics: dict[str, Any]
    ) -> None:
        """Keep what is known of a part, and metrics as samples."""
        if part is not None:
            part.tokens = part.tokens if tokens is None else int(tokens)
            part.samples = part.samples if samples is None else int(samples)
            if loss is not None:
                part.loss = self._losses.take(loss)
        for name, value in metrics.items():
            number = self._losses.number(value)
            if number is None:
                self.guard.note(
                    "metric-left-out", "info", f"metric {name!r} is on a device or no number: left out"
                )
            else:
                self._sample(time.perf_counter_ns(), name, number)

    def _sample(self, time_ns: int, metric: str, value: float) -> None:
        background = self.background
        if background is None:
            return
        if len(background.samples) < MOST_WAITING:
            background.samples.append((time_ns, metric, value))
        else:
            background.count_overflow("samples")

    def turn_over(self, part: Part) -> None:
        """The step ended with ``part``, which is closed, and not with the part that is open now."""
        self.after_step(part)
        self.progress.end(True)
        if self.background is not None:
            self.background.complete_last(part)
        self._before_step()
        self.renumber()

    def renumber(self) -> None:
        """The open part belongs to the step that is current now."""
        part, index = self.part, self.progress.index
        if part is not None and part.index != index and self.background is not None:
            part.index = index
            start, _ = self.background.boundaries.pop()
            self.background.boundaries.append((start, index))

    def _close(self, error: BaseException | None) -> None:
        run = self.guard.run
        never = self._state == "open"
        run("steps", self._close_last_step)
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
