"""One clock for the record: Unix nanoseconds that never jump, from the monotonic clock anchored once."""

from __future__ import annotations

import time

__all__ = ["Anchor"]


class Anchor:
    """``unix_ns = perf_counter_ns + offset_ns``, taken at the start.

    NTP may slew the wall clock afterwards; durations do not care, and ranks' clocks are compared by their collectives.
    """

    def __init__(self) -> None:
        # Of a few readings the tightest: an interrupt between the two clocks would shift every time of the run.
        best = None
        for _ in range(16):
            before = time.perf_counter_ns()
            unix = time.time_ns()
            after = time.perf_counter_ns()
            if best is None or after - before < best[0]:
                best = (after - before, unix - (before + after) // 2)
        assert best is not None
        self.uncertainty_ns, self.offset_ns = best
