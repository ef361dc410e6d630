"""Host tasks from a trace without device work: operators in their order, waits for collectives, and what lies between."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trine.optim.plan.whatif.graph import LINK, RankStep, Task, fresh
from trine.optim.plan.whatif.operators import Operator, operator_of
from trine.record.model import HOST_KINDS, MISSING, Rank, Table

__all__ = ["Span", "phases_at", "spans_of", "steps_of_operators"]

_OPERATOR, _LOADER = HOST_KINDS.index("operator"), HOST_KINDS.index("loader")
#: A gap between operators of at least this long, in which a collective ends, is waiting.
LEAST_WAIT_NS = 20_000
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_BACKWARD = re.compile(r"autograd::engine::evaluate_function|\w+Backward\d*$")
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)")
_WAIT = Operator("wait", None, None, 0, "fp32")
_TRANSFER = Operator("transfer", None, None, 0, "fp32")


@dataclass(frozen=True, slots=True)
class Span:
    """An operator that works, or one whose own time counts as glue; times ns."""

    start: int
    end: int
    name: str
    operator: Operator
    sequence: int
    gradient_bytes: int
    events: int
    phase: str


def steps_of_operators(rank: Rank) -> list[tuple[int, RankStep]]:
    """(index, step) of every step of this trace that has operators."""
    host, steps = rank.host, rank.steps
    if host is None or steps is None:
        return []
    found = []
    for index, start, end in zip(
        steps["index"].tolist(), steps["start_ns"].tolist(), steps["end_ns"].tolist(), strict=True
    ):
        if end == MISSING or end <= start:
            continue
        spans = spans_of(host, start, end)
        if spans:
            tasks = _with_collectives(spans, rank.collectives, start, end)
            found.append((index, RankStep(rank.rank, tuple(tasks), (end - start) / 1e9)))
    return found


def spans_of(host: Table, start: int, end: int) -> list[Span]:
    """What the host did in a step, spans without overlap in their order."""
    inside = (host["start_ns"] >= start) & (host["end_ns"] <= end) & (host["end_ns"] > host["start_ns"])
    rows = np.flatnonzero(inside & (host["kind"] == _OPERATOR))
    if not len(rows):
        return []
    phase_of = phases_at(host, start, end)
    texts = host.strings
    shapes, types = host["shapes"], host["types"]
    order = rows[np.lexsort((-host["end_ns"][rows], host["start_ns"][rows]))]
    found: list[Span] = []
    until, sequence_until, sequence = start, start, -1
    for row in order.tolist():
        begin, stop = int(host["start_ns"][row]), int(host["end_ns"][row])
        name = texts.text(int(host["name"][row])) or ""
        own = int(host["sequence"][row])
        if begin >= sequence_until and own == MISSING:
            sequence = -1
        if own != MISSING and own >= 0:
            sequence, sequence_until = own, max(stop, sequence_until)
        if begin < until:
            continue  # inside work that counts as a whole
        operator = operator_of(name, texts.text(int(shapes[row])), texts.text(int(types[row])))
        gradient = _gradient_bytes(name, texts.text(int(shapes[row])))
        if operator.kind == "glue" and not gradient:
            continue
        found.append(Span(begin, stop, name, operator, sequence, gradient, 1, phase_of(begin)))
        until = stop
    return found


def _gradient_bytes(name: str, shapes: str | None) -> int:
    """Bytes of the parameter whose gradient this row stores, 0 for other rows."""
    if name != _ACCUMULATE:
        return 0
    # Of elements: a parameter's own dtype is not said here, and autocast leaves it in fp32.
    return 4 * operator_of("aten::add_", shapes, None).elements


def phases_at(host: Table, start: int, end: int) -> Any:
    """``phase_at(time)`` by what a trace marks: the loader, the first backward function, the optimizer's step."""
    names = [text or "" for text in host.strings.values]
    kinds = np.array(
        [2 if _OPTIMIZER.match(name) else 1 if _BACKWARD.match(name) else 0 for name in names], dtype=np.int8
    )
    inside = (host["start_ns"] >= start) & (host["end_ns"] <= end) & (host["name"] >= 0)
    rows = np.flatnonzero(inside)
    kind = kinds[host["name"][rows]] if len(names) else np.zeros(len(rows), np.int8)
    begins, ends = host["start_ns"][rows], host["end_ns"][rows]
    backward = int(begins[kind == 1].min()) if (kind == 1).any() else end
    backward_end = int(ends[kind == 1].max()) if (kind == 1).any() else end
    optimizer = sorted(zip(begins[kind == 2].tolist(), ends[kind == 2].tolist(), strict=True))
    is_loader = host["kind"][rows] == _LOADER
    loaded = int(ends[is_loader].max()) if is_loader.any() else start

    def phase_at(time: int) -> str:
        if time < loaded and time < backward:
            return "data"
        if any(first <= time <= last for first, last in optimizer):
            return "optimizer"
        if time < backward:
            return "forward"
        return "backward" if time <= backward_end else "other"

    return phase_at


# --- collectives -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """``own``: ns from its start, or from the end of those issued before it where that is later, to its end."""

    issued: int
    own: int
    end: int
    operation: str
    bytes: int
    number: int
    key: str


def _with_collectives(spans: Sequence[Span], table: Table | None, start: int, end: int) -> Iterator[Task]:
    """Host tasks with the gaps between them, and the transfers that were issued on the way."""
    calls = _calls(table, start, end)
    pending = list(calls)
    at, last = start, fresh()
    yield Task(0.0, "data", number=last)
    gradients = max((span.end for span in spans if span.gradient_bytes), default=start)
    for span in [*spans, None]:
        begin = end if span is None else span.start
        phase = "other" if span is None else span.phase
        for task in _gap(at, begin, phase, calls, pending, gradients):
            last = task.number if task.lane != LINK else last
            yield task
        if span is None:
            return
        task = Task(
            (span.end - span.start) / 1e9, span.phase, operator=span.operator, name=span.name,
            sequence=span.sequence, events=span.events, gradient_bytes=span.gradient_bytes,
        )  # fmt: skip
        yield task
        at, last = span.end, task.number


def _gap(
    begin: int, end: int, phase: str, calls: Sequence[_Call], pending: list[_Call], gradients: int
) -> Iterator[Task]:
    """What lies between two spans: glue, what was issued in it, and what was waited for."""
    at = begin
    while pending and pending[0].issued < end:
        call = pending.pop(0)
        issue = min(max(call.issued, at), end)
        glue = Task((issue - at) / 1e9, phase)
        yield glue
        at = issue
        yield Task(
            call.own / 1e9, phase, LINK, _TRANSFER, call.operation, (glue.number,), call.number,
            issued=call.operation, key=call.key, bytes=call.bytes,
        )  # fmt: skip
    # Nobody waits for a bucket while gradients are still to come: a gap before the last is the host's own.
    waits = begin >= gradients
    ended = [
        call
        for call in calls
        if at < call.end <= end and call not in pending and (waits or call.operation != "all_reduce")
    ]
    until = max((call.end for call in ended), default=at)
    if end - at >= LEAST_WAIT_NS and ended and until - at >= LEAST_WAIT_NS:
        yield Task(0.0, phase, operator=_WAIT, after=tuple(call.number for call in ended))
        yield Task((end - until) / 1e9, phase)
    else:
        yield Task((end - at) / 1e9, phase)


def _calls(table: Table | None, start: int, end: int) -> list[_Call]:
    if table is None:
        return []
    rows = np.flatnonzero(
        (table["start_ns"] >= start) & (table["end_ns"] <= end) & (table["end_ns"] != MISSING)
    )
    rows = rows[np.argsort(table["issued_ns"][rows], kind="stable")]
    names = table.text("operation")[rows]
    counts: dict[str, int] = {}
    found: list[_Call] = []
    busy = start
    for row, name in zip(rows.tolist(), names.tolist(), strict=True):
        counts[name] = counts.get(name, 0) + 1
        issued, begin, stop = (int(table[column][row]) for column in ("issued_ns", "start_ns", "end_ns"))
        issued = begin if issued == MISSING else min(issued, begin)
        own = max(stop - max(begin, busy), 0)  # several threads carry calls, and share one link
        busy = max(busy, stop)
        size = max(int(table["bytes"][row]), 0)
        found.append(_Call(issued, own, stop, str(name), size, fresh(), f"{name} {counts[name]}"))
    return found
