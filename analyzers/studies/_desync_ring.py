"""What one rank's flight recorder holds, as small columns that can be laid beside other ranks'."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trine.analyzers.operations import canonical_operation
from trine.record.model import Array, Group, Rank, Table

__all__ = ["COMPLETED", "SCHEDULED", "STARTED", "Ring", "Signature", "numel", "ring_of"]

#: States in the order in which an entry passes through them.
SCHEDULED, STARTED, COMPLETED = 0, 1, 2
_STATES = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}

#: Entries of a rank that are laid beside others': the newest, which is where a job stands.
MOST_CALLS = 2_000
#: Distinct stacks and frames of each that are kept, newest first.
MOST_STACKS, MOST_FRAMES = 64, 12

#: Operations whose buffers all ranks must give alike, by which side. The list forms of all-gather and
#: reduce-scatter, all-to-all, gather and scatter may be uneven.
_EVEN_INPUT = re.compile(
    r"^(?!.*sparse)_?(all_?reduce|broadcast|_?broadcast_oop|reduce(?!_scatter)|_?reduce_oop|all_gather_(base|single|into_tensor)"
    r"|reduce_scatter_(base|single|tensor)|allgather_base)",
    re.IGNORECASE,
)
_UNTYPED = frozenset({"barrier", "coalesced", "gather", "scatter"})


@dataclass(frozen=True, slots=True)
class Signature:
    """What a rank asked for. ``elements`` are of the input; None where the dump gives no sizes."""

    operation: str  # as the source names it
    family: str  # one spelling for each operation
    elements: int | None
    even: bool  # whether all ranks must give as many elements
    in_shapes: str | None
    out_shapes: str | None
    types: str | None


@dataclass(frozen=True, slots=True)
class Ring:
    """One rank. The columns have a row an entry, in the order of the program; ``signature``, ``group`` and
    ``stack`` are places in the tuples of the same name (−1: no stack).

    ``status`` is group → (last enqueued, last started, last completed), −1 where not said.
    """

    rank: int
    record: Array
    group: Array
    sequence: Array
    peer: Array  # bool: point-to-point
    signature: Array
    state: Array
    created_ns: Array
    stack: Array
    groups: tuple[Group, ...]
    signatures: tuple[Signature, ...]
    stacks: tuple[str, ...]
    status: Mapping[str, tuple[int, int, int]]
    lost: int  # older entries that the ring no longer held
    says_states: bool  # whether the backend tells started from scheduled
    backends: tuple[str, ...]


def ring_of(rank: Rank) -> Ring | None:
    """The rank's ring; None where it has no dump, or an empty one."""
    table = rank.flight_recorder
    if table is None or not len(table):
        return None
    about = rank.metadata.get("flight_recorder") or {}
    lost = int(about.get("lost") or 0)
    states = _states(table)
    if len(table) > MOST_CALLS:
        keep = np.arange(len(table)) >= len(table) - MOST_CALLS
        keep |= (states != COMPLETED) & (np.cumsum(states[::-1] != COMPLETED)[::-1] <= MOST_CALLS)
        lost += int((~keep).sum())
        table, states = table.select(keep), states[keep]
    signature, signatures = _signatures(table)
    groups, places = _groups(rank, table)
    stack, stacks = _stacks(table)
    return Ring(
        rank=rank.rank,
        record=table["record"],
        group=places,
        sequence=table["sequence"],
        peer=table["is_peer"] == 1,
        signature=signature,
        state=states,
        created_ns=table["created_ns"],
        stack=stack,
        groups=groups,
        signatures=signatures,
        stacks=stacks,
        status=_status(rank.metadata.get("flight_status")),
        lost=lost,
        says_states=bool(np.isin(states, (STARTED,)).any()) or "nccl" in (about.get("backends") or ()),
        backends=tuple(about.get("backends") or ()),
    )


#: No tensor has a dimension of more digits.
_MOST_DIGITS = 18


def numel(shapes: str | None) -> int | None:
    """Elements of shapes written as ``[4, 8], [2]``; None where there is no shape, or none that a buffer can have."""
    if not shapes:
        return None
    total = 0
    for shape in re.findall(r"\[([^\]]*)\]", shapes):
        sizes = [part.strip() for part in shape.split(",") if part.strip()]
        if not all(size.lstrip("-").isdecimal() for size in sizes):
            return None
        if any(len(size) > _MOST_DIGITS for size in sizes):
            return None
        total += math.prod(int(size) for size in sizes)
    return total if abs(total) < 1 << 63 else None


def _states(table: Table) -> Array:
    codes = np.array(
        [_STATES.get(text, SCHEDULED) for text in table.strings.values] + [SCHEDULED], dtype=np.int8
    )
    return codes[table["state"]]


def _signatures(table: Table) -> tuple[Array, tuple[Signature, ...]]:
    names = ("operation", "in_shapes", "out_shapes", "in_types", "out_types")
    rows = np.stack([table[name] for name in names], axis=1)
    distinct, place = np.unique(rows, axis=0, return_inverse=True)
    text = table.strings.text
    found = []
    for operation, shapes, outs, in_types, out_types in distinct.tolist():
        name = text(operation) or "unknown"
        family = family_of(name)
        types = text(in_types) or text(out_types)
        found.append(
            Signature(
                operation=name,
                family=family,
                elements=numel(text(shapes)),
                even=bool(_EVEN_INPUT.match(name)) and family != "barrier",
                in_shapes=_short(text(shapes)),
                out_shapes=_short(text(outs)),
                types=None if family in _UNTYPED or not types else _distinct(types),
            )
        )
    return place.reshape(-1).astype(np.int32), tuple(found)


def family_of(operation: str) -> str:
    """One spelling for each operation; a barrier stays one however it is carried out."""
    name = operation.partition(" ")[0]
    return "barrier" if "barrier" in name.lower() else canonical_operation(name)


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= 80 else f"{text[:70]}… ({text.count('[')} tensors)"


def _distinct(types: str) -> str:
    return ", ".join(dict.fromkeys(types.split(", ")))


def _groups(rank: Rank, table: Table) -> tuple[tuple[Group, ...], Array]:
    known = {group.id: group for group in rank.groups}
    codes, place = np.unique(table["group"], return_inverse=True)
    names = [table.strings.text(int(code)) or "0" for code in codes]
    groups = list(known.values())
    where = {group.id: position for position, group in enumerate(groups)}
    for name in names:
        if name not in where:
            where[name] = len(groups)
            groups.append(Group(name, name, None, ()))
    return tuple(groups), np.array([where[name] for name in names], dtype=np.int32)[place.reshape(-1)]


def _stacks(table: Table) -> tuple[Array, tuple[str, ...]]:
    """Distinct stacks, those of the newest entries where there are too many."""
    codes = table["stack"]
    _, last = np.unique(codes[::-1], return_index=True)
    newest = codes[::-1][np.sort(last)]
    kept = [int(code) for code in newest if code >= 0][:MOST_STACKS]
    place = np.full(max(int(codes.max(initial=-1)) + 2, 1), -1, dtype=np.int32)
    for position, code in enumerate(kept):
        place[code] = position
    stacks = tuple(_trimmed(table.strings.text(code) or "") for code in kept)
    return place[codes], stacks


def _trimmed(stack: str) -> str:
    """The frames of the user's own code first: they say where; then PyTorch's innermost."""
    frames = [frame for frame in stack.split(";") if frame]
    own = [frame for frame in frames if not _is_library(frame)]
    return ";".join([*own[: MOST_FRAMES - 3], *[frame for frame in frames if _is_library(frame)][:3]])


def _is_library(frame: str) -> bool:
    path = frame.rpartition("(")[0].replace("\\", "/")
    return (
        "/torch/" in path or "/site-packages/" in path or "/lib/python" in path or path.startswith("<frozen")
    )


def _status(found: Any) -> dict[str, tuple[int, int, int]]:
    if not isinstance(found, Mapping):
        return {}
    names = ("last_enqueued", "last_started", "last_completed")
    return {
        str(group): tuple(-1 if status.get(name) is None else int(status[name]) for name in names)  # type: ignore[misc]
        for group, status in found.items()
        if isinstance(status, Mapping)
    }
