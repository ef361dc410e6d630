"""Calibrated operations: every kind is there by dtype and size, and more work takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trine.cli import main
from trine.optim.runtime.exchange import calibration
from trine.optim.runtime.exchange.calibration import NAMES, codecs_of
from trine.profiler import calibrate, calibrate_operations
from trine.record.hardware import Peaks, calibrated


def test_operations_are_measured_by_dtype_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_operations, "SECONDS", 0.0)
    monkeypatch.setattr(calibrate_operations, "SIDES", (16, 256))
    monkeypatch.setattr(calibrate_operations, "TOKENS", (16,))
    monkeypatch.setattr(calibrate_operations, "HEAD_SIZES", (32,))
    monkeypatch.setattr(calibrate_operations, "ELEMENTS", (2**12, 2**20))
    rows = calibrate_operations.measure_operations(torch.device("cpu"))
    assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    seconds = {(row["operation"], row["dtype"], tuple(row["shape"])): row["seconds"] for row in rows}
    assert all(value > 0 for value in seconds.values())
    assert seconds["product", "fp32", (1, 256, 256, 256)] > seconds["product", "fp32", (1, 16, 16, 16)]
    for name in ("add", "gelu", "softmax_backward", "layer_norm", "masked_fill", "cast", "transposed_copy"):
        assert seconds[name, "bf16", (2**20,)] > seconds[name, "bf16", (2**12,)]


def test_codecs_send_fewer_bytes_in_the_ratio_of_their_bits() -> None:
    before = torch.get_num_threads()
    rows = {row["dtype"]: row for row in codecs_of(1)}
    assert torch.get_num_threads() == before
    assert set(rows) == set(NAMES) and all(row["seconds"] > 0 for row in rows.values())
    assert rows["bf16"]["ratio"] == pytest.approx(2.0)
    assert rows["int8"]["ratio"] == pytest.approx(4.0, rel=0.05)  # and a scale for 64 codes
    assert rows["onebit"]["ratio"] > rows["int8"]["ratio"]


def test_codecs_that_fail_leave_the_rest_of_a_calibration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = {"operation": "all_reduce", "bytes": 8, "seconds": 1e-3, "ranks": 4}
    peaks = Peaks("a machine", {}, None, None, None, "by hand", True, 1, {}, None, [link])
    asked: list[int] = []

    def failing(threads: int | None, ranks: int = 2) -> list[dict[str, object]]:
        asked.append(ranks)
        raise RuntimeError("no such\ncodec")

    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "calibrate_all", lambda ranks, tell: [peaks])
    monkeypatch.setattr(calibration, "codecs_of", failing)
    assert main(["hardware", "--calibrate", "--no-observer"]) == 0
    assert asked == [4] and "left out: codecs: no such codec" in capsys.readouterr().err
    kept = calibrated("a machine", 1)
    assert kept is not None and list(kept.operations) == [link]


@pytest.mark.slow
def test_links_and_the_overlap_are_measured_between_ranks() -> None:
    collective, rows = calibrate.measure_links(2)
    assert collective["operation"] == "all_reduce" and float(collective["bytes_per_s"]) > 0
    assert {row["operation"] for row in rows} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "overlap",
    }
    assert all(row["ranks"] == 2 and row["backend"] == "gloo" for row in rows)
    dtypes = {(row["operation"], row["dtype"]) for row in rows if row["operation"] != "overlap"}
    assert {dtype for operation, dtype in dtypes if operation == "all_reduce"} == {"fp32", "bf16"}
    assert {dtype for operation, dtype in dtypes if operation == "broadcast"} == {"fp32"}
    assert 0 <= next(row["slowdown"] for row in rows if row["operation"] == "overlap") <= 1
