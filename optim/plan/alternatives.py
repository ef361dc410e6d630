"""The winner with one thing changed, and what that costs: for each choice its other values, the rest as near as can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trine.optim.plan.candidates import Predictor
from trine.optim.plan.constraints import has_precision, kept
from trine.optim.plan.cost import Range
from trine.optim.plan.layouts import DEFAULTS, KINDS, OFFLOADED, Integers, Layouts
from trine.optim.plan.problem import Problem
from trine.optim.plan.reasons import host_too_small, lost_by, too_large
from trine.optim.plan.refusals import broken
from trine.optim.plan.saving_constraints import SAVINGS, stage_most
from trine.optim.plan.search import Searcher
from trine.optim.plan.space import BUCKETS, savings

__all__ = ["Alternative", "alternatives"]

#: What can be changed one by one; the rest follows.
_COLUMNS = (
    "tensor",
    "context",
    "expert",
    "pipeline",
    "micro_batch",
    "schedule",
    "chunks",
    "zero_stage",
    "shard",
    "sequence",
    "two_level",
    "precision",
    "compression",
    "recompute",
    *OFFLOADED,
    "bucket_bytes",
)
#: Priced beside the winner although a search leaves them alone unless it is asked for them: they change numbers.
_NUMERICS = ("precision", "compression")
#: Of a number only the next smaller and the next larger value are shown.
_NUMBERS = ("tensor", "context", "expert", "pipeline", "micro_batch", "chunks", "shard")


@dataclass(frozen=True, slots=True)
class Alternative:
    """``column`` at another ``value``, and all else as near to the winner as layouts allow (``layout``).

    ``reason``: why it lost, one phrase; "other numbers" where training computes other ones. ``step`` in seconds and ``peak`` in
    bytes, with their intervals; ``fits`` within the headroom.
    """

    column: str
    value: int | str
    layout: dict[str, int | str]
    step: Range
    peak: Range
    fits: bool
    reason: str


def alternatives(predictor: Predictor, searcher: Searcher, best: Layouts) -> tuple[Alternative, ...]:
    """For every choice that the space has."""
    chosen: list[tuple[str, Layouts]] = list(_beside(searcher.problem, best))
    own = _with_savings_of(searcher, best)
    # Near is what keeps most of the rest; how the column itself is far counts for all alike. What fits comes before what does not:
    # a value that works beside other degrees is not said to fail.
    does_not_fit = searcher.peak_bytes(own) > searcher.problem.capacity_bytes
    order = np.lexsort((_away(own, best), does_not_fit))
    place = np.empty(len(own), dtype=np.int64)
    place[order] = np.arange(len(own))
    for column in _COLUMNS:
        if column in ("recompute", *OFFLOADED):
            others, _ = savings(searcher.problem, best, (column,))
            other_rows = _fewest_layers(others.take(others[column] != best[column][0]), column)
            chosen += [(column, other_rows.take([row])) for row in range(len(other_rows))]
            continue
        for value in _values(own[column], int(best[column][0]), column):
            rows = np.flatnonzero(own[column] == value)
            chosen.append((column, own.take(rows[[int(np.argmin(place[rows]))]])))
    if not chosen:
        return ()
    rules = searcher.problem.refused_unless_pinned()
    once = {
        (column, int(layout[column][0])): (column, layout)
        for column, layout in chosen
        if not broken(rules, layout.columns, searcher.problem.workload).any()
    }
    chosen = sorted(once.values(), key=lambda one: _COLUMNS.index(one[0]))
    return _described(predictor, best, chosen)


def _beside(problem: Problem, best: Layouts) -> Iterator[tuple[str, Layouts]]:
    """What a search leaves alone unless it is pinned."""
    reduces = int(best["data"][0]) * int(best["context"][0]) > 1
    for column in _NUMERICS:
        for word in problem.abilities.choices[column]:
            other = KINDS[column].index(word)
            halved = word not in ("fp32", "tf32") and has_precision(problem, word)
            possible = halved if column == "precision" else reduces
            if _left_alone(problem, column) and other != best[column][0] and possible:
                yield column, best.with_changes(**{column: other})
    if _left_alone(problem, "bucket_bytes") and reduces and int(best["zero_stage"][0]) < 3:
        for size in BUCKETS:
            if size != best["bucket_bytes"][0]:
                yield "bucket_bytes", best.with_changes(bucket_bytes=size)


def _left_alone(problem: Problem, column: str) -> bool:
    return column not in problem.pins and column not in problem.searched


def _described(
    predictor: Predictor, best: Layouts, chosen: list[tuple[str, Layouts]]
) -> tuple[Alternative, ...]:
    winner, *others = predictor.candidates(Layouts.joined([best, *(layout for _, layout in chosen)]))
    problem = predictor.problem
    found = []
    for (column, _), other in zip(chosen, others, strict=True):
        peak, layout = other.peak, other.layout
        within = peak.value <= problem.capacity_bytes
        fits = within and other.hosts_hold
        reason = lost_by(other.parts_s, winner.parts_s)
        if not within:
            reason = too_large(peak.value, other.memory_bytes, problem)
        elif not fits:
            reason = f"does not fit: {host_too_small(other.host_bytes + other.remote_bytes, problem)}"
        elif column in _NUMERICS:
            reason += ", other numbers"
        found.append(Alternative(column, layout[column], layout, other.step, peak, fits, reason))
    return tuple(found)


def _with_savings_of(searcher: Searcher, best: Layouts) -> Layouts:
    """Shapes that recompute and offload as the best does, where they can: of a budget's layers no more than a stage has."""
    problem, shapes = searcher.problem, searcher.shapes
    same = {name: int(best[name][0]) for name in ("recompute", *OFFLOADED)}
    layers = np.minimum(int(best["recomputed_layers"][0]), stage_most(problem, shapes["pipeline"]))
    alike = shapes.with_changes(**same, recomputed_layers=layers)
    return alike.take(kept(SAVINGS, problem, alike.columns))


def _away(shapes: Layouts, best: Layouts) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How far each is from the best: doublings of numbers, one for each kind or flag that differs."""
    total = np.zeros(len(shapes))
    for name in DEFAULTS:
        own = int(best[name][0])
        if name in KINDS or name in ("zero_stage", "sequence", "two_level"):
            total += shapes[name] != own
        else:
            total += np.abs(np.log2(np.maximum(shapes[name], 0.5) / max(own, 0.5)))
    return total


def _values(column: Integers, own: int, name: str) -> list[int]:
    others = np.unique(column[column != own])
    if name not in _NUMBERS:
        return [int(value) for value in others]
    below, above = others[others < own][-1:], others[others > own][:1]
    return [int(value) for value in (*below, *above)]


def _fewest_layers(layouts: Layouts, column: str) -> Layouts:
    """Of budgets only the smallest: one row each value."""
    order = np.lexsort((layouts["recomputed_layers"], layouts[column]))
    _, first = np.unique(layouts[column][order], return_index=True)
    return layouts.take(order[first])
