"""One rank reduced: what a summary holds, from traces and from records."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from analysis_tables import calls_at, rank_of

from trine.analyzers import parse_selection, summarize
from trine.record.model import MISSING, Rank

ALL, COMPLETE = parse_selection("all"), parse_selection("complete")
STEPS = [(1, 0, 100), (2, 100, 200), (3, 200, 300)]


def ids(summary) -> set[str]:
    return {note.id for note in summary.quality}


def test_collectives_belong_to_the_step_that_launched_them() -> None:
    device = [
        (start, start + 10, "communication", -1, step) for start, step in ((150, 1), (250, 2), (350, 3))
    ]
    device.append((400, 410, "communication", -1, MISSING))
    calls = calls_at([150, 250, 350, 400], [160, 260, 360, 410], device_row=[0, 1, 2, 3])
    rank = rank_of(device=device, steps=STEPS, collectives=calls)
    starts = {
        text: summarize(rank, parse_selection(text)).collectives["start_ns"].tolist()
        for text in ("all", "complete", "2:4")
    }
    assert starts == {"all": [150, 250, 350, 400], "complete": [150, 250], "2:4": [250, 350]}


def test_host_collectives_belong_to_the_step_in_which_they_were_issued() -> None:
    calls = calls_at([90, 150, 250], [140, 160, 260], issued_ns=[80, 99, 210])
    rank = rank_of(host=[(0, 300, "operator")], steps=STEPS, collectives=calls)
    assert summarize(rank, COMPLETE).collectives["start_ns"].tolist() == [90, 150]


def test_a_summary_is_small_and_travels() -> None:
    calls = calls_at([150], [160], device_row=[0])
    rank = rank_of(device=[(150, 160, "communication", -1, 1)], steps=STEPS, collectives=calls)
    for i in range(50_000):
        rank.strings.code(f"a name that the summary does not need {i}")
    content = pickle.dumps(summarize(rank, ALL))
    assert len(content) < 20_000
    again = pickle.loads(content)
    assert again.collectives.text("operation").tolist() == ["all_reduce"]
    assert again.steps["index"].tolist() == [1, 2, 3]


def test_what_is_missing_is_said() -> None:
    assert ids(summarize(rank_of(host=[(0, 9, "operator")], steps=STEPS[:1]), COMPLETE)) == {
        "one-step",
        "no-device-events",
    }
    assert ids(summarize(rank_of(device=[(0, 9, "compute")]), COMPLETE)) == {"no-steps"}
    assert ids(summarize(rank_of(), COMPLETE)) == {"no-steps", "no-breakdown", "no-device-events"}
    assert ids(summarize(rank_of(device=[(0, 9, "compute", -1, 1)], steps=STEPS), ALL)) == set()
    record = summarize(rank_of(steps=STEPS, format="trine"), COMPLETE)
    assert record.breakdown is None and record.breakdown_missing and ids(record) == {"no-breakdown"}


def test_a_readers_own_note_is_not_repeated() -> None:
    rank = rank_of(device=[(0, 9, "compute")])
    rank.note("no-steps", "info", "the reader said it")
    assert [note.message for note in summarize(rank, ALL).quality if note.id == "no-steps"] == [
        "the reader said it"
    ]


def window(first: int, shift: int = 0) -> Rank:
    """A deep window of two steps, numbered as the record's."""
    steps = [(first + i, (first + i) * 100 + 2, (first + i) * 100 + 98) for i in range(2)]
    device = [(start + 20, start + 40, "compute", -1, index) for index, start, _ in steps]
    device += [(start + 50, start + 60, "communication", -1, index) for index, start, _ in steps]
    calls = calls_at(
        [steps[0][1] + 50, steps[1][1] + 50], [steps[0][1] + 60, steps[1][1] + 60], device_row=[2, 3]
    )
    return rank_of(device=device, host=[(0, 5, "operator")], steps=steps, collectives=calls)


def record(**others: Any) -> Rank:
    steps = [(index, index * 100, index * 100 + 100) for index in range(20)]
    return rank_of(steps=steps, format="trine", **others)


def test_a_records_untimed_collectives_are_taken_from_all_its_windows() -> None:
    """On NCCL the always-on table knows when calls were issued, not when they ran."""
    issued = [
        {"operation": "all_reduce", "group": "0", "issued_ns": i * 100 + 10, "step": i} for i in range(20)
    ]
    summary = summarize(record(collectives=issued, windows=(window(3), window(10))), COMPLETE)
    assert summary.collectives is not None
    assert summary.collectives["start_ns"].tolist() == [352, 452, 1052, 1152]
    assert summary.collectives.text("operation").tolist() == ["all_reduce"] * 4
    assert len(summary.activity) == len(summary.activity_example) == 4
    assert "collectives-from-window" in ids(summary)
    some = summarize(record(collectives=issued, windows=(window(3), window(10))), parse_selection("4:8"))
    assert some.collectives is not None and some.collectives["start_ns"].tolist() == [452]


def test_a_records_timed_collectives_are_its_own() -> None:
    timed = calls_at(np.arange(20) * 100 + 10, np.arange(20) * 100 + 20, step=np.arange(20))
    summary = summarize(record(collectives=timed, windows=(window(3),)), parse_selection("5:7"))
    assert summary.collectives is not None and summary.collectives["start_ns"].tolist() == [510, 610]
    assert "collectives-from-window" not in ids(summary)


def test_kernels_of_a_record_come_from_its_windows() -> None:
    summary = summarize(record(windows=(window(3), window(10))), COMPLETE)
    assert {(one.kind, one.calls, one.total_ns) for one in summary.kernels} == {
        ("compute", 4, 80),
        ("communication", 4, 40),
    }
    assert summary.step_statistics is not None and summary.step_statistics.count == 20


@pytest.mark.parametrize("text", ["complete", "all", "1:3"])
def test_an_empty_rank_is_an_ordinary_input(text: str) -> None:
    rank = rank_of(device=[], host=[], steps=STEPS, collectives=[])
    summary = summarize(rank, parse_selection(text))
    assert summary.breakdown is None and summary.breakdown_missing
    assert summary.collectives is not None and len(summary.collectives) == 0
