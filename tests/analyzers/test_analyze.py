"""A whole job: pool or not, ranks that cannot be read, and what is refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pool_readers
import pytest
from analysis_tables import summary_of

import trine
from trine.analyzers import Analysis, analyze, parse_selection, pool, to_json
from trine.analyzers._packed import PackedParts, packed
from trine.analyzers.pool import reduce_in_pool
from trine.record.errors import UnreadableInput, UsageError
from trine.record.model import Job, Rank, RankSource


def job_of(*readers: Callable[[RankSource], Rank], world: int | None = None) -> Job:
    sources = tuple(RankSource(i, Path(f"rank-{i}.json"), read) for i, read in enumerate(readers))
    return Job(Path("job"), "kineto", sources, world)


def windows(analysis: Analysis) -> dict[int, int | None]:
    return {r.rank: r.summary.breakdown and r.summary.breakdown.window_ns for r in analysis.ranks}


def test_the_pool_and_this_process_say_the_same() -> None:
    job = job_of(*[pool_readers.read_plain] * 3)
    here, there = analyze(job, workers=1), analyze(job, workers=2)
    assert windows(here) == windows(there) == {0: 10, 1: 11, 2: 12}
    assert {rank.summary.source for rank in here.ranks} == {str(os.getpid())}
    assert str(os.getpid()) not in {rank.summary.source for rank in there.ranks}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_rank_that_cannot_be_read_is_missing_and_said(workers: int) -> None:
    job = job_of(pool_readers.read_plain, pool_readers.read_unreadable, pool_readers.read_plain, world=3)
    analysis = analyze(job, workers=workers)
    assert windows(analysis) == {0: 10, 2: 12}
    assert analysis.source.missing_ranks == (1,)
    errors = [note for note in analysis.data_quality if note.severity == "error"]
    assert [note.id for note in errors] == ["unreadable-rank"]
    assert errors[0].rank == 1 and "torn; copy it again" in errors[0].message
    assert job.quality == [], "the caller's job is not changed"


@pytest.mark.parametrize(
    ("reader", "workers", "words"),
    [
        (pool_readers.read_killed, 2, "status -9"),
        (pool_readers.read_defective, 2, "unexpected ZeroDivisionError"),
        (pool_readers.read_defective, 1, "unexpected ZeroDivisionError"),
    ],
)
def test_a_reader_that_dies_costs_its_own_rank_alone(reader, workers: int, words: str) -> None:
    job = job_of(pool_readers.read_plain, reader, *[pool_readers.read_plain] * 3)
    analysis = analyze(job, workers=workers)
    assert windows(analysis) == {0: 10, 2: 12, 3: 13, 4: 14}
    assert any(words in note.message for note in analysis.data_quality)


@pytest.mark.slow
def test_a_reader_that_hangs_is_given_up() -> None:
    job = job_of(pool_readers.read_for_ever, pool_readers.read_plain)
    outcomes = {
        source.rank: outcome
        for source, outcome in reduce_in_pool(job.sources, parse_selection("all"), 2, timeout_s=8)
    }
    assert isinstance(outcomes[0], UnreadableInput) and "within 8 s" in str(outcomes[0])
    assert not isinstance(outcomes[1], Exception)


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_readable_is_an_error_in_one_line(workers: int) -> None:
    with pytest.raises(UnreadableInput, match="none of the 2 ranks") as caught:
        analyze(job_of(*[pool_readers.read_unreadable] * 2), workers=workers)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnreadableInput, match="is torn"):
        analyze(job_of(pool_readers.read_unreadable), workers=workers)


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        analyze(job_of(pool_readers.read_plain), workers=0)
    with pytest.raises(UsageError, match="3:8"):
        analyze(job_of(pool_readers.read_plain), steps="some")
    with pytest.raises(UsageError, match="--steps all"):
        analyze(job_of(*[pool_readers.read_plain] * 2), steps="3:8")
    with pytest.raises(UnreadableInput, match="no rank"):
        analyze(job_of())


def test_a_rank_without_the_asked_steps_is_left_out_and_said() -> None:
    analysis = analyze(job_of(pool_readers.read_early_steps, pool_readers.read_late_steps), steps="7:9")
    assert windows(analysis) == {1: 110}
    assert [n.rank for n in analysis.data_quality if n.id == "rank-without-steps"] == [0]


def test_a_caller_needs_no_main_guard(tmp_path: Path) -> None:
    """Workers must not run the caller's script again."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from pathlib import Path
            import pool_readers
            from trine.analyzers import analyze
            from trine.record.model import Job, RankSource
            print("started", file=sys.stderr)
            sources = tuple(RankSource(i, Path(str(i)), pool_readers.read_plain) for i in range(2))
            print(len(analyze(Job(Path("job"), "kineto", sources, None), workers=2).ranks))
            """
        )
    )
    here = str(Path(pool_readers.__file__).parent)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "2\n"
    assert done.stderr.count("started") == 1


def test_real_ranks_in_a_pool_give_what_one_process_gives(data: Path) -> None:
    job = trine.load(data / "traces" / "kineto" / "torchrec_straggler_v100")
    assert to_json(analyze(job, workers=2)) == to_json(analyze(job, workers=1))


def test_parts_stay_packed_until_they_are_taken() -> None:
    parts = {"groups": [1, 2], "path": {"a": (3,)}}
    summary = packed(summary_of(0))
    assert len(summary.parts) == 0 and "groups" not in summary.parts
    kept = PackedParts(parts)
    assert dict(kept) == parts and kept.get("absent") is None
    assert kept["groups"] is not kept["groups"]
    assert dict(pickle.loads(pickle.dumps(kept))) == parts


def test_importing_the_analyzers_is_cheap() -> None:
    code = (
        "import sys, trine.analyzers; "
        "print([m for m in ('pandas', 'plotly', 'rich', 'torch', 'dash', 'multiprocessing') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_million_events_take_about_as_long_as_sorting_them_a_few_times() -> None:
    """A quarter of a second here for half a million; the bound is a ratio, since machines differ."""
    from time import process_time

    from analysis_tables import rank_of

    from trine.analyzers.breakdown import break_down
    from trine.record.model import Table

    count = 500_000
    generator = np.random.default_rng(0)
    start = generator.integers(0, 10**12, count)
    rank = rank_of(device=[], host=[])
    rank.host = Table(
        "host",
        {
            "start_ns": start - 1000,
            "end_ns": start - 500,
            "kind": generator.integers(0, 7, count),
            "thread": generator.integers(0, 4, count),
        },
        rank.strings,
    )
    rank.device = Table(
        "device",
        {
            "start_ns": start,
            "end_ns": start + generator.integers(1, 10**6, count),
            "kind": generator.integers(0, 3, count),
            "launch": np.arange(count),
        },
        rank.strings,
    )
    before = process_time()
    breakdown, _ = break_down(rank, parse_selection("all"))
    spent = process_time() - before
    before = process_time()
    for _ in range(5):
        np.argsort(start, kind="stable")
    assert breakdown is not None and breakdown.events == count
    assert spent < 10 * (process_time() - before) + 0.2


def test_a_worker_whose_caller_is_gone_says_nothing(tmp_path: Path) -> None:
    request = pickle.dumps((RankSource(0, tmp_path, pool_readers.read_plain), parse_selection("all")))
    away, end = os.pipe()
    os.close(away)
    worker = subprocess.run(
        [sys.executable, "-P", "-c", f"from {pool.__name__} import _serve; _serve()"],
        input=pool._HEADER.pack(len(request)) + request,
        stdout=end,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=False,
    )
    os.close(end)
    assert worker.returncode == 1 and b"Traceback" not in worker.stderr
