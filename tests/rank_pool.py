"""Two real processes with a gloo process group that stay alive across tests; cases are functions of a module."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from started_ranks import SpawnedRanks

__all__ = ["RankPool"]

SECONDS = 120.0


class RankPool:
    """``run("module:function", *arguments)`` calls ``function(rank, *arguments)`` on every rank at once.

    Ranks that do not answer are replaced by new ones, so that a case that hangs costs no other its time.
    """

    def __init__(self, folder: Path, world_size: int = 2) -> None:
        self._folder, self._world_size = folder, world_size
        self._starts = 0
        self._start()

    def _start(self) -> None:
        store = self._folder / f"store-{self._starts}"
        self._starts += 1
        self._ranks = SpawnedRanks(self._world_size, init_method=f"file://{store}", grace_s=20)

    def run(self, case: str, *arguments: Any) -> list[Any]:
        """Results by rank. Raises ``RankFailed``, with the traceback of the first rank that failed."""
        if self._ranks.has_ended:
            self._start()
        return self._ranks.run(_case, case, arguments, timeout_s=SECONDS)

    def close(self) -> None:
        self._ranks.close()


def _case(rank: int, case: str, arguments: tuple[Any, ...]) -> Any:
    module, _, function = case.partition(":")
    return getattr(importlib.import_module(module), function)(rank, *arguments)
