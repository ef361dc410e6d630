"""Where the memory went: the curve by category, who owns the peak, what grows, what could be freed.

From the allocator's events of any source: a memory snapshot, a trace's ``[memory]`` events, an exported
memory timeline. Categories are inferred where the source does not say them (docs/memory.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from trine.analyzers._tabular import Columns, Tabular
from trine.analyzers.allocations import Ledger, ledger
from trine.analyzers.memory import snapshot_facts
from trine.analyzers.results import RankSummary
from trine.record.memory_categories import CATEGORIES
from trine.record.model import MISSING, Rank, Table

from ._memory_frees import CHECKPOINTED, Freed, freed
from ._memory_leaks import Growth, ends_by_gradients, growing, growing_levels, median_slope
from ._memory_segments import Fragmentation, PoolUse, fragmentation
from ._memory_state import with_state
from ._scope import Scope, Whole

__all__ = [
    "CHECKPOINTED",
    "KEY",
    "Failure",
    "Fragmentation",
    "Freed",
    "Leak",
    "MemoryOwners",
    "OwnedMemory",
    "PoolUse",
    "RankMemory",
    "join",
    "median_slope",
    "reduce",
    "to_json",
]

Array = npt.NDArray[Any]

KEY = "memory_owners"

#: Points of a rank's curve, each the highest of its stretch.
MOST_POINTS = 400
#: A step is seen to its end where the last event lies within this share of a step before it.
END_SHARE = 0.1
#: Owners of the peak and growing places that are kept.
MOST_OWNERS = 30
MOST_LEAKS = 8
#: Lines of a stack that are kept.
MOST_LINES = 12
#: Ranks that the result keeps: those with the highest peaks.
MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class OwnedMemory:
    """What one place holds at the peak. ``stack`` is that of its largest allocation, innermost first."""

    category: str
    owner: str | None
    bytes: int
    count: int
    operator: str | None = None
    module: str | None = None
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leak:
    """A place whose memory grows from step to step."""

    owner: str | None
    category: str
    per_step_bytes: float
    first_bytes: int
    last_bytes: int
    steps: int
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """An allocation that failed. ``free_bytes`` were left on the device, ``reserved_bytes`` held by this process of which
    ``unused_bytes`` were not allocated; None where unknown."""

    time_ns: int
    requested_bytes: int
    free_bytes: int | None
    reserved_bytes: int | None
    unused_bytes: int | None
    owner: str | None


@dataclass(frozen=True, slots=True)
class RankMemory(Tabular):
    """One rank's memory. ``levels`` holds a tuple for each of ``categories``, a value for each of ``times_ns``; they sum
    to ``totals``. ``lowest`` is category → bytes at the lowest point after the first peak: what stays."""

    COLUMNS: ClassVar[Columns] = dict.fromkeys(("categories", "times_ns", "levels", "totals"))

    rank: int
    kind: Literal["device", "host"]
    device: int
    peak_bytes: int
    peak_ns: int
    reserved_at_peak_bytes: int | None
    lower_bound: bool
    categories: tuple[str, ...]
    times_ns: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]
    totals: tuple[int, ...]
    owners: tuple[OwnedMemory, ...]
    others_bytes: int  # at the peak, of owners beyond those kept
    lowest: Mapping[str, int]
    fragmentation: Fragmentation | None
    retries: int | None
    pending_peak_bytes: int | None
    segments_allocated: int
    segments_released: int
    failures: tuple[Failure, ...]
    leaks: tuple[Leak, ...]
    steps: int  # step ends that leaks were looked for in; 0 where none are marked

    def more_tables(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """``curve``: bytes by category over time."""
        names = [f"{name}_bytes" for name in self.categories]
        columns = zip(*self.levels, strict=True) if self.levels else ((),) * len(self.times_ns)
        curve = [
            {
                "rank": self.rank,
                "time_ns": when,
                **dict(zip(names, levels, strict=True)),
                "total_bytes": total,
            }
            for when, levels, total in zip(self.times_ns, columns, self.totals, strict=True)
        ]
        return {"curve": curve}


@dataclass(frozen=True, slots=True)
class MemoryOwners(Tabular):
    """All ranks, the highest peak first, of at most :data:`MOST_RANKS`; ``frees`` are the first one's."""

    ranks: tuple[RankMemory, ...]
    left_out: int
    frees: tuple[Freed, ...]


# --- one rank ----------------------------------------------------------------------------------


def reduce(scope: Scope) -> RankMemory | None:
    """The rank's curve, owners, fragmentation and growth; None without allocator events."""
    bounds: tuple[int | None, int | None] = (None, None)
    if scope.selection.is_range:
        bounds = (scope.selected.start_ns, scope.selected.end_ns)
    parts = [(rank, rank.memory) for rank in (scope.rank, *scope.rank.windows) if rank.memory is not None]
    found = [(rank, one) for rank, table in parts if (one := ledger(rank, table, *bounds)) is not None]
    if not found:
        return None
    rank, book = max(found, key=lambda pair: int(pair[1].allocated[pair[1].peak]))
    return _reduced(scope.rank, rank, book)


def _reduced(whole: Rank, rank: Rank, book: Ledger) -> RankMemory:
    peak = book.peak
    categories, points, levels, totals = _curve(book)
    owners, others = _owners(book, peak)
    facts = snapshot_facts(rank, book.device)
    settings = (rank.metadata.get("memory_snapshot") or {}).get("allocator_settings") or {}
    expandable = settings.get("expandable_segments") is True
    ends = _step_ends(whole, rank, facts)
    if not len(ends) and book.paired is None:
        ends = ends_by_gradients(book.time_ns, book.level("gradients"))
    churn = _churn(rank.memory, book.device)
    lowest = points[int(np.argmin(totals))] if len(points) else peak
    return RankMemory(
        rank=whole.rank,
        kind="device" if book.device >= 0 else "host",
        device=book.device,
        peak_bytes=int(book.allocated[peak]),
        peak_ns=int(book.time_ns[peak]),
        reserved_at_peak_bytes=None if book.reserved is None else int(book.reserved[peak]),
        lower_bound=book.lower_bound,
        categories=categories,
        times_ns=tuple(book.time_ns[points].tolist()),
        levels=tuple(tuple(level) for level in levels.tolist()),
        totals=tuple(totals.tolist()),
        owners=owners,
        others_bytes=others,
        lowest=_at(book, lowest),
        fragmentation=None
        if rank.segments is None
        else fragmentation(rank.segments, book.device, expandable),
        retries=facts.get("retries"),
        pending_peak_bytes=facts.get("pending_peak_bytes"),
        segments_allocated=churn[0],
        segments_released=churn[1],
        failures=_failures(rank.memory, book, facts),
        leaks=_leaks(book, ends),
        steps=len(ends),
    )


def _curve(book: Ledger) -> tuple[tuple[str, ...], Array, Array, Array]:
    """(categories, rows, levels (categories, rows), totals): the curve's points, each the highest of its stretch."""
    rows = np.flatnonzero(book.inside & book.begun)
    if not len(rows):
        rows = np.flatnonzero(book.inside)[-1:]
    if len(rows) > MOST_POINTS:
        edges = np.linspace(0, len(rows), MOST_POINTS + 1).astype(np.int64)[:-1]
        stretch = np.searchsorted(edges, np.arange(len(rows)), side="right") - 1
        order = np.lexsort((-book.allocated[rows], stretch))
        rows = rows[np.sort(order[np.unique(stretch[order], return_index=True)[1]])]
    totals = book.allocated[rows]
    codes, found = book.levels(rows)
    names = [book.table.strings.text(int(code)) or "unattributed" for code in codes]
    by_name: dict[str, Array] = {}
    for name, level in zip(names, found, strict=True):
        by_name[name] = by_name.get(name, 0) + np.maximum(level, 0)
    known = sum((level for name, level in by_name.items() if name != "unattributed"), np.zeros_like(totals))
    by_name["unattributed"] = np.maximum(totals - known, 0)
    order_of = {name: place for place, name in enumerate((*CATEGORIES[:-1], "inputs"))}
    ordered = sorted(by_name, key=lambda name: (order_of.get(name, 99), name))
    kept = [name for name in ordered if by_name[name].any()]
    levels = np.array([by_name[name] for name in kept]) if kept else np.zeros((0, len(rows)), dtype=np.int64)
    return tuple(kept), rows, levels, totals


def _at(book: Ledger, row: int) -> dict[str, int]:
    codes, levels = book.levels(np.array([row]))
    total = int(book.allocated[row])
    found: dict[str, int] = {}
    for code, level in zip(codes.tolist(), levels[:, 0].tolist(), strict=True):
        name = book.table.strings.text(code) or "unattributed"
        if level > 0 and name != "unattributed":
            found[name] = level
    found["unattributed"] = max(total - sum(found.values()), 0)
    return {name: level for name, level in found.items() if level}


def _owners(book: Ledger, peak: int) -> tuple[tuple[OwnedMemory, ...], int]:
    """(largest owners at the peak, bytes of all others). Without addresses only categories own."""
    table = book.table
    if book.paired is None:
        at = _at(book, peak)
        return tuple(
            OwnedMemory(name, None, level, 0) for name, level in sorted(at.items(), key=lambda p: -p[1])
        ), 0
    alive = book.alive(peak)
    size, row = book.paired.size[alive], np.maximum(book.paired.start[alive], 0)
    known = book.paired.start[alive] >= 0
    category = np.where(known, table["category"][row], -1)
    owner = np.where(known, table["owner"][row], -1)
    key = category.astype(np.int64) << 32 | (owner.astype(np.int64) & 0xFFFFFFFF)
    keys, first, number = np.unique(key, return_index=True, return_inverse=True)
    total = np.bincount(number, weights=size, minlength=len(keys)).astype(np.int64)
    count = np.bincount(number, minlength=len(keys))
    found = []
    for place in np.argsort(-total, kind="stable")[:MOST_OWNERS].tolist():
        mine = np.flatnonzero(number == place)
        largest = int(row[mine[size[mine].argmax()]])
        one = int(first[place])
        found.append(
            _owned(
                table,
                int(category[one]),
                int(owner[one]),
                int(total[place]),
                int(count[place]),
                largest,
                bool(known[one]),
            )
        )
    # What no event explains: allocated before the first of them.
    rest = int(book.allocated[peak]) - int(total.sum())
    if rest > 0:
        found.append(OwnedMemory("unattributed", None, rest, 0))
    found.sort(key=lambda owned: -owned.bytes)
    kept = found[:MOST_OWNERS]
    others = int(total.sum()) + max(rest, 0) - sum(owned.bytes for owned in kept)
    return tuple(kept), max(others, 0)


def _owned(
    table: Table, category: int, owner: int, total: int, count: int, row: int, known: bool
) -> OwnedMemory:
    lines = _lines(table, int(table["stack"][row])) if known else ()
    said = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines if line.startswith(_SAID)}
    return OwnedMemory(
        category=table.strings.text(category) or "unattributed",
        owner=table.strings.text(owner),
        bytes=total,
        count=count,
        operator=said.get("operator"),
        module=said.get("module"),
        stack=tuple(line for line in lines if not line.startswith(_SAID))[:MOST_LINES],
    )


_OPTIMIZER_STEP = "Optimizer.step#"
_SAID = ("operator ", "module ")


def _lines(table: Table, code: int) -> tuple[str, ...]:
    return tuple((table.strings.text(code) or "").split("\n")) if code >= 0 else ()


def _step_ends(whole: Rank, rank: Rank, facts: Mapping[str, Any]) -> Array:
    """Ends of the steps, ascending: as marked, else as optimizer steps show them, in a snapshot or as annotations."""
    for steps in (whole.steps, rank.steps):
        if steps is not None and len(steps):
            ends = steps["end_ns"]
            return np.unique(ends[ends != MISSING])
    if facts.get("step_ends_ns"):
        return np.unique(np.array(facts["step_ends_ns"], dtype=np.int64))
    # A profiler without a schedule marks no steps; torch's optimizers mark theirs.
    host = whole.host
    if host is None:
        return np.empty(0, dtype=np.int64)
    codes = [code for code, text in enumerate(host.strings.values) if text.startswith(_OPTIMIZER_STEP)]
    return np.unique(host["end_ns"][np.isin(host["name"], codes)])


def _leaks(book: Ledger, ends: Array) -> tuple[Leak, ...]:
    table, time = book.table, book.time_ns
    if not len(time):
        return ()
    # The last event of the last step comes a moment before that step's end; what it left alive is alive then.
    late = END_SHARE * float(np.median(np.diff(ends))) if len(ends) > 1 else 0.0
    ends = ends[(ends >= time[0]) & (ends - 1 <= time[-1] + late)]
    if len(ends) < 2:
        return ()
    if book.paired is None:
        return _grown_categories(book, ends)
    known = book.paired.start >= 0
    start, end = book.paired.start[known], book.paired.end[known]
    row = np.minimum(start, len(time) - 1)
    place = table["owner"][row].astype(np.int64) << 32 | (
        table["category"][row].astype(np.int64) & 0xFFFFFFFF
    )
    never = np.iinfo(np.int64).max
    ended = np.where(end < len(time), time[np.minimum(end, len(time) - 1)], never)
    found = growing(place, book.paired.size[known], time[start], ended, ends)
    leaks = []
    for growth in found[:MOST_LEAKS]:
        mine = np.flatnonzero(place == growth.place)
        latest = int(start[mine[-1]])
        lines = _lines(table, int(table["stack"][latest]))
        leaks.append(
            Leak(
                owner=table.strings.text(growth.place >> 32),
                category=table.strings.text(int(table["category"][latest])) or "unattributed",
                per_step_bytes=growth.per_step_bytes,
                first_bytes=growth.first_bytes,
                last_bytes=growth.last_bytes,
                steps=growth.steps,
                stack=lines[:MOST_LINES],
            )
        )
    return tuple(leaks)


def _grown_categories(book: Ledger, ends: Array) -> tuple[Leak, ...]:
    """What grows of a curve, whose single allocations are not known."""
    codes, levels = book.levels(np.arange(len(book.time_ns)))
    found: list[Growth] = growing_levels(codes, levels, book.time_ns, ends)
    return tuple(
        Leak(
            owner=None,
            category=book.table.strings.text(growth.place) or "unattributed",
            per_step_bytes=growth.per_step_bytes,
            first_bytes=growth.first_bytes,
            last_bytes=growth.last_bytes,
            steps=growth.steps,
        )
        for growth in found[:MOST_LEAKS]
    )


def _churn(table: Table | None, device: int) -> tuple[int, int]:
    """Segments that were got from and given back to the driver during the history."""
    if table is None:
        return 0, 0
    mine = table["device"] == device
    counts = [
        int((mine & (table["action"] == table.strings.find(name))).sum())
        for name in ("segment_alloc", "segment_free")
    ]
    return counts[0], counts[1]


def _failures(table: Table | None, book: Ledger, facts: Mapping[str, Any]) -> tuple[Failure, ...]:
    found = []
    for when, requested, free, reserved in facts.get("out_of_memory") or ():
        at = int(np.searchsorted(book.time_ns, when, side="right")) - 1
        allocated = int(book.allocated[at]) if at >= 0 else None
        owner = None
        if table is not None:
            rows = np.flatnonzero(
                (table["action"] == table.strings.find("out_of_memory")) & (table["time_ns"] == when)
            )
            owner = table.strings.text(int(table["owner"][rows[0]])) if len(rows) else None
        unused = reserved - allocated if reserved and allocated is not None else None
        found.append(Failure(when, requested, free if free >= 0 else None, reserved or None, unused, owner))
    return tuple(found)


# --- all ranks ---------------------------------------------------------------------------------


def join(parts: Mapping[int, RankMemory], whole: Whole) -> MemoryOwners | str:
    """The ranks with the highest peaks, and what would lower the highest."""
    if not parts:
        return "no allocator events; profile with profile_memory=True, or take a snapshot (torch.cuda.memory._dump_snapshot)"
    whole_parts = [_from_before(part, whole.summaries.get(part.rank)) for part in parts.values()]
    order = sorted(
        whole_parts,
        key=lambda part: (part.kind == "device", _fullness(part, whole.summaries), -part.rank),
        reverse=True,
    )
    first = order[0]
    order[1:] = sorted(order[1:], key=lambda part: not (part.failures or part.leaks or part.retries))
    ranks, replicated = _replicas(whole)
    frees = freed(
        first.categories, np.array(first.levels), np.array(first.totals), ranks, replicated=replicated
    )
    return MemoryOwners(tuple(order[:MOST_RANKS]), max(len(order) - MOST_RANKS, 0), frees)


def _fullness(part: RankMemory, summaries: Mapping[int, RankSummary]) -> tuple[int, int]:
    """Bytes by which ranks are told apart: what its own samples say first, which see what no event does."""
    summary = summaries.get(part.rank)
    sampled = summary.memory.peak_bytes if summary is not None and summary.memory is not None else None
    return max(sampled or 0, part.peak_bytes), part.peak_bytes


def _from_before(part: RankMemory, summary: RankSummary | None) -> RankMemory:
    """A host's curve on top of the state that was there before its first event, where the record knows how large it is."""
    if part.kind != "host" or summary is None or summary.memory is None or not part.levels:
        return part
    curve = with_state(part.categories, np.array(part.levels), summary.memory.at_peak)
    if not curve.before:
        return part
    lacking = sum(curve.before.values())
    state = [OwnedMemory(name, None, size, 0) for name, size in curve.before.items()]
    return replace(
        part,
        peak_bytes=part.peak_bytes + lacking,
        lower_bound=True,
        categories=curve.categories,
        levels=tuple(map(tuple, curve.levels.tolist())),
        totals=tuple(total + lacking for total in part.totals),
        owners=tuple(sorted([*part.owners, *state], key=lambda owned: -owned.bytes)),
        lowest={
            name: part.lowest.get(name, 0) + curve.before.get(name, 0)
            for name in dict.fromkeys((*curve.before, *part.lowest))
        },
    )


def _replicas(whole: Whole) -> tuple[int | None, bool]:
    """(ranks that hold the same state, whether the source says so); None where nothing says how many ranks there are."""
    described = next((s.metadata.get("data_parallel") for s in whole.summaries.values()), None)
    kind = described.get("kind") if isinstance(described, dict) else None
    if kind not in (None, "ddp"):
        return 1, True  # sharded already
    worlds = [s.world_size for s in whole.summaries.values() if s.world_size]
    return max([*worlds, whole.job.world_size or 0]) or None, kind == "ddp"


def to_json(result: MemoryOwners) -> dict[str, Any]:
    """Plain values; times from the first point of each curve."""
    ranks = []
    for part in result.ranks:
        plain = {**asdict(part), "lowest": dict(part.lowest)}
        first = part.times_ns[0] if part.times_ns else part.peak_ns
        del plain["times_ns"], plain["levels"], plain["totals"], plain["categories"]
        plain["peak_after_ns"] = part.peak_ns - first
        plain["timeline"] = {
            "first_ns": first,
            "time_ns": [when - first for when in part.times_ns],
            "bytes": {name: list(level) for name, level in zip(part.categories, part.levels, strict=True)},
        }
        ranks.append(plain)
    return {
        "ranks": ranks,
        "ranks_left_out": result.left_out,
        "frees": [{**asdict(each), "inputs": dict(each.inputs)} for each in result.frees],
    }
