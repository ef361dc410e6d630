"""Ranks that are spawned in a process group of their own, are given work, and are ended whatever becomes of it.

    with SpawnedRanks(2) as ranks:
        losses = ranks.run(train, 30)       # what train(rank, 30) returned on each, by rank

A rank that fails, dies or says nothing in time is one line, which names it. Ranks that are to be killed on purpose start
faster from ``forked_ranks``.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Failure", "RankFailed", "SpawnedRanks", "cause", "in_one_line", "launch", "on_ranks"]

#: Until all ranks have joined their group: each imports PyTorch, on a machine that may be busy.
START_S = 180.0
#: For the other ranks, once one has failed: they may wait for it for ever.
PATIENCE_S = 20.0
#: Between two looks at whether a silent rank still lives.
LOOK_S = 0.2


@dataclass(frozen=True)
class Failure:
    """Why a rank has no result."""

    rank: int
    said: str  # one line
    trace: str = ""  # of an exception, after which the rank lives
    is_death: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {'failed: ' if self.trace else ''}{self.said}"


class RankFailed(RuntimeError):
    """The failure to look at: of a rank that died, or else of the first that failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        if failure.trace:
            self.add_note(failure.trace)


class SpawnedRanks:
    """Processes that wait for :meth:`run`; to be used in ``with``, or to be closed."""

    def __init__(
        self,
        ranks: int,
        *,
        backend: str | None = "gloo",
        environment: Mapping[str, str] | None = None,
        init_method: str | None = None,
        collective_timeout_s: float | None = None,
        daemon: bool = True,
        grace_s: float = 10.0,
    ) -> None:
        """``backend``: ``None`` for processes without a group. ``daemon``: not where ranks have children of their own.

        ``init_method``: where ranks meet; by default a file of their own (gloo), or a port of this machine.
        ``grace_s``: how long :meth:`close` waits for ranks to end by themselves.
        """
        self._grace_s = grace_s
        #: Whether they are of no use any more: closed, or one of them died or hangs.
        self.has_ended = False
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        #: Without a port, ranks cannot lose theirs to another process before the first of them has imported PyTorch.
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        settings = dict(environment or {})
        if init_method is None and backend == "gloo":
            init_method = (Path(self._folder.name) / "store").as_uri()
        elif init_method is None and backend is not None:
            settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        group = (backend, init_method or "env://", collective_timeout_s)
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                arguments = (rank, ranks, theirs, settings, group)
                process = context.Process(target=_serve, args=arguments, daemon=daemon)
                process.start()
                self._processes.append(process)
                theirs.close()  # or a rank that died would leave it open
            _results(self._answers(START_S, PATIENCE_S, ranks))
        except BaseException:
            self.kill()
            raise

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 600.0) -> list[Any]:
        """What ``function(rank, *arguments)`` returns on each rank, by rank. Raises :class:`RankFailed`."""
        return _results(self._asked(function, arguments, timeout_s, PATIENCE_S, len(self._pipes)))

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 600.0,
        patience_s: float = PATIENCE_S,
        enough: int | None = None,
    ) -> list[Any]:
        """As :meth:`run`, with a :class:`Failure` in the place of a result that is not there.

        ``patience_s``: for the others, once one has failed. ``enough``: so many answers are waited for. Where ranks died
        or did not answer, all are killed.
        """
        found = self._asked(function, arguments, timeout_s, patience_s, enough or len(self._pipes))
        return [found[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """Let them end by themselves, and kill those that do not."""
        if not self.has_ended:
            self._send(None)
            until = time.monotonic() + self._grace_s
            for process in self._processes:
                process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End them now."""
        self.has_ended = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(20)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()

    # --- what ranks say ------------------------------------------------------------------------

    def _asked(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout_s: float,
        patience_s: float,
        enough: int,
    ) -> dict[int, Any]:
        if self.has_ended:
            return {rank: Failure(rank, "has ended before") for rank in range(len(self._pipes))}
        self._send((function, arguments))
        return self._answers(timeout_s, patience_s, enough)

    def _send(self, request: Any) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # it has died, as its outcome will say
                pipe.send(request)

    def _answers(self, timeout_s: float, patience_s: float, enough: int) -> dict[int, Any]:
        """Outcomes by rank, in the order in which they came; then the failures of those that said nothing."""
        found: dict[int, Any] = {}
        end, silence = time.monotonic() + timeout_s, f"said nothing within {timeout_s:.0f} s"
        while len(found) < enough and time.monotonic() < end:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            for pipe in connection.wait(list(waiting), LOOK_S):
                rank = waiting.pop(pipe)
                found[rank] = self._received(rank)
            for pipe, rank in waiting.items():
                # A child of its own may hold its end of the pipe open.
                if not self._processes[rank].is_alive() and not pipe.poll():
                    found[rank] = self._death_of(rank)
            failed = next((each for each in found.values() if isinstance(each, Failure)), None)
            if failed is not None and time.monotonic() + patience_s < end:
                end = time.monotonic() + patience_s
                silence = f"said nothing within {patience_s:.0f} s after rank {failed.rank} had failed"
        for rank in range(len(self._pipes)):
            found.setdefault(rank, Failure(rank, silence))
        if any(isinstance(each, Failure) and not each.trace for each in found.values()):
            self.kill()
        return found

    def _received(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            return self._death_of(rank)

    def _death_of(self, rank: int) -> Failure:
        process = self._processes[rank]
        process.join(5)
        if process.exitcode is None:
            return Failure(rank, "closed its pipe", is_death=True)
        return _ended(rank, process.exitcode)


def on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 600.0, **settings: Any
) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each of so many ranks that are spawned for it alone, by rank."""
    with SpawnedRanks(ranks, **settings) as spawned:
        return spawned.run(function, *arguments, timeout_s=timeout_s)


def launch(
    command: Sequence[str], ranks: int, *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> None:
    """Run a program on so many ranks, as a launcher starts it on one machine. Raises :class:`RankFailed`, and ends all."""
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env={**os.environ, **place, **own}))
        _await_all(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _await_all(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise RankFailed(_ended(rank, code))
            if code is None and time.monotonic() > end:
                raise RankFailed(Failure(rank, f"has not ended within {timeout_s:.0f} s"))
        if None not in codes:
            return
        time.sleep(LOOK_S)


def in_one_line(main: Callable[[], int]) -> int:
    """The exit code of a program; where one of its ranks failed, that line and 1. ``TRINE_DEBUG=1`` shows where it failed."""
    try:
        return main()
    except RankFailed as error:
        trace = error.failure.trace if os.environ.get("TRINE_DEBUG") else ""
        print(f"{trace}{error}", file=sys.stderr)
        return 1


def cause(outcomes: Iterable[Any]) -> Failure | None:
    """The failure that is why others failed: of a rank that died, or else the first that is no mere silence."""
    failures = [each for each in outcomes if isinstance(each, Failure)]
    return min(failures, key=lambda each: (not each.is_death, not each.trace), default=None)


def _results(found: Mapping[int, Any]) -> list[Any]:
    failure = cause(found.values())
    if failure is not None:
        raise RankFailed(failure)
    return [found[rank] for rank in range(len(found))]


def _ended(rank: int, code: int) -> Failure:
    if code >= 0:
        return Failure(rank, f"ended with exit code {code}", is_death=True)
    return Failure(rank, f"was ended by signal {-code} ({signal.Signals(-code).name})", is_death=True)


def _free_port() -> int:
    """A port of this machine that nobody listens on; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# --- in the ranks --------------------------------------------------------------------------------


def _serve(rank: int, ranks: int, pipe: Any, environment: Mapping[str, str], group: Any) -> None:
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    with suppress(EOFError, BrokenPipeError):  # whoever asks has ended
        _answer(rank, pipe, lambda: _join(rank, ranks, *group))
        while (task := pipe.recv()) is not None:
            function, arguments = task
            _answer(rank, pipe, functools.partial(function, rank, *arguments))
    if group[0] is not None:
        from torch import distributed

        if distributed.is_initialized():  # the work may have ended it
            distributed.destroy_process_group()


def _answer(rank: int, pipe: Any, act: Callable[[], Any]) -> None:
    try:
        pipe.send(act())
    except BaseException as error:  # noqa: BLE001 - whoever asked is told
        said = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
        pipe.send(Failure(rank, said, traceback.format_exc()))


def _join(rank: int, ranks: int, backend: str | None, init_method: str, timeout_s: float | None) -> None:
    if backend is None:
        return
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    distributed.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=ranks, timeout=timeout
    )
