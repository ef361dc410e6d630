"""Budgets: absolute limits, in a TOML file that lies in the repository.

    # budget.toml
    step_time_ns = 120_000_000          # at most
    peak_bytes = 34_359_738_368         # at most
    tokens_per_s = 50_000               # at least
    mfu_palm = 0.40                     # at least
    exposed_communication_share = 0.15  # at most

Every metric of :data:`trine.analyzers.run_facts.METRICS` may stand here; which way its limit points
follows from the metric.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trine.analyzers.run_facts import METRICS
from trine.record.errors import UnreadableInput, UsageError

__all__ = ["parse_budget", "read_budget"]


def read_budget(path: Path) -> dict[str, float]:
    """Metric → limit. Raises ``UnreadableInput`` when the file cannot be read, ``UsageError`` when a key
    or a value is wrong, with the key's name."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UnreadableInput(f"cannot read the budget {path}: {reason}") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnreadableInput(f"the budget {path} is not TOML: {error}") from None
    return parse_budget(values, str(path))


def parse_budget(values: Mapping[str, Any], where: str) -> dict[str, float]:
    """Check the keys and values of a budget. Raises ``UsageError``, see :func:`read_budget`."""
    if not values:
        raise UsageError(f"the budget {where} sets no limit; one key is enough, for example step_time_ns")
    return {name: _limit(name, value, where) for name, value in values.items()}


def _limit(name: str, value: Any, where: str) -> float:
    if name not in METRICS:
        close = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
        way_out = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(METRICS)}"
        raise UsageError(f"{where}: unknown budget {name!r}; {way_out}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where}: {name} must be a number{_unit_hint(name)}, not {value!r}")
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{where}: {name} must be a finite number of at least 0, not {value!r}")
    if (name.endswith("_share") or name.startswith("mfu")) and value > 1:
        raise UsageError(f"{where}: {name} is a share of one, not {value!r}; write 0.4 for 40 %")
    return float(value)


def _unit_hint(name: str) -> str:
    for ending, unit in (("_ns", "nanoseconds"), ("_bytes", "bytes"), ("_per_s", "a rate per second")):
        if name.endswith(ending):
            return f" ({unit})"
    return " (a share of one)"
