"""Where the time of a window went: a partition that sums to it to the nanosecond.

    compute + exposed communication + exposed copy + idle == window

Exposed communication runs while no compute does; exposed copy while neither does. On a device the
spans are kernels, copies and memsets over all its streams. Without one, compute is the union over
threads of top-level operators other than collectives and waits, and communication the union of the
collectives' own spans.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, Rank, Table

from .idle import device_idle, host_idle, is_receive
from .intervals import EMPTY, Spans, clip, complement, measure, union
from .planned import is_simulated
from .results import Breakdown, BusyTime, IdleCauses
from .selection import Selected, Selection, select, selected_steps

__all__ = [
    "COLLECTIVE_OPERATOR",
    "break_down",
    "device_rows",
    "has_device_work",
    "host_parts",
    "receive_rows",
    "top_level_operators",
    "windows_in",
]

Array = npt.NDArray[Any]

_COMPUTE = DEVICE_KINDS.index("compute")
_COMMUNICATION = DEVICE_KINDS.index("communication")
_COPY = DEVICE_KINDS.index("copy")
_OPERATOR = HOST_KINDS.index("operator")

#: Host operators that issue a collective or wait for one: c10d's dispatcher entries, functional
#: collectives with their ``wait_tensor``, the back ends' own spans and their metadata record.
COLLECTIVE_OPERATOR = re.compile(
    r"c10d(_functional)?::|_c10d_functional(_autograd)?::|record_param_comms|(gloo|nccl|mpi|ucc|xccl|hccl):"
)


def has_device_work(rank: Rank) -> bool:
    """Whether the rank has any device event of some length."""
    return rank.device is not None and bool((rank.device["end_ns"] > rank.device["start_ns"]).any())


def device_rows(rank: Rank, selected: Selected) -> Array:
    """Mask over ``rank.device``: events of some length that belong to the selection."""
    assert rank.device is not None
    return np.asarray(selected.holds(rank.device["step"]) & (rank.device["end_ns"] > rank.device["start_ns"]))


def break_down(rank: Rank, selection: Selection) -> tuple[Breakdown | None, str | None]:
    """The breakdown of a rank, or ``None`` and the reason in words.

    A native record has kernels and operators only in its deep windows: their breakdowns are summed.
    Raises ``UsageError`` when the selection names no step of the rank.
    """
    if rank.format == "trine":
        return _of_windows(rank, selection)
    return _of_trace(rank, select(rank, selection))


def _of_trace(rank: Rank, selected: Selected) -> tuple[Breakdown | None, str | None]:
    if has_device_work(rank):
        return _device_breakdown(rank, selected)
    return _host_breakdown(rank, selected)


def _of_windows(rank: Rank, selection: Selection) -> tuple[Breakdown | None, str | None]:
    if is_simulated(rank.metadata):
        return None, "a plan has times of micro-batches and collectives, none of kernels and operators"
    if not rank.windows:
        return None, "the record has no deep window, so kernels and operators are not known"
    found = [_of_trace(window, selected) for window, selected in windows_in(rank, selection)]
    parts = [part for part, _ in found if part is not None]
    if not parts:
        reasons = [reason for _, reason in found if reason is not None]
        return None, reasons[0] if reasons else "no deep window lies in the selected steps"
    return _summed(parts), None


def windows_in(rank: Rank, selection: Selection) -> list[tuple[Rank, Selected]]:
    """The deep windows of a native record, each with its part of the selection.

    A window's steps are numbered by its profiler, so the record's step is the one in which the
    window's step has its middle.
    """
    chosen = select(rank, selection)
    found: list[tuple[Rank, Selected]] = []
    for window in rank.windows:
        everything = select(window, Selection("all"))
        if selection.text == "all" or not everything.steps:
            if not selection.is_range:
                found.append((window, everything))
            continue
        assert window.steps is not None
        inside = _steps_inside(window.steps, rank.steps, chosen)
        if inside:
            found.append((window, selected_steps(window.steps, inside)))
    return found


def _steps_inside(steps: Table, of_record: Table | None, chosen: Selected) -> list[int]:
    numbers = steps["index"]
    if of_record is not None and len(of_record):
        order = np.argsort(of_record["start_ns"], kind="stable")
        middle = steps["start_ns"] + (steps["end_ns"] - steps["start_ns"]) // 2
        place = np.searchsorted(of_record["start_ns"][order], middle, side="right") - 1
        row = order[np.maximum(place, 0)]
        held = (place >= 0) & (middle < of_record["end_ns"][row])
        inside = held & np.isin(of_record["index"][row], np.array(chosen.steps, dtype=np.int64))
        if held.any():
            numbers = numbers[inside]
            return [int(number) for number in np.unique(numbers)]
    return [int(number) for number in np.unique(numbers) if number in set(chosen.steps)]


def _summed(parts: list[Breakdown]) -> Breakdown:
    if len(parts) == 1:
        return parts[0]

    def total(name: str, of: list[Any]) -> int:
        return sum(getattr(part, name) for part in of)

    idle, busy = [part.idle for part in parts], [part.busy for part in parts]
    communication, overlap = total("communication", busy), total("overlap_ns", parts)
    return Breakdown(
        window_ns=total("window_ns", parts),
        compute_ns=total("compute_ns", parts),
        exposed_communication_ns=total("exposed_communication_ns", parts),
        exposed_copy_ns=total("exposed_copy_ns", parts),
        idle_ns=total("idle_ns", parts),
        idle=IdleCauses(
            **{name: total(name, idle) for name in ("data", "host", "sync", "dependency", "bubble", "other")}
        ),
        busy=BusyTime(**{name: total(name, busy) for name in ("any", "compute", "communication", "copy")}),
        overlap_ns=overlap,
        overlap_efficiency=overlap / communication if communication else None,
        basis="device" if any(part.basis == "device" for part in parts) else "host",
        steps=tuple(sorted({step for part in parts for step in part.steps})),
        events=total("events", parts),
    )


def _device_breakdown(rank: Rank, selected: Selected) -> tuple[Breakdown | None, str | None]:
    device = rank.device
    assert device is not None
    rows = np.flatnonzero(device_rows(rank, selected))
    if not len(rows):
        return None, "no device work was launched in the selected steps"
    rows = rows[np.argsort(device["start_ns"][rows], kind="stable")]
    start, end, kind = (device[column][rows] for column in ("start_ns", "end_ns", "kind"))
    window = (int(start[0]), int(end.max()))
    compute = union(start[kind == _COMPUTE], end[kind == _COMPUTE])
    communication = union(start[kind == _COMMUNICATION], end[kind == _COMMUNICATION])
    copy = union(start[kind == _COPY], end[kind == _COPY])
    any_work = union(start, end)
    gaps = complement(any_work, *window)
    receive = np.isin(rows, receive_rows(rank.collectives))
    causes = device_idle(gaps, start, device["launch"][rows], receive, rank.host)
    return (
        _partition(window, compute, communication, copy, causes, "device", selected.steps, len(rows)),
        None,
    )


def receive_rows(collectives: Table | None) -> Array:
    """Rows of ``device`` that are pipeline receives."""
    if collectives is None or not len(collectives):
        return np.empty(0, dtype=np.int64)
    codes = [code for code, text in enumerate(collectives.strings.values) if is_receive(text)]
    return np.asarray(collectives["device_row"][np.isin(collectives["operation"], codes)])


def host_parts(rank: Rank, selected: Selected) -> tuple[tuple[int, int], Spans, Spans, int] | str:
    """Window, compute, communication and number of spans of a rank without a device, or why there are none."""
    operators = top_level_operators(rank.host)
    collectives = _collective_spans(rank.collectives)
    starts = [spans.start for spans in (operators, collectives) if len(spans.start)]
    if not starts:
        return "the trace holds neither device events nor host operators"
    bounds = [(selected.start_ns, selected.end_ns)] if selected.start_ns is not None else []
    if selected.everything:
        bounds += [
            (int(spans.start.min()), int(spans.end.max()))
            for spans in (operators, collectives)
            if len(spans.start)
        ]
    known = [(start, end) for start, end in bounds if start is not None and end is not None]
    if not known:
        return "the selected steps have no start or end"
    window = (min(start for start, _ in known), max(end for _, end in known))
    if window[1] <= window[0]:
        return "the selected steps have no length"
    compute = clip(union(operators.start, operators.end), *window)
    communication = clip(union(collectives.start, collectives.end), *window)
    events = int(((operators.end > window[0]) & (operators.start < window[1])).sum()) + int(
        ((collectives.end > window[0]) & (collectives.start < window[1])).sum()
    )
    return window, compute, communication, events


def _host_breakdown(rank: Rank, selected: Selected) -> tuple[Breakdown | None, str | None]:
    parts = host_parts(rank, selected)
    if isinstance(parts, str):
        return None, parts
    window, compute, communication, events = parts
    causes = host_idle(complement(compute | communication, *window), rank.host)
    return _partition(window, compute, communication, EMPTY, causes, "host", selected.steps, events), None


def top_level_operators(host: Table | None) -> Spans:
    """Operators that lie in no other operator of their thread, collectives and waits left out.

    Overlapping across threads, so not a union; sorted by thread, then start.
    """
    if host is None:
        return EMPTY
    rows = np.flatnonzero((host["kind"] == _OPERATOR) & (host["end_ns"] > host["start_ns"]))
    if not len(rows):
        return EMPTY
    start, end, thread = (host[column][rows] for column in ("start_ns", "end_ns", "thread"))
    order = np.lexsort((-end, start, thread))
    rows, start, end, thread = rows[order], start[order], end[order], thread[order]
    top = np.zeros(len(rows), dtype=bool)
    edges = np.flatnonzero(np.diff(thread)) + 1
    for first, last in zip([0, *edges], [*edges, len(rows)], strict=True):
        reach = np.maximum.accumulate(end[first:last])
        top[first] = True
        top[first + 1 : last] = start[first + 1 : last] >= reach[:-1]
    waits = [code for code, text in enumerate(host.strings.values) if COLLECTIVE_OPERATOR.match(text)]
    keep = top & ~np.isin(host["name"][rows], waits)
    return Spans(start[keep], end[keep])


def _collective_spans(collectives: Table | None) -> Spans:
    if collectives is None:
        return EMPTY
    start, end = collectives["start_ns"], collectives["end_ns"]
    known = (start != MISSING) & (end != MISSING) & (end > start)
    return Spans(start[known], end[known])


def _partition(
    window: tuple[int, int],
    compute: Spans,
    communication: Spans,
    copy: Spans,
    causes: IdleCauses,
    basis: Any,
    steps: tuple[int, ...],
    events: int,
) -> Breakdown:
    compute_or_communication = compute | communication
    busy = BusyTime(
        any=measure(compute_or_communication | copy),
        compute=measure(compute),
        communication=measure(communication),
        copy=measure(copy),
    )
    either = measure(compute_or_communication)
    exposed = either - busy.compute
    overlap = busy.communication - exposed
    return Breakdown(
        window_ns=window[1] - window[0],
        compute_ns=busy.compute,
        exposed_communication_ns=exposed,
        exposed_copy_ns=busy.any - either,
        idle_ns=window[1] - window[0] - busy.any,
        idle=causes,
        busy=busy,
        overlap_ns=overlap,
        overlap_efficiency=overlap / busy.communication if busy.communication else None,
        basis=basis,
        steps=steps,
        events=events,
    )
