"""Comparisons: what is called a change, what is refused, and which cause is named."""

from __future__ import annotations

import json

import pytest
from gate_runs import ENVIRONMENT, run_facts, side

from trine.analyzers.comparison import compare
from trine.analyzers.reports.comparison import render_json, render_markdown, render_text
from trine.analyzers.run_facts import Part
from trine.record.errors import NotComparable, UsageError


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
    assert text.startswith("**REGRESSION**") and "| phases of the step | backward |" in text
