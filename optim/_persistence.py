"""What an engine saves and takes back: checkpoints in a folder, and the same state in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.runtime.update import Update
    from trine.optim.techniques import Assembly

__all__ = ["Persistent"]


class Persistent:
    """The part of an engine that outlives its process."""

    _assembly: Assembly
    _update: Update
    _index: int
    _micro: int
    _step_open: bool
    _consumed: bool

    def save(self, folder: str | Path) -> Path:
        """Write model, optimizer, scheduler, random streams and what techniques keep; the folder's full path.

        Every rank calls it, between optimizer steps, with the same path on a file system that all share. It is written
        under another name and renamed when it is whole; a checkpoint that is there is replaced. Raises ``UsageError``
        on every rank in the middle of an accumulation, and where any rank cannot write.
        """
        from trine.optim.runtime import checkpoints

        self._require_between_steps("engine.save")
        _require_path(folder, "engine.save")
        return checkpoints.save(folder, self._assembly, self._update.scheduler, self._steps_done())

    def load(self, folder: str | Path) -> int:
        """Take back what :meth:`save` wrote, under whatever sharding; the number of steps that had been done.

        The run goes on as if it had not stopped, bit for bit, on as many ranks; which batches come next is the
        loader's to know. Raises ``UnreadableInput`` in one line for what is no checkpoint, is cut short, or is of
        another model or optimizer.
        """
        from trine.optim.runtime import checkpoints

        self._require_outside("engine.load")
        _require_path(folder, "engine.load")
        self._index = checkpoints.load(folder, self._assembly, self._update.scheduler)
        return self._index

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes, in memory: ``tensors`` by name (live, DTensors where sharded), ``own``, ``step``."""
        from trine.optim.runtime import checkpoints

        self._require_between_steps("engine.state_dict")
        return checkpoints.snapshot(self._assembly, self._update.scheduler, self._steps_done())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy back what :meth:`state_dict` gave, into an engine that is sharded alike."""
        from trine.optim.runtime import checkpoints

        self._require_outside("engine.load_state_dict")
        self._index = checkpoints.restore(state, self._assembly, self._update.scheduler)

    def _steps_done(self) -> int:
        return self._index + (1 if self._step_open and self._consumed else 0)

    def _require_between_steps(self, call: str) -> None:
        if self._micro:
            raise UsageError(
                f"{call} in the middle of an accumulation would lose the gradients of {self._micro} of "
                f"{self._assembly.accumulation} micro-batches: call it after engine.step() returned True"
            )

    def _require_outside(self, call: str) -> None:
        self._require_between_steps(call)
        if self._step_open and self._consumed:
            raise UsageError(
                f"{call} inside a step that has been taken: call it before the loop over engine.steps"
            )


def _require_path(folder: Any, call: str) -> None:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise UsageError(f"{call} takes the path of a folder, not {folder!r}")
