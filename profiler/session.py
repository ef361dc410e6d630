"""The session: what ``trine.profile`` gives, from the first step to the last flush.

In the training thread it opens and closes *parts* (a step, or one batch of a step whose gradients accumulate) and
decides where a step ends; all else happens in the background. Whatever fails inside is logged once and goes quiet.
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
from .guard import Guard
from .hooks import Hooks
from .losses import LossReader
from .marks import EventPool, Marker
from .memory import MemoryReader
from .phases import OTHER
from .protocols import CollectiveSource, DeepWindowing, FlopCounting
from .steps import Steps

__all__ = ["Session", "profile"]

logger = logging.getLogger("trine")

#: Batches with a backward and without an optimizer step before each batch counts as a step of its own: with no
#: optimizer known (a hand-written update), and with one that was given but was never seen to step.
_PATIENCE_UNKNOWN = 64
_PATIENCE_KNOWN = 512
#: What parameters, gradients and optimizer hold is read at the second optimizer step, then this often.
_HOLDINGS_PERIOD_S = 60.0

Size = int | Callable[[Any], int] | None

_current: Session | None = None


def profile(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    windows: Any = "default",
    tokens: Size = None,
    samples: Size = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    flops: bool = True,
    **metadata: Any,
) -> Session:
    """Measure a training loop and write its record to the folder ``path``, one sub-folder a rank.

        with trine.profile("runs/a", model=model, optimizer=optimizer) as prof:
            for batch in prof.steps(loader):
                ...

    ``model``, ``optimizer``: one or a sequence of them; without a model, forward is what lies between the batch and
    backward. ``windows``: deep windows of ``torch.profiler``: ``"default"`` (one, steps 10–12), ``None`` for none, or a
    schedule (see docs/profiling.md). ``tokens``, ``samples``: per batch, a number or a function of it, where the batch's
    shapes do not tell. ``max_bytes``: of a rank's record on disk. ``flops``: count model FLOPs in one early step.
    Further keywords are kept in the record's metadata.

    Never raises into the loop, never waits for a device, never changes a number. On a path that cannot be written it
    logs one warning and records nothing.
    """
    return Session(
        Path(path),
        models=_sequence(model),
        optimizers=_sequence(optimizer),
        windows=windows,
        tokens=tokens,
        samples=samples,
        max_bytes=max_bytes,
        flops=flops,
        metadata=metadata,
    )


def _sequence(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple, set)):
        return tuple(value)
    return tuple(value.values()) if isinstance(value, dict) else (value,)


class Session:
    """A profiled stretch of training; use it as a context manager. Made by :func:`profile`.

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
        self.facts: dict[str, Any] = dict(metadata or {})
        self.loader: Any = None
        self.sequence: int | None = None
        self.autocast: str | None = None
        self.exposes_backward = False
        self.watches_loaders = True
        self.rank, self.world_size, self.local_rank = 0, 1, 0
        self.groups: list[dict[str, Any]] = []
        self.held: dict[str, int] = {}
        self.tokens_per_step: int | None = None
        self.anchor = Anchor()
        self._arguments = {"windows": windows, "max_bytes": max_bytes, "flops": flops}
        self._sizes = (tokens, samples)
        self._outer: Session | None = None
        self._state: Literal["new", "open", "recording", "off", "closed"] = "new"
        self._process = os.getpid()
        self.device_type, self.device_index = describe.device_of(self.models, self.optimizers)
        self._pool = self.guard.run("device events", self._open_events)
        self.marker = Marker(self._pool)
        self._hooks = Hooks(self, self.models)
        self.background: Background | None = None
        self._writer: RankWriter | None = None
        self.source: CollectiveSource | None = None
        self._windows: DeepWindowing | None = None
        self._flops: FlopCounting | None = None
        self._memory: MemoryReader | None = None
        self._losses = LossReader(self.device_type)
        self._stop_listening: Callable[[], None] | None = None
        # Where the loop is.
        self._part: Part | None = None
        self._index = 0
        self._pending = 0
        self._step_ns = 0
        self._step_tokens = 0
        self._stepped = False
        self._engine = False
        self._engine_ended = False
        self._optimizer_steps = 0
        self._patient = True
        self._holdings_at = 0.0
        self._witness: Any = None
        self._witness_version = 0
        self._described_at = 0

    # The context.

    def __enter__(self) -> Self:
        """Start observing. Folders and files are made at the first step, when the process group is there."""
        global _current
        if _current is not None and _current._is_alive():
            self._outer = _current
            logger.warning(
                "a profile of %s is already open: steps of %s are recorded there", _current.path, self.path
            )
            return self
        _current = self
        self._state = "open"
        self.guard.run("hooks", self._hooks.install)
        self._stop_listening = events.listen(self._on_event)
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
        self.guard.run("end", self._close, describe.state_after(error), error)

    @property
    def folder(self) -> Path | None:
        """This rank's folder, ``None`` before the first step."""
        return None if self._writer is None else self._writer.folder

    # What a loop calls.

    def steps(self, loader: Iterable[Any], *, accumulate: int | None = None) -> Steps:
        """The loader's batches; a step is what lies between two of them.

        A step ends where the optimizer has stepped, so that accumulated batches are one step; ``accumulate=k`` says
        instead that k batches are a step. A loop without backward counts each batch.
        """
        return Steps(self, loader, accumulate)

    def step(self, **values: Any) -> None:
        """A step has ended here: for loops that do not use :meth:`steps`. ``values`` as in :meth:`log`."""
        session = self._target()
        if values:
            session.log(**values)
        if session._part is None:
            session.begin_step()
        elif session.watches_loaders:
            session.end_step()
            session.begin_step()
        else:
            session._stepped = True

    def log(
        self, *, loss: Any = None, tokens: int | None = None, samples: int | None = None, **metrics: Any
    ) -> None:
        """What the current step knows about itself. A loss on a device is copied without waiting and read later."""
        session = self._target()
        if session._state in ("open", "recording"):
            session.guard.run("log", session._log, loss, tokens, samples, metrics)

    def begin_step(self, index: int | None = None) -> None:
        """A step begins; one that is open ends. ``index`` counts up by itself."""
        session = self._target()
        if session._part is not None:
            session.end_step()
        if index is not None:
            session._index = index
        session.guard.run("steps", session.begin_part)

    def end_step(self, *, loss: Any = None, tokens: int | None = None, samples: int | None = None) -> None:
        """The open step ends."""
        session = self._target()
        session.log(loss=loss, tokens=tokens, samples=samples)
        session.guard.run("steps", session.end_part, True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the enclosed code is: one of data, copy, forward, backward, optimizer, other."""
        marker = self._target().marker
        marker.enter(PHASES.index(name))
        try:
            yield
        finally:
            marker.leave()

    def describe(self, **metadata: Any) -> None:
        """Keep facts in the record's metadata, for example ``configuration={…}``."""
        self._target().facts.update(metadata)

    # Parts: what Steps, step() and events are made of.

    def begin_part(self) -> None:
        """Open a part in this thread; starts the recording at the first."""
        if self._state == "open":
            self._state = "off"
            self._start()
            self._state = "recording"
        if self._state != "recording" or os.getpid() != self._process:
            return
        if self._pending == 0:
            self._step_ns = 0
            self._before_step()
        self._part = Part(self._index, [])
        self._stepped = self._engine_ended = False
        if self._witness is not None:
            self._witness_version = self._witness._version
        self.marker.begin()
        assert self.background is not None
        self.background.boundaries.append((self.marker.marks[1], self._index))

    def end_part(self, complete: bool | None) -> None:
        """Close the part. ``complete``: whether its step ends with it; ``None`` to decide by what was seen."""
        part, self._part = self._part, None
        if part is None or self.background is None:
            return
        part.marks = self.marker.end()
        part.complete = self._is_complete(part) if complete is None else complete
        self._step_ns += part.marks[-2] - part.marks[1]
        self._pending = 0 if part.complete else self._pending + 1
        if self._memory is not None:
            self._read_memory(self._memory, part.marks[-2])
        if part.complete:
            self._after_step(part)
            self._index += 1
        self._count_tokens(part)
        if len(self.background.parts) < MOST_WAITING:
            self.background.parts.append(part)
        else:
            self.background.count_overflow("steps")

    def drop_part(self) -> None:
        """Forget the open part: the loader had no further batch, or the loop broke off before any work."""
        if self._part is not None:
            self._part = None
            self.marker.end()

    def close_step(self) -> None:
        """No batch follows: accumulated ones that are left are a step of their own."""
        self.drop_part()
        if self._pending:
            self._pending = 0
            self._after_step(None)
            self._index += 1

    def measure(self, batch: Any) -> None:
        """Note what the batch holds."""
        part = self._part
        if part is None:
            return
        tokens, samples, sequence, on_host = measure_batch(batch, *self._sizes)
        part.host_batch = on_host and self.device_type != "cpu"
        self.sequence = self.sequence or sequence
        part.tokens = tokens if part.tokens is None else part.tokens
        part.samples = samples if part.samples is None else part.samples

    def has_worked(self) -> bool:
        """Whether a step of the open part has been done: by the optimizer, or by backward where none is known."""
        part = self._part
        if part is None:
            return False
        return self._stepped or (part.has_backward and not self.optimizers)

    # What hooks tell (see hooks.Watcher).

    def saw_forward(self) -> None:
        """Precision is what holds at the model's forward, once."""
        if self.autocast is None and self._index < 3:
            self.autocast = describe.autocast_dtype(self.device_type)

    def saw_backward(self) -> None:
        """Gradients have been added to."""
        if self._part is not None:
            self._part.has_backward = True

    def saw_optimizer(self, optimizer: Any) -> None:
        """The step may end with this part."""
        self._stepped = True
        self._optimizer_steps += 1
        self._patient = True
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        now = time.monotonic()
        if self._optimizer_steps >= 2 and now >= self._holdings_at:
            self._holdings_at = now + _HOLDINGS_PERIOD_S
            self.guard.run("holdings", self._read_holdings)

    def saw_loader(self, iterator: Any) -> None:
        """A torch ``DataLoader`` feeds a loop that does not use :meth:`steps`."""
        if self.loader is None:
            self.loader = getattr(iterator, "_loader", None) or iterator

    # Inside.

    def _target(self) -> Session:
        return self if self._outer is None else self._outer._target()

    def _is_alive(self) -> bool:
        return self._state in ("open", "recording") and os.getpid() == self._process

    def _open_events(self) -> EventPool | None:
        return None if self.device_type == "cpu" else EventPool.of_device(self.device_type)

    def _start(self) -> None:
        self.rank, self.world_size, self.local_rank = describe.place()
        max_bytes = self._arguments["max_bytes"]
        try:
            self._writer = RankWriter(self.path, self.rank, self.world_size, max_bytes=max_bytes)
        except OSError as error:
            logger.warning("%s cannot be written (%s): this run is not recorded", self.path, error)
            self._hooks.remove()
            raise
        self.exposes_backward = self._pool is not None and self.world_size > 1
        self.source = self.guard.run("collectives", describe.open_source, self.guard.note)
        if self.source is not None:
            self.guard.run("collectives", self.source.start)
        if self._arguments["flops"]:
            self._flops = self.guard.run("flops", describe.open_flops, self.guard.note)
        if self._arguments["windows"] is not None:
            self._windows = self.guard.run("windows", describe.open_windows, self, self._arguments["windows"])
        on_device = None if self.device_type == "cpu" else self.device_type
        self._memory = self.guard.run("memory", MemoryReader, on_device, self.device_index)
        self._witness = describe.witness_of(self.models, self.optimizers)
        self.background = Background(
            self._writer, self.source, self._pool, self.anchor, self.guard, lambda: describe.description(self)
        )
        self.facts |= self.guard.run("facts", describe.facts_at_start, self) or {}
        self.guard.run("description", describe.write_run, self, self._writer)
        self.background.start()

    def _before_step(self) -> None:
        if self._windows is not None:
            self.guard.run("windows", self._windows.before_step, self._index)
        if self._flops is not None:
            self.guard.run("flops", self._flops.begin_step, self._index)

    def _after_step(self, part: Part | None) -> None:
        if self._flops is not None:
            counted = self.guard.run("flops", self._flops.end_step, self._index)
            if counted:
                self.facts["flops"] = {**self.facts.get("flops", {}), **counted}
                if part is not None:
                    part.flops = float(counted["counted"])
        if self._windows is not None:
            self.guard.run("windows", self._windows.after_step, self._index, self._step_ns)
        if self._index in describe.FACTS_AFTER_STEPS:
            self.facts |= self.guard.run("facts", describe.facts_in_training, self) or {}

    def _count_tokens(self, part: Part) -> None:
        """Tokens of a whole step, for the FLOPs by convention."""
        if part.tokens is not None:
            self._step_tokens += part.tokens
        if part.complete:
            self.tokens_per_step = self._step_tokens or self.tokens_per_step
            self._step_tokens = 0

    def _is_complete(self, part: Part) -> bool:
        if self._engine:
            return self._engine_ended
        if self._stepped:
            return True
        if not part.has_backward:
            # Nothing accumulated: a batch is a step, unless gradients of batches before wait for the optimizer.
            return self._pending == 0
        if self._witness is not None and self._witness._version != self._witness_version:
            return True  # the parameters changed in place: an update that no hook of torch.optim sees
        known = self._optimizer_steps > 0 or bool(self.optimizers)
        if self._patient and self._pending + 1 < (_PATIENCE_KNOWN if known else _PATIENCE_UNKNOWN):
            return False
        self.guard.note(
            "steps-guessed",
            "warning",
            f"no optimizer step was seen in {self._pending + 1} batches: from step {self._index + 1} on each batch counts "
            "as a step; say steps(loader, accumulate=…) to tell",
        )
        self._patient = False
        return True

    def _log(self, loss: Any, tokens: int | None, samples: int | None, metrics: dict[str, Any]) -> None:
        part = self._part
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

    def _read_memory(self, memory: MemoryReader, time_ns: int) -> None:
        for metric, value in self.guard.run("memory", memory.read) or ():
            self._sample(time_ns, metric, value)

    def _read_holdings(self) -> None:
        now = time.perf_counter_ns()
        self.held = describe.holdings(self.models, self.optimizers)
        for metric, value in self.held.items():
            self._sample(now, metric, float(value))

    def _on_event(self, kind: str, values: dict[str, Any]) -> None:
        """What an engine says of its own steps; they count, whoever feeds it."""
        if self._state not in ("open", "recording") or os.getpid() != self._process:
            return
        if kind == "step_begin":
            self._engine = True
            self._engine_begins(values.get("index"))
        elif kind == "step_end":
            self._engine = True
            self.log(**{name: values.get(name) for name in ("loss", "tokens", "samples")})
            if self.watches_loaders:
                self.guard.run("steps", self.end_part, True)
                self.guard.run("steps", self.begin_part)
            else:
                self._engine_ended = True
        elif kind == "phase":
            name = values.get("name")
            self.marker.base(PHASES.index(name) if name in PHASES else OTHER)
        elif kind == "metric":
            self.log(**{str(values["name"]): values.get("value")})

    def _engine_begins(self, index: int | None) -> None:
        if index is not None and self._pending == 0:
            self._index = index
        if self._part is None:
            if self.watches_loaders:
                self.guard.run("steps", self.begin_part)
        elif self._part.index != self._index:
            self._part.index = self._index
            if self.background is not None:
                start, _ = self.background.boundaries.pop()
                self.background.boundaries.append((start, self._index))

    def _close(self, state: str, error: BaseException | None) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
        if self._part is not None:
            if self._stepped:
                self.end_part(True)
            else:
                self.close_step()
        self._hooks.remove()
        for name, collector in (("windows", self._windows), ("collectives", self.source)):
            if collector is not None:
                self.guard.run(name, getattr(collector, "close", None) or getattr(collector, "stop", None))  # type: ignore[arg-type]
        self._state = "closed"
        if self.background is None:
            self.guard.run("end", describe.warn_without_steps, self)
            return
        self.facts |= self.guard.run("facts", describe.facts_in_training, self) or {}
        final = {"state": state, "ended_ns": time.time_ns(), "error": describe.error_line(error)}
        if not self.background.finish(final):
            logger.warning("%s took too long to write the last steps; they may be missing", self.path)
        if self._memory is not None:
            self._memory.close()
