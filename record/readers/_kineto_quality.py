"""Everything that was odd about a trace becomes a note."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from ..model import Rank
from ._kineto_columns import Columns
from ._kineto_stream import Findings

__all__ = ["say_what_was_odd"]

Severity = Literal["info", "warning", "error"]
_Note = tuple[str, Severity, str]


def say_what_was_odd(rank: Rank, columns: Columns, findings: Findings, said: int | None) -> None:
    """Add notes to a rank; ``said`` is the rank that its file states."""
    for note in (*_of_the_file(rank, columns, findings), *_of_the_events(columns), *_of_the_tables(rank)):
        rank.note(*note)
    if said is not None and said != rank.rank:
        rank.note(
            "rank-renamed", "warning", f"{rank.source} says it is rank {said} and is read as rank {rank.rank}"
        )


def _of_the_file(rank: Rank, columns: Columns, findings: Findings) -> Iterator[_Note]:
    if findings.damaged:
        yield (
            "damaged-file",
            "error",
            f"{rank.source} is damaged ({findings.damaged}); the events before the damage are used",
        )
    if findings.truncated:
        yield (
            "truncated-file",
            "error",
            f"{rank.source} ends in the middle; its {columns.events:,} complete events are used",
        )
    if findings.tail_lost:
        yield (
            "unreadable-metadata",
            "warning",
            f"{rank.source}: what stands after its events is broken JSON and was left out",
        )
    if findings.repaired:
        yield (
            "repaired-events",
            "warning",
            f"{findings.repaired:,} events were invalid JSON and could be repaired",
        )
    if findings.dropped:
        yield (
            "dropped-events",
            "error",
            f"{findings.dropped:,} events were invalid JSON beyond repair and are left out",
        )


def _of_the_events(columns: Columns) -> Iterator[_Note]:
    if columns.untimed:
        yield "untimed-events", "warning", f"{columns.untimed:,} events have no usable time and are left out"
    if columns.negative_durations:
        yield (
            "negative-durations",
            "warning",
            f"{columns.negative_durations:,} events last less than nothing; they count as of no length",
        )
    if columns.unclosed:
        yield (
            "unclosed-events",
            "warning",
            f"{columns.unclosed:,} spans end without a beginning and are left out",
        )
    if columns.unknown:
        kinds = ", ".join(f"{name} ({count:,})" for name, count in columns.unknown.most_common(5))
        yield "unknown-categories", "info", f"events of unknown categories are left out: {kinds}"


def _of_the_tables(rank: Rank) -> Iterator[_Note]:
    device = rank.device
    if device is None:
        yield (
            "no-device-events",
            "info",
            "no device work was recorded; the breakdown is of the host's operators",
        )
    elif missing := int(np.count_nonzero(device["launch"] < 0)):
        severity: Severity = "info" if missing * 10 < len(device) else "warning"
        some = f"{missing:,} of {len(device):,} device events have no launch record"
        yield "no-launch-record", severity, f"{some}; they belong to no step and count only under --steps all"
    if rank.steps is None:
        yield (
            "no-steps",
            "info",
            "no step marks (ProfilerStep#N) were recorded; the whole trace is one window",
        )
