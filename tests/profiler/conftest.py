"""What tests of the profiler share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """As in a process that has compiled nothing, whatever tests ran before in this one: FLOPs are counted."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    before = dynamo.counters["stats"].pop("unique_graphs", None) if dynamo is not None else None
    yield
    if before is not None:
        dynamo.counters["stats"]["unique_graphs"] += before
