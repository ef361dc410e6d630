"""What an engine saves and takes back: checkpoints in a folder, and the same state in memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.runtime.checkpoints import Keeper, Saving
    from trine.optim.runtime.data_position import DataPosition
    from trine.optim.runtime.update import Update
    from trine.optim.techniques import Assembly

__all__ = ["Persistent", "Position", "latest_checkpoint"]


class Position(NamedTuple):
    """Where the data stands."""

    #: Passes over a loader before the present, or next, one.
    epoch: int
    #: Batches of it that were trained on, on this rank.
    batches: int


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest of the checkpoints ``step-…`` that ``engine.save(folder, keep=…)`` wrote and that has all its files.

    ``None`` where there is none. Their contents are verified when they are read: ``engine.load(folder, newest=True)``
    goes back to an older one where they are damaged.
    """
    from trine.optim.runtime.checkpoints.description import is_whole, series

    path = require_path(folder, "trine.latest_checkpoint")
    return next((each for each in series(path) if is_whole(each)), None)


class Persistent:
    """The part of an engine that outlives its process."""

    _assembly: Assembly
    _close: weakref.finalize[..., Any]
    _update: Update
    _index: int
    _micro: int
    _step_open: bool
    _consumed: bool
    _broken: str | None
    _size: int | None  # samples of the open batch
    _data: DataPosition
    _keeper: Keeper

    def _keep_state(self) -> None:
        from trine.optim.runtime.checkpoints import Keeper
        from trine.optim.runtime.data_position import DataPosition

        facts = self._assembly.facts
        self._size = None
        self._data = DataPosition(facts.layout.data_ranks, facts.rank == 0)
        self._keeper = Keeper(self._assembly)
        self._assembly.closers.append(self._keeper.close)  # closed first: what is being written is awaited

    @property
    def epoch(self) -> int:
        """Passes over a loader by :meth:`steps` before the present one; before a pass, of the next.

        A resumed run's first is the one that was interrupted: ``for epoch in range(engine.epoch, epochs)``.
        """
        return self._data.epoch

    @property
    def position(self) -> Position:
        """Where the data stands: what a checkpoint that is saved now goes on from."""
        return Position(
            self._data.epoch, self._data.batches + (1 if self._step_open and self._consumed else 0)
        )

    @overload
    def save(
        self, folder: str | os.PathLike[str], *, keep: int | None = None, asynchronous: Literal[False] = False
    ) -> Path: ...

    @overload
    def save(
        self, folder: str | os.PathLike[str], *, keep: int | None = None, asynchronous: Literal[True]
    ) -> Saving: ...

    def save(
        self, folder: str | os.PathLike[str], *, keep: int | None = None, asynchronous: bool = False
    ) -> Path | Saving:
        """Write model, optimizer, scheduler, random streams, where the data stands and what techniques keep.

        Every rank calls it, between optimizer steps, with the same path on a file system that all share. It is written
        under another name, with checksums, and renamed when it is whole, so that a kill at any moment leaves the one
        before. Without ``keep`` it is ``folder`` itself, which replaces a checkpoint that is there. With ``keep`` it is
        ``folder/step-000100``, by the steps done, and of those that are older the newest ``keep`` - 1 stay.

        Returns the checkpoint's full path. ``asynchronous``: returns when what is to be written has been copied to the
        host's memory, with a handle that has ``done()`` and ``result()``; the next save, a load and :meth:`close` wait for
        it, and raise what went wrong.

        Raises ``UsageError`` on every rank in the middle of an accumulation, and where any rank cannot write.
        """
        self._require_open("engine.save")
        self._require_between_steps("engine.save")
        path = require_path(folder, "engine.save")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise UsageError(f"engine.save: keep = {keep!r} is how many checkpoints stay: 1 or more")
        _require_truth("engine.save", asynchronous=asynchronous)
        if self._broken is not None:
            raise UsageError(self._broken)
        with self._naming_lost_ranks():
            return self._keeper.save(
                path, self._update.scheduler, self._steps_done(), self._data_state, keep, asynchronous
            )

    def load(self, folder: str | os.PathLike[str], *, newest: bool = False, data: bool = True) -> int:
        """Take back what :meth:`save` wrote, under whatever layout; the number of steps that had been done.

        On as many ranks, laid out alike, the run goes on as if it had not stopped, bit for bit: also with its data,
        unless ``data`` is false, as for a program that finds its place by itself. ``newest``: of the checkpoints
        ``step-…`` in ``folder`` the newest that is not damaged.

        Raises ``UnreadableInput`` in one line, on every rank, for what is no checkpoint, is damaged, or is of another
        model or optimizer. Where that was found half way, the engine takes no step until a load has succeeded.
        """
        self._require_open("engine.load")
        self._require_outside("engine.load")
        path = require_path(folder, "engine.load")
        _require_truth("engine.load", newest=newest, data=data)
        with self._naming_lost_ranks():
            loaded = self._keeper.load(path, self._update.scheduler, newest, self._half_loaded)
        if self._broken == _HALF_LOADED:
            self._broken = None
        self._index = loaded.step
        self._data.load(loaded.data if data else {})
        return self._index

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes, in memory: ``tensors`` by name (live, DTensors where sharded), ``common`` and this
        rank's ``own`` rest, ``step``."""
        from trine.optim.runtime import checkpoints

        self._require_between_steps("engine.state_dict")
        return checkpoints.snapshot(
            self._assembly, self._update.scheduler, self._steps_done(), self._data_state()
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy back what :meth:`state_dict` gave, into an engine that is laid out alike."""
        from trine.optim.runtime import checkpoints

        self._require_outside("engine.load_state_dict")
        missing = _STATE - set(state) if isinstance(state, Mapping) else _STATE
        if missing:
            raise UsageError(
                f"engine.load_state_dict takes what engine.state_dict gave, which has {min(missing)}: this is "
                f"{'without it' if isinstance(state, Mapping) else f'a {type(state).__name__}'}"
            )
        self._index, data = checkpoints.restore(state, self._assembly, self._update.scheduler)
        self._data.load(data)

    @contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        """In place of the backend's own error."""
        try:
            yield
        except Exception as error:
            from trine.optim.runtime.lost_ranks import explained

            facts = self._assembly.facts
            told = explained(error, facts.rank, facts.ranks, self._index)
            if told is None:
                raise
            raise told from error

    def _data_state(self) -> dict[str, Any]:
        trained = self._step_open and self._consumed
        return self._data.state(self._size if trained else -1, self._step_open and not self._consumed)

    def _half_loaded(self) -> None:
        if self._broken is None:
            self._broken = _HALF_LOADED

    def _steps_done(self) -> int:
        return self._index + (1 if self._step_open and self._consumed else 0)

    def _require_open(self, call: str) -> None:
        if not self._close.alive:
            raise UsageError(
                f"{call}: this engine was closed: save before engine.close(), load into a new one"
            )

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


_HALF_LOADED = (
    "a checkpoint was found to be damaged while it was loaded, and the model holds a part of it: load another with "
    "engine.load"
)


#: The parts of what ``engine.state_dict`` gives.
_STATE = frozenset({"tensors", "common", "own", "step"})


def _require_truth(call: str, **given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"{call}: {name} is True or False, not {value!r}")


def require_path(folder: Any, call: str) -> Path:
    """``folder``, absolute and without links. Raises ``UsageError`` for what is no path, and for links in a circle."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise UsageError(f"{call} takes the path of a folder, not {folder!r}")
    try:
        return Path(folder).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{call}: {os.fspath(folder)!r} is no path that can be followed: {error}") from error
