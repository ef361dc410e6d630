"""How rooms speak to each other during training.

The optimisation runtime emits, the profiler listens. Without a listener an emit costs one
attribute load and one test. A listener that raises is dropped, once and for all, with one log
line: nothing of ours may reach the training loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["emit", "emit_metric", "is_heard", "listen"]

logger = logging.getLogger("trine")

Listener = Callable[[str, dict[str, Any]], None]

_listeners: tuple[Listener, ...] = ()


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener(kind, values)`` for every event; returns a function that stops it.

    Kinds: ``step_begin`` {index}, ``step_end`` {index, tokens, samples, loss}, ``step_cancel`` {index} (it began, and
    there was no batch for it), ``phase`` {name}, ``metric`` {name, value}, ``configuration`` {configuration, effects}
    (what an engine applies, and what that changed, in words), ``microbatches`` {rows} (what a pipeline's stage did in the
    step: direction as the model's table of that name has it, stage, index, start and end by ``perf_counter_ns``),
    ``region_begin`` {region, name} and ``region_end`` (what a run does beside training, such as a ``checkpoint``).
    """
    global _listeners
    _listeners = (*_listeners, listener)

    def stop() -> None:
        global _listeners
        _listeners = tuple(other for other in _listeners if other is not listener)

    return stop


def is_heard() -> bool:
    """Whether anybody listens: for events whose values cost something to put together."""
    return bool(_listeners)


def emit_metric(name: str, read: Callable[[], float | None]) -> None:
    """Tell every listener a metric's value, which is read only where somebody listens. ``None`` is not told."""
    if not _listeners:
        return
    value = read()
    if value is not None:
        emit("metric", name=name, value=value)


def emit(kind: str, **values: Any) -> bool:
    """Tell every listener, and say whether there is any. Never raises."""
    global _listeners
    if not _listeners:
        return False
    for listener in _listeners:
        try:
            listener(kind, values)
        except Exception:
            logger.warning("a listener of %r events failed and was dropped", kind, exc_info=True)
            _listeners = tuple(other for other in _listeners if other is not listener)
    return True
