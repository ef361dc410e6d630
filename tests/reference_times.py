"""What ``expected.json`` did to times, so that tests can hold exact tables against it.

The reference took ``round(float(ts) * 1000)``. A double keeps 53 bits: an absolute Unix time in
microseconds times 1000 lands on a grid of 256 ns, and even a time relative to a base may be off by
1 ns. ``megatron_tp8_a100`` holds whole microseconds only, yet its reference span is 595240.936 us where
the file says 595241. So Trine's exact values differ from the reference in the last digits, by less than the
grid at every edge. :func:`rounded_as_the_reference` puts a rank's exact times through the same rounding;
from there on every value must come out to the last digit.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np

from trine.record.model import Rank, Table

#: The most that one edge of an interval is off in the reference.
GRID_NS = 128


def rounded_as_the_reference(rank: Rank) -> Rank:
    """The same rank with device times as the reference read them; durations are exact in both."""
    assert rank.device is not None
    device = rank.device
    start = device["start_ns"]
    base = int(rank.metadata.get("base_time_ns", 0))  # the reference did not add it
    rounded = np.array(
        [round(float(Fraction(int(time) - base, 1000)) * 1000) for time in start], dtype=np.int64
    )
    columns = {**device.columns, "start_ns": rounded, "end_ns": rounded + (device["end_ns"] - start)}
    return replace(rank, device=Table("device", columns, device.strings))
