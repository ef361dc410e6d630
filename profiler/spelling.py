"""c10d's spellings as ours: names of operations and dtypes."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["dtype_of", "standard_operation"]

#: c10::ScalarType by code (c10/core/ScalarType.h; codes are stable, they are in saved models).
_DTYPES: Mapping[int, tuple[str, int]] = {
    0: ("uint8", 1),
    1: ("int8", 1),
    2: ("int16", 2),
    3: ("int32", 4),
    4: ("int64", 8),
    5: ("float16", 2),
    6: ("float32", 4),
    7: ("float64", 8),
    8: ("complex32", 4),
    9: ("complex64", 8),
    10: ("complex128", 16),
    11: ("bool", 1),
    15: ("bfloat16", 2),
    23: ("float8_e5m2", 1),
    24: ("float8_e4m3fn", 1),
    25: ("float8_e5m2fnuz", 1),
    26: ("float8_e4m3fnuz", 1),
    27: ("uint16", 2),
    28: ("uint32", 4),
    29: ("uint64", 8),
}


def dtype_of(code: int) -> tuple[str | None, int | None]:
    """Name and element size of a ``c10::ScalarType`` code."""
    return _DTYPES.get(code, (None, None))


def standard_operation(name: str) -> str:
    """c10d's many spellings as the field's terms: ``_all_gather_base`` → ``all_gather``, ``allreduce`` → ``all_reduce``."""
    plain = name.lower().strip("_").replace("-", "_").split(" ")[0]
    for suffix in ("_coalesced", "_into_tensor", "_tensor", "_base", "_single", "_object"):
        while plain.endswith(suffix):
            plain = plain[: -len(suffix)]
    joined = plain.replace("_", "")
    known = {
        "allreduce": "all_reduce",
        "allgather": "all_gather",
        "allgatherintotensor": "all_gather",
        "reducescatter": "reduce_scatter",
        "reducescattertensor": "reduce_scatter",
        "alltoall": "all_to_all",
        "monitoredbarrier": "barrier",
        "recvanysource": "recv",
    }
    return known.get(joined, plain)
