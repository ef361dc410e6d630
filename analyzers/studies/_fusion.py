"""Small kernels, and chains of memory-bound kernels that one kernel could do.

A chain is a run of elementwise, normalisation and copy kernels on one stream with nothing else between.
Its kernels hand results to each other through memory. Fused, a result that only the next one needs stays
in registers:

    unfused   read a │ write t │ read t, b │ write u │ read u │ write c
    fused     read a │         │       b   │         │        │ write c

For every pair of neighbours whose element counts match (what one writes, the next reads):

* **high**: the write and the read are saved, in proportion to their bytes;
* **low**: the read alone, since training often keeps the result for the backward pass;
* **mid**: halfway.

Where shapes are unknown, a chain of n kernels that move alike would take the time of one: high is that,
mid half, low a quarter. What a launch costs the host is not counted here: only a host-bound run would gain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SMALL_NS", "Chains", "SmallKernels", "find_chains", "small_kernels"]

Array = npt.NDArray[Any]

#: A kernel shorter than this takes about as long as its launch: 2 to 10 µs on the host, 1 to 3 µs on the device.
SMALL_NS = 10_000
#: Idle time between two kernels of a stream up to here counts as theirs; longer gaps have other causes.
GAP_NS = 50_000
#: Of what fusing kernels of unknown shapes could save at most (all but one of them): low, mid, high.
UNKNOWN_SAVED = (0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class SmallKernels:
    """Kernels shorter than :data:`SMALL_NS`. ``gap_ns`` is idle time of their stream right before them."""

    calls: int
    total_ns: int
    gap_ns: int
    all_calls: int
    all_ns: int


@dataclass(frozen=True, slots=True)
class Chains:
    """Chains of at least two kernels. Columns of shape (chains,): ``first`` and ``last`` are positions in the units
    given, ``kernels`` counts, ``ns`` is their time, ``saved`` (chains, 3) low, mid and high; ``known_ns`` is the
    part of the time for which shapes were known."""

    first: Array
    last: Array
    kernels: Array
    ns: Array
    saved: Array
    known_ns: Array


def small_kernels(stream: Array, start: Array, end: Array) -> SmallKernels:
    """Of kernels in order of stream and start, those that are small. All shapes (n,), times in ns."""
    ns = end - start
    small = ns < SMALL_NS
    gap = np.zeros(len(ns), dtype=np.int64)
    if len(ns) > 1:
        before = np.where(stream[1:] == stream[:-1], start[1:] - end[:-1], 0)
        gap[1:] = np.where((before > 0) & (before <= GAP_NS), before, 0)
    return SmallKernels(int(small.sum()), int(ns[small].sum()), int(gap[small].sum()), len(ns), int(ns.sum()))


def find_chains(
    stream: Array,
    fusible: Array,
    kernels: Array,
    ns: Array,
    outputs: Array,
    inputs: Array,
    read_share: Array,
    first_read_share: Array,
) -> Chains:
    """Chains among units (an operator's kernels) in order of stream and start.

    ``stream``, ``fusible`` (bool), ``kernels`` and ``ns`` have shape (n,), and so have ``outputs`` (elements
    written, -1 unknown) and the shares of a unit's bytes that are read, at all and of its largest input (NaN
    unknown); ``inputs`` has shape (n, inputs): elements of each, -1 for none.
    """
    empty = np.zeros(0, dtype=np.int64)
    if not fusible.any():
        return Chains(empty, empty, empty, empty, np.zeros((0, 3)), empty)
    begins = fusible.copy()
    begins[1:] &= ~(fusible[:-1] & (stream[1:] == stream[:-1]))
    positions = np.flatnonzero(fusible)
    group = np.cumsum(begins)[positions] - 1
    first = np.flatnonzero(begins)
    last = positions[np.flatnonzero(np.diff(np.append(group, group[-1] + 1)))]
    saved, known = _saved(positions, group, len(first), ns, outputs, inputs, read_share, first_read_share)
    count = np.bincount(group, kernels[positions], len(first)).astype(np.int64)
    total = _summed(group, ns[positions], len(first))
    longest = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(longest, group, ns[positions])
    # Of what has no shapes, all but the longest kernel at most, in proportion to its share of the chain.
    share = 1 - known / np.maximum(total, 1)
    saved += ((total - longest) * share)[:, None] * np.array(UNKNOWN_SAVED)
    kept = (count >= 2) & (last > first)
    return Chains(first[kept], last[kept], count[kept], total[kept], saved[kept], known[kept])


def _saved(
    positions: Array,
    group: Array,
    chains: int,
    ns: Array,
    outputs: Array,
    inputs: Array,
    read_share: Array,
    first_read_share: Array,
) -> tuple[Array, Array]:
    """(chains, 3) savings between neighbours of known shapes, and (chains,) the time of units whose shapes are known."""
    known = np.isfinite(read_share)
    of_known = _summed(group, np.where(known, ns, 0)[positions], chains)
    left, right = positions[:-1], positions[1:]
    together = (group[1:] == group[:-1]) & known[left] & known[right]
    matches = together & (outputs[left] > 1) & (inputs[right] == outputs[left][:, None]).any(axis=1)
    left, right, owner = left[matches], right[matches], group[1:][matches]
    written = ns[left] * (1 - read_share[left])
    read = ns[right] * first_read_share[right]
    saved = np.zeros((chains, 3))
    for column, amount in enumerate((read, read + written / 2, read + written)):
        saved[:, column] = np.bincount(owner, amount, chains)
    return saved, of_known


def _summed(group: Array, amount: Array, groups: int) -> Array:
    # Doubles hold a trace's nanoseconds exactly (104 days).
    return np.bincount(group, amount, groups).astype(np.int64)
