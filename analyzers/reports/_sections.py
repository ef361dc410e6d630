"""The report's sections of numbers: each a pure function from an analysis to blocks, or None where it
has nothing to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trine.analyzers.results import Analysis, CollectiveResult, NamedTime, RankResult
from trine.analyzers.units import count, duration, percent, rate, size

from .document import Bars, Block, Column, Heat, Paragraph, Section, Series, Table, clean

__all__ = ["Limits", "communication", "memory", "step_times", "utilisation", "where", "work"]

#: Points of a line in a figure; a screen shows no more.
MOST_POINTS = 600
#: Lines of a figure: beyond a dozen nobody tells them apart.
MOST_LINES = 12

Words = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """The ranks that are shown, how many are not, and the rows of a table."""

    ranks: tuple[RankResult, ...]
    hidden: int
    rows: int

    def note(self, text: Words) -> str:
        """What is said under a table by rank."""
        return text["more_ranks"].format(left=self.hidden) if self.hidden else ""


def _share(ns: float, of: float) -> str:
    if ns == 0:
        return "0"
    return f"{duration(ns)} ({percent(ns / of)})" if of > 0 else duration(ns)


def _left(title: str, flexible: bool = False) -> Column:
    return Column(title, "left", flexible)


def _right(*titles: str) -> tuple[Column, ...]:
    return tuple(Column(title, "right") for title in titles)


# --- where the time goes ---------------------------------------------------------------------------


def where(analysis: Analysis, text: Words, limits: Limits) -> Section:
    """Breakdown, idle causes and phases by rank."""
    blocks: list[Block] = [block for block in (_phases(text, limits), _breakdown(text, limits)) if block]
    idle = _idle(text, limits)
    if idle is not None:
        blocks.append(idle)
    reasons = {rank.summary.breakdown_missing for rank in analysis.ranks if rank.summary.breakdown is None}
    for reason in sorted(reason for reason in reasons if reason):
        blocks.append(Paragraph(text["no_breakdown"].format(reason=clean(reason).rstrip("."))))
    return Section("where", text["where"], tuple(blocks))


def _breakdown(text: Words, limits: Limits) -> Bars | None:
    parts = ("compute", "exposed_communication", "exposed_copy", "idle")
    found = [(rank.rank, b) for rank in limits.ranks if (b := rank.summary.breakdown) is not None]
    if not found:
        return None
    rows = tuple(
        (f"{text['rank']} {rank}", {part: getattr(b, f"{part}_ns") for part in parts}) for rank, b in found
    )
    cells = tuple(
        (
            str(rank),
            duration(b.window_ns),
            *(_share(getattr(b, f"{part}_ns"), b.window_ns) for part in parts),
            "–" if b.overlap_efficiency is None else percent(b.overlap_efficiency),
            text[f"basis_{b.basis}"],
        )
        for rank, b in found
    )
    columns = (
        *_right(text["rank"], text["window"], *(text[part] for part in parts), text["overlap"]),
        _left(text["basis"]),
    )
    sides = {"compute": "computation", "exposed_communication": "communication", "exposed_copy": "memory"}
    return Bars(
        text["breakdown_title"],
        {part: text[part] for part in parts},
        {**sides, "idle": "idle"},
        rows,
        Table(columns, cells, note=limits.note(text)),
    )


def _idle(text: Words, limits: Limits) -> Table | None:
    causes: tuple[str, ...] = ("data", "host", "sync", "dependency", "bubble", "other")
    found = [(rank.rank, b) for rank in limits.ranks if (b := rank.summary.breakdown) is not None]
    causes = tuple(cause for cause in causes if any(getattr(b.idle, cause) for _, b in found))
    if not causes:
        return None
    cells = tuple(
        (str(rank), *(_share(getattr(b.idle, cause), b.window_ns) for cause in causes)) for rank, b in found
    )
    columns = _right(text["rank"], *(text[f"cause_{cause}"] for cause in causes))
    return Table(columns, cells, text["idle_title"], limits.note(text))


def _phases(text: Words, limits: Limits) -> Bars | None:
    found = [(rank.rank, phases) for rank in limits.ranks if (phases := rank.summary.phases_ns)]
    if not found:
        return None
    names = [name for name in found[0][1] if any(phases.get(name) for _, phases in found)]
    sides = {"forward": "computation", "backward": "computation", "optimizer": "memory", "copy": "memory"}
    sides |= {"exposed_communication": "communication", "data": "idle", "other": "idle"}
    rows = tuple(
        (f"{text['rank']} {rank}", {name: phases.get(name, 0) for name in names}) for rank, phases in found
    )
    cells = tuple(
        (
            str(rank),
            duration(sum(phases.values())),
            *(percent(phases.get(name, 0) / max(sum(phases.values()), 1)) for name in names),
        )
        for rank, phases in found
    )
    columns = _right(text["rank"], text["total"], *(text[f"phase_{name}"] for name in names))
    warm_up = any((s := rank.summary.step_statistics) is not None and s.warm_up for rank in limits.ranks)
    return Bars(
        text["phases_title_warm_up" if warm_up else "phases_title"],
        {name: text[f"phase_{name}"] for name in names},
        {name: sides.get(name, "idle") for name in names},
        rows,
        Table(columns, cells, note=limits.note(text)),
    )


# --- steps -----------------------------------------------------------------------------------------


def step_times(analysis: Analysis, text: Words, limits: Limits) -> Section | None:
    """Median, interval, warm-up, outliers; a line a rank."""
    statistics = analysis.step_statistics
    blocks: list[Block] = []
    if statistics is not None:
        said = text["step_line"].format(
            median=duration(statistics.median_ns),
            low=duration(statistics.low_ns),
            high=duration(statistics.high_ns),
            p95=duration(statistics.p95_ns),
            count=statistics.count,
            unit=text["step" if statistics.count == 1 else "steps"],
        )
        for name, steps in (("warm_up", statistics.warm_up), ("outliers", statistics.outliers)):
            if steps:
                said += "; " + text[name].format(steps=_some(steps))
        blocks.append(Paragraph(said))
    series = _step_series(text, limits)
    if series is not None:
        blocks.append(series)
    return Section("steps", text["step_times"], tuple(blocks)) if blocks else None


def _some(values: Sequence[int], most: int = 12) -> str:
    head = ", ".join(str(value) for value in values[:most])
    return head if len(values) <= most else f"{head}, … ({len(values)})"


def _step_series(text: Words, limits: Limits) -> Series | None:
    lines: list[tuple[str, tuple[tuple[float, float], ...]]] = []
    cells: list[tuple[str, ...]] = []
    for rank in limits.ranks:
        steps, own = rank.summary.steps, rank.summary.step_statistics
        if steps is not None and len(steps) > 1 and len(lines) < MOST_LINES:
            spans = steps["end_ns"] - steps["start_ns"]
            points = tuple((float(x), float(y)) for x, y in zip(steps["index"], spans, strict=True))
            lines.append((f"{text['rank']} {rank.rank}", _thin(points)))
        if own is not None:
            low_high = f"{duration(own.low_ns)} – {duration(own.high_ns)}"
            cells.append(
                (str(rank.rank), str(own.count), duration(own.median_ns), low_high, duration(own.p95_ns))
            )
    if not lines:
        return None
    columns = _right(text["rank"], text["steps"], text["median"], text["interval"], text["p95"])
    return Series(
        text["step_series"],
        "computation",
        "duration",
        text["step"],
        tuple(lines),
        Table(columns, tuple(cells), note=limits.note(text)),
    )


def _thin(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """At most :data:`MOST_POINTS`, keeping each stretch's lowest and highest: peaks must stay."""
    if len(points) <= MOST_POINTS:
        return tuple(points)
    stretch = -(-len(points) // (MOST_POINTS // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept.extend(sorted(ends))
    return tuple(kept)


# --- communication ---------------------------------------------------------------------------------


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
        *_right(text["rank"], text["transfer"], text["waits"], text["causes"], text["late_by"]),
        *_right(f"{text['last_in']} / {text['matched']}"),
        _left(text["doing"], flexible=True),
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
            clean(f"{row.group} ({len(row.ranks)})"),
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
        _left(text["operation"], flexible=True),
        _left(f"{text['group']} ({text['ranks']})", flexible=True),
        *_right(text["calls"], text["bytes"], text["transfer"], text["wait"], text["busbw"]),
        _left(text["caused_by"]),
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
        Table(_right(text["rank"], *names), table_rows, note=limits.note(text)),
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
                ", ".join(f"{clean(name)} {size(bytes)}" for name, bytes in at_peak) or "–",
            )
        )
    columns = (
        *_right(
            text["rank"],
            text["peak"],
            text["reserved"],
            text["capacity"],
            text["of_capacity"],
            text["retries"],
        ),
        _left(text["at_peak"], flexible=True),
    )
    table = Table(columns, tuple(cells), note=limits.note(text))
    # Time on the axis counts from the first reading of any rank.
    starts = [part.series[0][0] for _, part in found if part.series]
    lines = tuple(
        (
            f"{text['rank']} {rank}",
            _thin([((point[0] - min(starts)) / 1e9, float(point[1])) for point in part.series]),
        )
        for rank, part in found
        if len(part.series) > 1
    )
    block: Block = table
    if lines:
        block = Series(text["memory_series"], "memory", "size", "s", lines[:MOST_LINES], table)
    return Section("memory", text["memory_section"], (block,))


# --- kernels, operators, utilisation ----------------------------------------------------------------


def work(analysis: Analysis, text: Words, limits: Limits) -> Section | None:
    """The kernels and operators that take most time."""
    blocks = tuple(
        _named(rows, text, text[title], limits.rows)
        for rows, title in ((analysis.kernels, "kernels_title"), (analysis.operators, "operators_title"))
        if rows
    )
    return Section("work", text["work"], blocks) if blocks else None


def _short(name: str) -> str:
    """A kernel's name without what every one of them says."""
    return name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")


def _named(rows: Iterable[NamedTime], text: Words, title: str, most: int) -> Table:
    ordered = sorted(rows, key=lambda row: row.total_ns, reverse=True)
    total = sum(row.total_ns for row in ordered)
    cells = tuple(
        (
            _short(clean(row.name)),
            clean(row.kind),
            count(row.calls),
            _share(row.total_ns, total),
            duration(row.total_ns / max(row.calls, 1)),
        )
        for row in ordered[:most]
    )
    columns = (
        _left(text["name"], flexible=True),
        _left(text["kind"]),
        *_right(text["calls"], text["time"], text["mean"]),
    )
    left = len(ordered) - most
    return Table(columns, cells, title, text["more_rows"].format(left=left) if left > 0 else "")


def utilisation(analysis: Analysis, text: Words) -> Section:
    """MFU by convention, with every input's origin, and the hardware's numbers with theirs."""
    mfu, hardware = analysis.mfu, analysis.hardware
    blocks: list[Block] = []
    if mfu is None or (mfu.value is None and not mfu.range):
        blocks.append(Paragraph(text["no_mfu"]))
    else:
        if mfu.value is not None:
            line = text["mfu_line"].format(value=percent(mfu.value), convention=clean(mfu.convention or "–"))
            blocks.append(Paragraph(line))
        if mfu.range:
            cells = tuple((clean(name), percent(value)) for name, value in mfu.range.items())
            columns = (_left(text["convention"]), *_right(text["mfu"]))
            blocks.append(Table(columns, cells, "" if mfu.value is not None else text["mfu_range"]))
    inputs: list[tuple[str, str]] = []
    if mfu is not None:
        inputs += [(clean(name), clean(words)) for name, words in mfu.inputs.items()]
    provenance = hardware.provenance
    for dtype, peak in hardware.peak_flops_per_s.items():
        origin = (
            provenance.get(f"peak_flops_per_s.{dtype}")
            or provenance.get("peak_flops_per_s")
            or provenance.get(dtype)
        )
        said = f"{count(peak)}FLOP/s" + (f", {clean(origin)}" if origin else "")
        inputs.append((f"{text['peak_flops']} {clean(dtype)}", said))
    if inputs:
        blocks.append(
            Table(
                (_left(text["hardware"]), _left(text["inputs"], flexible=True)), tuple(dict.fromkeys(inputs))
            )
        )
    return Section("utilisation", text["utilisation"], tuple(blocks))
