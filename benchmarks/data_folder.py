"""Where real traces and published measurements lie, for benchmarks and tests."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["data_folder"]


def data_folder() -> Path:
    """``$TRINE_TEST_DATA``, else ``shared/data`` beside the repository; it may not be there."""
    return Path(os.environ.get("TRINE_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
