"""Ranks that are started for one test alone; those that live on are in ``rank_pool``."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

__all__ = ["start"]


def start(ranks: int, target: Callable[..., None], *arguments: Any) -> tuple[list[Any], Any]:
    """Processes that run ``target(rank, ranks, port, results, *arguments)``, and the queue of results."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        context.Process(target=target, args=(rank, ranks, port, results, *arguments), daemon=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    return workers, results
