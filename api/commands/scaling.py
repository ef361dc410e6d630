"""Efficiency over device counts, and which part of the step grows with them.

    trine scaling runs/on-1 runs/on-2 runs/on-4 runs/on-8

Runs are records or traces of one training on different numbers of devices; several of one number are repeats.
Efficiency is the throughput on n devices over n times that of one (of the fewest, where none is on one).
Throughput is in tokens or samples where the runs say them, else in steps. Whether each device kept its batch
(weak scaling) or the batch was shared out (strong) is read off the runs; --mode says it where they do not.

Exit codes: 0 compared, whatever came out; 2 bad usage or unreadable input; 3 the runs cannot be compared
(all on one number of devices, different models or devices, no steps).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ._runs import (
    FORMAT_HELP,
    form_of,
    load_runs,
    refuse_overwriting,
    refuse_repeats,
    terminal_style,
    write_output,
)

if TYPE_CHECKING:
    from trine.analyzers.scaling import ScalingResult

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "efficiency over device counts, and what grows with them"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trine scaling``."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="records or traces on different numbers of devices"
    )
    parser.add_argument("--format", choices=("text", "json", "md", "html"), help=FORMAT_HELP)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the report to FILE")
    parser.add_argument(
        "--steps",
        default="complete",
        metavar="STEPS",
        help="which steps of each run: complete (default), all, or 3:8 (the end excluded)",
    )
    parser.add_argument(
        "--mode",
        choices=("weak", "strong"),
        help="whether each device keeps its batch (weak) or the batch is shared out (strong), where runs do not say",
    )
    parser.add_argument(
        "--any-environment",
        action="store_true",
        help="compare although the kinds of device differ, and say how",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; 0 whatever came out."""
    from trine.analyzers.scaling import scale

    refuse_repeats((arguments.runs,))
    refuse_overwriting(arguments.output, arguments.runs)
    result = scale(
        load_runs(arguments.runs, arguments.steps),
        mode=arguments.mode,
        any_environment=arguments.any_environment,
    )
    write_output(
        _render(result, form_of(arguments.format, arguments.output), arguments.output), arguments.output
    )
    return 0


def _render(result: ScalingResult, form: str, output: Path | None) -> str:
    from trine.analyzers.reports import scaling as report

    if form == "json":
        return report.render_json(result)
    if form == "md":
        return report.render_markdown(result)
    if form == "html":
        return report.render_html(result)
    colour, width = terminal_style(output)
    return report.render_text(result, colour=colour, width=width)
