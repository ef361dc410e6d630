"""Published measurements, where they are at hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from data_folder import data_folder


@pytest.fixture(scope="session")
def tables() -> Path:
    """The folder of published measurements; skips where it is absent."""
    data = data_folder()
    if not (data / "tables").is_dir():
        pytest.skip(f"no published measurements: neither $TRINE_TEST_DATA nor {data} holds a tables folder")
    return data / "tables"


@pytest.fixture(scope="session")
def published_runs(tables: Path) -> list[dict[str, str]]:
    """Rows of ``training_runs.csv`` as text."""
    with (tables / "training_runs.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
