from __future__ import annotations

import numpy as np
import pytest
from analysis_tables import rank_of

from trine.analyzers import parse_selection, summarize
from trine.analyzers.selection import select
from trine.record.errors import UsageError
from trine.record.model import MISSING

STEPS = [(3, 0, 100), (4, 100, 200), (5, 200, 300)]


@pytest.mark.parametrize(
    ("text", "start", "stop"), [("3:8", 3, 8), ("3:", 3, None), (":8", None, 8), (" 3 : 8 ", 3, 8)]
)
def test_ranges(text: str, start: int | None, stop: int | None) -> None:
    selection = parse_selection(text)
    assert (selection.start, selection.stop, selection.is_range) == (start, stop, True)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("5", "5:6"),
        ("last", "3:8"),
        (":", "3:8"),
        ("3-8", "3:8"),
        ("", "3:8"),
        ("-1:4", "3:8"),
        ("8:3", "8:9"),
        ("3:3", "3:4"),
    ],
)
def test_bad_selections_say_what_to_write_instead(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint) as caught:
        parse_selection(text)
    assert "\n" not in str(caught.value)


def test_complete_leaves_out_a_foreign_traces_last_step() -> None:
    chosen = select(rank_of(steps=STEPS), parse_selection("complete"))
    assert (chosen.steps, chosen.everything) == ((3, 4), False)
    assert (chosen.start_ns, chosen.end_ns) == (0, 200)


def test_a_native_records_steps_are_all_complete() -> None:
    chosen = select(rank_of(steps=STEPS, format="trine"), parse_selection("complete"))
    assert (chosen.steps, chosen.everything) == ((3, 4, 5), False)


@pytest.mark.parametrize("steps", [None, [], STEPS[:1]])
def test_with_fewer_than_two_steps_complete_is_as_all(steps) -> None:
    rank = rank_of(steps=steps)
    complete, everything = (select(rank, parse_selection(text)) for text in ("complete", "all"))
    assert complete == everything and complete.everything


def test_work_without_a_step_counts_only_under_all() -> None:
    rank = rank_of(steps=STEPS)
    step = np.array([3, 4, 5, MISSING])
    assert select(rank, parse_selection("all")).holds(step).tolist() == [True] * 4
    assert select(rank, parse_selection("complete")).holds(step).tolist() == [True, True, False, False]
    assert select(rank, parse_selection("4:6")).holds(step).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("steps", "text", "counts"),
    [
        (3, "complete", False),
        (3, "0:2", False),
        (3, "all", True),
        (1, "complete", True),
        (0, "complete", True),
    ],
)
def test_the_note_on_missing_launches_says_what_was_done_with_that_work(
    steps: int, text: str, counts: bool
) -> None:
    device = [(step * 100 + 10, step * 100 + 50, "compute", -1, step) for step in range(steps)]
    device.append((60, 90, "compute", -1, MISSING))
    rank = rank_of(device=device, steps=[(step, step * 100, step * 100 + 100) for step in range(steps)])
    rank.note("no-launch-record", "info", "1 device event has no launch record, so it belongs to no step")
    summary = summarize(rank, parse_selection(text))
    (said,) = [note.message for note in summary.quality if note.id == "no-launch-record"]
    assert said.endswith("the whole trace is taken" if counts else "only under --steps all")
    assert summary.breakdown is not None
    assert summary.breakdown.compute_ns % 40 == (30 if counts else 0)


def test_where_nothing_has_a_launch_the_whole_trace_is_taken() -> None:
    """A trace of the device alone beside step marks of the host: an empty window would help nobody."""
    alone = [(10, 20, "compute", -1, MISSING), (150, 160, "communication", -1, MISSING)]
    rank = rank_of(steps=STEPS, device=alone)
    assert select(rank, parse_selection("complete")).everything
    summary = summarize(rank, parse_selection("complete"))
    assert summary.breakdown is not None and summary.breakdown.window_ns == 150
    assert "no-launches" in {note.id for note in summary.quality}
    some = rank_of(steps=STEPS, device=[*alone, (30, 40, "compute", -1, 3)])
    assert not select(some, parse_selection("complete")).everything
    assert "no-launches" not in {note.id for note in summarize(some, parse_selection("complete")).quality}


def test_a_selection_that_names_no_step_says_which_there_are() -> None:
    with pytest.raises(UsageError, match="steps 3 to 5"):
        summarize(rank_of(steps=STEPS), parse_selection("7:9"))
    with pytest.raises(UsageError, match="--steps all"):
        summarize(rank_of(), parse_selection("7:9"))
