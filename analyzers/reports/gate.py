"""A check in words: text, Markdown, JSON, GitHub's step summary and annotations, and JUnit XML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from trine.analyzers.gate import CheckResult, Outcome
from trine.analyzers.reports.comparison import headline, quality_lines, value_text
from trine.analyzers.reports.comparison import render_markdown as comparison_markdown
from trine.analyzers.reports.comparison import render_text as comparison_text
from trine.analyzers.reports.comparison_json import comparison_to_dict, quality_to_list

__all__ = [
    "github_annotations",
    "github_summary",
    "not_comparable_junit",
    "render_json",
    "render_junit",
    "render_markdown",
    "render_text",
]

#: GitHub shows nothing of a summary above 1 MiB, and people nothing of one a fifth of that.
_MOST_SUMMARY_BYTES = 200_000

#: GitHub keeps ten annotations of a kind and step; half of them leave room for other tools.
_MOST_ANNOTATIONS = 5

_WORDS = {"pass": "PASS", "fail": "FAIL", "inconclusive": "INCONCLUSIVE"}


def render_text(result: CheckResult, *, strict: bool = False, warn_only: bool = False) -> str:
    """Plain text: the outcomes first, then the comparison that they come from."""
    lines = [_closing(result, strict, warn_only), ""]
    for outcome in result.outcomes:
        lines.append(f"  {_WORDS[outcome.state]:<12} {outcome.id:<36} {_expected_found(outcome)}")
        lines.append(f"  {'':<12} {outcome.reason}")
    if result.comparison is not None:
        return "\n".join([*lines, "", comparison_text(result.comparison)])
    flaws = [f"  {line}" for line in quality_lines(result.quality)]
    return "\n".join([*lines, *(["", "Data quality", *flaws] if flaws else []), ""])


def render_markdown(result: CheckResult, *, strict: bool = False, warn_only: bool = False) -> str:
    """Markdown for a pull request."""
    lines = [f"### trine check: {_closing(result, strict, warn_only)}", ""]
    lines += ["| check | state | expected | found | why |", "|---|---|---|---|---|"]
    for outcome in result.outcomes:
        expected, found = _expected(outcome), _found(outcome)
        lines.append(f"| {outcome.id} | {_WORDS[outcome.state]} | {expected} | {found} | {outcome.reason} |")
    if result.comparison is not None:
        return "\n".join([*lines, "", comparison_markdown(result.comparison)])
    flaws = [f"- {line}" for line in quality_lines(result.quality)]
    return "\n".join([*lines, *(["", "**Data quality**", "", *flaws] if flaws else []), ""])


def render_json(result: CheckResult, *, strict: bool = False, warn_only: bool = False) -> str:
    """JSON by the schema ``trine.check/1``; ``comparison`` is ``trine.comparison/1`` or null."""
    document = {
        "schema": "trine.check/1",
        "exit_code": result.exit_code(strict=strict, warn_only=warn_only),
        "runs": list(result.runs),
        "checks": [
            {
                "id": outcome.id,
                "metric": outcome.metric,
                "state": outcome.state,
                "expected": outcome.expected,
                "at_least": outcome.at_least,
                "found": outcome.found,
                "values": list(outcome.values),
                "reason": outcome.reason,
            }
            for outcome in result.outcomes
        ],
        "data_quality": quality_to_list(result.quality),
        "comparison": None if result.comparison is None else comparison_to_dict(result.comparison),
    }
    return json.dumps(document, indent=1, default=str) + "\n"


def github_summary(markdown: str) -> str:
    """``markdown``, cut so that GitHub still shows it, and then it says so."""
    data = markdown.encode()
    if len(data) <= _MOST_SUMMARY_BYTES:
        return markdown
    kept = data[:_MOST_SUMMARY_BYTES].decode(errors="ignore").rpartition("\n")[0]
    return f"{kept}\n\nThe rest is left out: the summary would have {len(data)} bytes.\n"


def github_annotations(result: CheckResult, *, strict: bool = False, warn_only: bool = False) -> list[str]:
    """Workflow commands, failures first, at most five: the last one counts those left out."""
    picked = sorted(
        (outcome for outcome in result.outcomes if outcome.state != "pass"),
        key=lambda outcome: outcome.state != "fail",
    )
    lines = []
    for outcome in picked:
        bad = outcome.state == "fail" or strict
        level = "error" if bad and not warn_only else "warning"
        lines.append(annotation(level, f"trine check: {outcome.id}", _sentence(result, outcome)))
    if len(lines) > _MOST_ANNOTATIONS:
        left = len(lines) - _MOST_ANNOTATIONS + 1
        more = annotation("warning", "trine check", f"{left} more checks did not pass; see the summary")
        lines = [*lines[: _MOST_ANNOTATIONS - 1], more]
    return lines


def annotation(level: str, title: str, message: str) -> str:
    """One workflow command, escaped as GitHub's runner reads it back (its ``command.ts``)."""
    text = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    title = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{level} title={title.replace(':', '%3A').replace(',', '%2C')}::{text}"


def render_junit(result: CheckResult, *, strict: bool = False) -> str:
    """JUnit XML, one test case a check. Inconclusive ones are skipped, failures under ``strict``."""
    failures = result.count("fail") + (result.count("inconclusive") if strict else 0)
    skipped = 0 if strict else result.count("inconclusive")
    suite = _suite(len(result.outcomes), failures=failures, skipped=skipped)
    for outcome in result.outcomes:
        case = _case(suite, outcome.id)
        if outcome.state == "pass":
            continue
        failed = outcome.state == "fail" or strict
        child = ElementTree.SubElement(case, "failure" if failed else "skipped")
        child.set("message", _printable(outcome.reason))
        values = [value_text(outcome.metric, value) for value in outcome.values]
        child.text = _printable(
            f"expected: {_expected(outcome)}\nfound: {_found(outcome)}\nall values: {', '.join(values) or 'none'}"
        )
    return _xml(suite)


def not_comparable_junit(reason: str) -> str:
    """JUnit XML of a check that could not be made: one test case with an error."""
    suite = _suite(1, errors=1)
    child = ElementTree.SubElement(_case(suite, "comparable"), "error")
    child.set("message", _printable(reason))
    return _xml(suite)


# --- words -------------------------------------------------------------------------------------


def _closing(result: CheckResult, strict: bool, warn_only: bool) -> str:
    counts = ", ".join(_counts(result))
    if result.exit_code(strict=strict):
        return f"failed ({counts})" + ("; only a warning, as asked" if warn_only else "")
    return f"passed ({counts})"


def _counts(result: CheckResult) -> Iterator[str]:
    for state, word in (("fail", "failed"), ("inconclusive", "inconclusive"), ("pass", "passed")):
        number = result.count(state)  # type: ignore[arg-type]
        if number:
            yield f"{number} {word}"


def _expected(outcome: Outcome) -> str:
    value = value_text(outcome.metric, outcome.expected)
    if not outcome.id.startswith("budget/"):
        return value
    return f"{'at least' if outcome.at_least else 'at most'} {value}"


def _found(outcome: Outcome) -> str:
    return "unknown" if outcome.found is None else value_text(outcome.metric, outcome.found)


def _expected_found(outcome: Outcome) -> str:
    return f"expected {_expected(outcome)}, found {_found(outcome)}"


def _sentence(result: CheckResult, outcome: Outcome) -> str:
    text = f"{_expected_found(outcome)}: {outcome.reason}"
    if outcome.id == "baseline/step_time_ns" and result.comparison is not None:
        text += "\n" + "\n".join(headline(result.comparison))
    return text


# --- XML ---------------------------------------------------------------------------------------


def _suite(tests: int, failures: int = 0, errors: int = 0, skipped: int = 0) -> ElementTree.Element:
    counts = {"tests": tests, "failures": failures, "errors": errors, "skipped": skipped}
    attributes = {"name": "trine check", **{name: str(number) for name, number in counts.items()}}
    return ElementTree.Element("testsuite", attributes)


def _case(suite: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname="trine.check", name=name, time="0")


def _xml(suite: ElementTree.Element) -> str:
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _printable(text: str) -> str:
    """Without the characters that XML 1.0 forbids even when escaped."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
