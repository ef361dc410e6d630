"""Numbers as people read them, rounded as every report rounds; what cannot be said is a dash."""

from __future__ import annotations

import time

from trine.analyzers import units

__all__ = ["NOTHING", "age", "bandwidth", "count", "duration", "flops", "percent", "ratio", "size"]

#: What stands where a number cannot be said; the reason is under data quality.
NOTHING = "–"


def duration(ns: float | None) -> str:
    """Nanoseconds as ``48.2 ms``."""
    return NOTHING if ns is None else units.duration(ns)


def size(value: float | None) -> str:
    """Bytes as ``1.50 GiB``."""
    return NOTHING if value is None else units.size(value)


def bandwidth(bytes_per_s: float | None) -> str:
    """Bytes per second as ``12.3 GB/s`` (decimal, as links are sold)."""
    return NOTHING if bytes_per_s is None else units.rate(bytes_per_s)


def flops(value: float | None, unit: str = "FLOP") -> str:
    """FLOPs as ``312 TFLOP``; give ``unit="FLOP/s"`` for a rate."""
    if value is None:
        return NOTHING
    text = units.count(value)
    amount, _, prefix = text.partition(" ")
    return f"{amount} {prefix}{unit}"


def count(value: float | None) -> str:
    """A whole number in groups of three: ``1 234 567``."""
    return NOTHING if value is None else f"{value:,.0f}".replace(",", "\u202f")


def percent(share: float | None) -> str:
    """A share of one as ``12 %``."""
    return NOTHING if share is None else units.percent(share)


def ratio(part: float | None, whole: float | None) -> str:
    """``part`` of ``whole`` as a percentage; nothing where there is no whole."""
    return NOTHING if part is None or not whole else percent(part / whole)


def age(timestamp_s: float, now_s: float | None = None) -> str:
    """How long ago a Unix time was: ``12 s ago``, ``3 h ago``, else the date."""
    passed = max(0.0, (time.time() if now_s is None else now_s) - timestamp_s)
    if passed < 60:
        return f"{passed:.0f} s ago"
    if passed < 3600:
        return f"{passed / 60:.0f} min ago"
    if passed < 86400:
        return f"{passed / 3600:.0f} h ago"
    return time.strftime("%Y-%m-%d", time.localtime(timestamp_s))
