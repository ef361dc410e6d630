"""Breakdowns against a slow, exact reference: a bitmap a kind, asked nanosecond by nanosecond.

The reference knows the definitions (shared design) and nothing of the code: no interval, no sorting, no union. Any set
of overlapping events on any number of streams and threads, any selection of steps, Unix times as large as today's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
from analysis_tables import collective_table, rank_of
from hypothesis import assume, given
from hypothesis import strategies as st

from trine.analyzers.breakdown import break_down
from trine.analyzers.results import Breakdown
from trine.analyzers.selection import parse_selection
from trine.record.model import DEVICE_KINDS, MISSING, Rank, Strings

#: Where a double would lose the nanosecond.
OFFSET = 1_706_850_122_846_038_001
END = 90
STEPS = (1, 2, 3)

events = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(0, 14),
        st.sampled_from(DEVICE_KINDS),
        st.integers(0, 6),  # stream
        st.sampled_from([*STEPS, MISSING]),
        st.one_of(st.none(), st.tuples(st.integers(-15, 60), st.integers(1, 3))),  # launch: time, thread
        st.booleans(),  # a pipeline receive
    ),
    min_size=1,
    max_size=25,
)
doings = st.lists(
    st.tuples(
        st.integers(-15, 60),
        st.integers(1, 20),
        st.sampled_from(["loader", "sync", "python", "operator", "annotation"]),
        st.integers(1, 3),
    ),
    max_size=10,
)
selections = st.sampled_from(["all", "1:2", "2:4", "1:4"])


def bitmap(spans: list[tuple[int, int]]) -> np.ndarray:
    """One flag a nanosecond from -20 on."""
    flags = np.zeros(END + 20, dtype=bool)
    for start, end in spans:
        flags[start + 20 : max(end, start) + 20] = True
    return flags


def on_device(rows: list[Any], host: list[Any]) -> Rank:
    device, spans, receives = (
        [],
        [(OFFSET + s, OFFSET + s + n, kind, "h", thread) for s, n, kind, thread in host],
        [],
    )
    for number, (start, length, kind, stream, step, launch, receive) in enumerate(rows):
        device.append(
            (
                OFFSET + start,
                OFFSET + start + length,
                kind,
                -1 if launch is None else len(spans),
                step,
                "k",
                stream,
            )
        )
        if launch is not None:
            spans.append(
                (OFFSET + launch[0], OFFSET + launch[0] + 1, "runtime", "cudaLaunchKernel", launch[1])
            )
        if receive:
            receives.append({"operation": "recv", "device_row": number})
    steps = [(step, OFFSET + 10 * step, OFFSET + 10 * step + 10) for step in STEPS]
    rank = rank_of(device=device, host=spans, steps=steps)
    rank.collectives = collective_table(Strings(), receives) if receives else None
    return rank


def expected_on_device(rows: list[Any], host: list[Any], wanted: str) -> dict[str, Any] | None:
    """Everything that a breakdown says, from bitmaps."""
    if wanted != "all":
        first, last = map(int, wanted.split(":"))
        rows = [row for row in rows if row[4] != MISSING and first <= row[4] < last]
    rows = [row for row in rows if row[1] > 0]
    if not rows:
        return None
    busy = {k: bitmap([(s, s + n) for s, n, kind, *_ in rows if kind == k]) for k in DEVICE_KINDS}
    compute, communication, copy = (busy[kind] for kind in DEVICE_KINDS)
    window = bitmap([(min(row[0] for row in rows), max(row[0] + row[1] for row in rows))])
    anything = compute | communication | copy
    causes: Counter[str] = Counter()
    for at in np.flatnonzero(window & ~anything).tolist():
        causes[_cause(at - 20, rows, host)] += 1
    exposed = communication & ~compute
    return {
        "window_ns": int(window.sum()),
        "parts": (
            int(compute.sum()),
            int(exposed.sum()),
            int((copy & ~compute & ~communication).sum()),
            int((window & ~anything).sum()),
        ),
        "busy": tuple(int(flags.sum()) for flags in (anything, compute, communication, copy)),
        "overlap": int((compute & communication).sum()),
        "causes": dict(causes),
        "events": len(rows),
    }


def _cause(time: int, rows: list[Any], host: list[Any]) -> str:
    ends_at = min(row[0] for row in rows if row[0] > time)
    ending = [row for row in rows if row[0] == ends_at]
    if any(row[6] for row in ending):
        return "bubble"
    launch = min((row[5] for row in ending if row[5] is not None), default=None)
    if launch is None:
        return "other"
    if time >= launch[0]:
        return "dependency"
    doing = {
        kind for start, length, kind, thread in host if thread == launch[1] and start <= time < start + length
    }
    return "data" if "loader" in doing else "sync" if "sync" in doing else "host"


def said(b: Breakdown) -> dict[str, Any]:
    return {
        "window_ns": b.window_ns,
        "parts": (b.compute_ns, b.exposed_communication_ns, b.exposed_copy_ns, b.idle_ns),
        "busy": (b.busy.any, b.busy.compute, b.busy.communication, b.busy.copy),
        "overlap": b.overlap_ns,
        "causes": {name: ns for name, ns in asdict(b.idle).items() if ns},
        "events": b.events,
    }


@given(events, doings, selections)
def test_a_device_window_is_divided_as_defined(rows, host, wanted: str) -> None:
    assume(any(row[1] > 0 for row in rows))  # without any device work the host's operators are divided
    breakdown, reason = break_down(on_device(rows, host), parse_selection(wanted))
    expected = expected_on_device(rows, host, wanted)
    if expected is None:
        assert breakdown is None and reason
        return
    assert breakdown is not None
    assert said(breakdown) == expected
    assert sum(expected["parts"]) == expected["window_ns"], "the reference itself is a partition"
    communication = expected["busy"][2]
    assert breakdown.overlap_efficiency == (expected["overlap"] / communication if communication else None)


@given(events, doings)
def test_windows_of_a_record_add_up(rows, host) -> None:
    """A native record's breakdown is the sum of its deep windows', each a partition of its own."""
    assume(any(row[1] > 0 for row in rows))  # without any device work the host's operators are divided
    windows = (on_device(rows, host), on_device(rows[::-1], host))
    record = rank_of(steps=[(0, OFFSET, OFFSET + END)], format="trine", windows=windows)
    breakdown, _ = break_down(record, parse_selection("all"))
    expected = expected_on_device(rows, host, "all")
    if expected is None:
        assert breakdown is None
        return
    assert breakdown is not None and breakdown.window_ns == 2 * expected["window_ns"]
    assert said(breakdown)["parts"] == tuple(2 * part for part in expected["parts"])
    assert said(breakdown)["causes"] == {name: 2 * ns for name, ns in expected["causes"].items()}


# --- without a device ----------------------------------------------------------------------------------

#: Spans of one thread, as a tracer writes them: (start, length, kind), nested or apart, never crossing.
operators = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(1, 25),
        st.sampled_from(["aten::mm", "aten::add", "c10d::allreduce_", "record_param_comms"]),
        st.integers(1, 3),
    ),
    max_size=14,
)
exchanges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=6)


def nested(found: list[Any]) -> list[Any]:
    """Those of the spans that cross no earlier one of their thread; equal spans count once."""
    kept: list[Any] = []
    for start, length, name, thread in sorted(set(found), key=lambda one: (one[3], one[0], -one[1], one[2])):
        end = start + length
        crossing = any(
            t == thread
            and ((s < end < s + n and start < s) or (s < start < s + n < end) or (s, n) == (start, length))
            for s, n, _, t in kept
        )
        if not crossing:
            kept.append((start, length, name, thread))
    return kept


@given(operators, exchanges, doings)
def test_a_host_window_is_divided_as_defined(found, calls, host) -> None:
    host = [one for one in host if one[2] != "operator"]
    found = nested(found)
    spans = [(OFFSET + s, OFFSET + s + n, "operator", name, thread) for s, n, name, thread in found]
    spans += [(OFFSET + s, OFFSET + s + n, kind, "h", thread) for s, n, kind, thread in host]
    rank = rank_of(host=spans, steps=[(1, OFFSET, OFFSET + 70)])
    rows = [{"operation": "all_reduce", "start_ns": OFFSET + s, "end_ns": OFFSET + s + n} for s, n in calls]
    rank.collectives = collective_table(Strings(), rows) if rows else None
    breakdown, reason = break_down(rank, parse_selection("1:2"))
    calls = [(s, s + n) for s, n in calls if n]
    if not found and not calls:
        assert breakdown is None and reason
        return
    outermost = [
        (s, s + n)
        for s, n, name, thread in found
        if name.startswith("aten::")
        and not any(t == thread and (a, b) != (s, n) and a <= s and s + n <= a + b for a, b, _, t in found)
    ]
    if not outermost and not calls:
        assert breakdown is None and reason
        return
    window = bitmap([(0, 70)])
    compute, communication = bitmap(outermost) & window, bitmap(calls) & window
    idle = window & ~compute & ~communication
    loader = bitmap([(s, s + n) for s, n, kind, _ in host if kind == "loader"])
    blocked = bitmap([(s, s + n) for s, n, kind, _ in host if kind == "sync"]) & ~loader
    assert breakdown is not None
    assert (breakdown.basis, breakdown.window_ns) == ("host", 70)
    assert said(breakdown)["parts"] == (
        int(compute.sum()),
        int((communication & ~compute).sum()),
        0,
        int(idle.sum()),
    )
    assert said(breakdown)["causes"] == {
        name: ns
        for name, ns in {
            "data": int((idle & loader).sum()),
            "sync": int((idle & blocked).sum()),
            "host": int((idle & ~loader & ~blocked).sum()),
        }.items()
        if ns
    }
