"""Who watches over a process's engines: `trine verify` gives them another configuration and looks at what they do.

Imports no torch. One override a process, set before the script runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trine.optim.config import Config
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Override", "current_override", "engine_was_made", "note_engine", "set_override"]


class Override(Protocol):
    """What :func:`trine.optimize` asks before it applies a configuration and after it has."""

    def configuration(self, given: Config) -> Config:
        """The configuration to apply instead of the one that the script gives."""

    def divides_by(self, given: Config) -> Config:
        """The configuration by whose layout the data are divided: both sides of a comparison must see the same samples."""

    def attach(self, assembly: Assembly) -> None:
        """Look at what was assembled; its hooks may be extended."""


_current: Override | None = None


def current_override() -> Override | None:
    """The override of this process, ``None`` without one."""
    return _current


def set_override(override: Override | None) -> None:
    """Set it, or take it out with ``None``."""
    global _current
    _current = override


_made = False


def note_engine() -> None:
    """An engine was made in this process."""
    global _made
    _made = True


def engine_was_made() -> bool:
    """Whether one was: a configuration from outside would be applied a second time."""
    return _made
