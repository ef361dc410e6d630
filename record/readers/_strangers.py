"""Names files of other tools that no reader reads, so that a refusal says what they are and what to do."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ..model import Quality

__all__ = ["name_of", "unread_files"]

_HEAD_BYTES = 1 << 16
#: Files of a folder that are looked at; what it holds is clear by then.
_MOST_FILES = 1000

#: What all must stand in the head → what the file is. First match wins.
_MARKS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    ((b"SQLite format 3\x00", b"rocpd_"), "a rocprofiler database (export a Chrome trace from it)"),
    ((b"SQLite format 3\x00",), "an SQLite database without the tables that Nsight Systems exports"),
    ((b"speedscope.app/file-format-schema",), "a speedscope profile of host stacks"),
)

#: The same by how a name ends, where the content has no mark.
_ENDINGS: tuple[tuple[str, str], ...] = (
    (".nsys-rep", "an Nsight Systems report (nsys export --type sqlite makes what can be read)"),
    (".qdrep", "an Nsight Systems report (nsys export --type sqlite makes what can be read)"),
    (".ncu-rep", "an Nsight Compute report of single kernels"),
    (".xplane.pb", "an XPlane profile of XProf"),
    (".pftrace", "a Perfetto trace"),
    (".perfetto-trace", "a Perfetto trace"),
)


def name_of(path: Path) -> str | None:
    """What a file is, in words (``a Perfetto trace``); of a folder, what its first known file is. Never raises."""
    try:
        if path.is_dir():
            inside = (each for each in sorted(path.rglob("*"))[:_MOST_FILES] if each.is_file())
            return next((name for each in inside if (name := _name_of_file(each))), None)
        return _name_of_file(path) if path.is_file() else None
    except OSError:
        return None


def unread_files(files: Sequence[Path], where: Path) -> list[Quality]:
    """A note for each known kind among files that no reader took: they are of the job, and not used."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in files[:_MOST_FILES]:
        name = name_of(path)
        if name is not None:
            found[name].append(path)
    notes = []
    for name, paths in found.items():
        count = f"{len(paths)} files" if len(paths) > 1 else paths[0].name
        notes.append(Quality("unread-format", "info", f"{count} in {where} left out: {name}"))
    return notes


def _name_of_file(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head[:2] == b"\x1f\x8b":
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
        except zlib.error:
            return None
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16 text (convert it to UTF-8)"
    if head[:2] == b"\x1f\x8b":
        return "a gzip file within a gzip file (unpack it once)"
    if head[:4] == b"PK\x03\x04":
        return "a zip archive (unpack it)"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle of something else than a memory snapshot or a flight recorder's dump"
    by_ending = next((name for ending, name in _ENDINGS if path.name.lower().endswith(ending)), None)
    return by_ending or next((name for marks, name in _MARKS if all(mark in head for mark in marks)), None)
