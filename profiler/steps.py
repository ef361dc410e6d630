"""``prof.steps(loader)``: the loader's batches, and steps between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trine.record.errors import UsageError

from .phases import DATA, OTHER

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Steps"]


class Steps:
    """Iterates over a loader once or several times (epochs); ``len`` and attributes are the loader's."""

    def __init__(self, session: Session, loader: Iterable[Any], accumulate: int | None) -> None:
        if accumulate is not None and accumulate < 1:
            raise UsageError(f"accumulate is {accumulate}: a step has at least one batch")
        self._session = session
        self._loader = loader
        self._accumulate = accumulate

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        session = self._session.target()
        session.warn_when_closed()
        if session.watches_loaders:
            yield from self._steps(session)
        else:
            # Steps are counted by a loop around this one, or beside it (zip): these batches are part of its steps.
            yield from self._batches(session)

    def _batches(self, session: Session) -> Iterator[Any]:
        iterator = iter(self._loader)
        while True:
            session.marker.enter(DATA)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                session.marker.leave()
            yield batch

    def _steps(self, session: Session) -> Iterator[Any]:
        run = session.guard.run
        session.watches_loaders = False
        if session.loader is None:
            session.loader = self._loader
        batches = 0
        worked = False
        run("steps", session.begin_part)
        try:
            session.marker.enter(DATA)
            iterator = iter(self._loader)  # starts the workers: the first step waits for them
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                session.marker.leave()
                session.marker.base(OTHER)  # an engine that fetched the batch may have named the phase
                run("batch sizes", session.measure, batch)
                batches += 1
                worked = True
                yield batch
                worked = False
                complete = None if self._accumulate is None else batches % self._accumulate == 0
                run("steps", session.end_part, complete)
                run("steps", session.begin_part)
                session.marker.enter(DATA)
        finally:
            # The loader has ended, or the loop was left by break or by an exception.
            session.watches_loaders = True
            if worked and session.has_worked():
                run("steps", session.end_part, True)
            run("steps", session.close_step)
