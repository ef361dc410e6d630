"""What changed between two sides, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trine.analyzers.difference import Change, RunDifference
from trine.analyzers.finding_changes import FindingChange
from trine.analyzers.kernel_names import short_name
from trine.analyzers.reports.document import Column, Table, clean
from trine.analyzers.units import duration, percent

__all__ = [
    "change_tables",
    "difference_to_dict",
    "findings_table",
    "part_name",
    "partition_words",
    "signed",
    "unit_words",
]

_UNITS = {"step": "a step", "work": "a window of equal work", "window": "a window"}
_PARTS = {
    "exposed_communication": "exposed communication",
    "exposed_copy": "exposed copy",
}


def unit_words(difference: RunDifference) -> str:
    """``a step takes 13 % longer (mean 340 ms against 300 ms)``: of the steps that are divided, all ranks."""
    if difference.first_ns is None or difference.second_ns is None:
        return "how long a unit takes is not known on both sides"
    ratio = difference.first_ns / difference.second_ns if difference.second_ns else 1.0
    unit = _UNITS[difference.unit.name]
    times = f"(mean {duration(difference.first_ns)} against {duration(difference.second_ns)})"
    if abs(ratio - 1) < 0.0005:
        return f"{unit} takes as long as before {times}"
    return f"{unit} takes {percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'less time'} {times}"


def partition_words(difference: RunDifference) -> str:
    """The largest parts of the change in words: ``of the 40.1 ms, idle is 31.0 ms and …``; empty where nothing changed."""
    change = difference.change_ns
    if not change:
        return ""
    parts = sorted(difference.partition, key=lambda part: -abs(part.change_ns))
    named = [
        f"{signed(part.change_ns, duration)} {part_name(part.name)}"
        for part in parts[:3]
        if part.state != "same"
    ]
    return f"{signed(change, duration)} in all: {', '.join(named)}" if named else ""


def part_name(name: str) -> str:
    """A part of the breakdown in words."""
    return _PARTS.get(name, name.replace("_", " "))


def change_tables(
    difference: RunDifference,
    labels: tuple[str, str],
    most: int,
    *,
    causes_told: bool,
    narrow: bool = False,
    covers: str = "",
) -> Iterator[Table]:
    """Tables of a difference, columns from old to new: how the unit is divided (unless that was told already), what
    changed, and the host's operators. ``labels``: what the second side and the first are called; ``narrow``: as few
    and short columns as a terminal has room for; ``covers``: which steps the means are of (``, of 4 and 5 traced steps``)."""
    unit = {"step": "step", "work": "window of equal work", "window": "window"}[difference.unit.name]
    short = unit.split()[0]
    if difference.partition and not causes_told and difference.first_ns is not None:
        yield _partition(difference, labels, unit, covers)
    if difference.changes:
        title = f"What changed, in order of effect (mean of a {unit} and rank{covers})"
        yield _changes(difference.changes, labels, most, title, narrow, short)
    else:
        said = "nothing: every part is within 0.1 % of what it was"
        if difference.basis is None:
            said = "kernels and operators are not known; a trace or a deep window of each side shows them"
        yield Table((Column("What changed"),), ((said,),))
    if difference.host:
        title = f"Operators on the host, own time (mean of a {unit} and rank{covers})"
        yield _changes(difference.host, labels, max(most // 2, 5), title, narrow, short)


def _partition(difference: RunDifference, labels: tuple[str, str], unit: str, covers: str) -> Table:
    rows = [
        (
            part_name(part.name),
            duration(part.second_ns),
            duration(part.first_ns),
            signed(part.change_ns, duration),
            signed(part.of_unit, percent),
            _share(part.of_change),
        )
        for part in difference.partition
    ]
    first, second = difference.first_ns or 0.0, difference.second_ns or 0.0
    whole = signed(first / second - 1, percent) if second else ""
    rows.append(("all", duration(second), duration(first), signed(first - second, duration), whole, ""))
    return Table(
        (
            Column(f"A {unit}, divided"),
            *(
                Column(title, "right")
                for title in (*labels, "change", f"of the {unit.split()[0]}", "of the change")
            ),
        ),
        tuple(rows),
        f"Where its time goes (mean of the ranks{covers})",
    )


def _changes(
    changes: Sequence[Change], labels: tuple[str, str], most: int, title: str, narrow: bool, unit: str
) -> Table:
    columns = (
        *(() if narrow else (Column("kind"),)),
        Column("what"),
        Column("name", flexible=True),
        *(Column(text, "right") for text in (*labels, f"calls a {unit}", "change", f"of {unit}")),
    )
    rows = tuple(
        (
            *(() if narrow else (change.kind,)),
            _what(change, narrow),
            clean(_name(change, narrow)),
            duration(change.second_ns),
            duration(change.first_ns),
            _calls(change),
            signed(change.change_ns, duration),
            signed(change.of_unit, percent),
        )
        for change in changes[:most]
    )
    left = len(changes) - most
    rest = sum(change.change_ns for change in changes[most:])
    note = f"{left} more not shown, {signed(rest, duration)} together" if left > 0 else ""
    return Table(columns, rows, title, note)


def _what(change: Change, narrow: bool) -> str:
    """``slower``, and whether that is more calls or longer ones where one of the two makes most of it; idle time
    is ``more`` or ``less``."""
    if change.kind == "idle" and change.state in ("slower", "faster"):
        return "more" if change.state == "slower" else "less"
    if (
        narrow
        or change.by_calls_ns is None
        or change.by_each_ns is None
        or change.state not in ("slower", "faster")
    ):
        return change.state
    if change.second_calls and change.first_calls:
        more = "more calls" if change.first_calls > change.second_calls else "fewer calls"
        if abs(change.by_calls_ns) > 4 * abs(change.by_each_ns):
            return f"{change.state}: {more}"
        if abs(change.by_each_ns) > 4 * abs(change.by_calls_ns):
            return f"{change.state}: each call"
    return change.state


def _name(change: Change, narrow: bool) -> str:
    name = short_name(change.name) if change.kind == "kernel" else change.name
    if narrow and change.kind == "idle":
        name = f"idle: {name}"
    return f"{name} (renamed)" if change.other_name else name


def _calls(change: Change) -> str:
    if change.first_calls is None or change.second_calls is None:
        return ""
    old, new = _number(change.second_calls), _number(change.first_calls)
    return old if old == new else f"{old} → {new}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def findings_table(changes: Sequence[FindingChange], labels: tuple[str, str]) -> Table:
    """Findings of either side; shares are those of the step at stake."""
    rows = tuple(
        (
            one.state,
            one.id,
            "–" if one.second is None else percent(one.second),
            "–" if one.first is None else percent(one.first),
            clean(one.title),
        )
        for one in changes
    )
    columns = (
        Column(""),
        Column("finding"),
        *(Column(label, "right") for label in labels),
        Column("it says", flexible=True),
    )
    return Table(columns, rows, "Findings (share of the step or window at stake)")


def signed(value: float, words: Callable[[float], str]) -> str:
    """A change with its sign."""
    text = words(value)
    return f"+{text}" if value > 0 and not text.startswith("<") else text


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)


# --- JSON ----------------------------------------------------------------------------------------


def difference_to_dict(difference: RunDifference) -> dict[str, object]:
    """The difference as the JSON contract has it."""
    return {
        "unit": difference.unit.name,
        "work_ratio": difference.unit.ratio,
        "work_agreement": difference.unit.agreement,
        "work_uncertainty": difference.unit.uncertainty,
        "basis": difference.basis,
        "first_ns": difference.first_ns,
        "second_ns": difference.second_ns,
        "change_ns": difference.change_ns,
        "partition": [_change_to_dict(change) for change in difference.partition],
        "changes": [_change_to_dict(change) for change in difference.changes],
        "host": [_change_to_dict(change) for change in difference.host],
    }


def _change_to_dict(change: Change) -> dict[str, object]:
    return {
        "kind": change.kind,
        "name": change.name,
        "second_name": change.other_name or change.name,
        "state": change.state,
        "first_ns": change.first_ns,
        "second_ns": change.second_ns,
        "change_ns": change.change_ns,
        "by_calls_ns": change.by_calls_ns,
        "by_each_ns": change.by_each_ns,
        "first_calls": change.first_calls,
        "second_calls": change.second_calls,
        "of_unit": change.of_unit,
        "of_change": change.of_change,
    }
