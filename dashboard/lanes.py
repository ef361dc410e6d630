"""From a rank's tables to the rows of its timeline.

Top to bottom: steps, phases, micro-batches of a pipeline, collectives (where no device row shows them), device streams, host
threads by nesting depth. Everything is relative to the rank's origin, an integer that stays exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trine.dashboard.detail import Lane, make_lane, nesting_depth, pack
from trine.record.model import DEVICE_KINDS, HOST_KINDS, MISSING, PHASES, Rank, Table

__all__ = ["DIRECTIONS", "KINDS", "RankLanes", "build"]

#: What a micro-batch does in a stage.
DIRECTIONS = ("forward", "backward", "backward_input", "backward_weight")
#: ``Lane.kind`` is an index into this; the canvas colours by it.
KINDS = (
    *(*DEVICE_KINDS, *HOST_KINDS, "step"),
    *(f"phase:{name}" for name in PHASES),
    *(f"micro-batch:{name}" for name in DIRECTIONS),
)

#: Deeper host frames are left out, and the answer says so: nobody reads the sixtieth row.
DEEPEST = 24
#: Collectives of several streams or threads overlap; more at once than this share the last row.
_MOST_COLLECTIVE_ROWS = 4

_STEP = KINDS.index("step")
_FIRST_PHASE = _STEP + 1
_FIRST_DIRECTION = _FIRST_PHASE + len(PHASES)
#: Micro-batches of several chunks or streams overlap; more at once than this share the last row.
_MOST_MICROBATCH_ROWS = 4


@dataclass(frozen=True, slots=True)
class RankLanes:
    """The timeline of one rank. ``begin`` and ``end`` are its extent in ns from ``origin_ns``."""

    rank: int
    origin_ns: int
    host_name: str | None
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    notes: tuple[str, ...]
    begin: float
    end: float

    @property
    def spans(self) -> int:
        """How many rectangles all lanes hold."""
        return sum(len(lane) for lane in self.lanes)

    @property
    def size_bytes(self) -> int:
        """Memory of the columns, for the cache."""
        return sum(lane.start.nbytes * 3 + lane.kind.nbytes + lane.name.nbytes for lane in self.lanes)


class _Names:
    """One pool over the string pools of a rank and its windows."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, name: str) -> int:
        code = self._codes.setdefault(name, len(self.values))
        if code == len(self.values):
            self.values.append(name)
        return code

    def column(self, table: Table, column: str, otherwise: str) -> npt.NDArray[np.uint32]:
        """Codes of a text column in this pool."""
        used, inverse = np.unique(table[column], return_inverse=True)
        codes = [self.code(table.strings.text(int(code)) or otherwise) for code in used]
        return np.array(codes, dtype=np.uint32)[inverse.reshape(len(table))]


@dataclass(slots=True)
class _Rows:
    """Raw rows of one lane before it has an origin."""

    label: str
    group: str
    depth: int
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    kind: npt.NDArray[np.uint8]
    name: npt.NDArray[np.uint32]


def build(rank: Rank) -> RankLanes:
    """All lanes of a rank; spans without a start or an end are left out."""
    names, notes = _Names(), []
    rows = [*_steps(rank, names), *_microbatches(rank, names), *_collectives(rank, names)]
    deepest = 0
    for part in (rank, *rank.windows):
        rows += _device(part, names)
        host, depth = _host(part, names)
        rows += host
        deepest = max(deepest, depth)
    if deepest >= DEEPEST:
        notes.append(f"host frames are {deepest + 1} deep; the outer {DEEPEST} are drawn")
    rows = _joined(rows)
    if any(row.group == "phases" for row in rows):
        notes.append("phases are drawn one after the other: a record knows how long each lasted, not when")
    origin = min((int(lane.start.min()) for lane in rows), default=0)
    lanes = tuple(make_lane(r.label, r.group, r.start, r.end, r.kind, r.name, origin, r.depth) for r in rows)
    last = max((float(lane.reach[-1]) for lane in lanes), default=0.0)
    return RankLanes(rank.rank, origin, rank.host_name, tuple(names.values), lanes, tuple(notes), 0.0, last)


def _joined(rows: Iterable[_Rows]) -> list[_Rows]:
    """Lanes of the same place in several deep windows are one lane."""
    places: dict[tuple[str, str, int], list[_Rows]] = {}
    for row in rows:
        sound = (row.start != MISSING) & (row.end != MISSING) & (row.end >= row.start)
        if sound.any():
            row.start, row.end = row.start[sound], row.end[sound]
            row.kind, row.name = row.kind[sound], row.name[sound]
            places.setdefault((row.group, row.label, row.depth), []).append(row)
    joined = [
        _Rows(
            label,
            group,
            depth,
            np.concatenate([part.start for part in parts]),
            np.concatenate([part.end for part in parts]),
            np.concatenate([part.kind for part in parts]),
            np.concatenate([part.name for part in parts]),
        )
        for (group, label, depth), parts in places.items()
    ]
    groups = ("steps", "phases", "microbatches", "collectives", "device", "host")
    order = {group: at for at, group in enumerate(groups)}
    # Streams by number; threads, the busiest first, keep their order, each with its depths.
    place: dict[tuple[str, str], int] = {}
    for row in joined:
        place.setdefault((row.group, row.label), len(place))

    def key(row: _Rows) -> tuple[int, tuple[int, ...], int]:
        number = (place[(row.group, row.label)],) if row.group == "host" else _natural(row)
        return order[row.group], number, row.depth

    return sorted(joined, key=key)


def _natural(row: _Rows) -> tuple[int, ...]:
    """Streams by their numbers."""
    return tuple(int(word) for word in row.label.replace("−", "-").split() if word.lstrip("-").isdigit())


def _steps(rank: Rank, names: _Names) -> Iterator[_Rows]:
    steps = rank.steps
    if steps is None or not len(steps):
        return
    labels = np.array([names.code(f"step {index}") for index in steps["index"]], dtype=np.uint32)
    kind = np.full(len(steps), _STEP, np.uint8)
    yield _Rows("steps", "steps", 0, steps["start_ns"], steps["end_ns"], kind, labels)
    known = steps["phase_other_ns"] != MISSING
    if not known.any():
        return
    # A record knows how long each phase of a step lasted, not when: drawn one after the other.
    lengths = np.stack([steps[f"phase_{name}_ns"][known] for name in PHASES], axis=1)
    lengths = np.where(lengths == MISSING, 0, lengths)
    ends = steps["start_ns"][known][:, None] + np.cumsum(lengths, axis=1)
    present = (lengths > 0).ravel()
    codes = np.array([names.code(name.replace("_", " ")) for name in PHASES], dtype=np.uint32)
    kinds = np.arange(_FIRST_PHASE, _FIRST_PHASE + len(PHASES), dtype=np.uint8)
    yield _Rows(
        "phases",
        "phases",
        0,
        (ends - lengths).ravel()[present],
        ends.ravel()[present],
        np.tile(kinds, len(lengths))[present],
        np.tile(codes, len(lengths))[present],
    )


def _microbatches(rank: Rank, names: _Names) -> Iterator[_Rows]:
    """What each micro-batch did when in this rank's stages; ``backward 3, stage 5`` where it has several."""
    table = rank.microbatches
    if table is None:
        return
    words = [table.strings.text(int(code)) or "" for code in table["direction"].tolist()]
    known = np.array([word in DIRECTIONS for word in words], dtype=bool)
    known &= (table["start_ns"] != MISSING) & (table["end_ns"] != MISSING)
    words, table = [word for word, kept in zip(words, known, strict=True) if kept], table.select(known)
    if not len(table):
        return
    several = len(np.unique(table["stage"])) > 1
    kind = np.array([_FIRST_DIRECTION + DIRECTIONS.index(word) for word in words], dtype=np.uint8)
    code = np.array(
        [
            names.code(f"{word.replace('_', ' of the ')} {index}" + (f", stage {stage}" if several else ""))
            for word, index, stage in zip(
                words, table["index"].tolist(), table["stage"].tolist(), strict=True
            )
        ],
        dtype=np.uint32,
    )
    start, end = table["start_ns"], table["end_ns"]
    row = pack(start, end, _MOST_MICROBATCH_ROWS)
    for level in range(int(row.max()) + 1):
        here = row == level
        yield _Rows("micro-batches", "microbatches", level, start[here], end[here], kind[here], code[here])


def _collectives(rank: Rank, names: _Names) -> Iterator[_Rows]:
    table = rank.collectives
    if table is None:
        return
    table = table.select(table["device_row"] < 0)
    if not len(table):
        return
    start = np.where(table["start_ns"] == MISSING, table["issued_ns"], table["start_ns"])
    known = (start != MISSING) & (table["end_ns"] != MISSING)
    table, start = table.select(known), start[known]
    code = names.column(table, "operation", "collective")
    row = pack(start, table["end_ns"], _MOST_COLLECTIVE_ROWS)
    for level in range(int(row.max()) + 1 if len(row) else 0):
        here = row == level
        kind = np.full(int(here.sum()), KINDS.index("communication"), np.uint8)
        yield _Rows("collectives", "collectives", level, start[here], table["end_ns"][here], kind, code[here])


def _device(rank: Rank, names: _Names) -> Iterator[_Rows]:
    table = rank.device
    if table is None or not len(table):
        return
    code = names.column(table, "name", "unnamed")
    places = np.stack([table["device"], table["stream"]], axis=1)
    streams, which = np.unique(places, axis=0, return_inverse=True)
    several = len(np.unique(streams[:, 0])) > 1
    for index, (device, stream) in enumerate(streams):
        rows = which.reshape(-1) == index
        label = f"device {device} stream {stream}" if several else f"stream {stream}"
        yield _Rows(
            label.replace(str(MISSING), "?"),
            "device",
            0,
            table["start_ns"][rows],
            table["end_ns"][rows],
            table["kind"][rows],
            code[rows],
        )


def _host(rank: Rank, names: _Names) -> tuple[list[_Rows], int]:
    table = rank.host
    if table is None or not len(table):
        return [], 0
    code = names.column(table, "name", "unnamed")
    depth = nesting_depth(table["parent"])
    kind = table["kind"] + np.uint8(len(DEVICE_KINDS))
    rows = []
    for thread in _busiest_first(table, depth):
        mine = table["thread"] == thread
        label = "thread ?" if thread == MISSING else f"thread {thread}"
        for level in range(min(int(depth[mine].max()) + 1, DEEPEST)):
            here = mine & (depth == level)
            rows.append(
                _Rows(
                    label,
                    "host",
                    level,
                    table["start_ns"][here],
                    table["end_ns"][here],
                    kind[here],
                    code[here],
                )
            )
    return rows, int(depth.max())


def _busiest_first(table: Table, depth: npt.NDArray[np.int64]) -> list[int]:
    """Threads by how long their outermost spans are: the one that trains stands on top."""
    outer = depth == 0
    threads, which = np.unique(table["thread"][outer], return_inverse=True)
    lengths = (table["end_ns"] - table["start_ns"])[outer].astype(np.float64)
    busy = np.bincount(which.reshape(-1), weights=lengths, minlength=len(threads))
    return [int(threads[at]) for at in np.argsort(-busy, kind="stable")]
