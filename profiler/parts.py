"""Parts: a step, or one batch of a step whose gradients accumulate, opened and closed in the training thread.

:class:`Parts` is the half of a session that follows the loop; :mod:`trine.profiler.session` is the half that users meet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from . import describe
from .background import MOST_WAITING, Background, Part
from .batches import measure_batch
from .clocks import Anchor
from .collectors import Collectors
from .guard import Guard
from .losses import LossReader
from .marks import Marker
from .padding import SequenceLengths
from .progress import Progress
from .regions import Regions

__all__ = ["Parts", "Size"]

Size = int | Callable[[Any], int] | None


class Parts:
    """Opens and closes parts, and decides where steps end."""

    def __init__(
        self,
        path: Path,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        sizes: tuple[Size, Size],
        metadata: Mapping[str, Any],
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
        self.run_started_ns = describe.run_started_ns()
        self.progress = Progress()
        self.regions = Regions()
        self.padding = SequenceLengths()
        self.collectors = Collectors(self.guard, self._sample)
        self.background: Background | None = None
        # What describe.py reads.
        self.facts: dict[str, Any] = dict(metadata)
        self.groups: list[dict[str, Any]] = []
        self.loader: Any = None
        self.sequence: int | None = None
        self.autocast: str | None = None
        self.tokens_per_step: int | None = None
        self.rank, self.world_size, self.local_rank = 0, 1, 0
        #: Type and index of the device that trains; known at the first step.
        self.device = ("cpu", 0)
        self.marker = Marker()
        self.part: Part | None = None
        self.last_part: Part | None = None
        self._losses = LossReader()
        self._sizes = sizes
        self._state: Literal["new", "open", "recording", "off", "closed"] = "new"
        self._process = os.getpid()
        self._step_ns = 0
        self._step_tokens = 0
        self._witness: Any = None
        self._witness_version = 0

    def is_alive(self) -> bool:
        """Whether steps can still be recorded, in this process."""
        return self._state in ("open", "recording") and os.getpid() == self._process

    def _start(self) -> None:
        """Begin the recording: called at the first part. Sets ``background`` when there is one."""
        raise NotImplementedError

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
        """No batch follows: the open part is forgotten, and a step that only accumulated is over, unfinished."""
        if self.part is not None:
            self.part = None
            self.marker.end()
            self.collectors.abandon_step()
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
        if part.tokens is None:
            part.tokens = tokens
            part.padding = self.guard.run("padding", self.padding.take, batch, tokens)
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
        began = time.perf_counter_ns()
        self.collectors.before_step(self.progress.index)
        self.regions.add_long("profiling", "deep window", began)

    def after_step(self, part: Part | None) -> None:
        """A step has ended, with ``part`` where that is known."""
        index = self.progress.index
        self.tokens_per_step = self._step_tokens or self.tokens_per_step
        began = time.perf_counter_ns()
        counted = self.collectors.after_step(index, self._step_ns)
        self.regions.add_long("profiling", "deep window", began)
        if counted:
            self.facts["flops"] = {**self.facts.get("flops", {}), **counted}
            if part is not None:
                part.flops = float(counted["counted"])
        if index in describe.FACTS_AFTER_STEPS:
            self.facts |= self.guard.run("facts", describe.facts_in_training, self) or {}
        elif index in describe.LENGTHS_AFTER_STEPS:
            self.facts |= self.guard.run("padding", describe.padding_facts, self) or {}

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
