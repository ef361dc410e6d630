"""The report's sections on what ranks exchange and what they hold: communication and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trine.analyzers.results import Analysis, CollectiveResult
from trine.analyzers.units import duration, percent, rate, size

from ._cells import MOST_LINES, Limits, Words, left, right, thin
from .document import Bars, Block, Heat, Section, Series, Table, clean

__all__ = ["communication", "memory"]


def communication(analysis: Analysis, text: Words, limits: Limits) -> Section | None:
    """Blame by rank, collectives, and the heatmap."""
    blocks: list[Block] = []
    blame = _blame(text, limits)
    if blame is not None:
        blocks.append(blame)
    if analysis.collectives:
        blocks.append(_collectives(analysis.collectives, text, limits.rows))
    heat = _heat(analysis, text, limits)
    if heat is not None:
        blocks.append(heat)
    return Section("communication", text["communication_section"], tuple(blocks)) if blocks else None


def _blame(text: Words, limits: Limits) -> Bars | None:
    found = [
        (rank, part) for rank in limits.ranks if (part := rank.communication) is not None and part.matched
    ]
    if not found:
        return None
    cells = []
    for rank, part in found:
        doing = max(part.late_doing, key=lambda late: late.total_ns, default=None)
        words = "–" if doing is None else f"{doing.activity} {duration(doing.total_ns)}"
        cells.append(
            (
                str(rank.rank),
                duration(part.transfer_ns),
                duration(part.wait_ns),
                duration(part.caused_wait_ns),
                duration(part.lateness_ns),
                f"{part.last_in} / {part.matched}",
                clean(words),
            )
        )
    columns = (
        *right(text["rank"], text["transfer"], text["waits"], text["causes"], text["late_by"]),
        *right(f"{text['last_in']} / {text['matched']}"),
        left(text["doing"], flexible=True),
    )
    return Bars(
        text["blame_title"],
        {"transfer": text["transfer"], "wait": text["waits"]},
        {"transfer": "communication", "wait": "communication"},
        tuple(
            (f"{text['rank']} {rank.rank}", {"transfer": part.transfer_ns, "wait": part.wait_ns})
            for rank, part in found
        ),
        Table(columns, tuple(cells), note=limits.note(text)),
    )


def _collectives(rows: Sequence[CollectiveResult], text: Words, most: int) -> Table:
    ordered = sorted(rows, key=lambda row: row.transfer_ns + row.wait_ns, reverse=True)
    cells = tuple(
        (
            clean(row.op if row.label is None else f"{row.op} {row.label}"),
            clean(f"{row.group} ({row.group_size or len(row.ranks)})".strip()),
            str(row.calls),
            "–" if row.bytes is None else size(row.bytes),
            duration(row.transfer_ns),
            duration(row.wait_ns),
            "–" if row.busbw_bytes_per_s is None else rate(row.busbw_bytes_per_s),
            _culprits(row.caused_by),
        )
        for row in ordered[:most]
    )
    columns = (
        left(text["operation"], flexible=True),
        left(f"{text['group']} ({text['ranks']})", flexible=True),
        *right(text["calls"], text["bytes"], text["transfer"], text["wait"], text["busbw"]),
        left(text["caused_by"]),
    )
    note = text["more_rows"].format(left=len(rows) - most) if len(rows) > most else ""
    return Table(columns, cells, text["collectives_title"], note)


def _culprits(caused_by: Mapping[int, int]) -> str:
    """The ranks behind most of the wait, largest first."""
    total = sum(caused_by.values())
    if total <= 0:
        return "–"
    ordered = sorted(caused_by.items(), key=lambda pair: -pair[1])[:2]
    return ", ".join(f"{rank} ({percent(ns / total)})" for rank, ns in ordered if ns > 0)


def _heat(analysis: Analysis, text: Words, limits: Limits) -> Heat | None:
    shown = [rank.rank for rank in limits.ranks]
    cells = [cell for cell in analysis.heatmap if cell.rank in set(shown)]
    if not cells or len(shown) < 2:
        return None
    totals: dict[str, int] = {}
    for cell in cells:
        totals[cell.collective] = totals.get(cell.collective, 0) + cell.wait_ns
    if len(totals) < 2:  # one kind: the waits above say it all
        return None
    kinds = sorted(totals, key=lambda kind: -totals[kind])[:12]
    at = {(cell.rank, cell.collective): cell for cell in cells}
    values = tuple(
        tuple(float(at[rank, kind].wait_ns) if (rank, kind) in at else None for kind in kinds)
        for rank in shown
    )
    table_rows = tuple(
        (str(rank), *("–" if value is None else duration(value) for value in row))
        for rank, row in zip(shown, values, strict=True)
    )
    names = tuple(clean(kind) for kind in kinds)
    return Heat(
        text["heat_title"],
        tuple(f"{text['rank']} {rank}" for rank in shown),
        names,
        values,
        "communication",
        Table(right(text["rank"], *names), table_rows, note=limits.note(text)),
    )


# --- memory ----------------------------------------------------------------------------------------


def memory(analysis: Analysis, text: Words, limits: Limits) -> Section | None:
    """Peaks by rank, what is alive there, and the series."""
    found = [(rank.rank, part) for rank in limits.ranks if (part := rank.summary.memory) is not None]
    if not found:
        return None
    cells = []
    for rank, part in found:
        capacity = part.capacity_bytes or analysis.hardware.memory_bytes
        used = max(
            (peak for peak in (part.peak_bytes, part.reserved_peak_bytes) if peak is not None), default=None
        )
        at_peak = sorted(part.at_peak.items(), key=lambda pair: -pair[1])[:4]
        least = f"{text['lower_bound']} " if part.lower_bound else ""
        cells.append(
            (
                str(rank),
                "–" if part.peak_bytes is None else least + size(part.peak_bytes),
                "–" if part.reserved_peak_bytes is None else size(part.reserved_peak_bytes),
                "–" if capacity is None else size(capacity),
                "–" if capacity is None or used is None else percent(used / capacity),
                "–" if part.retries is None else str(part.retries),
                ", ".join(f"{clean(name.replace('_', ' '))} {size(bytes)}" for name, bytes in at_peak) or "–",
            )
        )
    columns = (
        *right(
            text["rank"],
            text["peak"],
            text["reserved"],
            text["capacity"],
            text["of_capacity"],
            text["retries"],
        ),
        left(text["at_peak"], flexible=True),
    )
    table = Table(columns, tuple(cells), note=limits.note(text))
    # Time on the axis counts from the first reading of any rank.
    starts = [part.series[0][0] for _, part in found if part.series]
    lines = tuple(
        (
            f"{text['rank']} {rank}",
            thin([((point[0] - min(starts)) / 1e9, float(point[1])) for point in part.series]),
        )
        for rank, part in found
        if len(part.series) > 1
    )
    block: Block = table
    if lines and "memory_owners" not in analysis.studies:  # which draws the same curve by category
        block = Series(text["memory_series"], "memory", "size", "s", lines[:MOST_LINES], table)
    return Section("memory", text["memory_section"], (block,))
