"""Every layout of a problem weighed, without computing each: branch and bound over shapes and what they can save.

A shape (:mod:`trine.optim.plan.space`) without savings is as fast as anything that it can become, and with all savings as
small. So a shape that is too large even then is dropped with all its children, and one that is slower than what was found,
too; the rest is expanded in order of its bound. What comes out is what weighing everything one by one would find: for each
way to divide the devices its fastest layout that fits (a test compares).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trine.optim.plan.columns import Column
from trine.optim.plan.constraints import Mask
from trine.optim.plan.layouts import OFFLOADED, RECOMPUTATIONS, Integers, Layouts
from trine.optim.plan.memory import MemoryEstimate, memory_of
from trine.optim.plan.pareto import Staircase, front
from trine.optim.plan.problem import Problem
from trine.optim.plan.space import saving_choices, savings
from trine.optim.plan.step import Estimates, predict
from trine.optim.plan.tight_budgets import tight_budgets

__all__ = ["Found", "Searcher", "Tally"]

#: Shapes that are expanded at a time: few, so that bounds are soon tight; many, so that columns are long.
_BATCH = 400
#: Rows of one call: columns of this length stay in the processor's cache.
_ROWS = 20_000
#: Steps that differ by less are equal; of those the one with less memory is better.
_EQUAL = 1e-9
_BUDGET = RECOMPUTATIONS.index("budget")


@dataclass(slots=True)
class Tally:
    """Configurations: all that there are, those whose time or memory was computed, and processor seconds that this took."""

    shapes: int = 0
    configurations: int = 0
    weighed: int = 0
    seconds: float = 0.0

    @property
    def computed(self) -> int:
        """Configurations, however often: the front computes again what the ranking did."""
        return min(self.weighed, self.configurations)

    @property
    def per_minute(self) -> float:
        """Computed, not pruned: of one core."""
        return 60 * self.weighed / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """Layouts with what is predicted of them, row by row."""

    layouts: Layouts
    step_s: Column
    peak_bytes: Column

    def take(self, rows: Integers | Mask) -> Found:
        """These rows."""
        return Found(self.layouts.take(rows), self.step_s[rows], self.peak_bytes[rows])

    @staticmethod
    def joined(parts: list[Found]) -> Found:
        """One after the other."""
        return Found(
            Layouts.joined([part.layouts for part in parts]),
            np.concatenate([part.step_s for part in parts]),
            np.concatenate([part.peak_bytes for part in parts]),
        )


@dataclass(slots=True)
class Searcher:
    """The shapes of a problem with their bounds. ``fastest_s`` and ``leanest_bytes``: of anything that a shape can become;
    ``plain_bytes``: of itself, without savings."""

    problem: Problem
    shapes: Layouts
    tally: Tally = field(default_factory=Tally)
    fastest_s: Column = field(init=False)
    plain_bytes: Column = field(init=False)
    leanest_bytes: Column = field(init=False)
    _is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        choices = saving_choices(self.problem)
        plain = self.shapes.with_changes(recompute=_fastest(choices["recompute"]), recomputed_layers=0)
        #: Whether a shape without savings is itself a choice, not a bound alone.
        self._is_plain = all(0 in values for values in choices.values())
        self.tally.shapes = len(self.shapes)
        self.tally.configurations = self._count()
        self.fastest_s = self.step_s(plain)
        self.plain_bytes = self.peak_bytes(plain)
        # Only what does not fit as it is has to save.
        self.leanest_bytes = self.plain_bytes.copy()
        large = np.flatnonzero((self.plain_bytes > self.problem.capacity_bytes) | (not self._is_plain))
        self.leanest_bytes[large] = self.least_bytes(self.shapes.take(large))

    def step_s(self, layouts: Layouts) -> Column:
        """Of every layout."""
        return self._in_pieces(layouts, lambda piece: self._predict(piece).step_s)

    def peak_bytes(self, layouts: Layouts) -> Column:
        """Of every layout; infinite where hosts do not hold what is moved there."""
        return self._in_pieces(layouts, lambda piece: self._memory(piece).needed_bytes)

    def _device_bytes(self, layouts: Layouts) -> Column:
        """Whatever hosts hold: a child that offloads less may fit there."""
        return self._in_pieces(layouts, lambda piece: self._memory(piece).peak_bytes)

    def _predict(self, layouts: Layouts) -> Estimates:
        return predict(self.problem.workload, self.problem.cluster, self.problem.stack, layouts)

    def _memory(self, layouts: Layouts) -> MemoryEstimate:
        return memory_of(self.problem.workload, self.problem.cluster, self.problem.stack, layouts)

    def _in_pieces(self, layouts: Layouts, function: Callable[[Layouts], Column]) -> Column:
        begin = time.process_time()
        pieces = [
            function(layouts.take(slice(start, start + _ROWS))) for start in range(0, len(layouts), _ROWS)
        ]
        self.tally.seconds += time.process_time() - begin
        return np.concatenate(pieces) if pieces else np.empty(0)

    def _weighed(self, layouts: Layouts) -> Found:
        self.tally.weighed += len(layouts)
        return Found(layouts, self.step_s(layouts), self.peak_bytes(layouts))

    def least_bytes(self, layouts: Layouts, *, offload: bool = True) -> Column:
        """No child of these needs less of a device: with every offload that is a choice, or with the layouts' own.

        Where activations are moved away, full recomputation may need more than selective (it makes again at once what the
        other keeps elsewhere), so the least of all modes counts; a budget lies between none and full.
        """
        choices = saving_choices(self.problem)
        if offload:
            alone = layouts["data"] * layouts["context"] == 1
            away = {column: np.full(len(layouts), max(choices[column])) for column in OFFLOADED}
            may = (layouts["zero_stage"] == 3) | alone
            away["parameter_offload"] = np.where(may, away["parameter_offload"], 0)
            layouts = layouts.with_changes(**away)
        modes = set(choices["recompute"])
        if _BUDGET in modes:
            modes = (modes - {_BUDGET}) | {0, RECOMPUTATIONS.index("full")}
        every = [
            self._device_bytes(layouts.with_changes(recompute=mode, recomputed_layers=0))
            for mode in sorted(modes)
        ]
        return np.asarray(np.min(every, axis=0))

    def _count(self) -> int:
        """Children of all shapes."""
        kinds = np.stack(
            [
                self.shapes["pipeline"],
                self.shapes["zero_stage"],
                self.shapes["data"] * self.shapes["context"] == 1,
                # What a software's rules of offload ask for.
                *(self.shapes[name] > 1 for name in ("tensor", "context", "expert")),
            ]
        )
        unique, where, counts = np.unique(kinds, axis=1, return_index=True, return_counts=True)
        del unique
        columns = ("recompute", *OFFLOADED)
        _, rows = savings(self.problem, self.shapes.take(where), columns)
        each = np.bincount(rows, minlength=len(where))
        return int((each * counts).sum())

    # --- the fastest of each way to divide the devices -----------------------------------------

    def fastest(self, count: int) -> Found:
        """The fastest layout that fits of each way to divide the devices, for the best ``count`` ways, in ascending time.

        Empty where nothing fits.
        """
        ways = _ways(self.shapes)
        best = np.full(int(ways.max()) + 1, np.inf)
        alive = self.leanest_bytes <= self.problem.capacity_bytes
        kept = [self._plain(alive)]
        np.minimum.at(best, ways[_rows_of(kept[0])], kept[0].found.step_s)
        order = np.argsort(self.fastest_s, kind="stable")
        large = (self.plain_bytes > self.problem.capacity_bytes) | (not self._is_plain)
        order = order[(alive & large)[order]]
        possible = np.unique(ways[alive])
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            limit = _limit(best[possible], count)
            if self.fastest_s[batch[0]] > limit * (1 + _EQUAL):
                break
            found = self._expanded(batch, np.minimum(best[ways], limit))
            if found is not None:
                kept.append(found)
                np.minimum.at(best, ways[_rows_of(found)], found.found.step_s)
        return self._best(kept, ways, count)

    def _plain(self, alive: Mask) -> _Children:
        """Shapes that fit as they are."""
        rows = np.flatnonzero(alive & (self.plain_bytes <= self.problem.capacity_bytes) & self._is_plain)
        self.tally.weighed += len(self.shapes)
        return _Children(Found(self.shapes.take(rows), self.fastest_s[rows], self.plain_bytes[rows]), rows)

    def _expanded(self, batch: Integers, limits: Column) -> _Children | None:
        """Children of these shapes that fit and are no slower than what is known of their way."""
        live = batch[self.fastest_s[batch] <= limits[batch] * (1 + _EQUAL)]
        if not len(live):
            return None
        # First offload alone. What is recomputed need not be moved, so activations that stay bound the time of those that go.
        away, parents = savings(self.problem, self.shapes.take(live), OFFLOADED, settled=False)
        mode = _fastest(saving_choices(self.problem)["recompute"])
        quick = away.with_changes(recompute=mode, recomputed_layers=0, activation_offload="none")
        fits = self.least_bytes(away, offload=False) <= self.problem.capacity_bytes
        good = np.flatnonzero(fits)
        good = good[self.step_s(quick.take(good)) <= limits[live[parents[good]]] * (1 + _EQUAL)]
        self.tally.weighed += len(away)
        if not len(good):
            return None
        away, parents = away.take(good), parents[good]
        children, of = self._with_tight(away, *savings(self.problem, away, ("recompute",)))
        found = self._weighed(children)
        rows = live[parents[of]]
        keep = (found.peak_bytes <= self.problem.capacity_bytes) & (
            found.step_s <= limits[rows] * (1 + _EQUAL)
        )
        return _Children(found.take(keep), rows[keep])

    def _with_tight(self, parents: Layouts, children: Layouts, of: Integers) -> tuple[Layouts, Integers]:
        """Children, and of each parent the smallest budget of recomputation that fits."""
        tight, rows = tight_budgets(self.problem, parents, self.peak_bytes)
        self.tally.weighed += len(tight)
        return Layouts.joined([children, tight]), np.concatenate([of, rows])

    def _best(self, kept: list[_Children], ways: Integers, count: int) -> Found:
        """Of each way the fastest, of equal ones that with least memory, then the plainest."""
        found = Found.joined([part.found for part in kept])
        way = ways[np.concatenate([part.rows for part in kept])]
        rank = np.lexsort((_departures(found.layouts), found.peak_bytes, _rounded(found.step_s), way))
        first = rank[np.concatenate([[True], way[rank][1:] != way[rank][:-1]])] if len(rank) else rank
        order = first[np.lexsort((found.peak_bytes[first], _rounded(found.step_s[first])))]
        return found.take(order[:count])

    # --- step time against memory --------------------------------------------------------------

    def front(self, *, offload: bool) -> Found:
        """Layouts that no other beats in both step time and memory, in ascending time. ``offload`` False: on devices alone."""
        lean_bytes = self.least_bytes(self.shapes, offload=offload)
        staircase, kept = Staircase(), [self._plain(self.leanest_bytes <= self.problem.capacity_bytes).found]
        kept[0] = kept[0].take(front(kept[0].step_s, kept[0].peak_bytes))
        staircase.add(kept[0].step_s, kept[0].peak_bytes)
        order = np.argsort(lean_bytes, kind="stable")
        order = order[lean_bytes[order] <= self.problem.capacity_bytes]
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            live = batch[~staircase.beats(self.fastest_s[batch], lean_bytes[batch])]
            if not len(live):
                continue
            away = self.shapes.take(live)
            if offload:
                away, _ = savings(self.problem, away, OFFLOADED, settled=False)
            children, _ = self._with_tight(away, *savings(self.problem, away, ("recompute",)))
            found = self._weighed(children)
            found = found.take(found.peak_bytes <= self.problem.capacity_bytes)
            found = found.take(front(found.step_s, found.peak_bytes))
            staircase.add(found.step_s, found.peak_bytes)
            kept.append(found)
        every = Found.joined(kept)
        return every.take(front(every.step_s, every.peak_bytes))


@dataclass(frozen=True, slots=True)
class _Children:
    """Layouts, and the shape that each came from."""

    found: Found
    rows: Integers


def _rows_of(children: _Children) -> Integers:
    return children.rows


def _ways(shapes: Layouts) -> Integers:
    """A number for each way to divide the devices."""
    columns = np.stack([shapes[name] for name in ("data", "context", "tensor", "expert", "pipeline")])
    return np.asarray(np.unique(columns, axis=1, return_inverse=True)[1], dtype=np.int64).reshape(-1)


def _limit(best: Column, count: int) -> float:
    """The time that the ``count``-th best way has; nothing slower matters."""
    return float(np.partition(best, count - 1)[count - 1]) if len(best) > count else float(best.max())


def _rounded(seconds: Column) -> Column:
    """To eight digits, so that equal steps read alike."""
    return np.asarray(np.exp(np.round(np.log(np.maximum(seconds, 1e-30)), 8)))


def _departures(layouts: Layouts) -> Integers:
    """How many columns are not as usual: of equal layouts the plainest is the best."""
    names = (
        *("zero_stage", "schedule", "chunks", "recompute", "two_level", "shard"),
        *("compression", "bucket_bytes", *OFFLOADED),
    )
    plain = Layouts.of()
    return np.asarray(sum((layouts[name] != plain[name][0]).astype(np.int64) for name in names))


def _fastest(recompute: tuple[int, ...]) -> int:
    """A mode that no allowed one is faster than; a budget's bound is to recompute nothing."""
    only = recompute[0] if len(recompute) == 1 else 0
    return 0 if only == _BUDGET else only
