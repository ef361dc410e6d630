"""The page on Python is true: its blocks run, one after the other, and give what the page says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas
import pytest
import tiny_traces

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the page's blocks leave behind."""
    tiny_traces.write_job(tmp_path / "traces")
    tiny_traces.write_job(tmp_path / "before", step_us=12_000, seed=1)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)  # noqa: S102
    return names


def test_every_block_of_the_page_runs(
    ran: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(ran["ranks"].index) == [0, 1]
    assert len(ran["longest"]) == 5 and ran["longest"]["ns"].is_monotonic_decreasing
    assert {"rank", "kind", "gain_ns", "ranks_row"} <= set(ran["entries"].columns)
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ran["contract"]["schema"] == "trine.analysis/1" and ran["words"]
    assert ran["comparison"].step_time.ratio < 0.9  # 10 ms against 12


def test_the_page_lists_every_frame(ran: dict[str, Any]) -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(ran["frames"])
    assert all(isinstance(frame, pandas.DataFrame) for frame in ran["frames"].values())
