"""Tables of files that people write: read, and refused in one line that says what was meant."""

from __future__ import annotations

import csv
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from trine.record.errors import UnreadableInput, UsageError

__all__ = [
    "check_keys",
    "check_line",
    "near",
    "packaged",
    "packaged_rows",
    "read_json",
    "read_toml",
    "text_of",
]


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """A TOML file's tables. Raises ``UnreadableInput`` naming the file and ``what`` it should be."""
    try:
        return tomllib.loads(text_of(path, what))
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{path} is not TOML: {error}") from error


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON file's object. Raises ``UnreadableInput`` naming the file and ``what`` it should be."""
    try:
        found = json.loads(text_of(path, what))
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{path} is not JSON: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise UnreadableInput(f"{path} is no {what}: it holds {_json_words(found)}, not an object")
    return found


def _json_words(value: Any) -> str:
    """What JSON calls a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return "an array"
    return "a string" if isinstance(value, str) else "a number"


def text_of(path: Path, what: str) -> str:
    """A file's text, without the mark that some editors begin UTF-8 with. Raises ``UnreadableInput``."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UnreadableInput(f"cannot read the {what} {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UnreadableInput(f"{path} is no {what}: it is not text") from error


@cache
def packaged(name: str) -> Mapping[str, Mapping[str, Any]]:
    """The tables of a TOML file that lies beside this one."""
    return tomllib.loads(files("trine.optim.plan").joinpath(name).read_text(encoding="utf-8"))


def packaged_rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file that lies beside this one, without its comments."""
    text = files("trine.optim.plan").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")))


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raises ``UsageError`` for the first key that is not known, with the nearest that is."""
    names = sorted(known)
    for key in table:
        if key not in names:
            raise UsageError(f"{where} has no key {key!r}{near(key, names)}: one of {', '.join(names)}")


def check_line(value: Any, key: str, where: str) -> str:
    """A name that fits into a line of a report. Raises ``UsageError`` for what is no text, empty, or has several lines."""
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key} must be text, not {value!r}")
    if not value.strip() or not value.isprintable():
        raise UsageError(
            f"{where}: {key} must be a name of one line, not {value!r}: give one, or leave it out"
        )
    return value


def near(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"``, or nothing where nothing is near."""
    found = difflib.get_close_matches(word.casefold(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""
