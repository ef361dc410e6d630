"""Days and money of a training run, with the interval of the step that they follow from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from trine.record.errors import UsageError

__all__ = ["Range", "RunCost", "parse_count", "run_cost"]

_DAY_S, _HOUR_S = 86_400.0, 3_600.0
#: Beyond these nobody means what was written: a thousand times all text there is, and no currency has such coins.
_MOST_TOKENS, _MOST_PRICE = 1e18, 1e9
_COUNT = re.compile(r"\s*([0-9]+\.?[0-9]*(?:[eE][0-9]+)?|\.[0-9]+(?:[eE][0-9]+)?)\s*([kKmMgGbBtT]?)\s*")
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True)
class Range:
    """A value and where it lies in nine of ten cases."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """All three."""
        return Range(self.value * factor, self.low * factor, self.high * factor)

    def dividing(self, amount: float) -> Range:
        """So much of something for each of these: a rate, which is low where they are high."""
        return Range(amount / self.value, amount / self.high, amount / self.low)


@dataclass(frozen=True, slots=True)
class RunCost:
    """``days`` without interruptions; ``price`` in the currency of the price of a device's hour, None where none was given."""

    tokens: float
    days: Range
    device_hours: Range
    price: Range | None


def run_cost(
    step_s: Range, tokens_per_step: int, devices: int, tokens: float, price: float | None
) -> RunCost:
    """Of ``tokens`` at ``step_s`` a step; ``price`` of one device for an hour. Raises ``UsageError``."""
    if not 0 < tokens <= _MOST_TOKENS:
        raise UsageError(f"tokens must be a positive number up to {_MOST_TOKENS:.0e}, not {tokens}")
    if price is not None and not 0 <= price <= _MOST_PRICE:
        raise UsageError(f"price must be a device-hour's, from 0 to {_MOST_PRICE:.0e}, not {price}")
    seconds = step_s.times(tokens / tokens_per_step)
    hours = seconds.times(devices / _HOUR_S)
    return RunCost(tokens, seconds.times(1 / _DAY_S), hours, None if price is None else hours.times(price))


def parse_count(text: str) -> float:
    """``"15T"``, ``"300B"``, ``"1.4e12"``: a number of things. Raises ``UsageError``."""
    found = _COUNT.fullmatch(text)
    value = float(found[1]) * _SUFFIXES[found[2].lower()] if found else math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{text!r} is no number of tokens: write 15T, 300B or 1.4e12")
    return value
