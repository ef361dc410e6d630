"""Explain one job: what holds it back, what to do about it, and what that would gain.

    trine analyze runs/a
    trine analyze traces/ --format html -o report.html
    trine analyze rank0.json.gz rank1.json.gz --steps all --format json

PATH is a record, a trace, a memory snapshot, a flight recorder dump, an Nsight export (.sqlite), pipeline
timings, a folder of such, a glob, a .tar.gz or a URL (s3://…); several PATHs, of several kinds, are one job.
Text goes to a terminal in colour (NO_COLOR turns that off), 100 columns wide at most.

Exit codes: 0 analysed, whatever came out; 2 bad usage or unreadable input. Never 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trine.record.errors import UnreadableInput, UsageError

from ._runs import form_of, json_text, progress_wanted, refuse_overwriting, terminal_style, write_output

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis
    from trine.record import Job

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "explain one job: what holds it back and what to do"

FORMATS = ("text", "json", "md", "html")
CONVENTIONS = ("counted", "palm", "megatron", "narayanan", "6n")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trine analyze``."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a record, traces, snapshots, dumps or a folder or URL of them; several make one job",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="text (default), json (the versioned contract), md, or html (one self-contained file); "
        "with -o the file's ending decides where this is not given",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write to FILE instead of standard output"
    )
    parser.add_argument(
        "--steps",
        default="complete",
        metavar="STEPS",
        help="complete (default: without a foreign trace's last step), all, or 3:8 (the end excluded)",
    )
    parser.add_argument(
        "--convention",
        choices=CONVENTIONS,
        help="how MFU counts model FLOPs; without it MFU is a range over those that are known",
    )
    parser.add_argument("--lang", default="en", metavar="LANG", help="language of the report (default: en)")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that read ranks (default: as many as pay, at most one a processor)",
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="let the workers of this Dask scheduler read the ranks (tcp://HOST:PORT, or its scheduler file)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Analyse, render, write. Returns 0; faults in the run are the answer, not an error."""
    from trine.analyzers import analyze
    from trine.analyzers.reports.wording import words

    words(arguments.lang)  # before the work: a wrong language should not cost a minute
    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(f"--workers must be at least 1, not {arguments.workers}")
    if arguments.workers is not None and arguments.scheduler is not None:
        raise UsageError("--workers are processes here and --scheduler has its own; give one of them")
    form = form_of(arguments.format, arguments.output)
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise UsageError(
            f"cannot write {arguments.output}: there is no folder {arguments.output.parent}; create it first"
        )
    paths = arguments.paths
    refuse_overwriting(arguments.output, paths)
    job = _load(paths)
    refuse_overwriting(arguments.output, (source.path for source in job.sources))
    analysis = analyze(
        job,
        steps=arguments.steps,
        workers=arguments.workers,
        progress=progress_wanted(),
        convention=arguments.convention,
        scheduler=arguments.scheduler,
    )
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot print a bar gets a question mark, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    write_output(_render(analysis, form, arguments), arguments.output)
    return 0


def _load(paths: list[str]) -> Job:
    """The job at ``paths``; a baseline given instead of a run is said to be one."""
    from trine.analyzers.baseline import is_baseline
    from trine.record import load

    try:
        return load(paths[0] if len(paths) == 1 else paths)
    except UnreadableInput:
        mistaken = next((path for path in paths if is_baseline(Path(path))), None)
        if mistaken is None:
            raise
        raise UnreadableInput(
            f"{mistaken} is a baseline, which runs are held against; do that with: trine compare RUN … --against {mistaken}"
        ) from None


def _render(analysis: Analysis, form: str, arguments: argparse.Namespace) -> str:
    """Each form imports what it needs alone: the figures of a page take longer to load than a small trace to read."""
    if form == "json":
        from trine.analyzers import to_json

        return json_text(to_json(analysis))
    if form == "md":
        from trine.analyzers.reports import markdown

        return markdown.render(analysis, language=arguments.lang)
    if form == "html":
        from trine.analyzers.reports import html

        return html.render(analysis, language=arguments.lang)
    from trine.analyzers.reports import text

    colour, width = terminal_style(arguments.output, text.WIDTH)
    return text.render(analysis, colour=colour, width=width, language=arguments.lang)
