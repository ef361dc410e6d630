"""Calibration: the fit by arithmetic, the rest by running it small."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import distributed

from trine.cli import main
from trine.profiler import calibrate, calibrate_ranks
from trine.record.errors import TrineError
from trine.record.hardware import Peaks, calibrated, processor_name

SIZES = calibrate_ranks.ALL_REDUCE_BYTES


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


def failing_on_the_last(device: torch.device) -> list[dict[str, Any]]:
    """As other collectives of a calibration: on rank 1 of 2, or 0 of 1, they are refused."""
    from torch import distributed

    if distributed.get_rank() == distributed.get_world_size() - 1:
        raise RuntimeError("no such collective\nand more")
    distributed.barrier()
    raise AssertionError


@pytest.fixture
def one_rank() -> Iterator[Callable[..., queue.Queue[Any]]]:
    """What the only rank of a calibration reports."""
    threads = torch.get_num_threads()

    def reported(*others: Any) -> queue.Queue[Any]:
        results: queue.Queue[Any] = queue.Queue()
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        calibrate_ranks._all_reduce_rank(0, 1, "gloo", store.port, results, others)
        return results

    yield reported
    if distributed.is_initialized():
        distributed.destroy_process_group()
    torch.set_num_threads(threads)


def one_row(device: torch.device) -> list[dict[str, Any]]:
    return [{"bytes": 8}]


def test_what_is_refused_leaves_what_was_measured_before_it(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_ranks, "_UNDER_WAY_S", 0.2)
    for before in ([], [one_row]):
        results = one_rank(*before, failing_on_the_last)
        times, rows, complaint = calibrate_ranks._results(results, [], 5, len(before) + 1)
        assert len(times) == len(SIZES) and rows == [{"bytes": 8}] * len(before)
        assert complaint == "rank 0: RuntimeError: no such collective"
    times, rows, complaint = calibrate_ranks._results(one_rank(one_row, one_row), [], 5, 2)
    assert len(times) == len(SIZES) and rows == [{"bytes": 8}] * 2 and complaint is None


def test_a_defect_of_our_own_shows_its_trace(one_rank: Any) -> None:
    def defect(device: torch.device) -> Any:
        raise TypeError("no such argument")

    with pytest.raises(TypeError, match="no such argument"):
        one_rank(defect)


def test_ranks_are_started_with_a_store_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is only found free may be another program's before a rank has imported PyTorch."""
    results: queue.Queue[Any] = queue.Queue()

    def process(target: Any, args: tuple[Any, ...], daemon: bool) -> Any:
        def start() -> None:
            socket.create_connection(("127.0.0.1", args[3]), timeout=5).close()
            results.put(("times", [1e-3] * len(SIZES)))

        return SimpleNamespace(start=start, pid=None, exitcode=None)

    context = SimpleNamespace(Queue=lambda: results, Process=process)
    monkeypatch.setattr(calibrate_ranks.multiprocessing, "get_context", lambda method: context)
    collective, rows, complaint = calibrate_ranks._between_ranks(2, 5, ())
    assert float(collective["alpha_s"]) > 0 and (rows, complaint) == ([], None)


def test_what_a_rank_has_sent_is_awaited_once_another_has_failed() -> None:
    results: queue.Queue[Any] = queue.Queue()
    results.put(("left out", "rank 1: it failed"))
    results.put(("failed", "rank 1: and again"))
    results.put(("times", [1.0]))
    results.put(("rows", [{"bytes": 8}]))
    dead = [SimpleNamespace(exitcode=1)]
    assert calibrate_ranks._results(results, dead, 5, 2) == ([1.0], [{"bytes": 8}], "rank 1: it failed")


def test_whoever_asks_for_the_all_reduce_pays_for_no_more(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = one_rank()
    assert results.get_nowait()[0] == "times" and results.empty()
    asked: list[object] = []
    found = ({"ranks": 2}, [], None)
    monkeypatch.setattr(calibrate_ranks, "_between_ranks", lambda *given: asked.append(given[2]) or found)
    assert calibrate.measure_all_reduce(2) == {"ranks": 2} and asked == [()]


def test_ranks_that_are_lost_after_the_all_reduce_do_not_take_it_along() -> None:
    results: queue.Queue[Any] = queue.Queue()
    results.put(("times", [1.0]))
    dead = [SimpleNamespace(exitcode=-9)]
    assert calibrate_ranks._results(results, dead, 5, 1) == ([1.0], [], "a rank ended with code -9")
    results.put(("times", [1.0]))
    silent = [SimpleNamespace(exitcode=None)]
    assert calibrate_ranks._results(results, silent, 0.1, 1)[2] == "1 ranks took longer than 0 s"
    with pytest.raises(TrineError, match="not measured: a rank ended with code -9"):
        calibrate_ranks._results(results, dead, 5, 0)


@pytest.mark.slow
def test_a_rank_that_fails_does_not_take_along_what_was_measured_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = calibrate_ranks._between_ranks(2, 90, (one_row, failing_on_the_last))
    assert float(found[0]["alpha_s"]) > 0
    assert found[1:] == (
        [{"backend": "gloo", "ranks": 2, "bytes": 8}],
        "rank 1: RuntimeError: no such collective",
    )
    monkeypatch.setattr(calibrate_ranks, "_between_ranks", lambda *given: found)
    told: list[str] = []
    assert calibrate.measure_links(2, tell=told.append) == found[:2]
    assert told == [f"left out: collectives or shards between ranks: {found[2]}"]


def test_what_fails_is_left_out_and_what_is_measured_is_given_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []

    def cpu(threads: int, collective: Any) -> Peaks:
        measured.append(threads)
        if threads == 2:
            raise RuntimeError("no fp16")
        return Peaks("a CPU", {"fp32": 1.0}, None, None, None, "by hand", True, threads)

    def refused(*given: Any, **named: Any) -> Any:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(calibrate, "usable_cores", lambda: 2)
    monkeypatch.setattr(calibrate, "measure_links", refused)
    monkeypatch.setattr(calibrate, "measure_operations", refused)
    monkeypatch.setattr(calibrate, "calibrate_cpu", cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told: list[str] = []
    found = calibrate.calibrate_all(tell=told.append)
    device, peaks = next(found)
    assert (device.type, peaks.threads, peaks.operations) == ("cpu", 1, []) and measured == [1]
    assert list(found) == [] and measured == [1, 2]
    assert [line for line in told if "left out" in line] == [
        "left out: out of memory",
        "left out: single operations: out of memory",
        "left out: no fp16",
    ]


def test_the_command_says_what_it_measures_and_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*given: Any, **named: Any) -> Any:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "usable_cores", lambda: 1)
    monkeypatch.setattr(calibrate, "measure_links", refused)
    monkeypatch.setattr(calibrate, "calibrate_cpu", refused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["hardware", "--calibrate", "--no-observer"]) == 0
    assert capsys.readouterr().err.splitlines()[:-1] == [
        "measuring all-reduce between local ranks",
        "left out: out of memory",
        "measuring matrix products and copies on the CPU, 1 thread",
        "left out: out of memory",
    ]


def test_the_command_says_that_the_machine_was_busy_and_keeps_what_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"operation": "copy", "dtype": "fp32", "shape": [8], "seconds": 1.25e-3}
    rows = [{**row, "quartiles": [1.25e-3, 1.25e-3, high]} for high in [1.3e-3] * 9 + [7.43e-3]]
    peaks = Peaks(processor_name(), {"fp32": 1e9}, None, None, None, "by hand", True, 1, {}, None, rows)
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "calibrate_all", lambda ranks, tell: [(torch.device("cpu"), peaks)])
    monkeypatch.setattr("trine.optim.runtime.exchange.calibration.codecs_of", lambda device, ranks: [])
    for command in (["hardware", "--calibrate"], ["hardware"]):
        assert main([*command, "--no-observer"]) == 0
        said = capsys.readouterr().out
        assert "busy while it was calibrated: 1 of 10 times" in said and "again when it is idle" in said
    assert main(["hardware", "--no-observer", "--format", "json"]) == 0
    (measured,) = json.loads(capsys.readouterr().out)["processor"]["measured"]
    assert "1 of 10 times" in measured["doubt"]


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
