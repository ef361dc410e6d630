"""The collectors of a session beside its phases: collectives, FLOPs, deep windows, memory. Each can fail alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .collectives import open_source
from .flops import FlopCounter
from .guard import Guard
from .memory import MemoryReader, bytes_of_gradients, bytes_of_optimizer, bytes_of_tensors
from .protocols import CollectiveSource, DeepWindowing, FlopCounting

__all__ = ["Collectors", "parameters_of"]

#: What parameters, gradients and optimizer hold is read at the second optimizer step, then this often.
_HOLDINGS_PERIOD_S = 60.0

Sample = Callable[[int, str, float], None]


class Collectors:
    """Starts, drives and stops the collectors, each under the guard."""

    def __init__(self, guard: Guard, sample: Sample) -> None:
        self._guard = guard
        self._sample = sample
        self.source: CollectiveSource | None = None
        self._windows: DeepWindowing | None = None
        self._flops: FlopCounting | None = None
        self._memory: MemoryReader | None = None
        self._holdings_at = 0.0
        #: The last reading of what parameters, gradients and optimizer hold, in bytes.
        self.held: dict[str, int] = {}

    def start(
        self,
        *,
        folder: Path,
        place: tuple[int, int, int],
        windows: Any,
        flops: bool,
        device: tuple[str, int],
    ) -> None:
        """Start all. ``place``: rank, world size, local rank; ``device``: type and index."""
        run = self._guard.run
        self.source = run("collectives", open_source, self._guard.note)
        if self.source is not None:
            run("collectives", self.source.start)
        if flops:
            self._flops = run("flops", FlopCounter, self._guard.note)
        if windows is not None:
            self._windows = run("windows", self._open_windows, folder, place, windows)
        on_device = None if device[0] == "cpu" else device[0]
        self._memory = run("memory", MemoryReader, on_device, device[1])

    def _open_windows(self, folder: Path, place: tuple[int, int, int], windows: Any) -> DeepWindowing:
        from .windows import DeepWindows

        return DeepWindows(folder, *place, windows, self._guard.note)

    def before_step(self, index: int) -> None:
        """Just before the step's clock starts."""
        if self._windows is not None:
            self._guard.run("windows", self._windows.before_step, index)
        if self._flops is not None:
            self._guard.run("flops", self._flops.begin_step, index)

    def after_step(self, index: int, duration_ns: int) -> Mapping[str, float] | None:
        """Just after the step's clock stopped; the FLOPs of the step when it was counted."""
        counted = None
        if self._flops is not None:
            counted = self._guard.run("flops", self._flops.end_step, index)
        if self._windows is not None:
            self._guard.run("windows", self._windows.after_step, index, duration_ns)
        return counted

    def abandon_step(self) -> None:
        """The step that was begun will not be: what follows until the next one begins belongs to nobody."""
        if self._flops is not None:
            self._guard.run("flops", self._flops.close)

    def read_memory(self, time_ns: int) -> None:
        """Memory as it is now, when a reading is due."""
        if self._memory is not None:
            for metric, value in self._guard.run("memory", self._memory.read) or ():
                self._sample(time_ns, metric, value)

    def read_holdings(self, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        """What parameters, gradients and optimizer hold, now and then. The best moment: an optimizer has just stepped."""
        now = time.monotonic()
        if now >= self._holdings_at:
            self._holdings_at = now + _HOLDINGS_PERIOD_S
            self._guard.run("holdings", self._read_holdings, models, optimizers)

    def _read_holdings(self, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        parameters = parameters_of(models, optimizers)
        copies = _copies_of(parameters, optimizers)
        state = sum(bytes_of_optimizer(optimizer) for optimizer in optimizers)
        self.held = {
            "memory/parameters_bytes": bytes_of_tensors(parameters),
            "memory/gradients_bytes": bytes_of_gradients([*parameters, *copies]),
            "memory/optimizer_bytes": state + bytes_of_tensors(copies),
        }
        now = time.perf_counter_ns()
        for metric, value in self.held.items():
            self._sample(now, metric, float(value))

    def stop(self) -> None:
        """Stop observing; what was observed stays to be drained."""
        if self._flops is not None:
            self._guard.run("flops", self._flops.close)
        if self._windows is not None:
            self._guard.run("windows", self._windows.close)
        if self.source is not None:
            self._guard.run("collectives", self.source.stop)
        if self._memory is not None:
            self._guard.run("memory", self._memory.close)
            self._memory = None


def _copies_of(parameters: Sequence[Any], optimizers: Sequence[Any]) -> list[Any]:
    """What the optimizers hold that is no parameter nor lies in one: master weights, which are state of the optimizer."""
    known = {_address(parameter) for parameter in parameters}
    return [held for held in parameters_of((), optimizers) if _address(held) not in known]


def _address(tensor: Any) -> int:
    """Of the storage, of a DTensor its own shard's."""
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())


def parameters_of(models: Sequence[Any], optimizers: Sequence[Any]) -> list[Any]:
    """The models' parameters, or the optimizers' where no model was given; each once."""
    found = [parameter for model in models for parameter in model.parameters()]
    if not found:
        groups = (group for o in optimizers for group in getattr(o, "param_groups", ()))
        found = [parameter for group in groups for parameter in group["params"]]
    return list({id(parameter): parameter for parameter in found}.values())
