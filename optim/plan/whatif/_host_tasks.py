"""Host tasks from a trace without device work: operators in their order, waits for collectives, and what lies between."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trine.optim.plan.whatif._names import Name, Names
from trine.optim.plan.whatif.graph import LINK, RankStep, Task, fresh
from trine.optim.plan.whatif.operators import DTYPE_BYTES, TRANSFER, WAIT, Operator, operator_of
from trine.record.model import HOST_KINDS, MISSING, Rank, Table

__all__ = ["ACCUMULATE", "Phases", "Span", "gradient_bytes", "spans_of", "steps_of_operators"]

_OPERATOR, _LOADER = HOST_KINDS.index("operator"), HOST_KINDS.index("loader")
#: A gap between operators of at least this long, in which a collective ends, is waiting.
LEAST_WAIT_NS = 20_000
#: The function that stores a parameter's gradient.
ACCUMULATE = "torch::autograd::AccumulateGrad"
_BACKWARD = re.compile(r"autograd::engine::evaluate_function|\w+Backward\d*$")
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)")
_PRODUCT = re.compile(r"aten::(\w*mm|\w*convolution\w*|_(scaled_dot_product|flash|efficient)\w*)$")
#: What an event says of phases, by its name.
_BACKWARD_MARK, _OPTIMIZER_MARK, _PRODUCT_MARK = 1, 2, 3


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
        phases = Phases(host, start, end)
        spans = spans_of(host, start, end, phases)
        if spans:
            calls = _calls(rank, start, end)
            tasks = _with_collectives(spans, calls, phases, start, end)
            found.append((index, RankStep(rank.rank, tuple(tasks), (end - start) / 1e9)))
    return found


def spans_of(host: Table, start: int, end: int, phases: Phases) -> list[Span]:
    """What the host did in a step, spans without overlap in their order."""
    inside = (host["start_ns"] >= start) & (host["end_ns"] <= end) & (host["end_ns"] > host["start_ns"])
    rows = np.flatnonzero(inside & (host["kind"] == _OPERATOR))
    if not len(rows):
        return []
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
        inputs = texts.text(int(shapes[row])), texts.text(int(types[row]))
        operator = operator_of(name, *inputs)
        gradient = gradient_bytes(*inputs) if name == ACCUMULATE else 0
        if operator.kind == "glue" and not gradient:
            continue
        found.append(Span(begin, stop, name, operator, sequence, gradient, 1, phases.at(begin)))
        until = stop
    return found


def gradient_bytes(shapes: str | None, types: str | None) -> int:
    """Bytes of the gradient that a row of :data:`ACCUMULATE` stores; in fp32 where the row does not say, 0 without shapes."""
    if not shapes:
        return 0
    stored = operator_of("aten::add_", shapes, types)
    return DTYPE_BYTES[stored.dtype] * stored.elements


class Phases:
    """Phases of a step's instants, by what a trace marks: the loader, backward functions, the optimizer's step.

    A step of several micro-batches has a forward before each backward: from its first product on.
    """

    def __init__(self, host: Table, start: int, end: int) -> None:
        names = [text or "" for text in host.strings.values]
        kinds = np.array([_mark_of(name) for name in names], dtype=np.int8)
        rows = np.flatnonzero((host["start_ns"] >= start) & (host["end_ns"] <= end) & (host["name"] >= 0))
        kind = kinds[host["name"][rows]] if len(names) else np.zeros(len(rows), np.int8)
        begins, ends = host["start_ns"][rows], host["end_ns"][rows]
        functions = _spans(begins[kind == _BACKWARD_MARK], ends[kind == _BACKWARD_MARK])
        self._backward = _passes(functions, begins[kind == _PRODUCT_MARK])
        self._optimizer = _spans(begins[kind == _OPTIMIZER_MARK], ends[kind == _OPTIMIZER_MARK])
        loads = host["kind"][rows] == _LOADER
        self._loader = _spans(begins[loads], ends[loads])

    def at(self, time: int) -> str:
        """The phase of an instant, ns."""
        if any(first <= time < last for first, last in self._loader):
            return "data"
        if any(first <= time <= last for first, last in self._optimizer):
            return "optimizer"
        if not self._backward or time < self._backward[-1][0]:
            return "backward" if any(first <= time < last for first, last in self._backward) else "forward"
        return "backward" if time <= self._backward[-1][1] else "other"

    def stretch(self, begin: int, end: int, phase: str | None = None) -> Iterator[Task]:
        """Host time between two instants as tasks, at least one: what the loader takes of it, and the rest, which is of
        ``phase`` (by default that of its end)."""
        phase = self.at(end) if phase is None else phase
        at = begin
        for first, last in self._loader:
            if last <= at or first >= end:
                continue
            yield Task((max(first, at) - at) / 1e9, phase)
            yield Task((min(last, end) - max(first, at)) / 1e9, "data")
            at = min(last, end)
        yield Task((end - at) / 1e9, phase)


def _mark_of(name: str) -> int:
    """What an event of this name marks, 0 for nothing."""
    if _OPTIMIZER.match(name):
        return _OPTIMIZER_MARK
    if _BACKWARD.match(name):
        return _BACKWARD_MARK
    return _PRODUCT_MARK if _PRODUCT.match(name) else 0


def _passes(functions: Sequence[tuple[int, int]], products: Any) -> list[tuple[int, int]]:
    """Backward passes, of backward functions in their order: one ends where a product follows that is in none of them."""
    found: list[tuple[int, int]] = []
    products = np.sort(products)
    for first, last in functions:
        since = found[-1][1] if found else 0
        between = np.searchsorted(products, first) > np.searchsorted(products, since)
        if found and not between:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found


def _spans(begins: Any, ends: Any) -> list[tuple[int, int]]:
    """Intervals in their order, those that overlap joined."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(zip(begins.tolist(), ends.tolist(), strict=True)):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


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
    name: Name


def _with_collectives(
    spans: Sequence[Span], calls: Sequence[_Call], phases: Phases, start: int, end: int
) -> Iterator[Task]:
    """Host tasks with the gaps between them, and the transfers that were issued on the way."""
    gradients = max((span.end for span in spans if span.gradient_bytes), default=start)
    gaps = _Gaps(phases, calls, gradients)
    at = start
    for span in spans:
        yield from gaps.between(at, span.start, span.phase)
        yield Task(
            (span.end - span.start) / 1e9, span.phase, operator=span.operator, name=span.name,
            sequence=span.sequence, events=span.events, gradient_bytes=span.gradient_bytes,
        )  # fmt: skip
        at = span.end
    yield from gaps.between(at, end, "other")


class _Gaps:
    """What lies between spans: glue, what was issued in it, and what was waited for; asked for in their order."""

    def __init__(self, phases: Phases, calls: Sequence[_Call], gradients: int) -> None:
        self._phases, self._calls, self._gradients = phases, calls, gradients
        self._issued = 0  # of the calls, in the order of their issue

    def between(self, begin: int, end: int, phase: str) -> Iterator[Task]:
        at = begin
        while self._issued < len(self._calls) and self._calls[self._issued].issued < end:
            call = self._calls[self._issued]
            self._issued += 1
            issue = min(max(call.issued, at), end)
            before = list(self._until(at, issue, phase, self._received(at, issue)))
            yield from before
            at = issue
            yield Task(
                call.own / 1e9, self._phases.at(call.issued), LINK, TRANSFER, call.operation, (before[-1].number,), call.number,
                issued=call.operation, key=call.name.key, group=call.name.group, channel=call.name.channel,
                bytes=call.bytes,
            )  # fmt: skip
        yield from self._until(at, end, phase, self._ended(begin, at, end))

    def _until(self, at: int, end: int, phase: str, ended: Sequence[_Call]) -> Iterator[Task]:
        """Host time to ``end``, at least one task; first what it waits for calls that ended meanwhile."""
        until = max((call.end for call in ended), default=at)
        if end - at >= LEAST_WAIT_NS and until - at >= LEAST_WAIT_NS:
            yield Task(0.0, phase, operator=WAIT, after=tuple(call.number for call in ended))
            at = until
        yield from self._phases.stretch(at, end, phase)

    def _received(self, at: int, end: int) -> list[_Call]:
        """Messages that ended between two instants: what is issued next may wait for them."""
        return [call for call in self._calls[: self._issued] if call.name.channel and at < call.end <= end]

    def _ended(self, begin: int, at: int, end: int) -> list[_Call]:
        """Calls that ended in a gap and may have been waited for: no bucket while gradients are still to come, when a gap
        is the host's own."""
        waits = begin >= self._gradients
        issued = self._calls[: self._issued]
        return [call for call in issued if at < call.end <= end and (waits or call.operation != "all_reduce")]


def _calls(rank: Rank, start: int, end: int) -> list[_Call]:
    table = rank.collectives
    if table is None:
        return []
    rows = np.flatnonzero(
        (table["start_ns"] >= start) & (table["end_ns"] <= end) & (table["end_ns"] != MISSING)
    )
    rows = rows[np.argsort(table["issued_ns"][rows], kind="stable")]
    operations, groups = (table.text(name)[rows].tolist() for name in ("operation", "group"))
    names = Names(rank)
    found: list[_Call] = []
    busy: dict[str, int] = {}
    for row, operation, group in zip(rows.tolist(), operations, groups, strict=True):
        size = max(int(table["bytes"][row]), 0)
        name = names.next(str(operation), group, int(table["peer"][row]), size)
        issued, begin, stop = (int(table[column][row]) for column in ("issued_ns", "start_ns", "end_ns"))
        issued = begin if issued == MISSING else min(issued, begin)
        # Several threads carry calls, and share one link.
        own = max(stop - max(begin, busy.get(name.channel, start)), 0)
        busy[name.channel] = max(busy.get(name.channel, start), stop)
        found.append(_Call(issued, own, stop, str(operation), size, fresh(), name))
    return found
