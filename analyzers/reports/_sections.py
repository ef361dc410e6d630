"""The report's sections on time: each a pure function from an analysis to blocks, or None where it has
nothing to show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trine.analyzers.kernel_names import short_name
from trine.analyzers.results import Analysis, NamedTime
from trine.analyzers.units import count, duration, percent

from ._cells import MOST_LINES, Limits, Words, left, right, share, thin
from .document import Bars, Block, Paragraph, Section, Series, Table, clean

__all__ = ["step_times", "utilisation", "where", "work"]

#: Longer names of kernels are told by their words.
_SHORT = 48
#: Fewer steps are no curve.
_FEW_STEPS = 4


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
            *(share(getattr(b, f"{part}_ns"), b.window_ns) for part in parts),
            "–" if b.overlap_efficiency is None else percent(b.overlap_efficiency),
            text[f"basis_{b.basis}"],
        )
        for rank, b in found
    )
    columns = (
        *right(text["rank"], text["window"], *(text[part] for part in parts), text["overlap"]),
        left(text["basis"]),
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
        (str(rank), *(share(getattr(b.idle, cause), b.window_ns) for cause in causes)) for rank, b in found
    )
    columns = right(text["rank"], *(text[f"cause_{cause}"] for cause in causes))
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
    columns = right(text["rank"], text["total"], *(text[f"phase_{name}"] for name in names))
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
    if statistics is not None and statistics.count > 1:  # of a single one, the head says it all
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
            lines.append((f"{text['rank']} {rank.rank}", thin(points)))
        if own is not None:
            low_high = f"{duration(own.low_ns)} – {duration(own.high_ns)}"
            cells.append(
                (str(rank.rank), str(own.count), duration(own.median_ns), low_high, duration(own.p95_ns))
            )
    if not lines or (limits.brief and max(len(points) for _, points in lines) < _FEW_STEPS):
        return None
    columns = right(text["rank"], text["steps"], text["median"], text["interval"], text["p95"])
    if limits.brief:
        cells = []  # the lines carry their ends
    return Series(
        text["step_series"],
        "computation",
        "duration",
        text["step"],
        tuple(lines),
        Table(columns, tuple(cells), note=limits.note(text)),
    )


# --- kernels, operators, utilisation ----------------------------------------------------------------


def work(analysis: Analysis, text: Words, limits: Limits) -> Section | None:
    """The kernels and operators that take most time."""
    tables = [(analysis.kernels, "kernels_title"), (analysis.operators, "operators_title")]
    if limits.brief and "kernel_efficiency" in analysis.studies:
        tables.pop()  # what operators cost is the study's to say
    blocks = tuple(_named(rows, text, text[title], limits.rows) for rows, title in tables if rows)
    return Section("work", text["work"], blocks) if blocks else None


def _short(name: str) -> str:
    """A kernel's name with the words that tell what it does; the JSON has all of it."""
    return name if len(name) <= _SHORT else short_name(name)


def _named(rows: Iterable[NamedTime], text: Words, title: str, most: int) -> Table:
    ordered = sorted(rows, key=lambda row: row.total_ns, reverse=True)
    total = sum(row.total_ns for row in ordered)
    cells = tuple(
        (
            _short(clean(row.name)),
            clean(row.kind),
            count(row.calls),
            share(row.total_ns, total),
            duration(row.total_ns / max(row.calls, 1)),
        )
        for row in ordered[:most]
    )
    columns = (
        left(text["name"], flexible=True),
        left(text["kind"]),
        *right(text["calls"], text["time"], text["mean"]),
    )
    hidden = len(ordered) - most
    return Table(columns, cells, title, text["more_rows"].format(left=hidden) if hidden > 0 else "")


def utilisation(analysis: Analysis, text: Words, limits: Limits) -> Section | None:
    """MFU by convention, with every input's origin, and the hardware's numbers with theirs."""
    mfu, hardware = analysis.mfu, analysis.hardware
    if limits.brief and (mfu is None or (mfu.value is None and not mfu.range)):
        return None  # the order of work says so, and why
    blocks: list[Block] = []
    if mfu is None or (mfu.value is None and not mfu.range):
        blocks.append(Paragraph(text["no_mfu"]))
    else:
        if mfu.value is not None:
            line = text["mfu_line"].format(value=percent(mfu.value), convention=clean(mfu.convention or "–"))
            blocks.append(Paragraph(line))
        if mfu.range:
            cells = tuple((clean(name), percent(value)) for name, value in mfu.range.items())
            columns = (left(text["convention"]), *right(text["mfu"]))
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
            Table((left(text["hardware"]), left(text["inputs"], flexible=True)), tuple(dict.fromkeys(inputs)))
        )
    return Section("utilisation", text["utilisation"], tuple(blocks))
