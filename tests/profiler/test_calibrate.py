"""Calibration: the fit by arithmetic, the rest by running it small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from trine.cli import main
from trine.profiler import calibrate
from trine.record.errors import TrineError
from trine.record.hardware import calibrated, processor_name

SIZES = calibrate.ALL_REDUCE_BYTES


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12))
def test_the_fit_finds_latency_and_bandwidth(alpha: float, beta: float) -> None:
    times = [alpha + size / beta for size in SIZES]
    found_alpha, found_beta = calibrate.fit_latency_bandwidth(SIZES, times)
    assert found_alpha == pytest.approx(alpha, rel=1e-3)
    if SIZES[-1] / beta > 1e-3 * alpha:  # else bandwidth is lost behind the latency
        assert found_beta == pytest.approx(beta, rel=1e-2)


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_noise_never_makes_them_nought_or_negative(times: list[float]) -> None:
    alpha, beta = calibrate.fit_latency_bandwidth(SIZES, times)
    assert alpha > 0 and beta > 0


def test_the_cpu_is_measured_and_its_threads_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "MATMUL_SECONDS", 0.1)
    monkeypatch.setattr(calibrate, "COPY_BYTES", 2**22)
    before = torch.get_num_threads()
    peaks = calibrate.calibrate_cpu(1)
    assert torch.get_num_threads() == before
    assert peaks.name == processor_name() and peaks.threads == 1 and peaks.measured
    assert 1e8 < peaks.flops_per_s["fp32"] < 1e13
    assert peaks.memory_bytes_per_s is not None and 1e8 < peaks.memory_bytes_per_s < 1e13


@pytest.mark.slow
def test_the_command_keeps_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "MATMUL_SECONDS", 0.1)
    monkeypatch.setattr(calibrate, "COPY_BYTES", 2**22)
    assert main(["hardware", "--format", "json", "--no-observer"]) == 0
    blank = json.loads(capsys.readouterr().out)
    assert blank["schema"] == "trine.hardware/1" and blank["processor"]["measured"] == []
    assert main(["hardware", "--calibrate", "--no-observer"]) == 0
    said = capsys.readouterr()
    assert "Wrote " in said.err and "fp32" in said.out and "all-reduce of 2 ranks (gloo): α" in said.out
    kept = calibrated(processor_name(), threads=1)
    assert kept is not None
    assert kept.collective["backend"] == "gloo" and float(kept.collective["alpha_s"]) > 0
    assert main(["hardware", "--format", "json", "--no-observer"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["processor"]["measured"][0]["flops_per_s"]["fp32"] == kept.flops_per_s["fp32"]


@pytest.mark.slow
def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(TrineError, match="took longer than 0 s"):
        calibrate.measure_all_reduce(2, seconds=0.01)


def test_without_torch_it_says_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    monkeypatch.setattr("trine.commands.hardware.find_spec", lambda name: None)
    assert main(["hardware"]) == 0
    out = capsys.readouterr().out
    assert processor_name() in out and "pip install 'trine[train]'" in out
    assert main(["hardware", "--calibrate"]) == 2
    assert "pip install 'trine[train]'" in capsys.readouterr().err


def test_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "--calibrate", "--ranks", "1"]) == 2
    assert "--ranks must be from 2 to 64" in capsys.readouterr().err
