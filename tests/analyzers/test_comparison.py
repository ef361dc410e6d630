"""Comparisons: what is called a change, what is refused, and which cause is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from gate_runs import ENVIRONMENT, run_facts, side

from trine.analyzers.comparison import compare
from trine.analyzers.flaws import Flaw, flaws_of
from trine.analyzers.reports.comparison import render_html, render_json, render_markdown, render_text
from trine.analyzers.run_facts import METRICS, Part, RunFacts, Told, Window
from trine.record.errors import NotComparable, UsageError
from trine.record.model import Quality


def test_a_slower_side_is_a_regression_and_its_cause_is_named() -> None:
    result = compare(side("new", 115), side("old", 100))
    assert result.verdict == "regression"
    assert result.step_time.ratio == pytest.approx(1.15, rel=0.02)
    worst = result.causes[0]
    assert (worst.kind, worst.name) == ("phase", "backward")
    assert worst.change_ns == pytest.approx(15e6, rel=0.1)
    assert worst.share == pytest.approx(0.15, rel=0.1)
    assert all(cause.name != "forward" for cause in result.causes)  # it did not change


def test_equal_sides_have_no_change_and_no_cause() -> None:
    result = compare(side("new", 100), side("old", 100))
    assert result.verdict == "no change" and result.causes == ()


def test_a_faster_side_is_an_improvement() -> None:
    assert compare(side("new", 85), side("old", 100)).verdict == "improvement"


def test_one_run_a_side_concludes_nothing_however_large_the_change() -> None:
    result = compare([run_facts("new", 150)], [run_facts("old", 100)])
    assert result.verdict == "one run"
    assert result.step_time.low > 1.4  # the interval is shown all the same
    assert "three or more runs" in " ".join(result.notes)
    assert compare(side("new", 150), [run_facts("old", 100)]).verdict == "one run"


def test_a_change_below_the_effect_is_none_until_the_effect_is_set() -> None:
    new, old = side("new", 103, scatter=0.001), side("old", 100, scatter=0.001)
    assert compare(new, old).verdict == "no change"
    assert compare(new, old, minimum_effect=0.01).verdict == "regression"


def test_scattered_runs_are_inconclusive() -> None:
    assert compare(side("new", 100, scatter=0.3), side("old", 100, scatter=0.3)).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("key", "value"), [("world_size", 16), ("torch", "2.14.0"), ("device", "NVIDIA H100")]
)
def test_other_environments_are_refused_with_what_differs(key: str, value: object) -> None:
    other = side("old", 100, environment={**ENVIRONMENT, key: value})
    with pytest.raises(NotComparable, match=f"{key} is .* against {value}.*--any-environment") as caught:
        compare(side("new", 100), other)
    assert caught.value.exit_code == 3
    result = compare(side("new", 100), other, any_environment=True)
    assert [(d.name, d.second) for d in result.environment] == [(key, value)]


def test_what_one_side_does_not_say_is_no_difference() -> None:
    silent = side("old", 100, environment={**ENVIRONMENT, "nccl": None})
    assert compare(side("new", 100), silent).environment == ()
    result = compare(side("new", 100), side("old", 100, environment={}))
    assert "does not say where it ran" in " ".join(result.notes)


def test_runs_of_one_side_must_share_their_environment_too() -> None:
    mixed = [*side("new", 100), run_facts("odd", 100, environment={**ENVIRONMENT, "devices": 4})]
    with pytest.raises(NotComparable, match="devices is 8 and 4 against 8"):
        compare(mixed, side("old", 100))


def test_short_runs_are_refused_with_the_way_out() -> None:
    with pytest.raises(NotComparable, match=r"new has 4 steady steps \(2 more are warm-up\).*--min-steps 4"):
        compare([run_facts("new", 100, steps=4)], side("old", 100))
    with pytest.raises(NotComparable, match=r"record more steps$"):
        compare([run_facts("new", 100, steps=0)], side("old", 100), minimum_steps=1)
    assert compare([run_facts("new", 100, steps=4)], side("old", 100), minimum_steps=4).verdict == "one run"


def test_a_side_without_runs_is_refused() -> None:
    with pytest.raises(UsageError, match="no runs"):
        compare([], side("old", 100))


def test_a_part_that_only_one_side_has_counts_from_zero_but_an_unseen_kind_does_not() -> None:
    extra = (Part("kernel", "gemm", 20e6), Part("kernel", "cast", 9e6), Part("operator", "aten::to", 9e6))
    result = compare(side("new", 100, parts=extra), side("old", 100))
    assert [(cause.kind, cause.name, cause.second_ns) for cause in result.causes] == [("kernel", "cast", 0.0)]
    nothing = compare(side("new", 100, parts=()), side("old", 100))
    assert nothing.causes == () and "no cause can be named" in " ".join(nothing.notes)


def test_configurations_that_differ_are_shown() -> None:
    changed = {"model": {"parameters": 1000}, "precision": {"autocast_dtype": "bf16"}}
    result = compare(side("new", 80, configuration=changed), side("old", 100))
    assert [(d.name, d.first, d.second) for d in result.configuration] == [
        ("precision.autocast_dtype", "bf16", "fp32")
    ]


def test_the_text_answers_in_its_first_lines_and_fits() -> None:
    result = compare(side("new", 115), side("old", 100))
    lines = render_text(result).splitlines()
    head = "\n".join(lines[:10])
    for part in ("REGRESSION", "15 %", "interval of the ratio", "3 runs against 3 runs", "A slow-down of"):
        assert part in head
    assert "backward" in head
    assert max(map(len, lines)) <= 100
    alone = render_text(compare([run_facts("new", 115)], [run_facts("old", 100)])).splitlines()
    assert alone[2].startswith("NOTHING CONCLUDED FROM ONE RUN") and max(map(len, alone)) <= 100


def test_json_and_markdown_carry_the_same_numbers() -> None:
    result = compare(side("new", 115), side("old", 100))
    document = json.loads(render_json(result))
    assert document["schema"] == "trine.comparison/1" and document["verdict"] == "regression"
    assert document["step_time"]["ratio"] == result.step_time.ratio
    assert [run["source"] for run in document["second"]["runs"]] == ["old-0", "old-1", "old-2"]
    assert document["causes"][0]["name"] == "backward"
    text = render_markdown(result)
    assert text.startswith("**REGRESSION**") and "| phases of all steady steps (180) | backward |" in text


# --- findings of both sides, and what each number is of --------------------------------------------


def with_findings(runs: list[RunFacts], *found: Told) -> list[RunFacts]:
    return [replace(run, findings=found) for run in runs]


def test_findings_that_appear_and_vanish_are_told_apart() -> None:
    blocking = Told("blocking-calls", "fault", "The host blocks 16 times a step", 0.13)
    loader = Told("input-bound", "fault", "The step waits for its next batch", 0.28)
    fusing = Told("unfused-elementwise", "opportunity", "Unfused work takes 28 %", 0.1)
    new = with_findings(side("new", 100), blocking, fusing)
    result = compare(new, with_findings(side("old", 100), loader, fusing))
    assert result.findings is not None
    assert [(one.id, one.state, one.second, one.first) for one in result.findings] == [
        ("blocking-calls", "appeared", None, 0.13),
        ("input-bound", "vanished", 0.28, None),
        ("unfused-elementwise", "stays", 0.1, 0.1),
    ]
    text = render_text(result)
    assert "appeared  blocking-calls: none → 13 %" in text and "The host blocks 16 times a step" in text
    assert "vanished  input-bound: 28 % → none" in text
    for form in (render_markdown(result), render_html(result)):
        assert "blocking-calls" in form and "appeared" in form and "input-bound" in form
    assert json.loads(render_json(result))["findings"][0]["state"] == "appeared"
    healthy = compare(with_findings(side("new", 100)), with_findings(side("old", 100)))
    assert healthy.findings == () and "Findings" not in render_text(healthy)


def test_what_one_run_of_three_shows_is_no_finding_of_its_side() -> None:
    odd = Told("straggler", "fault", "Rank 1 is late", 0.2)
    new = with_findings(side("new", 100))
    new[0] = replace(new[0], findings=(odd,))
    assert compare(new, with_findings(side("old", 100))).findings == ()
    new[1] = replace(new[1], findings=(odd,))
    found = compare(new, with_findings(side("old", 100))).findings
    assert found is not None and [one.id for one in found] == ["straggler"]


def test_findings_of_an_older_baseline_are_not_taken_for_none() -> None:
    """A side that does not say what it found must not make the other's findings look new."""
    new = with_findings(side("new", 100), Told("straggler", "fault", "Rank 1 is late", 0.2))
    result = compare(new, side("old", 100))
    assert result.findings is None and "straggler" not in render_text(result)
    assert json.loads(render_json(result))["findings"] is None


def deep(run: RunFacts, step_ms: float, steps: int) -> RunFacts:
    """The run with a deep window of ``steps`` steps that took ``step_ms`` each."""
    parts = (Part("breakdown", "compute", step_ms * 0.9e6), Part("breakdown", "idle", step_ms * 0.1e6))
    return replace(run, parts=(*run.parts, *parts), window=Window(step_ms * 1e6, steps, 1, "host"))


def test_every_number_says_which_steps_it_is_of() -> None:
    result = compare([deep(run_facts("new", 80), 130, 4)], [deep(run_facts("old", 100), 105, 5)])
    text = render_text(result)
    assert "(median 80." in text
    assert "phases of all steady steps (60)" in text and "breakdown of the traced steps (5 and 4)" in text
    assert "step time, median of steady steps" in text
    for form in (text, render_markdown(result), render_html(result)):
        assert not any(name in form for name in METRICS if "_" in name), "names of keys are no words"


def test_traced_steps_that_changed_otherwise_than_the_rest_are_said_to() -> None:
    """The run became faster, its deep window slower: a reader must know which of the two to believe."""
    apart = compare([deep(run_facts("new", 80), 130, 4)], [deep(run_facts("old", 100), 105, 4)])
    (note,) = [note for note in apart.notes if "traced steps" in note]
    assert "changed by -20." in note and "by +25.0 ms" in note and "the steady steps decide" in note
    alike = compare([deep(run_facts("new", 80), 84, 4)], [deep(run_facts("old", 100), 105, 4)])
    assert not any("traced steps" in note for note in alike.notes)


# --- means, medians, and the wholes that parts add up to --------------------------------------------


def slowed(run: RunFacts, ms: float, steps: int) -> RunFacts:
    """The run with its last ``steps`` steps at ``ms``, its phases still dividing the mean step."""
    step_ns = (*run.step_ns[:-steps], *[round(ms * 1e6)] * steps)
    rest = sum(step_ns) / len(step_ns) - 30e6
    parts = (Part("phase", "forward", 30e6), Part("phase", "backward", rest))
    return replace(run, step_ns=step_ns, parts=parts)


def test_parts_add_up_to_a_whole_that_is_shown() -> None:
    result = compare(
        [deep(slowed(run_facts("new", 80), 80, 1), 130, 4)], [deep(run_facts("old", 100), 105, 5)]
    )
    assert [whole.kind for whole in result.wholes] == ["phase", "breakdown"]
    for whole in result.wholes:
        parts = [cause for cause in result.causes if cause.kind == whole.kind]
        assert sum(part.change_ns for part in parts) == pytest.approx(whole.change_ns, rel=0.01)
        assert sum(part.share for part in parts) == pytest.approx(whole.share, rel=0.01)
    lines = render_text(result).splitlines()
    rows = [line.split() for line in lines if line.startswith("    all ")]
    assert [row[-2:] for row in rows] == [["-20", "%"], ["+24", "%"]]
    for form in (" ".join(" ".join(lines).split()), render_markdown(result), render_html(result)):
        assert "Parts are means, since only means add up" in form
    assert [row["kind"] for row in json.loads(render_json(result))["wholes"]] == ["phase", "breakdown"]


def test_a_breakdowns_shares_are_of_the_traced_step_that_it_divides() -> None:
    result = compare([deep(run_facts("new", 100), 300, 4)], [deep(run_facts("old", 100, seed=1), 200, 4)])
    (compute,) = [cause for cause in result.causes if cause.name == "compute"]
    assert compute.share == pytest.approx(0.9 * 100 / 200)


def test_a_median_that_moved_against_the_mean_is_explained() -> None:
    """One step in ten stalled on the old side: its mean is longer, its median shorter than the new side's."""
    result = compare([run_facts("new", 104)], [slowed(run_facts("old", 100), 300, 6)])
    (note,) = [note for note in result.notes if "and no median" in note]
    assert "the median of the steady steps changed by +3." in note and "their mean by -1" in note
    alike = compare([run_facts("new", 110)], [run_facts("old", 100)])
    assert not any("no median" in note for note in alike.notes)


def test_sides_of_one_name_are_told_apart() -> None:
    """CI records every run into the same folder, and the baseline remembers its name."""
    result = compare([run_facts("runs/new-1", 104)], [run_facts("runs/new-1", 100, seed=1)])
    assert (result.first.label, result.second.label) == ("new", "old")


# --- what is wrong with the data --------------------------------------------------------------------


def test_a_run_cut_short_is_told_in_every_form() -> None:
    killed = Flaw("killed", "warning", "the process ended without closing its record (rank 0)")
    cut = [replace(run, flaws=(killed,)) for run in side("new", 100)]
    result = compare(cut, side("old", 100))
    (flaw,) = result.quality
    assert flaw.sources == ("new-0", "new-1", "new-2") and flaw.flaw == killed
    said = "killed: new-0 and 2 more: the process ended without closing its record (rank 0)"
    text = " ".join(render_text(result).split())
    assert f"Data quality warning {said}" in text
    assert f"- warning {said}" in render_markdown(result) and "Data quality" in render_html(result)
    assert json.loads(render_json(result))["data_quality"] == [
        {
            "id": "killed",
            "severity": "warning",
            "message": killed.message,
            "runs": ["new-0", "new-1", "new-2"],
        }
    ]
    assert "Data quality" not in render_text(compare(side("new", 100), side("old", 100)))


def test_only_what_is_wrong_and_not_said_elsewhere_is_a_flaw() -> None:
    notes = [
        Quality("killed", "warning", "gone", 0),
        Quality("no-steps", "warning", "no steps", 0),
        Quality("no-mfu", "info", "no MFU"),
        Quality("unreadable-rank", "error", "broken", 1),
    ]
    assert [flaw.id for flaw in flaws_of(notes)] == ["killed", "unreadable-rank"]
