"""Bandwidths that cannot be mistaken: bytes a second, of one device, in one direction.

Vendors quote links in bits or in bytes, both directions together or one, a node's adapters or a device's. A plain number
says none of it, so nothing here takes one: a :class:`Bandwidth` is made by a name that says what is given.

    Bandwidth.gigabytes_per_s(450)                  NVLink 4, one direction, of one device
    Bandwidth.gigabytes_per_s(900, directions=2)    the same, as the datasheet adds both directions
    Bandwidth.gigabits_per_s(400)                   an adapter a device
    Bandwidth.gigabits_per_s(1600, devices=8)       a node's adapters, shared by its eight devices
    Bandwidth.parse("400 Gb/s")                     from a file; the unit is required
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from trine.record.errors import UsageError

__all__ = ["Bandwidth", "parse_bytes", "parse_sized", "spell_bytes", "spell_seconds"]

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
#: Sizes: 80GiB is 80·2³⁰ bytes, 80GB is 80·10⁹.
_SIZE_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGTP", 1)
    for suffix, base in (("IB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*")
_WRITTEN = re.compile(r"\s*([0-9.eE+-]+)\s*([kmgtKMGT]?)(i?)([bB])\s*(?:/|p)\s*s\s*")


@dataclass(frozen=True, slots=True, order=True)
class Bandwidth:
    """``bytes_per_s`` of one device in one direction; positive and finite."""

    bytes_per_s: float

    def __post_init__(self) -> None:
        value = self.bytes_per_s
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UsageError(f"a bandwidth must be a positive number of bytes a second, not {value!r}")

    @classmethod
    def gigabytes_per_s(cls, value: float, *, directions: int = 1, devices: int = 1) -> Bandwidth:
        """Of 10⁹ bytes; ``directions=2`` where both are added up, ``devices`` that share the figure."""
        return cls(value * 1e9 / directions / devices)

    @classmethod
    def gigabits_per_s(cls, value: float, *, directions: int = 1, devices: int = 1) -> Bandwidth:
        """Of 10⁹ bits; ``directions=2`` where both are added up, ``devices`` that share the figure."""
        return cls(value * 1e9 / 8 / directions / devices)

    @classmethod
    def parse(cls, text: str) -> Bandwidth:
        """From ``"450 GB/s"`` or ``"400 Gb/s"``: decimal prefixes, B for bytes and b for bits. Raises ``UsageError``."""
        found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if found is None or found[3]:
            raise UsageError(
                f'{text!r} is no bandwidth: write a number with its unit, "450 GB/s" in bytes or "400 Gb/s" in bits, '
                "of one device in one direction"
            )
        try:
            value = float(found[1])
        except ValueError:
            raise UsageError(f"{found[1]!r} in {text!r} is no number") from None
        return cls(value * _PREFIXES[found[2].lower()] / (8 if found[4] == "b" else 1))

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.4g} GB/s"


def parse_bytes(text: str | float) -> int:
    """A number of bytes: as it is, or from ``"80GiB"``, ``"24 GB"``, ``"24e9"``. Raises ``UsageError``."""
    found = None if isinstance(text, bool) else _SIZE.fullmatch(str(text))
    value = math.nan if found is None else float(found[1]) * _SIZE_UNITS.get(found[2].upper(), math.nan)
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is no size: write 80GiB, 24GB or a number of bytes")
    return int(value)


def parse_sized(
    text: str | float, least_bytes: int, what: str, examples: str, *, or_none: bool = False
) -> int:
    """:func:`parse_bytes` of what is never smaller than ``least_bytes``: less is a number that has lost its unit.

    ``what`` and ``examples`` word the refusal; ``or_none``: 0 is taken, too. Raises ``UsageError``.
    """
    size = parse_bytes(text)
    if size < least_bytes and not (or_none and size == 0):
        raise UsageError(f"{text!r} is no {what}, but {size} bytes: write it with its unit, {examples}")
    return size


def spell_bytes(value: float) -> str:
    """For people: ``"12.3 GiB"``."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def spell_seconds(value: float) -> str:
    """For people: ``"1.23 s"``, ``"45.6 ms"``; from a thousand seconds on minutes, hours and days."""
    for unit, factor, least in (("days", 86400, 360_000), ("h", 3600, 3600), ("min", 60, 1000)):
        if abs(value) >= least:
            return f"{value / factor:.1f} {unit}"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.1f} µs"
