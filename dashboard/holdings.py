"""What the files of a run are, in words, and why other files beside them are in no run."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from trine.record.readers._strangers import name_of

__all__ = ["FOREIGN", "Held", "about_skipped", "briefly", "in_words"]

#: Formats with how many files each has.
Held = Sequence[tuple[str, int]]

#: Format → briefly (one, several), in full (one, several).
_WORDS = {
    "kineto": ("trace", "traces", "trace", "traces"),
    "trine": ("record", "record", "native record", "native record"),
    "memory_snapshot": ("snapshot", "snapshots", "memory snapshot", "memory snapshots"),
    "memory_timeline": ("memory timeline", "memory timelines", "memory timeline", "memory timelines"),
    "flight_recorder": ("dump", "dumps", "flight recorder dump", "flight recorder dumps"),
    "pipeline_schedule": ("schedule", "schedules", "pipeline schedule", "pipeline schedules"),
    "nsight": ("Nsight export", "Nsight exports", "Nsight Systems export", "Nsight Systems exports"),
}

#: Names of files that people keep profiles in and no reader takes: a list that has them not says so.
FOREIGN = (".nsys-rep", ".qdrep", ".ncu-rep", ".xplane.pb", ".pftrace", ".perfetto-trace")
#: Files of a line on what was left out.
_MOST_NAMED = 6
#: Larger files are not read to see whether they are whole.
_READ_BYTES = 1 << 20


def briefly(held: Held) -> str:
    """``traces, dumps, snapshot``: for a column of a list."""
    return ", ".join(_word(format, count, 0) for format, count in held)


def in_words(held: Held) -> str:
    """``traces, flight recorder dumps, memory snapshot``; of several formats, of one job."""
    return ", ".join(_word(format, count, 2) for format, count in held) + (
        " of one job" if len(held) > 1 else ""
    )


def _word(format: str, count: int, at: int) -> str:
    plain = format.replace("_", " ")
    return _WORDS.get(format, (plain,) * 4)[at + (count > 1)]


def about_skipped(files: Sequence[Path], root: Path) -> str | None:
    """One line that names files that are in no run, and why; None where there are none."""
    if not files:
        return None
    named = []
    # What lies next to the runs first: deep folders hold what their tools keep there.
    for path in sorted(files, key=lambda path: (len(path.parts), path))[:_MOST_NAMED]:
        try:
            status = path.stat()
        except OSError:
            continue  # it was deleted since the walk
        shown = path.relative_to(root) if path.is_relative_to(root) else path
        named.append(f"{shown} ({_reason(str(path), status.st_mtime_ns, status.st_size)})")
    if not named:
        return None
    more = f" and {len(files) - _MOST_NAMED:,} more" if len(files) > _MOST_NAMED else ""
    return f"Not listed, since Trine reads no run in them: {', '.join(named)}{more}."


@lru_cache(maxsize=256)
def _reason(path: str, modified_ns: int, size: int) -> str:
    """Why a file is in no run. ``modified_ns`` is only there to ask again when the file has changed."""
    if not size:
        return "it is empty"
    stranger = name_of(Path(path))
    if stranger is not None:
        return stranger
    if not path.endswith((".json", ".json.gz")):
        return "no format that Trine reads"
    try:
        content = _content(Path(path))
    except (OSError, zlib.error) as error:
        return f"it cannot be read: {error}"
    if content.lstrip()[:1] not in (b"{", b"["):
        return "it is not JSON" if content.strip() else "it is empty"
    if len(content) <= _READ_BYTES:
        try:
            json.loads(content)
        except (ValueError, RecursionError):
            return "it is not valid JSON"
    return "JSON, and no trace"


def _content(path: Path) -> bytes:
    """At most one byte more than is looked at."""
    with path.open("rb") as stream:
        content = stream.read(_READ_BYTES + 1)
    if content[:2] == b"\x1f\x8b":
        return zlib.decompressobj(wbits=31).decompress(content, _READ_BYTES + 1)
    return content
