"""What the runtime says of what it refuses; importable by spawned processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trine.record.errors import TrineError

__all__ = ["refusal_of"]


def refusal_of(act: Callable[[], Any], otherwise: str = "not refused", closing: Any = None) -> str:
    """The line of the error that ``act()`` raises, or ``otherwise``. An engine to close is closed in any case."""
    try:
        act()
    except TrineError as error:
        return str(error)
    finally:
        if closing is not None:
            closing.close()
    return otherwise
