"""Published measurements, where they are at hand."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def tables() -> Path:
    """The folder of published measurements; skips where it is absent."""
    data = Path(os.environ.get("TRINE_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (data / "tables").is_dir():
        pytest.skip(f"no published measurements: neither $TRINE_TEST_DATA nor {data} holds a tables folder")
    return data / "tables"


@pytest.fixture(scope="session")
def published_runs(tables: Path) -> list[dict[str, str]]:
    """Rows of ``training_runs.csv`` as text."""
    with (tables / "training_runs.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
