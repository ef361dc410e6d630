"""Whether a calibration file holds what its readers take: a figure of the wrong type is told where it is read, by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["refuse_strange"]

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
#: What a row of single times must have, by its operation; of products and work on memory the last.
_NEEDED = {
    **dict.fromkeys(_COLLECTIVES, ("seconds", "bytes", "ranks")),
    "overlap": ("slowdown",),
    "sharded_unit": ("seconds", "phase", "again", "parameters"),
    "codec": ("seconds", "dtype", "bytes", "ratio"),
    "": ("seconds", "dtype", "shape"),
}
#: A shard may cost nothing, and a transfer nothing of the computing beside it.
_MAY_BE_NOUGHT = (("overlap", "slowdown"), ("sharded_unit", "seconds"))


def refuse_strange(content: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` with the first figure that is none."""
    for key in ("name", "source"):
        _require(isinstance(content.get(key), str), key, content.get(key), "a string")
    threads = content.get("threads")
    whole = isinstance(threads, int) and _is_number(threads)
    _require(threads is None or whole, "threads", threads, "a whole number above 0")
    for key in ("memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"):
        value = content.get(key)
        _require(value is None or _is_number(value), key, value, "a number above 0")
    rates = content.get("flops_per_s")
    _require(isinstance(rates, Mapping), "flops_per_s", rates, "a mapping")
    for dtype, rate in content["flops_per_s"].items():
        _require(_is_number(rate), f"flops_per_s.{dtype}", rate, "a number above 0")
    _refuse_collective(content.get("collective", {}))
    rows = content.get("operations", [])
    _require(isinstance(rows, list), "operations", rows, "a list")
    for place, row in enumerate(rows):
        _refuse_row(f"operations[{place}]", row)


def _refuse_collective(collective: Any) -> None:
    _require(isinstance(collective, Mapping), "collective", collective, "a mapping")
    for key in ("alpha_s", "bytes_per_s", "ranks") if collective else ():
        _require(
            _is_number(collective.get(key)), f"collective.{key}", collective.get(key), "a number above 0"
        )
    if collective:
        backend = collective.get("backend")
        _require(isinstance(backend, str), "collective.backend", backend, "a string")


def _refuse_row(place: str, row: Any) -> None:
    operation = row.get("operation") if isinstance(row, Mapping) else None
    _require(isinstance(operation, str), place, row, "an operation")
    for key in _NEEDED.get(row["operation"], _NEEDED[""]):
        wanted = _why_not(row["operation"], key, row.get(key))
        _require(wanted is None, f"{place}.{key}", row.get(key), wanted or "")
    quartiles = row.get("quartiles", [0, 0, 0])  # those of earlier releases have none
    fits = (
        isinstance(quartiles, list)
        and len(quartiles) == 3
        and all(_is_number(each, True) for each in quartiles)
    )
    _require(fits, f"{place}.quartiles", quartiles, "three numbers")


def _why_not(operation: str, key: str, value: Any) -> str | None:
    """What a row's figure should be; None where it is that."""
    if key in ("dtype", "phase"):
        return None if isinstance(value, str) else "a string"
    if key == "again":
        return None if isinstance(value, bool) else "true or false"
    if key == "shape":
        sides = value if isinstance(value, list) else []
        fits = bool(sides) and all(map(_is_number, sides)) and (operation != "product" or len(sides) == 4)
        return None if fits else "a list of sizes"
    return None if _is_number(value, (operation, key) in _MAY_BE_NOUGHT) else "a number above 0"


def _is_number(value: Any, or_nought: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value > 0 or (or_nought and value == 0)


def _require(fits: bool, what: str, value: Any, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{what} is {value!r:.60}, not {wanted}")
