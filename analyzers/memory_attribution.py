"""Who owns what a trace's ``[memory]`` events allocated, and what for.

A trace notes addresses and sizes, and neither thread nor cause. At the moment of each event an operator is
running: the innermost span that covers it on any thread, the last begun where several do. From there upwards
lie the operator that was called, its module, the line of Python and whatever marks the phase (autograd's
engine, ``Optimizer.step#``). Categories are inferred from these as for a memory snapshot
(:mod:`trine.record.memory_categories`); a source that says the category itself is left as it is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.memory_categories import CATEGORIES, Trait, infer
from trine.record.model import HOST_KINDS, MISSING, Rank, Table

from .allocations import pair

__all__ = ["with_memory_owners"]

Array = npt.NDArray[Any]

_OPERATOR, _ANNOTATION, _PYTHON = (HOST_KINDS.index(kind) for kind in ("operator", "annotation", "python"))

#: By kind: whether a span says who allocates.
_USEFUL = np.isin(np.arange(256), (_OPERATOR, _ANNOTATION, _PYTHON))

#: Threads that are looked at, those with most spans first: a program has one that runs and one for the backward pass.
_MOST_THREADS = 8
_MOST_FRAMES = 12

_OPTIMIZER = re.compile(
    r"^Optimizer\.step#|torch/optim/(?!lr_scheduler)|\b_?fused_adam|\b_fused_sgd|optim\w*\.py\(\d+\): step$"
)
_ZERO_GRAD = re.compile(r"^Optimizer\.zero_grad#|: zero_grad$")
_BACKWARD = re.compile(
    r"^autograd::engine::|^## ?backward|(?<!torch::autograd::)\w+Backward\d*$|AccumulateGrad$"
)
_ACCUMULATES = re.compile(r"AccumulateGrad")
_COMMUNICATION = re.compile(
    r"^(?:c10d::|nccl:|gloo:|mpi:|record_param_comms)|torch/distributed/\w*(?:fsdp|c10d|collectives)",
    re.IGNORECASE,
)
_MODULE = re.compile(r"^nn\.Module: ")
_SETUP = re.compile(r"torch/nn/.*: (?:_apply|convert|load_state_dict|reset_parameters)$|: from_pretrained$")
_RECOMPUTES = re.compile(r"torch/utils/checkpoint\.py\(\d+\): (?:recompute|unpack|backward)")
_MARKS = (
    (_OPTIMIZER, Trait.OPTIMIZER),
    (_ZERO_GRAD, Trait.ZERO_GRAD),
    (_BACKWARD, Trait.BACKWARD),
    (_ACCUMULATES, Trait.ACCUMULATES),
    (_COMMUNICATION, Trait.COMMUNICATION),
    (_MODULE, Trait.MODULE),
    (_SETUP, Trait.SETUP),
    (_RECOMPUTES, Trait.RECOMPUTES),
)

_ENGINE = "autograd::engine::evaluate_function: "
_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)$")
_NOT_THE_USERS = re.compile(
    r"^(?:nn\.Module: |<|(?:.*/)?(?:site|dist)-packages/torch/|torch/|(?:.*/)?lib/python3[^/]*/(?!(?:site|dist)-packages)|"
    r"(?:threading|contextlib|functools|multiprocessing/\w+|runpy|asyncio/\w+|_?\w*importlib\w*)(?:\.py)?\()"
)
_COUNTED = re.compile(r"_\d+(?=\.|$)")


def with_memory_owners(rank: Rank) -> Rank:
    """The rank with ``category``, ``owner`` and ``stack`` of its memory events filled in, and those of its windows.

    What has no host spans, or has owners already, stays as it is. The rank given is not changed.
    """
    windows = tuple(with_memory_owners(window) for window in rank.windows)
    if any(new is not old for new, old in zip(windows, rank.windows, strict=True)):
        rank = replace(rank, windows=windows)
    memory, host = rank.memory, rank.host
    if memory is None or host is None or not len(memory) or not len(host):
        return rank
    if (memory["category"] >= 0).any() or (memory["owner"] >= 0).any():
        return rank
    return replace(rank, memory=_attributed(memory, host))


def _attributed(memory: Table, host: Table) -> Table:
    host, rows = _with_ancestors(host, _covering(memory["time_ns"], host))
    traits, operator, frame = _looked_up(host)
    seen, inverse = np.unique(rows, return_inverse=True)
    strings = memory.strings
    owners, stacks = _words_of(host, seen, operator, frame, strings)
    of_event = np.where(seen >= 0, traits[np.maximum(seen, 0)] | int(Trait.NATIVE | Trait.STACK), 0)[inverse]
    category = np.full(len(memory), -1, dtype=np.int32)
    owner, stack = owners[inverse], stacks[inverse]
    for device in np.unique(memory["device"]):
        mine = np.flatnonzero(memory["device"] == device)
        if (memory["address"][mine] == MISSING).any():
            continue  # without addresses no release finds its allocation
        found = pair(memory["address"][mine], memory["bytes"][mine])
        told = infer(
            of_event[mine],
            memory["bytes"][mine] > 0,
            found.start,
            found.end,
            found.size,
            np.zeros(len(found.start), dtype=np.int64),
        )
        codes = np.array([strings.code(name) for name in CATEGORIES], dtype=np.int32)[told.categories]
        known = found.of >= 0
        category[mine[known]] = codes[found.of[known]]
        start = found.start[found.of]
        of_alloc = np.where(known & (start >= 0), owner[mine[np.maximum(start, 0)]], -1)
        releases = memory["bytes"][mine] < 0
        owner[mine[releases]] = of_alloc[releases]
    picked = memory.select(slice(None))
    picked.columns = {**memory.columns, "category": category, "owner": owner, "stack": stack}
    return picked


def _words_of(host: Table, seen: Array, operator: Array, frame: Array, strings: Any) -> tuple[Array, Array]:
    """Codes of owner and stack of each of the rows ``seen`` (-1: of none). Few places allocate again and again: words
    are made once for each operator, line and module."""
    owners = np.full(len(seen), -1, dtype=np.int32)
    stacks = np.full(len(seen), -1, dtype=np.int32)
    spans = np.flatnonzero(seen >= 0)
    rows = seen[spans]
    if not len(rows):
        return owners, stacks
    top, line = operator[rows], frame[rows]
    name = np.where(top >= 0, host["name"][top], -1).astype(np.int64)
    place = np.where(line >= 0, host["name"][line], np.where(top >= 0, host["stack"][top], -1)).astype(
        np.int64
    )
    # Three codes as one number: each is numbered anew, so that no two of them meet.
    key = name
    for part in (place, host["module"][rows].astype(np.int64)):
        _, first = np.unique(key, return_inverse=True)
        _, second = np.unique(part, return_inverse=True)
        key = first * (int(second.max()) + 1) + second
    _, example, number = np.unique(key, return_index=True, return_inverse=True)
    made = np.array(
        [_words(host, int(rows[at]), int(top[at]), int(line[at]), strings) for at in example], dtype=np.int32
    )
    owners[spans], stacks[spans] = made[number].T
    return owners, stacks


def _covering(times: Array, host: Table) -> Array:
    """For each time (n,) the row of the innermost span of any thread that covers it, the last begun of several; -1 for none."""
    best = np.full(len(times), -1, dtype=np.int64)
    began = np.full(len(times), MISSING, dtype=np.int64)
    useful = _USEFUL[host["kind"]]
    for thread in _threads(host["thread"][useful]):
        rows = np.flatnonzero(useful & (host["thread"] == thread))
        start, end = host["start_ns"][rows], host["end_ns"][rows]
        if (start[1:] < start[:-1]).any() or ((start[1:] == start[:-1]) & (end[1:] > end[:-1])).any():
            rows = rows[np.lexsort((-end, start))]
        place = np.searchsorted(host["start_ns"][rows], times, side="right") - 1
        row = np.where(place >= 0, rows[np.maximum(place, 0)], -1)
        parent, end = host["parent"], host["end_ns"]
        for _ in range(256):
            out = (row >= 0) & (end[np.maximum(row, 0)] < times)
            if not out.any():
                break
            row[out] = parent[row[out]]
        else:
            row[(row >= 0) & (end[np.maximum(row, 0)] < times)] = -1
        start = np.where(row >= 0, host["start_ns"][np.maximum(row, 0)], MISSING)
        later = start > began
        best[later], began[later] = row[later], start[later]
    return best


def _threads(thread: Array) -> Array:
    """The threads with most spans."""
    if len(thread) and thread.min() >= 0 and thread.max() < 1 << 16:
        counts = np.bincount(thread)
        busiest = np.argsort(-counts, kind="stable")[:_MOST_THREADS]
        return np.asarray(busiest[counts[busiest] > 0])
    threads, counts = np.unique(thread, return_counts=True)
    return np.asarray(threads[np.argsort(-counts, kind="stable")[:_MOST_THREADS]])


def _with_ancestors(host: Table, rows: Array) -> tuple[Table, Array]:
    """The spans of ``rows`` and all around them alone, and the rows in that table: most spans allocate nothing."""
    kept = np.zeros(len(host), dtype=bool)
    level = np.unique(rows[rows >= 0])
    while len(level):
        kept[level] = True
        above = host["parent"][level]
        above = np.unique(above[above >= 0])
        level = above[~kept[above]]
    number = np.cumsum(kept) - 1
    part = host.select(np.flatnonzero(kept))
    part.columns["parent"] = np.where(part["parent"] >= 0, number[np.maximum(part["parent"], 0)], -1)
    return part, np.where(rows >= 0, number[np.maximum(rows, 0)], -1)


def _looked_up(host: Table) -> tuple[Array, Array, Array]:
    """For each span: the traits of all spans around it, the outermost operator of the chain that it ends, and the
    nearest line of the user's Python around it (-1 for none)."""
    kind, parent = host["kind"], host["parent"]
    used, name = np.unique(host["name"], return_inverse=True)
    words = [host.strings.text(int(code)) or "" for code in used]
    marks = np.array([_traits(word) for word in words], dtype=np.int64)[name]
    if (host["stack"] >= 0).any():  # old traces give operators a stack, and no spans of Python
        used_stacks, stack = np.unique(host["stack"], return_inverse=True)
        lines = [(host.strings.text(int(code)) or "").split(";") for code in used_stacks]
        marks |= np.array([np.bitwise_or.reduce([0, *(_traits(line) for line in of)]) for of in lines])[stack]
    theirs = np.array([_users(word) for word in words])[name]
    rows = np.arange(len(host))
    operator = np.where(kind == _OPERATOR, rows, -1)
    up = np.where((parent >= 0) & (kind == _OPERATOR) & (kind[parent] == _OPERATOR), parent, rows)
    line = np.where((kind == _PYTHON) & theirs, rows, -1)
    above = np.where(parent >= 0, parent, rows)
    for _ in range(16):  # 2^16 levels
        further = above[above]
        marks |= marks[above]
        line = np.where(line < 0, line[above], line)
        up = up[up]
        if (further == above).all():
            break
        above = further
    return marks, np.where(operator >= 0, up, operator), line


def _traits(name: str) -> int:
    found = 0
    for pattern, trait in _MARKS:
        if pattern.search(name):
            found |= int(trait)
    return found


def _words(host: Table, row: int, top: int, line: int, strings: Any) -> tuple[int, int]:
    """Codes of the owner and of the stack, innermost first."""
    text = host.strings.text
    operator = (text(int(host["name"][top])) or "").removeprefix(_ENGINE) if top >= 0 else None
    module = text(int(host["module"][row])) or (text(int(host["module"][top])) if top >= 0 else None)
    frames: list[str] = []
    at, steps = line, 0
    while at >= 0 and len(frames) < _MOST_FRAMES and steps < 512:
        steps += 1
        if host["kind"][at] == _PYTHON:
            frames.append(text(int(host["name"][at])) or "")
        at = int(host["parent"][at])
    if not frames and top >= 0:
        frames = (text(int(host["stack"][top])) or "").split(";")
    frames = [frame for frame in frames if frame]
    mine = next((frame for frame in frames if _users(frame)), None)
    owner = operator
    if mine is not None:
        owner = _as_line(mine)
    elif module:
        owner = f"{_COUNTED.sub('', module)} {operator or ''}".strip()
    elif operator is None:
        owner = text(int(host["name"][row]))
    lines = [f"operator {operator}"] if operator else []
    lines += [f"module {module}"] if module else []
    lines += [_as_line(frame) for frame in frames[:_MOST_FRAMES]]
    return strings.code(owner), strings.code("\n".join(lines) or None)


@lru_cache(maxsize=4096)
def _users(frame: str) -> bool:
    """Whether a frame is a line of the user's own Python, or of a library's above PyTorch."""
    return bool(_FRAME.match(frame)) and not _NOT_THE_USERS.match(frame)


@lru_cache(maxsize=4096)
def _as_line(frame: str) -> str:
    """``a/b/model.py(39): forward`` as ``b/model.py:39 forward``."""
    match = _FRAME.match(frame)
    if match is None:
        return frame[:160]
    short = "/".join(match["file"].replace("\\", "/").split("/")[-2:])
    return f"{short}:{match['line']} {match['name']}"[:160]
