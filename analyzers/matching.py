"""Which row of one rank's collectives is the same call as which row of another's.

Within a group every rank issues the same calls in the same order, so the order (or the sequence
number, where the source records one) is the identity of a call; :mod:`.alignment` finds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, Quality

from ._drift import trend_of
from .alignment import align, share
from .lines import GroupKey, Line, lines_of, listed, memberships
from .operations import Pattern, pattern_of
from .results import RankSummary

__all__ = ["Calls", "match_collectives"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Matched calls of one operation in one group, shape (calls, ranks) where two-dimensional.

    ``size`` is the group's size with absent ranks, ``None`` when unknown. ``start_ns`` and
    ``end_ns`` are on each rank's own clock, :data:`MISSING` where not recorded. ``root`` and
    ``bytes`` have one value a call, :data:`MISSING` where unknown. ``rows`` are rows of each rank's
    summary table.
    """

    operation: str
    pattern: Pattern
    group: str
    ranks: tuple[int, ...]
    size: int | None
    rows: Array
    start_ns: Array
    end_ns: Array
    root: Array
    bytes: Array
    label: str | None


def match_collectives(
    summaries: Sequence[RankSummary],
) -> tuple[list[Calls], list[Calls], list[Quality]]:
    """Match the collectives of all ranks: ``(matched, alone, quality)``.

    Calls that not all recording ranks of their group hold are left out. ``alone`` are the calls of
    groups that one rank alone recorded. Matched calls whose spans never meet, whatever the clocks,
    were not the same calls: they are left out, and said.
    """
    codes: dict[str, int] = {}
    lines: dict[GroupKey, list[Line]] = defaultdict(list)
    known = memberships(summaries)
    sizes = {len(ranks) for members in known.values() for ranks in members}
    # Where all groups that are known are of one size, so is the one that a call does not name.
    usual = sizes.pop() if len(sizes) == 1 else None
    for summary in summaries:
        if summary.collectives is not None and len(summary.collectives):
            for key, line in lines_of(summary, known, codes):
                lines[key].append(line)
    names = list(codes)
    matched: list[Calls] = []
    alone: list[Calls] = []
    quality: list[Quality] = []
    for key in sorted(lines, key=lambda key: (key.id, key.ranks or (), key.peers or ())):
        members, notes = _timed(key, sorted(lines[key], key=lambda line: line.rank))
        quality += notes
        if len(members) > 1:
            cut, notes = align(str(key), members, named=bool(key.id))
        else:
            cut, notes = members, []
        said = notes
        calls: list[Calls] = []
        if cut and len(cut[0].rows):
            calls, notes = _calls_of(key, cut, names, usual)
            said += notes
        if len(members) > 2 and not key.id and not key.peers and not _one_group(calls, cut, known):
            inferred = _inferred(members, names, known, summaries)
            held = sum(call.rows.size for call in calls if _meet(call))
            if inferred is not None and sum(call.rows.size for call in inferred[0]) >= held:
                calls, said = inferred
        quality += said
        (matched if len(members) > 1 else alone).extend(calls)
    quality += _silent_members(lines, {summary.rank for summary in summaries})
    strangers = [call for call in matched if not _meet(call)]
    if strangers:
        groups = sorted({f"{call.operation} in group {call.group or 'unnamed'}" for call in strangers})
        quality.append(
            Quality(
                "collectives-unmatched",
                "warning",
                f"the ranks' calls of {', '.join(groups)} never overlap in time, so they cannot be the same calls; "
                "they are left out",
            )
        )
    return [call for call in matched if call not in strangers], alone, quality


def _one_group(calls: list[Calls], cut: list[Line], known: dict[str, set[tuple[int, ...]]]) -> bool:
    """Whether calls without a named group may well be those of one group: all ranks name the same
    operations, all their calls meet, and the source knows of no smaller group."""
    if not cut or not calls or sum(len(call.rows) for call in calls) < len(cut[0].rows):
        return False
    ranks = {line.rank for line in cut}
    if any(1 < len(ranks.intersection(group)) < len(ranks) for groups in known.values() for group in groups):
        return False
    return all(_meeting(call) == 1 for call in calls)


def _inferred(
    members: list[Line],
    names: list[str],
    known: dict[str, set[tuple[int, ...]]],
    summaries: Sequence[RankSummary],
) -> tuple[list[Calls], list[Quality]] | None:
    """Calls of the groups that a line without names hides, ``None`` where no smaller group is found."""
    from .group_inference import infer_groups  # few jobs need it

    ids: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for id, groups in sorted(known.items()):
        for group in groups:
            ids[tuple(sorted(group))].append(id)
    hosts = {summary.host_name for summary in summaries}
    found = infer_groups(
        members,
        np.array([pattern_of(name) == "all" for name in names]),
        list(ids),
        one_clock=len(hosts) == 1 and None not in hosts,
    )
    if found is None or not found.split:
        return None
    calls: list[Calls] = []
    quality: list[Quality] = []
    for ranks, lines in found.groups.items():
        # A group that the source lists under one name alone is that one.
        id = ids[ranks][0] if len(ids.get(ranks, [])) == 1 else f"ranks {listed(ranks)}"
        part, notes = _calls_of(GroupKey(id, ranks), lines, names, len(ranks))
        calls += part
        quality += notes
    words = [f"ranks {listed(ranks)}" for ranks in found.groups]
    message = (
        "calls name no group, and those of all ranks are not one group's: groups were inferred from the ends of calls "
        f"that agree time after time ({'; '.join(words[:8])}{'; …' if len(words) > 8 else ''})"
    )
    quality.append(Quality("groups-inferred", "info", message))
    if found.matched < found.calls:
        message = (
            f"{found.calls - found.matched} of {found.calls} calls fit no inferred group and are left out"
        )
        quality.append(Quality("collectives-left-out", "warning", message))
    return calls, quality


def _timed(key: GroupKey, members: list[Line]) -> tuple[list[Line], list[Quality]]:
    """The ranks that know when their calls ended, where any does: on NCCL only deep windows know, and
    large jobs have them on some ranks alone."""
    timed = [line for line in members if (line.column("end_ns") != MISSING).any()]
    if not timed or len(timed) == len(members):
        return members, []
    count = len(members) - len(timed)
    message = f"{key}: {count} of {len(members)} ranks recorded no starts and ends and are left out"
    return timed, [Quality("collectives-untimed", "info", message)]


def _silent_members(lines: dict[GroupKey, list[Line]], present: set[int]) -> list[Quality]:
    """Ranks that are here and belong to a group, and recorded none of the calls that others did."""
    notes = []
    for key, members in lines.items():
        silent = sorted({*(key.ranks or ())} & present - {line.rank for line in members})
        if silent and not key.peers:
            message = f"{key}: ranks {silent} recorded none of the others' calls and are left out"
            notes.append(Quality("collectives-left-out", "warning", message))
    return notes


def _meet(calls: Calls) -> bool:
    """Whether most calls that all must enter overlap on all ranks."""
    return _meeting(calls) > 0.5


def _meeting(calls: Calls) -> float:
    """Share of calls that all must enter that overlap on all ranks, by their clocks or once these are set by the ends.

    Ranks of one host have one clock, and where they share its cores a short call ends on each when that one's turn comes.
    """
    known = ((calls.start_ns != MISSING) & (calls.end_ns != MISSING)).all(axis=1)
    if calls.pattern != "all" or not known.any():
        return 1.0
    start, end = calls.start_ns[known], calls.end_ns[known]
    offset = np.stack([trend_of(column, end[:, 0] - column)[0].at(column) for column in end.T], axis=1)
    return max(_overlapping(start, end), _overlapping(start + offset, end + offset))


def _overlapping(start: Array, end: Array) -> float:
    return share(start.max(axis=1) <= end.min(axis=1))


def _calls_of(
    key: GroupKey, lines: list[Line], names: list[str], usual: int | None
) -> tuple[list[Calls], list[Quality]]:
    """Matched lines as calls, one :class:`Calls` an operation; ``usual`` is the size of a group that is not named."""
    operation = np.stack([line.operation for line in lines], axis=1)
    same = (operation == operation[:, :1]).all(axis=1)
    quality: list[Quality] = []
    if not same.all():
        quality.append(
            Quality(
                "collectives-disagree",
                "warning",
                f"{key}: in {int((~same).sum())} of {len(same)} calls the ranks name different "
                "operations; those are left out",
            )
        )
    start, end, size, peer = (
        np.stack([line.column(name) for line in lines], axis=1)
        for name in ("start_ns", "end_ns", "bytes", "peer")
    )
    rows = np.stack([line.rows for line in lines], axis=1)
    calls: list[Calls] = []
    for code in np.unique(operation[same, 0]):
        name = names[int(code)]
        chosen = same & (operation[:, 0] == code)
        pattern: Pattern = "pair" if key.peers else pattern_of(name)
        group_size = 2 if key.peers else len(key.ranks) if key.ranks else None if key.id else usual
        part = Calls(
            operation=name,
            pattern=pattern,
            group=key.id,
            ranks=tuple(line.rank for line in lines),
            size=group_size,
            rows=rows[chosen],
            start_ns=start[chosen],
            end_ns=end[chosen],
            root=peer[chosen].max(axis=1),
            bytes=size[chosen].max(axis=1),
            label=_common_label(lines[0], chosen),
        )
        calls.append(part)
    return calls, quality


def _common_label(line: Line, chosen: Array) -> str | None:
    labels = np.unique(line.column("label")[chosen])
    return line.table.strings.text(int(labels[0])) if len(labels) == 1 else None
