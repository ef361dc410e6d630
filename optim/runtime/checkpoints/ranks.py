"""Ranks that save or load together: what one of them cannot do, all of them raise, so that none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

from trine.record.errors import TrineError, UsageError

__all__ = ["Ranks", "reason_of"]

_Result = TypeVar("_Result")


class Ranks:
    """The ranks of a run, or one process alone. ``group``: what they agree over; ``None`` for the default group."""

    def __init__(self, rank: int, ranks: int, group: distributed.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.ranks = ranks
        self.group = group

    def all(
        self, act: Callable[[], _Result], what: str, kind: type[TrineError] = UsageError
    ) -> list[_Result]:
        """Run on every rank; the results by rank, on every rank. Small ones: all are sent to all.

        Where it fails on any, raises on all what the first of them says: this package's own errors as they are, others as
        ``kind`` that begins with ``what``, which could not be done.
        """
        said, result, failed = self._tried(act, what)
        if self.ranks == 1:
            found = [(said, type(failed), result)]
        else:
            found = [None] * self.ranks  # type: ignore[list-item]
            distributed.all_gather_object(found, (said, type(failed), result), group=self.group)
        self._raise_first([(said, raised) for said, raised, _ in found], failed, kind)
        return [cast(_Result, result) for _, _, result in found]

    def first(
        self, act: Callable[[], _Result], what: str, kind: type[TrineError] = UsageError
    ) -> _Result | None:
        """Run on rank 0 alone, whose failure all raise; its result there, ``None`` elsewhere."""
        mine: list[_Result] = []

        def alone() -> None:
            if self.rank == 0:
                mine.append(act())

        self.all(alone, what, kind)
        return mine[0] if mine else None

    def told(self, act: Callable[[], _Result], what: str, kind: type[TrineError] = UsageError) -> _Result:
        """Run on rank 0 alone; its result on every rank. Its failure all raise."""
        return cast(_Result, self.all(lambda: act() if self.rank == 0 else None, what, kind)[0])

    def gathered(self, act: Callable[[], _Result], what: str) -> list[Any]:
        """Run on every rank; on rank 0 the outcomes by rank, elsewhere nothing. Large results may go this way.

        Nothing is raised here: rank 0 passes them to :meth:`results` where all ranks agree next.
        """
        said, result, failed = self._tried(act, what)
        outcome = (said, type(failed), result)
        if self.ranks == 1:
            return [outcome]
        found: list[Any] = [None] * self.ranks
        distributed.gather_object(outcome, found if self.rank == 0 else None, 0, group=self.group)
        return found if self.rank == 0 else []

    def results(self, outcomes: list[Any], kind: type[TrineError] = UsageError) -> list[Any]:
        """What ranks gave; raises with the first that failed."""
        self._raise_first([(said, raised) for said, raised, _ in outcomes], None, kind)
        return [result for _, _, result in outcomes]

    def scattered(self, by_rank: list[Any]) -> Any:
        """This rank's of what rank 0 has for each."""
        if self.ranks == 1:
            return by_rank[0]
        found = [None]
        distributed.scatter_object_list(found, by_rank if self.rank == 0 else None, 0, group=self.group)
        return found[0]

    def _tried(
        self, act: Callable[[], _Result], what: str
    ) -> tuple[str | None, _Result | None, Exception | None]:
        try:
            return None, act(), None
        except Exception as error:  # noqa: BLE001 - a full disk is a RuntimeError to torch.save; all ranks raise it
            said = str(error) if isinstance(error, TrineError) else f"{what}: {reason_of(error)}"
            return said, None, error

    def _raise_first(
        self, failures: list[tuple[str | None, type]], own: Exception | None, kind: type[TrineError]
    ) -> None:
        for said, raised in failures:
            if said is None:
                continue
            if isinstance(own, TrineError) and str(own) == said:
                raise own
            raise (raised if issubclass(raised, TrineError) else kind)(said) from own


def reason_of(error: BaseException) -> str:
    """In one line, without what DCP wraps around it."""
    if isinstance(error, CheckpointException) and error.failures:
        first = next(iter(error.failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
