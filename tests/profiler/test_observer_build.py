"""The observer's build: whatever goes wrong is a reason, never an exception; one compiler a node, no stale lock.

A stand-in for the compiler notes each call and copies a library that was built before, so that races are quick.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trine.profiler import observer_build
from trine.profiler.observer_build import ensure_built, why_not_built


@pytest.fixture(scope="module")
def built() -> Path:
    library = ensure_built(wait=True)
    assert library is not None
    return library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRINE_CACHE", str(folder))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return folder


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A compiler that notes its call in a log and then does ``body``; the output's path is ``$out``."""
    log = tmp_path / "calls"
    script = tmp_path / "compiler"
    find = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done'
    script.write_text(f'#!/bin/sh\n{find}\necho $$ >> "{log}"\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def calls(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def wait_for(condition: object, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.slow
def test_concurrent_builders_compile_once(
    built: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(tmp_path, monkeypatch, f'sleep 1; cp "{built}" "$out"')
    code = "from trine.profiler.observer_build import ensure_built; print(ensure_built(True))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(answers) == 1
    assert Path(answers.pop()).parent == cache
    assert calls(log) == 1
    assert not list(cache.glob("*.part"))


@pytest.mark.slow
def test_background_build_is_for_the_next_run(
    built: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(tmp_path, monkeypatch, f'cp "{built}" "$out"')
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ensure_built(wait=False) is None  # the node's first process does it
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ensure_built(wait=False) is None
    assert "next run" in why_not_built()
    wait_for(lambda: list(cache.glob("observer-*.so")))
    assert calls(log) == 1
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ensure_built(wait=False) is not None


@pytest.mark.slow
def test_a_killed_builder_leaves_no_lock(
    built: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(tmp_path, monkeypatch, "exec sleep 60")
    assert ensure_built(wait=False) is None
    wait_for(lambda: calls(log) == 1)
    compiling = int(log.read_text())
    builder = int(Path(f"/proc/{compiling}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(builder, signal.SIGKILL)
    os.kill(compiling, signal.SIGKILL)
    log = compiler(tmp_path, monkeypatch, f'cp "{built}" "$out"')
    assert ensure_built(wait=True) is not None


@pytest.mark.slow
def test_a_failure_is_remembered_until_the_compiler_changes(
    built: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler(
        tmp_path, monkeypatch, 'echo "observer.cpp:1: fatal error: ATen.h: No such file" >&2; exit 1'
    )
    assert ensure_built(wait=True) is None
    reason = why_not_built()
    assert "fatal error: ATen.h" in reason
    assert "\n" not in reason
    attempts = calls(log)
    assert ensure_built(wait=False) is None
    time.sleep(0.5)
    assert calls(log) == attempts  # not tried again in every run
    time.sleep(0.01)
    compiler(tmp_path, monkeypatch, f'cp "{built}" "$out"')
    assert ensure_built(wait=True) is not None


@pytest.mark.slow
def test_a_library_that_does_not_work_is_not_published(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, 'echo "not a library" > "$out"')
    assert ensure_built(wait=True) is None
    assert not list(cache.glob("*.so"))


def test_no_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in why_not_built()
    assert ensure_built(wait=True) is None
    assert "no C++ compiler" in why_not_built()


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")
    compiler(tmp_path, monkeypatch, "exit 0")
    assert ensure_built(wait=True) is None
    assert ensure_built(wait=False) is None


def test_a_library_that_others_can_write_is_not_loaded(
    built: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, "exit 1")
    cache.mkdir(parents=True)
    planted = Path(observer_build._toolchain().output)
    planted.write_bytes(built.read_bytes())
    planted.chmod(planted.stat().st_mode | stat.S_IWOTH)
    assert ensure_built(wait=False) is None
    planted.chmod(0o700)
    assert ensure_built(wait=False) == planted


def test_a_spoilt_note_of_a_failure_is_no_obstacle(cache: Path) -> None:
    cache.mkdir(parents=True)
    tools = observer_build._toolchain()
    told = Path(tools.output).with_suffix(".failed")
    for content in ("", "[]", json.dumps({"time": "yesterday"})):
        told.write_text(content)
        assert observer_build._failure(tools) is None
