"""Cells of a table of published runs: numbers as people write them, and a note of what had to be assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Missing", "Row"]

_NUMBER = re.compile(r"[~≈<>]?\s*([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")


class Missing(Exception):
    """A row lacks what no assumption can replace."""


@dataclass
class Row:
    """Cells of a row, and what had to be assumed."""

    cells: Mapping[str, str]
    assumed: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        """A cell without blanks around it; empty where there is none."""
        return (self.cells.get(name) or "").strip()

    def number(self, name: str) -> float | None:
        """The first number in a cell; the middle of a range; None where there is none."""
        text = self.text(name)
        found = [float(value.replace(",", "")) for value in _NUMBER.findall(text)]
        if not found:
            return None
        if len(found) >= 2 and re.search(r"\d\s*(?:-|–|\.\.|to)\s*\d", text):
            self.assumed.append(f"{name} {text} as its middle")
            return (found[0] + found[1]) / 2
        return found[0]

    def count(self, name: str) -> int | None:
        """A whole number from one on; None where there is none."""
        found = self.number(name)
        return None if found is None or found < 1 else round(found)

    def needed(self, name: str) -> int:
        """A count without which nothing is predicted. Raises ``Missing``."""
        found = self.count(name)
        if found is None:
            raise Missing(f"no {name}")
        return found

    def assume(self, text: str) -> None:
        """Note what the row does not say."""
        self.assumed.append(text)
