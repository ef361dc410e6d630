"""Chains and small kernels of one rank: from grouped work to rows."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.record.model import DEVICE_KINDS, HOST_KINDS

from ._attribution import dense
from ._fusion import SMALL_NS, Chains, find_chains, small_kernels
from ._grouped import Grouped
from ._kernel_part import KEPT, kernel_word
from ._kernel_rows import NO_CHAINS, ChainTime, ChainTotals
from ._products import Work, plain_name
from ._score_attention import ScoreAttention, attention_by_hand

__all__ = ["chain_rows", "score_attention", "small_rows"]

Array = npt.NDArray[Any]

_COMPUTE = DEVICE_KINDS.index("compute")
_ANNOTATION = HOST_KINDS.index("annotation")
#: What a compiler of the model does not touch: gradients added up, buckets filled, collectives prepared.
_NOT_THE_MODEL = re.compile(r"torch(?:::|\.)distributed|AccumulateGrad|c10d::")
#: Spans in which the optimizer works: its fusion is another change than the model's.
_OPTIMIZER = ("Optimizer.", "optimizer", "## optimizer")
#: Inputs of an operator that are compared with what the one before wrote.
_INPUTS = 3
#: Operators named of a chain.
_NAMED = 8
_MOST = 2**62  # a broadcast of odd shapes may be larger than an integer
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def small_rows(grouped: Grouped) -> tuple[tuple[int, int, int], dict[str, int]]:
    """(calls, ns, gap ns) of small kernels, and the operators that launch most of them (name → calls)."""
    work = grouped.work
    table, rows = work.table, work.rows
    kernel = table["kind"][rows] == _COMPUTE
    stream, start, end = (
        _stream(grouped)[kernel],
        table["start_ns"][rows][kernel],
        table["end_ns"][rows][kernel],
    )
    small = small_kernels(stream, start, end)
    codes = grouped.names[grouped.key[kernel][end - start < SMALL_NS]]
    names, counts = np.unique(codes, return_counts=True)
    top = np.argsort(-counts, kind="stable")[:10]
    named = {
        grouped.strings.text(int(names[one])) or "(no operator)": int(counts[one]) for one in top.tolist()
    }
    return (small.calls, small.total_ns, small.gap_ns), named


def score_attention(grouped: Grouped) -> ScoreAttention | None:
    """Attention by hand, as the order of the device's work shows it."""
    _, first = _units(grouped)
    moves = (grouped.classes == "elementwise") & (grouped.work.table["kind"][grouped.work.rows] == _COMPUTE)
    return attention_by_hand(grouped, first, np.minimum.reduceat(moves, first).astype(bool))


def chain_rows(grouped: Grouped) -> tuple[tuple[ChainTime, ...], ChainTotals]:
    """Chains by their operators, the longest in total first, and (count, kernels, ns, low, mid, high) of all."""
    unit, first = _units(grouped)
    ns = np.bincount(unit, grouped.work.ns, len(first)).astype(np.int64)
    kernels = np.bincount(unit, minlength=len(first))
    fusible = np.minimum.reduceat(_fusible(grouped), first).astype(bool)
    key = grouped.key[first]
    outputs, inputs, read, largest = (column[key] for column in _traffic(grouped.works))
    known = grouped.work.operator[first] >= 0
    read, outputs = np.where(known, read, np.nan), np.where(known, outputs, -1)
    chains = find_chains(_stream(grouped)[first], fusible, kernels, ns, outputs, inputs, read, largest)
    if not len(chains.first):
        return (), NO_CHAINS
    saved = chains.saved.sum(axis=0)
    totals = (
        len(chains.first),
        int(chains.kernels.sum()),
        int(chains.ns.sum()),
        round(saved[0]),
        round(saved[1]),
        round(saved[2]),
    )
    label = np.where(known, key, len(grouped.names) + grouped.kernel_names[2][first])
    return _by_operators(grouped, chains, label), totals


def _stream(grouped: Grouped) -> Array:
    table, rows = grouped.work.table, grouped.work.rows
    pairs = np.stack((table["device"][rows], table["stream"][rows]), axis=1)
    changes = np.concatenate(([False], (pairs[1:] != pairs[:-1]).any(axis=1)))
    return np.cumsum(changes)  # the work is in order of device and stream


def _units(grouped: Grouped) -> tuple[Array, Array]:
    """Unit of each row (an operator's kernels in a row on one stream), and the first row of each unit."""
    stream, operator = _stream(grouped), grouped.work.operator
    new = np.ones(len(operator), dtype=bool)
    new[1:] = (stream[1:] != stream[:-1]) | (operator[1:] != operator[:-1]) | (operator[1:] < 0)
    return np.cumsum(new) - 1, np.flatnonzero(new)


def _fusible(grouped: Grouped) -> Array:
    """Of each row, whether a compiler could fuse it with its neighbours."""
    work, host = grouped.work, grouped.work.host
    fusible = (grouped.classes == "elementwise") & (work.table["kind"][work.rows] == _COMPUTE)
    if host is None:
        return np.asarray(fusible)
    known = work.outermost >= 0
    names, place = dense(np.where(known, host["name"][np.maximum(work.outermost, 0)], -1).astype(np.int64))
    texts = [host.strings.text(code) or "" for code in names.tolist()]
    fusible &= ~np.array([_NOT_THE_MODEL.search(text) is not None for text in texts])[place]
    spans = np.flatnonzero(host["kind"] == _ANNOTATION)
    annotated = [
        (host.strings.text(code) or "").startswith(_OPTIMIZER) for code in host["name"][spans].tolist()
    ]
    spans = spans[np.array(annotated, dtype=bool)]
    launched = work.launch >= 0
    at = host["start_ns"][np.maximum(work.launch, 0)]
    if len(spans):
        spans = spans[np.argsort(host["start_ns"][spans], kind="stable")]
        place = np.searchsorted(host["start_ns"][spans], at, side="right") - 1
        inside = (place >= 0) & (at < np.maximum.accumulate(host["end_ns"][spans])[np.maximum(place, 0)])
        fusible &= ~(launched & inside)
    return np.asarray(fusible)


def _traffic(works: list[Work | None]) -> tuple[Array, Array, Array, Array]:
    """By group: elements written (-1 unknown) and of each input, and the shares of the bytes that are read: at all,
    and of the largest input (NaN unknown)."""
    count = len(works)
    outputs, inputs = np.full(count, -1), np.full((count, _INPUTS), -2)
    read, largest = np.full(count, np.nan), np.full(count, np.nan)
    for place, work in enumerate(works):
        if work is None or work.read_bytes is None or work.write_bytes is None or work.outputs is None:
            continue
        total = work.read_bytes + work.write_bytes
        if total <= 0:
            continue
        outputs[place] = min(work.outputs, _MOST)
        elements = work.inputs[:_INPUTS]
        inputs[place, : len(elements)] = [min(element, _MOST) for element in elements]
        read[place] = work.read_bytes / total
        largest[place] = read[place] * max(elements, default=0) / max(sum(work.inputs), 1)
    return outputs, inputs, read, largest


def _by_operators(grouped: Grouped, chains: Chains, label: Array) -> tuple[ChainTime, ...]:
    hashes = _hashes(chains, label)
    _, example, place = np.unique(hashes, return_index=True, return_inverse=True)
    count = np.bincount(place)
    ns = np.bincount(place, chains.ns).astype(np.int64)
    kernels = np.bincount(place, chains.kernels).astype(np.int64)
    known = np.bincount(place, chains.known_ns)
    saved = np.stack([np.bincount(place, chains.saved[:, column]) for column in range(3)], axis=1)
    top = np.argsort(-ns, kind="stable")[:KEPT]
    return tuple(
        ChainTime(
            _names(grouped, label[chains.first[example[one]] : chains.last[example[one]] + 1]),
            int(count[one]),
            int(kernels[one]),
            int(ns[one]),
            (round(saved[one, 0]), round(saved[one, 1]), round(saved[one, 2])),
            float(known[one] / max(ns[one], 1)),
        )
        for one in top.tolist()
    )


def _hashes(chains: Chains, label: Array) -> Array:
    """A number for each chain's sequence of labels: a polynomial modulo 2^64."""
    length = int((chains.last - chains.first).max()) + 1
    powers = np.multiply.accumulate(np.full(length, _FACTOR, dtype=np.uint64))
    starts = np.repeat(chains.first, chains.last - chains.first + 1)
    owner = np.repeat(np.arange(len(chains.first)), chains.last - chains.first + 1)
    offsets = np.arange(len(starts)) - np.repeat(
        np.cumsum(chains.last - chains.first + 1) - (chains.last - chains.first + 1),
        chains.last - chains.first + 1,
    )
    terms = (label[starts + offsets].astype(np.uint64) + np.uint64(1)) * powers[offsets]
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    return np.asarray(np.add.reduceat(terms, begins))


def _names(grouped: Grouped, labels: Array) -> str:
    groups = len(grouped.names)
    names: list[str] = []
    for label in labels[: _NAMED + 1].tolist():
        if label < groups:
            names.append(plain_name(grouped.strings.text(int(grouped.names[label])) or "kernel"))
        else:
            names.append(kernel_word(grouped.kernel_names[1][label - groups]))
    if len(labels) > _NAMED:
        names = [*names[:_NAMED], f"… {len(labels) - _NAMED} more"]
    return " → ".join(names)
