"""What each process group is for: data, tensor, pipeline, expert or context parallelism.

Frameworks say it in a group's description (``mesh_dp``, ``TENSOR_MODEL_PARALLEL_GROUP``, PyTorch's ``default_pg``).
Where they do not, the functions that issue the calls tell (``_ReduceFromModelParallelRegion``), then the operations (a
pipeline sends and receives, experts exchange all-to-all), and then the ranks: tensor parallelism needs the fastest
links and takes neighbours, data parallelism takes every n-th rank (the rank order of Megatron-LM and of PyTorch's
DeviceMesh).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trine.record.model import Group

__all__ = ["KINDS", "GroupKind", "Kind", "kind_of_caller", "kinds_of_groups"]

Kind = Literal["data", "tensor", "pipeline", "expert", "context", "world", "unknown"]
KINDS: tuple[Kind, ...] = ("data", "tensor", "pipeline", "expert", "context", "world", "unknown")

#: How it is known.
By = Literal["description", "callers", "operations", "ranks", "nothing"]

#: Words of a description, most telling first: "expert data parallel" is data parallelism among experts' copies,
#: and "data and context parallel" reduces gradients, so both are data.
_WORDS: tuple[tuple[Kind, str], ...] = (
    (
        "data",
        r"expert data|edp|data (?:modulo )?expert|data (?:and )?context|dp cp|dp shard cp|data parallel",
    ),
    ("expert", r"experts?|ep|moe|etp"),
    ("context", r"contexts?|cp|ring|ulysses"),
    ("tensor", r"tensors?|tp|sequence|sp"),
    ("pipeline", r"pipe|pipelines?|pp|embeddings?|stages?"),
    ("data", r"data|dp|ddp|fsdp|hsdp|zero|replicas?|replicate|shard|gradients?"),
    ("world", r"default|default pg|world|global|mesh default"),
)
_PATTERNS = tuple((kind, re.compile(rf"(?<![a-z0-9])(?:{words})(?![a-z])")) for kind, words in _WORDS)
#: What a description says when it says nothing.
_SILENT = re.compile(r"^(?:undefined|none|null|\d*|group[ _]?\d*|pg[ _]?\d*)$")

#: What gradients and sharded parameters are exchanged with.
_OF_DATA = frozenset({"all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "reduce"})
_PEER = frozenset({"send", "recv", "send_recv"})

#: Functions of frameworks that issue collectives of one kind, by what their names hold.
_CALLERS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        "tensor",
        re.compile(r"ModelParallelRegion|TensorParallel|LinearWithGradAccumulation|SequenceParallelRegion"),
    ),
    ("pipeline", re.compile(r"recv_forward|send_forward|recv_backward|send_backward|pipelin", re.IGNORECASE)),
    ("expert", re.compile(r"moe|token_dispatch|expert", re.IGNORECASE)),
    ("context", re.compile(r"ring_?attn|ring_?attention|context_?parallel|ulysses", re.IGNORECASE)),
    (
        "data",
        re.compile(
            r"FSDP|fully_shard|DistributedDataParallel|reduce_grads|allreduce_grad|zero_?[123]", re.IGNORECASE
        ),
    ),
)
#: Most names tell nothing, and are asked once.
_ANY_CALLER = re.compile("|".join(pattern.pattern for _, pattern in _CALLERS), re.IGNORECASE)
#: Share of a group's calls whose callers must agree before they count.
_AGREEING = 0.5


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What a group is for, and how that is known."""

    kind: Kind
    by: By


def kind_of_caller(name: str) -> Kind | None:
    """What a function that issues collectives needs them for, ``None`` where its name does not tell."""
    if _ANY_CALLER.search(name) is None:
        return None
    return next((kind for kind, pattern in _CALLERS if pattern.search(name)), None)


def kinds_of_groups(
    groups: Iterable[Group],
    calls: Mapping[str, Mapping[str, int]],
    callers: Mapping[str, Mapping[Kind, int]],
    world_size: int | None,
) -> dict[str, GroupKind]:
    """Kind of each group by its id, of the ids in ``calls`` as well.

    ``calls`` is id → operation → count, ``callers`` id → kind → calls whose callers are of it. Disjoint
    groups may share an id; they are then of one kind.
    """
    described: dict[str, list[str]] = defaultdict(list)
    members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for group in groups:
        described[group.id] += [text for text in (group.description, group.name) if text]
        if group.ranks:
            members[group.id].add(tuple(group.ranks))
    ids = {*described, *members, *calls}
    world = max((len(ranks) for each in members.values() for ranks in each), default=0)
    world = max(world, world_size or 0)
    found = {id: _described(described[id]) for id in ids}
    whole = {id for id in ids if any(len(ranks) == world for ranks in members[id])}
    smaller = any(1 < len(ranks) < world for id in ids - whole for ranks in members[id])
    kinds = {}
    for id in ids:
        kind = found[id]
        if kind in (None, "world"):
            most = Counter(callers.get(id, {})).most_common(1)
            if most and most[0][1] > _AGREEING * sum(calls.get(id, {}).values()):
                kinds[id] = GroupKind(most[0][0], "callers")
                continue
            told = _told(calls.get(id, {}), members[id], world, alone=id in whole and not smaller)
            if told.kind != "unknown":
                kinds[id] = told
                continue
        kinds[id] = GroupKind(kind or "unknown", "description" if kind else "nothing")
    return kinds


def _described(texts: Iterable[str]) -> Kind | None:
    for text in texts:
        plain = " ".join(
            re.sub(r"[^a-z0-9]+", " ", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower()).split()
        )
        if _SILENT.match(plain):
            continue
        for kind, pattern in _PATTERNS:
            if pattern.search(plain):
                return kind
    return None


def _told(calls: Mapping[str, int], members: set[tuple[int, ...]], world: int, *, alone: bool) -> GroupKind:
    """What operations and ranks tell of a group without a description. ``alone``: all ranks, and no smaller group."""
    counted = Counter(calls)
    total = sum(counted.values())
    if total and sum(counted[name] for name in _PEER) == total:
        return GroupKind("pipeline", "operations")
    sizes = {len(ranks) for ranks in members}
    if sizes and total and 2 * counted["all_to_all"] >= total and world not in sizes:
        return GroupKind("expert", "operations")
    if alone:
        return (
            GroupKind("data", "operations")
            if total and {*counted} <= _OF_DATA
            else GroupKind("world", "ranks")
        )
    strides = {_stride(ranks) for ranks in members if len(ranks) > 1}
    if world in sizes or len(strides) != 1 or world < 2:
        return GroupKind("world" if world in sizes else "unknown", "ranks" if world in sizes else "nothing")
    stride = strides.pop()
    if stride is None:
        return GroupKind("unknown", "nothing")
    return GroupKind("tensor" if stride == 1 else "data", "ranks")


def _stride(ranks: tuple[int, ...]) -> int | None:
    """The constant distance of consecutive ranks, ``None`` where it is not constant."""
    ordered = sorted(ranks)
    steps = {after - before for before, after in pairwise(ordered)}
    return steps.pop() if len(steps) == 1 else None
