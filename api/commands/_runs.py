"""What `compare` and `check` share: runs from paths, and their common options."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trine.record.errors import UnreadableInput, UsageError

if TYPE_CHECKING:
    from trine.analyzers.run_facts import RunFacts
    from trine.record import Job

__all__ = [
    "FORMAT_HELP",
    "add_comparison_options",
    "form_of",
    "json_text",
    "load_runs",
    "progress_wanted",
    "refuse_overwriting",
    "refuse_repeats",
    "terminal_style",
    "write_output",
]


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """Options about what counts as a change and what may be compared."""
    parser.add_argument(
        "--steps",
        default="complete",
        metavar="STEPS",
        help="which steps of each run: complete (default), all, or 3:8 (the end excluded)",
    )
    parser.add_argument(
        "--effect",
        type=_share,
        default=0.05,
        metavar="SHARE",
        help="a change below this share is none (default: 0.05)",
    )
    parser.add_argument(
        "--min-steps",
        type=_positive,
        default=6,
        metavar="N",
        help="steady steps that a run must have (default: 6)",
    )
    parser.add_argument(
        "--any-environment",
        action="store_true",
        help="compare although devices, versions or world sizes differ, and say how",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the report to FILE")


#: What a file's ending says when ``--format`` does not.
_ENDINGS = {".json": "json", ".md": "md", ".markdown": "md", ".html": "html", ".htm": "html", ".txt": "text"}
FORMAT_HELP = (
    "text (default), json, md, or html (one self-contained file); with -o the file's ending decides where this"
    " is not given"
)


def form_of(given: str | None, output: Path | None) -> str:
    """The form of a report: what was asked for, else what the output's ending says, else text.

    Raises ``UsageError`` at an ending that names no form: text in a file called report.pdf helps nobody.
    """
    if given is not None:
        return given
    ending = "" if output is None else output.suffix.lower()
    if ending and ending not in _ENDINGS:
        known = ", ".join(_ENDINGS)
        raise UsageError(
            f"no form of a report ends in {ending} ({output}); end the name in one of {known}, or give --format"
        )
    return _ENDINGS[ending] if ending else "text"


def load_runs(paths: Iterable[str], steps: str) -> list[RunFacts]:
    """Facts of each path, one run each; a baseline file gives all the runs that it holds.

    Raises ``UnreadableInput`` or ``UsageError`` as :func:`trine.load` and the baseline reader do.
    """
    from trine.analyzers.baseline import is_baseline, read_baseline

    runs: list[RunFacts] = []
    for path in paths:
        if is_baseline(Path(path)):
            runs += read_baseline(Path(path)).runs
        else:
            runs.append(_measure(path, steps))
    return runs


def _measure(path: str, steps: str) -> RunFacts:
    from trine.analyzers import analyze
    from trine.analyzers.run_facts import measure_run

    return measure_run(analyze(_load(path), steps=steps, progress=progress_wanted()))


def _load(path: str) -> Job:
    """The job at ``path``; of JSON that is none, the error says that it is no baseline either."""
    from trine.analyzers.baseline import other_json
    from trine.record import load

    try:
        return load(path)
    except UnreadableInput:
        what = other_json(Path(path))
        if what is None:
            raise
        raise UnreadableInput(
            f"{path} is {what}, neither a baseline nor a trace; write a baseline with: trine check GOOD_RUN …"
            " --write-baseline FILE"
        ) from None


def progress_wanted() -> bool:
    """Whether somebody watches: a progress bar in a log file is noise."""
    return sys.stderr.isatty()


def json_text(content: object) -> str:
    """``content`` as strict JSON: no NaN, no lone surrogates, and ASCII alone where standard output takes no more."""
    utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") in ("utf8", "utf8sig")
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    text = text.encode(errors="replace").decode()
    # Outside its strings JSON is ASCII, so each other character stands in one, where an escape says the same.
    return (text if utf8 else _ESCAPED.sub(_escape, text)) + "\n"


_ESCAPED = re.compile(r"[^\x00-\x7f]")


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def write_output(text: str, output: Path | None) -> None:
    """Print ``text``, or write it to ``output`` and say so. Raises ``UsageError`` when that fails."""
    if output is None:
        sys.stdout.write(text)
        return
    # Names that are not UTF-8 come as lone surrogates, which no file can hold.
    content = text.encode("utf-8", errors="replace")
    try:
        if output.exists() and not output.is_file():  # a pipe or a device has no half-written state
            output.write_bytes(content)
        else:
            _replace(output, content)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from None
    print(f"Wrote {output}", file=sys.stderr)


def _replace(output: Path, content: bytes) -> None:
    """The whole file or none of it: a full disk leaves an older report as it was."""
    target = output.resolve()  # through a link, so that the link stays one
    half = target.with_name(f".{target.name[:200]}.{os.getpid()}")
    try:
        half.write_bytes(content)
        if target.exists():
            half.chmod(target.stat().st_mode)
        half.replace(target)
    except OSError:
        half.unlink(missing_ok=True)
        raise


def terminal_style(output: Path | None, columns: int = 100) -> tuple[bool, int]:
    """Whether a text report is in colour, and its columns: those of the terminal that it goes to, else ``columns`` and no colour.

    https://no-color.org: any value turns colours off; so does a terminal that says it has none.
    """
    if output is not None or not sys.stdout.isatty():
        return False, columns
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return colour, shutil.get_terminal_size((columns, 24)).columns


def refuse_overwriting(output: Path | None, inputs: Iterable[str | Path]) -> None:
    """Raises ``UsageError`` when a report would replace what it is made of."""
    if output is None or not output.exists():
        return
    for path in map(Path, inputs):
        if path.exists() and path.samefile(output) and not path.is_dir():
            raise UsageError(f"{output} is what is read, and a report would replace it; name another file")


def refuse_repeats(sides: Sequence[Sequence[str]]) -> None:
    """Raises ``UsageError`` when one run stands twice: it would count as several, and prove nothing."""
    seen: set[Path] = set()
    for path in (Path(path).resolve() for side in sides for path in side):
        if path in seen:
            raise UsageError(f"{path} is given twice; a run counts once")
        seen.add(path)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, not {text}; 0.05 is 5 %")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value
