"""Time by module of the model, forward and backward."""

from __future__ import annotations

from trine.analyzers.reports._cells import left, right, share
from trine.analyzers.reports.document import Section, Table, clean
from trine.analyzers.results import Analysis
from trine.analyzers.studies.modules import Modules
from trine.analyzers.units import count, duration, percent

__all__ = ["ORDER", "section"]

ORDER = 54

_MOST = 12
#: Below this share of the work the names say too little for a table; the JSON has them.
_LEAST_SHARE = 0.05


def section(result: Modules, analysis: Analysis, most_rows: int) -> Section | None:
    """A table of modules, those with most time first."""
    if result.attributed_ns < _LEAST_SHARE * result.total_ns:
        return None
    most = min(most_rows, _MOST)
    named = "module" if result.named_by == "module" else "annotation"
    # Annotations of one name are one, however often they ran: as a number of instances that would read as "once".
    several = named == "module" or any(row.instances > 1 for row in result.rows[:most])
    cells = tuple(
        (
            clean(row.path),
            *((count(row.instances),) if several else ()),
            share(row.ns, result.total_ns),
            duration(row.forward_ns),
            duration(row.backward_ns),
            percent(row.self_ns / max(result.total_ns, 1)),
            *((duration(row.longest[1]),) if several else ()),
        )
        for row in result.rows[:most]
    )
    columns = (
        left(named, flexible=True),
        *right(*(("instances",) if several else ()), "time", "forward", "backward", "itself"),
        *right(*(("longest one",) if several else ())),
    )
    lacking = result.total_ns - result.attributed_ns
    note = f"{share(lacking, result.total_ns)} of the work lies in none." if lacking > 0 else ""
    hidden = len(result.rows) - most
    if hidden > 0:
        note = f"{note} {hidden} more in the JSON.".strip()
    title = "Time by module" if named == "module" else "Time by annotation"
    return Section("modules", title, (Table(columns, cells, "", note),))
