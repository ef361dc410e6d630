"""How near an operator comes to what the device could do.

Roofline (Williams, Waterman and Patterson, CACM 2009): work of F operations that moves B bytes takes at least

    max(F ÷ peak FLOP/s, B ÷ peak bytes/s)

The larger of the two names what bounds it; that time over the measured one is its efficiency, and the
difference what it could gain at most. Nothing reaches it: large products get to 80 % (H100) or 87 %
(A100) of the datasheet's peak, streaming kernels to about 90 % of the memory's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ._kernel_rows import ShapeTime

__all__ = ["Roofline", "roofline_of"]

#: Kinds whose time is arithmetic: without their peak nothing can be said of them.
ARITHMETIC = ("matmul", "convolution", "attention")


@dataclass(frozen=True, slots=True)
class Roofline:
    """Achieved rates and the distance to the roofline. ``bound`` is ``compute``, ``memory`` or ``cache`` (faster
    than the memory could be: the data came from a cache); None where a peak or a count is missing. ``efficiency``
    is a share of the bound's time (0..1), ``gain_ns`` what is above it."""

    flops_per_s: float | None
    bytes_per_s: float | None
    bound: Literal["compute", "memory", "cache"] | None
    least_ns: int | None
    efficiency: float | None
    gain_ns: int | None


def roofline_of(
    row: ShapeTime, flops_per_s: Mapping[str, float], memory_bytes_per_s: float | None
) -> Roofline:
    """The roofline of a row against the peaks of a device (FLOP/s by dtype, bytes/s)."""
    seconds = row.ns / 1e9
    achieved = row.flops / seconds if row.flops and seconds > 0 and row.kind in ARITHMETIC else None
    moved = row.bytes / seconds if row.bytes and seconds > 0 else None
    peak = flops_per_s.get(row.dtype or "")
    compute_ns = row.flops / peak * 1e9 if row.flops and peak else None
    memory_ns = row.bytes / memory_bytes_per_s * 1e9 if row.bytes and memory_bytes_per_s else None
    if row.kind in ARITHMETIC:
        sides = (compute_ns, memory_ns or 0.0) if compute_ns is not None else None
    else:
        sides = (0.0, memory_ns) if memory_ns is not None and row.kind != "transfer" else None
    if sides is None or row.ns <= 0 or row.shortcut:
        return Roofline(achieved, moved, None, None, None, None)
    least = max(sides)
    bound: Literal["compute", "memory", "cache"] = "compute" if sides[0] >= sides[1] else "memory"
    if bound == "memory" and least > row.ns:
        # The inputs lay in a cache: no roofline of the memory says what this could gain.
        return Roofline(achieved, moved, "cache", None, None, None)
    return Roofline(achieved, moved, bound, round(least), least / row.ns, max(row.ns - round(least), 0))
