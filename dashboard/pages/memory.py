"""Memory: over time for each rank, against what the device has, what is alive at the peak, and whose it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dash import html

from trine.analyzers.reports.studies import sections
from trine.dashboard import figures, memory_figures, units
from trine.dashboard.blocks import render
from trine.dashboard.components import graph
from trine.dashboard.parts import section, table
from trine.dashboard.view import View

if TYPE_CHECKING:
    from trine.analyzers.results import RankResult

__all__ = ["body"]

#: Rows of a table: as many as a page bears.
MOST_ROWS = 40


def body(view: View) -> list[Any]:
    """The page; without any memory events, the reason and the remedy."""
    theme = view.state.theme
    ranks = figures.shown_ranks(view.analysis, view.state.ranks)
    known = tuple(rank for rank in ranks if rank.summary.memory is not None)
    study = _study(view)
    if not known and study:
        return study
    if not known:
        return [section("Memory", html.P(_why(view), id="no-memory"))]
    # The study's curve has the categories; the other is all there is without it.
    parts = [_over_time(known, theme), *(study or [_at_peak(known, theme)])]
    model = _model(view)
    return [*parts, *([model] if model is not None else [])]


def _why(view: View) -> str:
    """Why there is nothing, and how to get it."""
    reasons = [note.message for note in view.analysis.data_quality if "memory" in note.id]
    if not reasons:
        return (
            "This source has no memory events. Record them with trine.profile, or with torch.profiler's "
            "profile_memory=True."
        )
    # "<study> is null: " is for programs that read the JSON.
    said = reasons[0].partition(" is null: ")[2] or reasons[0]
    return f"{said[:1].upper()}{said[1:].rstrip('.')}."


def _study(view: View) -> list[Any]:
    """Curve by category, owners, the allocator's pools, what would lower the peak: as the report has it."""
    found = sections(view.analysis, MOST_ROWS, only=("memory_owners",))
    return [render(one, view.state.theme) for one in found]


def _over_time(ranks: tuple[RankResult, ...], theme: Any) -> Any:
    rows = []
    for rank in ranks:
        memory = rank.summary.memory
        assert memory is not None
        bound = "at least " if memory.lower_bound else ""
        rows.append(
            [
                str(rank.rank),
                "device" if memory.kind == "device" else "host",
                bound + units.size(memory.peak_bytes),
                units.size(memory.reserved_peak_bytes),
                units.size(memory.capacity_bytes),
                units.ratio(memory.reserved_peak_bytes or memory.peak_bytes, memory.capacity_bytes),
                units.count(memory.retries),
            ]
        )
    names = ["Rank", "Memory of", "Peak", "Reserved peak", "Capacity", "Used of it", "Allocator retries"]
    figure = memory_figures.memory_over_time(ranks, theme)
    picture = [graph(figure, "Memory over time by rank", "memory-time")] if figure is not None else []
    notes = []
    if any(rank.summary.memory and rank.summary.memory.lower_bound for rank in ranks):
        notes.append("History was lost or began late, so peaks are lower bounds.")
    if all(rank.summary.memory and rank.summary.memory.kind == "host" for rank in ranks):
        notes.append("This is host memory.")
    return section(
        "Memory over time", [*picture, table(names, rows, (2, 3, 4, 5, 6))], " ".join(notes) or None
    )


def _at_peak(ranks: tuple[RankResult, ...], theme: Any) -> Any:
    figure = memory_figures.memory_at_peak(ranks, theme)
    named = {name for rank in ranks for name in (rank.summary.memory.at_peak if rank.summary.memory else ())}
    if figure is None or named <= {"unattributed"}:
        words = "The source does not say what was alive at the peak, or whose it was."
        return section("Alive at the peak", html.P(words))
    totals: dict[str, list[int]] = {}
    for rank in ranks:
        for name, amount in (rank.summary.memory.at_peak if rank.summary.memory else {}).items():
            totals.setdefault(name, []).append(amount)
    whole = sum(sum(values) for values in totals.values())
    rows = [
        [name.replace("_", " "), units.size(max(values)), units.ratio(sum(values), whole)]
        for name, values in sorted(totals.items(), key=lambda item: -sum(item[1]))
    ]
    picture = graph(figure, "Memory alive at the peak by category", "memory-peak")
    return section(
        "Alive at the peak", [picture, table(["Category", "Most on a rank", "Share"], rows, (1, 2))]
    )


def _model(view: View) -> Any:
    """What the record itself says of the model: sizes of parameters, gradients and optimizer state."""
    rows = []
    for rank in view.analysis.ranks[:16]:
        model = rank.summary.metadata.get("model")
        if isinstance(model, dict) and model.get("parameter_bytes"):
            rows.append(
                [
                    str(rank.rank),
                    str(model.get("class") or units.NOTHING),
                    units.count(model.get("parameters")),
                    units.size(model.get("parameter_bytes")),
                    units.size(model.get("gradient_bytes")),
                    units.size(model.get("optimizer_bytes")),
                ]
            )
    if not rows:
        return None
    names = ["Rank", "Model", "Parameters", "Parameter bytes", "Gradient bytes", "Optimizer bytes"]
    return section("What the model holds", table(names, rows, (2, 3, 4, 5)))
