"""Kernels and operators by name, the longest in total first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import DEVICE_KINDS, HOST_KINDS, Table

from .precision import matmul_dtype
from .results import NamedTime

__all__ = ["add_up", "kernel_times", "matmul_times", "operator_times", "self_times"]

Array = npt.NDArray[Any]

#: Names kept a rank, and of the job. What lies below is small and in no one's way.
_MOST_NAMES = 100
_OPERATOR = HOST_KINDS.index("operator")
_COMPUTE = DEVICE_KINDS.index("compute")


def kernel_times(device: Table | None, rows: Array) -> tuple[NamedTime, ...]:
    """Device work by name and kind: sums of durations, which overlap across streams."""
    if device is None or not len(rows):
        return ()
    return _by_name(device, rows, device["end_ns"][rows] - device["start_ns"][rows], DEVICE_KINDS)


def operator_times(host: Table | None, mask: Array) -> tuple[NamedTime, ...]:
    """Operators by name: self time, which is what no operator inside them takes."""
    if host is None:
        return ()
    rows = np.flatnonzero(mask & (host["kind"] == _OPERATOR) & (host["end_ns"] > host["start_ns"]))
    if not len(rows):
        return ()
    return _by_name(host, rows, self_times(host, rows), HOST_KINDS)


def self_times(host: Table, rows: Array) -> Array:
    """Of each of the operators ``rows`` the time that none of the others inside it takes, int64 ns, shape (rows,)."""
    duration = host["end_ns"] - host["start_ns"]
    inside = np.zeros(len(host), dtype=np.int64)
    owner = _enclosing_operator(host, rows)
    np.add.at(inside, owner[owner >= 0], duration[rows[owner >= 0]])
    return np.asarray(np.maximum(duration[rows] - inside[rows], 0))


def _enclosing_operator(host: Table, rows: Array) -> Array:
    """Row of the innermost operator around each of ``rows``, -1 where none."""
    parent, operator = host["parent"], host["kind"] == _OPERATOR
    owner = parent[rows].copy()
    active = np.flatnonzero((owner >= 0) & ~operator[np.maximum(owner, 0)])
    for _ in range(len(host)):
        if not len(active):
            break
        above = parent[owner[active]]
        owner[active] = above
        active = active[(above >= 0) & ~operator[np.maximum(above, 0)]]
    return np.asarray(owner)


def _by_name(table: Table, rows: Array, amount: Array, kinds: tuple[str, ...]) -> tuple[NamedTime, ...]:
    code = table["name"][rows].astype(np.int64) * len(kinds) + table["kind"][rows]
    found, inverse, calls = np.unique(code, return_inverse=True, return_counts=True)
    total = np.zeros(len(found), dtype=np.int64)
    np.add.at(total, inverse, amount)
    named = [
        NamedTime(
            table.strings.text(one // len(kinds)) or "unnamed", kinds[one % len(kinds)], int(count), int(sum)
        )
        for one, count, sum in zip(found.tolist(), calls, total, strict=True)
    ]
    return _top(named)


def _top(named: Iterable[NamedTime]) -> tuple[NamedTime, ...]:
    return tuple(sorted(named, key=lambda one: (-one.total_ns, one.name))[:_MOST_NAMES])


def add_up(tables: Iterable[tuple[NamedTime, ...]]) -> tuple[NamedTime, ...]:
    """The same names of several ranks or windows added up."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for table in tables:
        for one in table:
            entry = sums[one.name, one.kind]
            entry[0] += one.calls
            entry[1] += one.total_ns
    return _top(NamedTime(name, kind, *entry) for (name, kind), entry in sums.items())


def matmul_times(device: Table | None, rows: Array) -> dict[str, int]:
    """Time of matrix products by precision, ns, longest first; products of unknown type are left out."""
    sums: dict[str, int] = defaultdict(int)
    if device is not None and len(rows):
        rows = rows[device["kind"][rows] == _COMPUTE]
        names, inverse = np.unique(device["name"][rows], return_inverse=True)
        total = np.zeros(len(names), dtype=np.int64)
        np.add.at(total, inverse, device["end_ns"][rows] - device["start_ns"][rows])
        for code, amount in zip(names.tolist(), total.tolist(), strict=True):
            dtype = matmul_dtype(device.strings.text(code) or "")
            if dtype is not None:
                sums[dtype] += amount
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
