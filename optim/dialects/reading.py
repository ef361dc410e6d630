"""Going through a configuration of another tool by the rows of its table, and what that comes to."""

from __future__ import annotations

import difflib
import json
import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trine.optim._schema import spell
from trine.optim.config import Config
from trine.optim.dialects.rows import Row
from trine.record.errors import TrineError, UnreadableInput, UsageError

__all__ = ["Imported", "Reading", "announce", "mapping_of", "spelled"]

logger = logging.getLogger("trine")

#: JSON has whole numbers of any length; what counts anything fits here, and into a float.
_LARGEST = 2**63


@dataclass(frozen=True, slots=True)
class Imported:
    """A configuration of another tool in our words.

    ``arguments`` are for ``trine.optimize`` (``clip_norm``); ``to_do`` is what the program must do itself and would
    train otherwise without; ``notes`` is what was left out or means the same here. One line each.
    """

    config: Config
    arguments: Mapping[str, Any]
    to_do: tuple[str, ...]
    notes: tuple[str, ...]

    def to_toml(self) -> str:
        """The configuration as TOML, with ``to_do`` and ``notes`` as comments above it."""
        lines = [f"# to do: {_printable(line)}" for line in self.to_do]
        lines += [f"# {_printable(line)}" for line in self.notes]
        return "\n".join([*lines, *([""] if lines else []), self.config.to_toml()])


@dataclass(slots=True)
class Reading:
    """One pass over a file: values by path, and what has been found out so far."""

    source: str
    rows: Mapping[str, Row]
    values: dict[str, Any] = field(default_factory=dict)  # path → value of every key that asks for something
    changes: dict[str, Any] = field(default_factory=dict)  # our key path → value
    arguments: dict[str, Any] = field(default_factory=dict)
    to_do: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)  # reason → keys
    errors: list[str] = field(default_factory=list)

    def walk(self, tables: Mapping[str, Any], above: str = "") -> None:
        """Sort every key into ``values``, ``notes`` and ``errors`` by its row."""
        for name, value in tables.items():
            path = f"{above}{name}"
            row = self.rows.get(path)
            if "." in str(name):  # it is no path to the tool whose file this is
                self.errors.append(f"there is no key {path}: tables are written inside of each other")
            elif row is not None:
                self._take(row, value)
            elif any(known.startswith(f"{path}.") for known in self.rows):
                self._enter(path, value)
            else:
                self.errors.append(self._unknown(path))

    def _enter(self, path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            self.walk(value, f"{path}.")
        elif isinstance(value, str) and value == "auto":
            self.notes.append(f'{path} = "auto" is left to the program')
        elif value is not None:
            self.errors.append(f"{path} = {spelled(value)}: it takes a table of keys")

    def _take(self, row: Row, value: Any) -> None:
        if isinstance(value, str) and value == "auto":
            self.notes.append(f'{row.path} = "auto" is left to the program')
            return
        if row.whole and row.inner and isinstance(value, Mapping):
            unknown = [name for name in value if name not in row.inner]
            self.errors += [self._unknown(f"{row.path}.{name}", row) for name in unknown]
        if row.does == "removed":
            self.errors.append(f"{row.path} {row.words}")
        elif row.does == "refused":
            if not _asks_for_nothing(row, value):
                self.errors.append(f"{row.path} = {spelled(value)}: {row.words}")
        elif row.does == "accepted":
            if value is not None:
                self.leave_out(row.words, row.path)
        elif value is not None:
            self.values[row.path] = value

    def _unknown(self, path: str, row: Row | None = None) -> str:
        known = [f"{row.path}.{name}" for name in row.inner] if row is not None else list(self.rows)
        near = difflib.get_close_matches(path, known, n=1, cutoff=0.7)
        if not near and row is None:  # the right name in the wrong table
            last = path.rpartition(".")[2]
            near = [each for each in known if each.rpartition(".")[2] == last]
        guess = f"; did you mean {near[0]}?" if near else ""
        return f"there is no key {path}{guess}"

    def pop(self, path: str, kinds: type | tuple[type, ...] = object, default: Any = None) -> Any:
        """The value of a key, once; an error is noted where it is of another type."""
        value = self.values.pop(path, default)
        if value is default:
            return default
        if isinstance(value, int) and abs(value) > _LARGEST:
            self.errors.append(f"{path} = {spelled(value)}: no such number is counted to")
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        fits = isinstance(value, bool) if wanted == (bool,) else isinstance(value, wanted)
        if fits and (not isinstance(value, bool) or bool in wanted or object in wanted):
            return value
        if wanted == (int,) and is_number and float(value).is_integer():
            return int(value)  # JSON's 5e8
        if float in wanted and is_number:
            return float(value)
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        listed = " or ".join(names.get(kind, "a table") for kind in wanted)
        self.errors.append(f"{path} = {spelled(value)}: it takes {listed}")
        return default

    def leave_out(self, why: str, *paths: str) -> None:
        """Say of keys that they were left out, for a reason that several may share."""
        self.left_out.setdefault(why, []).extend(paths)

    def pop_table(self, path: str) -> Mapping[str, Any]:
        """The value of a key that is a table, once; an error is noted where it is none."""
        value = self.values.pop(path, None)
        if value is None or isinstance(value, Mapping):
            return value or {}
        self.errors.append(f"{path} = {spelled(value)}: it takes a table of keys")
        return {}

    def set(self, key: str, value: Any, because: str) -> None:
        """Set our ``key``; an error is noted where two of their keys want different values there."""
        if key in self.changes and self.changes[key] != value:
            self.errors.append(
                f"{because} asks for {key} = {spelled(value)}, and another key for {spelled(self.changes[key])}"
            )
        self.changes[key] = value

    def finished(self) -> Imported:
        """What it came to. Raises ``UsageError`` in one line with all that was wrong."""
        assert not self.values or self.errors, f"rows without a translation: {list(self.values)}"
        if self.errors:
            raise UsageError(_printable(f"{self.source}: {'; '.join(self.errors)}"))
        for why, paths in self.left_out.items():
            self.notes.append(f"left out: {', '.join(paths)} ({why})")
        try:
            config = Config().with_changes(self.changes)
        except TrineError as error:
            raise UsageError(f"{self.source}: {error}") from error
        return Imported(config, dict(self.arguments), tuple(self.to_do), tuple(self.notes))


def _asks_for_nothing(row: Row, value: Any) -> bool:
    if isinstance(value, Mapping):
        if value.get("enabled", None) is False:
            return True
        return "enabled" not in value and all(_asks_for_nothing(row, inner) for inner in value.values())
    return any(value == harmless and type(value) is type(harmless) for harmless in row.harmless) or (
        isinstance(value, float)
        and value in (0.0, 1.0)
        and any(h == value for h in row.harmless if not isinstance(h, bool))
    )


def mapping_of(
    given: Any, what: str, parse: Callable[[str], Any] = json.loads
) -> tuple[Mapping[str, Any], str]:
    """The tables of a file or a mapping, and what to call it in errors.

    Raises ``UnreadableInput`` for a file that cannot be read, is not in its format or holds no table; ``UsageError`` for
    anything else.
    """
    if isinstance(given, Mapping):
        return given, f"the {what} configuration"
    article = "an" if what[0] in "AEIOU" else "a"
    if not isinstance(given, (str, Path)):
        raise UsageError(
            f"{article} {what} configuration is given as the path of its file or as a dictionary, not as a {type(given).__name__}"
        )
    path = Path(given)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a path with a null byte in it is a ValueError
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnreadableInput(_printable(f"cannot read the {what} configuration {path}: {reason}")) from error
    try:
        tables = parse(text)
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise UnreadableInput(f"{path} cannot be read as {article} {what} configuration: {said}") from error
    if not isinstance(tables, Mapping):
        raise UnreadableInput(f"{path} holds no {what} configuration: it is no table of keys")
    return tables, str(path)


def spelled(value: Any) -> str:
    """A value for an error, short, on one line."""
    text = ""
    try:
        # YAML's aliases make values that nobody can write whole.
        for part in json.JSONEncoder().iterencode(value):
            text += part
            if len(text) > 60:
                break
    except (TypeError, ValueError, RecursionError):
        text = reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _printable(text: str) -> str:
    """On one line: names and values of a file may hold breaks, which would end a comment of the TOML."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def announce(imported: Imported, source: str) -> None:
    """What was not taken over, on the logger: warnings for what the program has to do."""
    for line in imported.to_do:
        logger.warning("%s: %s", source, line)
    for line in imported.notes:
        logger.info("%s: %s", source, line)
    changes = imported.config.changes()
    listed = ", ".join(f"{key} = {spell(value)}" for key, value in changes.items()) or "nothing"
    logger.info("%s: taken over: %s", source, listed)


def each_path(rows: Sequence[Row]) -> Iterator[str]:
    """Every path of a table, inner ones too."""
    for row in rows:
        yield row.path
        for name in sorted(row.inner):
            yield f"{row.path}.{name}"
