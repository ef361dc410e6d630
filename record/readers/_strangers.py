"""Names files of other tools that no reader reads, so that a refusal says what they are and what to do."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from ..model import Quality

__all__ = ["name_of", "unread_files"]

_HEAD_BYTES = 1 << 16
#: Files of a folder that are looked at; what it holds is clear by then.
_MOST_FILES = 1000

#: Files that no reader takes and that are named in a note; the rest are counted.
_MOST_NAMED = 5

#: What people keep beside traces and nobody expects to be read: code, settings, logs, words, pictures, pages.
_COMPANIONS = (
    *(
        ".md",
        ".rst",
        ".log",
        ".out",
        ".err",
        ".py",
        ".ipynb",
        ".sh",
        ".toml",
        ".yaml",
        ".yml",
        ".cfg",
        ".ini",
    ),
    *(".html", ".pdf", ".png", ".jpg", ".jpeg", ".svg", ".gif"),
)
_COMPANION_NAMES = ("readme", "license", "makefile")

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


def unread_files(files: Sequence[Path], where: Path, given: Collection[Path] = ()) -> list[Quality]:
    """A note for each known kind among files that no reader took, and one for those of no known kind.

    Files that people keep beside traces (:data:`_COMPANIONS`) are not told unless they are among ``given``.
    """
    found: dict[str, list[Path]] = defaultdict(list)
    unknown: list[Path] = []
    for number, path in enumerate(files):
        name = name_of(path) if number < _MOST_FILES else None
        if name is not None:
            found[name].append(path)
        elif path in given or not _is_companion(path):
            unknown.append(path)
    notes = []
    if unknown:
        notes.append(Quality("unread-files", "info", _unknown_words(unknown, where)))
    for name, paths in found.items():
        count = f"{len(paths)} files" if len(paths) > 1 else paths[0].name
        notes.append(Quality("unread-format", "info", f"{count} in {where} left out: {name}"))
    return notes


def _is_companion(path: Path) -> bool:
    name = path.name.lower()
    return name.startswith(_COMPANION_NAMES) or name.endswith(_COMPANIONS)


def _unknown_words(files: Sequence[Path], where: Path) -> str:
    """``6 files in DIR are in no format that is read: a.txt, b.csv, c.bin, d, e.dat and 1 more``."""
    names = [
        str(path.relative_to(where)) if path.is_relative_to(where) and path != where else str(path)
        for path in files
    ]
    shown = ", ".join(names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    if len(names) == 1:
        return f"{shown} in {where} is in no format that is read, and was left out"
    return f"{len(names)} files in {where} are in no format that is read, and were left out: {shown}{more}"


def _zipped(path: Path, head: bytes) -> str | None:
    if path.name.lower().endswith(".zip"):
        return None  # it was looked into, and what is wrong with it is said there
    if b"data.pkl" in head:
        return "what torch.save wrote (save a memory snapshot with torch.cuda.memory._dump_snapshot or pickle.dump)"
    return "a zip archive without that ending (call it .zip, or unpack it)"


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
        return _zipped(path, head)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle of something else than a memory snapshot or a flight recorder's dump"
    by_ending = next((name for ending, name in _ENDINGS if path.name.lower().endswith(ending)), None)
    return by_ending or next((name for marks, name in _MARKS if all(mark in head for mark in marks)), None)
