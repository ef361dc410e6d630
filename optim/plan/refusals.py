"""What a software refuses to run together: rules of :file:`abilities.toml` that a layout breaks where all their conditions hold.

    context > 1 and pipeline > 1                          one of two degrees has to be 1
    zero_stage = 1 and tensor|expert|pipeline > 1         of any of these columns
    recompute = none and activation_offload != none       kinds by their words, "|" between several
    schedule = 1f1b and microbatches < pipeline           against another column
    tensor does not divide kv_heads                       a column, or a field of the model
    experts > 0 and pipeline > 1                          a field of the model in a column's place

A rule whose every condition the pins ask for is not kept: a plan says then that the software does not offer it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trine.optim.plan.layouts import DEFAULTS, KINDS, Integers
from trine.optim.plan.workload import Workload

__all__ = ["Condition", "Rule", "broken", "broken_words", "rule_of"]

Mask = npt.NDArray[np.bool_]

#: Fields of the model that a condition may begin with.
_MODEL = (("experts",),)
_CONDITION = re.compile(r"([a-z_|]+) (=|!=|>|<|does not divide) (\S+)")


@dataclass(frozen=True, slots=True)
class Condition:
    """``columns``: it holds where it does for any; one field of the model may stand there. ``values``: codes or numbers;
    ``other``: a column or a model's field instead."""

    columns: tuple[str, ...]
    operator: str
    values: tuple[int, ...]
    other: str | None

    def holds(self, rows: Mapping[str, Integers], workload: Workload) -> Mask:
        """Row by row."""
        each = [self._of(_column(name, rows, workload), rows, workload) for name in self.columns]
        return np.asarray(np.any(each, axis=0))

    def forced(self, pins: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the pins of one of its columns leave nothing else; comparisons with others are never asked for, and the model
        always is."""
        if self.other is not None:
            return False
        if self.is_of_the_model:
            return True
        for column in self.columns:
            pinned = np.asarray(pins.get(column, ()), dtype=np.int64)
            if len(pinned) and bool(self._among(pinned).all()):
                return True
        return False

    @property
    def is_of_the_model(self) -> bool:
        """Whether no layout changes it."""
        return self.columns[0] not in DEFAULTS

    def words(self, row: Mapping[str, int], workload: Workload) -> str:
        """Of a row in which it holds: ``"pipeline 2"``."""
        if self.is_of_the_model:
            return f"{getattr(workload, self.columns[0])} {self.columns[0]}"
        rows = {name: np.asarray([value]) for name, value in row.items()}
        column = next(name for name in self.columns if self._of(rows[name], rows, workload).all())
        value = KINDS[column][row[column]] if column in KINDS else row[column]
        spelled = f"{column} {value}"
        if self.other is None:
            return spelled
        other = row[self.other] if self.other in row else getattr(workload, self.other)
        relation = "below" if self.operator == "<" else "that does not divide"
        return f"{spelled} {relation} {self.other} {other}"

    def _of(self, column: Integers, rows: Mapping[str, Integers], workload: Workload) -> Mask:
        if self.other is None:
            return self._among(column)
        other = _column(self.other, rows, workload)
        if self.operator == "<":
            return np.asarray(column < other)
        return np.asarray(other % np.maximum(column, 1) != 0)

    def _among(self, column: Integers) -> Mask:
        if self.operator == ">":
            return np.asarray(column > self.values[0])
        return np.isin(column, self.values, invert=self.operator == "!=")


@dataclass(frozen=True, slots=True)
class Rule:
    """Broken where all conditions hold."""

    conditions: tuple[Condition, ...]

    @property
    def columns(self) -> frozenset[str]:
        """That have to be known before it can be asked."""
        others = {one.other for one in self.conditions if one.other in DEFAULTS}
        own = [one.columns for one in self.conditions if not one.is_of_the_model]
        return frozenset(column for columns in own for column in columns) | {*filter(None, others)}

    def broken(self, rows: Mapping[str, Integers], workload: Workload) -> Mask:
        """Row by row."""
        return np.asarray(np.all([one.holds(rows, workload) for one in self.conditions], axis=0))

    def forced(self, pins: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the pins themselves ask for what it refuses."""
        return all(one.forced(pins) for one in self.conditions)

    def words(self, row: Mapping[str, int], workload: Workload) -> str:
        """Of a row that breaks it: ``"context 2 beside pipeline 2"``."""
        return " beside ".join(one.words(row, workload) for one in self.conditions)


def _column(name: str, rows: Mapping[str, Integers], workload: Workload) -> Integers:
    """Of the layouts, or the model's field, alike in every row."""
    if name in rows:
        return rows[name]
    return np.full(len(rows["zero_stage"]), int(getattr(workload, name)), dtype=np.int64)


def broken(rules: Sequence[Rule], rows: Mapping[str, Integers], workload: Workload) -> Mask:
    """Where one of them is."""
    found = np.zeros(len(rows["zero_stage"]), dtype=bool)
    for rule in rules:
        found |= rule.broken(rows, workload)
    return found


def broken_words(rules: Sequence[Rule], row: Mapping[str, int], workload: Workload) -> str:
    """The first that a row breaks."""
    rows = {name: np.asarray([value]) for name, value in row.items()}
    return next(rule for rule in rules if rule.broken(rows, workload).all()).words(row, workload)


def rule_of(text: str) -> Rule:
    """From its line of the file. Raises ``ValueError`` for what is none: the file is this package's own."""
    return Rule(tuple(_condition(part.strip()) for part in text.split(" and ")))


def _condition(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    columns = tuple(found[1].split("|")) if found else ()
    if found is None or not (set(columns) <= set(DEFAULTS) or columns in _MODEL):
        raise ValueError(f"{text!r} is no condition of layouts")
    operator, words = found[2], found[3].split("|")
    if operator == "does not divide" or words[0] in DEFAULTS:
        if operator not in ("<", "does not divide"):
            raise ValueError(
                f'{text!r} compares columns by {operator!r}: only < and "does not divide" are understood'
            )
        return Condition(columns, operator, (), words[0])
    kinds = KINDS.get(columns[0])
    return Condition(
        columns, operator, tuple(kinds.index(word) if kinds else int(word) for word in words), None
    )
