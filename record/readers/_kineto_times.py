"""Times of a trace as exact integers.

Kineto writes microseconds as decimal text: whole ones up to torch 2.2, then with up to three
decimals. An absolute Unix time with decimals has 19 significant digits; a double keeps 16, which
is a grid of 256 ns. So digits are added up here as integers, a whole column at a time, and the
double never exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from ..model import MISSING

__all__ = ["as_doubles_say", "nanoseconds", "nanoseconds_of", "nanoseconds_of_numbers", "numbers", "whole"]

Integers = npt.NDArray[np.int64]

_LIMIT = 2**62  # so that adding a base time or a duration cannot overflow
_WIDTH = 24
_LARGEST_MICROSECONDS = _LIMIT // 1000


def nanoseconds_of(text: bytes) -> int:
    """Nanoseconds of one JSON number (or quoted number) of microseconds, halves to even.

    :data:`~trine.record.model.MISSING` where it is no number or beyond ±146 years.
    """
    try:
        value = Decimal(text.strip(b'" \t\r\n').decode("ascii"))
        if not value.is_finite() or abs(value) > _LARGEST_MICROSECONDS:
            return MISSING
        return int((value * 1000).to_integral_value())
    except (ArithmeticError, UnicodeDecodeError, ValueError):  # decimal's errors are arithmetic ones
        return MISSING


def nanoseconds(texts: Sequence[bytes]) -> Integers:
    """Nanoseconds of many JSON numbers of microseconds, shape ``(len(texts),)``; see :func:`nanoseconds_of`."""
    count = len(texts)
    if not count:
        return np.empty(0, np.int64)
    # Cells are as wide as the longest text, and one of a megabyte must not make all so.
    longest = max(map(len, texts))
    cells = np.array(texts if longest <= _WIDTH else [text[: _WIDTH + 1] for text in texts], dtype=np.bytes_)
    width = cells.dtype.itemsize
    if width > _WIDTH:
        cells = cells.astype(f"S{_WIDTH}")
        width = _WIDTH
    columns = np.ascontiguousarray(cells.view(np.uint8).reshape(count, width).T)
    result, plain = _from_digits(columns)
    for row in np.flatnonzero(~plain).tolist():
        result[row] = nanoseconds_of(texts[row])
    return result


def _from_digits(columns: npt.NDArray[np.uint8]) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Values, and which rows were plain enough (``-?digits[.digits]``, in range) to be right."""
    width, count = columns.shape
    negative = columns[0] == ord("-")
    plain = columns[-1] == 0 if width == _WIDTH else np.ones(count, bool)
    value = np.zeros(count, np.int64)
    decimals = np.zeros(count, np.uint8)  # decimals read so far
    integers = np.zeros(count, np.uint8)
    after_dot = np.zeros(count, bool)
    tie = np.zeros(count, np.uint8)  # the fourth decimal
    sticky = np.zeros(count, bool)  # anything after it
    for position, column in enumerate(columns):
        digit = column - np.uint8(48)  # wraps around for anything below "0"
        is_digit = digit < 10
        dot = column == ord(".")
        end = column == 0
        if is_digit.all() and not after_dot.any():
            value *= 10
            value += digit
            integers += np.uint8(1)
            continue
        other = ~(is_digit | dot | end)
        if position == 0:
            other &= ~negative
        plain &= ~(other | (dot & after_dot))
        keep = is_digit & (decimals < 3)
        value = np.where(keep, value * 10 + digit, value)
        fraction = is_digit & after_dot
        if fraction.any():
            tie = np.where(fraction & (decimals == 3), digit, tie)
            sticky |= fraction & (decimals > 3) & (digit != 0)
            decimals += fraction
        integers += is_digit & ~after_dot
        after_dot |= dot
    # Up to 19 digits were added up; the largest of those wrap to below zero.
    plain &= (integers > 0) & (integers <= 16) & (value >= 0)
    scale = 10 ** (3 - np.minimum(decimals, 3).astype(np.int64))
    plain &= value <= _LIMIT // scale
    value *= scale
    value += (tie > 5) | ((tie == 5) & (sticky | (value % 2 == 1)))
    return np.where(negative, -value, value), plain


def nanoseconds_of_numbers(values: Sequence[Any]) -> Integers | None:
    """Nanoseconds of decoded JSON numbers of microseconds, or ``None`` where doubles may not be exact.

    A double below 2**43 us (101 days, and Kineto's times are relative to a base of this year) has room for
    three decimals, one number of them to a double; whole numbers fit below 2**53. Anything else (absolute
    times with decimals, more than three decimals, text, nothing) must be read as text.
    """
    try:
        column = np.array(values)
    except (ValueError, OverflowError):  # lists among the numbers
        return None
    if column.dtype == np.int64 and column.ndim == 1:
        in_range = bool(np.abs(column).max() <= _LARGEST_MICROSECONDS)
        return np.asarray(column * 1000, dtype=np.int64) if in_range else None
    if column.dtype != np.float64 or column.ndim != 1:
        return None
    size = np.abs(column)
    below = np.floor(column)
    fraction = (column - below) * 1000
    nearest = np.rint(fraction)
    three_decimals = (size < 2**43) & (np.abs(fraction - nearest) <= np.spacing(size) * 500.5 + 1e-9)
    if not (three_decimals | ((fraction == 0) & (size < 2**52))).all():
        return None
    return np.asarray(below.astype(np.int64) * 1000 + nearest.astype(np.int64), dtype=np.int64)


def as_doubles_say(times: Integers) -> Integers:
    """``round(float(microseconds) * 1000)`` of exact nanoseconds, shape kept; MISSING stays.

    This is the time that a reader sees who takes a JSON number for a double, as nearly all do (RFC 8259,
    section 6). Relative to a base time it is off by at most 1 ns, an absolute Unix time by at most 256 ns.
    """
    whole_part, thousandths = np.divmod(times, 1000)
    microseconds = whole_part.astype(np.float64) + thousandths / 1000.0
    return np.where(times == MISSING, MISSING, np.rint(microseconds * 1000.0).astype(np.int64))


def whole(values: Sequence[Any], beyond: list[int] | None = None) -> Integers:
    """Integers of decoded JSON values; MISSING where there is none that fits 64 bits. ``beyond`` collects those that do not."""
    filled = [MISSING if value is None else value for value in values]
    try:
        column = np.array(filled)
        if column.dtype == np.int64 and column.ndim == 1:
            return column
    except (TypeError, ValueError, OverflowError):  # nested lists, integers beyond 64 bits
        pass
    if beyond is not None:
        beyond += [value for value in filled if type(value) is int and not -(2**63) <= value < 2**63]
    return np.array([_whole(value) for value in filled], dtype=np.int64)


def _whole(value: Any) -> int:
    if type(value) is str:
        try:
            value = int(value, 0)
        except ValueError:
            return MISSING
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    return MISSING


def numbers(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Floats of decoded JSON values, shape ``(len(values),)``; NaN where there is no number."""
    if not any(value is not None for value in values):
        return np.full(len(values), np.nan)
    return np.array([_number(value) for value in values], dtype=np.float64)


def _number(value: Any) -> float:
    try:
        return float("nan") if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):  # lists, words, integers beyond a double
        return float("nan")
