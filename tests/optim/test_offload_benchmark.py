"""``benchmarks/offload.py`` fails where overlapping does not pay, by rounds side by side. Runs are made up: nothing is timed."""

from __future__ import annotations

from typing import Any

import offload
import pytest


def runs(serial: list[float], overlapped: list[float]) -> list[Any]:
    ways = {"in memory": serial, "on disk, serial": serial, "on disk, overlapped": overlapped}
    return [
        offload.Run(name, sorted(times)[len(times) // 2], 0.0, 0.0, True, tuple(times))
        for name, times in ways.items()
    ]


@pytest.mark.parametrize(
    ("serial", "overlapped", "status"),
    [
        ([1.0, 1.0, 1.0], [0.8, 0.9, 0.7], 0),
        ([1.0, 1.0, 1.0], [1.2, 1.1, 1.3], 1),
        # The machine slows down in between: round by round it gains, although its median is the larger.
        ([1.0, 4.0, 5.0, 1.0, 1.0], [0.9, 3.0, 4.0, 2.0, 0.9], 0),
    ],
)
def test_overlapped_may_not_be_slower_than_serial(
    serial: list[float],
    overlapped: list[float],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(offload, "step_times", lambda *arguments: runs(serial, overlapped))
    monkeypatch.setattr(offload, "bytes_beside_plan", lambda *arguments: [])
    assert offload.main([]) == status
    assert ("SLOWER" in capsys.readouterr().out) == bool(status)
