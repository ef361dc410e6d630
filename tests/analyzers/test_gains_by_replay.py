"""Gains of recommendations: replayed wherever a what-if knows the change, and else called an estimate, with its range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from analysis_builders import (
    GIB,
    METADATA,
    MS,
    all_reduce,
    breakdown,
    build,
    communication,
    rank_result,
    shares,
    steps_table,
)
from pipelines import analysed, one_by_one, pipeline

from trine.analyzers.diagnose import diagnose
from trine.analyzers.findings import _gain, gather
from trine.analyzers.findings._gain import REPLAYED, predict
from trine.analyzers.reports import html, markdown, text
from trine.analyzers.results import Analysis, Finding, Gain

CUDA = {
    **METADATA,
    "device": {"type": "cuda", "name": "Test GPU", "memory_bytes": 80 * GIB},
    "backend": "nccl",
}
#: What the replay is made to answer.
ANSWER = Gain(3 * MS, 7 * MS, 9 * MS)


def two(shares_of_step: Any = None, **changes: Any) -> Analysis:
    """Two ranks alike."""
    changes = {"part": communication(), **changes}
    return build(
        [rank_result(rank, steps=steps_table(shares_of_step or shares()), **changes) for rank in (0, 1)]
    )


def straggling() -> Analysis:
    """Rank 1 of two computes 0.3 of a step longer; rank 0 waits for it."""
    wait_ns = 20 * 30 * MS
    waiting = communication(transfer_ns=40 * MS, wait_ns=wait_ns, caused_wait_ns=2 * MS, lateness_ns=2 * MS)
    late = communication(
        transfer_ns=40 * MS, wait_ns=2 * MS, caused_wait_ns=wait_ns, lateness_ns=wait_ns, last_in=58
    )
    ranks = [
        rank_result(rank, steps=steps_table(shares(exposed_communication=share)), part=part)
        for rank, (share, part) in enumerate(((0.32, waiting), (0.02, late)))
    ]
    return build(
        ranks, collectives=(all_reduce(caused_by={0: 2 * MS, 1: wait_ns}, wait_ns=wait_ns + 2 * MS),)
    )


def in_the_open() -> Analysis:
    """Ranks of a job that is said to be neither DDP nor FSDP move bytes for a third of a step."""
    part = communication(transfer_ns=round(20 * 30 * MS), wait_ns=0, caused_wait_ns=0)
    unknown = {**CUDA, "data_parallel": {"kind": "other"}}
    return two(shares(exposed_communication=0.3), part=part, metadata=unknown)


CASES: Mapping[str, tuple[Callable[[], Analysis], dict[str, Any]]] = {
    "straggler": (straggling, {"straggler": False}),
    "optimizer-bound": (lambda: two(shares(optimizer=0.4)), {"zero.stage": 1}),
    "host-bound": (
        lambda: two(metadata={**CUDA, "compile": False}, window=breakdown(idle={"host": 0.4})),
        {"compute.compile": "blocks"},
    ),
    "exposed-communication": (in_the_open, {"communication.overlap": True}),
}


def finding_of(analysis: Analysis, name: str) -> Finding:
    return next(finding for finding in diagnose(analysis).findings if finding.id == name)


@pytest.mark.parametrize("name", CASES)
def test_what_the_replay_knows_is_taken_from_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, change = CASES[name]
    monkeypatch.setattr(_gain, "_replayed", lambda facts, asked: (ANSWER, 0.01) if asked == change else None)
    recommendation = finding_of(made(), name).recommendation
    assert recommendation is not None and recommendation.predicted is not None
    assert recommendation.predicted.formula == REPLAYED and recommendation.predicted.gain_ns == ANSWER


@pytest.mark.parametrize(("known", "said"), [(True, "(by replay, "), (False, "(an estimate, ")])
def test_reports_say_which_of_both_a_gain_is(known: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gain, "_replayed", lambda facts, asked: (ANSWER, 0.01) if known else None)
    analysis = diagnose(two(shares(optimizer=0.4)))
    for report in (text.render(analysis), markdown.render(analysis), html.render(analysis)):
        assert said in " ".join(report.split())


@pytest.mark.parametrize("name", CASES)
def test_what_it_does_not_know_is_called_an_estimate(name: str) -> None:
    recommendation = finding_of(CASES[name][0](), name).recommendation
    assert recommendation is not None and recommendation.predicted is not None
    assert " (an estimate: " in recommendation.predicted.formula
    assert recommendation.predicted.formula.endswith(" %)")


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ((0.1, 0.4, 0.8), "x (an estimate: 40 % of what is at stake, from 10 to 80 %)"),
        ((-1.2, -1.0, -0.8), "x (an estimate: 100 % as a cost, of that time, from 80 to 120 %)"),
    ],
)
def test_estimates_say_their_range(saved: tuple[float, float, float], said: str) -> None:
    found = predict(gather(two()), 1e6, saved, "x", {})
    assert found is not None and found.formula == said


def test_a_blocking_host_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gain, "_replayed", lambda facts, asked: (ANSWER, 0.01))
    blocked = two(metadata={**CUDA, "compile": False}, window=breakdown(idle={"sync": 0.4}))
    recommendation = finding_of(blocked, "host-bound").recommendation
    assert recommendation is not None and recommendation.predicted is not None
    assert recommendation.predicted.formula != REPLAYED


def test_micro_batches_of_a_pipeline_are_replayed_where_its_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mapping[str, Any]] = []

    def answer(facts: Any, change: Mapping[str, Any]) -> None:
        asked.append(change)

    monkeypatch.setattr(_gain, "_replayed", answer)
    assert {finding.id for finding in analysed(pipeline(one_by_one, 8, 8)).findings} == {"pipeline-bubble"}
    assert {"parallel.microbatches": 16} in asked


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Gain(10 * MS, 50 * MS, 90 * MS), Gain(10 * MS, 30 * MS, 30 * MS)),  # no more than what it costs
        (Gain(0, 0, 0), None),  # the replayed steps show no rank that is slower: what was measured does
    ],
)
def test_a_straggler_gives_back_what_it_costs_at_most(
    answer: Gain, expected: Gain | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gain, "_replayed", lambda facts, asked: (answer, 0.01))
    recommendation = finding_of(straggling(), "straggler").recommendation
    assert recommendation is not None and recommendation.predicted is not None
    gain = recommendation.predicted.gain_ns
    if expected is None:
        assert gain is not None and gain.mid > 0 and " (an estimate: " in recommendation.predicted.formula
    else:
        assert gain == expected
