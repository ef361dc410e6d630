"""One rank's part in a pipeline: when it worked on which micro-batch, and how long it computed.

Three sources, the first that there is: the ``microbatches`` table; annotations that name micro-batches
(``torch.distributed.pipelining``'s ``PP:1F3`` and ``Forward 3``, Megatron's and DeepSpeed's functions); and
messages: what a stage sends forward ends a forward, what it sends back ends a backward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from trine.analyzers.breakdown import has_device_work, top_level_operators
from trine.analyzers.intervals import Spans, covered, union
from trine.analyzers.selection import Selected
from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Array, Rank, Table

from ._pipeline_messages import from_messages
from ._scope import Scope

__all__ = ["BACKWARD", "BOTH", "DIRECTIONS", "FORWARD", "Source", "Work", "work_of"]

Source = Literal["microbatches", "annotations", "messages"]

#: Codes of what is done for a micro-batch; ``both`` where a boundary between them cannot be seen.
DIRECTIONS = ("forward", "backward", "backward_input", "backward_weight", "both")
FORWARD, BACKWARD, _, _, BOTH = range(5)

#: Spans that a part keeps, in whole iterations spread over the run; the sums are of all of them.
MOST_SPANS = 1_500
MOST_ITERATIONS_KEPT = 8
#: Iterations whose sums a part keeps, the last ones.
MOST_ITERATIONS = 1_000

_ANNOTATION = HOST_KINDS.index("annotation")
_PYTHON = HOST_KINDS.index("python")
_COMPUTE = DEVICE_KINDS.index("compute")

_ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
#: What such names begin or end with: tried first, since a trace has names by the hundred thousand.
_BEGINNINGS = ("PP:", "Forward ", "Backward ")
_ENDINGS = ("forward_step", "backward_step", "_exec_forward_pass", "_exec_backward_pass")
_LETTERS = {"F": 0, "B": 1, "I": 2, "W": 3}
_NUMBERED = re.compile(r"(Forward|Backward) (\d+)")
#: Functions of Megatron-LM and DeepSpeed as stacks and NVTX ranges name them: one call a micro-batch.
_FUNCTIONS = (
    (re.compile(r"(pipeline_parallel/schedules\.py\(\d+\): )?(megatron\.)?forward_step"), 0),
    (re.compile(r"(pipeline_parallel/schedules\.py\(\d+\): )?(megatron\.)?backward_step"), 1),
    (re.compile(r"(.*pipe/engine\.py\(\d+\): |PipelineEngine\.)?_exec_forward_pass"), 0),
    (re.compile(r"(.*pipe/engine\.py\(\d+\): |PipelineEngine\.)?_exec_backward_pass"), 1),
)


class Marks(NamedTuple):
    """Work on micro-batches: columns of one length. ``stage`` is −1 where not said."""

    iteration: Array
    stage: Array
    microbatch: Array
    direction: Array
    start: Array
    end: Array


@dataclass(frozen=True, slots=True)
class Work:
    """A rank's part. Sums have a row an iteration, in ns: ``compute`` of all its stages together, of it before the
    first backward began and after the last forward ended; MISSING where there was none.

    ``marks`` are the spans of some whole iterations. ``before`` and ``after`` are the neighbours by messages.
    """

    rank: int
    source: Source
    stages: tuple[int, ...]  # −1 where the source does not say
    iterations: Array
    begin: Array
    end: Array
    first_backward: Array
    last_forward: Array
    compute: Array
    compute_early: Array
    compute_late: Array
    forward_ns: Array  # medians over micro-batches, one a direction of DIRECTIONS; −1 where none
    counts: Array  # micro-batches of an iteration: forwards of the first stage that it holds
    marks: Marks
    cut: bool  # whether even one iteration was too long to keep whole
    before: int | None = None
    after: int | None = None


def work_of(scope: Scope) -> Work | None:
    """The rank's part; None where nothing shows a pipeline."""
    rank = scope.rank
    if rank.microbatches is not None and len(rank.microbatches):
        marks = _from_table(rank.microbatches, scope.selected)
        return _work(rank.rank, "microbatches", marks, union(marks.start, marks.end))
    for traced, selected in scope.traced:
        found = _from_annotations(traced, selected)
        if found is not None:
            return _work(rank.rank, "annotations", *found)
    for traced, selected in scope.traced:
        messages = from_messages(traced, selected)
        if messages is not None:
            marks = Marks(*messages.columns)
            return _work(rank.rank, "messages", marks, messages.busy, messages.before, messages.after)
    return None


def _from_table(table: Table, selected: Selected) -> Marks:
    rows = np.flatnonzero(selected.holds(table["step"]) & (table["end_ns"] >= table["start_ns"]))
    codes = np.array(
        [*(DIRECTIONS.index(t) if t in DIRECTIONS else BOTH for t in table.strings.values), BOTH]
    )
    return Marks(
        table["step"][rows],
        table["stage"][rows],
        table["index"][rows],
        codes[table["direction"][rows]],
        table["start_ns"][rows],
        table["end_ns"][rows],
    )


# --- annotations ---------------------------------------------------------------------------------


def _from_annotations(rank: Rank, selected: Selected) -> tuple[Marks, Spans] | None:
    """Marks by name, shrunk to the computing inside them, and that computing."""
    host = rank.host
    if host is None:
        return None
    named = {
        code: parsed
        for code, text in enumerate(host.strings.values)
        if text.startswith(_BEGINNINGS) or text.endswith(_ENDINGS)
        if (parsed := _parsed(text))
    }
    if not named:
        return None
    marking = np.isin(host["name"], list(named)) & np.isin(host["kind"], (_ANNOTATION, _PYTHON))
    rows = np.flatnonzero(marking & selected.holds(host["step"]) & (host["end_ns"] > host["start_ns"]))
    if not len(rows) or not _is_pipeline(rank, {int(code) for code in np.unique(host["name"][rows])}, named):
        return None
    rows = rows[np.argsort(host["start_ns"][rows], kind="stable")]
    columns: list[tuple[int, int, int, int]] = []
    for row, code in zip(rows.tolist(), host["name"][rows].tolist(), strict=True):
        columns += [(row, *part) for part in named[code]]
    row, stage, direction, index = np.array(columns, dtype=np.int64).T
    start, end = host["start_ns"][row], host["end_ns"][row]
    index = _counted(host["step"][row], stage, direction, index)
    iteration = _iterations(host["step"][row], stage, direction, index)
    begin, done, busy = _computing(rank, start, end)
    seen = done > begin
    if not seen.any():
        return None
    marks = Marks(*(column[seen] for column in (iteration, stage, index, direction, begin, done)))
    return marks, busy


def _parsed(text: str) -> list[tuple[int, int, int]]:
    """(stage, direction, index) of a name, two where a forward and a backward overlap; −1 where not said."""
    if text.startswith("PP:"):
        body = text[3:]
        if "OVERLAP" in body:
            return [(int(s), _LETTERS[k], int(i)) for s, k, i in _ACTION.findall(body.partition(")")[0])]
        match = _ACTION.fullmatch(body)
        return [(int(match[1]), _LETTERS[match[2]], int(match[3]))] if match else []
    match = _NUMBERED.fullmatch(text)
    if match:
        return [(-1, 0 if match[1] == "Forward" else 1, int(match[2]))]
    return [(-1, direction, -1) for pattern, direction in _FUNCTIONS if pattern.fullmatch(text)][:1]


def _is_pipeline(rank: Rank, codes: set[int], named: dict[int, list[tuple[int, int, int]]]) -> bool:
    """Whether names that others might use too (``Forward 3``) stand for a pipeline: it sends and receives."""
    if any(part[0] >= 0 for code in codes for part in named[code]):
        return True
    if rank.collectives is None:
        return False
    operations = {
        rank.collectives.strings.text(int(code)) for code in np.unique(rank.collectives["operation"])
    }
    return any(name and ("send" in name or "recv" in name) for name in operations)


def _counted(step: Array, stage: Array, direction: Array, index: Array) -> Array:
    """Micro-batches without a number are counted within their step."""
    if (index >= 0).all():
        return index
    counts: dict[tuple[int, int, int], int] = {}
    numbered = index.copy()
    for place, key in enumerate(zip(step.tolist(), stage.tolist(), direction.tolist(), strict=True)):
        if numbered[place] < 0:
            numbered[place] = counts[key] = counts.get(key, -1) + 1
    return numbered


def _iterations(step: Array, stage: Array, direction: Array, index: Array) -> Array:
    """The step, or, where a micro-batch comes again within one or steps are not marked, how often it came before."""
    times: dict[tuple[int, int, int], int] = {}
    turn = np.empty(len(step), dtype=np.int64)
    for place, key in enumerate(zip(stage.tolist(), direction.tolist(), index.tolist(), strict=True)):
        turn[place] = times[key] = times.get(key, -1) + 1
    by_step = np.unique(np.stack([step, stage, direction, index]), axis=1).shape[1] == len(step)
    return step if by_step and (step != MISSING).all() else turn


def _computing(rank: Rank, start: Array, end: Array) -> tuple[Array, Array, Spans]:
    """For each mark, when the computing that was launched inside it began and ended, and all that computing."""
    begun, first, last = _work_by_launch(rank)
    if not len(begun):
        return start, end, union(start, end)
    order = np.argsort(start, kind="stable")
    place = np.searchsorted(start[order], begun, side="right") - 1
    mark = order[np.maximum(place, 0)]
    inside = (place >= 0) & (begun < end[mark])
    mark, first, last = mark[inside], first[inside], last[inside]
    begin = np.full(len(start), np.iinfo(np.int64).max, dtype=np.int64)
    done = np.full(len(start), MISSING, dtype=np.int64)
    np.minimum.at(begin, mark, first)
    np.maximum.at(done, mark, last)
    # A forward and a backward that overlap share one annotation: they have the same work.
    for one in range(1, len(order)):
        here, previous = order[one], order[one - 1]
        if start[here] == start[previous] and end[here] == end[previous]:
            begin[previous], done[previous] = begin[here], done[here]
    begin[done == MISSING] = 0
    return begin, done, union(first, last)


def _work_by_launch(rank: Rank) -> tuple[Array, Array, Array]:
    """Computing: when it was launched, began and ended. Without a device, operators themselves."""
    if has_device_work(rank) and rank.host is not None:
        device = rank.device
        assert device is not None
        rows = np.flatnonzero((device["kind"] == _COMPUTE) & (device["launch"] >= 0))
        return rank.host["start_ns"][device["launch"][rows]], device["start_ns"][rows], device["end_ns"][rows]
    spans = top_level_operators(rank.host)
    return spans.start, spans.start, spans.end


# --- sums ----------------------------------------------------------------------------------------


def _work(
    rank: int, source: Source, marks: Marks, busy: Spans, before: int | None = None, after: int | None = None
) -> Work | None:
    if not len(marks.start):
        return None
    order = np.lexsort((marks.start, marks.iteration))
    marks = Marks(*(column[order] for column in marks))
    iterations, first = np.unique(marks.iteration, return_index=True)
    if len(iterations) > MOST_ITERATIONS:
        keep = marks.iteration >= iterations[-MOST_ITERATIONS]
        marks = Marks(*(column[keep] for column in marks))
        iterations, first = np.unique(marks.iteration, return_index=True)
    begin = np.minimum.reduceat(marks.start, first)
    end = np.maximum.reduceat(marks.end, first)
    far, never = np.iinfo(np.int64).max, MISSING
    is_forward, is_backward = marks.direction == FORWARD, (marks.direction > FORWARD)
    backward = np.minimum.reduceat(np.where(is_backward, marks.start, far), first)
    forward = np.maximum.reduceat(np.where(is_forward | (marks.direction == BOTH), marks.end, never), first)
    backward = np.where(backward == far, end, backward)
    forward = np.maximum(np.where(forward == never, begin, forward), backward)
    kept, cut = _kept(marks, iterations)
    return Work(
        rank=rank,
        source=source,
        stages=tuple(int(stage) for stage in np.unique(marks.stage)),
        iterations=iterations,
        begin=begin,
        end=end,
        first_backward=backward,
        last_forward=forward,
        compute=covered(busy, begin, end),
        compute_early=covered(busy, begin, backward),
        compute_late=covered(busy, np.minimum(forward, end), end),
        forward_ns=_medians(marks),
        counts=_counts(marks, iterations, source),
        marks=kept,
        cut=cut,
        before=before,
        after=after,
    )


def _medians(marks: Marks) -> Array:
    length = marks.end - marks.start
    found = (length[marks.direction == code] for code in range(len(DIRECTIONS)))
    return np.array([round(float(np.median(part))) if len(part) else -1 for part in found], dtype=np.int64)


def _counts(marks: Marks, iterations: Array, source: Source) -> Array:
    """Distinct micro-batches that a stage worked on, per iteration: by number; in pieces of messages, whose numbers
    count within a direction, a forward lies in each that is one or both."""
    both = marks.direction == BOTH
    if source == "messages" and both.any():
        forward = both | (marks.direction == FORWARD)
        return np.bincount(np.searchsorted(iterations, marks.iteration[forward]), minlength=len(iterations))
    known = ~both if not both.all() else both
    pairs = np.unique(np.stack([marks.iteration[known], marks.microbatch[known]]), axis=1)
    return np.bincount(np.searchsorted(iterations, pairs[0]), minlength=len(iterations))


def _kept(marks: Marks, iterations: Array) -> tuple[Marks, bool]:
    """Whole iterations, evenly spread, the first left out where there are others: it is often warm-up."""
    each = len(marks.start) / len(iterations)
    most = max(min(int(MOST_SPANS // max(each, 1)), MOST_ITERATIONS_KEPT), 1)
    candidates = iterations[1:] if len(iterations) > 1 else iterations
    places = np.unique(np.linspace(0, len(candidates) - 1, min(most, len(candidates))).round().astype(int))
    keep = np.flatnonzero(np.isin(marks.iteration, candidates[places]))
    cut = len(keep) > 2 * MOST_SPANS
    return Marks(*(column[keep[: 2 * MOST_SPANS]] for column in marks)), cut
