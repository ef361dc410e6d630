"""The critical path: back from the last thing to end, each time to what it had to wait for.

Pieces follow each other without a gap, so they sum to the window to the nanosecond. A piece of work is
followed back to whichever ended last of the work before it on its stream, the work on another stream that
it waits for, and its launch; from a launch the path runs along the host, back to the last blocking call
that had to wait, and there it enters the device again.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import DEVICE_KINDS

from ._path_graph import NEVER, Graph, gaps_of
from ._path_terms import GAP, LAUNCH, LONGEST_GAP_NS, UNEXPLAINED

__all__ = ["Pieces", "Walker"]

Array = npt.NDArray[Any]

_COMMUNICATION = DEVICE_KINDS.index("communication")

_BEFORE, _LAUNCHED, _DEPENDENCY, _NOTHING = range(4)


@dataclass(slots=True)
class Pieces:
    """A path, from its end to its begin. ``runs`` are stretches of work (first, last, end); ``spans`` are
    (start, end, category) and ``host`` (start, end) of host time; ``syncs`` (start, end, wait)."""

    runs: list[tuple[int, int, int]]
    spans: list[tuple[int, int, int]]
    host: list[tuple[int, int]]
    syncs: list[tuple[int, int, int]]
    stopped_at: int = -1  # the work at whose end the path was left, -1 when it reached the window's begin
    begin_ns: int = 0


class Walker:
    """Walks a graph; what every walk needs is worked out once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        count = len(graph)
        launch = np.where(graph.launch > NEVER, graph.launch + graph.delay, NEVER)
        # As in the replay: a launch decides only where it came after the machine's own gap.
        before = graph.before_end() + gaps_of(graph)[0]
        other = np.where(graph.dependency >= 0, graph.end[np.maximum(graph.dependency, 0)], NEVER)
        first = graph.first_in_lane()
        bound = np.where(other >= before, _DEPENDENCY, _BEFORE)
        bound = np.where(first & (other == NEVER), _NOTHING, bound)
        latest = np.where(first, other, np.maximum(before, other))
        # A launch after everything else had ended, however quickly the work then began.
        bound = np.where((launch > NEVER) & (launch >= latest), _LAUNCHED, bound)
        self.bound = bound.tolist()
        index = np.arange(count)
        self.run_first = np.maximum.accumulate(np.where(bound != _BEFORE, index, 0)).tolist() if count else []
        exchange = (
            np.maximum.accumulate(np.where(graph.kind == _COMMUNICATION, index, -1)) if count else index
        )
        self.exchange = exchange.tolist()
        self.start, self.end = graph.start.tolist(), graph.end.tolist()
        self.launch, self.dependency = graph.launch.tolist(), graph.dependency.tolist()
        self.ready = np.maximum(launch, latest).tolist()
        self._index_waits()

    def _index_waits(self) -> None:
        waits, graph = self.graph.waits, self.graph
        ended = graph.end[np.maximum(waits.work, 0)] if len(graph) else waits.end
        binding = np.flatnonzero((waits.work >= 0) & (ended > waits.start) & (ended > graph.begin_ns))
        self.waits = binding.tolist()
        self.returns = waits.end[binding].tolist()
        self.awaited = waits.work[binding].tolist()

    def whole(self) -> Pieces:
        """The path of the whole window."""
        graph = self.graph
        if not len(graph) or graph.host_end_ns >= int(graph.end.max()):
            return self._walk(graph.host_end_ns, None, None)
        last = int(graph.end.argmax())
        return self._walk(self.end[last], last, None)

    def before(self, work: int) -> Pieces:
        """What held up the start of ``work``, back to the communication before it or to the window's begin."""
        return self._walk(self.start[work], work, work)

    def from_end(self) -> Pieces:
        """As :meth:`before`, from the window's end."""
        graph = self.graph
        if not len(graph) or graph.host_end_ns >= int(graph.end.max()):
            return self._walk(graph.host_end_ns, None, -1)
        last = int(graph.end.argmax())
        return self._walk(self.end[last], last, -1)

    def _walk(self, time: int, work: int | None, stop: int | None) -> Pieces:
        """From ``time`` back. ``stop``: None walks to the window's begin; else the walk ends where it meets
        communication other than ``stop`` itself, whose own duration is then left out."""
        found = Pieces([], [], [], [], begin_ns=self.graph.begin_ns)
        begin = self.graph.begin_ns
        while time > begin:
            if work is None:
                time, work = self._along_host(found, time)
                if work is None:
                    break
                continue
            first = self.run_first[work]
            if stop is not None:
                exchange = self.exchange[work]
                if work == stop:
                    exchange = -1 if first == work else self.exchange[work - 1]
                    own = True
                else:
                    own = False
                if exchange >= first:
                    low = exchange + 1
                    high = work - 1 if own else work
                    if high >= low:
                        found.runs.append((low, high, time))
                        time = self.start[low]
                    gap = time - min(self.end[exchange], time)
                    if gap:
                        self._rest(found, time - gap, time, GAP)
                    found.stopped_at = exchange
                    return found
                if own:
                    if first < work:
                        found.runs.append((first, work - 1, time))
                else:
                    found.runs.append((first, work, time))
            else:
                found.runs.append((first, work, time))
            time, work = self._enter(found, first)
        return found

    def _enter(self, found: Pieces, work: int) -> tuple[int, int | None]:
        """From the start of ``work`` to what it waited for."""
        start, bound, ready = self.start[work], self.bound[work], min(self.ready[work], self.start[work])
        begin = self.graph.begin_ns
        if bound == _LAUNCHED:
            launch = max(self.launch[work], begin)
            ready = max(ready, launch)
            self._rest(found, ready, start, LAUNCH)
            if ready - launch > self.graph.delay_ns:
                found.host.append((launch, ready))  # a blocking copy: the call itself is at work
            elif ready > launch:
                found.spans.append((launch, ready, LAUNCH))
            return launch, None
        if bound == _DEPENDENCY:
            source = self.dependency[work]
            end = min(self.end[source], start)
            self._rest(found, end, start, GAP)
            return end, source
        self._rest(found, begin, start, UNEXPLAINED)
        return begin, None

    def _rest(self, found: Pieces, start: int, end: int, category: int) -> None:
        if end > start:
            found.spans.append((start, end, category if end - start <= LONGEST_GAP_NS else UNEXPLAINED))

    def _along_host(self, found: Pieces, time: int) -> tuple[int, int | None]:
        """From a moment of the host back to the last call that had to wait, and the work it waited for."""
        begin = self.graph.begin_ns
        place = bisect_right(self.returns, time) - 1
        if place < 0:
            found.host.append((begin, time))
            return begin, None
        back, work = self.returns[place], self.awaited[place]
        ended = min(self.end[work], back)
        if back < time:
            found.host.append((back, time))
        if ended < back:
            found.syncs.append((ended, back, self.waits[place]))
        return ended, work
