"""The quantities of ``benchmarks/effects.py``, read from records of ``trine.profile``: steps, collectives, readings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import trine
from trine.analyzers.operations import bus_factor, canonical_operation
from trine.record.model import MISSING

__all__ = ["QUANTITIES", "Quantity", "Records", "spell"]

#: What carries gradients between replicas. DDP's broadcasts of buffers are none of it.
_OF_REPLICAS = ("all_reduce", "all_to_all", "all_gather", "send")
#: What carries gradients to their shards; under FSDP2 all-gathers carry parameters. Inside, gloo's reduce-scatter is an
#: all-reduce, and is recorded as one: a reduce-scatter's bytes are what was asked for.
_TO_SHARDS = ("reduce_scatter", "all_to_all", "all_reduce")


class Records:
    """One side's records, a round each. The first step of each is left out: loaders start in it, buckets are made anew."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.jobs = [trine.load(folder) for folder in folders]
        self.ranks = [rank for job in self.jobs for rank in job]
        self.world = max(rank.rank for rank in self.ranks) + 1

    def steps(self, column: str, rank: Any) -> Any:
        """A column of the steps table without the first step."""
        return rank.steps[column][1:]

    def slowest(self, column: str) -> float:
        """Median over all rounds' steps of a time in ns, in seconds, of the rank where it is largest."""
        by_rank: dict[int, list[float]] = {}
        for rank in self.ranks:
            if column == "step":
                values = self.steps("end_ns", rank) - self.steps("start_ns", rank)
            else:
                values = self.steps(column, rank)
            by_rank.setdefault(rank.rank, []).extend(values.tolist())
        return max(median(values) for values in by_rank.values()) / 1e9

    def total(self, column: str) -> float:
        """Sum over all steps and ranks; NaN where a step does not say it."""
        values = np.concatenate([self.steps(column, rank) for rank in self.ranks])
        return float(values.sum()) if len(values) and (values != MISSING).all() else math.nan

    def readings(self, metric: str, rank: Any) -> list[float]:
        """All values of a metric, in order."""
        if rank.samples is None:
            return []
        named = rank.samples.text("metric") == metric
        return [float(value) for value in rank.samples["value"][named]]

    def reading(self, metric: str) -> float:
        """The last reading of a metric on each rank, the largest of them; NaN where there is none."""
        last: dict[int, float] = {}
        for rank in self.ranks:
            for value in self.readings(metric, rank):
                last[rank.rank] = value
        return max(last.values()) if last else math.nan

    def median_reading(self, metric: str) -> float:
        """Of all steps but the first of each record."""
        values = [value for rank in self.ranks for value in self.readings(metric, rank)[1:]]
        return median(values) if values else math.nan

    def sum_of_readings(self, metric: str) -> float:
        """Over all steps, the mean over ranks; nought where it was never told."""
        return sum(sum(self.readings(metric, rank)) for rank in self.ranks) / self.world

    def collectives(self) -> Iterator[tuple[int, str, float, int, int]]:
        """(rank, operation, bytes, ranks of its group, peer) of each in the steps that count; NaN where bytes are missing."""
        for rank in self.ranks:
            table = rank.collectives
            if table is None:
                continue
            counted = set(self.steps("index", rank).tolist())
            sizes = {group.id: len(group.ranks) for group in rank.groups}
            texts = (table.text("operation"), table.text("group"))
            columns = (table[name].tolist() for name in ("bytes", "peer", "step"))
            for operation, group, size, peer, step in zip(*texts, *columns, strict=True):
                if step in counted:
                    known = math.nan if size == MISSING else size
                    yield rank.rank, canonical_operation(operation), known, sizes.get(group, self.world), peer

    def counted_steps(self) -> int:
        """Over all rounds, of a rank."""
        return sum(len(self.steps("index", rank)) for rank in self.ranks) // self.world

    def sent_bytes(self, operations: Sequence[str], counted_as: str | None = None) -> float:
        """In a step, by a rank: a call's bytes times nccl-tests' factor, which is what each link must carry.

        ``counted_as``: the operation whose factor is taken for all of them.
        """
        sent = sum(
            size * _factor(counted_as or name, ranks)
            for _, name, size, ranks, _ in self.collectives()
            if name in operations
        )
        return sent / self.counted_steps() / self.world

    def samples(self) -> float:
        """Of a rank's step."""
        return self.total("samples") / self.counted_steps() / self.world


def _factor(operation: str, ranks: int) -> float:
    """What a link carries of a call's bytes; one end of a message counts."""
    return {"send": 1.0, "recv": 0.0}.get(operation, bus_factor(operation, ranks))


def _across_nodes(records: Records, node: int) -> float:
    """Bytes that leave a node in a step: of messages by their peers, of an all-reduce as a ring by the rank at the edge."""
    leaving = 0.0
    for rank, name, size, ranks, peer in records.collectives():
        if name == "send":
            leaving += size * (rank // node != peer // node)
        elif name in _OF_REPLICAS:
            leaving += size * _factor(name, ranks) / node  # of a node's ranks one has its neighbour elsewhere
    return leaving / records.counted_steps() / (records.world / node)


def _all_reduces(records: Records) -> float:
    count = sum(name == "all_reduce" for _, name, _, _, _ in records.collectives())
    return count / records.counted_steps() / records.world / records.samples()


def _widths(records: Records) -> float:
    """Different widths of batches: each is a shape that compiled code must be made for."""
    found: set[float] = set()
    for rank in records.ranks:
        found |= set((records.steps("tokens", rank) / records.steps("samples", rank)).tolist())
    return float(len(found))


def _waste(records: Records) -> float:
    return records.total("padding_tokens") / records.total("tokens")


def _time_of_tokens(records: Records) -> float:
    """Seconds for a thousand tokens that are no padding."""
    seconds = (records.total("end_ns") - records.total("start_ns")) / 1e9
    return seconds / (records.total("tokens") - records.total("padding_tokens")) * 1000


@dataclass(frozen=True)
class Quantity:
    """How it is read (from one side's records and the ranks of a node), and its unit."""

    unit: str
    read: Callable[[Records, int], float]


def _reading(metric: str) -> Quantity:
    return Quantity("bytes", lambda records, node: records.reading(metric))


def _time(column: str) -> Quantity:
    return Quantity("s", lambda records, node: records.slowest(column))


QUANTITIES: dict[str, Quantity] = {
    "step time": _time("step"),
    "data time": _time("phase_data_ns"),
    "optimizer time": _time("phase_optimizer_ns"),
    "exposed communication": _time("phase_exposed_communication_ns"),
    "compile time": Quantity("s", lambda records, node: records.sum_of_readings("compile_seconds")),
    "time a thousand tokens": Quantity("s", lambda records, node: _time_of_tokens(records)),
    "activation bytes": _reading("memory/saved_activation_bytes"),
    "optimizer bytes": _reading("memory/optimizer_bytes"),
    "gradient bytes": _reading("memory/gradients_bytes"),
    "parameter bytes": _reading("memory/parameters_bytes"),
    "padding waste": Quantity("share", lambda records, node: _waste(records)),
    "widths": Quantity("number", lambda records, node: _widths(records)),
    "overlap efficiency": Quantity(
        "share", lambda records, node: records.median_reading("communication/overlap")
    ),
    "bytes sent": Quantity("bytes", lambda records, node: records.sent_bytes(_OF_REPLICAS)),
    "bytes sent a sample": Quantity(
        "bytes", lambda records, node: records.sent_bytes(_OF_REPLICAS) / records.samples()
    ),
    "scattered bytes": Quantity(
        "bytes", lambda records, node: records.sent_bytes(_TO_SHARDS, counted_as="reduce_scatter")
    ),
    "gathered bytes": Quantity("bytes", lambda records, node: records.sent_bytes(("all_gather",))),
    "bytes across nodes": Quantity("bytes", _across_nodes),
    "all-reduces a sample": Quantity("number", lambda records, node: _all_reduces(records)),
}


def spell(value: float, unit: str) -> str:
    """With a unit that people read."""
    if math.isnan(value):
        return "missing"
    if unit == "s":
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
    if unit == "bytes":
        return f"{value / 1e6:.2f} MB" if value >= 1e5 else f"{value / 1e3:.2f} kB"
    return f"{value:.1%}" if unit == "share" else f"{value:.3g}"
