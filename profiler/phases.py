"""From marks to phases: pure functions that partition a step exactly.

A mark is (phase that begins, host time, stamp); a part ends with a mark of ``END``. On a host the stamp is the
training thread's CPU time, on a device a timed event.

* forward reaches from the model's first forward to the start of backward, so the loss belongs to it. Where no
  forward was seen (a compiled or functional model), it reaches from the batch to backward.
* a forward without gradients is *evaluation*: forward where the step has no backward, other where it trains.
* backward is all of ``torch.autograd.backward``: recomputation in it stays backward; an optimizer in it does not.
* copy, on a device, reaches from a batch that arrived in host memory to the model's forward.
* exposed communication, on a host, is in each phase the smaller of two: for how long any collective ran, and for how long
  the training thread was not running (its wall time less its CPU time): what is both is waiting for a collective.
  On a device it is the device's wait between the end of backward's own work and the end of backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from trine.record.model import PHASES

__all__ = [
    "BACKWARD",
    "COPY",
    "DATA",
    "END",
    "EVALUATION",
    "EXPOSED",
    "FORWARD",
    "INSIDE",
    "OPTIMIZER",
    "OTHER",
    "Spans",
    "classify",
    "partition",
]

DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, EXPOSED, OTHER = range(len(PHASES))
EVALUATION = len(PHASES)
END = EVALUATION + 1

#: INSIDE[current][entered]: what a phase entered inside another counts as.
INSIDE: list[list[int]] = [list(range(END)) for _ in range(END)]
INSIDE[DATA] = [DATA] * END
for _entered in (DATA, FORWARD, EVALUATION, COPY):
    INSIDE[BACKWARD][_entered] = BACKWARD
for _entered in (DATA, EVALUATION):
    INSIDE[FORWARD][_entered] = FORWARD
INSIDE[EVALUATION][DATA] = EVALUATION
INSIDE[OPTIMIZER][DATA] = OPTIMIZER

#: Phases in which a training thread that does not run may be waiting for a collective.
_MAY_WAIT = frozenset({FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION})


class Spans:
    """The union of spans of time, for asking how much of another span they cover. Nanoseconds."""

    def __init__(self, starts: Sequence[int] = (), ends: Sequence[int] = ()) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        for start, end in sorted(zip(starts, ends, strict=True)):
            if end <= start:
                continue
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.starts.append(start)
                self.ends.append(end)

    def covered(self, start: int, end: int) -> int:
        """Nanoseconds of [start, end) that the union covers."""
        total = 0
        row = bisect_left(self.ends, start)
        while row < len(self.starts) and self.starts[row] < end:
            total += max(0, min(end, self.ends[row]) - max(start, self.starts[row]))
            row += 1
        return total


def classify(codes: Sequence[int], *, has_backward: bool, host_batch: bool) -> list[int]:
    """Phase of each segment, by the rules above. ``codes``: the marks' phases without the END."""
    result = list(codes)
    saw_forward = FORWARD in result
    for row, code in enumerate(codes):
        following = codes[row + 1] if row + 1 < len(codes) else END
        previous = codes[row - 1] if row else END
        if code == OTHER and following == BACKWARD and (previous == FORWARD or not saw_forward):
            result[row] = FORWARD
        elif code == OTHER and host_batch and previous == DATA and following == FORWARD:
            result[row] = COPY
        elif code == EVALUATION:
            result[row] = OTHER if has_backward else FORWARD
    return result


def partition(
    codes: Sequence[int], times: Sequence[int], busy: Sequence[int] | None, spans: Spans
) -> list[int]:
    """Nanoseconds of each phase, in the order of ``PHASES``; they sum to ``times[-1] - times[0]``.

    ``codes``: n classified segments; ``times``: n + 1 ascending boundaries; ``busy``: n CPU times of the training thread,
    or ``None`` where exposure is measured otherwise; ``spans``: when collectives ran.
    """
    totals = [0] * len(PHASES)
    for row, code in enumerate(codes):
        wall = times[row + 1] - times[row]
        if busy is not None and code in _MAY_WAIT and spans.starts:
            blocked = wall - busy[row]
            if blocked > 0:
                exposed = min(blocked, spans.covered(times[row], times[row + 1]))
                totals[EXPOSED] += exposed
                wall -= exposed
        totals[OTHER if code >= len(PHASES) else code] += wall
    return totals


def segments(marks: Sequence[Any]) -> tuple[list[int], list[int], list[Any]]:
    """Codes, host times and stamps of flat marks; the last is the END."""
    return list(marks[0::3]), list(marks[1::3]), list(marks[2::3])
