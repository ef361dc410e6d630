"""A deep window's collectives with what the record knows of them besides: profilers of hosts name no groups, and few sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import MISSING, Rank, Table

__all__ = ["completed"]

Array = npt.NDArray[Any]

#: What the record completes where the window lacks it.
_NUMBERS = ("bytes", "peer")


def completed(window: Rank, record: Rank) -> Rank:
    """The window with groups and sizes of the record's own rows; of steps alone whose calls are the same in both."""
    mine, theirs = window.collectives, record.collectives
    if mine is None or theirs is None or mine is theirs:
        return window
    columns = {name: column.copy() for name, column in mine.columns.items()}
    groups = theirs.text("group")
    for rows, known in _same(mine, theirs):
        for name in _NUMBERS:
            columns[name][rows] = np.where(
                columns[name][rows] == MISSING, theirs[name][known], columns[name][rows]
            )
        for row, group in zip(rows.tolist(), groups[known].tolist(), strict=True):
            if columns["group"][row] < 0 and group is not None:
                columns["group"][row] = mine.strings.code(group)
    named = {group.id for group in window.groups}
    others = tuple(group for group in record.groups if group.id not in named)
    return replace(
        window,
        collectives=Table("collectives", columns, mine.strings),
        groups=(*window.groups, *others),
    )


def _same(mine: Table, theirs: Table) -> Iterator[tuple[Array, Array]]:
    """Rows of both, of every step in which both have the same operations one after another."""
    operations = mine.text("operation"), theirs.text("operation")
    for step in np.unique(mine["step"][mine["step"] != MISSING]).tolist():
        rows, known = (_in_order(table, step) for table in (mine, theirs))
        if len(rows) == len(known) and (operations[0][rows] == operations[1][known]).all():
            yield rows, known


def _in_order(table: Table, step: int) -> Array:
    rows = np.flatnonzero(table["step"] == step)
    issued = np.where(table["issued_ns"] == MISSING, table["start_ns"], table["issued_ns"])[rows]
    return rows[np.argsort(issued, kind="stable")]
