"""Ranks under torchrun: what their failures say, and that nothing of them is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trine._launch import _last_words, launch
from trine.record.errors import TrineError

pytest.importorskip("torch")
pytestmark = pytest.mark.torchrun

TESTS = str(Path(__file__).resolve().parents[1])


def _launch(what: str, folder: Path, seconds: float = 60, ranks: int = 2) -> None:
    launch(
        "the test",
        "demo_ranks",
        [what, str(folder)],
        ranks=ranks,
        log_folder=folder / "logs",
        seconds=seconds,
        environment={"PYTHONPATH": TESTS, "OMP_NUM_THREADS": "1"},
    )


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*") if path.read_text()]


def _gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rank_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(TrineError) as raised:
        _launch("fail", tmp_path)
    message = str(raised.value)
    assert "the test failed: rank 1: ValueError: the second rank has no luck" in message
    assert str(tmp_path / "logs") in message and "\n" not in message
    assert _gone(_pids(tmp_path))


def test_a_port_in_use_says_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "none_x1" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "Traceback (most recent call last):\n  File ...\n"
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
    )
    words = _last_words(tmp_path)
    assert words.startswith("rank 0: torch.distributed.DistNetworkError") and "\n" not in words
    assert "a port is in use: end the other run" in words


@pytest.mark.slow
def test_time_is_limited_and_stubborn_ranks_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trine._launch.GRACE_SECONDS", 2.0)
    deadline = time.monotonic() + 90
    with pytest.raises(TrineError, match=r"took longer than \d+ s and was ended"):
        _launch("stubborn", tmp_path, seconds=15)
    pids = _pids(tmp_path)
    assert pids and _gone(pids)
    assert time.monotonic() < deadline


def test_control_c_leaves_no_orphans(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trine._launch import launch\n"
        f"launch('x', 'demo_ranks', ['sleep', {str(tmp_path)!r}], ranks=2, log_folder=Path({str(tmp_path)!r}) / 'logs',"
        f" seconds=100, environment={{'PYTHONPATH': {TESTS!r}}})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(_pids(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = _pids(tmp_path)
        assert len(pids) == 2
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert b"KeyboardInterrupt" in said
    assert _gone(pids)
