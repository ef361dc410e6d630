"""Check runs in CI: fail when they are slower or hungrier than a baseline, or break a budget.

    trine check runs/main-1 runs/main-2 runs/main-3 --write-baseline baseline.json
    trine check runs/new-1 runs/new-2 runs/new-3 --baseline baseline.json --budget budget.toml

A budget is a TOML file of absolute limits, for example `step_time_ns = 120_000_000`. With one run a
side only a budget can fail: runs differ by more than their steps do.

Exit codes: 0 passed (inconclusive checks are shown); 1 a regression or a broken budget, under --strict
an inconclusive check too; 2 bad usage, or an absent or unreadable input or baseline; 3 the runs cannot
be compared (too short, or another environment).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trine.commands._runs import (
    add_comparison_options,
    load_runs,
    refuse_overwriting,
    refuse_repeats,
    write_output,
)
from trine.record.errors import NotComparable, UnreadableInput, UsageError

if TYPE_CHECKING:
    from trine.analyzers.gate import CheckResult
    from trine.analyzers.run_facts import RunFacts

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "fail when runs are slower than a baseline or break a budget"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs to check: records or traces")
    parser.add_argument("--baseline", nargs="+", metavar="RUN|FILE", help="what to hold them against")
    parser.add_argument("--budget", type=Path, metavar="FILE", help="absolute limits, a TOML file")
    parser.add_argument(
        "--write-baseline", type=Path, metavar="FILE", help="write the runs as a baseline and stop"
    )
    parser.add_argument("--strict", action="store_true", help="an inconclusive check fails too")
    parser.add_argument("--warn-only", action="store_true", help="report, but never fail on a check")
    parser.add_argument("--format", choices=("text", "json", "md"), default="text")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML to FILE too")
    parser.add_argument(
        "--github",
        action="store_true",
        help="print GitHub annotations, and the step summary where $GITHUB_STEP_SUMMARY is not set;"
        " where it is set, both happen without this",
    )
    add_comparison_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check, report everywhere that was asked for, and return the exit code."""
    if arguments.write_baseline is not None:
        return _write_baseline(arguments)
    if not arguments.baseline and arguments.budget is None:
        raise UsageError(
            "nothing to check against; give --baseline, --budget or both, or --write-baseline to make a baseline"
        )
    _require_baseline(arguments)
    try:
        result = _check(arguments)
    except NotComparable as error:
        _report_not_comparable(arguments, str(error))
        if arguments.warn_only:
            print(f"trine: {error} (only a warning, as asked)", file=sys.stderr)
            return 0
        raise
    _report(arguments, result)
    return result.exit_code(strict=arguments.strict, warn_only=arguments.warn_only)


def _check(arguments: argparse.Namespace) -> CheckResult:
    from trine.analyzers.budget import read_budget
    from trine.analyzers.gate import check

    # The budget first: a wrong key should not cost the time to read the runs.
    budget = read_budget(arguments.budget) if arguments.budget is not None else None
    return check(
        load_runs(arguments.runs, arguments.steps),
        baseline=load_runs(arguments.baseline or (), arguments.steps),
        budget=budget,
        minimum_effect=arguments.effect,
        minimum_steps=arguments.min_steps,
        any_environment=arguments.any_environment,
    )


def _require_baseline(arguments: argparse.Namespace) -> None:
    for path in arguments.baseline or ():
        if not Path(path).exists() and not any(sign in path for sign in "*?["):
            raise UnreadableInput(
                f"there is no baseline {path}; write one from runs that are known to be good, not from those under test:"
                f" trine check GOOD_RUN … --write-baseline {path}"
            )
    refuse_repeats((arguments.runs, arguments.baseline or ()))
    for output in (arguments.output, arguments.junit):
        refuse_overwriting(output, (*arguments.runs, *(arguments.baseline or ()), arguments.budget or ""))


def _write_baseline(arguments: argparse.Namespace) -> int:
    from trine.analyzers.baseline import write_baseline
    from trine.analyzers.comparison import environment_differences
    from trine.analyzers.flaws import flaws_of_runs

    if arguments.baseline or arguments.budget is not None:
        raise UsageError(
            "--write-baseline stands alone; check against --baseline or --budget in another call"
        )
    refuse_repeats((arguments.runs,))
    refuse_overwriting(arguments.write_baseline, arguments.runs)
    runs: list[RunFacts] = load_runs(arguments.runs, arguments.steps)
    write_baseline(arguments.write_baseline, runs, _commit(), arguments.min_steps)
    steps = sum(len(facts.step_ns) for facts in runs)
    several = "s" if len(runs) > 1 else ""
    print(f"Wrote {arguments.write_baseline}: {len(runs)} run{several}, {steps} steady steps")
    if len(runs) < 3:
        print("Three or more runs are worth giving: with one, a later check can only be inconclusive.")
    for each in flaws_of_runs(runs):
        print(f"{each.flaw.severity} {each.words}")
    apart = environment_differences(runs, runs)
    if apart:
        said = "; ".join(f"{each.name} is {each.first}" for each in apart)
        print(
            f"They come from different environments ({said}): a check against them needs --any-environment; "
            "a baseline for each is better."
        )
    return 0


def _commit() -> str | None:
    """The commit that is checked out here, where this is a git repository."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


# --- reports -----------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace, result: CheckResult) -> None:
    from trine.analyzers.reports import gate as report

    how = {"strict": arguments.strict, "warn_only": arguments.warn_only}
    render = {"text": report.render_text, "json": report.render_json, "md": report.render_markdown}
    write_output(render[arguments.format](result, **how), arguments.output)
    if arguments.junit is not None:
        write_output(report.render_junit(result, strict=arguments.strict), arguments.junit)
    if _on_github(arguments):
        for line in report.github_annotations(result, **how):
            _annotate(arguments, line)
        _write_summary(arguments, report.github_summary(report.render_markdown(result, **how)))


def _report_not_comparable(arguments: argparse.Namespace, reason: str) -> None:
    from trine.analyzers.reports import gate as report

    if arguments.junit is not None:
        write_output(report.not_comparable_junit(reason), arguments.junit)
    if _on_github(arguments):
        level = "warning" if arguments.warn_only else "error"
        _annotate(arguments, report.annotation(level, "trine check: cannot compare", reason))
        _write_summary(arguments, f"### trine check: cannot compare\n\n{reason}\n")


def _on_github(arguments: argparse.Namespace) -> bool:
    return bool(arguments.github or os.environ.get("GITHUB_STEP_SUMMARY"))


def _annotate(arguments: argparse.Namespace, line: str) -> None:
    # GitHub reads workflow commands from both streams; a JSON document on the first must stay whole.
    json_here = arguments.format == "json" and arguments.output is None
    print(line, file=sys.stderr if json_here else sys.stdout)


def _write_summary(arguments: argparse.Namespace, text: str) -> None:
    """Append to GitHub's step summary; without one, print it. A summary never decides a check."""
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if not target:
        _annotate(arguments, text)
        return
    try:
        with Path(target).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        print(f"cannot write the step summary {target}: {error.strerror or error}", file=sys.stderr)
