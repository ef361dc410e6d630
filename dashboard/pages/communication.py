"""Communication: which collectives, how fast, who waited, and who made them wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dash import html

from trine.dashboard import figures, units
from trine.dashboard.components import graph, grid
from trine.dashboard.parts import section, table
from trine.dashboard.view import View

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis, RankResult

__all__ = ["body"]


def body(view: View) -> list[Any]:
    """The page; without collectives, the reason."""
    analysis, theme = view.analysis, view.state.theme
    ranks = figures.shown_ranks(analysis, view.state.ranks)
    if not analysis.collectives and not any(rank.communication for rank in analysis.ranks):
        reasons = [
            note.message for note in analysis.data_quality if "collective" in note.id or "match" in note.id
        ]
        words = (
            reasons[0] if reasons else "This source recorded no collectives that say which ranks took part."
        )
        parts = [section("Collectives", html.P(words, id="no-collectives"))]
        busy = _busy(ranks)
        return [*parts, busy] if busy is not None else parts
    parts = [
        _causes(analysis, ranks, theme),
        _heatmap(analysis, ranks, theme),
        _collectives(analysis, theme),
        _ranks(ranks),
    ]
    return [part for part in parts if part is not None]


def _busy(ranks: tuple[RankResult, ...]) -> Any:
    """What the devices say where collectives have no records: time on the wire, hidden and exposed."""
    rows = []
    for rank in ranks:
        part = rank.summary.breakdown
        if part is not None and part.busy.communication:
            rows.append(
                [
                    str(rank.rank),
                    units.duration(part.busy.communication),
                    units.duration(part.exposed_communication_ns),
                    units.duration(part.overlap_ns),
                    units.percent(part.overlap_efficiency),
                ]
            )
    if not rows:
        return None
    names = ["Rank", "Communication", "Exposed", "Hidden behind compute", "Overlap efficiency"]
    return section("Communication on the device", table(names, rows, range(1, 5)))


def _culprits(analysis: Analysis) -> list[int]:
    """Ranks that a straggler finding names: only they get the colour of a fault."""
    named: set[int] = set()
    for finding in analysis.findings:
        if finding.id == "straggler":
            late = finding.evidence.get("ranks", ())
            named.update(item["rank"] for item in late if isinstance(item, Mapping) and "rank" in item)
    return sorted(named)


def _causes(analysis: Analysis, ranks: tuple[RankResult, ...], theme: Any) -> Any:
    known = [rank for rank in ranks if rank.communication is not None]
    if not known or not any(rank.communication and rank.communication.caused_wait_ns for rank in known):
        waited = any(rank.communication and rank.communication.wait_ns for rank in known)
        words = "Ranks waited, but no one rank was the last: several came in together." if waited else ""
        return section("Who made the others wait", html.P(words or "No rank made another wait."))
    rows = []
    for rank in known:
        own = rank.communication
        assert own is not None
        doing = ", ".join(
            f"{late.activity.replace('_', ' ')} {units.duration(late.total_ns)}"
            + (f" ({_short(late.example)})" if late.example else "")
            for late in own.late_doing[:3]
        )
        rows.append(
            [
                str(rank.rank),
                units.duration(own.caused_wait_ns),
                units.duration(own.lateness_ns),
                f"{units.count(own.last_in)} of {units.count(own.matched)}",
                doing or units.NOTHING,
            ]
        )
    names = ["Rank", "Caused wait", "Lateness", "Last to enter", "What it did before it entered late"]
    picture = graph(
        figures.caused_wait(known, _culprits(analysis), theme), "Wait caused by each rank", "caused-wait"
    )
    note = (
        "Caused wait sums what all other ranks waited for this one; lateness is how much later it entered than "
        "the second last."
    )
    return section("Who made the others wait", [picture, table(names, rows, (1, 2, 3))], note)


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _heatmap(analysis: Analysis, ranks: tuple[RankResult, ...], theme: Any) -> Any:
    figure = figures.wait_heatmap(analysis, ranks, theme)
    if figure is None:
        return None
    shown = {rank.rank for rank in ranks}
    cells = sorted((cell for cell in analysis.heatmap if cell.rank in shown), key=lambda cell: -cell.wait_ns)
    rows = [
        [
            str(c.rank),
            c.collective,
            units.count(c.calls),
            units.duration(c.wait_ns),
            units.duration(c.transfer_ns),
        ]
        for c in cells[:8]
    ]
    names = ["Rank", "Collective", "Calls", "Wait", "Transfer"]
    note = "The longest waits are listed; a rank that others wait for waits little itself."
    return section(
        "Who waited where",
        [graph(figure, "Wait by rank and collective", "wait-heatmap"), table(names, rows, (2, 3, 4))],
        note,
    )


def _collectives(analysis: Analysis, theme: Any) -> Any:
    columns = [
        {"field": "op", "headerName": "Operation", "minWidth": 130},
        {"field": "label", "headerName": "Label", "minWidth": 110, "tooltipField": "label"},
        {"field": "group", "headerName": "Group", "minWidth": 90, "tooltipField": "group"},
        {"field": "ranks", "headerName": "Ranks", "minWidth": 80, "tooltipField": "ranks"},
        {"field": "calls", "headerName": "Calls", "number": True, "minWidth": 80},
        {"field": "bytes", "headerName": "Bytes a call", "number": True, "minWidth": 120},
        {"field": "transfer", "headerName": "Transfer", "number": True, "sort": "desc", "minWidth": 115},
        {"field": "wait", "headerName": "Wait of all", "number": True, "minWidth": 120},
        {"field": "algbw", "headerName": "algbw", "number": True, "minWidth": 95},
        {"field": "busbw", "headerName": "busbw", "number": True, "minWidth": 95},
        {"field": "cause", "headerName": "Waited for", "minWidth": 150, "tooltipField": "cause"},
    ]
    rows = []
    for item in analysis.collectives:
        per_call = item.bytes / item.calls if item.bytes is not None and item.calls else None
        causes = sorted(item.caused_by.items(), key=lambda pair: -pair[1])[:3]
        rows.append(
            {
                "op": item.op,
                "label": item.label or "",
                "group": item.group,
                "ranks": _rank_words(item.ranks),
                "calls": item.calls,
                "calls_text": units.count(item.calls),
                "bytes": per_call,
                "bytes_text": units.size(per_call),
                "transfer": item.transfer_ns,
                "transfer_text": units.duration(item.transfer_ns),
                "wait": item.wait_ns,
                "wait_text": units.duration(item.wait_ns),
                "algbw": item.algbw_bytes_per_s,
                "algbw_text": units.bandwidth(item.algbw_bytes_per_s),
                "busbw": item.busbw_bytes_per_s,
                "busbw_text": units.bandwidth(item.busbw_bytes_per_s),
                "cause": ", ".join(f"rank {rank}: {units.duration(ns)}" for rank, ns in causes if ns),
            }
        )
    note = (
        "Transfer is the shortest duration of any rank, the rest of each rank's is wait. Bandwidths as nccl-tests "
        "computes them, over transfer alone."
    )
    return section("Collectives", grid("collectives", columns, rows, theme), note)


def _rank_words(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _ranks(ranks: tuple[RankResult, ...]) -> Any:
    rows = []
    for rank in ranks:
        own = rank.communication
        rows.append(
            [
                str(rank.rank),
                rank.summary.host_name or units.NOTHING,
                units.duration(own.transfer_ns if own else None),
                units.duration(own.wait_ns if own else None),
                units.count(own.matched if own else None),
                units.duration(rank.clock_offset_ns),
            ]
        )
    names = ["Rank", "Host", "Transfer", "Wait", "Matched", "Clock offset"]
    note = "The offset is what to add to a rank's times to get the lowest rank's."
    return section("Ranks and clocks", table(names, rows, (2, 3, 4, 5)), note)
