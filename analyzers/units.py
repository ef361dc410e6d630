"""Numbers in words: one place, so that every report rounds alike."""

from __future__ import annotations

__all__ = ["count", "duration", "interval", "percent", "rank_list", "rate", "size"]


def duration(ns: float) -> str:
    """Nanoseconds to three significant digits with a unit: ``12.3 ms``; from a thousand seconds on minutes, hours and days."""
    if ns == 0:
        return "0"
    sign, value = ("-" if ns < 0 else ""), abs(ns)
    if value >= 1000e9 * 0.9995:
        for unit, factor, least in (
            ("days", 86_400e9, 100 * 3600e9),
            ("h", 3600e9, 3600e9),
            ("min", 60e9, 0.0),
        ):
            if value >= least * 0.9995:
                return f"{sign}{_three_digits(value / factor)} {unit}"
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        # 999.6 µs would round to "1000 µs": go up a unit just before that.
        if value >= factor * 0.9995:
            return f"{sign}{_three_digits(value / factor)} {unit}"
    return f"{sign}{value:.0f} ns"


def size(value: float) -> str:
    """Bytes in binary units: ``1.50 GiB``."""
    sign, amount = ("-" if value < 0 else ""), abs(float(value))
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= factor * 0.9995:
            return f"{sign}{_three_digits(amount / factor)} {unit}"
    return f"{sign}{amount:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Bytes per second in decimal units, as vendors and nccl-tests print them: ``12.3 GB/s``."""
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= factor * 0.9995:
            return f"{_three_digits(bytes_per_s / factor)} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def percent(share: float) -> str:
    """A share of one as a percentage: two digits where it is small, none behind the point above ten."""
    value = share * 100
    if value == 0:
        return "0 %"
    if abs(value) < 0.05:
        return "<0.1 %" if value > 0 else "-<0.1 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.1f} %"


def count(value: float) -> str:
    """A large number with a suffix: ``12.6 M``."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor * 0.9995:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{value:.0f}"


def interval(low: float, high: float) -> str:
    """Two durations as a range: ``10.0 ms to 12.5 ms``, once where they read alike."""
    first, last = duration(low), duration(high)
    return first if first == last else f"{first} to {last}"


def rank_list(ranks: tuple[int, ...] | list[int], most: int = 6) -> str:
    """Ranks as words: ``rank 2``, ``ranks 0 and 6``, ``ranks 0, 1, 2 and 61 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > most:
        head = ", ".join(str(rank) for rank in ranks[: most - 1])
        return f"ranks {head} and {len(ranks) - most + 1} more"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
