"""Which span lies in which: calls and ranges of a thread nest, since they are pushed and popped.

The same rule as for Kineto traces, in pieces: an export may hold millions of ranges, and Python objects for all of
them at once would take many times the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["enclosing_rows"]

Array = npt.NDArray[Any]

_PIECE = 65_536


def enclosing_rows(thread: Array, start: Array, end: Array) -> Array:
    """Row of the innermost span of the same thread around each span, -1 where there is none, int64.

    ``thread``, ``start``, ``end``: shape (rows,), rows in order of start, the longer first.
    """
    found = np.full(len(start), -1, np.int64)
    for one in np.unique(thread).tolist():
        rows = np.flatnonzero(thread == one)
        nesting = _Nesting()
        for at in range(0, len(rows), _PIECE):
            piece = rows[at : at + _PIECE]
            found[piece] = nesting.add(piece.tolist(), start[piece].tolist(), end[piece].tolist())
    return found


class _Nesting:
    """The spans of a thread that are open, from the outermost in."""

    def __init__(self) -> None:
        self._limits: list[float] = [float("inf")]
        self._rows = [-1]

    def add(self, rows: list[int], starts: list[int], ends: list[int]) -> list[int]:
        """Rows around the next spans in order of start."""
        limits, open_rows, found = self._limits, self._rows, []
        for row, start, end in zip(rows, starts, ends, strict=True):
            while limits[-1] <= start:
                limits.pop()
                open_rows.pop()
            if limits[-1] >= end:
                found.append(open_rows[-1])
            else:  # start/end ranges may cross; an enclosing one may lie further out
                pairs = zip(reversed(limits), reversed(open_rows), strict=True)
                found.append(next(other for limit, other in pairs if limit >= end))
            limits.append(end)
            open_rows.append(row)
        return found
