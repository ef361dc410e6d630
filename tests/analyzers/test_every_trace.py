"""Every real trace gives an analysis that JSON can hold, whatever it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_folder import data_folder

import trine
from trine.analyzers import Analysis, to_json

FOLDER = data_folder() / "traces" / "kineto"
TRACES = sorted(
    [path.relative_to(FOLDER) for path in FOLDER.glob("*/*.gz") if path.parent.name in ("single", "odd")]
    + [path.relative_to(FOLDER) for path in FOLDER.glob("*") if path.name not in ("single", "odd")]
)


def check(analysis: Analysis) -> None:
    content = to_json(analysis)
    again = json.loads(json.dumps(content, allow_nan=False))
    assert again == content, "only what JSON has"
    for rank in content["ranks"]:
        if rank["breakdown_ns"] is None:
            assert rank["breakdown_missing"]
            continue
        assert sum(rank["breakdown_ns"].values()) == rank["window_ns"]
        assert sum(rank["idle_ns"].values()) == rank["breakdown_ns"]["idle"]
        assert all(type(value) is int and value >= 0 for value in rank["breakdown_ns"].values())
    for note in content["data_quality"]:
        assert note["id"] != "unreadable-rank", note["message"]
        assert note["severity"] in ("info", "warning", "error") and "\n" not in note["message"]


@pytest.mark.parametrize("steps", ["complete", "all"])
@pytest.mark.parametrize("trace", TRACES, ids=str)
def test_it_is_analysed(data: Path, trace: Path, steps: str) -> None:
    check(trine.analyze(trine.load(data / "traces" / "kineto" / trace), steps=steps))


def test_there_are_traces(data: Path) -> None:
    assert len(TRACES) >= 20
