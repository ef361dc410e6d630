"""What keeps our faults out of the training loop: logged once, said in the record, and quiet from then on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

__all__ = ["Guard"]

logger = logging.getLogger("trine")

Result = TypeVar("Result")

_MOST_NOTES = 200


class Guard:
    """Runs collectors; keeps what the record must say about itself. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._quiet: set[str] = set()
        self._notes: dict[tuple[str, str], dict[str, str]] = {}

    @property
    def notes(self) -> list[dict[str, str]]:
        """Notes for ``rank.json``: id, severity, message."""
        return list(self._notes.values())

    def note(self, id: str, severity: Literal["info", "warning", "error"], message: str) -> None:
        """Say something in the record; the same thing only once."""
        with self._lock:
            if len(self._notes) < _MOST_NOTES:
                message = " ".join(message.split())
                self._notes.setdefault((id, message), {"id": id, "severity": severity, "message": message})

    def is_quiet(self, collector: str) -> bool:
        """Whether that collector has failed before."""
        return collector in self._quiet

    def fail(self, collector: str, error: BaseException) -> None:
        """A collector raised: log it once, say it in the record, call it no more."""
        if collector in self._quiet:
            return
        self._quiet.add(collector)
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            "the %s collector failed and is off from here on (%s)", collector, reason, exc_info=error
        )
        self.note(
            "collector-failed", "warning", f"the {collector} collector failed and went quiet ({reason})"
        )

    def run(self, collector: str, call: Callable[..., Result], *arguments: Any) -> Result | None:
        """``call(*arguments)``, or ``None`` when it raises or has raised before."""
        if collector in self._quiet:
            return None
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.fail(collector, error)
            return None
