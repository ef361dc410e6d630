"""Who a send or receive was for: gloo's own events do not say.

``ProcessGroup.send``, ``recv`` and ``recv_anysource`` are wrapped on the class, which every Python caller goes
through (``dist.send``, ``isend``, ``batch_isend_irecv``, pipelining) and no identity check sees.
A call is found again by its thread and time: gloo's event begins inside it.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from trine.record.model import MISSING

from .groups import global_rank, group_name

__all__ = ["Call", "PointToPointCalls"]

_METHODS = ("send", "recv", "recv_anysource")
#: More than any second holds; older calls are forgotten first.
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Call:
    """A point-to-point call; ``peer`` is a global rank, ``MISSING`` for "from any"."""

    thread: int
    begun_ns: int
    ended_ns: int
    group: str | None
    peer: int


class PointToPointCalls:
    """Remembers the point-to-point calls of this process while started."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=_MOST)
        self._originals: dict[str, Any] = {}

    def start(self) -> None:
        """Wrap the methods; does nothing where torch has no distributed."""
        try:
            from torch._C._distributed_c10d import ProcessGroup
        except ImportError:
            return
        for method in _METHODS:
            # From the class's own dictionary: getattr would give what is bound to nothing and cannot be put back.
            original = vars(ProcessGroup).get(method)
            if original is not None and method not in self._originals:
                self._originals[method] = original
                setattr(ProcessGroup, method, self._wrapped(getattr(ProcessGroup, method), method))

    def stop(self) -> None:
        """Put the methods back, unless somebody wrapped them after us."""
        if not self._originals:
            return
        from torch._C._distributed_c10d import ProcessGroup

        for method, original in self._originals.items():
            if getattr(getattr(ProcessGroup, method), "_trine", None) is self:
                setattr(ProcessGroup, method, original)
        self._originals = {}

    def _wrapped(self, original: Any, method: str) -> Any:
        calls = self._calls

        def call(group: Any, *arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter_ns()
            try:
                return original(group, *arguments, **named)
            finally:
                peer = arguments[1] if len(arguments) > 1 else next(iter(named.values()), None)
                if method == "recv_anysource" or not isinstance(peer, int):
                    peer = MISSING
                name = group_name(group)
                calls.append(
                    Call(threading.get_native_id(), begun, time.perf_counter_ns(), name, _global(group, peer))
                )

        call._trine = self  # type: ignore[attr-defined]
        call.__name__ = method
        return call

    def find(self, thread: int, at_ns: int) -> Call | None:
        """The call of ``thread`` that was running at ``at_ns``."""
        calls = list(self._calls)
        last = bisect.bisect_right(calls, at_ns, key=lambda call: call.ended_ns)
        # Calls are in the order in which they ended; several threads may have been in one.
        for call in calls[last:]:
            if call.thread == thread and call.begun_ns <= at_ns:
                return call
            if call.begun_ns > at_ns and call.thread == thread:
                return None
        return None

    def forget_before(self, at_ns: int) -> None:
        """Drop calls that ended before ``at_ns``."""
        while self._calls and self._calls[0].ended_ns < at_ns:
            self._calls.popleft()


def _global(group: Any, peer: int) -> int:
    found = None if peer == MISSING else global_rank(group, peer)
    return MISSING if found is None else found
