"""Text of the formats that exports are written in: flags, YAML, Python calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["Flags", "yaml_text"]


class Flags:
    """Command-line flags, a line each, as ``$(cat FILE)`` or ``xargs`` hands them on."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, flag: str, *values: Any) -> None:
        """A flag and its values; alone where it takes none."""
        self._lines.append(
            " ".join([flag, *(f"{value:g}" if isinstance(value, float) else str(value) for value in values)])
        )

    def has(self, flag: str) -> bool:
        """Whether it has been added."""
        return any(line.partition(" ")[0] == flag for line in self._lines)

    @property
    def text(self) -> str:
        """All of them."""
        return "".join(f"{line}\n" for line in self._lines)


def yaml_text(tables: Mapping[str, Any], indent: str = "") -> str:
    """Nested tables of numbers, strings and truth as YAML. Strings are quoted as JSON's, which YAML 1.2 reads as they are."""
    lines: list[str] = []
    for key, value in tables.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:" if value else f"{indent}{key}: {{}}")
            if value:
                lines.append(yaml_text(value, indent + "  ").rstrip("\n"))
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return "".join(f"{line}\n" for line in lines)


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and value.replace("_", "").isalnum() and not value[0].isdigit()
    # YAML 1.1 reads these as truth.
    return (
        value
        if plain and value.lower() not in ("yes", "no", "on", "off", "true", "false", "null", "y", "n")
        else json.dumps(value)
    )
