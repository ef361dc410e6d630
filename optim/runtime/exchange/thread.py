"""One thread that communicates gradients, in the order in which they were submitted, on a process group of its own.

A reduction of several phases (exchange, sum, exchange again) that chains its phases by callbacks breaks as soon as two
buckets are under way: callbacks run in whatever order futures complete, ranks then issue collectives in different
orders, and gloo's two workers wait inside each other's callbacks (PyTorch's PowerSGD hook deadlocks so). Here a bucket
is reduced from its first phase to its last before the next one begins, and no other collective shares the group.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.futures import Future

from trine.optim.runtime.groups import end_group
from trine.record.errors import TrineError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["CommunicationThread", "ExchangeFailed", "thread_of"]

logger = logging.getLogger("trine")

#: How long closing waits for a reduction that is under way.
JOIN_S = 5.0


class ExchangeFailed(TrineError):
    """Gradients could not be averaged; the step's gradients are NaN, and no further step may be taken."""

    exit_code = 1


class CommunicationThread:
    """Runs work strictly in submission order, off the training thread; on CUDA on a stream of its own.

    Every rank of ``ranks`` (all, by default) must make it at the same point, since it makes a process group, and must
    submit the same work in the same order. ``group`` is for that work alone: nothing else may use it.
    """

    def __init__(self, device: torch.device, ranks: Sequence[int] | None = None) -> None:
        # A rank that fails leaves the others waiting for as long as the program said for its own group.
        self.group = distributed.new_group(
            None if ranks is None else list(ranks),
            timeout=default_timeout(device),
            group_desc="trine gradient exchange",
        )
        self.device = device
        self.failure: ExchangeFailed | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], torch.Tensor, Any, Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="trine-exchange", daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, work: Callable[[], None], flat: torch.Tensor) -> Future[torch.Tensor]:
        """Run ``work``, which changes ``flat`` in place, after all that was submitted before; a future of ``flat``.

        The future never holds an error: what failed fills ``flat`` with NaN, so that it cannot be taken for a gradient,
        and :meth:`raise_failure` says what happened, in words. Raises ``ExchangeFailed`` when closed.
        """
        if self._closed:
            raise ExchangeFailed("this engine was closed and no longer averages gradients: make a new one")
        devices = [] if self._stream is None else [self.device]
        future: Future[torch.Tensor] = Future(devices=devices)  # type: ignore[arg-type]
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self.device))
        self._queue.put((work, flat, future, ready))
        return future

    def raise_failure(self) -> None:
        """Raise ``ExchangeFailed`` where a reduction has failed, on the thread that trains."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Stop after what was submitted; a thread that does not return in five seconds is left to the process's end."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        if threading.current_thread() is self._thread:  # the collector found an engine that nobody holds
            return
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            logger.warning("the gradient exchange was still waiting for other ranks when it was closed")
        else:
            end_group(self.group)

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.device)
        with torch.no_grad(), torch.cuda.stream(self._stream):  # a stream of None changes nothing
            while (item := self._queue.get()) is not None:
                work, flat, future, ready = item
                if ready is not None and self._stream is not None:
                    self._stream.wait_event(ready)
                    flat.record_stream(self._stream)
                self._do(work, flat)
                future.set_result(flat)
                del item, work, flat, future, ready  # the training thread decides how long they live

    def _do(self, work: Callable[[], None], flat: torch.Tensor) -> None:
        if self.failure is None:
            try:
                work()
                return
            except Exception as error:  # noqa: BLE001 - carried into the training thread
                self.failure = _failure_of(error)
        # Not one more collective: the ranks no longer agree on which comes next.
        flat.fill_(float("nan"))


def thread_of(assembly: Assembly) -> CommunicationThread:
    """The assembly's communication thread, made at the first call, which every rank must make at the same point.

    A failure in it is raised at the step, before anything is done with the gradients.
    """
    if assembly.communication is None:
        thread = CommunicationThread(assembly.facts.device)
        assembly.communication = thread
        assembly.collect.insert(0, thread.raise_failure)
        assembly.closers.append(thread.close)
    return assembly.communication


def default_timeout(device: torch.device) -> timedelta | None:
    """How long the default group's collectives wait: what the program asked for when it made that group."""
    backend = distributed.group.WORLD._get_backend(device) if distributed.group.WORLD is not None else None
    stated = getattr(getattr(backend, "options", None), "_timeout", None)
    return stated if isinstance(stated, timedelta) else None


def _failure_of(error: Exception) -> ExchangeFailed:
    """One line about what went wrong, keeping ``error`` as its cause."""
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else type(error).__name__
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    failure = ExchangeFailed(
        f"averaging gradients failed on rank {rank}: {said} (if another rank failed or left, its log says why)"
    )
    failure.__cause__ = error
    return failure
