"""Ranks and summaries built from a few spans, for tests of single analyses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trine.analyzers.results import RankSummary
from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, PHASES, Group, Rank, Strings, Table

#: (start, end, kind), (start, end, kind, launch) or (start, end, kind, launch, step)
DeviceSpan = tuple[Any, ...]
#: (start, end, kind), then name, thread, parent, step
HostSpan = tuple[Any, ...]


def device_table(strings: Strings, spans: Sequence[DeviceSpan]) -> Table:
    filled = [(*span, *(-1, 0, "kernel", 0)[len(span) - 3 :]) for span in spans]
    return Table(
        "device",
        {
            "start_ns": [span[0] for span in filled],
            "end_ns": [span[1] for span in filled],
            "kind": [DEVICE_KINDS.index(span[2]) for span in filled],
            "launch": [span[3] for span in filled],
            "step": [span[4] for span in filled],
            "name": [strings.code(span[5]) for span in filled],
            "stream": [span[6] for span in filled],
        },
        strings,
    )


def host_table(strings: Strings, spans: Sequence[HostSpan]) -> Table:
    filled = [(*span, *("work", 1, -1, 0)[len(span) - 3 :]) for span in spans]
    return Table(
        "host",
        {
            "start_ns": [span[0] for span in filled],
            "end_ns": [span[1] for span in filled],
            "kind": [HOST_KINDS.index(span[2]) for span in filled],
            "name": [strings.code(span[3]) for span in filled],
            "thread": [span[4] for span in filled],
            "parent": [span[5] for span in filled],
            "step": [span[6] for span in filled],
        },
        strings,
    )


def step_table(
    strings: Strings, spans: Sequence[tuple[int, int, int]], phases: Sequence[Sequence[int]] | None = None
) -> Table:
    """Steps from (index, start, end), and phases in the order of ``PHASES``."""
    columns: dict[str, Any] = {
        "index": [span[0] for span in spans],
        "start_ns": [span[1] for span in spans],
        "end_ns": [span[2] for span in spans],
    }
    for position, name in enumerate(PHASES):
        if phases is not None:
            columns[f"phase_{name}_ns"] = [row[position] for row in phases]
    return Table("steps", columns, strings)


def collective_table(strings: Strings, calls: Sequence[dict[str, Any]]) -> Table:
    """Collectives from dictionaries of columns; text as text."""
    texts = ("operation", "group", "dtype", "state", "label", "stack")
    columns: dict[str, Any] = {}
    for name in {key for call in calls for key in call}:
        missing = None if name in texts else -1 if name.endswith("_row") else MISSING
        values = [call.get(name, missing) for call in calls]
        columns[name] = [strings.code(value) for value in values] if name in texts else values
    return Table("collectives", columns, strings)


def rank_of(
    *,
    rank: int = 0,
    device: Sequence[DeviceSpan] | None = None,
    host: Sequence[HostSpan] | None = None,
    steps: Sequence[tuple[int, int, int]] | None = None,
    phases: Sequence[Sequence[int]] | None = None,
    collectives: Sequence[dict[str, Any]] | None = None,
    format: str = "kineto",
    **others: Any,
) -> Rank:
    strings = Strings()
    return Rank(
        rank,
        "by hand",
        format,
        strings,
        steps=None if steps is None else step_table(strings, steps, phases),
        device=None if device is None else device_table(strings, device),
        host=None if host is None else host_table(strings, host),
        collectives=None if collectives is None else collective_table(strings, collectives),
        **others,
    )


def summary_of(
    rank: int,
    calls: Sequence[dict[str, Any]] | None = None,
    *,
    groups: tuple[Group, ...] = (),
    activity: Sequence[str] = (),
    **others: Any,
) -> RankSummary:
    strings = Strings()
    values: dict[str, Any] = {
        "source": "by hand",
        "format": "kineto",
        "world_size": None,
        "host_name": None,
        "devices": (),
        "steps": None,
        "breakdown": None,
        "breakdown_missing": "made by hand",
        "phases_ns": None,
        "step_statistics": None,
        **others,
    }
    return RankSummary(
        rank=rank,
        groups=groups,
        collectives=None if calls is None else collective_table(strings, calls),
        activity=tuple(activity),
        **values,
    )


def calls_at(
    starts: Sequence[int],
    ends: Sequence[int],
    operation: str = "all_reduce",
    group: str | Sequence[str] | None = "0",
    **columns: Any,
) -> list[dict[str, Any]]:
    """Calls of one operation; further columns are sequences or one value for all."""
    return [
        {
            "operation": operation,
            "start_ns": int(start),
            "end_ns": int(end),
            **{
                name: value if np.isscalar(value) or value is None else value[row]
                for name, value in {"group": group, **columns}.items()
            },
        }
        for row, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
