"""``communication.bucket_mib = "auto"``: from the times at which gradients are ready, measured in the first steps.

Each parameter's gradient is timed as autograd accumulates it (CPU: the clock; CUDA: an event on the backward's stream),
in three steps after a warm-up. Then all ranks agree on the times, walk through the buckets that each size would
give (:mod:`trine.optim.runtime.buckets`), and wrap the model anew when another size promises to hide more. Nothing is
waited for until then; the one decision reads the events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from trine.optim.runtime.buckets import LEAST_CAP_BYTES, Gradient, Prediction, best_cap, predict
from trine.optim.runtime.replicas import wrap_anew
from trine.optim.techniques._assembly import Assembly, Effect

__all__ = ["BucketTuning"]

#: Steps that are not looked at: compilation, allocation, and DDP's own rebuilding of its buckets.
WARM_UP_STEPS = 2
MEASURED_STEPS = 3
#: What exposed time a new size must save, at least, for the model to be wrapped anew.
LEAST_GAIN = 0.05

_KEY = "communication.bucket_mib"
_MIB = 2**20


class BucketTuning:
    """Measures, decides once, and is done. Made and called on every rank alike."""

    def __init__(
        self,
        assembly: Assembly,
        cap_bytes: int,
        seconds: Callable[[float], float],
        told: str,
        least_bytes: int = LEAST_CAP_BYTES,
        first_cap_bytes: int | None = None,
    ) -> None:
        """``cap_bytes`` is what DDP has now, ``seconds`` the all-reduce's time by size, ``told`` where it comes from."""
        self._assembly = assembly
        self._cap_bytes = cap_bytes
        self._seconds = seconds
        self._told = told
        self._least_bytes = least_bytes
        self._first_cap_bytes = first_cap_bytes
        self._parameters: list[torch.nn.Parameter] = []
        self._steps = 0
        self._marks: dict[int, Any] = {}  # parameter's place → time or event, of the step that runs
        self._measured: list[dict[int, Any]] = []
        self._hooks: list[Any] = []
        self.chosen: Prediction | None = None
        assembly.closers.append(self._stop_listening)

    @property
    def cap_bytes(self) -> int:
        """What DDP has now."""
        return self._cap_bytes

    def after_step(self) -> None:
        """Listen, stop listening, or decide, by the number of steps that have ended."""
        if self.chosen is not None:
            return
        self._steps += 1
        if self._steps == WARM_UP_STEPS:
            self._listen()
        elif self._hooks:
            if self._marks and len(self._measured) < MEASURED_STEPS:
                self._measured.append(self._marks)
            self._marks = {}
            # In a loop of the user's own a step may end between two micro-batches: not while gradients are pending.
            if len(self._measured) == MEASURED_STEPS and all(p.grad is None for p in self._parameters):
                self._decide()

    def _listen(self) -> None:
        # Only now: techniques that come after this one may have replaced parameters.
        self._parameters = [p for p in self._assembly.model.parameters() if p.requires_grad]
        on_device = self._assembly.facts.device_type == "cuda"

        def hook_of(place: int) -> Callable[[torch.Tensor], None]:
            def mark(parameter: torch.Tensor) -> None:
                if on_device:
                    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                    event.record()
                    self._marks[place] = event
                else:
                    self._marks[place] = time.perf_counter()

            return mark

        for place, parameter in enumerate(self._parameters):
            added = parameter.register_post_accumulate_grad_hook(hook_of(place))  # type: ignore[no-untyped-call]
            self._hooks.append(added)

    def _stop_listening(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _decide(self) -> None:
        self._stop_listening()
        gradients = self._agreed()
        first = self._first_cap_bytes
        now = predict(gradients, self._cap_bytes, self._seconds, first)
        best = best_cap(gradients, self._seconds, self._least_bytes, first)
        better = best.exposed_s < (1 - LEAST_GAIN) * now.exposed_s and best.buckets != now.buckets
        self.chosen = best if better else now
        if better:
            self._wrap(best.cap_bytes)
        backward_s = max((gradient.ready_s for gradient in gradients), default=0.0)
        self._assembly.effects.append(
            Effect(
                _KEY,
                f"{now.cap_bytes / _MIB:.3g}",
                f"{self.chosen.cap_bytes / _MIB:.3g}",
                f"{_buckets(now.buckets)} would leave {now.exposed_s * 1e3:.3g} ms exposed, {_buckets(best.buckets)} "
                f"{best.exposed_s * 1e3:.3g} ms: gradients ready over {backward_s * 1e3:.3g} ms, {self._told}",
            )
        )

    def _agreed(self) -> list[Gradient]:
        """The median of the steps' times, averaged over ranks; a gradient that a rank did not have counts as its last one."""
        rows = []
        for marks in self._measured:
            times = _times(marks)
            last = max(times.values())
            rows.append([times.get(place, last) for place in range(len(self._parameters))])
        mean = (
            torch.tensor(rows, dtype=torch.float64, device=self._assembly.facts.device).median(dim=0).values
        )
        distributed.all_reduce(mean)
        seconds = (mean / self._assembly.facts.ranks).tolist()
        return [
            Gradient(ready, p.numel() * p.element_size())
            for ready, p in zip(seconds, self._parameters, strict=True)
        ]

    def _wrap(self, cap_bytes: int) -> None:
        assembly = self._assembly
        given = assembly.model
        assert isinstance(given, DistributedDataParallel)
        options: dict[str, Any] = {"bucket_cap_mb": cap_bytes / _MIB}
        if self._first_cap_bytes is not None:
            options["bucket_cap_mb_list"] = [self._first_cap_bytes / _MIB, cap_bytes / _MIB]
        assembly.model = wrap_anew(given, options, successor=lambda: assembly.model)
        self._cap_bytes = cap_bytes


def _times(marks: dict[int, Any]) -> dict[int, float]:
    """Seconds after the first gradient of the step."""
    if all(isinstance(mark, float) for mark in marks.values()):
        first = min(marks.values())
        return {place: mark - first for place, mark in marks.items()}
    for event in marks.values():
        event.synchronize()
    start = next(iter(marks.values()))  # recorded first, as dictionaries keep their order
    return {place: start.elapsed_time(event) / 1e3 for place, event in marks.items()}


def _buckets(count: int) -> str:
    return "1 bucket" if count == 1 else f"{count} buckets"
