"""What Trine raises.

    TrineError                 anything a user can mend; the command line prints it as one line
    ├── UsageError             a wrong argument or configuration key            exit code 2
    ├── UnreadableInput        a path that holds nothing we can show            exit code 2
    ├── NotComparable          two runs that cannot be compared                 exit code 3
    └── TrainingError          training cannot go on: gradients, ranks          exit code 1

Every message is one line: what is wrong, where, and what to do instead.
"""

from __future__ import annotations

__all__ = ["NotComparable", "TrainingError", "TrineError", "UnreadableInput", "UsageError"]


class TrineError(Exception):
    """Base of every error that reaches a user; ``exit_code`` is what the command line returns."""

    exit_code = 2


class UsageError(TrineError):
    """A wrong argument or configuration value."""


class UnreadableInput(TrineError):
    """A path from which nothing can be shown."""


class NotComparable(TrineError):
    """Two runs that cannot be compared: too short, or from different environments."""

    exit_code = 3


class TrainingError(TrineError):
    """Training cannot go on: gradients that are not finite, a rank that was lost. What was trained so far is sound."""

    exit_code = 1
