"""Communication by what its groups are for: what data, tensor, pipeline and expert parallelism each cost.

For each kind: transfer and wait a rank (:mod:`trine.analyzers.collectives`), what of it no computation
hid, the bus bandwidth that its links carried, and which ranks the others waited for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers._tabular import Tabular
from trine.analyzers.breakdown import device_rows, has_device_work, top_level_operators
from trine.analyzers.collectives import Blame, collective_results, communications
from trine.analyzers.group_kinds import KINDS, GroupKind, Kind, kind_of_caller, kinds_of_groups
from trine.analyzers.intervals import Spans, clip, difference, measure, union
from trine.analyzers.operations import canonical_operation
from trine.analyzers.results import CollectiveResult, Communication
from trine.analyzers.selection import Selected
from trine.record.model import DEVICE_KINDS, MISSING, Group, Rank, Table

from ._scope import Scope, Whole

__all__ = ["KEY", "GroupCosts", "GroupsResult", "LateRank", "OperationCosts", "join", "reduce", "to_json"]

KEY = "groups"

Array = npt.NDArray[Any]

_COMPUTE = DEVICE_KINDS.index("compute")
_PEER = ("send", "recv", "send_recv")
_MOST_LATE = 8
#: Enclosing calls that are looked at above a collective.
_DEEPEST = 100


# --- one rank ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's calls: (group, operation, count), (group, point-to-point, busy ns, exposed ns), and
    (group, kind, calls issued by functions that are known to be of it)."""

    counts: tuple[tuple[str, str, int], ...]
    spans: tuple[tuple[str, bool, int, int], ...]
    callers: tuple[tuple[str, Kind, int], ...]


def reduce(scope: Scope) -> _Part | None:
    """Calls by group, and how long each group's calls ran with no computation beside them."""
    table = scope.collectives
    if table is None or not len(table):
        return None
    spans: dict[tuple[str, bool], list[int]] = defaultdict(lambda: [0, 0])
    callers: Counter[tuple[str, Kind]] = Counter()
    for rank, selected in scope.traced:
        callers += _callers(rank)
        for key, busy, exposed in _exposed(rank, selected):
            spans[key][0] += busy
            spans[key][1] += exposed
    return _Part(
        tuple(_counts(table)),
        tuple((group, peer, busy, exposed) for (group, peer), (busy, exposed) in sorted(spans.items())),
        tuple((*key, calls) for key, calls in sorted(callers.items())),
    )


def _counts(table: Table) -> list[tuple[str, str, int]]:
    pairs = np.stack([table["group"], table["operation"]], axis=1)
    unique, count = np.unique(pairs, axis=0, return_counts=True)
    text = table.strings.text
    found: Counter[tuple[str, str]] = Counter()
    for (group, operation), calls in zip(unique.tolist(), count.tolist(), strict=True):
        found[text(group) or "", canonical_operation(text(operation))] += calls
    return [(group, operation, calls) for (group, operation), calls in sorted(found.items())]


def _callers(rank: Rank) -> Counter[tuple[str, Kind]]:
    """Calls by group and by what the innermost function that tells needed them for."""
    table, host = rank.collectives, rank.host
    found: Counter[tuple[str, Kind]] = Counter()
    if table is None or host is None:
        return found
    around: list[Array] = []
    row = table["host_row"]
    while len(around) < _DEEPEST and (row >= 0).any():
        around.append(np.where(row >= 0, host["name"][row], -1))
        row = np.where(row >= 0, host["parent"][row], -1)
    if not around:
        return found
    codes, place = np.unique(np.stack(around), return_inverse=True)
    told = [kind_of_caller(host.strings.text(code) or "") for code in codes.tolist()]
    kinds: list[Kind] = sorted({kind for kind in told if kind is not None})
    if not kinds:
        return found
    kind = np.array([-1 if one is None else kinds.index(one) for one in told])[place].reshape(len(around), -1)
    innermost = kind[(kind >= 0).argmax(axis=0), np.arange(kind.shape[1])]
    for group, one in zip(table["group"].tolist(), innermost.tolist(), strict=True):
        if one >= 0:
            found[table.strings.text(group) or "", kinds[one]] += 1
    return found


def _exposed(rank: Rank, selected: Selected) -> list[tuple[tuple[str, bool], int, int]]:
    """(group, point-to-point), ns in which such a call ran, and of these the ns without computation."""
    table = rank.collectives
    if table is None or not len(table):
        return []
    if has_device_work(rank):
        start, end, chosen, compute = _on_device(rank, selected, table)
    else:
        start, end, chosen, compute = _on_host(rank, selected, table)
    codes, place = np.unique(table["operation"], return_inverse=True)
    operations = [canonical_operation(table.strings.text(code)) in _PEER for code in codes.tolist()]
    peer = np.array(operations)[place]
    key = table["group"].astype(np.int64) * 2 + peer
    found = []
    for one in np.unique(key[chosen]).tolist():
        rows = chosen & (key == one)
        spans = union(start[rows], end[rows])
        group = table.strings.text(one // 2) or ""
        found.append(((group, bool(one % 2)), measure(spans), measure(difference(spans, compute))))
    return found


def _on_device(rank: Rank, selected: Selected, table: Table) -> tuple[Array, Array, Array, Spans]:
    device = rank.device
    assert device is not None
    chosen = device_rows(rank, selected)
    busy = chosen & (device["kind"] == _COMPUTE)
    row = table["device_row"]
    start, end = device["start_ns"][np.maximum(row, 0)], device["end_ns"][np.maximum(row, 0)]
    held = (row >= 0) & chosen[np.maximum(row, 0)]
    return start, end, held, union(device["start_ns"][busy], device["end_ns"][busy])


def _on_host(rank: Rank, selected: Selected, table: Table) -> tuple[Array, Array, Array, Spans]:
    """Without a device the calls' own spans count, and operators are the work; both within the steps."""
    start, end = table["start_ns"], table["end_ns"]
    held = (start != MISSING) & (end != MISSING) & (end > start)
    operators = top_level_operators(rank.host)
    compute = union(operators.start, operators.end)
    if not selected.everything and selected.start_ns is not None and selected.end_ns is not None:
        compute = clip(compute, selected.start_ns, selected.end_ns)
        start = np.where(held, np.maximum(start, selected.start_ns), start)
        end = np.where(held, np.minimum(end, selected.end_ns), end)
        held = held & (end > start)
    return start, end, held, compute


# --- all ranks ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that others waited for. ``doing`` is what it did meanwhile."""

    rank: int
    caused_wait_ns: int
    lateness_ns: int
    last_in: int
    doing: str | None
    example: str | None


@dataclass(frozen=True, slots=True)
class OperationCosts:
    """Calls of one operation in groups of one kind; sums over calls, ``wait_ns`` over ranks too."""

    operation: str
    calls: int
    bytes: int | None
    transfer_ns: int
    wait_ns: int
    busbw_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """What communication of one kind costs.

    ``calls`` counts a collective once, however many ranks it has, as the table of collectives does: those matched,
    else, of ranks that could not be matched, what the rank that recorded most did. ``transfer_ns`` and ``wait_ns`` are means over the ranks that
    matched calls, ``exposed_ns`` the mean over ranks with a breakdown; ``exposed_share`` is of their windows.
    ``None`` is what the data cannot say: waits of one rank alone, exposure without kernels or operators.
    """

    kind: Kind
    known_by: tuple[str, ...]
    groups: int
    sizes: tuple[int, ...]
    ranks: int
    calls: int
    transfer_ns: int | None
    wait_ns: int | None
    busy_ns: int | None
    exposed_ns: int | None
    exposed_share: float | None
    busbw_bytes_per_s: float | None
    operations: tuple[OperationCosts, ...]
    late: tuple[LateRank, ...]


@dataclass(frozen=True, slots=True)
class GroupsResult(Tabular):
    """All kinds, the costliest first."""

    kinds: tuple[GroupCosts, ...]


def join(parts: Mapping[int, _Part], whole: Whole) -> GroupsResult | str:
    """Costs by kind of group, over all ranks."""
    if not parts:
        return (
            "no collective was recorded; record with torch.profiler on several ranks, or with trine.profile"
        )
    groups = {group for summary in whole.summaries.values() for group in summary.groups}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    callers: dict[str, Counter[Kind]] = defaultdict(Counter)
    for part in parts.values():
        for group, operation, calls in part.counts:
            counts[group][operation] += calls
        for group, kind, calls in part.callers:
            callers[group][kind] += calls
    groups |= _inferred(whole.blames, groups, counts)
    world = whole.job.world_size or max((s.world_size or 0 for s in whole.summaries.values()), default=0)
    kinds = kinds_of_groups(groups, counts, callers, world or None)
    blames: dict[Kind, list[Blame]] = defaultdict(list)
    for blame in whole.blames:
        if len(blame.transfer):
            peer = blame.calls.pattern == "pair"
            blames[_kind(kinds, blame.calls.group, peer=peer)].append(blame)
    found = [_costs(kind, kinds, groups, parts, blames[kind], whole) for kind in KINDS]
    ordered = sorted((costs for costs in found if costs is not None), key=lambda costs: -_weight(costs))
    return GroupsResult(tuple(ordered))


def _inferred(blames: Sequence[Blame], groups: set[Group], counts: dict[str, Counter[str]]) -> set[Group]:
    """Groups whose names no rank's rows hold: they were inferred, and what they are for is told like any other's.
    Their calls are added to ``counts``."""
    named = set(counts)
    found = set()
    for blame in blames:
        calls = blame.calls
        if calls.group and calls.group not in named:
            counts[calls.group][calls.operation] += len(blame.transfer)
            if all(group.id != calls.group for group in groups):
                found.add(Group(calls.group, None, None, calls.ranks))
    return found


def _kind(kinds: Mapping[str, GroupKind], group: str, *, peer: bool) -> Kind:
    """Sends and receives in a group that is for nothing particular are a pipeline's."""
    kind = kinds[group].kind if group in kinds else "unknown"
    return "pipeline" if peer and kind in ("data", "world", "unknown") else kind


def _weight(costs: GroupCosts) -> int:
    return max((costs.transfer_ns or 0) + (costs.wait_ns or 0), costs.busy_ns or 0)


def _costs(
    kind: Kind,
    kinds: Mapping[str, GroupKind],
    groups: set[Group],
    parts: Mapping[int, _Part],
    blames: Sequence[Blame],
    whole: Whole,
) -> GroupCosts | None:
    """What a kind costs; ``None`` where no call is of it."""
    ids, ranks = set(), set()
    recorded: Counter[int] = Counter()
    for rank, part in parts.items():
        for group, operation, count in part.counts:
            if _kind(kinds, group, peer=operation in _PEER) == kind:
                ids.add(group)
                recorded[rank] += count
                ranks.add(rank)
    for blame in blames:
        ids.add(blame.calls.group)
        ranks.update(blame.calls.ranks)
    calls = sum(len(blame.transfer) for blame in blames) or max(recorded.values(), default=0)
    if not calls:
        return None
    members = {(group.id, group.ranks) for group in groups if group.id in ids and group.ranks}
    shares = communications(blames, whole.summaries, whole.blames)
    results = collective_results(blames)
    busy, exposed, window = _exposure(kind, kinds, parts, whole)
    return GroupCosts(
        kind=kind,
        known_by=tuple(sorted({kinds[id].by for id in ids if id in kinds})),
        groups=len(members) or len(ids),
        sizes=tuple(sorted({len(ranks) for _, ranks in members})),
        ranks=len(ranks),
        calls=calls,
        transfer_ns=_mean([share.transfer_ns for share in shares.values()]),
        wait_ns=_mean([share.wait_ns for share in shares.values()]),
        busy_ns=_mean(busy),
        exposed_ns=_mean(exposed),
        exposed_share=round(sum(exposed) / window, 6) if window else None,
        busbw_bytes_per_s=_busbw(results),
        operations=_operations(results),
        late=_late(shares),
    )


def _exposure(
    kind: Kind, kinds: Mapping[str, GroupKind], parts: Mapping[int, _Part], whole: Whole
) -> tuple[list[int], list[int], int]:
    """Busy and exposed ns of each rank that has a breakdown, and the sum of their windows."""
    busy, exposed, window = [], [], 0
    for rank, part in parts.items():
        breakdown = whole.summaries[rank].breakdown
        mine = [(b, e) for group, peer, b, e in part.spans if _kind(kinds, group, peer=peer) == kind]
        if breakdown is None or not mine:
            continue
        busy.append(sum(b for b, _ in mine))
        exposed.append(min(sum(e for _, e in mine), breakdown.window_ns))
        window += breakdown.window_ns
    return busy, exposed, window


def _mean(values: Sequence[int]) -> int | None:
    return sum(values) // len(values) if values else None


def _busbw(results: Sequence[CollectiveResult]) -> float | None:
    known = [(one.busbw_bytes_per_s, one.transfer_ns) for one in results if one.busbw_bytes_per_s]
    total = sum(transfer for _, transfer in known)
    return sum(rate * transfer for rate, transfer in known) / total if total else None


def _operations(results: Sequence[CollectiveResult]) -> tuple[OperationCosts, ...]:
    by_operation: dict[str, list[CollectiveResult]] = defaultdict(list)
    for one in results:
        by_operation[one.op].append(one)
    found = [
        OperationCosts(
            operation=operation,
            calls=sum(one.calls for one in same),
            bytes=None if any(one.bytes is None for one in same) else sum(one.bytes or 0 for one in same),
            transfer_ns=sum(one.transfer_ns for one in same),
            wait_ns=sum(one.wait_ns for one in same),
            busbw_bytes_per_s=_busbw(same),
        )
        for operation, same in by_operation.items()
    ]
    return tuple(sorted(found, key=lambda one: (-(one.transfer_ns + one.wait_ns), one.operation)))


def _late(shares: Mapping[int, Communication]) -> tuple[LateRank, ...]:
    late = sorted(
        (item for item in shares.items() if item[1].caused_wait_ns > 0),
        key=lambda item: (-item[1].caused_wait_ns, item[0]),
    )
    found = []
    for rank, share in late[:_MOST_LATE]:
        doing = share.late_doing[0] if share.late_doing else None
        found.append(
            LateRank(
                rank=rank,
                caused_wait_ns=share.caused_wait_ns,
                lateness_ns=share.lateness_ns,
                last_in=share.last_in,
                doing=doing.activity if doing else None,
                example=doing.example if doing else None,
            )
        )
    return tuple(found)


def to_json(result: GroupsResult) -> dict[str, Any]:
    """The result as plain values; times in ns, sizes in bytes."""
    return {"kinds": [_kind_to_json(costs) for costs in result.kinds]}


def _kind_to_json(costs: GroupCosts) -> dict[str, Any]:
    return {
        "kind": costs.kind,
        "known_by": list(costs.known_by),
        "groups": costs.groups,
        "group_sizes": list(costs.sizes),
        "ranks": costs.ranks,
        "calls": costs.calls,
        "transfer_per_rank_ns": costs.transfer_ns,
        "wait_per_rank_ns": costs.wait_ns,
        "busy_per_rank_ns": costs.busy_ns,
        "exposed_per_rank_ns": costs.exposed_ns,
        "exposed_share": costs.exposed_share,
        "busbw_bytes_per_s": costs.busbw_bytes_per_s,
        "operations": [
            {
                "op": one.operation,
                "calls": one.calls,
                "bytes": one.bytes,
                "transfer_ns": one.transfer_ns,
                "wait_ns": one.wait_ns,
                "busbw_bytes_per_s": one.busbw_bytes_per_s,
            }
            for one in costs.operations
        ],
        "late": [
            {
                "rank": one.rank,
                "caused_wait_ns": one.caused_wait_ns,
                "lateness_ns": one.lateness_ns,
                "last_in": one.last_in,
                "doing": one.doing,
                "example": one.example,
            }
            for one in costs.late
        ],
    }
