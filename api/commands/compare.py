"""Compare runs: is the first side slower than the second, how sure is that, and where does it come from?

    trine compare runs/new-1 runs/new-2 runs/new-3 --against runs/old-1 runs/old-2 runs/old-3

A change counts when the hierarchical bootstrap (runs, then steps) of the ratio of medians excludes 1
and the effect exceeds 5 % (--effect). Give several runs a side, taken in turn: with one a side the
interval is shown and nothing is concluded. A side may also be a baseline file that `trine check` wrote.

Traces of a few steps, or of none, get no verdict, yet what changed in them: kernels, collectives and operators
that appeared, vanished, became slower or faster, in order of effect.

    trine compare after.sqlite --against before.sqlite

Exit codes: 0 compared, whatever came out; 2 bad usage or unreadable input; 3 the runs cannot be
compared (too short, or from different environments).
"""

from __future__ import annotations

import argparse

from trine.commands._runs import (
    FORMAT_HELP,
    add_comparison_options,
    form_of,
    load_runs,
    refuse_overwriting,
    refuse_repeats,
    write_output,
)

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "compare runs, with statistics and causes"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("runs", nargs="+", metavar="A", help="runs of the first side: records or traces")
    parser.add_argument("--against", nargs="+", required=True, metavar="B", help="runs of the second side")
    parser.add_argument("--format", choices=("text", "json", "md", "html"), help=FORMAT_HELP)
    add_comparison_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; 0 whatever came out."""
    from trine.analyzers.comparison import compare
    from trine.analyzers.reports import comparison as report

    refuse_repeats((arguments.runs, arguments.against))
    refuse_overwriting(arguments.output, (*arguments.runs, *arguments.against))
    result = compare(
        load_runs(arguments.runs, arguments.steps),
        load_runs(arguments.against, arguments.steps),
        minimum_effect=arguments.effect,
        minimum_steps=arguments.min_steps,
        any_environment=arguments.any_environment,
    )
    render = {
        "text": report.render_text,
        "json": report.render_json,
        "md": report.render_markdown,
        "html": report.render_html,
    }
    write_output(render[form_of(arguments.format, arguments.output)](result), arguments.output)
    return 0
