"""What repeats in a trace, worked out once: names, texts, threads, grids. Each class is a dict that fills itself.

A trace of a million events has a few thousand names, shapes and grids; a lookup costs a twentieth of the work.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..model import MISSING, Strings
from ._kineto_events import DECODE_ERRORS

__all__ = ["NameCodes", "Processes", "Products", "RawCodes", "Sparse", "Threads"]


class NameCodes(dict[Any, int]):
    """Name → code in the pool; a name seen for the first time is added."""

    def __init__(self, strings: Strings) -> None:
        super().__init__({None: -1})
        self._strings = strings

    def __missing__(self, name: Any) -> int:
        text = name if isinstance(name, str) else str(name)[:200]
        code = self[name] = self._strings.code(text)
        return code


class RawCodes(dict[bytes, int]):
    """Raw JSON → code of a string's content, or of anything else as it was written."""

    def __init__(self, strings: Strings) -> None:
        super().__init__({b"": -1, b'""': -1, b"[]": -1, b"null": -1})
        self._strings = strings

    def __missing__(self, data: bytes) -> int:
        text = data.decode("utf-8", "replace")
        if data[:1] == b'"':
            with contextlib.suppress(*DECODE_ERRORS):  # else kept as it was written
                text = msgspec.json.decode(data, type=str)
        code = self[data] = self._strings.code(text)
        return code


class Products(dict[bytes, int]):
    """Raw JSON of a grid or block, ``[x, y, z]`` → its product; MISSING where it is none or beyond 64 bits."""

    def __init__(self) -> None:
        super().__init__({b"": MISSING})

    def __missing__(self, data: bytes) -> int:
        product = MISSING
        with contextlib.suppress(*DECODE_ERRORS):
            sides = msgspec.json.decode(data)
            if isinstance(sides, list) and sides and all(type(side) is int and side > 0 for side in sides):
                product = math.prod(sides)
        self[data] = product = product if product < 2**63 else MISSING
        return product


class Processes(dict[Any, int]):
    """Process as written → its number here, in order of appearance; ``names`` are their texts by number."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __missing__(self, process: Any) -> int:
        text = str(process)
        if text in self.names:  # 7 and "7" are one
            number = self.names.index(text)
        else:
            number = len(self.names)
            self.names.append(text)
        self[process] = number
        return number


class Threads(dict[tuple[Any, Any], int]):
    """(process, thread) as written → the thread's number; unlike threads never share one."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, tuple[str, str]] = {}

    def process(self, thread: int) -> str:
        """The process that a thread belongs to, as written."""
        return self._owners[thread][0]

    def __missing__(self, key: tuple[Any, Any]) -> int:
        owner = (str(key[0]), str(key[1]))
        try:
            thread = int(owner[1].rsplit(" ", 1)[-1])
        except ValueError:
            thread = -1
        if abs(thread) >= 2**62:
            thread = -1
        while self._owners.setdefault(thread, owner) != owner:
            thread = -len(self._owners) - 1000  # the same number in another process
        self[key] = thread
        return thread


class Sparse:
    """Values of a few rows of a table; rows are added in ascending order."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._values: list[tuple[int, ...]] = []

    def add(self, row: int, values: tuple[int, ...]) -> None:
        """The values of a row."""
        self._rows.append(row)
        self._values.append(values)

    def of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Values of rows, shape ``(len(rows), values)``, MISSING where there are none; ``None`` where nothing was added."""
        if not self._rows:
            return None
        known, values = np.array(self._rows), np.array(self._values, dtype=np.int64)
        position = np.minimum(np.searchsorted(known, rows), len(known) - 1)
        return np.where((known[position] == rows)[:, None], values[position], MISSING)
