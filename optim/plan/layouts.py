"""Layouts, a row each: how ranks share a step's work, and what is done to fit and to hurry it. Columns of numpy.

A search weighs hundreds of thousands of them, so a layout is a row of :class:`Layouts` and every formula of the planner
takes whole columns. Kinds (schedules, recomputation, …) are codes: positions in the tuples below.

    layouts = Layouts.of(tensor=[1, 2, 4], pipeline=2, data=[8, 4, 2], micro_batch=1, microbatches=16)
    layouts.devices            array([16, 16, 16])
    layouts.row(0)             {"tensor": 1, "pipeline": 2, …, "schedule": "1f1b"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.errors import UsageError

__all__ = [
    "COMPRESSIONS",
    "DEFAULTS",
    "KINDS",
    "OFFLOADED",
    "OFFLOADS",
    "PRECISIONS",
    "RECOMPUTATIONS",
    "SCHEDULES",
    "Integers",
    "Layouts",
]

Integers = npt.NDArray[np.int64]

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe-v",
    "interleaved-zb",
)
#: ``selective``: attention's scores alone. ``budget``: as many whole layers as make the memory fit (``recomputed_layers``).
RECOMPUTATIONS = ("none", "selective", "full", "budget")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
#: Where optimizer state, parameters or activations lie. ``remote``: another node's memory; planned and costed, not run.
OFFLOADS = ("none", "cpu", "nvme", "remote")
#: Columns of :data:`OFFLOADS`.
OFFLOADED = ("optimizer_offload", "parameter_offload", "activation_offload")
COMPRESSIONS = ("none", "bf16", "fp16", "int8", "qsgd", "powersgd", "onebit", "terngrad")

#: Columns that hold codes, and what the codes stand for.
KINDS: Mapping[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTATIONS,
    "precision": PRECISIONS,
    **dict.fromkeys(OFFLOADED, OFFLOADS),
    "compression": COMPRESSIONS,
}

#: Every column and the value it has where none is given.
#:
#: ``data`` counts all ranks that see different batches, so devices = data · context · tensor · pipeline; ``shard`` of them
#: (times ``context``) share ZeRO's state, 0 for all; ``expert`` of data · context · tensor ranks share a layer's experts,
#: or of as many tensor groups where the software splits each expert over one.
#: ``sequence``: norms and dropout split along the sequence over the tensor ranks (Korthikanti 2022). ``chunks``: stages a
#: rank. ``microbatches``: of a step, a rank. ``recomputed_layers``: of a stage, under ``budget``. ``two_level``: gradients are
#: reduced inside a node first. ``bucket_bytes`` 0: the stack's own.
DEFAULTS: Mapping[str, int] = {
    "data": 1,
    "shard": 0,
    "zero_stage": 0,
    "tensor": 1,
    "sequence": 0,
    "context": 1,
    "expert": 1,
    "pipeline": 1,
    "chunks": 1,
    "schedule": SCHEDULES.index("1f1b"),
    "micro_batch": 1,
    "microbatches": 1,
    "recompute": 0,
    "recomputed_layers": 0,
    "precision": PRECISIONS.index("bf16"),
    "optimizer_offload": 0,
    "parameter_offload": 0,
    "activation_offload": 0,
    "bucket_bytes": 0,
    "compression": 0,
    "two_level": 0,
}


@dataclass(frozen=True, slots=True)
class Layouts:
    """Columns of equal length, by name; all names of :data:`DEFAULTS`, and no others."""

    columns: Mapping[str, Integers]

    @classmethod
    def of(cls, **given: Any) -> Layouts:
        """From scalars, sequences, and kinds by their words; the rest is :data:`DEFAULTS`. Raises ``UsageError``."""
        unknown = sorted(set(given) - set(DEFAULTS))
        if unknown:
            raise UsageError(f"a layout has no {unknown[0]!r}: one of {', '.join(DEFAULTS)}")
        coded = {name: _coded(name, given.get(name, default)) for name, default in DEFAULTS.items()}
        try:
            arrays = np.broadcast_arrays(*coded.values())
        except ValueError:
            lengths = {name: len(value) for name, value in coded.items() if value.ndim and len(value) > 1}
            raise UsageError(f"a layout's columns must be of one length, not {lengths}") from None
        return cls({name: np.atleast_1d(array).copy() for name, array in zip(coded, arrays, strict=True)})

    def __len__(self) -> int:
        return len(self.columns["data"])

    def __getitem__(self, name: str) -> Integers:
        return self.columns[name]

    @property
    def devices(self) -> Integers:
        """Of the whole job."""
        return self["data"] * self["context"] * self["tensor"] * self["pipeline"]

    @property
    def global_batch(self) -> Integers:
        """Sequences a step."""
        return self["data"] * self["micro_batch"] * self["microbatches"]

    @property
    def shard_ranks(self) -> Integers:
        """Ranks that share ZeRO's state: the shard group (all of data where none is given) times context."""
        return np.where(self["shard"] > 0, self["shard"], self["data"]) * self["context"]

    def is_kind(self, column: str, *words: str) -> npt.NDArray[np.bool_]:
        """Where a column of kinds is one of these words."""
        return np.isin(self[column], [KINDS[column].index(word) for word in words])

    def take(self, rows: Any) -> Layouts:
        """These rows: positions, or a mask."""
        return Layouts({name: column[rows] for name, column in self.columns.items()})

    def with_changes(self, **given: Any) -> Layouts:
        """A copy with some columns replaced, as in :meth:`of`."""
        return Layouts.of(**{**self.columns, **given})

    def row(self, position: int) -> dict[str, int | str]:
        """One layout as plain values, kinds by their words."""
        found: dict[str, int | str] = {}
        for name, column in self.columns.items():
            value = int(column[position])
            found[name] = KINDS[name][value] if name in KINDS else value
        return found

    @staticmethod
    def joined(parts: list[Layouts]) -> Layouts:
        """One after the other."""
        return Layouts({name: np.concatenate([part[name] for part in parts]) for name in DEFAULTS})


def _coded(name: str, value: Any) -> Integers:
    if name in KINDS:
        if isinstance(value, np.ndarray) and value.dtype.kind == "i":
            beyond = (value < 0) | (value >= len(KINDS[name]))
            if beyond.any():
                raise UsageError(f"{name} has no code {value[beyond].flat[0]}")
            return value.astype(np.int64)
        words = [value] if isinstance(value, str | int | np.integer) else list(value)
        codes = np.asarray([_code(name, word) for word in words], dtype=np.int64)
        return codes[0] if isinstance(value, str | int | np.integer) else codes
    found = np.asarray(value)
    if found.dtype.kind not in "iub":
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    least = 0 if DEFAULTS[name] == 0 else 1
    if (found < least).any():
        raise UsageError(f"{name} must be at least {least}, not {found.min()}")
    return found.astype(np.int64)


def _code(name: str, word: Any) -> int:
    if isinstance(word, str):
        if word not in KINDS[name]:
            raise UsageError(f"no {name} is called {word!r}: one of {', '.join(KINDS[name])}")
        return KINDS[name].index(word)
    if not 0 <= int(word) < len(KINDS[name]):
        raise UsageError(f"{name} has no code {word}")
    return int(word)
