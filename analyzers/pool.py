"""Ranks read and reduced in worker processes, each result the size of a summary.

A worker is a fresh interpreter that runs this module and nothing else. ``multiprocessing`` would
import the caller's main module again in every worker, which runs a script without a ``__main__``
guard a second time; a caller of ``trine.analyze`` must not need one. A worker that dies or exceeds its
time costs its own rank alone.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import IO, Any

from trine.record.errors import TrineError, UnreadableInput
from trine.record.model import RankSource

from ._packed import packed
from .results import RankSummary
from .selection import Selection

__all__ = ["Outcome", "reduce_in_pool", "reduce_source"]

#: A rank's summary, or the error that kept it from being read.
Outcome = RankSummary | TrineError

#: A rank that takes longer than this to read is given up, so that no analysis hangs for ever.
RANK_TIMEOUT_S = 1800.0

_HEADER = struct.Struct("<Q")


def reduce_source(source: RankSource, selection: Selection) -> Outcome:
    """Read one rank and reduce it. Errors are returned, not raised, so that they cost this rank alone."""
    from .summary import summarize

    try:
        return summarize(source.read(source), selection)
    except TrineError as error:
        return error
    except MemoryError:
        return UnreadableInput(
            f"{source.name} does not fit in memory; analyse fewer ranks at a time (workers=1)"
        )
    except Exception as error:  # one rank's defect must not cost the others
        if os.environ.get("TRINE_DEBUG"):
            raise
        return UnreadableInput(
            f"{source.name}: unexpected {type(error).__name__}: {error}; "
            "set TRINE_DEBUG=1 to see where, and please report it"
        )


def reduce_in_pool(
    sources: Sequence[RankSource],
    selection: Selection,
    workers: int,
    timeout_s: float = RANK_TIMEOUT_S,
) -> Iterator[tuple[RankSource, Outcome]]:
    """Outcomes as they come, in any order."""
    local = threading.local()
    started: list[_Worker] = []

    def one(source: RankSource) -> Outcome:
        worker: _Worker | None = getattr(local, "worker", None)
        if worker is None or not worker.alive:
            worker = local.worker = _Worker()
            started.append(worker)
        return worker.reduce(source, selection, timeout_s)

    executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="trine-rank")
    try:
        futures = {executor.submit(one, source): source for source in sources}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.close()
        executor.shutdown(wait=True)


class _Worker:
    """One interpreter that reduces rank after rank."""

    def __init__(self) -> None:
        environment = dict(os.environ)
        # What this process can import, the worker must too: a source's reader may live anywhere.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import _serve; _serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def reduce(self, source: RankSource, selection: Selection, timeout_s: float) -> Outcome:
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            _send(self._process.stdin, (source, selection))
            outcome: Outcome = _receive(self._process.stdout)
            return outcome
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._process.kill()
            code = self._process.wait()
            if late.is_set():
                return UnreadableInput(
                    f"{source.name} was not read within {timeout_s:.0f} s and was given up"
                )
            return UnreadableInput(
                f"{source.name}: its reader ended with status {code} ({type(error).__name__}), perhaps for want of memory; "
                "analyse fewer ranks at a time (workers=1)"
            )
        finally:
            timer.cancel()

    def close(self) -> None:
        if self.alive:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                _close_quietly(stream.close)


def _close_quietly(close: Callable[[], None]) -> None:
    try:
        close()
    except BrokenPipeError:
        return  # what was not yet written to a dead worker needs no reader


def _send(stream: IO[bytes], value: Any) -> None:
    content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_HEADER.pack(len(content)) + content)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    (length,) = _HEADER.unpack(header)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return pickle.loads(content)


def _serve() -> None:
    """The worker's loop: a request in, an outcome out, until the input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever prints must not end up among the answers
    while True:
        try:
            source, selection = _receive(requests)
        except EOFError:
            return
        outcome = reduce_source(source, selection)
        try:
            _send(answers, packed(outcome) if isinstance(outcome, RankSummary) else outcome)
        except BrokenPipeError:
            # Whoever asked is gone, and so is whoever would read a traceback; the flush at exit would bring another.
            os._exit(1)
