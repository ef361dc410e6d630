"""Pipeline: how long each stage had nothing to compute, why, and beside which ideal.

The bubble ratio of a stage is 1 − its forward and backward computing over one iteration, first start to last
end over all stages; waiting to receive counts as bubble. It is split at the stage's first backward and at the end
of its last forward: warm-up (filling), steady, drain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trine.analyzers._tabular import Tabular
from trine.analyzers.statistics import find_warm_up
from trine.record.model import Array

from ._pipeline_clocks import ClockCheck, check_clocks
from ._pipeline_layout import Layout, lay_out
from ._pipeline_schedules import Action, ideal_bubble, recognise
from ._pipeline_work import BACKWARD, BOTH, DIRECTIONS, FORWARD, Source, Work, work_of
from ._scope import Scope, Whole

__all__ = ["KEY", "ClockCheck", "Pipeline", "Span", "StageBubble", "join", "reduce", "to_json"]

KEY = "pipeline"

#: Spans of the drawing, over all stages; more could not be told apart on a page.
MOST_SPANS = 4_000


@dataclass(frozen=True, slots=True)
class Span:
    """Work of one pipeline rank on one micro-batch, in ns from the start of the iteration that is drawn."""

    row: int  # place in ``stages`` of the result
    start_ns: int
    end_ns: int
    direction: str
    stage: int
    index: int


@dataclass(frozen=True, slots=True)
class StageBubble:
    """One pipeline rank, medians over the steady iterations. The three parts of the bubble are medians of their
    own. ``forward_ns`` and the others are of one micro-batch; None where the source cannot tell them apart."""

    rank: int
    stages: tuple[int, ...]  # the model chunks that it holds
    bubble_ratio: float
    bubble_ns: int
    warm_up_ns: int
    steady_ns: int
    drain_ns: int
    compute_ns: int
    forward_ns: int | None
    backward_ns: int | None
    backward_input_ns: int | None
    backward_weight_ns: int | None


@dataclass(frozen=True, slots=True)
class Pipeline(Tabular):
    """One pipeline (of ``replicas`` like it, the slowest). ``imbalance`` is how much longer the longest stage
    computes than the median stage, as a share of the latter."""

    source: Source
    schedule: str | None
    microbatches: int
    chunks: int
    replicas: int
    iterations: int  # that were counted
    warm_up: tuple[int, ...]  # iterations left out
    iteration_ns: int  # median
    stages: tuple[StageBubble, ...]
    missing_stages: tuple[int, ...]
    bubble_ratio: float  # mean over the stages
    ideal_ratio: float | None
    ideal_formula: str | None
    slowest: int  # rank of the stage that computes longest
    slowest_share: float  # of the iterations, in which it is that stage
    imbalance: float
    clocks: tuple[ClockCheck, ...]  # where neighbours' times contradict each other
    drawn: int  # the iteration that ``spans`` show
    spans: tuple[Span, ...]
    cut: bool  # whether spans were left out of the drawing
    inferred_stages: bool  # whether the order of stages was told from times or messages


def reduce(scope: Scope) -> Work | None:
    """The rank's part in a pipeline."""
    return work_of(scope)


def join(parts: Mapping[int, Work], whole: Whole) -> Pipeline | str:
    """Lay the stages beside each other."""
    if not parts:
        return (
            "nothing shows a pipeline: no times of micro-batches, no annotations of torch.distributed.pipelining, "
            "no sends and receives with known peers in marked steps"
        )
    corrections = {rank: clock.correction_ns for rank, clock in whole.clocks.items()}
    layout = lay_out(parts, corrections)
    if isinstance(layout, str):
        return layout
    results = [_of_replica(rows, layout, corrections) for rows in layout.replicas]
    known = [result for result in results if result is not None]
    if not known:
        return "no iteration was seen on every stage that is here; give traces of the same steps"
    slowest = max(known, key=lambda result: result.iteration_ns)
    _say(whole, slowest)
    return slowest


def _of_replica(rows: Sequence[Work], layout: Layout, corrections: Mapping[int, int]) -> Pipeline | None:
    common = rows[0].iterations
    for work in rows[1:]:
        common = np.intersect1d(common, work.iterations)
    if not len(common):
        return None
    offsets = [corrections.get(work.rank, 0) for work in rows]
    at = [np.searchsorted(work.iterations, common) for work in rows]
    checks = check_clocks(rows, offsets, layout, int(np.median(_window(rows, at, offsets)[1])))
    offsets = [offset + check.applied_ns for offset, check in zip(offsets, checks, strict=True)]
    begin, length = _window(rows, at, offsets)
    steady = np.arange(len(common)) >= find_warm_up(length)
    stages = tuple(
        _stage(work, places, begin - offset, length, steady)
        for work, places, offset in zip(rows, at, offsets, strict=True)
    )
    drawn, spans, cut = _drawing(rows, layout, common, length, steady, offsets)
    return Pipeline(
        source=rows[0].source,
        replicas=len(layout.replicas),
        iterations=int(steady.sum()),
        warm_up=tuple(int(number) for number in common[~steady]),
        iteration_ns=round(float(np.median(length[steady]))),
        stages=stages,
        missing_stages=layout.missing,
        bubble_ratio=sum(stage.bubble_ratio for stage in stages) / len(stages),
        **_beside_the_ideal(rows, layout, drawn, stages),
        **_evenness(rows, at, steady, stages),
        clocks=tuple(check for check in checks if check.contradiction_ns > 0),
        drawn=drawn,
        spans=spans,
        cut=cut,
        inferred_stages=layout.inferred,
    )


def _beside_the_ideal(
    rows: Sequence[Work], layout: Layout, drawn: int, stages: Sequence[StageBubble]
) -> dict[str, Any]:
    """The schedule and what it would leave idle at best."""
    schedule = _schedule(rows, layout, drawn)
    microbatches = int(np.median(np.concatenate([work.counts for work in rows])))
    count = len(rows) + len(layout.missing)
    ideal = ideal_bubble(schedule, count, microbatches, layout.chunks, _times(stages))
    return {
        "schedule": schedule,
        "microbatches": microbatches,
        "chunks": layout.chunks,
        "ideal_ratio": ideal.ratio if ideal is not None else None,
        "ideal_formula": ideal.formula if ideal is not None else None,
    }


def _evenness(
    rows: Sequence[Work], at: Sequence[Array], steady: Array, stages: Sequence[StageBubble]
) -> dict[str, Any]:
    """Which stage computes longest, by how much, and in how many iterations."""
    computes = [stage.compute_ns for stage in stages]
    each = np.array([work.compute[places] for work, places in zip(rows, at, strict=True)])[:, steady]
    longest = int(np.argmax(computes))
    median = float(np.median(computes))
    return {
        "slowest": stages[longest].rank,
        "slowest_share": float((each[longest] == each.max(axis=0)).mean()),
        "imbalance": max(computes) / median - 1 if median else 0.0,
    }


def _window(rows: Sequence[Work], at: Sequence[Array], offsets: Sequence[int]) -> tuple[Array, Array]:
    """Start and length of each iteration over all stages, on the reference's clock."""
    begin = np.min([w.begin[p] + o for w, p, o in zip(rows, at, offsets, strict=True)], axis=0)
    end = np.max([w.end[p] + o for w, p, o in zip(rows, at, offsets, strict=True)], axis=0)
    return begin, np.maximum(end - begin, 1)


def _stage(work: Work, at: Array, begin: Array, length: Array, steady: Array) -> StageBubble:
    """``begin``: of the iterations, on the rank's own clock."""
    compute, early, late = work.compute[at], work.compute_early[at], work.compute_late[at]
    backward, forward = work.first_backward[at], work.last_forward[at]
    warm_up = (backward - begin) - early
    drain = (begin + length - np.minimum(forward, work.end[at])) - late
    bubble = length - compute
    parts = (bubble, warm_up, bubble - warm_up - drain, drain, compute)
    medians = [round(float(np.median(part[steady]))) for part in parts]
    each = [int(value) if value >= 0 else None for value in work.forward_ns]
    return StageBubble(
        rank=work.rank,
        stages=work.stages,
        bubble_ratio=float(np.median(bubble[steady] / length[steady])),
        bubble_ns=medians[0],
        warm_up_ns=medians[1],
        steady_ns=medians[2],
        drain_ns=medians[3],
        compute_ns=medians[4],
        forward_ns=each[0],
        backward_ns=each[1],
        backward_input_ns=each[2],
        backward_weight_ns=each[3],
    )


def _times(stages: Sequence[StageBubble]) -> tuple[float, float, float]:
    """F, B and W of the median stage."""

    def median(values: Sequence[int | None]) -> float:
        known = [value for value in values if value is not None]
        return float(np.median(known)) if known else 0.0

    inputs = median([stage.backward_input_ns for stage in stages])
    return (
        median([stage.forward_ns for stage in stages]),
        inputs or median([stage.backward_ns for stage in stages]),
        median([stage.backward_weight_ns for stage in stages]),
    )


def _schedule(rows: Sequence[Work], layout: Layout, drawn: int) -> str | None:
    """Told from the ranks on which forwards and backwards are told apart."""
    orders, places = [], []
    guessed: list[Action] = []
    for place, work in enumerate(rows):
        marks = work.marks
        rows_of = np.flatnonzero(marks.iteration == drawn)
        if work.cut or not len(rows_of):
            continue
        both = (marks.direction[rows_of] == BOTH).any()
        order = _order(work, rows_of)
        if not both:
            orders.append(order)
            places.append(layout.places[place])
        elif work.source == "messages" and work.before is None and layout.places[place] == 0:
            guessed = order
    # Of two stages neither tells all apart, but the first works on the gradient that came before on the forward
    # that it sends.
    if not orders and guessed:
        orders, places = [guessed], [0]
    return recognise(orders, places, len(rows) + len(layout.missing), layout.looped)


def _order(work: Work, rows: Array) -> list[Action]:
    """What a rank did in these rows of its marks; a piece that is both is a backward, then a forward."""
    marks = work.marks
    chunk = {stage: number for number, stage in enumerate(work.stages)}
    order: list[Action] = []
    for direction, stage, index in zip(
        marks.direction[rows].tolist(),
        marks.stage[rows].tolist(),
        marks.microbatch[rows].tolist(),
        strict=True,
    ):
        parts = (BACKWARD, FORWARD) if direction == BOTH else (direction,)
        order += [(part, chunk[stage], index) for part in parts]
    return order


def _drawing(
    rows: Sequence[Work],
    layout: Layout,
    common: Array,
    length: Array,
    steady: Array,
    offsets: Sequence[int],
) -> tuple[int, tuple[Span, ...], bool]:
    """The spans of the iteration whose length is nearest the median's, among those that all ranks kept."""
    kept = common
    for work in rows:
        kept = np.intersect1d(kept, np.unique(work.marks.iteration))
    if not len(kept):
        return int(common[-1]), (), True
    at = np.searchsorted(common, kept)
    usable = at[steady[at]] if steady[at].any() else at
    nearest = usable[int(np.argmin(np.abs(length[usable] - np.median(length[steady]))))]
    drawn = int(common[nearest])
    found = []
    for row, (work, offset) in enumerate(zip(rows, offsets, strict=True)):
        marks = work.marks
        for mark in np.flatnonzero(marks.iteration == drawn).tolist():
            found.append(
                (row, int(marks.start[mark]) + offset, int(marks.end[mark]) + offset, int(marks.direction[mark]),
                 int(marks.stage[mark]), int(marks.microbatch[mark]))
            )  # fmt: skip
    zero = min(span[1] for span in found)
    per_row = max(MOST_SPANS // max(len(rows), 1), 1)
    rows_shown = min(len(rows), MOST_SPANS)
    shown: list[Span] = []
    counts: dict[int, int] = {}
    for row, start, end, direction, stage, index in sorted(found, key=lambda span: (span[0], span[1])):
        counts[row] = counts.get(row, 0) + 1
        if counts[row] <= per_row and row < rows_shown:
            name = layout.stage_of(rows[row].rank) if stage < 0 else stage
            shown.append(Span(row, start - zero, end - zero, DIRECTIONS[direction], name, index))
    return drawn, tuple(shown), len(shown) < len(found) or any(work.cut for work in rows)


def _say(whole: Whole, result: Pipeline) -> None:
    if result.missing_stages:
        listed = ", ".join(map(str, result.missing_stages[:8]))
        whole.note(
            "pipeline-stages-missing",
            "warning",
            f"stages {listed} are not here: iterations span those that are, so bubbles are lower bounds",
        )
    if result.inferred_stages:
        whole.note(
            "pipeline-stages-inferred",
            "info",
            "the source does not number the stages; their order is taken from messages, or from who began first",
        )
    corrected = [check for check in result.clocks if check.applied_ns]
    for check in corrected:
        text = (
            f"rank {check.rank} began up to {check.contradiction_ns / 1e6:.3g} ms before what it works on was there; "
            f"its clock is corrected by {check.applied_ns / 1e6:+.3g} ms"
        )
        whole.note("pipeline-clock", "info", text, check.rank)
    if result.clocks and not corrected:
        worst = max(result.clocks, key=lambda check: check.contradiction_ns)
        text = (
            f"stages began up to {worst.contradiction_ns / 1e6:.3g} ms (rank {worst.rank}) before what they work on was "
            f"there, {worst.contradiction_ns / result.iteration_ns:.2%} of an iteration: clocks are left as they are"
        )
        whole.note("pipeline-clock", "info", text)


def to_json(result: Pipeline) -> dict[str, Any]:
    """The result as plain values."""
    return asdict(result)
