"""A SQLite export, opened so that nothing beside it is ever written, and read in chunks into columns.

Everything is asked for by name and may be absent: exports of schema 2.9 lack columns that 3.25 has, and
``nsys export --tables`` leaves out whole tables. A damaged page ends its table; what came before it is used.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from ..errors import UnreadableInput
from ..model import MISSING

__all__ = ["MAGIC", "Database", "constant", "is_constant", "opened", "quoted"]

Array = npt.NDArray[Any]

MAGIC = b"SQLite format 3\x00"

#: Rows taken at a time: a few MB of Python objects, whatever the table's size.
_CHUNK_ROWS = 16_384
#: No row takes less of a file: more rows than that mean that damaged pages lead in a circle.
_SMALLEST_ROW_BYTES = 4
#: :data:`MISSING` as SQLite spells it.
_NOTHING = f"({MISSING + 1} - 1)"
#: Longest text or blob that SQLite may build, so that damage does not ask for gigabytes.
_LONGEST_BYTES = 64 << 20


#: What SQLite raises on damage; its messages may quote what is no text.
FAULTS = (sqlite3.Error, OverflowError, MemoryError, UnicodeDecodeError)


@contextmanager
def opened(path: Path) -> Iterator[Database]:
    """The database at ``path``, closed in the end. Raises ``UnreadableInput`` where its schema cannot be read.

    ``immutable=1`` (https://sqlite.org/c3ref/open.html): no lock, no journal, no ``-wal`` or ``-shm`` beside a
    user's file, on media that cannot be written as well.
    """
    where = f"file:{quote(str(path.absolute()), errors='surrogateescape')}?mode=ro&immutable=1"
    try:
        connection = sqlite3.connect(where, uri=True, check_same_thread=False)
    except FAULTS as error:
        raise UnreadableInput(f"{path} cannot be opened as an SQLite database: {_said(error)}") from None
    try:
        yield Database(connection, path)
    finally:
        connection.close()


def quoted(name: str) -> str:
    """An identifier as SQL has it (``end`` is a keyword)."""
    return '"' + name.replace('"', '""') + '"'


class Database:
    """Tables of one export by name. ``damaged`` is table → what SQLite said of it."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self.damaged: dict[str, str] = {}
        self._connection = connection
        self._most_rows = path.stat().st_size // _SMALLEST_ROW_BYTES + 1
        self._columns: dict[str, frozenset[str]] = {}
        connection.text_factory = _text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_BYTES)
        try:
            # With a writable schema SQLite reads a file that was cut off, and skips what it cannot parse of the
            # schema; the file itself is open for reading alone.
            for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "query_only=ON", "writable_schema=ON"):
                connection.execute(f"PRAGMA {pragma}")
            # Views and virtual tables could run anything under a table's name; SQLite believes the text alone.
            rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        except FAULTS as error:
            raise UnreadableInput(
                f"{path} is a damaged SQLite database ({_said(error)}); export it again: nsys export --type sqlite"
            ) from None
        self.tables = frozenset(
            str(name) for name, sql in rows if str(sql).lstrip().upper().startswith("CREATE TABLE")
        )

    def missing_bytes(self) -> int:
        """How much of the file was cut off, by what its header says (https://sqlite.org/fileformat2.html, 1.3)."""
        with self.path.open("rb") as file:
            header = file.read(100)
        page = int.from_bytes(header[16:18], "big")
        pages = int.from_bytes(header[28:32], "big")
        in_header_valid = header[24:28] == header[92:96]
        return (
            max((65536 if page == 1 else page) * pages - self.path.stat().st_size, 0)
            if in_header_valid
            else 0
        )

    def columns(self, table: str) -> frozenset[str]:
        """Names of the columns of a table, none where it is absent. Generated columns do not count."""
        if table not in self.tables:
            return frozenset()
        if table not in self._columns:
            rows = self._all(table, f"PRAGMA table_info({quoted(table)})")
            self._columns[table] = frozenset(str(row[1]) for row in rows)
        return self._columns[table]

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is such a table with all these columns."""
        return set(columns) <= self.columns(table) and table in self.tables

    def rows(self, table: str, columns: Sequence[str], where: str = "", limit: int = 100_000) -> list[Any]:
        """Rows of a small table as they are; ``None`` stands for a column that it lacks."""
        if table not in self.tables:
            return []
        known = self.columns(table)
        picked = ", ".join(quoted(name) if name in known else "NULL" for name in columns)
        return self._all(table, f"SELECT {picked} FROM {quoted(table)} {where} LIMIT {limit}")

    def holds_rows(self, table: str) -> bool:
        """Whether a table has any row."""
        return table in self.tables and bool(self._all(table, f"SELECT 1 FROM {quoted(table)} LIMIT 1"))

    def ask(self, table: str, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query about a table; fewer where the table is damaged."""
        return self._all(table, query, values)

    def integers(self, table: str, columns: Sequence[str], where: str = "") -> dict[str, Array]:
        """Columns of integers, shape (rows,), :data:`MISSING` for NULL, text and columns that the table lacks."""
        known = [name for name in columns if name in self.columns(table)]
        found = _Filled(known, self._expected(table, where))
        for numbers, _ in self.chunks(table, known, where=where):
            found.add(numbers)
        filled = found.columns()
        return {name: filled[name] if name in filled else constant(MISSING, found.rows) for name in columns}

    def _expected(self, table: str, where: str) -> int:
        """How many rows a query will give: counting first saves holding all of them twice."""
        if table not in self.tables:
            return 0
        found = self._all(table, f"SELECT COUNT(*) FROM {quoted(table)} {where}")
        return min(int(found[0][0]), self._most_rows) if found else 0

    def chunks(
        self, table: str, columns: Sequence[str], others: Sequence[str] = (), where: str = ""
    ) -> Iterator[tuple[Array, list[tuple[Any, ...]]]]:
        """A table piece by piece: integers of shape (rows, columns), and the ``others`` as they are, one tuple a column."""
        if table not in self.tables:
            return
        known = self.columns(table)
        picked = [_integer(name) if name in known else _NOTHING for name in columns]
        picked += [quoted(name) if name in known else "NULL" for name in others]
        query = f"SELECT {', '.join(picked)} FROM {quoted(table)} {where}"
        for rows in self._pieces(table, query):
            if others:
                turned = list(zip(*rows, strict=True))
                numbers = np.array(turned[: len(columns)], dtype=np.int64).T
                yield numbers, turned[len(columns) :]
            else:
                yield np.array(rows, dtype=np.int64).reshape(len(rows), len(columns)), []

    def _pieces(self, table: str, query: str) -> Iterator[list[Any]]:
        seen = 0
        try:
            cursor = self._connection.execute(query)
            while rows := cursor.fetchmany(_CHUNK_ROWS):
                seen += len(rows)
                yield rows
                if seen > self._most_rows:
                    self.damaged[table] = "its pages lead in a circle"
                    return
        except FAULTS as error:
            self.damaged[table] = _said(error)

    def _all(self, table: str, query: str, values: Sequence[Any] = ()) -> list[Any]:
        found: list[Any] = []
        try:
            for row in self._connection.execute(query, values):
                found.append(row)
                if len(found) > self._most_rows:
                    self.damaged[table] = "its pages lead in a circle"
                    break
        except FAULTS as error:
            self.damaged[table] = _said(error)
        return found

    def lookup(self, table: str, key: str, value: str) -> Callable[[int], str | None]:
        """A function from ``key`` to the text ``value`` of a table. Asks SQLite where the key is indexed: millions
        of strings may lie there, and few be used; else reads them all once."""
        if not self.has(table, key, value):
            return lambda _: None
        one = f"SELECT {quoted(value)} FROM {quoted(table)} WHERE {quoted(key)} = ?"
        plan = self._all(table, f"EXPLAIN QUERY PLAN {one}", (0,))
        if any("SEARCH" in str(row[-1]) for row in plan):

            def ask(code: int) -> str | None:
                found = self._all(table, one, (code,))
                return str(found[0][0]) if found and found[0][0] is not None else None

            return ask
        query = f"SELECT {_integer(key)}, {quoted(value)} FROM {quoted(table)}"
        every: dict[int, str] = {}
        for rows in self._pieces(table, query):
            every.update((number, str(text)) for number, text in rows if text is not None)
        return every.get


def constant(value: Any, rows: int) -> Array:
    """A column of one value that takes no memory; it cannot be written to."""
    return np.broadcast_to(np.asarray(value), (rows,))


def is_constant(column: Array) -> bool:
    """Whether a column is one of :func:`constant`."""
    return column.strides == (0,)


class _Filled:
    """Columns that grow as chunks come: allocated once where the number of rows is known."""

    def __init__(self, names: Sequence[str], rows: int) -> None:
        self._columns = {name: np.empty(rows, np.int64) for name in names}
        self.rows = 0

    def add(self, numbers: Array) -> None:
        end = self.rows + len(numbers)
        for place, name in enumerate(self._columns):
            if end > len(self._columns[name]):  # more than were counted: the file is damaged
                self._columns[name] = np.resize(self._columns[name], 2 * end)
            self._columns[name][self.rows : end] = numbers[:, place]
        self.rows = end

    def columns(self) -> dict[str, Array]:
        return {name: column[: self.rows] for name, column in self._columns.items()}


def _said(error: BaseException) -> str:
    """What SQLite said, on one line."""
    text = "" if isinstance(error, UnicodeDecodeError) else str(error)
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split()) or "damaged"


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _integer(name: str) -> str:
    """SQL for a column as an integer whatever a damaged or hand-made file holds in it."""
    column = quoted(name)
    return (
        f"CASE typeof({column}) WHEN 'integer' THEN {column} WHEN 'real' THEN CAST({column} AS INTEGER) "
        f"ELSE {_NOTHING} END"
    )
