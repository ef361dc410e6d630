"""Reads Trine's own records: a run's folder, one attempt of it, or one rank's folder, finished or still growing."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import UnreadableInput
from ..frames import SCHEMA, SCHEMA_VERSION, read_frames
from ..model import MISSING, PHASES, Array, DeviceInfo, Group, Job, Quality, Rank, RankSource, Strings, Table
from ..rollup import Content, live_files, merge_parts
from ._native_description import why_damaged

__all__ = ["FORMAT", "attempts_of", "open_job", "recognizes"]

FORMAT = "trine"

#: Of ``rank.json``, what becomes metadata beside the metadata itself.
_STATE = ("state", "attempt", "start", "started_ns", "ended_ns", "error")
_RANK_FOLDER = re.compile(r"rank-(\d{1,6})$")
_ATTEMPT_FOLDER = re.compile(r"attempt-(\d+)$")


def recognizes(path: Path) -> bool:
    """Whether ``path`` is a record: a folder with ``run.json`` of ours, with rank folders, or a rank folder itself."""
    if not path.is_dir():
        return False
    if (path / "rank.json").is_file() or _ranks_in(path) or attempts_of(path):
        return True
    return _is_ours(path / "run.json")


def attempts_of(run: Path) -> dict[int, Path]:
    """Attempts of a run that have any rank, ascending."""
    found = {1: run} if _ranks_in(run) else {}
    for folder in run.glob("attempt-*"):
        match = _ATTEMPT_FOLDER.search(folder.name)
        if match and _ranks_in(folder):
            found[int(match[1])] = folder
    return dict(sorted(found.items()))


def open_job(path: Path) -> Job:
    """The job of a record, of its latest attempt where there are several.

    A rank that cannot be read, such as one that a newer Trine wrote, is noted and left out; an attempt without any
    readable rank gives way to the one before. Raises ``UnreadableInput`` when no rank can be read at all.
    """
    quality: list[Quality] = []
    if (path / "rank.json").is_file():
        attempts = {1: path.parent}
        folders_of = {1: {_rank_of(path): path}}
    else:
        attempts = attempts_of(path)
        folders_of = {attempt: _ranks_in(folder) for attempt, folder in attempts.items()}
    if not attempts:
        raise UnreadableInput(f"{path} has no rank folder (rank-00000, …): nothing was recorded there yet")
    described: dict[int, dict[str, Any]] = {}
    for attempt in sorted(attempts, reverse=True):  # one that died before its first write tells nothing
        described = _descriptions(folders_of[attempt], quality)
        if described:
            break
    if not described:
        raise UnreadableInput(f"no rank of {path} can be read: {quality[-1].message}")
    folders = folders_of[attempt]
    if len(attempts) > 1:
        others = ", ".join(str(number) for number in attempts if number != attempt)
        message = f"this is attempt {attempt}; other attempts of this run: {others}"
        quality.append(Quality("other-attempts", "info", message))
    described = _of_one_start(described, quality)
    world_sizes = [about["world_size"] for about in described.values() if about.get("world_size")]
    return Job(
        path=path,
        format=FORMAT,
        sources=tuple(RankSource(rank, folders[rank], read) for rank in sorted(described)),
        world_size=max(world_sizes, default=None),
        metadata=_run_metadata(attempts[attempt]),
        quality=quality,
    )


def read(source: RankSource) -> Rank:
    """One rank with its deep windows. Raises ``UnreadableInput``."""
    folder = source.path
    rank, content = _read_steps(folder, source.rank)
    rank.collectives = _table(content, "collectives", rank.strings)
    rank.samples = _table(content, "samples", rank.strings)
    rank.microbatches = _table(content, "microbatches", rank.strings)
    rank.windows = _windows(folder, rank)
    rank.attempts = _earlier(folder, rank)
    return rank


def _read_steps(folder: Path, number: int) -> tuple[Rank, Content]:
    """A rank with its steps, regions and notes. Raises ``UnreadableInput``."""
    about = _description(folder)
    content, unreadable = _content(folder)
    strings = Strings(content.strings)
    rank = Rank(
        rank=number,
        source=str(folder),
        format=FORMAT,
        strings=strings,
        world_size=about.get("world_size"),
        host_name=about.get("host"),
        groups=tuple(
            Group(group["id"], group.get("name"), group.get("description"), tuple(group["ranks"]))
            for group in about.get("groups", ())
        ),
        devices=tuple(
            DeviceInfo(device["index"], device["name"], device.get("memory_bytes"))
            for device in about.get("devices", ())
        ),
        metadata={
            **about.get("metadata", {}),
            **{key: about.get(key) for key in _STATE},
        },
    )
    for path, error in unreadable:
        rank.note("unreadable-segment", "error", f"{path} cannot be read ({error}); its steps are missing")
    rank.steps = _steps(content, rank)
    rank.regions = _table(content, "regions", strings)
    _say_what_happened(rank, about, content)
    return rank, content


def _earlier(folder: Path, rank: Rank) -> tuple[Rank, ...]:
    """The same rank in the run's attempts before this one: what was lost between them is part of the run.

    Only for the lowest rank: one is enough, and reading each rank's whole past would double the work.
    """
    attempt = _ATTEMPT_FOLDER.search(folder.parent.name)
    if attempt is None or min(_ranks_in(folder.parent), default=-1) != rank.rank:
        return ()
    found = []
    for number, other in attempts_of(folder.parent.parent).items():
        path = _ranks_in(other).get(rank.rank)
        if number >= int(attempt[1]) or path is None:
            continue
        try:
            found.append(_read_steps(path, rank.rank)[0])
        except UnreadableInput as error:
            rank.note(
                "unreadable-attempt", "warning", f"attempt {number} cannot be read, goodput lacks it: {error}"
            )
    return tuple(found)


def _content(folder: Path) -> tuple[Content, list[tuple[Path, OSError]]]:
    """What the files of a growing record hold. A file may vanish between listing and reading: it was rolled up just now."""
    for _ in range(5):
        content = Content()
        unreadable: list[tuple[Path, OSError]] = []
        vanished = False
        rollups, segments = live_files(folder)
        for path in (*rollups, *segments):
            try:
                content.add(read_frames(path))
            except FileNotFoundError:
                vanished = True
                break
            except OSError as error:
                unreadable.append((path, error))
        if not vanished:
            return content, unreadable
    raise UnreadableInput(f"{folder} changes faster than it can be read; try again")


def _batches(parts: dict[str, Array]) -> Array:
    """Batches of each step: one that takes several before its update lies in as many parts.

    Where an engine's loader is inside the profiler's, a step ends as the next batch is asked for, and leaves an empty part.
    """
    first = np.flatnonzero(np.r_[True, np.diff(parts["index"]) != 0])
    full = parts["end_ns"] > parts["start_ns"]
    return np.maximum(np.add.reduceat(full.astype(np.int64), first), 1)


def _steps(content: Content, rank: Rank) -> Table | None:
    parts = content.table("parts")
    if parts is None:
        return None
    # Roll-ups keep slow steps of older stretches, so files need not be in order of time.
    order = np.argsort(parts["start_ns"], kind="stable")
    parts = {name: column[order] for name, column in parts.items()}
    steps, whole = merge_parts(parts)
    if whole.any():
        rank.metadata.setdefault("accumulation", int(np.median(_batches(parts)[whole])))
    # While training runs, the last one is no news.
    known = whole[:-1] if rank.metadata.get("state") == "running" else whole
    left = int((~known).sum())
    if left:
        which = ", ".join(str(index) for index in steps["index"][: len(known)][~known][:5].tolist())
        message = f"{left} unfinished steps are left out (their optimizer step never came): {which}"
        rank.note("unfinished-steps", "info", message)
    return Table("steps", steps, rank.strings).select(whole)


def _table(content: Content, name: str, strings: Strings) -> Table | None:
    columns = content.table(name)
    if columns is None:
        return None
    time = columns["time_ns"] if "time_ns" in columns else _first_time(columns)
    order = np.argsort(time, kind="stable")
    return Table(name, {key: column[order] for key, column in columns.items()}, strings)


def _first_time(columns: dict[str, Any]) -> Any:
    start = columns["start_ns"]
    issued = columns.get("issued_ns")
    return start if issued is None else np.where(issued != MISSING, issued, start)


def _say_what_happened(rank: Rank, about: dict[str, Any], content: Content) -> None:
    for note in about.get("notes", ()):
        rank.note(note["id"], note["severity"], note["message"])
    for what, count in about.get("overflow", {}).items():
        rank.note(
            "overflow",
            "warning",
            f"{count} {what} were not recorded: they came faster than they could be kept",
        )
    if content.histograms:
        steps = sum(histogram["steps"] for histogram in content.histograms)
        first = min(histogram["first"] for histogram in content.histograms)
        last = max(histogram["last"] for histogram in content.histograms)
        rank.metadata["rolled_up"] = {
            "steps": steps,
            "first": first,
            "last": last,
            "histograms": content.histograms,
            "collectives": content.collective_totals,
        }
        message = (
            f"steps {first} to {last} were rolled up into histograms to keep the record within its size; "
            "of these only the slowest are here in detail"
        )
        rank.note("rolled-up", "info", message)
    if content.damaged:
        rank.note("damaged", "warning", f"{content.damaged} damaged stretches of {rank.source} were skipped")
    if content.torn_bytes:
        message = f"the last {content.torn_bytes} bytes were cut off in the middle of a write and are ignored"
        if about.get("state") == "running":
            rank.note("torn-tail", "info", message)
        else:
            lost = "the run had closed its record, so steps at its end may be missing"
            rank.note("torn-tail", "warning", f"{message}; {lost}")
    if rank.steps is not None and len(rank.steps) and (rank.steps[f"phase_{PHASES[0]}_ns"] == MISSING).any():
        unknown = int((rank.steps[f"phase_{PHASES[0]}_ns"] == MISSING).sum())
        rank.note(
            "phases-unknown", "info", f"{unknown} steps have no phases: their device times never arrived"
        )
    if (
        str((rank.metadata.get("data_parallel") or {}).get("kind")).startswith("fsdp")
        and rank.metadata.get("exposed_communication") == "end of backward"
    ):
        message = (
            "on a device, waiting for collectives inside forward and backward (as FSDP does) is counted with those "
            "phases; a deep window shows it"
        )
        rank.note("exposure-partly-seen", "info", message)
    if about.get("state") == "failed":
        error = str(about.get("error") or "an error").splitlines()[0][:200]
        rank.note(
            "failed", "warning", f"the run ended early with {error}; the record holds its steps up to there"
        )
    if about.get("state") == "running" and _process_is_gone(about):
        rank.metadata["state"] = "killed"
        rank.note(
            "killed",
            "warning",
            "the process ended without closing its record; up to the last second is missing",
        )


def _process_is_gone(about: dict[str, Any]) -> bool:
    """True only when it can be known: same host, and no process of that number."""
    if about.get("host") != socket.gethostname() or not about.get("process"):
        return False
    try:
        os.kill(about["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _windows(folder: Path, rank: Rank) -> tuple[Rank, ...]:
    found = [*folder.glob("window-*.json"), *folder.glob("window-*.json.gz")]
    paths = sorted(path for path in found if path.is_file())
    if not paths:
        return ()
    from . import kineto

    windows = []
    for path in paths:
        try:
            windows.append(kineto.read_file(path))
        except (UnreadableInput, OSError) as error:
            rank.note("unreadable-window", "warning", f"deep window {path.name} cannot be read: {error}")
    return tuple(windows)


def _ranks_in(folder: Path) -> dict[int, Path]:
    found = {}
    for path in sorted(folder.glob("rank-*")):
        match = _RANK_FOLDER.search(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return found


def _rank_of(folder: Path) -> int:
    """Of a rank folder that stands alone, whatever it is called now."""
    return int(_description(folder).get("rank", 0))


def _descriptions(folders: dict[int, Path], quality: list[Quality]) -> dict[int, dict[str, Any]]:
    result = {}
    for rank, folder in folders.items():
        try:
            result[rank] = _description(folder)
        except UnreadableInput as error:
            quality.append(Quality("unreadable-rank", "error", str(error), rank))
            continue
        if result[rank].get("rank") != rank:
            message = f"{folder} calls itself rank {result[rank].get('rank')}: it was renamed, and is read as rank {rank}"
            quality.append(Quality("renamed-rank", "warning", message, rank))
    return result


def _description(folder: Path) -> dict[str, Any]:
    path = folder / "rank.json"
    try:
        about = msgspec.json.decode(_content_of(path))
    except OSError as error:
        raise UnreadableInput(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise UnreadableInput(f"{path} is not JSON ({error}); the rank cannot be read") from error
    if not isinstance(about, dict) or not str(about.get("schema", "")).startswith("trine.record/"):
        raise UnreadableInput(f"{path} is not a Trine record: its schema is not trine.record/N")
    _check_version(path, str(about["schema"]))
    damage = why_damaged(about)
    if damage is not None:
        raise UnreadableInput(f"{path} is damaged ({damage}); the rank cannot be read")
    return about


def _content_of(path: Path) -> bytes:
    """Bytes of a small file. Raises ``OSError`` where it is none: a pipe would be waited for, a device never ends."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_bytes()


def _check_version(path: Path, schema: str) -> None:
    version = schema.partition("/")[2]
    if not version.isdecimal():
        raise UnreadableInput(f"{path} has the schema {schema!r}, which is none of ours")
    if int(version) > SCHEMA_VERSION:
        raise UnreadableInput(
            f"{path} was written by a newer Trine ({schema}; this one reads up to {SCHEMA}): update Trine to read it"
        )


def _of_one_start(described: dict[int, dict[str, Any]], quality: list[Quality]) -> dict[int, dict[str, Any]]:
    """The ranks of one start: the newest, when folders of several starts were put together."""
    starts = {about.get("start") for about in described.values()}
    if len(starts) == 1:
        return described
    newest = max(described.values(), key=lambda about: about.get("started_ns") or 0).get("start")
    kept = {rank: about for rank, about in described.items() if about.get("start") == newest}
    left = sorted(set(described) - set(kept))
    message = f"ranks {left} are from another start of this run and are left out; open their folders alone to see them"
    quality.append(Quality("mixed-runs", "error", message))
    return kept


def _is_ours(path: Path) -> bool:
    try:
        content = msgspec.json.decode(_content_of(path))
    except (OSError, msgspec.DecodeError):
        return False
    return isinstance(content, dict) and str(content.get("schema", "")).startswith("trine.record/")


def _run_metadata(folder: Path) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(_content_of(folder / "run.json"))
    except (OSError, msgspec.DecodeError):
        return {}
    return content if isinstance(content, dict) else {}
