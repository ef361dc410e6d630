"""The section on communication by kind of group."""

from __future__ import annotations

from trine.analyzers.reports.document import Block, Column, Paragraph, Section, Table, clean
from trine.analyzers.results import Analysis
from trine.analyzers.studies.groups import GroupCosts, GroupsResult, LateRank
from trine.analyzers.units import duration, percent, rate

__all__ = ["ORDER", "section"]

ORDER = 32

#: A rank that caused this share of the waits is named.
CAUSED_SHARE = 0.1

_NAMES = {
    "data": "data",
    "tensor": "tensor",
    "pipeline": "pipeline",
    "expert": "expert",
    "context": "context",
    "world": "all ranks",
    "unknown": "not known",
}


def section(result: GroupsResult, analysis: Analysis, most_rows: int) -> Section | None:
    """A table of kinds; left out where nothing tells the groups apart and nobody waited."""
    kinds = result.kinds
    if not kinds or (len(kinds) == 1 and kinds[0].kind == "unknown"):
        return None
    blocks: list[Block] = [_table(kinds)]
    late = [text for costs in kinds for text in _sentences(costs)]
    blocks += [Paragraph(text) for text in late[:most_rows]]
    return Section("groups", "Communication by group", tuple(blocks))


def _table(kinds: tuple[GroupCosts, ...]) -> Table:
    columns = (
        Column("parallelism"),
        Column("groups", "right"),
        Column("calls", "right"),
        Column("transfer", "right"),
        Column("wait", "right"),
        Column("exposed", "right"),
        Column("bus rate", "right"),
        Column("known by", flexible=True),
    )
    note = (
        "transfer and wait are means over ranks; exposed is the share of the window that no computation hid"
    )
    return Table(columns, tuple(_row(costs) for costs in kinds), note=note)


def _row(costs: GroupCosts) -> tuple[str, ...]:
    sizes = costs.sizes
    of_ranks = "" if not sizes else f" of {sizes[0]}" if len(sizes) == 1 else f" of {sizes[0]}–{sizes[-1]}"
    return (
        _NAMES[costs.kind],
        f"{costs.groups}{of_ranks}",
        str(costs.calls),
        "–" if costs.transfer_ns is None else duration(costs.transfer_ns),
        "–" if costs.wait_ns is None else duration(costs.wait_ns),
        "–" if costs.exposed_share is None else percent(costs.exposed_share),
        "–" if costs.busbw_bytes_per_s is None else rate(costs.busbw_bytes_per_s),
        ", ".join(costs.known_by),
    )


def _sentences(costs: GroupCosts) -> list[str]:
    """One for each rank that caused a fair share of the kind's waits, the first in any case."""
    whole = sum(one.caused_wait_ns for one in costs.late)
    named = [one for one in costs.late if one.caused_wait_ns >= CAUSED_SHARE * whole] or list(costs.late[:1])
    return [_sentence(costs, one, whole) for one in named]


def _sentence(costs: GroupCosts, late: LateRank, whole_ns: int) -> str:
    doing = f", {late.doing.replace('_', ' ')}" if late.doing not in (None, "unknown") else ""
    example = f" ({clean(late.example)})" if late.example and doing else ""
    share = percent(late.caused_wait_ns / whole_ns) if whole_ns else "0 %"
    return (
        f"{_NAMES[costs.kind].capitalize()}: the others waited {duration(late.caused_wait_ns)} ({share}) in all for rank "
        f"{late.rank}, which entered {late.last_in} calls last{doing}{example}."
    )
