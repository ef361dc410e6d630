"""Ranks read by a Dask cluster: a scheduler and two workers on this machine, real processes and real files."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pool_readers
import pytest
from trace_builders import small, written

import trine
from trine.analyzers import analyze, scheduler, to_json
from trine.analyzers.selection import parse_selection
from trine.cli import main
from trine.record.errors import UnreadableInput, UsageError
from trine.record.model import Job, RankSource

pytest.importorskip("distributed", reason="the extra dask is not installed")

TESTS = str(Path(__file__).resolve().parents[1])


def start(*arguments: str, first: str = "") -> subprocess.Popen[str]:
    """A process of Dask's command line; ``first`` is run in it before."""
    code = first + f"from distributed.cli.{arguments[0]} import main; main()"
    # One retry shows as much as three, and a nanny takes seconds to start a worker again.
    environment = {
        **os.environ,
        "PYTHONPATH": TESTS,
        "OMP_NUM_THREADS": "1",
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments[1:]],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str], pattern: str, timeout_s: float = 60) -> str:
    """The first group of the first line that matches."""
    assert process.stderr is not None
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        line = process.stderr.readline()
        match = re.search(pattern, line)
        if match:
            return match[1]
        assert line, "it ended without a word"
    raise AssertionError(f"nothing like {pattern} within {timeout_s} s")


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def worker(address: str, folder: Path, option: str = "--no-nanny", first: str = "") -> subprocess.Popen[str]:
    common = ("--nthreads", "1", "--no-dashboard", "--death-timeout", "60", "--local-directory", str(folder))
    return start("dask_worker", address, "--host", "127.0.0.1", option, *common, first=first)


@pytest.fixture(scope="module")
def empty_cluster() -> Iterator[str]:
    """A scheduler without workers."""
    process = start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
    try:
        yield said(process, r"Scheduler at:\s+(tcp://\S+)")
    finally:
        end(process)


@contextmanager
def restarting(tmp_path_factory: pytest.TempPathFactory, count: int) -> Iterator[str]:
    """A scheduler and workers, restarted by their nannies when they die."""
    process = start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
    workers: list[subprocess.Popen[str]] = []
    try:
        address = said(process, r"Scheduler at:\s+(tcp://\S+)")
        for number in range(count):
            folder = tmp_path_factory.mktemp(f"worker{number}")
            workers.append(worker(address, folder, "--nanny"))
        for one in workers:
            said(one, r"(Registered to)")
        yield address
    finally:
        # Nannies end their workers when asked; killed, they leave them.
        for one in workers:
            one.terminate()
        for one in workers:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
        end(*workers, process)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with restarting(tmp_path_factory, 2) as address:
        yield address


@pytest.fixture
def lone_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with restarting(tmp_path_factory, 1) as address:
        yield address


def job_of(*readers: object, path: Path) -> Job:
    sources = tuple(RankSource(rank, path, reader) for rank, reader in enumerate(readers))  # type: ignore[arg-type]
    return Job(path, "kineto", sources, None)


@pytest.mark.slow
def test_real_ranks_give_what_one_process_gives(cluster: str, data: Path) -> None:
    job = trine.load(data / "traces" / "kineto" / "torchrec_straggler_v100")
    assert to_json(analyze(job, scheduler=cluster)) == to_json(analyze(job, workers=1))


def test_the_command(cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        written(tmp_path / f"rank{rank}.json", small(rank, 3))
    assert main(["analyze", str(tmp_path), "--scheduler", cluster, "--format", "json"]) == 0
    assert '"missing_ranks": []' in capsys.readouterr().out


@pytest.mark.slow
def test_a_rank_that_waits_beside_one_that_kills_their_worker_is_not_blamed(
    lone_cluster: str, tmp_path: Path
) -> None:
    """One worker is given both at once, and Dask counts its death against both."""
    job = job_of(pool_readers.read_killed, pool_readers.read_plain, path=tmp_path)
    analysis = analyze(job, scheduler=lone_cluster)
    assert [rank.rank for rank in analysis.ranks] == [1]
    notes = {note.rank: note.message for note in analysis.data_quality if note.id == "unreadable-rank"}
    assert list(notes) == [0] and "died" in notes[0]


@pytest.mark.slow
def test_a_rank_that_cannot_be_read_or_kills_its_worker_costs_itself_alone(
    cluster: str, tmp_path: Path
) -> None:
    job = job_of(
        pool_readers.read_plain,
        pool_readers.read_unreadable,
        pool_readers.read_killed,
        pool_readers.read_defective,
        path=tmp_path,
    )
    analysis = analyze(job, scheduler=cluster)
    assert [rank.rank for rank in analysis.ranks] == [0]
    notes = {note.rank: note.message for note in analysis.data_quality if note.id == "unreadable-rank"}
    assert "is torn" in notes[1] and "died" in notes[2] and "ZeroDivisionError" in notes[3]
    assert analysis.source.missing_ranks == (1, 2, 3)


def test_files_that_workers_do_not_see(cluster: str, tmp_path: Path) -> None:
    job = trine.load(written(tmp_path / "rank0.json", small(0, 1)))
    (tmp_path / "rank0.json").unlink()
    with pytest.raises(UnreadableInput, match=r"is not there for the Dask worker on .*shared file system"):
        analyze(job, scheduler=cluster)


def test_a_silent_cluster_is_given_up(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_TICK_S", 0.2)
    sources = [RankSource(0, tmp_path, pool_readers.read_slowly)]
    ((_, outcome),) = scheduler.reduce_on_dask(sources, parse_selection("all"), cluster, timeout_s=0.5)
    assert isinstance(outcome, UnreadableInput) and "nothing came back" in str(outcome)


@pytest.mark.slow
def test_nobody_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "CONNECT_TIMEOUT_S", 1.0)
    path = written(tmp_path / "rank0.json", small(0, 1))
    begun = time.monotonic()
    assert main(["analyze", str(path), "--scheduler", "tcp://127.0.0.1:1"]) == 2
    assert time.monotonic() - begun < 30
    message = capsys.readouterr().err
    assert "no Dask scheduler answers at tcp://127.0.0.1:1" in message and message.count("\n") == 1
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    files = [str(tmp_path / name) for name in ("scheduler.json", "empty.json", "broken.json")]
    for wrong in ("nonsense://x:1", "nonsense", "", "tcp://x:99999", "tcp://[::1", *files):
        assert main(["analyze", str(path), "--scheduler", wrong]) == 2
        gc.collect()  # a client that was half made would complain here
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "unexpected" not in message


def test_a_scheduler_without_workers(
    empty_cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scheduler, "CONNECT_TIMEOUT_S", 1.0)
    with pytest.raises(UsageError, match="has no worker"):
        analyze(job_of(pool_readers.read_plain, path=tmp_path), scheduler=empty_cluster)


def test_workers_without_trine(empty_cluster: str, tmp_path: Path) -> None:
    # An editable install is found by a finder of its own: without it there is no trine.
    hidden = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
    hidden += "sys.path = [p for p in sys.path if p]; "
    process = worker(empty_cluster, tmp_path, first=hidden)
    try:
        said(process, r"(Registered to)")
        with pytest.raises(UsageError, match="1 of 1 Dask workers cannot import trine"):
            analyze(job_of(pool_readers.read_plain, path=tmp_path), scheduler=empty_cluster)
    finally:
        end(process)


def test_another_version_is_refused(cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trine, "__version__", "99.0")
    with pytest.raises(UsageError, match=r"have trine .* and this is 99\.0"):
        analyze(job_of(pool_readers.read_plain, path=tmp_path), scheduler=cluster)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"trine\[dask\]"):
        analyze(job_of(pool_readers.read_plain, path=tmp_path), scheduler="tcp://127.0.0.1:1")


def test_workers_and_scheduler_are_one_or_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "rank0.json", small(0, 1))
    assert main(["analyze", str(path), "--scheduler", "x:1", "--workers", "2"]) == 2
    assert "give one of them" in capsys.readouterr().err
