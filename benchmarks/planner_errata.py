"""What a table states and cannot have been: each reading that differs from it, with its argument.

Fixed here, and never decided by the rows that are read: a row means the same in whatever file it stands.
``benchmarks/planner.py --as-stated`` scores without.
"""

from __future__ import annotations

from typing import Any

__all__ = ["erratum_of"]

#: Table → columns of the layout as they are read instead, for runs that state full recomputation through memory. The 840 runs of
#: one node state it throughout; with it, more of them than of all other tables together would come near to a step of nothing but
#: matmuls at the best rate ever seen and element-wise traffic at the memory's full bandwidth (``planner_peaks.py`` counts them).
_TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "vtrain_ground_truth_single": (
        {"recompute": "none"},
        "no recomputation, since its table is faster than the stated one allows",
    )
}


def erratum_of(table: str, recompute: str, fused_attention: bool) -> tuple[dict[str, Any], str] | None:
    """What is read instead, and what is said of it; None where a row is read as it states."""
    if recompute != "full" or fused_attention:
        return None
    return _TABLES.get(table)
