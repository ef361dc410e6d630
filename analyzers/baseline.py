"""The baseline file: runs to hold a later one against, small enough to lie in the repository.

    {"schema": "trine.baseline/1", "written": "2026-01-31T12:00:00Z", "commit": "4f2a…",
     "configuration_hash": "9b1c…", "environment": {…},
     "runs": [{"source", "step_ns": [..], "warm_up", "environment": {..}, "configuration": {..},
               "metrics": {..}, "missing": {..}, "parts": [..]}]}

It holds the raw step times: a comparison resamples them, which no median allows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from trine.analyzers.run_facts import RunFacts, lighter
from trine.record.errors import NotComparable, UnreadableInput, UsageError

__all__ = ["SCHEMA", "Baseline", "is_baseline", "other_json", "read_baseline", "write_baseline"]

SCHEMA = "trine.baseline/1"

#: A larger file is no baseline that somebody wrote otherwise: step times of years would fit.
_MOST_JSON_BYTES = 64 << 20

#: Kernels and operators that a baseline keeps: it lies in a repository.
MOST_NAMES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a baseline file holds. ``commit``, ``configuration_hash`` and ``environment`` are those of
    the first run, at the top for people who read a diff of the file."""

    schema: str
    written: str
    commit: str | None = None
    configuration_hash: str | None = None
    environment: Mapping[str, str | int | None] = field(default_factory=dict)
    runs: tuple[RunFacts, ...]


def is_baseline(path: Path) -> bool:
    """Whether ``path`` is a file that calls itself a baseline. Reads its first 4 KiB at most."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"trine.baseline/' in file.read(4096)


def other_json(path: Path) -> str | None:
    """What a JSON file that holds neither runs nor a trace is, in words; None of a file that is no whole JSON document,
    or too large for one that was meant as a baseline."""
    if not path.is_file() or path.stat().st_size > _MOST_JSON_BYTES:
        return None
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    schema = document.get("schema") if isinstance(document, dict) else None
    return f"a document of the schema {schema[:40]!r}" if isinstance(schema, str) else "other JSON"


def read_baseline(path: Path) -> Baseline:
    """Read a baseline file. Raises ``UnreadableInput`` when it is absent, damaged or newer than we are."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableInput(f"cannot read the baseline {path}: {error.strerror or error}") from None
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema != SCHEMA:
            raise UnreadableInput(
                f"{path} has the schema {schema!r}, this version reads {SCHEMA!r};"
                " upgrade Trine or write the baseline anew with --write-baseline"
            )
        baseline = msgspec.json.decode(data, type=Baseline)
    except msgspec.MsgspecError as error:
        raise UnreadableInput(
            f"{path} is no baseline: {error}; write one with: trine check GOOD_RUN … --write-baseline {path}"
        ) from None
    if not baseline.runs:
        raise UnreadableInput(f"the baseline {path} holds no runs; write it anew with --write-baseline")
    return baseline


def write_baseline(
    path: Path, runs: Sequence[RunFacts], commit: str | None = None, minimum_steps: int = 1
) -> None:
    """Write ``runs`` as a baseline, in one piece: a reader never sees half a file.

    ``commit`` stands in where the runs do not say theirs. Raises ``NotComparable`` when a run has too
    few steady steps to be compared with later, ``UsageError`` when the file cannot be written.
    """
    for run in runs:
        if len(run.step_ns) < minimum_steps:
            raise NotComparable(
                f"{run.source} has {len(run.step_ns)} steady steps, too few for a baseline"
                f" (at least {minimum_steps} are needed); record more steps"
            )
    baseline = Baseline(
        schema=SCHEMA,
        written=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        runs=tuple(lighter(run, MOST_NAMES) for run in runs),
        commit=runs[0].commit or commit,
        configuration_hash=runs[0].configuration_hash,
        environment=runs[0].environment,
    )
    text = msgspec.json.format(msgspec.json.encode(baseline, enc_hook=str), indent=1)
    # A list of step times on one line: a thousand lines of one number each help nobody who reads a diff.
    text = re.sub(rb"\[[\d.,\s]+\]", lambda found: re.sub(rb"\s+", b"", found[0]), text)
    if path.is_dir():
        raise UsageError(f"cannot write the baseline {path}: it is a folder; name a file in it")
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_bytes(text + b"\n")
        half.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write the baseline {path}: {error.strerror or error}") from None
    finally:
        half.unlink(missing_ok=True)


class _Header(msgspec.Struct):
    schema: str
