"""One rank reduced to what the rest of the analysis needs: small, picklable, of any source."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, SCHEMAS, Quality, Rank, Strings, Table

from .activity import Before, before_collectives, joined_befores
from .breakdown import break_down, device_rows, has_device_work, windows_in
from .memory import summarize_memory
from .memory_attribution import with_memory_owners
from .results import NamedTime, RankSummary
from .selection import Selected, Selection, select
from .steps import phase_sums, sampled_steps, step_statistics
from .studies import Scope, reduce_all
from .tables import add_up, kernel_times, matmul_times, operator_times
from .unrecorded import about_unrecorded_device

__all__ = ["summarize"]

Array = npt.NDArray[Any]

#: Notes of readers that say why a memory peak is a lower bound.
_BOUND_SAID = frozenset(
    {"memory-history-lost", "memory-no-history", "memory-no-segments", "memory-tensors-only"}
)


def summarize(rank: Rank, selection: Selection) -> RankSummary:
    """Every analysis of one rank alone.

    Raises ``UsageError`` when step numbers were given and the rank has none of them.
    """
    rank = with_memory_owners(rank)
    selected = select(rank, selection)
    breakdown, missing = break_down(rank, selection)
    quality = [*rank.quality, *(note for window in rank.windows for note in window.quality)]
    if rank.format != "trine":
        quality = [_with_use(note, selected.everything) for note in quality]
    if (unrecorded := about_unrecorded_device(rank, quality)) is not None:
        quality.append(unrecorded)
    collectives, before = _collectives(rank, selected, selection, quality)
    steps = _steps(rank, selected)
    parts = [(rank, selected)] if rank.format != "trine" else windows_in(rank, selection)
    kernels, operators, dtypes = _named_times(parts)
    bounds = (selected.start_ns, selected.end_ns) if selection.is_range else (None, None)
    memory = summarize_memory(rank, *bounds)
    _say_what_is_missing(rank, selection, selected, breakdown is not None, missing, quality)
    if memory is not None and memory.lower_bound and not _BOUND_SAID & {note.id for note in quality}:
        quality.append(
            Quality(
                "memory-lower-bound",
                "info",
                "the memory peak is a lower bound: the source has no running totals",
                rank.rank,
            )
        )
    sampled = sampled_steps(steps, rank.metadata)
    scope = Scope(rank, selection, selected, tuple(parts), collectives, quality)
    return RankSummary(
        rank=rank.rank,
        source=rank.source,
        format=rank.format,
        world_size=rank.world_size,
        host_name=rank.host_name,
        devices=rank.devices or next((w.devices for w in rank.windows if w.devices), ()),
        groups=rank.groups or next((w.groups for w in rank.windows if w.groups), ()),
        steps=steps,
        breakdown=breakdown,
        breakdown_missing=missing,
        phases_ns=phase_sums(sampled),
        step_statistics=step_statistics(sampled),
        collectives=collectives,
        activity=before.activity,
        activity_example=before.example,
        activity_ns=before.shares_ns,
        activity_spans=before.examples,
        memory=memory,
        kernels=kernels,
        operators=operators,
        dtypes=dtypes,
        metadata=dict(rank.metadata),
        parts=reduce_all(scope),
        quality=tuple(quality),
    )


def _steps(rank: Rank, selected: Selected) -> Table | None:
    if rank.steps is None:
        return None
    rows = np.isin(rank.steps["index"], np.array(selected.steps, dtype=np.int64))
    return rank.steps.select(rows).compact()


def _collectives(
    rank: Rank, selected: Selected, selection: Selection, quality: list[Quality]
) -> tuple[Table | None, Before]:
    """The selected collectives with what the rank did before each."""
    table = rank.collectives
    untimed = table is None or bool((table["end_ns"] == MISSING).all())
    if untimed and rank.windows:
        # The always-on table of NCCL has no ends; deep windows have.
        parts = [_reduced(window, chosen) for window, chosen in windows_in(rank, selection)]
        tables = [part for part, _ in parts if part is not None and len(part)]
        if tables:
            message = (
                "starts and ends of collectives are known in deep windows only; transfer and wait cover those"
            )
            quality.append(Quality("collectives-from-window", "info", message, rank.rank))
            return _concatenated(tables), joined_befores([before for _, before in parts])
    return _reduced(rank, selected)


def _concatenated(tables: list[Table]) -> Table:
    """Tables of one schema, each with its own strings, as one."""
    strings = Strings()
    columns: dict[str, list[Array]] = defaultdict(list)
    for table in tables:
        codes = np.array([*(strings.code(text) for text in table.strings.values), -1], dtype=np.int32)
        for name, kind in SCHEMAS[table.name].items():
            columns[name].append(codes[table[name]] if kind == "text" else table[name])
    return Table(tables[0].name, {name: np.concatenate(parts) for name, parts in columns.items()}, strings)


def _reduced(rank: Rank, selected: Selected) -> tuple[Table | None, Before]:
    table = rank.collectives
    if table is None:
        return None, Before()
    rows = np.flatnonzero(_collectives_in(rank, table, selected))
    return table.select(rows).compact(), before_collectives(rank, rows)


def _collectives_in(rank: Rank, table: Table, selected: Selected) -> Array:
    """Rows of the selection: by the device event where there is one, else by step, else by time."""
    if selected.everything:
        return np.ones(len(table), dtype=bool)
    step = table["step"].copy()
    if rank.device is not None:
        on_device = table["device_row"] >= 0
        step[on_device] = rank.device["step"][table["device_row"][on_device]]
    unknown = (step == MISSING) & (table["device_row"] < 0)
    if rank.steps is not None and unknown.any() and len(rank.steps):
        order = np.argsort(rank.steps["start_ns"], kind="stable")
        time = np.where(table["issued_ns"] != MISSING, table["issued_ns"], table["start_ns"])[unknown]
        place = np.searchsorted(rank.steps["start_ns"][order], time, side="right") - 1
        step[unknown] = np.where(place >= 0, rank.steps["index"][order][np.maximum(place, 0)], MISSING)
    return selected.holds(step)


def _named_times(
    parts: list[tuple[Rank, Selected]],
) -> tuple[tuple[NamedTime, ...], tuple[NamedTime, ...], dict[str, int]]:
    kernels, operators = [], []
    dtypes: dict[str, int] = defaultdict(int)
    for rank, selected in parts:
        if has_device_work(rank):
            rows = np.flatnonzero(device_rows(rank, selected))
            kernels.append(kernel_times(rank.device, rows))
            for dtype, amount in matmul_times(rank.device, rows).items():
                dtypes[dtype] += amount
        if rank.host is not None:
            operators.append(operator_times(rank.host, _host_in(rank.host, selected)))
    return add_up(kernels), add_up(operators), dict(dtypes)


def _host_in(host: Table, selected: Selected) -> Array:
    if selected.everything or selected.start_ns is None or selected.end_ns is None:
        return selected.holds(host["step"])
    return np.asarray((host["start_ns"] >= selected.start_ns) & (host["start_ns"] < selected.end_ns))


#: What a source without a course of time is called.
_HELD = {
    "flight_recorder": "a flight recorder's dump",
    "memory_snapshot": "a memory snapshot",
    "memory_timeline": "a memory timeline",
    "pipeline_schedule": "a pipeline schedule",
}


def _is_timeline(rank: Rank) -> bool:
    """Whether the rank's source shows what happened when; dumps and snapshots show where things stood."""
    tables = (rank.device, rank.host, rank.collectives)
    return rank.format not in _HELD or any(table is not None for table in tables) or bool(rank.windows)


def _with_use(note: Quality, everything: bool) -> Quality:
    """What was done with device work that belongs to no step: the reader cannot know."""
    if note.id != "no-launch-record":
        return note
    done = "they count, as the whole trace is taken" if everything else "they count only under --steps all"
    return replace(note, message=f"{note.message}; {done}")


def _say_what_is_missing(
    rank: Rank,
    selection: Selection,
    selected: Selected,
    has_breakdown: bool,
    missing: str | None,
    quality: list[Quality],
) -> None:
    def note(id: str, severity: Any, message: str) -> None:
        if all(one.id != id for one in quality):
            quality.append(Quality(id, severity, message, rank.rank))

    if not _is_timeline(rank):
        text = (
            f"{_HELD[rank.format]} holds no kernels, operators or phases: what else takes time cannot be said"
        )
        note("no-timeline", "info", text)
        return
    if not has_breakdown:
        note("no-breakdown", "info" if rank.format == "trine" else "warning", f"no breakdown: {missing}")
    if not selected.steps:
        note(
            "no-steps",
            "warning",
            "the source marks no steps, so step times and per-step gains cannot be said",
        )
    elif selection.text == "complete" and selected.everything and len(selected.steps) > 1:
        note(
            "no-launches",
            "warning",
            "no device work has a launch record, so none belongs to a step: the whole trace is analysed",
        )
    elif selection.text == "complete" and selected.everything and rank.format != "trine":
        note(
            "one-step",
            "info",
            "the trace marks one step, so it is analysed whole, its last device work included",
        )
    if rank.format != "trine" and not has_device_work(rank):
        note("no-device-events", "info", "no device events: the breakdown is of host operators")
