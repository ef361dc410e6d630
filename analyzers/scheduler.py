"""Ranks read and reduced by the workers of a Dask cluster: for jobs that one machine reads too slowly.

Only summaries travel back. Workers must see the files under the same paths and have the same Trine; both
are checked, and said in one line. A worker that dies has its ranks tried elsewhere; a rank that kills
every worker it meets is given up alone.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trine
from trine.record.errors import TrineError, UnreadableInput, UsageError
from trine.record.model import RankSource

from ._packed import packed
from .pool import RANK_TIMEOUT_S, Outcome, reduce_source
from .results import RankSummary
from .selection import Selection

__all__ = ["reduce_on_dask"]

#: How long a scheduler may take to answer, and to have its first worker.
CONNECT_TIMEOUT_S = 15.0
#: How long a cluster may be without any worker before the rest is given up.
WORKERLESS_S = 60.0
#: How often a rank is read again whose result was lost with the worker that held it.
MOST_LOST = 5
_TICK_S = 5.0

#: Asked of each worker as text, since nothing of ours can be unpickled where we are not installed.
_PROBE = "getattr(__import__('trine'), '__version__', '') if __import__('importlib.util').util.find_spec('trine') else None"


def reduce_on_dask(
    sources: Sequence[RankSource],
    selection: Selection,
    scheduler: str,
    timeout_s: float = RANK_TIMEOUT_S,
) -> Iterator[tuple[RankSource, Outcome]]:
    """Outcomes as they come, in any order.

    ``scheduler``: the address of a Dask scheduler (``tcp://host:8786``, ``host:8786``) or the path of its
    scheduler file. ``timeout_s``: how long nothing at all may come back. Raises ``UsageError`` where the
    package is not installed, nobody answers, or the workers lack Trine or have another version of it.
    """
    distributed = _package()
    with _quiet(), _connected(distributed, scheduler) as client:
        _check_workers(client, scheduler)

        def submit(source: RankSource) -> Any:
            return client.submit(_reduce, source, selection, pure=False, retries=0)

        def collect(some: Sequence[RankSource]) -> Iterator[tuple[RankSource, Outcome]]:
            futures = {submit(source): source for source in some}
            return _collected(distributed, client, futures, submit, timeout_s)

        yield from _each_for_itself(collect, sources)


class _WorkerDied(UnreadableInput):
    """Every worker that a rank was given to died, be it by this rank or by one that was given to them beside it."""


def _each_for_itself(
    collect: Callable[[Sequence[RankSource]], Iterator[tuple[RankSource, Outcome]]],
    sources: Sequence[RankSource],
) -> Iterator[tuple[RankSource, Outcome]]:
    """Outcomes in which no rank answers for another: Dask blames whatever a worker held when it died, so of several
    that were blamed each is read again with nothing beside it."""
    blamed: list[tuple[RankSource, Outcome]] = []
    for source, outcome in collect(sources):
        if isinstance(outcome, _WorkerDied):
            blamed.append((source, outcome))
        else:
            yield source, outcome
    if len(blamed) < 2:
        yield from blamed
        return
    for source, _ in blamed:
        yield from collect([source])


def _reduce(source: RankSource, selection: Selection) -> Outcome:
    """What a worker does with one rank."""
    if not source.path.exists():
        return UnreadableInput(
            f"{source.name} is not there for the Dask worker on {socket.gethostname()}; "
            "workers must see the files under the same path (a shared file system), or analyse without --scheduler"
        )
    outcome = reduce_source(source, selection)
    return packed(outcome) if isinstance(outcome, RankSummary) else outcome


def _package() -> Any:
    try:
        import distributed
    except ImportError:
        raise UsageError(
            "--scheduler needs Dask's package distributed, which is not installed: pip install 'trine[dask]'"
        ) from None
    return distributed


@contextmanager
def _quiet() -> Iterator[None]:
    """Dask logs what becomes an error of ours anyway."""
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _why_no_address(scheduler: str) -> str | None:
    """What is wrong with an address, or with what a scheduler file states; ``None`` where nothing is."""
    from distributed.comm.addressing import get_address_host_port

    address: Any = scheduler
    try:
        if Path(scheduler).is_file():
            content = json.loads(Path(scheduler).read_bytes())
            address = content.get("address") if isinstance(content, dict) else None
            if not isinstance(address, str):
                return "the file states none"
        _, port = get_address_host_port(address)
    except (OSError, ValueError, RecursionError) as error:
        return _line(error)
    return None if 0 < port < 1 << 16 else f"{port} is no port"


@contextmanager
def _connected(distributed: Any, scheduler: str) -> Iterator[Any]:
    where: dict[str, str] = {"address": scheduler}
    # Before there is a client: one that could not be made leaves tracebacks when it is collected.
    if (why := _why_no_address(scheduler)) is not None:
        raise UsageError(
            f"{scheduler!r} is no address of a Dask scheduler ({why}); give tcp://HOST:PORT or its scheduler file"
        )
    if scheduler.endswith(".json") and not Path(scheduler).is_file():
        raise UsageError(
            f"there is no scheduler file {scheduler}; give the one that `dask scheduler` wrote, or its address"
        )
    if Path(scheduler).is_file():
        where = {"scheduler_file": scheduler}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of versions that differ; what matters is checked and refused
            client = distributed.Client(**where, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise UsageError(
            f"no Dask scheduler answers at {scheduler} within {CONNECT_TIMEOUT_S:.0f} s ({_line(error)}); "
            "start one with `dask scheduler` and name the address that it prints"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{scheduler} is no address of a Dask scheduler ({_line(error)}); give tcp://HOST:PORT or its scheduler file"
        ) from None
    try:
        yield client
    finally:
        client.close(timeout=5)


def _check_workers(client: Any, scheduler: str) -> None:
    """Raises ``UsageError`` unless all workers have this Trine."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_TIMEOUT_S)
    except TimeoutError:
        raise UsageError(
            f"the Dask scheduler at {scheduler} has no worker; start some with `dask worker {scheduler} --nthreads 1`"
        ) from None
    found = client.run(eval, _PROBE)
    without = sorted(address for address, version in found.items() if version is None)
    if without:
        raise UsageError(
            f"{len(without)} of {len(found)} Dask workers cannot import trine (first: {without[0]}); "
            f"install trine {trine.__version__} where they run"
        )
    others = sorted({str(version) for version in found.values()} - {trine.__version__})
    if others:
        raise UsageError(
            f"Dask workers have trine {', '.join(others)} and this is {trine.__version__}; install the same everywhere"
        )


def _watch(distributed: Any, client: Any, futures: list[Any], done: queue.SimpleQueue[Any]) -> None:
    """Put each future into ``done`` when it has come to an end, in a thread of its own."""

    def watch() -> None:
        try:
            for future in distributed.as_completed(futures, loop=client.loop, raise_errors=False):
                done.put(future)
        except Exception as error:  # noqa: BLE001 - this thread has nobody else to tell
            done.put(error)

    threading.Thread(target=watch, name="trine-dask", daemon=True).start()


def _collected(
    distributed: Any,
    client: Any,
    futures: dict[Any, RankSource],
    submit: Callable[[RankSource], Any],
    timeout_s: float,
) -> Iterator[tuple[RankSource, Outcome]]:
    """Outcomes as they come; what does not come is given up with its reason."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    again: Counter[int] = Counter()
    _watch(distributed, client, list(futures), done)
    silent_s = workerless_s = 0.0
    while futures:
        try:
            future = done.get(timeout=_TICK_S)
        except queue.Empty:
            silent_s += _TICK_S
            workerless_s = 0.0 if _has_workers(client) else workerless_s + _TICK_S
            if silent_s < timeout_s and workerless_s < WORKERLESS_S:
                continue
            why = (
                f"nothing came back for {silent_s:.0f} s"
                if workerless_s < WORKERLESS_S
                else "no worker is left"
            )
            for source in futures.values():
                yield source, UnreadableInput(f"{source.name} was given up: of the Dask cluster {why}")
            return
        if isinstance(future, Exception):
            raise UnreadableInput(f"the Dask cluster was lost: {type(future).__name__}: {_line(future)}")
        silent_s = 0.0
        source = futures.pop(future)
        if future.status not in ("finished", "error") and again[source.rank] < MOST_LOST:
            # Read already, and gone with the worker that held it: a rank that kills workers beside it did that.
            again[source.rank] += 1
            new = submit(source)
            futures[new] = source
            _watch(distributed, client, [new], done)
            future.release()
            continue
        yield source, _outcome(future, source)
        future.release()  # the summary is here now, and need not stay on the cluster


def _has_workers(client: Any) -> bool:
    try:
        return bool(client.scheduler_info().get("workers"))
    except (OSError, TimeoutError, ValueError):
        return False


def _outcome(future: Any, source: RankSource) -> Outcome:
    if future.status == "finished":
        outcome: Outcome = future.result()
        return outcome
    error = future.exception() if future.status == "error" else None
    if isinstance(error, TrineError):
        return error
    if type(error).__name__ == "KilledWorker":
        return _WorkerDied(
            f"{source.name}: every Dask worker that read it died, perhaps for want of memory; "
            "give workers more of it and one thread each (--nthreads 1)"
        )
    told = "it was lost with its worker" if error is None else f"{type(error).__name__}: {_line(error)}"
    return UnreadableInput(f"{source.name} was not read on the Dask cluster: {told}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
