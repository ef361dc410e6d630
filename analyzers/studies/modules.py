"""Time by module: whose kernels ran, forward and backward.

A kernel belongs to the module in whose forward its operator was called. A backward operator carries its
forward operator's number in autograd (``sequence``) and is filed under that one's module. Work of no module
is filed under the annotation around it (``Optimizer.step#AdamW.step``, ``record_function``). Where a trace
has no modules at all, annotations are all there is, and the result says so.

Instances are counted together: ``Model.Block_0.Linear_3`` and ``Model.Block_1.Linear_7`` are two of
``Model.Block.Linear``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from trine.analyzers._tabular import Columns, Tabular
from trine.record.model import HOST_KINDS, MISSING, Table

from ._attribution import Attributed, attribute, dense, enclosing
from ._scope import Scope, Whole

__all__ = ["KEY", "ModuleTime", "Modules", "join", "reduce", "to_json"]

KEY = "modules"

Array = npt.NDArray[Any]

#: Rows of the result, by time; a rank keeps four times as many.
MOST_ROWS = 50
#: Share of the work that must be filed somewhere before there is a result.
LEAST_SHARE = 0.01

_ANNOTATION = HOST_KINDS.index("annotation")
_OPERATOR = HOST_KINDS.index("operator")
#: Before an annotation's name, to tell it from a module's path.
_ANNOTATED = "@"
#: Annotations that say nothing about which part of a program works.
_EMPTY_ANNOTATION = re.compile(r"ProfilerStep#|DataLoader|enumerate\(|gloo:|nccl:|PyTorch Profiler")
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+")
_INSTANCE = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True)
class ModuleTime(Tabular):
    """A module by its path of classes. ``instances`` of it worked, ``kernels`` in all; times include what lies inside,
    ``self_ns`` does not. ``longest`` is the instance with most time (its path, its ns)."""

    COLUMNS: ClassVar[Columns] = {"longest": ("longest_path", "longest_ns")}

    path: str
    instances: int
    kernels: int
    forward_ns: int
    backward_ns: int
    self_ns: int
    longest: tuple[str, int]

    @property
    def ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns


@dataclass(frozen=True, slots=True)
class Part:
    """Of one rank: instance path → (kernels, forward ns, backward ns), each without what lies inside."""

    has_modules: bool
    basis: Literal["device", "host"]
    total_ns: int
    instances: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Modules(Tabular):
    """``named_by`` is ``module``, or ``annotation`` where the source has no modules. Sums over ranks, ns."""

    named_by: Literal["module", "annotation"]
    basis: Literal["device", "host"]
    ranks: int
    total_ns: int
    attributed_ns: int
    rows: tuple[ModuleTime, ...]


def reduce(scope: Scope) -> Part | None:
    """One rank's time by instance; None where nothing ran on a known operator."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    total, has_modules = 0, False
    basis: Literal["device", "host"] = "host"
    for rank, selected in scope.traced:
        work = attribute(rank, selected)
        if work is None or work.host is None:
            continue
        basis = work.basis
        total += int(work.ns.sum())
        has_modules |= bool((work.host["module"] >= 0).any())
        _add(work, work.host, sums)
    if not total:
        return None
    kept = sorted(sums.items(), key=lambda item: -(item[1][1] + item[1][2]))[: 8 * MOST_ROWS]
    return Part(has_modules, basis, total, {path[:200]: (n, f, b) for path, (n, f, b) in kept})


def _add(work: Attributed, host: Table, sums: dict[str, list[int]]) -> None:
    """Add work to the sums by its instance's path."""
    rows = np.where(work.operator >= 0, work.operator, work.launch)
    spans, inverse = dense(rows)
    known = spans >= 0
    labels = np.full(len(spans), -1, dtype=np.int64)
    labels[known] = _labels(host, spans[known])
    backward = np.zeros(len(spans), dtype=bool)
    # The engine's own operator stands above the one that launched: it is what carries the number.
    above = np.full(len(spans), -1, dtype=np.int64)
    above[inverse] = work.outermost
    calls = np.flatnonzero(above >= 0)
    backward[calls] = host["forward_thread"][above[calls]] != MISSING
    wanting = calls[backward[calls] & ~_in_module(host, labels[calls])]
    forward = _forward_of(host, above[wanting])
    found = forward >= 0
    labels[wanting[found]] = _labels(host, forward[found])
    annotated = ~_in_module(host, labels)
    packed = np.where(labels >= 0, (labels * 2 + annotated) * 2 + backward, -1)
    pairs, place = np.unique(packed[inverse], return_inverse=True)
    ns, count = np.bincount(place, work.ns, len(pairs)).astype(np.int64), np.bincount(place)
    for pair, amount, number in zip(pairs.tolist(), ns.tolist(), count.tolist(), strict=True):
        if pair >= 0:
            text = host.strings.text(pair // 4) or ""
            entry = sums[_ANNOTATED + text if pair // 2 % 2 else text]
            entry[0] += number
            entry[1 + pair % 2] += amount


def _labels(host: Table, rows: Array) -> Array:
    """Code of each row's module, else of the annotation around it, -1 of neither."""
    module = host["module"][rows].astype(np.int64)
    lacking = np.flatnonzero(module < 0)
    if not len(lacking):
        return module
    annotations = np.flatnonzero(host["kind"] == _ANNOTATION)
    names, place = dense(host["name"][annotations].astype(np.int64))
    speaks = np.array(
        [not _EMPTY_ANNOTATION.match(host.strings.text(code) or "") for code in names.tolist()], dtype=bool
    )
    speaking = np.zeros(len(host), dtype=bool)
    speaking[annotations] = speaks[place]
    if speaking.any():
        around = enclosing(host, rows[lacking], speaking)
        module[lacking] = np.where(around >= 0, host["name"][np.maximum(around, 0)], -1)
    return module


def _in_module(host: Table, labels: Array) -> Array:
    """Whether labels are modules' rather than annotations'."""
    return np.asarray(np.isin(labels, np.unique(host["module"])) & (labels >= 0))


def _forward_of(host: Table, rows: Array) -> Array:
    """The forward operator of each backward operator: the last with its number that had started before, -1 of none.

    Operators that make no graph bear the number of the next that does, so the last is the one.
    """
    forward = np.flatnonzero(
        (host["kind"] == _OPERATOR) & (host["sequence"] != MISSING) & (host["forward_thread"] == MISSING)
    )
    if not len(forward) or not len(rows):
        return np.full(len(rows), -1, dtype=np.int64)
    forward = forward[np.lexsort((host["start_ns"][forward], host["sequence"][forward]))]
    numbers = host["sequence"][forward]
    wanted = host["sequence"][rows]
    low, high = np.searchsorted(numbers, wanted, "left"), np.searchsorted(numbers, wanted, "right")
    place = high - 1
    for _ in range(8):  # the same number in another thread, or of a later step
        late = (place >= low) & (host["start_ns"][forward[np.maximum(place, 0)]] > host["start_ns"][rows])
        if not late.any():
            break
        place = np.where(late, place - 1, place)
    return np.asarray(np.where((place >= low) & (wanted != MISSING), forward[np.maximum(place, 0)], -1))


def join(parts: Mapping[int, Part], whole: Whole) -> Modules | str:
    """All ranks together; a sentence where nothing names the parts of the program."""
    advice = "profile with with_stack=True and with_modules=True, or put torch.profiler.record_function around its parts"
    if not parts:
        return f"no operator was recorded; {advice}"
    basis: Literal["device", "host"] = (
        "device" if any(p.basis == "device" for p in parts.values()) else "host"
    )
    used = [part for part in parts.values() if part.basis == basis]
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for part in used:
        for path, amounts in part.instances.items():
            for column, amount in enumerate(amounts):
                sums[path][column] += amount
    total = sum(part.total_ns for part in used)
    attributed = sum(forward + backward for _, forward, backward in sums.values())
    if attributed < LEAST_SHARE * total:
        return f"nothing names the parts of the program; {advice}"
    named_by: Literal["module", "annotation"] = "module" if any(p.has_modules for p in used) else "annotation"
    return Modules(named_by, basis, len(used), total, attributed, _rows(sums))


def _rows(sums: Mapping[str, list[int]]) -> tuple[ModuleTime, ...]:
    """Instances added up along their paths, and by class."""
    inclusive: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
    own: dict[str, int] = defaultdict(int)
    for path, (kernels, forward, backward) in sums.items():
        parts = _components(path)
        classes = tuple(_class_of(part) for part in parts)
        own[".".join(classes)] += forward + backward
        for depth in range(1, len(parts) + 1):
            entry = inclusive[".".join(classes[:depth])][".".join(parts[:depth])]
            for column, amount in enumerate((kernels, forward, backward)):
                entry[column] += amount
    rows = [_row(name, instances, own.get(name, 0)) for name, instances in inclusive.items()]
    return tuple(sorted(rows, key=lambda row: (-row.ns, row.path))[:MOST_ROWS])


def _row(name: str, instances: Mapping[str, list[int]], own: int) -> ModuleTime:
    longest = max(instances, key=lambda path: instances[path][1] + instances[path][2])
    kernels, forward, backward = (sum(column) for column in zip(*instances.values(), strict=True))
    most = instances[longest]
    return ModuleTime(name, len(instances), kernels, forward, backward, own, (longest, most[1] + most[2]))


@lru_cache(maxsize=8192)
def _components(path: str) -> tuple[str, ...]:
    """A path's parts; an annotation is one, whatever it holds."""
    if path.startswith(_ANNOTATED):
        return (path.removeprefix(_ANNOTATED),)
    return tuple(part for part in re.split(r"\.(?![^(]*\))", path) if part)


@lru_cache(maxsize=8192)
def _class_of(part: str) -> str:
    """``Linear_3`` → ``Linear``; a scripted module's ``layer1(Sequential)::forward`` → ``Sequential``; of an
    annotation, which numbers its parts, ``FSDP::pre_forward (blocks.*)``."""
    scripted = re.fullmatch(r"[\w\[\]]+\((\w+)\)(?:::\w+)?", part)
    return scripted[1] if scripted is not None else _NUMBER.sub("*", _INSTANCE.sub("", part))


def to_json(result: Modules) -> dict[str, Any]:
    """The contract's form."""
    return {
        "named_by": result.named_by,
        "basis": result.basis,
        "ranks": result.ranks,
        "total_ns": result.total_ns,
        "attributed_ns": result.attributed_ns,
        "rows": [
            {
                "module": row.path,
                "instances": row.instances,
                "kernels": row.kernels,
                "total_ns": row.ns,
                "forward_ns": row.forward_ns,
                "backward_ns": row.backward_ns,
                "self_ns": row.self_ns,
                "longest": {"instance": row.longest[0], "total_ns": row.longest[1]},
            }
            for row in result.rows
        ],
    }
