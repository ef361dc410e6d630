"""The store: attempts, budget, roll-ups, a disk that is full."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from record_rows import START_NS, STEP_NS, collective_rows, step_rows

from trine.record.errors import UsageError
from trine.record.model import MISSING
from trine.record.readers import native
from trine.record.rollup import roll_up
from trine.record.store import RankWriter, start_identity


def test_rows_come_back_and_parts_become_steps(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path / "run", 0, 1)
    whole, half = step_rows(0, 3), step_rows(3, 1, complete=False)
    writer.append({"parts": whole, "collectives": collective_rows(0, 3)})
    writer.append({"parts": half}, boundary=False)
    second = step_rows(3, 1)
    second["start_ns"] = half["end_ns"]
    second["end_ns"] = half["end_ns"] + STEP_NS
    second["loss"] = [float("nan")]
    writer.append({"parts": second, "samples": {"time_ns": [START_NS], "metric": ["lr"], "value": [0.1]}})
    writer.append({"parts": step_rows(4, 1, complete=False)})
    writer.close({"state": "finished"})
    rank = native.open_job(tmp_path / "run").rank(0)
    assert rank.steps is not None and rank.collectives is not None and rank.samples is not None
    assert rank.steps["index"].tolist() == [0, 1, 2, 3]
    assert rank.steps["end_ns"][3] - rank.steps["start_ns"][3] == 2 * STEP_NS
    assert rank.steps["phase_forward_ns"].tolist() == [STEP_NS] * 3 + [2 * STEP_NS]
    assert rank.steps["tokens"].tolist() == [256, 256, 256, 512]
    assert rank.steps["loss"][3] == 0.25  # the last that was given
    assert (rank.steps["samples"] == MISSING).all()
    assert rank.collectives.text("operation").tolist() == ["all_reduce"] * 9
    assert rank.metadata["state"] == "finished"
    assert [note.id for note in rank.quality] == ["unfinished-steps"]


def test_a_second_start_is_another_attempt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for loss in (1.0, 2.0):
        writer = RankWriter(run, 0, 1)
        writer.append({"parts": step_rows(0, 1) | {"loss": [loss]}})
        writer.close({"state": "finished"})
    assert writer.folder == run / "attempt-0002" / "rank-00000"
    latest = native.open_job(run)
    assert latest.rank(0).steps["loss"].tolist() == [2.0]  # type: ignore[index]
    assert [note.id for note in latest.quality] == ["other-attempts"]
    first = native.open_job(run / "rank-00000")
    assert first.rank(0).steps["loss"].tolist() == [1.0]  # type: ignore[index]


def test_ranks_of_one_start_share_an_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert [RankWriter(run, rank, 2).attempt for rank in (1, 0)] == [1, 1]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    # The second start has another world: rank 2 must not slip into the first attempt, where its folder is free.
    assert [RankWriter(run, rank, 3).attempt for rank in (2, 0, 1)] == [2, 2, 2]
    assert native.open_job(run).rank_ids == (0, 1, 2)
    # With nothing to tell two starts apart, a rank's own folder does.
    assert start_identity(3) == start_identity(3)
    assert RankWriter(run, 0, 3).attempt == 3


def test_old_detail_rolls_up_and_the_slowest_stay(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path / "run", 0, 1, max_bytes=100_000)
    slow = 1234
    for first in range(0, 20_000, 20):
        writer.append(
            {
                "parts": step_rows(first, 20, slow=slow),
                "collectives": collective_rows(first, 20),
                "samples": {"time_ns": [START_NS + first], "metric": ["m"], "value": [float(first)]},
            }
        )
    writer.close({"state": "finished"})
    size = sum(path.stat().st_size for path in writer.folder.glob("*.trine"))
    assert size < 100_000
    rank = native.open_job(tmp_path / "run").rank(0)
    assert rank.steps is not None and rank.collectives is not None and rank.samples is not None
    rolled = rank.metadata["rolled_up"]
    histograms = rolled["histograms"]
    # Every step is in a histogram or in detail, and the counts in the bins are the steps.
    assert rolled["steps"] == rolled["last"] + 1
    assert rank.steps["index"][-1] == 19_999
    assert rolled["last"] + 1 in rank.steps["index"]
    assert sum(count for histogram in histograms for _, count in histogram["bins"]) == rolled["steps"]
    assert sum(histogram["sums"]["tokens"] for histogram in histograms) == 256 * rolled["steps"]
    assert sum(total["calls"] for total in rolled["collectives"]) == 3 * rolled["steps"]
    assert sum(total["duration_ns"] for total in rolled["collectives"]) == 3 * 700 * rolled["steps"]
    assert slow in rank.steps["index"]  # kept whole, with its collectives
    assert (rank.collectives["step"] == slow).sum() == 3
    assert max(histogram["longest_ns"] for histogram in histograms) == 10 * STEP_NS
    assert [note.id for note in rank.quality] == ["rolled-up"]


def test_a_small_record_is_not_rolled_up(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path / "run", 0, 1)
    writer.append({"parts": step_rows(0, 500)})
    writer.close({})
    rank = native.open_job(tmp_path / "run").rank(0)
    assert "rolled_up" not in rank.metadata
    assert not rank.quality


class _KilledError(BaseException):
    """Stands for SIGKILL at one line."""


@pytest.mark.parametrize("where", ["unlink", "replace"])
def test_a_kill_while_rolling_up_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    writer = RankWriter(tmp_path / "run", 0, 1, max_bytes=64 << 10)
    for first in range(0, 1_000, 20):
        writer.append({"parts": step_rows(first, 20), "collectives": collective_rows(first, 20)})
    writer.close({})
    shutil.copytree(tmp_path / "run", tmp_path / "rolled")
    before = native.open_job(tmp_path / "run").rank(0)
    assert "rolled_up" not in before.metadata
    budget = 3 * sum(path.stat().st_size for path in writer.folder.glob("rows-*")) // 4

    def die(*_: object, **__: object) -> None:
        raise _KilledError

    with monkeypatch.context() as patched:
        patched.setattr(Path, where, die)
        with pytest.raises(_KilledError):
            roll_up(writer.folder, budget_bytes=budget, keep_segments=1)
    killed = native.open_job(tmp_path / "run").rank(0)
    assert roll_up(tmp_path / "rolled" / "rank-00000", budget_bytes=budget, keep_segments=1)
    rolled = native.open_job(tmp_path / "rolled").rank(0)
    assert killed.steps is not None and before.steps is not None and rolled.steps is not None
    if where == "replace":  # nothing had happened yet
        assert killed.steps["index"].tolist() == before.steps["index"].tolist()
        return
    detailed = set(killed.steps["index"].tolist())
    counted = killed.metadata["rolled_up"]
    assert len(detailed) == len(killed.steps)
    assert counted["steps"] == counted["last"] + 1
    assert detailed > set(range(counted["last"] + 1, 1_000))
    assert set(rolled.steps["index"].tolist()) <= detailed


def test_too_small_a_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least"):
        RankWriter(tmp_path / "run", 0, 1, max_bytes=10)


_FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from record_rows import step_rows
from trine.record.store import RankWriter
writer = RankWriter(Path({run!r}), 0, 1)
writer.append({{"parts": step_rows(0, 10)}})
limit = sum(p.stat().st_size for p in writer.folder.glob("rows-*"))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit + {room}, resource.RLIM_INFINITY))
try:
    writer.append({{"parts": step_rows(10, 1000)}})
except OSError as error:
    print("refused:", error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.append({{"parts": step_rows(2000, 5)}})
writer.close({{"state": "finished"}})
"""


@pytest.mark.parametrize("room", [0, 100])
def test_a_write_that_fails_half_way_leaves_whole_frames(tmp_path: Path, room: int) -> None:
    script = _FULL_DISK.format(tests=str(Path(__file__).parents[1]), run=str(tmp_path / "run"), room=room)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("refused:"), done.stdout
    rank = native.open_job(tmp_path / "run").rank(0)
    assert rank.steps is not None
    assert rank.steps["index"].tolist() == [*range(10), *range(2000, 2005)]
    assert not rank.quality
