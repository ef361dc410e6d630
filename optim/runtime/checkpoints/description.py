"""``trine.json``: what a checkpoint is, and the checksums of all its files; and folders of checkpoints, the newest first."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trine.optim.runtime.checkpoints.integrity import Damaged, flush_folder
from trine.record.errors import UnreadableInput

__all__ = [
    "COMMON",
    "DESCRIPTION",
    "SCHEMA",
    "described",
    "forget_old",
    "is_whole",
    "name_of",
    "own_file",
    "partial_of",
    "previous_of",
    "require_files",
    "series",
    "standing",
    "write_description",
]

logger = logging.getLogger("trine")

SCHEMA = "trine.checkpoint/2"
#: The first had no checksums, and what is common to all ranks in each rank's file.
_READ = ("trine.checkpoint/1", SCHEMA)

DESCRIPTION = "trine.json"
COMMON = "common.pt"

_STEP = re.compile(r"step-(\d+)")


def name_of(step: int) -> str:
    """``step-000100``: what a checkpoint of a series is called."""
    return f"step-{step:06}"


def own_file(rank: int) -> str:
    """``rank-00003.pt``."""
    return f"rank-{rank:05}.pt"


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return folder.with_name(folder.name + ".partial")


def previous_of(folder: Path) -> Path:
    """Where the one before is while it is being replaced."""
    return folder.with_name(folder.name + ".previous")


# --- one ---------------------------------------------------------------------------------------


def write_description(folder: Path, values: Mapping[str, Any]) -> None:
    """Written last: with it a checkpoint is whole. It sums itself, too."""
    found = {"schema": SCHEMA, **values}
    found["checksum"] = _sum_of(found)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    with (folder / DESCRIPTION).open("w", encoding="utf-8") as file:
        file.write("{" + ",\n ".join(lines) + "}\n")
        file.flush()
        os.fsync(file.fileno())
    flush_folder(folder)


def _sum_of(values: Mapping[str, Any]) -> int:
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def described(folder: Path) -> dict[str, Any]:
    """Raises :class:`Damaged` where there is none or it was changed, ``UnreadableInput`` for another version's."""
    found = _read(folder)
    if found is None or not str(found.get("schema", "")).startswith("trine.checkpoint/"):
        raise Damaged(f"{folder} holds no checkpoint that engine.save wrote{_hint(folder)}")
    if found["schema"] not in _READ:
        raise UnreadableInput(
            f"{folder} is a checkpoint of {found['schema']!r}, and this version reads {' and '.join(_READ)}"
        )
    if found["schema"] == SCHEMA and found.get("checksum") != _sum_of(found):
        raise Damaged(
            f"the checkpoint is damaged: {folder / DESCRIPTION} is not what was written, by its checksum"
        )
    for name in ("step", "ranks"):
        if not isinstance(found.get(name), int):
            raise Damaged(f"the checkpoint is damaged: {folder / DESCRIPTION} has no number under {name}")
    return found


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _hint(folder: Path) -> str:
    if (folder / DESCRIPTION).exists():
        return f": its {DESCRIPTION} cannot be read"
    if partial_of(folder).exists():
        return ": a save was interrupted before it was whole"
    steps = series(folder)
    if steps:
        return f", but several, {steps[0].name} the newest: engine.load(folder, newest=True) takes it"
    return ""


def require_files(folder: Path, found: Mapping[str, Any]) -> None:
    """Raise :class:`Damaged` where a file is missing or of another size. Their contents are verified when they are read."""
    for name, file in (found.get("files") or {}).items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise Damaged(
                f"the checkpoint is damaged: {folder / name} cannot be read: {error.strerror}"
            ) from error
        if size != file["bytes"]:
            raise Damaged(
                f"the checkpoint is damaged: {folder / name} ends after {size} of {file['bytes']} bytes"
            )


def is_whole(folder: Path) -> bool:
    """Whether it has its description and all files in their sizes."""
    try:
        require_files(folder, described(folder))
    except UnreadableInput:
        return False
    return True


def standing(folder: Path) -> Path:
    """The folder, or the one before where a kill between two names has left only that, which is said."""
    before = previous_of(folder)
    if (folder / DESCRIPTION).exists() or not (before / DESCRIPTION).exists():
        return folder
    logger.warning(
        "%s was being replaced when the run was killed: the one before is whole, in %s", folder, before
    )
    return before


# --- several -----------------------------------------------------------------------------------


def series(parent: Path) -> list[Path]:
    """``step-…`` folders with a description in them, the newest first; where one was being replaced, the one before."""
    found: dict[int, Path] = {}
    try:
        entries = list(parent.iterdir())
    except OSError:
        return []
    for each in entries:
        name = each.name.removesuffix(".previous")
        match = _STEP.fullmatch(name)
        if match and (each / DESCRIPTION).exists() and (name == each.name or int(match[1]) not in found):
            found[int(match[1])] = each
    return [found[step] for step in sorted(found, reverse=True)]


def forget_old(folder: Path, keep: int) -> None:
    """Of ``folder``, which is whole, and its siblings of earlier steps, leave the ``keep`` newest.

    A description goes first, so that one that is half deleted is none. What cannot be deleted is told, and stays.
    """
    siblings = series(folder.parent)
    place = siblings.index(folder)
    if place:
        logger.warning("%s is of a later step than %s, and the newest still", siblings[0], folder.name)
    for each in siblings[place + keep :]:
        try:
            (each / DESCRIPTION).unlink()
            shutil.rmtree(each)
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be deleted: %s", each, error.strerror)
