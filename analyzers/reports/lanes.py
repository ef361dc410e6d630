"""A schedule's lanes as a grid of cells: what text prints and what keeps a page of many spans small.

One rule for both: a cell shows the key that fills most of it, and nothing where more of it is empty than
any key fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trine.analyzers.intervals import covered, union

from .document import Lanes

__all__ = ["extent", "letters", "row_of_cells", "without_slivers"]

Span = tuple[int, int, str, str]


def extent(lanes: Lanes) -> int:
    """Where the drawing ends, ns from its start; at least 1."""
    return max((span[1] for _, spans in lanes.rows for span in spans), default=1) or 1


def letters(legend: Mapping[str, str]) -> dict[str, str]:
    """A capital letter for each key: of its label, the first that no key before it has taken.

    >>> letters({"a": "forward", "b": "backward", "c": "forward of the weights"})
    {'a': 'F', 'b': 'B', 'c': 'O'}
    """
    spare = [chr(code) for code in range(ord("A"), ord("Z") + 1)]
    taken: dict[str, str] = {}
    for key, label in legend.items():
        own = [letter for letter in label.upper() if letter in spare]
        taken[key] = own[0] if own else (spare[0] if spare else "#")
        if taken[key] in spare:
            spare.remove(taken[key])
    return taken


def row_of_cells(
    spans: Sequence[Span], keys: Sequence[str], end_ns: int, cells: int
) -> list[tuple[str | None, bool]]:
    """For each of ``cells`` equal stretches of ``[0, end_ns)``: the key that fills most of it (None where empty
    time does), and whether one of that key's spans begins there."""
    edges = np.arange(cells + 1, dtype=np.int64) * end_ns // cells
    start, end = edges[:-1], np.maximum(edges[1:], edges[:-1] + 1)
    filled = np.zeros((len(keys) + 1, cells), dtype=np.int64)
    begins = np.zeros((len(keys), cells), dtype=bool)
    for number, key in enumerate(keys):
        mine = [span for span in spans if span[2] == key and span[1] > span[0]]
        if not mine:
            continue
        first = np.array([span[0] for span in mine], dtype=np.int64)
        filled[number + 1] = covered(
            union(first, np.array([span[1] for span in mine], dtype=np.int64)), start, end
        )
        # A span that begins behind a cell's middle is seen from the next cell on.
        place = np.searchsorted(start + (end - start) // 2, first, side="left")
        begins[number, place[place < cells]] = True
    filled[0] = (end - start) - filled[1:].sum(axis=0)
    best = filled.argmax(axis=0)
    return [
        (None, False) if number == 0 else (keys[number - 1], bool(begins[number - 1, cell]))
        for cell, number in enumerate(best.tolist())
    ]


def without_slivers(spans: Sequence[Span], least_ns: float) -> Iterator[Span]:
    """The spans, neighbours of one key joined where the first, or the gap between them, is shorter than
    ``least_ns``: nobody sees them apart. Sorted by start."""
    held: Span | None = None
    for span in sorted(spans):
        if (
            held is not None
            and held[2] == span[2]
            and span[0] - held[1] < least_ns
            and held[1] - held[0] < least_ns
        ):
            held = (held[0], max(held[1], span[1]), held[2], "")
            continue
        if held is not None:
            yield held
        held = span
    if held is not None:
        yield held
