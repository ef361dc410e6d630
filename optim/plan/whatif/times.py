"""What operations take on the machine that was calibrated, between the sizes that were measured.

A prediction never takes a calibrated time as it is: it takes the *ratio* of two, times what the operator took on record,
so that what both have in common (caches, neighbours, the clock) cancels. How far it is in doubt, other calibrations say that
might have been measured (:attr:`OperationTimes.draws`), and how far the record's own operations lie about theirs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.optim.plan.whatif.operators import Product
from trine.record.errors import UsageError
from trine.record.hardware import Peaks, busy_while_measured, fit_latency_bandwidth

__all__ = ["Link", "OperationTimes"]

Array = npt.NDArray[np.float64]

#: Measured neighbours whose rates are averaged, by inverse squared distance of the logarithms of the sides.
NEIGHBOURS = 6
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
#: Calibrations that are drawn: of the deviation that they make, a fifth is chance.
DRAWN = 12
#: Of TernGrad: sums of more codes do not fit a byte.
MOST_TERNARY_RANKS = 127
#: Of a normal distribution a quartile lies so many standard deviations from the median.
_QUARTILE = 0.6745
#: Of the logarithm of a time, at most: 95 % of draws within half of it and twice. Repetitions that vary by more than that say
#: that the machine was busy, and no more of what an operation takes.
MOST_DEVIATION = math.log(2) / 1.96


class Link:
    """T(S) = α + S/β of one collective between ``ranks`` (Hockney, Parallel Computing 20, 1994)."""

    def __init__(self, alpha_s: float, bytes_per_s: float, ranks: int) -> None:
        self.alpha_s, self.bytes_per_s, self.ranks = alpha_s, bytes_per_s, ranks

    def seconds(self, size_bytes: float) -> float:
        """Of one call; bytes as nccl-tests counts them."""
        return self.alpha_s + size_bytes / self.bytes_per_s

    def among(self, ranks: int) -> Link:
        """The same hops in a ring of another number of ranks: (n − 1)·α' + (n − 1)/n·S/B (Patarasuk and Yuan, JPDC 69,
        2009), of which an all-reduce has both terms twice. One rank exchanges nothing."""
        if ranks == self.ranks or self.ranks < 2:
            return self
        if ranks < 2:
            return Link(0.0, math.inf, ranks)
        hops = (ranks - 1) / (self.ranks - 1)
        share = ((ranks - 1) / ranks) / ((self.ranks - 1) / self.ranks)
        return Link(self.alpha_s * hops, self.bytes_per_s / share, ranks)


class OperationTimes:
    """Times by operation, dtype and size, from the ``operations`` of a calibration (:class:`Peaks`).

    ``asked``: operations whose times were asked for; what asked for none is no surer with a better calibration.
    """

    def __init__(self, peaks: Peaks | None) -> None:
        self.source = None if peaks is None else peaks.source
        self._peaks = peaks
        self._products: dict[tuple[bool, str], tuple[Array, Array]] = {}
        self._memory: dict[tuple[str, str], tuple[Array, Array]] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._codecs: dict[str, tuple[float, float, int]] = {}
        self._units: dict[tuple[str, bool], list[tuple[int, float]]] = {}
        self.slowdown = 0.0  # seconds of computing lost a second of transfer beside it
        self.asked: set[str] = set()
        self._scatter: Mapping[str, float] = {}
        self._read([] if peaks is None else list(peaks.operations))

    def __bool__(self) -> bool:
        return bool(self._memory)

    def _read(self, rows: Sequence[Mapping[str, Any]]) -> None:
        products: dict[tuple[bool, str], list[tuple[list[int], float]]] = {}
        memory: dict[tuple[str, str], list[tuple[int, float]]] = {}
        links: dict[tuple[str, str], list[tuple[int, float, int]]] = {}
        for row in rows:
            operation = row["operation"]
            if operation == "product":
                batch, *sides = row["shape"]
                key = (batch > 1, row["dtype"])
                products.setdefault(key, []).append((sides, math.prod(row["shape"]) / row["seconds"]))
            elif operation in _COLLECTIVES:
                of_link = operation, row.get("dtype", "fp32")
                links.setdefault(of_link, []).append((row["bytes"], row["seconds"], row["ranks"]))
            elif operation == "overlap":
                self.slowdown = float(row["slowdown"])
            elif operation == "sharded_unit":
                key_of_unit = row["phase"], bool(row["again"])
                self._units.setdefault(key_of_unit, []).append((row["parameters"], row["seconds"]))
            elif operation == "codec":
                ratio, ranks = float(row["ratio"]), int(row.get("ranks", 2))
                self._codecs[row["dtype"]] = (row["seconds"] / row["bytes"], ratio, ranks)
            else:
                memory.setdefault((operation, row["dtype"]), []).append((row["shape"][0], row["seconds"]))
        for key, found in products.items():
            sides = np.log(np.array([each for each, _ in found], dtype=np.float64))
            self._products[key] = sides, np.log(np.array([rate for _, rate in found]))
        for name, sizes in memory.items():
            ordered = np.array(sorted(sizes), dtype=np.float64)
            self._memory[name] = np.log(ordered[:, 0]), np.log(ordered[:, 1])
        for of_link, calls in links.items():
            alpha, beta = fit_latency_bandwidth([call[0] for call in calls], [call[1] for call in calls])
            self._links[of_link] = Link(alpha, beta, calls[0][2])

    # --- how sure they are ---

    def watched(self) -> OperationTimes:
        """The same times, of which none was asked for yet."""
        found = copy.copy(self)
        found.asked = set()
        return found

    def scattered(self, scatter: Mapping[str, float]) -> OperationTimes:
        """The same times, of a record whose own operations lie so far about them (:mod:`.scatter`)."""
        found = OperationTimes(self._peaks)
        found._scatter = scatter
        return found

    @property
    def keeps_variation(self) -> bool:
        """Whether the calibration says how its repetitions varied; those of earlier releases do not."""
        return self._peaks is not None and any(map(_deviation, self._peaks.operations))

    @cached_property
    def draws(self) -> tuple[OperationTimes, ...]:
        """:data:`DRAWN` calibrations that might have been measured as well; none where nothing says how far they would be apart.

        Every operation's times in a dtype are moved together, each size by as much as its own repetitions varied: what
        disturbs one size disturbs its neighbours, and would not average out over a step's many sizes. By as much as one
        repetition varied, not as their median would: what makes two calibrations differ (clocks, caches, pages) is common
        to all repetitions of one, so that more of them do not average it out. And by as much as the record's own operations
        of the kind lie about their calibrated times. Of a collective each size is moved for itself: what is common to them
        all the record's own transfers tell.
        """
        rows = [] if self._peaks is None else list(self._peaks.operations)
        deviations = [self._deviation(row) for row in rows]
        if self._peaks is None or not any(deviations):
            return ()
        random = np.random.default_rng(0)
        kinds = [
            (
                row["operation"],
                *(row.get(name) for name in ("dtype", "phase", "again")),
                row["bytes"] if _is_transfer(row) else 0,
            )
            for row in rows
        ]
        found = []
        for _ in range(DRAWN):
            moved = {kind: float(random.standard_normal()) for kind in dict.fromkeys(kinds)}
            drawn = [
                {**row, "seconds": row["seconds"] * math.exp(deviation * moved[kind])} if deviation else row
                for row, kind, deviation in zip(rows, kinds, deviations, strict=True)
            ]
            found.append(OperationTimes(replace(self._peaks, operations=drawn)))
        return tuple(found)

    def _deviation(self, row: Mapping[str, Any]) -> float:
        """Of the logarithm of a row's time, by its repetitions and by the record's operations of its kind."""
        if "seconds" not in row:
            return 0.0
        kind = "product" if row["operation"] == "product" else "transfer" if _is_transfer(row) else "memory"
        return min(math.hypot(_deviation(row), self._scatter.get(kind, 0.0)), MOST_DEVIATION)

    # --- single operations ---

    def product(self, product: Product, dtype: str) -> float:
        """Seconds. Raises ``UsageError`` where this dtype was not calibrated."""
        self.asked.add("product")
        key = (product.batch > 1, dtype)
        if key not in self._products:
            key = (False, dtype)
        if key not in self._products:
            raise UsageError(self._missing(f"products in {dtype}"))
        sides, rates = self._products[key]
        here = np.log(np.maximum([product.rows, product.columns, product.inner], 1).astype(np.float64))
        return product.multiplications / math.exp(_between(here, sides, rates))

    def memory(self, work: str, elements: float, dtype: str) -> float:
        """Seconds of work on memory; below and above what was measured, as its ends are.

        Raises ``UsageError`` where this work was not calibrated in this dtype.
        """
        self.asked.add(work)
        if (work, dtype) not in self._memory:
            raise UsageError(self._missing(f"{work} in {dtype}"))
        sizes, seconds = self._memory[(work, dtype)]
        at = math.log(max(elements, 1.0))
        found = float(np.exp(np.interp(at, sizes, seconds)))
        return found * math.exp(max(at - float(sizes[-1]), 0.0))

    @property
    def doubt(self) -> str | None:
        """That the machine was busy while it was calibrated, if it was."""
        return None if self._peaks is None else busy_while_measured(self._peaks)

    @property
    def on_host(self) -> bool:
        """Whether it is a processor's, by so many of PyTorch's threads."""
        return self._peaks is not None and self._peaks.threads is not None

    def has(self, dtype: str) -> bool:
        """Whether products in this dtype were calibrated."""
        return (False, dtype) in self._products

    # --- between ranks ---

    def link(self, operation: str, dtype: str = "fp32") -> Link:
        """Of a collective of the calibration's ranks; as of fp32 where it was not calibrated in this dtype.

        Raises ``UsageError`` where it was not calibrated at all.
        """
        self.asked.add(operation)
        if (operation, "fp32") not in self._links:
            raise UsageError(self._missing(operation))
        return self._links.get((operation, dtype), self._links[operation, "fp32"])

    def codec(self, name: str, ranks: int) -> tuple[float, float]:
        """(seconds to encode and decode a plain byte, plain bytes over sent bytes) between so many ranks.

        Raises ``UsageError`` where it was not calibrated, or more ranks than it takes are asked for.
        """
        self.asked.add("codec")
        if name not in self._codecs:
            raise UsageError(self._missing(f"the codec {name}"))
        seconds, ratio, measured = self._codecs[name]
        if name != "terngrad":
            return seconds, ratio
        if ranks > MOST_TERNARY_RANKS:
            raise UsageError(f"terngrad sums codes of up to {MOST_TERNARY_RANKS} ranks, not of {ranks}")
        return seconds, ratio * _ternary_bits(measured) / _ternary_bits(ranks)

    def sharded_unit(self, phase: str, parameters: int, again: bool) -> float | None:
        """Seconds that a host works for a unit of so many parameters in a phase because it is sharded, without bytes; ``again``
        where it is gathered twice. None where that was not calibrated."""
        self.asked.add("sharded_unit")
        found = self._units.get((phase, again), [])
        if len({count for count, _ in found}) < 2:
            return None
        (few, least), (many, most) = min(found), max(found)
        return max(least + (most - least) * (parameters - few) / (many - few), 0.0)

    def _missing(self, what: str) -> str:
        if self._peaks is None:
            return f"{what}: this machine is not calibrated: run trine hardware --calibrate where the record is from"
        return f"{what} is not in this machine's calibration: run trine hardware --calibrate again"


def _ternary_bits(ranks: int) -> int:
    """Of an element of TernGrad's: its code, and the sum of all ranks' (``optim/runtime/exchange/terngrad.py``)."""
    return 2 + (4 if 2 * ranks + 1 <= 16 else 8)


def _deviation(row: Mapping[str, Any]) -> float:
    """Of the logarithm of a row's time, the standard deviation over its repetitions; nought where it keeps no quartiles.

    Of the faster half: a busy machine only ever makes a repetition slower, so what lies above the median says how busy it
    was, and what lies below how well the operation's own time is known.
    """
    low, middle, _ = row.get("quartiles") or (1.0, 1.0, 1.0)
    if middle <= 0:
        return 0.0
    return min(math.log(middle / low) / _QUARTILE, MOST_DEVIATION) if low > 0 else MOST_DEVIATION


def _is_transfer(row: Mapping[str, Any]) -> bool:
    return row["operation"] in _COLLECTIVES


def _between(here: Array, sides: Array, values: Array) -> float:
    """The mean of the nearest values, by inverse squared distance; ``here`` of shape (3,), ``sides`` (points, 3)."""
    distance = ((sides - here) ** 2).sum(axis=1)
    nearest = np.argsort(distance, kind="stable")[:NEIGHBOURS]
    weights = 1.0 / (distance[nearest] + 1e-6)
    return float((weights * values[nearest]).sum() / weights.sum())
