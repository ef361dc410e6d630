"""Ranks of ``benchmarks/spawned_ranks.py``: what one of them says that fails, dies or hangs, and that none is left."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from started_ranks import Failure, RankFailed, SpawnedRanks, cause, in_one_line, launch, on_ranks

#: Of processes without a group, which start in a moment.
ALONE: dict[str, Any] = {"backend": None}


def doubled(rank: int, value: int) -> int:
    return rank + 2 * value


def ends(rank: int, how: str) -> str:
    """Rank 1 ends so; the others answer."""
    if rank != 1:
        return "well"
    if how == "raises":
        raise ValueError("of two\nlines")
    if how == "exits":
        os._exit(3)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    raise AssertionError


def waits_for_the_dead(rank: int) -> None:
    import torch

    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def environment(rank: int) -> tuple[str, str]:
    return os.environ["OMP_NUM_THREADS"], os.environ["OF_THE_TEST"]


def test_results_are_by_rank_and_ranks_live_on() -> None:
    with SpawnedRanks(2, **ALONE) as ranks:
        assert ranks.run(doubled, 5) == [10, 11]
        assert ranks.run(doubled, 6) == [12, 13]
        processes = ranks._processes
    assert [process.exitcode for process in processes] == [0, 0]
    assert on_ranks(1, environment, environment={"OF_THE_TEST": "yes"}, **ALONE) == [("1", "yes")]


def test_after_an_exception_the_ranks_are_of_use() -> None:
    with SpawnedRanks(2, **ALONE) as ranks:
        with pytest.raises(RankFailed) as raised:
            ranks.run(ends, "raises")
        assert str(raised.value) == "rank 1 failed: ValueError: of two lines"
        assert "in ends" in raised.value.failure.trace
        assert not ranks.has_ended
        assert ranks.run(doubled, 1) == [2, 3]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exits", "rank 1 ended with exit code 3"),
        ("killed", r"rank 1 was ended by signal 9 \(SIGKILL\)"),
        ("hangs", "rank 1 said nothing within 3 s"),
    ],
)
@pytest.mark.timing
@pytest.mark.slow
def test_a_rank_that_is_lost_is_named_and_all_are_ended(how: str, said: str) -> None:
    with SpawnedRanks(2, **ALONE) as ranks:
        ranks.run(doubled, 1)  # imports this module, which is no part of the time that follows
        began = time.monotonic()
        with pytest.raises(RankFailed, match=f"^{said}$"):
            ranks.run(ends, how, timeout_s=3 if how == "hangs" else 30)
        assert ranks.has_ended
        assert not any(process.is_alive() for process in ranks._processes)
        assert ranks.outcomes(doubled, 1)[0] == Failure(0, "has ended before")
    assert time.monotonic() - began < 20


def test_a_program_whose_rank_failed_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> int:
        raise RankFailed(Failure(1, "ValueError: no", "Traceback\n  in ends\n"))

    monkeypatch.delenv("TRINE_DEBUG", raising=False)
    assert in_one_line(lambda: 3) == 3 and in_one_line(fails) == 1
    assert capsys.readouterr().err == "rank 1 failed: ValueError: no\n"
    monkeypatch.setenv("TRINE_DEBUG", "1")
    assert in_one_line(fails) == 1 and "in ends" in capsys.readouterr().err


def test_the_cause_is_a_death_and_no_silence() -> None:
    lost = Failure(0, "RuntimeError: Connection closed by peer", "Traceback")
    silent, dead = Failure(0, "said nothing"), Failure(1, "was ended by signal 9 (SIGKILL)", is_death=True)
    raised = Failure(1, "ValueError: no", "Traceback")
    assert cause([lost, dead]) is dead
    assert cause([silent, raised]) is raised
    assert cause([lost, raised]) is lost
    assert cause([1, 2]) is None


def test_a_launched_program_that_fails_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys, time; rank = os.environ['RANK']; pathlib.Path(sys.argv[1], rank).touch(); "
        "told = os.environ.get('FAULT'); "
        "time.sleep(60) if told and rank == '0' else sys.exit(3 if told and rank == '1' else 0)"
    )
    command = [sys.executable, "-S", "-c", program, str(tmp_path)]
    launch(command, 2, timeout_s=30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    with pytest.raises(RankFailed, match=r"^rank 1 ended with exit code 3$"):
        launch(command, 2, timeout_s=30, environment={"FAULT": "yes"})
    with pytest.raises(RankFailed, match=r"^rank 0 has not ended within 0 s$"):
        launch(command, 1, timeout_s=0.2, environment={"FAULT": "yes"})


@pytest.mark.slow
def test_a_group_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("spawned_ranks._free_port", lambda: taken.getsockname()[1])
        assert on_ranks(1, doubled, 2) == [4]


@pytest.mark.slow
def test_the_rank_that_died_is_named_and_not_those_that_lost_it() -> None:
    pytest.importorskip("torch")
    with pytest.raises(RankFailed, match=r"^rank 1 was ended by signal 9 \(SIGKILL\)$"):
        on_ranks(2, waits_for_the_dead, timeout_s=60)
