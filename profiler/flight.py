"""PyTorch's flight recorder: a ring of the last collectives that c10d keeps in every process.

It knows group, sequence, sizes and time of issue of what any code issued, C++ included, but on gloo no start or
end, and it lacks point-to-point there. A dump costs about 20 µs an entry and the ring holds 2,000
(``TORCH_FR_BUFFER_SIZE``), so it is read sparingly: :class:`FlightReader` keeps to a share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import msgspec

from trine.record.model import MISSING

__all__ = ["FlightEntry", "FlightReader"]


class FlightEntry(msgspec.Struct):
    """One collective, as the flight recorder tells it. ``time_created_ns`` is Unix time."""

    record_id: int
    pg_id: int
    process_group: tuple[str, str]
    collective_seq_id: int
    profiling_name: str
    time_created_ns: int
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    output_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []

    @property
    def group(self) -> str:
        """The process group's name."""
        return self.process_group[0]

    @property
    def operation(self) -> str:
        """``all_reduce`` of ``gloo:all_reduce``."""
        return self.profiling_name.partition(":")[2] or self.profiling_name

    @property
    def in_bytes(self) -> int:
        """Bytes that go in; ``MISSING`` where a dtype is unknown."""
        return _bytes(self.input_sizes, self.input_dtypes)

    @property
    def out_bytes(self) -> int:
        """Bytes that come out; ``MISSING`` where a dtype is unknown."""
        return _bytes(self.output_sizes, self.output_dtypes)

    @property
    def dtype(self) -> str | None:
        """torch's name of the first input's dtype."""
        return _DTYPES.get(self.input_dtypes[0], (None, 0))[0] if self.input_dtypes else None


class _Dump(msgspec.Struct):
    entries: list[FlightEntry] = []
    pg_status: dict[str, dict[str, str]] = {}


@dataclass(slots=True)
class FlightReader:
    """Reads new entries, at most ``share`` of the time.

    ``available`` turns False, for good, when the recorder is absent or switched off.
    """

    share: float = 0.001
    available: bool = True
    lost: int = 0  # entries that left the ring before they were read
    _last_id: int = -1
    _begun_ns: int = 0
    _spent_ns: int = 0

    def enqueued(self) -> int | None:
        """How many collectives the process has issued so far; cheap. ``None`` where that is not known."""
        dump = self._dump(False)
        if dump is None:
            return None
        return sum(int(status.get("last_enqueued_collective", -1)) for status in dump.pg_status.values())

    def due(self, share: float | None = None) -> bool:
        """Whether a read would keep to the share of time, or to another ``share`` where much depends on it."""
        pause = int(self._spent_ns / (share or self.share))
        return self.available and time.monotonic_ns() >= self._begun_ns + pause

    def allow_next(self) -> None:
        """Let the next read be due at once: for a read outside of the run's steps."""
        self._begun_ns = self._spent_ns = 0

    def read(self) -> list[FlightEntry]:
        """Entries since the last read, oldest first; times are Unix nanoseconds."""
        self._begun_ns = time.monotonic_ns()
        dump = self._dump(True)
        self._spent_ns = time.monotonic_ns() - self._begun_ns
        if dump is None:
            return []
        fresh = [entry for entry in dump.entries if entry.record_id > self._last_id]
        if fresh:
            if self._last_id >= 0:
                self.lost += max(fresh[0].record_id - self._last_id - 1, 0)
            self._last_id = fresh[-1].record_id
        return fresh

    def _dump(self, entries: bool) -> _Dump | None:
        if not self.available:
            return None
        try:
            from torch._C import _distributed_c10d

            text = _distributed_c10d._dump_fr_trace_json(entries, False)  # type: ignore[attr-defined]
            return msgspec.json.decode(text, type=_Dump, strict=False)
        except (ImportError, AttributeError, TypeError, RuntimeError, msgspec.MsgspecError):
            self.available = False
            return None


#: c10::toString of scalar types, as the flight recorder writes them.
_DTYPES: Mapping[str, tuple[str, int]] = {
    "Byte": ("uint8", 1),
    "Char": ("int8", 1),
    "Short": ("int16", 2),
    "Int": ("int32", 4),
    "Long": ("int64", 8),
    "Half": ("float16", 2),
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "Bool": ("bool", 1),
    "BFloat16": ("bfloat16", 2),
    "Float8_e5m2": ("float8_e5m2", 1),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
}


def _bytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    """Bytes of tensors of these shapes; ``MISSING`` where a dtype is unknown."""
    total = 0
    for position, shape in enumerate(sizes):
        # A list of tensors is told with one dtype for all.
        dtype = dtypes[min(position, len(dtypes) - 1)] if dtypes else ""
        if dtype not in _DTYPES:
            return MISSING
        total += prod(shape) * _DTYPES[dtype][1]
    return total
