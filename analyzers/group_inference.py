"""Process groups that a source does not name, from which ranks leave their calls together.

Ranks leave a collective together. So the n-th calls of one kind (operation and size) or of one place in the
step whose *ends* agree on some ranks, time after time, are calls of a group of those ranks. Candidates are the
groups that the source lists beside its calls, regular ones (neighbours, every n-th rank) and those that the
distances of the ends suggest. A candidate must let every call overlap on all its ranks (nobody leaves before
the last has entered). Of those that do, the coarsest is taken, unless the ends within a finer one's groups lie closer
by more than chance explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING

from ._drift import trend_of
from .lines import Line, kinds_of

__all__ = ["Inferred", "infer_groups"]

Array = npt.NDArray[Any]

#: Calls that must repeat before their ends say anything.
FEWEST_CALLS = 3
#: Share of a group's calls that must overlap on all its ranks.
OVERLAPPING = 0.9
#: How many times smaller the variance of ends within a finer partition's groups must be, with many calls;
#: more with few, as chance then finds ranks that look close. Groups that the source lists need its root.
CLOSER = 4.0
#: Calls from which on :data:`CLOSER` suffices, and share of them that must say so.
MANY_CALLS = 8
AGREEING_CALLS = 0.75
#: Ends closer than this (ns) are together: below it, it is the links' own noise.
NOISE_NS = 10_000
#: Clocks that lie apart by less than this (ns) agree.
TOGETHER_NS = 100_000
#: Calls compared, evenly spread, and ranks up to which every pair of ranks is.
MOST_COMPARED = 64
MOST_PAIRED = 256


@dataclass(frozen=True, slots=True)
class Inferred:
    """Groups found: ranks → one line a rank, its calls in the same order on all. ``calls`` counts rows
    of all ranks, ``matched`` those that lie in a group. ``split`` is whether any two groups share no rank:
    else nothing shows that there is more than one."""

    groups: dict[tuple[int, ...], list[Line]]
    calls: int
    matched: int
    split: bool


@dataclass(frozen=True, slots=True)
class _Unit:
    """Calls that may be one call site's: positions in each rank's line, of shape (steps, calls in a step, ranks)."""

    columns: Array  # of the lines, shape (ranks,)
    places: Array


def infer_groups(
    lines: Sequence[Line], collective: Array, listed: Iterable[tuple[int, ...]], *, one_clock: bool
) -> Inferred | None:
    """Groups among lines that name none; ``None`` where nothing repeats.

    Args:
        lines: one a rank, in order.
        collective: by operation code, whether all ranks of its group must enter and so leave together.
        listed: memberships that the source knows, without saying which call is whose.
        one_clock: whether all ranks certainly share a clock. Otherwise a call that all ranks make may set them.
    """
    units = _units(lines, collective)
    if not units:
        return None
    ends = [line.column("end_ns") for line in lines]
    starts = [line.column("start_ns") for line in lines]
    ranks = np.array([line.rank for line in lines])
    known = [set(group) for group in listed]
    found = [_found(units, starts, ends, ranks, known)]
    if not one_clock and (shift := _shifts(units, ends)) is not None:
        moved = [[column + by for column, by in zip(times, shift, strict=True)] for times in (starts, ends)]
        found.append(_found(units, moved[0], moved[1], ranks, known))
    return _joined(max(found, key=_explained), lines)


#: A group's columns and the places of its calls, shape (calls, ranks of the group).
_Block = tuple[Array, Array]


def _explained(blocks: Sequence[_Block]) -> tuple[int, int]:
    """Calls in groups, and in large ones: of two settings of the clocks the better is the one with more."""
    return sum(places.size for _, places in blocks), sum(
        places.size * places.shape[1] for _, places in blocks
    )


def _units(lines: Sequence[Line], collective: Array) -> list[_Unit]:
    """Calls of one kind that the same ranks make equally often in each step, or in all."""
    kinds = [kinds_of(line) for line in lines]
    steps = [line.column("step") for line in lines]
    if any((step == MISSING).any() or (np.diff(step) < 0).any() for step in steps):
        steps = [np.zeros(len(step), dtype=np.int64) for step in steps]
    common = steps[0]
    for step in steps[1:]:
        common = np.intersect1d(common, step)
    usable = [
        collective[line.operation]
        & np.isin(step, common)
        & (line.column("start_ns") != MISSING)
        & (line.column("end_ns") != MISSING)
        for line, step in zip(lines, steps, strict=True)
    ]
    common = np.unique(common)
    units = []
    for kind in np.unique(np.concatenate([each[mask] for each, mask in zip(kinds, usable, strict=True)])):
        places = [np.flatnonzero(mask & (each == kind)) for each, mask in zip(kinds, usable, strict=True)]
        counts = np.stack(
            [
                np.bincount(np.searchsorted(common, step[at]), minlength=len(common))
                for step, at in zip(steps, places, strict=True)
            ],
            axis=1,
        )
        usual = np.median(counts, axis=0).astype(np.int64)
        whole = (counts == usual).all(axis=1)
        for count in np.unique(usual[usual > 0]):
            columns = np.flatnonzero(usual == count)
            kept = [
                places[column][whole[np.searchsorted(common, steps[column][places[column]])]]
                for column in columns
            ]
            if len(columns) > 1 and whole.sum() * count >= FEWEST_CALLS:
                shape = (int(whole.sum()), int(count), len(columns))
                units.append(_Unit(columns, np.stack(kept, axis=1).reshape(shape)))
    return units


def _times(columns: Sequence[Array], unit_columns: Array, places: Array) -> Array:
    """Times at places, shape as ``places``: (…, ranks)."""
    return np.stack(
        [columns[column][places[..., i]] for i, column in enumerate(unit_columns.tolist())], axis=-1
    )


# --- clocks ------------------------------------------------------------------------------------


def _shifts(units: Sequence[_Unit], ends: Sequence[Array]) -> list[Array] | None:
    """What to add to each rank's times, by the call site of all ranks whose ends scatter least; ``None``
    where there is none, or where it says that the clocks agree already."""
    best: tuple[float, Array, Array] | None = None
    for unit in units:
        if len(unit.columns) < len(ends):
            continue
        end = _times(ends, unit.columns, unit.places)
        sites = [end[:, i] for i in range(end.shape[1])] if end.shape[0] >= FEWEST_CALLS else []
        for site in [*sites, end.reshape(-1, end.shape[-1])]:
            apart = site[:, :1] - site
            scatter = float(np.max(np.median(np.abs(apart - np.median(apart, axis=0)), axis=0)))
            if best is None or scatter < best[0]:
                best = scatter, site, apart
    if best is None or np.abs(np.median(best[2], axis=0)).max() <= max(TOGETHER_NS, 3 * best[0]):
        return None
    trends = [trend_of(best[1][:, i], best[2][:, i])[0] for i in range(len(ends))]
    return [trend.at(end) for trend, end in zip(trends, ends, strict=True)]


# --- partitions --------------------------------------------------------------------------------


def _found(
    units: Sequence[_Unit],
    starts: Sequence[Array],
    ends: Sequence[Array],
    ranks: Array,
    known: Sequence[set[int]],
) -> list[_Block]:
    """Groups of every unit: one partition for a kind of call, unless a place in the step tells another."""
    blocks: list[_Block] = []
    for unit in units:
        start, end = (_times(columns, unit.columns, unit.places) for columns in (starts, ends))
        flat = start.reshape(-1, start.shape[-1]), end.reshape(-1, end.shape[-1])
        listed = _listed_partition(ranks[unit.columns], known)
        usual = _choose(*flat, listed, None)
        for site in range(unit.places.shape[1]):
            chosen = usual
            if unit.places.shape[1] > 1 and unit.places.shape[0] >= FEWEST_CALLS:
                chosen = _choose(start[:, site], end[:, site], listed, usual)
            if chosen is None:
                continue
            for block in range(int(chosen.max()) + 1):
                of = np.flatnonzero(chosen == block)
                if len(of) > 1 and _overlap(start[:, site][:, of], end[:, site][:, of]) >= OVERLAPPING:
                    blocks.append((unit.columns[of], unit.places[:, site][:, of]))
    return blocks


def _overlap(start: Array, end: Array) -> float:
    return float((start.max(axis=1) <= end.min(axis=1)).mean())


def _choose(start: Array, end: Array, listed: Sequence[Array], usual: Array | None) -> Array | None:
    """The partition of ranks, as a label for each, whose groups made these calls of shape (calls, ranks);
    ``None`` where none fits, or two about equally well. ``usual`` is kept unless another is clearly better."""
    if len(end) > MOST_COMPARED:
        some = np.linspace(0, len(end) - 1, MOST_COMPARED).astype(np.int64)
        start, end = start[some], end[some]
    candidates = [np.zeros(end.shape[1], dtype=np.int64), *listed, *_regular(end.shape[1]), *_near(end)]
    believed = {_numbered(labels).tobytes() for labels in listed}
    unique = {labels.tobytes(): labels for labels in map(_numbered, candidates)}
    fitting = {}
    for name, labels in unique.items():
        overlap, spread = _measured(start, end, labels)
        if overlap >= OVERLAPPING:
            fitting[name] = spread
    if not fitting:
        return None
    best = usual.tobytes() if usual is not None else ""
    if best not in fitting:
        best = min(fitting, key=lambda name: (unique[name].max(), fitting[name].mean()))
    for name in sorted(fitting, key=lambda name: (unique[name].max(), fitting[name].mean())):
        if _closer(fitting[best], fitting[name], sure=name in believed):
            best = name
    rivals = [name for name in fitting if name != best and unique[name].max() == unique[best].max()]
    clear = usual is not None and best == usual.tobytes()
    if not clear and not all(_closer(fitting[name], fitting[best], sure=True) for name in rivals):
        return None
    return unique[best]


def _closer(before: Array, after: Array, *, sure: bool) -> bool:
    """Whether logarithms of variances, one a call, fell by more than chance lets them."""
    calls = len(after)
    needed = np.log(CLOSER) * max(1.0, MANY_CALLS / calls) * (0.5 if sure else 1.0)
    gained = before - after
    return bool(gained.mean() >= needed and (gained > 0).mean() >= AGREEING_CALLS)


def _measured(start: Array, end: Array, labels: Array) -> tuple[float, Array]:
    """Share of groups' calls that overlap, by ranks, and the logarithm of the variance of ends in groups, one a call."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    first = np.cumsum(counts) - counts
    ends = end[:, order]
    meet = np.maximum.reduceat(start[:, order], first, axis=1) <= np.minimum.reduceat(ends, first, axis=1)
    overlap = float((meet * counts).sum() / meet.shape[0] / len(labels))
    near = (ends - ends[:, :1]).astype(np.float64)
    mean = np.add.reduceat(near, first, axis=1) / counts
    rest = near - np.repeat(mean, counts, axis=1)
    variance = (rest**2).sum(axis=1) / (len(labels) - len(counts))
    return overlap, np.asarray(np.log(variance + NOISE_NS**2))


def _numbered(labels: Array) -> Array:
    """Labels counted from 0 in the order in which they occur, so that equal partitions are equal arrays."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[inverse], dtype=np.int64)


def _regular(count: int) -> Iterable[Array]:
    """Neighbours, and every n-th rank: how parallel layouts number their groups."""
    place = np.arange(count)
    for size in range(2, count // 2 + 1):
        if count % size == 0:
            yield place // size
            yield place % (count // size)


def _listed_partition(ranks: Array, known: Sequence[set[int]]) -> list[Array]:
    """Partitions of these ranks into listed groups of one size."""
    inside = sorted({tuple(sorted(group.intersection(ranks.tolist()))) for group in known})
    inside = [group for group in inside if len(group) > 1]
    used: set[tuple[int, ...]] = set()
    found = []
    for seed in inside:
        if seed in used:
            continue
        members, taken = [seed], set(seed)
        for group in inside:
            if len(group) == len(seed) and taken.isdisjoint(group):
                members.append(group)
                taken.update(group)
        used.update(members)
        if len(taken) == len(ranks):
            label = {rank: number for number, group in enumerate(members) for rank in group}
            found.append(np.array([label[rank] for rank in ranks.tolist()]))
    return found


def _near(end: Array) -> Iterable[Array]:
    """Partitions that the distances of ends suggest: ranks joined nearest first, and equal groups of nearest."""
    count = end.shape[1]
    if count > MOST_PAIRED:
        return
    distance = np.stack([np.median(np.abs(end - end[:, i : i + 1]), axis=0) for i in range(count)])
    labels = np.arange(count)
    one, other = np.triu_indices(count, 1)
    for edge in np.argsort(distance[one, other], kind="stable").tolist():
        left, right = labels[one[edge]], labels[other[edge]]
        if left != right:
            labels = np.where(labels == right, left, labels)
            if labels.any() and np.bincount(labels)[np.unique(labels)].min() > 1:
                yield labels
            if (labels == labels[0]).all():
                break
    for size in range(2, count // 2 + 1):
        if count % size == 0:
            labels = np.full(count, -1)
            for number in range(count // size):
                free = np.flatnonzero(labels < 0)
                labels[free[np.argsort(distance[free[0], free], kind="stable")[:size]]] = number
            yield labels


# --- lines of the groups -----------------------------------------------------------------------


def _joined(blocks: Sequence[_Block], lines: Sequence[Line]) -> Inferred | None:
    if not blocks:
        return None
    places: dict[tuple[int, ...], list[Array]] = {}
    for columns, at in blocks:
        places.setdefault(tuple(columns.tolist()), []).append(at)
    groups = {}
    for held, parts in sorted(places.items()):
        at = np.concatenate(parts)
        at = at[np.argsort(at[:, 0], kind="stable")]
        groups[tuple(lines[column].rank for column in held)] = [
            lines[column].taking(at[:, i]) for i, column in enumerate(held)
        ]
    return Inferred(
        groups,
        calls=sum(len(line.rows) for line in lines),
        matched=sum(at.size for _, at in blocks),
        split=any(set(one).isdisjoint(other) for one, other in combinations(groups, 2)),
    )
