"""What a rank did before each collective."""

from __future__ import annotations

import numpy as np
from analysis_tables import calls_at, rank_of

from trine.analyzers.activity import Before, before_collectives, joined_befores
from trine.record.model import Rank

ROWS = np.arange(2)


def doing(rank: Rank) -> tuple[str, str | None]:
    """Activity and example before the second of two collectives, at 100–110 and 200–210."""
    before = before_collectives(rank, ROWS)
    return before.activity[1], before.example[1]


def on_device(device=(), host=()) -> Rank:
    calls = calls_at([100, 200], [110, 210], device_row=[0, 1])
    spans = [(100, 110, "communication"), (200, 210, "communication"), *device]
    return rank_of(device=spans, host=list(host), collectives=calls)


OPERATOR = (0, 5, "operator", "aten::add")


def test_computing() -> None:
    rank = on_device(
        [(112, 150, "compute", -1, 0, "gemm"), (150, 190, "compute", -1, 0, "softmax")], [OPERATOR]
    )
    assert doing(rank) == ("compute", "softmax")


def test_copying() -> None:
    assert doing(on_device([(112, 190, "copy", -1, 0, "Memcpy HtoD")], [OPERATOR])) == ("copy", "Memcpy HtoD")


def test_loading_collecting_and_launching() -> None:
    for kind, activity in (
        ("loader", "loader"),
        ("collector", "garbage_collection"),
        ("runtime", "launching"),
        ("operator", "launching"),
        ("python", "python"),
    ):
        rank = on_device(host=[OPERATOR, (115, 190, kind, "the culprit")])
        assert doing(rank) == (activity, "the culprit"), kind


def test_what_comes_first_explains_what_lies_inside_it() -> None:
    host = [
        OPERATOR,
        (111, 199, "python", "main"),
        (111, 199, "operator", "outer"),
        (120, 190, "loader", "next"),
    ]
    assert doing(on_device(host=host)) == ("loader", "next")


def test_python_where_no_span_runs_and_unknown_where_nothing_was_recorded() -> None:
    assert doing(on_device(host=[OPERATOR])) == ("python", None)
    assert doing(on_device()) == ("unknown", None)


def test_python_counts_with_and_without_a_span() -> None:
    host = [OPERATOR, (115, 155, "operator", "aten::mm"), (155, 180, "python", "tokenize")]
    # 40 ns launching; Python 25 ns in a span and 25 ns outside any.
    assert doing(on_device(host=host))[0] == "python"


def test_the_collective_itself_delays_nothing() -> None:
    host = [OPERATOR, (111, 190, "operator", "c10d::allreduce_"), (191, 195, "operator", "aten::mm")]
    assert doing(on_device(host=host))[0] == "python"


def test_without_a_device_operators_are_the_work() -> None:
    rank = rank_of(host=[(112, 190, "operator", "aten::mm")], collectives=calls_at([100, 200], [110, 210]))
    assert doing(rank) == ("compute", "aten::mm")


def test_a_call_without_a_gap_was_prepared_while_the_one_before_it_ran() -> None:
    rank = rank_of(
        host=[(105, 190, "operator", "aten::mm"), OPERATOR], collectives=calls_at([100, 195], [200, 210])
    )
    assert doing(rank) == ("compute", "aten::mm")


def test_the_first_collective_looks_back_to_the_beginning() -> None:
    rank = on_device([(20, 90, "compute", -1, 0, "forward")], [OPERATOR])
    assert before_collectives(rank, ROWS).activity[0] == "compute"


def test_untimed_collectives_are_unknown() -> None:
    rank = rank_of(host=[OPERATOR], collectives=[{"operation": "all_reduce", "issued_ns": 5}] * 2)
    before = before_collectives(rank, ROWS)
    assert (before.activity, before.example) == (("unknown", "unknown"), (None, None))
    assert before_collectives(rank_of(), np.arange(0)) == Before()


def test_a_frame_is_named_by_what_it_did_itself() -> None:
    """The frame that called the operators and the sleep lasts longer than the sleep, and says less."""
    host = [
        (111, 195, "python", "forward"),
        (112, 150, "operator", "aten::mm", 1, 0),
        (150, 190, "python", "sleep", 1, 0),
    ]
    calls = calls_at([100, 200], [110, 210])
    before = before_collectives(rank_of(host=host, collectives=calls), ROWS)
    assert before.activity[1] == "python" and before.example[1] == "sleep"
    assert {name: int(share[1]) for name, share in before.shares_ns.items() if share[1]} == {
        "compute": 38,
        "python": 52,
    }
    assert before.examples["compute"] == {1: "aten::mm"}


def test_a_frame_or_step_mark_that_did_little_itself_names_nothing() -> None:
    host = [
        OPERATOR,
        (111, 199, "annotation", "ProfilerStep#3"),
        (180, 190, "annotation", "forward"),
    ]
    before = before_collectives(rank_of(host=host, collectives=calls_at([100, 200], [110, 210])), ROWS)
    assert before.activity[1] == "python" and before.example[1] is None


def test_windows_of_one_rank_follow_each_other() -> None:
    before = before_collectives(on_device(host=[OPERATOR, (115, 190, "loader", "next")]), ROWS)
    joined = joined_befores([before, before])
    assert joined.activity == before.activity * 2 and joined.example[3] == "next"
    assert joined.examples["loader"] == {1: "next", 3: "next"}
    assert joined.shares_ns["loader"].tolist() == before.shares_ns["loader"].tolist() * 2
