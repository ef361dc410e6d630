"""A check's reports: GitHub reads the annotations back unchanged, XML parsers the JUnit file."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from gate_runs import run_facts, side
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.flaws import Flaw
from trine.analyzers.gate import CheckResult, Outcome, check
from trine.analyzers.reports.gate import (
    annotation,
    github_annotations,
    github_summary,
    not_comparable_junit,
    render_json,
    render_junit,
    render_markdown,
    render_text,
)


def failing() -> CheckResult:
    return check(side("new", 115), baseline=side("old", 100), budget={"step_time_ns": 200e6, "mfu": 0.4})


def as_github_reads(line: str) -> tuple[str, str, str]:
    """The runner's own way back: split at ``::``, unescape properties and message."""
    found = re.fullmatch(r"::(\w+) title=(.*?)::(.*)", line)
    assert found is not None, line
    level, title, message = found.groups()
    for escaped, plain in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        title = title.replace(escaped, plain)
        if plain not in ":,":
            message = message.replace(escaped, plain)
    return level, title, message


@given(st.text(), st.text())
def test_annotations_come_back_as_they_were(title: str, message: str) -> None:
    line = annotation("error", title, message)
    assert "\n" not in line and "\r" not in line
    assert as_github_reads(line) == ("error", title, message)


def test_failures_come_first_and_at_most_five_are_written() -> None:
    lines = github_annotations(failing())
    levels = [as_github_reads(line)[0] for line in lines]
    assert levels == ["error", "warning"]
    assert "15 % longer" in as_github_reads(lines[0])[2]
    assert all(
        as_github_reads(line)[0] == "warning" for line in github_annotations(failing(), warn_only=True)
    )
    assert [as_github_reads(line)[0] for line in github_annotations(failing(), strict=True)] == ["error"] * 2
    outcome = Outcome("budget/mfu", "mfu", "fail", 0.4, 0.3, (0.3,), True, "too low")
    many = github_annotations(CheckResult((outcome,) * 9, None, ("new",)))
    assert len(many) == 5 and "5 more checks" in many[-1]


def test_the_summary_stays_below_what_github_shows() -> None:
    assert github_summary("short\n") == "short\n"
    cut = github_summary("a line with an é in it\n" * 50_000)
    assert len(cut.encode()) < 201_000 and "left out" in cut


def test_text_says_what_failed_first_and_what_was_only_inconclusive() -> None:
    text = render_text(failing())
    assert text.startswith("failed (1 failed, 1 inconclusive, 2 passed)")
    assert re.search(r"FAIL +baseline/step_time_ns +expected 100 ms, found 115 ms", text)
    assert re.search(r"INCONCLUSIVE +budget/mfu +expected at least 40 %, found unknown", text)
    assert max(map(len, text.splitlines())) <= 100
    assert "only a warning" in render_text(failing(), warn_only=True)
    assert render_text(check([run_facts("a", 100)], budget={"step_time_ns": 1e9})).startswith(
        "passed (1 passed)"
    )


def test_junit_has_a_case_a_check() -> None:
    root = ElementTree.fromstring(render_junit(failing()))
    suite = root[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "1")
    failure = suite.find("testcase/failure")
    assert failure is not None and failure.text is not None
    assert [line.split(":")[0] for line in failure.text.splitlines()] == ["expected", "found", "all values"]
    strict = ElementTree.fromstring(render_junit(failing(), strict=True))[0]
    assert (strict.get("failures"), strict.get("skipped")) == ("2", "0")


@given(st.text())
def test_junit_stays_xml_whatever_the_reason(reason: str) -> None:
    suite = ElementTree.fromstring(not_comparable_junit(reason))[0]
    assert suite.get("errors") == "1" and suite.find("testcase/error") is not None


def test_json_and_markdown_say_the_same() -> None:
    document = json.loads(render_json(failing()))
    assert document["schema"] == "trine.check/1" and document["exit_code"] == 1
    assert document["checks"][0]["id"] == "baseline/step_time_ns" and document["checks"][0]["state"] == "fail"
    assert document["comparison"]["verdict"] == "regression"
    assert "| baseline/step_time_ns | FAIL | 100 ms | 115 ms |" in render_markdown(failing())


def test_what_is_wrong_with_the_data_is_told_without_a_comparison_too() -> None:
    killed = Flaw("killed", "warning", "the process ended without closing its record (rank 0)")
    result = check([run_facts("new", 100, flaws=(killed,))], budget={"step_time_ns": 200e6})
    said = "warning killed: new: the process ended without closing its record (rank 0)"
    assert render_text(result).endswith(f"Data quality\n  {said}\n")
    assert render_markdown(result).endswith(f"**Data quality**\n\n- {said}\n")
    assert json.loads(render_json(result))["data_quality"][0]["runs"] == ["new"]
    assert "Data quality" not in render_text(check([run_facts("new", 100)], budget={"step_time_ns": 200e6}))
