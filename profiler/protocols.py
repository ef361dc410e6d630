"""What the session expects of the collectors that it drives.

The session (:mod:`trine.profiler.session`) owns time, steps and the record; collectors own what they
observe. Each collector is called under a guard: an exception is logged once, the collector goes quiet,
the record says so, and training never notices. Times are ``time.perf_counter_ns()`` nanoseconds, which
on Linux is the clock of C++ ``std::chrono::steady_clock``; the session anchors them to Unix time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

__all__ = ["CollectiveSource", "DeepWindowing", "FlopCounting", "Note"]


class Note(Protocol):
    """Tell the record something about its own data; ends as a ``Quality`` of this rank."""

    def __call__(self, id: str, severity: Literal["info", "warning", "error"], message: str) -> None:
        """Say it once; the same thing again is dropped."""


class CollectiveSource(Protocol):
    """Where collectives come from: ``open_source(note) -> CollectiveSource`` in ``profiler/collectives.py``.

    ``name`` becomes ``metadata["collectives_source"]``: ``observer``, ``python``, ``flight_recorder``, ``none``;
    it is read again after every drain, so a source may change it.
    """

    name: str

    def start(self) -> None:
        """Begin observing. Called once, in the training thread, before the first step."""

    def drain(self) -> Mapping[str, Any]:
        """Collectives that ended since the last drain, as columns of the ``collectives`` table.

        Called in the background thread, about twice a second, and once after :meth:`stop`. Columns left out are
        missing; text columns are sequences of ``str | None``; ``issued_ns``, ``start_ns`` and ``end_ns`` are
        ``perf_counter_ns`` or ``MISSING``. ``step`` is filled in by the session. ``group`` is the process group's name
        (``group_name`` of the group, as in ``torch.distributed.distributed_c10d._world.pg_names``).
        """

    def stop(self) -> None:
        """Stop observing and remove every hook."""


class FlopCounting(Protocol):
    """``FlopCounter(note)`` in ``profiler/flops.py``."""

    def begin_step(self, index: int) -> None:
        """Called in the training thread just before step ``index`` starts."""

    def end_step(self, index: int) -> Mapping[str, float] | None:
        """``{"counted": model FLOPs, "executed": with recomputation}`` of the step that was counted, else ``None``."""

    def close(self) -> None:
        """Stop counting: the loop may have ended within the step that is counted."""


class DeepWindowing(Protocol):
    """``DeepWindows(folder, rank, world_size, local_rank, windows, note)`` in ``profiler/windows.py``.

    ``folder`` is this rank's own folder (the run's folder is its parent, or its grandparent in a later attempt);
    traces are written there as ``window-*.json`` or ``window-*.json.gz``.
    """

    def before_step(self, index: int) -> None:
        """Called in the training thread before the step's clock starts."""

    def after_step(self, index: int, duration_ns: int) -> None:
        """Called in the training thread after the step's clock stopped: its work is in no step."""

    def close(self) -> None:
        """Stop a running window and remove every hook and signal handler."""
