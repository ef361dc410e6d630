"""Ranks that share cores: more of their threads than cores of their host, so that they take turns.

A rank that waits for a core looks slow, late, or long in a collective, and more ranks cannot make it faster.
Known of records whose ranks compute on the processor: each says its host, its threads and the cores that it may use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trine.analyzers.results import RankSummary
from trine.record.cores import cores_in
from trine.record.model import Quality

__all__ = ["ID", "about_shared_cores"]

ID = "shared-cores"

#: What a rank may use: its cores, and its threads that compute on them.
_Use = tuple[frozenset[int], int]


def about_shared_cores(summaries: Sequence[RankSummary]) -> list[Quality]:
    """A note for each host on which the ranks have more threads than cores, the fullest set of cores told."""
    by_host: dict[str, list[_Use]] = defaultdict(list)
    for summary in summaries:
        use = _use(summary.metadata.get("device"))
        if use is not None and summary.host_name:
            by_host[summary.host_name].append(use)
    return [note for host, uses in by_host.items() for note in _about_host(host, uses)]


def _use(device: object) -> _Use | None:
    if not isinstance(device, Mapping) or device.get("type") != "cpu":
        return None
    cores, threads = cores_in(device.get("cores")), device.get("threads")
    return (cores, threads) if cores and isinstance(threads, int) and threads > 0 else None


def _about_host(host: str, uses: Sequence[_Use]) -> Iterator[Quality]:
    """Ranks that are bound to cores of their own share none: each set of cores counts the ranks that lie within it."""
    sets: list[frozenset[int]] = list(dict.fromkeys([*(cores for cores, _ in uses), *_all(uses)]))
    crowded = [(cores, [threads for own, threads in uses if own <= cores]) for cores in sets]
    crowded = [
        (cores, threads) for cores, threads in crowded if len(threads) > 1 and sum(threads) > len(cores)
    ]
    if not crowded:
        return
    cores, threads = max(crowded, key=lambda one: (sum(one[1]) / len(one[0]), len(one[1])))
    each = (
        f"{threads[0]} thread{'s' if threads[0] > 1 else ''} each"
        if len(set(threads)) == 1
        else f"{sum(threads)} threads"
    )
    several = "s" if len(cores) > 1 else ""
    yield Quality(
        ID,
        "warning",
        f"{len(threads)} ranks with {each} share {len(cores)} core{several} of {host}, so they take turns and their"
        " times hold waiting for a core",
    )


def _all(uses: Sequence[_Use]) -> Iterator[frozenset[int]]:
    yield frozenset[Any]().union(*(cores for cores, _ in uses))
