"""The C++ observer's shared library: a ring of fixed rows, drained through ctypes.

Its source is built on the machine that uses it (:mod:`trine.profiler.observer_build`), so what is loaded may be of another
version, or of none: both raise ``OSError``, and collectives are then recorded from Python.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CAPACITY", "ROW", "ObserverLibrary"]

Array = npt.NDArray[Any]

VERSION = 1
#: Rows the ring holds: at 20,000 collectives a second, more than a second's.
CAPACITY = 1 << 15
ROW = np.dtype(
    [
        ("order", "<i8"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("tensor_bytes", "<i8"),
        ("in_elements", "<i8"),
        ("out_elements", "<i8"),
        ("sequence", "<i8"),
        ("thread", "<i8"),
        ("dtype", "<i4"),
        ("group_size", "<i4"),
        ("worker", "<i4"),
        ("point_to_point", "<i4"),
        ("name", "S96"),
        ("operation", "S32"),
        ("group", "S64"),
    ]
)


class ObserverLibrary:
    """The loaded observer. Raises ``OSError`` when the file is not a usable one."""

    def __init__(self, path: Path) -> None:
        self._loaded = ctypes.CDLL(str(path))
        names = ("version", "row_bytes", "now_ns", "enable", "drain", "dropped", "started")
        try:
            for name in names:
                getattr(self._loaded, f"trine_observer_{name}").restype = ctypes.c_int64
        except AttributeError as error:
            raise OSError(f"{path} lacks {error}") from None
        if self._call("version") != VERSION or self._call("row_bytes") != ROW.itemsize:
            raise OSError(f"{path} is of another version")

    def _call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._loaded, f"trine_observer_{name}")(*arguments))

    def clock_offset_ns(self) -> int:
        """What to add to the observer's clock to get ``perf_counter_ns``; the same clock on Linux."""
        before = time.perf_counter_ns()
        theirs = self._call("now_ns")
        after = time.perf_counter_ns()
        return 0 if before <= theirs <= after else (before + after) // 2 - theirs

    def enable(self) -> int:
        """Begin to fill the ring; how many collectives began before, or -1 where that failed."""
        return self._call("enable", ctypes.c_int64(CAPACITY))

    def disable(self) -> None:
        """Fill it no more; rows that are in it can still be drained."""
        self._loaded.trine_observer_disable()

    def dropped(self) -> int:
        """Rows that found the ring full, since the process began."""
        return self._call("dropped")

    def drain(self) -> Array:
        """All rows, in the order in which they began."""
        parts = []
        while True:
            buffer = np.empty(1024, dtype=ROW)
            count = self._call("drain", ctypes.c_void_p(buffer.ctypes.data), ctypes.c_int64(len(buffer)))
            parts.append(buffer[:count])
            if count < len(buffer):
                rows = np.concatenate(parts)
                return rows[np.argsort(rows["order"], kind="stable")]
