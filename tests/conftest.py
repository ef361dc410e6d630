"""What all tests share: the real data, and where it lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real traces; without it the test skips, and says where it looked."""
    folder = Path(os.environ.get("TRINE_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (folder / "traces").is_dir():
        pytest.skip(f"no real traces: neither $TRINE_TEST_DATA nor {folder} holds a traces folder")
    return folder
