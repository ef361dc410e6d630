"""What the path is made of, by name, and what each would gain if it took no time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import DEVICE_KINDS, HOST_KINDS, Rank

from ._path_graph import NEVER, Graph
from ._path_host import Timeline
from ._path_pieces import Path
from ._path_replay import Plan, Scenario, replay
from ._path_terms import SYNCHRONIZATION

__all__ = ["Entry", "Vanished", "entries_of", "host_bounds", "where_of"]

Array = npt.NDArray[Any]

_OPERATOR, _RUNTIME, _ANNOTATION, _PYTHON, _LOADER, _SYNC, _COLLECTOR = range(len(HOST_KINDS))
_COMMUNICATION = DEVICE_KINDS.index("communication")
#: Names whose disappearance is replayed: those that hold most of the path, of each view.
MOST_ENTRIES = 8
MOST_HOST_ENTRIES = 14
MOST_BLOCKING = 5
#: Frames that are not the user's own.
_FOREIGN_FRAME = re.compile(
    r"site-packages/|dist-packages/|^<built-in|^torch/|/torch/|^nn\.Module|^<frozen|lib/python\d"
)
#: Characters of a place in a program.
MOST_WORDS = 160
#: Shares of the path below this are not worth a replay.
LEAST_SHARE = 0.002


@dataclass(frozen=True, slots=True)
class Entry:
    """One name on the path. Views overlap: a kernel's time counts for the ``kernel`` and for the ``operator``
    that launched it. ``total_ns`` is all its time in the window, ``gain_ns`` how much shorter the window
    would be had it taken none (of ``blocking`` calls: had they not waited). ``where`` is the frame or
    annotation around a blocking call."""

    kind: str
    name: str
    count: int
    on_path_ns: int
    total_ns: int
    gain_ns: int | None
    where: str | None = None


def _at(values: Array, rows: Array) -> Array:
    """Values of rows, -1 where there is no row."""
    if not len(values):
        return np.full(len(rows), -1)
    return np.where(rows >= 0, values[np.maximum(rows, 0)], -1)


class Vanished:
    """Scenarios in which something of a graph takes no time."""

    def __init__(self, plan: Plan, base: Scenario, timeline: Timeline) -> None:
        self.plan, self.base, self.timeline = plan, base, timeline
        graph = plan.graph
        self.graph = graph
        self.work_owner = _at(graph.owner, graph.launch_row)
        self.wait_owner = _at(graph.owner, graph.waits.row)
        self.length = timeline.lengths()
        returns = np.maximum.accumulate(graph.waits.end) if len(graph.waits) else graph.waits.end
        self.epoch_begin = np.append(graph.begin_ns, returns)
        self.duration = graph.end - graph.start
        # Moments of the host by number, and of each stretch the first moment that is not before its begin.
        moments = (self.epoch_begin, graph.launch, graph.waits.start)
        self._points = np.unique(np.concatenate(moments))
        self._at_epoch, self._at_launch, self._at_wait = (
            np.searchsorted(self._points, m) + 1 for m in moments
        )
        stretch = np.searchsorted(timeline.start_ns, self._points)
        self._until = np.cumsum(np.bincount(stretch, minlength=len(timeline.start_ns) + 1))[:-1]

    def work(self, mask: Array) -> Scenario:
        """Without the time of some work; its launches and the gaps around it stay."""
        return replace(self.base, weight=np.where(mask, self.base.weight - self.duration, self.base.weight))

    def blocking(self, mask: Array) -> Scenario:
        """With some blocking calls that wait for nothing."""
        return replace(self.base, held=self.base.held & ~mask)

    def host(self, stretches: Array, work: Array, waits: Array) -> Scenario:
        """Without some stretches of the host's timeline, some work and some waits."""
        gone = np.bincount(
            self._until[stretches], weights=self.length[stretches], minlength=len(self._points) + 1
        )
        gone = np.append(0, np.cumsum(gone.astype(np.int64)))
        plan = self.plan
        at_begin = gone[self._at_epoch]
        scenario = self.blocking(waits)
        scenario = replace(scenario, cost=np.where(waits, 0, scenario.cost))
        ready, weight = scenario.ready, scenario.weight
        known = ready > NEVER // 2
        ready = np.where(known, ready - (gone[self._at_launch] - at_begin[plan.epoch]), ready)
        call = scenario.call - (gone[self._at_wait] - at_begin[plan.wait_epoch])
        tail = scenario.tail - int(gone[-1] - at_begin[-1])
        weight = np.where(work, weight - self.duration, weight)
        return replace(scenario, ready=ready, weight=weight, call=call, tail=tail)


def host_bounds(vanished: Vanished) -> list[Scenario]:
    """No host time between launches; no blocking call waits; no communication takes time."""
    graph = vanished.graph
    nothing, no_wait = np.zeros(len(graph), dtype=bool), np.zeros(len(graph.waits), dtype=bool)
    everything = np.arange(len(vanished.timeline.start_ns))
    return [
        vanished.host(everything, nothing, no_wait),
        vanished.blocking(blocked_in(graph)),
        vanished.work(graph.kind == _COMMUNICATION),
    ]


def blocked_in(graph: Graph) -> Array:
    """Which calls had to wait for work that is on record. After the last launch of the window a wait holds
    nothing up in it."""
    waits = graph.waits
    ended = graph.end[np.maximum(waits.work, 0)] if len(graph) else waits.end
    last = int(graph.launch.max()) if len(graph) else NEVER
    return np.asarray((waits.row >= 0) & (waits.work >= 0) & (ended > waits.start) & (waits.end <= last))


@dataclass(slots=True)
class _Draft:
    kind: str
    name: str
    count: int
    on_path: int
    total: int
    scenario: Scenario | None = None
    where: str | None = None


def entries_of(
    rank: Rank, vanished: Vanished, path: Path, extra: Sequence[Scenario]
) -> tuple[tuple[Entry, ...], Array]:
    """Entries of the path, the longest on it first within each view, and the lengths of ``extra`` scenarios."""
    graph = vanished.graph
    drafts = [
        *_of_work(vanished, path, rank),
        *_of_host(vanished, path),
        *_of_blocking(vanished, path),
    ]
    scenarios = [*extra, *(draft.scenario for draft in drafts if draft.scenario is not None)]
    lengths = replay(vanished.plan, scenarios)
    whole = graph.end_ns - graph.begin_ns
    gains = iter((whole - lengths[len(extra) :]).tolist())
    entries = []
    for draft in drafts:
        gain = None if draft.scenario is None else max(int(next(gains)), 0)
        entries.append(
            Entry(draft.kind, draft.name, draft.count, draft.on_path, draft.total, gain, draft.where)
        )
    return tuple(entries), lengths[: len(extra)]


def _largest(keys: Array, length: Array, least: float, most: int) -> list[tuple[int, int]]:
    """(key, sum) of the keys with most length; keys are small integers."""
    if not len(keys):
        return []
    lowest = int(keys.min())
    return _most(np.bincount(keys - lowest, weights=length), least, most, lowest)


def _most(sums: Array, least: float, most: int, lowest: int) -> list[tuple[int, int]]:
    """(key, sum) of the largest sums; the first is that of key ``lowest``."""
    order = np.argsort(-sums, kind="stable")[:most].tolist()
    return [(place + lowest, int(sums[place])) for place in order if sums[place] > 0 and sums[place] >= least]


class _Grouped:
    """Positions by value; values from -1 on."""

    def __init__(self, values: Array) -> None:
        # Sixteen bits are sorted by radix, in a tenth of the time.
        narrow = (values + 1).astype(np.uint16) if len(values) and values.max() < 65_535 else values + 1
        self._order = np.argsort(narrow, kind="stable")
        self._sorted = narrow[self._order]

    def of(self, value: int) -> Array:
        """Positions of a value, ascending."""
        low, high = np.searchsorted(self._sorted, np.array([value + 1, value + 2], dtype=self._sorted.dtype))
        return self._order[low:high]


def _of_work(vanished: Vanished, path: Path, rank: Rank) -> list[_Draft]:
    """Kernels, copies and collectives by name."""
    graph = vanished.graph
    least = LEAST_SHARE * (graph.end_ns - graph.begin_ns)
    on = path.work >= 0
    rows, length = path.work[on], path.lengths()[on]
    names, texts = _work_names(graph, rank)
    drafts = []
    for key, on_path in _largest(names[rows], length, least, MOST_ENTRIES):
        mask = names == key
        kind = int(graph.kind[mask][0])
        label = ("kernel", "collective", "copy")[kind]
        total = int(vanished.duration[mask].sum())
        drafts.append(_Draft(label, texts[key], int(mask.sum()), on_path, total, vanished.work(mask)))
    return drafts


def _work_names(graph: Graph, rank: Rank) -> tuple[Array, dict[int, str]]:
    """A key a name: kernels by their own, collectives by operation and group."""
    names = graph.name.astype(np.int64)
    values = graph.table.strings.values
    texts = {-1: "unnamed", **dict(enumerate(values))}
    table = rank.collectives
    if table is None or not graph.on_device:
        return names, texts
    rows = np.flatnonzero(table["device_row"] >= 0)
    order = np.argsort(graph.source, kind="stable")
    place = np.searchsorted(graph.source[order], table["device_row"][rows])
    place = np.minimum(place, max(len(order) - 1, 0))
    hit = graph.source[order[place]] == table["device_row"][rows] if len(order) else np.zeros(0, bool)
    work, rows = order[place[hit]], rows[hit]
    said = {group.id: group.description or group.name for group in rank.groups}
    keys: dict[str, int] = {}
    for one, operation, group in zip(
        work, table.text("operation")[rows], table.text("group")[rows], strict=True
    ):
        if operation is None:
            continue
        group = said.get(group) or group
        label = operation if group in (None, "") else f"{operation} in {group}"
        key = keys.setdefault(label, len(values) + len(keys))
        names[one], texts[key] = key, label
    return names, texts


def _of_host(vanished: Vanished, path: Path) -> list[_Draft]:
    """Operators (their own host time and the work they launched), and Python by frame or annotation."""
    graph, timeline = vanished.graph, vanished.timeline
    host = graph.host
    if host is None:
        return []
    least = LEAST_SHARE * (graph.end_ns - graph.begin_ns)
    stretch_name = _names(host, timeline.owner)
    # A bare call, in no operator, did not ask for the work: it counts for its own time alone.
    worker = np.where(_is_call(host, vanished.work_owner), -2, vanished.work_owner)
    work_name = np.where(worker == -2, -2, _names(host, worker))
    wait_name = _names(host, vanished.wait_owner)
    # Work counts for the operator that launched it, the return of a blocking call for the one that made it.
    owner = np.where(path.work >= 0, _at(worker, path.work), _at(graph.owner, path.row))
    keys = np.where(owner == -2, -2, _names(host, owner))
    counted = keys >= 0
    width = len(host.strings) + 1
    sums = np.bincount(stretch_name + 1, weights=path.host_time(timeline), minlength=width)
    sums += np.bincount(keys[counted] + 1, weights=path.lengths()[counted], minlength=width)
    drafts = []
    lengths = vanished.length
    inside = (host["start_ns"] < graph.host_end_ns) & (host["end_ns"] > graph.begin_ns) & (host["name"] >= 0)
    calls = np.bincount(host["name"][inside], minlength=len(host.strings))
    by_name = _Grouped(stretch_name)
    for key, on_path in _most(sums, least, MOST_HOST_ENTRIES, -1):
        stretches = by_name.of(key)
        work = work_name == key if key >= 0 else np.zeros(len(graph), dtype=bool)
        waits = wait_name == key if key >= 0 else np.zeros(len(graph.waits), dtype=bool)
        if key >= 0 and not len(stretches) and not work.any():
            continue
        total = int(lengths[stretches].sum()) + int(vanished.duration[work].sum())
        kind, name = _kind_and_name(host, timeline.owner[stretches], vanished.work_owner[work], key)
        # Of time outside every span there is no count.
        count = int(calls[key]) if key >= 0 else 0
        drafts.append(_Draft(kind, name, count, on_path, total, vanished.host(stretches, work, waits)))
    return drafts


def _is_call(host: Any, rows: Array) -> Array:
    """Which rows are runtime calls themselves, and not an operator or a frame around them."""
    kind = host["kind"][np.maximum(rows, 0)] if len(rows) else np.empty(0, dtype=np.uint8)
    return (rows >= 0) & np.isin(kind, (_RUNTIME, _SYNC))


def _names(host: Any, rows: Array) -> Array:
    if not len(rows):
        return np.asarray(rows, dtype=np.int64)
    return np.where(rows >= 0, host["name"][np.maximum(rows, 0)], -1).astype(np.int64)


def _kind_and_name(host: Any, rows: Array, others: Array, key: int) -> tuple[str, str]:
    if key < 0:
        return "python", "(outside every recorded span)"
    row = int(rows[0]) if len(rows) else int(others[0])
    kind = HOST_KINDS[int(host["kind"][row])]
    return ("operator" if kind == "sync" else kind), host.strings.text(key) or "unnamed"


def _of_blocking(vanished: Vanished, path: Path) -> list[_Draft]:
    """Blocking calls that had to wait, by operator and call."""
    graph = vanished.graph
    host, waits = graph.host, graph.waits
    if host is None or not len(waits):
        return []
    blocked = blocked_in(graph)
    if not blocked.any():
        return []
    call = _names(host, waits.row)
    owner = _names(host, vanished.wait_owner)
    pairs, keys = np.unique((owner + 1) * (1 << 32) + call, return_inverse=True)
    keys = np.where(blocked, keys.reshape(-1), -1)
    drafts = []
    length = waits.end - waits.start
    for key, total in _largest(keys[blocked], length[blocked], 0.0, MOST_BLOCKING):
        mask = keys == key
        row = int(waits.row[mask][int(length[mask].argmax())])
        pair = int(pairs[key])
        name, called = host.strings.text(pair // (1 << 32) - 1), host.strings.text(pair % (1 << 32)) or ""
        label = called if name in (None, called) else f"{name} ({called})"
        on_path = int(
            path.lengths()[(path.category == SYNCHRONIZATION) & np.isin(path.row, waits.row[mask])].sum()
        )
        drafts.append(
            _Draft(
                "blocking",
                label,
                int(mask.sum()),
                on_path,
                total,
                vanished.blocking(mask),
                where_of(host, row),
            )
        )
    return drafts


def where_of(host: Any, row: int) -> str | None:
    """Where in the user's program a span lies: the nearest frame that is not torch's own, from a recorded
    stack or from Python spans around it, else the nearest annotation; None where nothing says."""
    parent, found = row, None
    while parent >= 0:
        stack = host.strings.text(int(host["stack"][parent]))
        if stack:
            return own_frame(stack)
        kind = int(host["kind"][parent])
        name = host.strings.text(int(host["name"][parent])) or ""
        if kind == _PYTHON and not _FOREIGN_FRAME.search(name):
            return str(name)[:MOST_WORDS]
        if kind == _ANNOTATION and found is None and not name.startswith("ProfilerStep#"):
            found = str(name)[:MOST_WORDS]
        parent = int(host["parent"][parent])
    return found


def own_frame(stack: str) -> str:
    """Of a recorded stack, innermost first, the first frame that is not a library's."""
    frames = [frame.strip() for frame in re.split(r"[;\n]", stack) if frame.strip()]
    own = (frame for frame in frames if not _FOREIGN_FRAME.search(frame))
    return next(own, frames[0] if frames else stack)[:MOST_WORDS]
