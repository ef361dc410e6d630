"""A rank's work by operator, shapes and types: columns, and what each group is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.analyzers.kernel_classes import classify
from trine.record.model import HOST_KINDS, Strings

from ._attribution import Attributed, dense
from ._operator_work import work_of
from ._products import HALVES, Dims, Work, conv_inputs, conv_outputs, output_like

__all__ = ["NO_OPERATOR", "Grouped", "group", "sums"]

Array = npt.NDArray[Any]

#: Operators after a convolution that may show its output.
_LOOK_AHEAD = 6
#: What a kernel that no operator launched is filed under.
NO_OPERATOR = "(no operator)"
_OPERATOR = HOST_KINDS.index("operator")
_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")
_SHORTCUT = re.compile(r"winograd|Sp3AsmConv|fft", re.IGNORECASE)


@dataclass(frozen=True)
class Grouped:
    """Work by (operator, shapes, types). ``key`` is the group of each row of the work, shape (n,); of each group
    ``names``, ``shapes`` and ``types`` are codes of strings (-1 for none)."""

    work: Attributed
    key: Array
    names: Array
    shapes: Array
    types: Array

    @property
    def strings(self) -> Strings:
        """The pool of the rank's strings."""
        return self.work.table.strings

    @cached_property
    def works(self) -> list[Work | None]:
        """What one call of each group must at least do."""
        text = self.strings.text
        calls = [
            (text(name) or NO_OPERATOR, text(shapes), text(types))
            for name, shapes, types in zip(
                self.names.tolist(), self.shapes.tolist(), self.types.tolist(), strict=True
            )
        ]
        outputs = conv_outputs(calls)
        outputs.update(self._outputs_after(calls, outputs))
        found = [work_of(*call, outputs) for call in calls]
        return [self._sized(work, place) for place, work in enumerate(found)]

    def _outputs_after(
        self, calls: list[tuple[str, str | None, str | None]], known: Mapping[tuple[Dims, Dims], Dims]
    ) -> dict[tuple[Dims, Dims], Dims]:
        """Outputs of convolutions without a backward: what one of the next operators is given that has the same batch
        and as many channels as the weight has rows."""
        found: dict[tuple[Dims, Dims], Dims] = {}
        for place, call in enumerate(calls):
            inputs = conv_inputs(*call)
            if inputs is None or inputs in known or inputs in found:
                continue
            row = int(self.work.operator[self.longest[place]])
            outputs = (output_like(text, *inputs) for text in self._shapes_after(row))
            output = next((dims for dims in outputs if dims is not None), None)
            if output is not None:
                found[inputs] = output
        return found

    @cached_property
    def _shaped_rows(self) -> Array:
        """Host rows with shapes, by start."""
        host = self.work.host
        assert host is not None
        rows = np.flatnonzero(host["shapes"] >= 0)
        return np.asarray(rows[np.argsort(host["start_ns"][rows], kind="stable")])

    def _shapes_after(self, row: int) -> list[str | None]:
        """Shapes of the operators that the thread of a host row ran next."""
        host = self.work.host
        if host is None or row < 0:
            return []
        start = int(np.searchsorted(host["start_ns"][self._shaped_rows], host["end_ns"][row]))
        near = self._shaped_rows[start : start + 8 * _LOOK_AHEAD]
        near = near[host["thread"][near] == host["thread"][row]][:_LOOK_AHEAD]
        return [self.strings.text(int(code)) for code in host["shapes"][near]]

    def _sized(self, work: Work | None, place: int) -> Work | None:
        """A list of tensors has no types, but the kernel that joins it may name their size."""
        if work is None or work.kind != "copy" or work.write_bytes is not None or work.outputs is None:
            return work
        kernel = self.strings.text(int(self.work.table["name"][self.work.rows[self.longest[place]]])) or ""
        opaque = _OPAQUE.search(kernel)
        moved = work.outputs * int(opaque[1]) if opaque is not None else None
        return work if moved is None else replace(work, read_bytes=moved, write_bytes=moved)

    @cached_property
    def kernel_names(self) -> tuple[Array, list[str], Array]:
        """(codes, names, code's position of each row) of what ran."""
        codes, inverse = dense(self.work.table["name"][self.work.rows].astype(np.int64))
        return codes, [self.strings.text(code) or "unnamed" for code in codes.tolist()], inverse

    @cached_property
    def classes(self) -> Array:
        """Class of each row as text."""
        _, names, inverse = self.kernel_names
        return np.array([classify(name) for name in names], dtype=object)[inverse]

    @cached_property
    def shortcut(self) -> frozenset[int]:
        """Groups with a kernel that does fewer operations than the direct algorithm (Winograd, FFT)."""
        codes, names, _ = self.kernel_names
        fewer = codes[[_SHORTCUT.search(name) is not None for name in names]]
        return frozenset(self.key[np.isin(self.work.table["name"][self.work.rows], fewer)].tolist())

    @cached_property
    def ns(self) -> Array:
        """Time of each group, int64."""
        return sums(self.key, self.work.ns, len(self.names))

    def first_rows(self, operators: Array) -> Array:
        """One row of each operator among ``operators`` (a host row for each row of the work, -1 for none)."""
        host = self.work.host
        places = np.arange(len(operators))
        if host is None:
            return places[:0]
        first = np.full(len(host) + 1, -1, dtype=np.int64)
        first[operators] = places  # the last one wins; -1 falls on the entry beyond the table
        return np.asarray(first[:-1][first[:-1] >= 0])

    @cached_property
    def calls(self) -> Array:
        """Calls of each group: operators, or rows where there is no operator."""
        operator = self.work.operator
        counts = np.bincount(self.key[self.first_rows(operator)], minlength=len(self.names))
        return np.asarray(counts + np.bincount(self.key[operator < 0], minlength=len(self.names)))

    @cached_property
    def by_time(self) -> Array:
        """Rows in order of their time."""
        return np.argsort(self.work.ns, kind="stable")

    def longest_in(self, groups: Array, count: int) -> Array:
        """The row that took longest in each of ``groups``."""
        longest = np.zeros(count, dtype=np.int64)
        longest[groups[self.by_time]] = self.by_time  # the last one, which is the longest, wins
        return longest

    @cached_property
    def longest(self) -> Array:
        """The row that took longest in each group."""
        return self.longest_in(self.key, len(self.names))


def group(work: Attributed) -> Grouped:
    """Work by operator, shapes and types."""
    work = _lifted(work)
    host, operator = work.host, work.operator
    if host is None or not (operator >= 0).any():
        one = np.array([-1])
        return Grouped(work, np.zeros(len(operator), dtype=np.int64), one, one, one)
    known = np.maximum(operator, 0)
    pool = len(host.strings) + 2
    columns = [
        np.where(operator >= 0, host[name][known], -1).astype(np.int64) + 1
        for name in ("name", "shapes", "types")
    ]
    packed, key = np.unique((columns[0] * pool + columns[1]) * pool + columns[2], return_inverse=True)
    rest, types = np.divmod(packed, pool)
    names, shapes = np.divmod(rest, pool)
    return Grouped(work, key, names - 1, shapes - 1, types - 1)


def _lifted(work: Attributed) -> Attributed:
    """Halves of a convolution's backward are filed under the whole: only that has every shape."""
    host = work.host
    codes = [] if host is None else [code for name in HALVES if (code := host.strings.find(name)) >= 0]
    if host is None or not codes or work.basis != "device":
        return work
    known = np.maximum(work.operator, 0)
    above = host["parent"][known]
    half = (work.operator >= 0) & np.isin(host["name"][known], codes) & (above >= 0)
    half &= host["kind"][np.maximum(above, 0)] == _OPERATOR
    return replace(work, operator=np.where(half, above, work.operator))


def sums(groups: Array, amounts: Array, count: int) -> Array:
    # Doubles hold a trace's nanoseconds exactly (104 days).
    return np.bincount(groups, amounts, count).astype(np.int64)
