"""The study: what is asked of every job, how findings use it, and what it says where nothing can be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trine
from trine.analyzers.findings import gather
from trine.analyzers.findings._gain import REPLAYED, predict
from trine.analyzers.reports.document import Table
from trine.analyzers.reports.studies.what_if import section
from trine.analyzers.studies import what_if
from trine.analyzers.studies.what_if import Answer, WhatIfs

TRACE = "traces/kineto/gloo_ddp4_cpu"


@pytest.fixture(scope="module")
def analysis(data: Path) -> Any:
    return trine.analyze(trine.load(data / TRACE))


def test_a_job_of_gloo_ranks_is_replayed_from_its_operators(analysis: Any) -> None:
    found = analysis.study("what_if")
    assert isinstance(found, WhatIfs) and found.basis == "operators"
    assert [step.index for step in found.steps] and all(abs(step.error) < 0.12 for step in found.steps)
    assert {"straggler = false", "loader_wait = false"} <= {each.change for each in found.answers}
    measured = {step.index: step.measured_ns for step in found.steps}
    assert all(abs(step.replayed_ns / measured[step.index] - 1 - step.error) < 1e-6 for step in found.steps)
    assert all(abs(each.predicted_mid_ns + each.gain_mid_ns - found.step_ns) <= 2 for each in found.answers)
    assert set(found.to_pandas()) == {"summary", "steps", "answers"}


def test_its_section_says_first_how_far_the_replay_is_off(analysis: Any) -> None:
    study = analysis.study("what_if")
    step = study.step_ns
    half = Answer("loader_wait = false", *(step // 2,) * 3, *(step - step // 2,) * 3)
    drawn = section(replace(study, answers=(half,)), analysis, 8)
    assert drawn is not None and drawn.title == "What would a change make of this step?"
    assert "off in the median step" in str(drawn.blocks[0])
    # No change that moves the step by a hundredth: nothing is drawn.
    none = Answer("loader_wait = false", *(step,) * 3, *(0,) * 3)
    assert section(replace(study, answers=(none,)), analysis, 8) is None


def test_its_table_says_what_a_change_gains_from_and_to(analysis: Any) -> None:
    study = replace(analysis.study("what_if"), step_ns=541_000_000)
    ms = 1_000_000
    gains = (
        Answer("sure", 475 * ms, 506 * ms, 563 * ms, 6 * ms, 34 * ms, 58 * ms),
        Answer("unsure", 500 * ms, 530 * ms, 570 * ms, -17 * ms, 11 * ms, 20 * ms),
        Answer("cost", 600 * ms, 641 * ms, 700 * ms, -150 * ms, -100 * ms, -60 * ms),
    )
    drawn = section(replace(study, answers=gains), analysis, 8)
    assert drawn is not None
    (table,) = (block for block in drawn.blocks if isinstance(block, Table))
    assert [column.title for column in table.columns] == [
        "change",
        "step",
        "gain",
        "of the step",
        "gain between",
    ]
    assert table.rows == (
        ("sure", "506 ms", "34.0 ms", "6.3 %", "6.00 ms and 58.0 ms"),
        ("unsure", "530 ms", "11.0 ms", "2.0 %", "−17.0 ms and 20.0 ms"),
        ("cost", "641 ms", "−100 ms", "−18 %", "−150 ms and −60.0 ms"),
    )


def test_a_recommended_change_is_replayed_and_amdahl_stays_among_the_inputs(analysis: Any) -> None:
    facts = gather(analysis)
    assert facts.step_ns
    amdahl = predict(facts, 0.5 * facts.step_ns, (0.1, 0.2, 0.3), "part × share", {})
    replayed = predict(
        facts, 0.5 * facts.step_ns, (0.1, 0.2, 0.3), "part × share", {}, change={"loader_wait": False}
    )
    assert amdahl is not None
    assert amdahl.formula == "part × share (an estimate: 20 % of what is at stake, from 10 to 30 %)"
    assert replayed is not None and replayed.formula == REPLAYED
    assert replayed.inputs["amdahl_gain_ns"] == pytest.approx(0.1 * facts.step_ns, rel=1e-6)
    assert abs(float(replayed.inputs["replay_error"])) < 0.1


def test_what_is_assumed_of_a_single_change_stands_below_the_table(analysis: Any) -> None:
    study = analysis.study("what_if")
    own = {each.change: each.notes for each in study.answers}
    assert not any(set(notes) & set(study.notes) for notes in own.values())
    step = study.step_ns
    gains = (step // 2,) * 3, (step - step // 2,) * 3
    both = tuple(
        Answer(f"change {number}", *gains[0], *gains[1], notes=("links are alike",)) for number in (1, 2)
    )
    drawn = section(replace(study, answers=both), analysis, 8)
    assert drawn is not None and "change 1, change 2: links are alike." in str(drawn.blocks[-1])


def test_a_replay_that_is_far_off_tells_no_changes(
    analysis: Any, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    monkeypatch.setattr(what_if, "MOST_ERROR", 1e-9)
    found = trine.analyze(trine.load(data / TRACE)).study("what_if")
    assert found.answers == () and found.doubt in found.notes and found.steps
    drawn = section(found, analysis, 8)
    assert drawn is not None and len(drawn.blocks) == 1 and "says nothing of changes" in str(drawn.blocks[0])
    assert what_if.to_json(found)["answers"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"parallel.context": 2},  # no transformation
        {"communication.bucket_mib": "auto"},  # decided later
        {"communication.gradient_as_view": True},  # nothing of the graph
    ],
)
def test_where_the_replay_has_no_answer_amdahl_has(analysis: Any, change: Mapping[str, Any]) -> None:
    facts = gather(analysis)
    found = predict(facts, 1e6, (0.1, 0.2, 0.3), "part × share", {}, change=change)
    assert found is not None and found.formula.startswith("part × share (an estimate: ")


def test_a_replay_that_is_far_off_is_not_trusted(analysis: Any) -> None:
    study = analysis.study("what_if")
    assert study.ask({"straggler": False}) is not None
    assert replace(study, replay_error=-0.2).ask({"straggler": False}) is None
    assert replace(study, usual_error=-0.3).ask({"straggler": False}) is None


def test_steps_without_operators_say_what_is_missing(data: Path) -> None:
    found = trine.analyze(trine.load(data / "traces" / "pipeline_schedule" / "pp8"))
    assert found.study("what_if") is None
    assert "trine.what_if" in str(found.why_without("what_if"))


def test_in_python_it_is_one_call(data: Path) -> None:
    answer = trine.what_if(data / TRACE, {"link_speed": 4})
    assert answer.predicted.mid < answer.step.mid and answer.basis == "operators"
    with pytest.raises(trine.TrineError, match="what_if has no answer for 'link_sped'"):
        trine.what_if(data / TRACE, {"link_sped": 4})
