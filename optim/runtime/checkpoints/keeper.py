"""An engine's checkpoints: one save at a time, at once or in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.optim.runtime.checkpoints.background import Background, Saving
from trine.optim.runtime.checkpoints.description import name_of
from trine.optim.runtime.checkpoints.ranks import Ranks
from trine.optim.runtime.checkpoints.reading import Loaded, load
from trine.optim.runtime.checkpoints.writing import Plans, prepared, written
from trine.record.events import emit

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Keeper"]

logger = logging.getLogger("trine")


class Keeper:
    """Saves and loads the run of one assembly. Every rank calls the same at the same time."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._ranks = Ranks(assembly.facts.rank, assembly.facts.ranks)
        self._plans = Plans()
        self._background: Background | None = None
        self._saving: Saving | None = None

    def save(
        self,
        folder: Path,
        scheduler: Any,
        step: int,
        data: Callable[[], Mapping[str, Any]],
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> Path | Saving:
        """Write the run's state to ``folder``, or with ``keep`` to ``step-…`` in it, of which so many stay."""
        emit("region_begin", region="checkpoint", name="engine.save")  # as long as training stands still
        try:
            self._settle_together()
            folder = folder if keep is None else folder / name_of(step)
            return self._save(folder, scheduler, step, data, keep, asynchronous)
        finally:
            emit("region_end")

    def _save(
        self,
        folder: Path,
        scheduler: Any,
        step: int,
        data: Callable[[], Mapping[str, Any]],
        keep: int | None,
        asynchronous: bool,
    ) -> Path | Saving:
        job = prepared(folder, self._assembly, scheduler, step, keep, self._ranks, self._plans, data)
        if not asynchronous:
            return written(job, self._ranks)
        if self._background is None:
            facts = self._assembly.facts
            self._background = Background(facts.device, facts.rank, facts.ranks)
        self._saving = self._background.begin(job)
        return self._saving

    def load(self, folder: Path, scheduler: Any, newest: bool, begins: Callable[[], None]) -> Loaded:
        """Take it back; what is being written is awaited before."""
        self._settle_together()
        return load(folder, self._assembly, scheduler, self._ranks, newest, begins)

    def settle(self) -> None:
        """Wait for the save that is under way. Raises what went wrong with it, once."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.settle()

    def _settle_together(self) -> None:
        """A program may have asked the handle on some ranks only: all raise, or none."""
        if self._background is not None:
            self._ranks.all(self.settle, "the checkpoint before could not be written")

    def close(self) -> None:
        """Wait for the save that is under way, and end its group. Raises what went wrong."""
        try:
            self.settle()
        finally:
            if self._background is not None:
                self._background.close()
                self._background = None
