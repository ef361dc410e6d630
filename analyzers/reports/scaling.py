"""Scaling in words, tables and a curve: text, Markdown, a page, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np

from trine.analyzers.reports.document import (
    Bars,
    Block,
    Column,
    Document,
    Items,
    Paragraph,
    Section,
    Series,
    Table,
)
from trine.analyzers.scaling import UNEVEN, Fit, PartLoss, ScalingPoint, ScalingResult
from trine.analyzers.units import count, duration, percent

__all__ = [
    "compose",
    "headline",
    "loss_words",
    "render_html",
    "render_json",
    "render_markdown",
    "render_text",
]

#: From this efficiency on throughput grows in proportion, for whoever reads one line.
_GOOD = 0.9
#: Parts below this share of the step on every count are not drawn; the JSON has them.
_SHOWN = 0.001
#: Parts below this share of the loss are not put into words.
_TOLD = 0.05
#: A curve nearer than this to every count passes through them.
_EXACT = 0.001

_NAMES = {
    "exposed_communication": "exposed communication",
    "exposed_copy": "exposed copy",
    "idle": "idle",
    UNEVEN: "uneven ranks",
    "data": "loading data",
}
_SIDES = {
    "exposed_communication": "communication",
    "exposed_copy": "memory",
    "copy": "memory",
    "idle": "idle",
    "other": "idle",
    "data": "memory",
    UNEVEN: "fault",
}
_MODES = {
    "weak": "weak scaling: each device keeps its work",
    "strong": "strong scaling: the work of a step is shared out",
    "mixed": "the work of a device changes with their number",
}


def headline(result: ScalingResult) -> str:
    """``4 devices have 38 % of 4 times the throughput of 1``."""
    first, last = result.points[0], result.points[-1]
    times = last.devices / first.devices
    return (
        f"{last.devices} devices have {percent(last.efficiency)} of {times:.4g} times the throughput of {first.devices}"
        + (
            f" ({percent(last.efficiency_low)} to {percent(last.efficiency_high)})"
            if last.efficiency_low < last.efficiency_high
            else ""
        )
    )


def loss_words(first: ScalingPoint, point: ScalingPoint) -> str:
    """``From 1 to 8 devices a step takes 12.0 ms longer than it should (mean …): 10.0 ms of it exposed communication``."""
    if point.loss_ns is None or point.mean_ns is None or point.ideal_ns is None:
        return ""
    between = f"From {first.devices} to {point.devices} devices a step takes"
    times = f"(mean {duration(point.mean_ns)} against {duration(point.ideal_ns)})"
    if abs(point.loss_ns) < 0.005 * point.ideal_ns:
        return f"{between} as long as it should {times}."
    longer = point.loss_ns > 0
    told = sorted(
        (part for part in point.parts if part.share is not None and part.share >= _TOLD),
        key=lambda part: -abs(part.loss_ns),
    )
    named = []
    for place, part in enumerate(told[:3]):
        # A part that grew by more than the whole, since another shrank, is no part *of* it.
        within = place == 0 and (part.share or 0.0) <= 1
        amount = f"{duration(abs(part.loss_ns))} of it" if within else _signed(part.loss_ns)
        named.append(f"{amount} {part_name(part.name)}")
    words = f": {', '.join(named)}" if named else ""
    return f"{between} {duration(abs(point.loss_ns))} {'longer' if longer else 'less'} than it should {times}{words}."


def part_name(name: str) -> str:
    """A part of the step in words."""
    return _NAMES.get(name, name.replace("_", " "))


# --- the document --------------------------------------------------------------------------------


def compose(result: ScalingResult) -> Document:
    """The report before it has a form."""
    last = result.points[-1]
    sections = [Section("scaling", "Throughput over devices", tuple(_throughput(result)))]
    if result.partition is not None:
        sections.append(Section("parts", "What grows", tuple(_growth(result))))
    if result.fit is not None:
        sections.append(Section("law", "The law behind it", (Paragraph(fit_words(result.fit, result)),)))
    runs = tuple((str(point.devices), source, "") for point in result.points for source in point.sources)
    sections.append(Section("runs", "Runs", (Items(runs),)))
    if result.notes:
        sections.append(Section("notes", "Notes", tuple(Paragraph(note) for note in result.notes)))
    good = last.efficiency >= _GOOD
    return Document(
        title="Trine: scaling",
        subtitle=f"{_listed([point.devices for point in result.points])} devices · {_MODES[result.mode]}",
        verdict=f"{headline(result)}.",
        confidence=f"mode by {result.mode_by}",
        bound="healthy" if good else "fault",
        triangle=None,
        hull=(),
        sides=(),
        sections=tuple(sections),
        notices=result.notices,
    )


def _listed(counts: list[int]) -> str:
    return f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"


def _unit(result: ScalingResult) -> str:
    return {"tokens": "tokens/s", "samples": "samples/s", "steps": "steps/s"}[result.work_unit]


def _rate(value: float) -> str:
    return count(value) if value >= 100 else f"{value:.3g}"


def _throughput(result: ScalingResult) -> Iterator[Block]:
    first = result.points[0]
    unit = _unit(result)
    known = result.work_unit != "steps"
    columns = [Column("devices", "right"), Column("runs", "right"), Column("a step, median", "right")]
    columns += [Column("interval", "right"), Column(unit, "right")]
    columns += [Column(f"{result.work_unit} a device", "right")] if known else []
    columns += [Column("efficiency", "right"), Column("interval", "right")]
    rows = []
    for point in result.points:
        row = [
            str(point.devices),
            str(len(point.sources)),
            duration(point.step_ns),
            _range(point.low_ns, point.high_ns, duration),
        ]
        row += [_rate(point.throughput)]
        row += [_rate(point.work_per_device)] if known else []
        row += [percent(point.efficiency)]
        row += ["" if point is first else _range(point.efficiency_low, point.efficiency_high, percent)]
        rows.append(tuple(row))
    places = _places(result)
    counts = [float(point.devices) for point in result.points]
    measured = np.interp(places, counts, [point.throughput for point in result.points])
    yield Series(
        title=f"Throughput over {counts[0]:.0f} to {counts[-1]:.0f} devices ({unit}, one scale)",
        side="computation",
        unit="count",
        axis="devices",
        lines=(
            ("measured", tuple(zip(places, measured.tolist(), strict=True))),
            ("ideal", tuple((place, first.throughput * place / first.devices) for place in places)),
            *_fitted(result),
        ),
        table=Table(tuple(columns), tuple(rows)),
    )


def _fitted(result: ScalingResult) -> Iterator[tuple[str, tuple[tuple[float, float], ...]]]:
    if result.fit is None:
        return
    first = result.points[0].throughput
    yield "law", tuple((place, first * result.fit.capacity(place)) for place in _places(result))


def _places(result: ScalingResult) -> list[float]:
    """Where the lines are drawn: evenly, so that one column of a terminal is one place on all, and at each count."""
    first, last = result.points[0].devices, result.points[-1].devices
    even = {first + (last - first) * step / 40 for step in range(41)}
    return sorted(even | {float(point.devices) for point in result.points})


def _range(low: float, high: float, words: Callable[[float], str]) -> str:
    one, other = words(low), words(high)
    return one if one == other else f"{one} to {other}"


def _growth(result: ScalingResult) -> Iterator[Block]:
    first, *others = result.points
    sentences = [text for point in others if (text := loss_words(first, point))]
    for text in sentences:
        yield Paragraph(text)
    names = list(dict.fromkeys(part.name for point in result.points for part in point.parts))
    shown = [
        name
        for name in names
        if any(_part(point, name) >= _SHOWN * (point.mean_ns or 0.0) > 0 for point in result.points)
    ]
    rows = tuple(
        (str(point.devices), {name: _part(point, name) for name in shown}) for point in result.points
    )
    yield Bars(
        title="A step, divided (mean of the ranks)",
        legend={name: part_name(name) for name in shown},
        side={name: _SIDES.get(name, "computation") for name in shown},
        rows=rows,
        table=_parts_table(result, shown),
    )


def _part(point: ScalingPoint, name: str) -> float:
    return next((part.ns for part in point.parts if part.name == name), 0.0)


def _parts_table(result: ScalingResult, names: list[str]) -> Table:
    last = result.points[-1]
    losses: dict[str, PartLoss] = {part.name: part for part in last.parts}
    columns = (
        Column("part", flexible=True),
        *(Column(f"on {point.devices}", "right") for point in result.points),
        Column(f"should on {last.devices}", "right"),
        Column("loss", "right"),
        Column("of the loss", "right"),
    )
    rows = []
    for name in names:
        loss = losses.get(name)
        row = [part_name(name), *(duration(_part(point, name)) for point in result.points)]
        row += [duration(loss.ideal_ns), _signed(loss.loss_ns), _share(loss.share)] if loss else ["", "", ""]
        rows.append(tuple(row))
    whole = ["all", *(duration(point.mean_ns or 0.0) for point in result.points)]
    whole += [duration(last.ideal_ns or 0.0), _signed(last.loss_ns or 0.0), ""]
    return Table(columns, (*rows, tuple(whole)))


def _signed(ns: float) -> str:
    return f"+{duration(ns)}" if ns > 0 else duration(ns)


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)


def fit_words(fit: Fit, result: ScalingResult) -> str:
    """The universal scalability law in words, with how well it fits; where it does not, that alone."""
    if not fit.describes:
        return (
            f"The universal scalability law does not describe these runs: with a contention of at most 100 % its nearest curve is"
            f" off by {percent(fit.largest_error)} of the throughput on one of the counts. Throughput falls in a way that neither"
            " waiting for what is shared nor talking in pairs makes; see what grows, and whether all runs are of one setup."
        )
    words = (
        f"The universal scalability law with contention {percent(fit.contention)} (what cannot be shared out; Amdahl's"
        f" serial fraction) and coherence {fit.coherence:.2g} (what grows with every pair of devices)"
    )
    if fit.freedom <= 0 and fit.largest_error < _EXACT:
        words += " passes through these few counts and is not tested by them: a description, no forecast."
    else:
        words += f" lies within {percent(fit.largest_error)} of every count"
        words += "." if fit.freedom > 0 else ", which are few: a description, no forecast."
    most = result.points[-1].devices
    if fit.peak_devices is not None and fit.peak_devices <= most:
        words += (
            " By it more devices than the fewest of these make it slower."
            if round(fit.peak_devices) <= fit.fewest
            else (f" By it throughput is highest at {fit.peak_devices:.0f} devices, and more make it slower.")
        )
    elif fit.peak_devices is not None and fit.peak_devices < 64 * most:
        words += f" By it throughput grows up to {fit.peak_devices:.0f} devices."
    return words


# --- forms ---------------------------------------------------------------------------------------


def render_text(result: ScalingResult, *, colour: bool = False, width: int = 100) -> str:
    """For a terminal."""
    from trine.analyzers.reports import text

    return text.render_document(compose(result), colour=colour, width=width)


def render_markdown(result: ScalingResult) -> str:
    """For a pull request or a page."""
    from trine.analyzers.reports import markdown

    return markdown.render_document(compose(result))


def render_html(result: ScalingResult) -> str:
    """One self-contained page."""
    from trine.analyzers.reports import html

    return html.render_document(compose(result))


def render_json(result: ScalingResult) -> str:
    """JSON by the schema ``trine.scaling/1``; every name ends in its unit."""
    fit = result.fit
    content = {
        "schema": "trine.scaling/1",
        "mode": result.mode,
        "mode_by": result.mode_by,
        "work_unit": result.work_unit,
        "partition": result.partition,
        "points": [_point_to_dict(point) for point in result.points],
        "fit": None
        if fit is None
        else {
            "law": "universal scalability law",
            "contention": fit.contention,
            "coherence": fit.coherence,
            "largest_error": fit.largest_error,
            "freedom": fit.freedom,
            "peak_devices": fit.peak_devices,
            "describes": fit.describes,
        },
        "notices": list(result.notices),
        "notes": list(result.notes),
    }
    return json.dumps(content, indent=1) + "\n"


def _point_to_dict(point: ScalingPoint) -> dict[str, object]:
    return {
        "devices": point.devices,
        "hosts": point.hosts,
        "runs": list(point.sources),
        "steps": point.steps,
        "step_time_ns": {"median": point.step_ns, "low": point.low_ns, "high": point.high_ns},
        "throughput_per_s": point.throughput,
        "work_per_device": point.work_per_device,
        "efficiency": {"value": point.efficiency, "low": point.efficiency_low, "high": point.efficiency_high},
        "mean_ns": point.mean_ns,
        "ideal_ns": point.ideal_ns,
        "loss_ns": point.loss_ns,
        "parts": [
            {
                "name": part.name,
                "ns": part.ns,
                "ideal_ns": part.ideal_ns,
                "loss_ns": part.loss_ns,
                "share": part.share,
            }
            for part in point.parts
        ],
    }
