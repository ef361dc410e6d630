"""The model: what every reader produces and every analysis consumes.

A :class:`Rank` is a handful of columnar :class:`Table` objects (numpy columns, strings interned in
one :class:`Strings` pool a rank). A table that a source cannot fill is ``None``, not empty, so an
analysis can tell "nothing happened" from "nobody looked". A :class:`Job` is the ranks of one run,
read one at a time so that a job of any size fits in memory.

Units: times are integer nanoseconds (Unix time where the source is anchored), sizes are bytes.
Missing integers are :data:`MISSING`, missing strings code ``-1`` (``None`` as text), missing
floats NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .schemas import DEVICE_KINDS, HOST_KINDS, PHASES, SCHEMAS

if TYPE_CHECKING:
    import pandas

__all__ = [
    "DEVICE_KINDS",
    "HOST_KINDS",
    "MISSING",
    "PHASES",
    "SCHEMAS",
    "DeviceInfo",
    "Group",
    "Job",
    "Quality",
    "Rank",
    "RankSource",
    "Strings",
    "Table",
]

Array = npt.NDArray[Any]

#: A missing integer. NaN does not exist for integers, and 0 and -1 are real values.
MISSING = int(np.iinfo(np.int64).min)

_DTYPES: Mapping[str, type] = {
    "int64": np.int64,
    "float64": np.float64,
    "kind": np.uint8,
    "text": np.int32,
}
_DEFAULTS: Mapping[str, float | int] = {
    "int64": MISSING,
    "float64": float("nan"),
    "kind": 0,
    "text": -1,
}
#: Row references are -1, not MISSING, where there is none.
_ROW_REFERENCES = frozenset({"launch", "parent", "device_row", "host_row"})


class Strings:
    """An append-only pool of strings; a text column stores positions in it, -1 for ``None``."""

    __slots__ = ("_codes", "_values")

    def __init__(self, values: tuple[str, ...] | list[str] = ()) -> None:
        self._values: list[str] = list(values)
        self._codes: dict[str, int] = {value: code for code, value in enumerate(self._values)}

    def __len__(self) -> int:
        return len(self._values)

    def code(self, value: str | None) -> int:
        """Code of ``value``, added when new; -1 for ``None``."""
        if value is None:
            return -1
        code = self._codes.get(value)
        if code is None:
            code = self._codes[value] = len(self._values)
            self._values.append(value)
        return code

    def find(self, value: str) -> int:
        """Code of ``value``, or -2 (matches no row) when it is not in the pool."""
        return self._codes.get(value, -2)

    def text(self, code: int) -> str | None:
        """The string of ``code``; ``None`` for -1."""
        return None if code < 0 else self._values[code]

    @property
    def values(self) -> list[str]:
        """All strings, by code. Do not change it."""
        return self._values

    def __getstate__(self) -> list[str]:
        return self._values

    def __setstate__(self, values: list[str]) -> None:
        self.__init__(values)  # type: ignore[misc]


class Table:
    """Columns of equal length. Columns left out are filled with the missing value."""

    __slots__ = ("columns", "name", "strings")

    def __init__(self, name: str, columns: Mapping[str, Any], strings: Strings) -> None:
        """Raises ``UsageError`` on a column the schema lacks or on unequal lengths."""
        schema = SCHEMAS[name]
        unknown = set(columns) - set(schema)
        if unknown:
            raise UsageError(f"table {name!r} has no column {min(unknown)!r}")
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            raise UsageError(f"columns of table {name!r} differ in length: {sorted(lengths)}")
        length = lengths.pop() if lengths else 0
        self.name = name
        self.strings = strings
        self.columns: dict[str, Array] = {}
        for column, kind in schema.items():
            given = columns.get(column)
            if given is None:
                default = -1 if column in _ROW_REFERENCES else _DEFAULTS[kind]
                self.columns[column] = np.full(length, default, dtype=_DTYPES[kind])
            else:
                self.columns[column] = np.asarray(given, dtype=_DTYPES[kind])

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def text(self, column: str) -> Array:
        """A text column as an object array of ``str | None``."""
        values = np.array([*self.strings.values, None], dtype=object)
        return np.asarray(values[self.columns[column]])

    def __repr__(self) -> str:
        return f"Table {self.name!r}: {len(self):,} row{'' if len(self) == 1 else 's'} of {', '.join(self.columns)}"

    def select(self, rows: Array | slice) -> Table:
        """The rows of a boolean mask, an index array or a slice. Row references are kept as they are."""
        picked = object.__new__(Table)
        picked.name, picked.strings = self.name, self.strings
        picked.columns = {name: column[rows] for name, column in self.columns.items()}
        return picked

    def compact(self) -> Table:
        """A copy with a string pool of its own that holds only what it uses: small when pickled."""
        strings = Strings()
        columns = dict(self.columns)
        for name, kind in SCHEMAS[self.name].items():
            if kind == "text":
                used, inverse = np.unique(self.columns[name], return_inverse=True)
                codes = [strings.code(self.strings.text(int(code))) for code in used]
                columns[name] = np.array(codes, dtype=np.int32)[inverse].reshape(len(self))
        return Table(self.name, columns, strings)

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame with text columns as strings; missing integers stay :data:`MISSING`."""
        import pandas

        schema = SCHEMAS[self.name]
        return pandas.DataFrame(
            {
                name: self.text(name) if schema[name] == "text" else column
                for name, column in self.columns.items()
            }
        )


@dataclass(frozen=True, slots=True)
class Quality:
    """Something a reader or an analysis must say about its data.

    ``severity``: ``info`` (said, changes nothing), ``warning`` (a number is less sure or missing),
    ``error`` (a part of the input could not be used).
    """

    id: str
    severity: Literal["info", "warning", "error"]
    message: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: ``id`` is how collectives name it; ``ranks`` are global ranks."""

    id: str
    name: str | None
    description: str | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device as its source names it. ``multiprocessors`` counts streaming multiprocessors or compute units."""

    index: int
    name: str
    memory_bytes: int | None = None
    multiprocessors: int | None = None


@dataclass(slots=True, repr=False)
class Rank:
    """What one rank recorded.

    ``format`` names the reader of its main source (``kineto``, ``trine``, ``nsight``, ...). For a native record,
    ``windows`` are its deep windows, each a :class:`Rank` read by the Kineto reader (device and host tables live
    there); ``attempts`` are the run's earlier starts, oldest first, with steps and regions only (on the lowest rank
    alone); ``metadata`` is the record's own description (model, precision, FLOPs by convention, versions, ...).
    """

    rank: int
    source: str
    format: str
    strings: Strings
    steps: Table | None = None
    device: Table | None = None
    host: Table | None = None
    collectives: Table | None = None
    memory: Table | None = None
    microbatches: Table | None = None
    edges: Table | None = None
    samples: Table | None = None
    regions: Table | None = None
    segments: Table | None = None
    synchronizations: Table | None = None
    flight_recorder: Table | None = None
    groups: tuple[Group, ...] = ()
    devices: tuple[DeviceInfo, ...] = ()
    world_size: int | None = None
    host_name: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    windows: tuple[Rank, ...] = ()
    attempts: tuple[Rank, ...] = ()
    quality: list[Quality] = field(default_factory=list)

    def __repr__(self) -> str:
        found = [getattr(self, name) for name in SCHEMAS]
        tables = [
            f"{table.name} ({len(table):,} row{'' if len(table) == 1 else 's'})"
            for table in found
            if table is not None
        ]
        windows = len(self.windows)
        tables += [f"{windows} deep window{'' if windows == 1 else 's'}"] if windows else []
        return f"Rank {self.rank} of {self.source} ({self.format}): {', '.join(tables) or 'no tables'}"

    def note(self, id: str, severity: Literal["info", "warning", "error"], message: str) -> None:
        """Add a data-quality note of this rank."""
        self.quality.append(Quality(id, severity, message, self.rank))


@dataclass(frozen=True, slots=True)
class RankSource:
    """Where a rank lies and how to read it. Picklable, so a pool can read it in another process."""

    rank: int
    path: Path
    read: Callable[[RankSource], Rank]
    member: str | None = None  # name inside an archive
    label: str | None = None  # what to call it where the path is none that the user knows

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return self.label or (f"{self.path}:{self.member}" if self.member else str(self.path))


@dataclass(slots=True, repr=False)
class Job:
    """The ranks of one run, each read when asked for.

    ``format`` is the main source's, ``formats`` all that were found, the main one first. ``name`` is what
    the user called it where ``path`` is none (a URL). ``keep`` holds what must live as long as the job, such
    as a folder of fetched files.
    """

    path: Path
    format: str
    sources: tuple[RankSource, ...]
    world_size: int | None
    metadata: dict[str, Any] = field(default_factory=dict)
    quality: list[Quality] = field(default_factory=list)
    formats: tuple[str, ...] = ()
    name: str | None = None
    keep: object = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        count = len(self.sources)
        ranks = f"{count} rank{'' if count == 1 else 's'}"
        if self.world_size is not None and self.world_size != count:
            ranks += f" of {self.world_size}"
        said = len(self.quality)
        notes = f", {said} note{'' if said == 1 else 's'} on the data" if said else ""
        return f"Job {self.name or self.path} ({', '.join(self.formats) or self.format}): {ranks}{notes}"

    @property
    def rank_ids(self) -> tuple[int, ...]:
        """Ranks that are present, ascending."""
        return tuple(source.rank for source in self.sources)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the world that have no file; empty when the world size is unknown."""
        present = set(self.rank_ids)
        return tuple(rank for rank in range(self.world_size or 0) if rank not in present)

    def rank(self, rank: int) -> Rank:
        """Read one rank. Raises ``UsageError`` when it is absent, ``UnreadableInput`` when unreadable."""
        for source in self.sources:
            if source.rank == rank:
                return source.read(source)
        raise UsageError(f"{self.path} has no rank {rank}; present: {list(self.rank_ids)}")

    def __iter__(self) -> Iterator[Rank]:
        for source in self.sources:
            yield source.read(source)

    def only(self, ranks: tuple[int, ...]) -> Job:
        """The same job with those ranks alone."""
        return replace(self, sources=tuple(s for s in self.sources if s.rank in ranks))
