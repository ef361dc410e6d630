"""What ``test_links.py`` runs on live ranks."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import torch

from trine.optim.runtime import links
from trine.optim.topology import topology_of

CPU = torch.device("cpu")


def measured(rank: int, ranks: int, cache: str, operations: tuple[links.Operation, ...]) -> Any:
    """Links of each operation over nodes of two ranks, and the seconds that a second call takes."""
    topology = topology_of(rank, ranks, {"TRINE_RANKS_PER_NODE": "2"})
    with mock.patch.dict(os.environ, {"TRINE_CACHE": cache}):
        _forget()
        found = {operation: links.node_links(operation, CPU, topology) for operation in operations}
        began = time.perf_counter()
        again = {operation: links.link_of(operation, CPU) for operation in operations}
        took = time.perf_counter() - began
        _forget()
    assert all(again[operation] is found[operation].whole for operation in operations)
    return found, took


def calibrated_by_some(rank: int, cache_of_rank: list[str]) -> Any:
    """The all-reduce's link where each rank has a cache of its own."""
    with mock.patch.dict(os.environ, {"TRINE_CACHE": cache_of_rank[rank]}):
        _forget()
        found = links.link_of("all_reduce", CPU)
        _forget()
    return found


def slow_measured(rank: int, seconds: float) -> Any:
    """A link on which every message takes ``seconds`` at least, and how long measuring it took."""
    timed = links._timed

    def slow(run: Any, device: Any) -> float:
        time.sleep(seconds)
        return timed(run, device) + seconds

    _forget()
    began = time.perf_counter()
    with mock.patch.object(links, "_timed", slow):
        found = links._measure("shift", CPU, torch.distributed.group.WORLD)
    return found, time.perf_counter() - began


def _forget() -> None:
    links._MEASURED.clear()
