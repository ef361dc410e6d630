"""Results as data frames: one function over dataclasses, so that no analysis writes a frame of its own.

Of a result, the plain fields are a row; each tuple of dataclasses in it is a table, also one in a row of another
table, which then begins with the row that it belongs to:

    CriticalPath(left_out, ranks=(RankPath(rank, length_ns, entries=(Entry(kind, …), …)), …))
      "summary"        left_out
      "ranks"          rank, length_ns, …
      "ranks.entries"  ranks_row, rank, kind, …

A dataclass in a field becomes columns (``queue.window_ns``: ``queue_window_ns``), as does a mapping in a row of a
table (``segments_ns["kernel"]``: ``segments_kernel_ns``). A unit stays at the end of a column's name. Columns stand
whether there are rows or not; what is not known is ``NA``, and no integer becomes a float for it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from trine.record.model import MISSING, Table

if TYPE_CHECKING:
    import pandas

__all__ = ["Columns", "Frames", "Tabular", "frame_of", "frame_of_rows", "frames_of", "known", "rows_of"]

#: Endings of names that are units.
_UNITS = ("_bytes_per_s", "_flops_per_s", "_ns", "_bytes", "_share", "_ratio")
#: The table of a result's own plain fields.
_SUMMARY = "summary"

Row = dict[str, Any]
#: Columns that say which row of which table it is, and what it holds.
Parent = tuple[Row, Any]
#: Field → its column's name, or names of a tuple's members, or None where it is in no table as it is.
Columns = Mapping[str, str | tuple[str, ...] | None]
Shape = Literal["value", "nested", "table", "points", "mapping", "columns"]


class Frames(dict[str, "pandas.DataFrame"]):
    """Data frames by name. Printed, it lists them with their sizes and columns."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [
            f"{name:<{width}}  {len(frame)} row{'' if len(frame) == 1 else 's'}: {_columns(list(frame.columns))}"
            for name, frame in self.items()
        ]
        return "\n".join(lines) or "no data frames"


def _columns(names: list[Any], most: int = 8) -> str:
    shown = ", ".join(map(str, names[:most]))
    return f"{shown}, … ({len(names)} columns)" if len(names) > most else shown


class Tabular:
    """What a result inherits to have :meth:`to_pandas`.

    ``UNIT`` is the unit of all numbers of a class whose fields do not name it. ``COLUMNS`` says what a field's
    name does not: field → the column's name; or names of the members of a tuple; or None, which leaves it out.
    """

    __slots__ = ()
    UNIT: ClassVar[str] = ""
    COLUMNS: ClassVar[Columns] = {}

    def to_pandas(self) -> pandas.DataFrame | Frames:
        """A data frame of one row, or, of a result that holds tables, all of them by name. Units end the columns' names."""
        kind: type = type(self)
        frames = frames_of(self)
        return frames if _has_tables(kind) else frames[_SUMMARY]

    def more_tables(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Tables that the fields hold in another shape: name → rows."""
        return {}


def frame_of(rows: Sequence[Any], kind: type | None = None) -> pandas.DataFrame:
    """Dataclasses of one kind, a row each; of none, the columns of ``kind``."""
    kind = kind or (type(rows[0]) if rows else None)
    return _frame(rows_of(rows), _names(kind, "") if kind is not None else ())


def frame_of_rows(rows: list[Row], columns: Iterable[str] = ()) -> pandas.DataFrame:
    """Plain rows as a data frame; these columns stand first, whether there are rows or not."""
    return _frame(rows, columns)


def rows_of(rows: Iterable[Any]) -> list[Row]:
    """The same as plain rows."""
    return [_row(row) for row in rows]


def frames_of(result: Any) -> Frames:
    """All tables of a result. Its own mappings are tables of two columns, for their names can be many."""
    tables = _Tables()
    own = _row(result, mappings=False)
    if own:
        tables.add(_SUMMARY, [own], own)
    tables.collect([({}, result)], type(result), "", single=True)
    return tables.frames()


def known(table: Table) -> pandas.DataFrame:
    """A table of the model with ``NA`` for what the source did not say."""
    frame = table.to_pandas()
    for name in frame.columns:
        if frame[name].dtype == "int64" and (frame[name] == MISSING).any():
            frame[name] = frame[name].astype("Int64").mask(frame[name] == MISSING)
    return frame


# --- tables in tables --------------------------------------------------------------------------


class _Tables:
    """Gathers the tables of a result, each as its rows and the columns that it has even without any."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[list[Row], list[str]]] = {}

    def add(self, name: str, rows: list[Row], columns: Iterable[str]) -> None:
        """Add a table, or rows to it."""
        given, names = self._found.setdefault(name, ([], []))
        given += rows
        names += columns

    def frames(self) -> Frames:
        """What was gathered."""
        return Frames({name: _frame(rows, columns) for name, (rows, columns) in self._found.items()})

    def collect(self, parents: list[Parent], kind: type, path: str, single: bool) -> None:
        """The tables in rows of one kind. ``single``: they are the result itself, or a part that it has once."""
        for field in _fields(kind):
            name = f"{path}.{field.name}" if path else field.name
            inside = [(key, getattr(one, field.name)) for key, one in parents]
            inside = [(key, value) for key, value in inside if value is not None]
            if field.is_left_out:
                continue
            if field.shape == "nested":
                self.collect(inside, field.inner, name, single)
            elif field.shape == "table":
                self._rows(inside, field.inner, name)
            elif field.shape == "points":
                rows = [
                    {**key, **dict(zip(field.names, point, strict=True))}
                    for key, value in inside
                    for point in value
                ]
                self.add(name, rows, [*_keys(inside), *field.names])
            elif field.shape == "mapping" and single:
                rows = [
                    {"name": key, **_members(field, field.column, amount)}
                    for _, value in inside
                    for key, amount in value.items()
                ]
                self.add(name, rows, ["name", *(field.members or (field.column,))])
            elif field.shape == "columns":
                for key, value in inside:
                    lines = known(value).to_dict("records")
                    self.add(name, [{**key, **{str(k): v for k, v in line.items()}} for line in lines], ())
        if issubclass(kind, Tabular):
            for key, one in parents:
                for more, lines in one.more_tables().items():
                    self.add(f"{path}.{more}" if path else more, [{**key, **line} for line in lines], ())

    def _rows(self, inside: list[Parent], kind: type, name: str) -> None:
        """A table of dataclasses, and the tables in its rows."""
        children = [(key, row) for key, value in inside for row in value]
        names = _names(kind, "")
        prefix = name.rpartition(".")[0].replace(".", "_")
        called = {key: f"{prefix}_{key}" if key in names else key for key in _keys(inside)}
        rows = [{**{called[k]: v for k, v in key.items()}, **_row(row)} for key, row in children]
        self.add(name, rows, [*called.values(), *names])
        first = next((field for field in _fields(kind) if field.shape == "value" and not field.members), None)
        place = f"{name.replace('.', '_')}_row"
        marked: list[Parent] = [
            ({**key, place: at} | ({first.column: getattr(row, first.name)} if first else {}), row)
            for at, (key, row) in enumerate(children)
        ]
        self.collect(marked, kind, name, single=False)


def _keys(parents: list[Parent]) -> list[str]:
    return list(parents[0][0]) if parents else []


# --- fields ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a result: what shape it has in a table, and under which name."""

    name: str
    shape: Shape
    column: str
    inner: type  # of nested and table: the dataclass
    members: tuple[str, ...]  # names of the members of a tuple, where the class gives them
    size: int  # of points: how many numbers each has; of a mapping: whether it holds numbers by words
    is_left_out: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of points."""
        return self.members or tuple(f"value_{at}" for at in range(self.size))


@cache
def _fields(kind: type) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    unit: str = getattr(kind, "UNIT", "")
    said: Columns = getattr(kind, "COLUMNS", {})
    found = []
    for field in fields(kind):
        shape, inner, size = _shape(hints[field.name])
        given = said.get(field.name, "")
        column = given if isinstance(given, str) and given else field.name
        if unit and shape == "value" and not given:
            column = f"{field.name}_{unit}"
        members = given if isinstance(given, tuple) else ()
        found.append(_Field(field.name, shape, column, inner, members, size, given is None))
    return tuple(found)


def _shape(hint: Any) -> tuple[Shape, type, int]:
    if get_origin(hint) in (Union, types.UnionType):
        others = [one for one in get_args(hint) if one is not type(None)]
        if len(others) == 1:
            return _shape(others[0])
        return "value", object, 0
    if isinstance(hint, type) and get_origin(hint) is None:
        if is_dataclass(hint):
            return "nested", hint, 0
        return ("columns", hint, 0) if hint is Table else ("value", hint, 0)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        member = arguments[0]
        if isinstance(member, type) and is_dataclass(member):
            return "table", member, 0
        points = get_args(member)
        if get_origin(member) is tuple and Ellipsis not in points:
            return "points", tuple, len(points)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, value = arguments
        return "mapping", origin, int(key is str and value in (int, float))
    return "value", object, 0


@cache
def _has_tables(kind: type) -> bool:
    return any(
        field.shape in ("table", "points", "mapping", "columns")
        or (field.shape == "nested" and _has_tables(field.inner))
        for field in _fields(kind)
        if not field.is_left_out
    )


# --- rows --------------------------------------------------------------------------------------


def _joined(prefix: str, name: str) -> str:
    """``gain_ns`` and ``low``: ``gain_low_ns``; a unit that both name stands once."""
    if not prefix:
        return name
    for unit in _UNITS:
        if prefix.endswith(unit):
            return f"{prefix.removesuffix(unit)}_{name.removesuffix(unit)}{unit}"
    return f"{prefix}_{name}"


def _row(one: Any, prefix: str = "", mappings: bool = True) -> Row:
    """The plain fields of a dataclass; with ``mappings`` also what its mappings of numbers hold."""
    row: Row = {}
    kind: type = type(one)
    for field in _fields(kind):
        if field.is_left_out:
            continue
        value = getattr(one, field.name)
        name = _joined(prefix, field.column)
        if field.shape == "nested":
            inner = dict.fromkeys(_names(field.inner, name)) if value is None else _row(value, name, mappings)
            row.update(inner)
        elif field.shape == "value":
            row.update(_members(field, name, value, prefix))
        elif field.shape == "mapping" and mappings:
            row.update(_spread(field, value, name))
    return row


def _members(field: _Field, name: str, value: Any, prefix: str = "") -> Row:
    if not field.members:
        return {name: value}
    values = [None] * len(field.members) if value is None else value
    return {_joined(prefix, member): amount for member, amount in zip(field.members, values, strict=True)}


def _spread(field: _Field, value: Mapping[Any, Any] | None, name: str) -> Row:
    """A column a key, where keys are words and values numbers; else the mapping itself."""
    if field.size:
        return {_joined(name, key): amount for key, amount in (value or {}).items()}
    return {name: None if value is None else dict(value)}


def _names(kind: type, prefix: str) -> tuple[str, ...]:
    """Columns that a class has whatever its mappings hold."""
    names: list[str] = []
    for field in _fields(kind):
        name = _joined(prefix, field.column)
        if field.is_left_out:
            continue
        if field.shape == "nested":
            names += _names(field.inner, name)
        elif field.shape == "value":
            names += [_joined(prefix, member) for member in field.members] or [name]
    return tuple(names)


def _frame(rows: list[Row], columns: Iterable[str]) -> pandas.DataFrame:
    import pandas

    names = dict.fromkeys([*columns, *(name for row in rows for name in row)])
    return pandas.DataFrame({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> Any:
    """The values as pandas keeps them best: integers stay integers beside what is missing."""
    import pandas

    present = [value for value in values if value is not None]
    if present and all(isinstance(value, int) and not isinstance(value, bool) for value in present):
        fits = all(-(2**63) <= value < 2**63 for value in present)
        kind = ("int64" if len(present) == len(values) else "Int64") if fits else "object"
        return pandas.Series(values, dtype=kind)
    if present and all(isinstance(value, bool) for value in present):
        return pandas.Series(values, dtype="bool" if len(present) == len(values) else "boolean")
    if present and all(isinstance(value, float | int) for value in present):
        return pandas.Series(values, dtype="float64")
    return pandas.Series(values, dtype="object")
