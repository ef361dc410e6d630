"""The section on hangs: who left the others' way, beside what the others did, and where each group stands."""

from __future__ import annotations

from trine.analyzers.desync_words import group_words, healthy_words, place_of, statement
from trine.analyzers.reports.document import Block, Column, Items, Paragraph, Section, Table, clean
from trine.analyzers.results import Analysis
from trine.analyzers.studies.desync import Call, Culprit, Desync
from trine.analyzers.units import rank_list

__all__ = ["ORDER", "section"]

#: Before all that is about speed: a job that stands has none.
ORDER = 5

#: Culprits that are shown with their calls and stacks.
MOST_CULPRITS = 5


def section(result: Desync, analysis: Analysis, most_rows: int) -> Section:
    """Culprits with their calls and stacks, then the groups."""
    blocks: list[Block] = []
    if not result.stuck:
        blocks.append(Paragraph(clean(healthy_words(result)) + "."))
    for culprit in result.culprits[:MOST_CULPRITS]:
        blocks.append(Paragraph(clean(statement(culprit)) + "."))
        blocks += [block for block in (_calls(culprit, most_rows), _stacks(culprit)) if block is not None]
    left = len(result.culprits) - MOST_CULPRITS
    if left > 0:
        blocks.append(
            Paragraph(f"{left} more disagreements follow from these or stand beside them; the JSON has all.")
        )
    blocks.append(_groups(result, most_rows))
    return Section("desync", "Hang and desync", tuple(blocks))


def _calls(culprit: Culprit, most_rows: int) -> Table | None:
    calls = (*culprit.calls, *(call for call in culprit.last_calls if call not in culprit.calls))
    if not calls:
        return None
    rows = tuple(_row(call, culprit) for call in calls[:most_rows])
    titles = ("rank", "part", "operation", "group", "sequence", "input", "dtype", "state", "where")
    columns = tuple(
        Column(
            title,
            "right" if title in ("rank", "sequence") else "left",
            title in ("operation", "input", "where"),
        )
        for title in titles
    )
    seen = {call.rank for call in calls}
    hidden = [rank for rank in culprit.waiting if rank not in seen]
    note = f"{clean(rank_list(tuple(hidden)))} as the others that wait" if hidden else ""
    return Table(columns, rows, note=note)


def _row(call: Call, culprit: Culprit) -> tuple[str, ...]:
    if call in culprit.last_calls and call not in culprit.calls:
        part = "its last call"
    elif call.rank in culprit.ranks and not set(culprit.ranks) & set(culprit.waiting):
        part = "differs" if culprit.last_calls == () else "missing"
    else:
        part = "waits"
    cells = (
        str(call.rank),
        part,
        call.operation,
        call.group,
        None if call.sequence is None else str(call.sequence),
        call.in_shapes,
        call.types,
        call.state,
        place_of(call),
    )
    return tuple(clean(cell) if cell else "–" for cell in cells)


def _stacks(culprit: Culprit) -> Items | None:
    """Each distinct stack once, with the ranks that stand there."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for call in (*culprit.calls, *culprit.last_calls):
        if call.stack and call.rank not in ranks.setdefault(call.stack, []):
            ranks[call.stack].append(call.rank)
    if not ranks:
        return None
    items = tuple(
        (
            "",
            f"{rank_list(tuple(found))} stood at {clean(_frame(stack[0]))}",
            clean(" ← ".join(map(_frame, stack[1:]))),
        )
        for stack, found in ranks.items()
    )
    return Items(items)


def _frame(frame: str) -> str:
    """``rec.py(29): <module>`` of a frame with its whole path; two folders are kept."""
    path, _, rest = frame.rpartition("(")
    parts = path.replace("\\", "/").split("/")
    return "/".join(parts[-2:] if len(parts) > 3 else parts) + "(" + rest


def _groups(result: Desync, most_rows: int) -> Table:
    rows = tuple(
        (
            clean(group_words(group.group, group.description)),
            clean(rank_list(group.ranks)) if group.ranks else "–",
            _range(group.enqueued),
            _range(group.completed),
            str(group.compared),
            clean(rank_list(group.pending)) if group.pending else "none",
        )
        for group in result.groups[:most_rows]
    )
    columns = (
        Column("group", flexible=True),
        Column("ranks", flexible=True),
        *(Column(title, "right") for title in ("last enqueued", "last completed", "compared")),
        Column("waiting now", flexible=True),
    )
    left = len(result.groups) - most_rows
    return Table(columns, rows, "Where each group stands", f"{left} more groups" if left > 0 else "")


def _range(pair: tuple[int, int]) -> str:
    if pair == (-1, -1):
        return "–"
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
