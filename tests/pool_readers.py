"""Readers for tests of the pool: they must be importable in a fresh interpreter."""

from __future__ import annotations

import os
import time

from analysis_tables import rank_of

from trine.record.errors import UnreadableInput
from trine.record.model import Rank, RankSource


def read_plain(source: RankSource) -> Rank:
    """A rank with one kernel; its name carries the process that read it."""
    print("a reader may print")  # noqa: T201 - on purpose: it must not end up among the answers
    rank = rank_of(rank=source.rank, device=[(0, 10 + source.rank, "compute")])
    rank.source = str(os.getpid())
    return rank


def _stepped(source: RankSource, first: int) -> Rank:
    steps = [(first + i, 100 * i, 100 * i + 100) for i in range(3)]
    device = [(100 * i, 100 * i + 10, "compute", -1, first + i) for i in range(3)]
    return rank_of(rank=source.rank, device=device, steps=steps)


def read_early_steps(source: RankSource) -> Rank:
    return _stepped(source, 1)


def read_late_steps(source: RankSource) -> Rank:
    return _stepped(source, 6)


def read_unreadable(source: RankSource) -> Rank:
    raise UnreadableInput(f"{source.path} is torn; copy it again")


def read_killed(source: RankSource) -> Rank:
    """As when the kernel kills a process that takes too much memory."""
    os.kill(os.getpid(), 9)
    raise AssertionError("unreachable")


def read_defective(source: RankSource) -> Rank:
    raise ZeroDivisionError("a defect of ours")


def read_for_ever(source: RankSource) -> Rank:
    time.sleep(600)
    raise AssertionError("unreachable")


def read_slowly(source: RankSource) -> Rank:
    """Longer than a test waits, and short enough to leave the worker to the next one."""
    time.sleep(3)
    return read_plain(source)
