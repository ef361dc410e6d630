"""Integer statistics: times of 1.7e18 ns do not fit a float's 53 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["integer_median"]


def integer_median(values: npt.NDArray[Any]) -> int:
    """Median of int64 values, shape (n,), rounded down; shifting all values shifts it exactly.

    Raises ``IndexError`` on none.
    """
    ordered = np.sort(values)
    low, high = int(ordered[(len(ordered) - 1) // 2]), int(ordered[len(ordered) // 2])
    return (low + high) // 2
