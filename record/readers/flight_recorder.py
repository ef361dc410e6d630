"""Dumps of PyTorch's flight recorder: what each rank had enqueued when the job stopped.

    job = open_job(Path("comm_lib_trace_rank_0"))

Pickle (with stacks) and JSON (without), NCCL and gloo, versions 1 to 2.10. Fills the table
``flight_recorder`` and the groups; ``metadata["flight_status"]`` is group → last enqueued, started and
completed sequence. Written from what torch/csrc/distributed/c10d/FlightRecorder.hpp of 2.0 to 2.13 writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UnreadableInput
from ..model import Group, Job, Quality, Rank, RankSource, Strings
from ._flight_dumps import head_of, is_dump, is_pickle, ranks_of_text, read_dump, whole_number
from ._flight_entries import entries_table, group_of, record_of
from ._names import natural, rank_of_name, short_names

__all__ = ["FORMAT", "open_job", "open_paths", "read_source", "recognizes"]

FORMAT = "flight_recorder"

#: The newest version this was checked against.
_KNOWN_VERSION = (2, 10)

#: Files looked into for the size of the world: not every rank's dump names the default group's ranks.
_MOST_LOOKED_INTO = 8
_MOST_BYTES_LOOKED_INTO = 4 << 20

#: What PyTorch calls its dumps.
_NAME = re.compile(r".*(?:comm_lib|nccl)_trace_rank_\d+")

_STATUS = {
    "last_enqueued": "last_enqueued_collective",
    "last_started": "last_started_collective",
    "last_completed": "last_completed_collective",
}
_DEFAULT_GROUPS = ("0", "")


def recognizes(path: Path) -> bool:
    """Whether a file is a dump, by its first bytes. An empty one of a dump's name is what a rank leaves that was
    killed before it could write: that rank is to be missed aloud."""
    try:
        if not path.is_file():
            return False
        head = head_of(path)
        return is_dump(head) or (not head and path.stat().st_size == 0 and bool(_NAME.fullmatch(path.name)))
    except OSError:
        return False


def open_job(path: Path) -> Job:
    """The job of one dump."""
    return open_paths([path], path)


def open_paths(paths: Sequence[Path], origin: Path) -> Job:
    """The ranks that several dumps make; of a rank with several, the one that says most. Raises
    ``UnreadableInput`` where there is none."""
    if not paths:
        raise UnreadableInput(f"{origin} holds no flight recorder dump")
    notes: list[Quality] = []
    paths = _of_one_run(paths, notes)
    by_rank: dict[int, list[Path]] = {}
    silent: list[Path] = []
    for path in sorted(paths, key=lambda path: natural(str(path))):
        rank = rank_of_name(str(path), certain=len(paths) == 1)
        if rank is None:
            silent.append(path)
        else:
            by_rank.setdefault(rank, []).append(path)
    for path in silent:
        rank = _rank_within(path)
        if rank is None or rank in by_rank:
            rank = next(number for number in range(len(by_rank) + 1) if number not in by_rank)
            text = f"{path.name} does not state its rank; taken for rank {rank}, by order"
            notes.append(Quality("rank-unknown", "info", text))
        by_rank[rank] = [path]
    chosen = {rank: _best(files) for rank, files in sorted(by_rank.items())}
    notes += _about_several(by_rank, chosen)
    sources = tuple(RankSource(rank, path, read_source) for rank, path in chosen.items())
    return Job(origin, FORMAT, sources, _world_size(sources), quality=notes)


def _of_one_run(paths: Sequence[Path], notes: list[Quality]) -> Sequence[Path]:
    """The dumps of one run, where folders hold a rank's dump in one format twice: those of the folder with most ranks,
    the first by name among equals. A folder a rank, or a folder a format, is one run."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted(paths, key=lambda path: natural(str(path))):
        folders.setdefault(path.parent, []).append(path)
    held = {
        folder: {
            (rank, is_pickle(head_of(path)))
            for path in files
            if (rank := rank_of_name(path.name)) is not None
        }
        for folder, files in (folders.items() if len(folders) > 1 else ())
    }
    times = Counter(key for keys in held.values() for key in keys)
    twice = {key for key, count in times.items() if count > 1}
    runs = [folder for folder in held if held[folder] & twice]
    if len(runs) < 2:
        return paths
    shown = max(runs, key=lambda folder: len({rank for rank, _ in held[folder]}))
    left = [folder for folder in runs if folder != shown]
    names = [str(folder) for folder in runs]
    text = (
        f"several runs lie here ({len(runs)}, by their folders): shown is {short_names([str(shown)], names)}; left out "
        f"{'is' if len(left) == 1 else 'are'} {short_names([str(folder) for folder in left], names)}; give one of them alone "
        "to see it"
    )
    notes.append(Quality("mixed-runs", "warning", text))
    return [path for folder, files in folders.items() if folder not in left for path in files]


def _best(files: list[Path]) -> Path:
    """The pickle before the JSON (it has stacks), then the larger."""
    return (
        max(files, key=lambda path: (is_pickle(head_of(path)), path.stat().st_size))
        if files[1:]
        else files[0]
    )


def _about_several(by_rank: dict[int, list[Path]], chosen: dict[int, Path]) -> list[Quality]:
    """Of which ranks one dump of several is read."""
    several = [rank for rank, files in by_rank.items() if len(files) > 1]
    if not several:
        return []
    rank = several[0]
    left = ", ".join(path.name for path in by_rank[rank] if path != chosen[rank])
    why = "the pickle, which has the stacks" if is_pickle(head_of(chosen[rank])) else "the larger one"
    text = (
        f"{len(several)} ranks left several dumps each: of each {why}, is read "
        f"(of rank {rank}: {chosen[rank].name}, and not {left})"
    )
    return [Quality("flight-recorder-several-dumps", "info", text)]


def _world_size(sources: Sequence[RankSource]) -> int | None:
    """Ranks of the default group; ``None`` where the dumps that were looked into do not say."""
    for source in sources[:_MOST_LOOKED_INTO]:
        if source.path.stat().st_size > _MOST_BYTES_LOOKED_INTO:
            continue  # each rank says it once more when it is read
        try:
            dump, _ = read_dump(source.path)
        except UnreadableInput:
            continue  # said when the rank itself is read
        entries = [entry for entry in dump.get("entries", ()) if isinstance(entry, dict)]
        world = _world_of(_groups(dump, entries, _status(dump)))
        if world is not None:
            return world
    return None


def _world_of(groups: Sequence[Group]) -> int | None:
    """Ranks of the default group, where the dump names them."""
    return next(
        (
            max(group.ranks) + 1
            for group in groups
            if group.ranks and (group.id == "0" or group.description == "default_pg")
        ),
        None,
    )


def _rank_within(path: Path) -> int | None:
    """The rank that a point-to-point of the default group gives away (``send 3->0`` is rank 3's)."""
    try:
        dump, _ = read_dump(path)
    except UnreadableInput:
        return None
    for entry in dump.get("entries", ()):
        name = str(entry.get("profiling_name", "")) if isinstance(entry, dict) else ""
        kind, _, pair = name.rpartition(":")[2].partition(" ")
        first = pair.replace("<-", "->").partition("->")[0]
        if kind in ("send", "recv") and first.isdecimal() and group_of(entry)[0] in _DEFAULT_GROUPS:
            return int(first)
    return None


def read_source(source: RankSource) -> Rank:
    """Read one dump. Raises ``UnreadableInput`` where nothing can be shown."""
    dump, cut = read_dump(source.path)
    rank = Rank(source.rank, str(source.path), FORMAT, Strings())
    entries = [entry for entry in dump.get("entries", ()) if isinstance(entry, dict)]
    strange = len(dump.get("entries", ())) - len(entries)
    entries.sort(key=record_of)
    status = _status(dump)
    rank.flight_recorder = entries_table(entries, status, rank.strings)
    rank.groups = _groups(dump, entries, status)
    rank.world_size = _world_of(rank.groups)
    lost = _lost(entries)
    library = dump.get("comm_lib_version") or dump.get("nccl_version")
    backends = sorted(
        {name.partition(":")[0] for entry in entries if ":" in (name := str(entry.get("profiling_name")))}
    )
    rank.metadata = {
        "flight_status": status,
        "flight_recorder": {
            "version": str(dump.get("version", "")) or None,
            "library": str(library) if library else None,
            "backends": backends,
            "entries": len(entries),
            "lost": lost,
            "cut_off": cut,
        },
    }
    _say(rank, entries, strange, lost, cut)
    return rank


def _lost(entries: list[dict[str, Any]]) -> int:
    """Entries that the recorder numbered and the dump lacks: older ones, or all that were not active."""
    numbers = [number for entry in entries if (number := record_of(entry)) >= 0]
    return max(numbers[-1] + 1 - len(numbers), 0) if numbers else 0


def _configs(dump: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    configs = dump.get("pg_config")
    if not isinstance(configs, dict):
        return []
    return [(str(name), config) for name, config in configs.items() if isinstance(config, dict)]


def _status(dump: dict[str, Any]) -> dict[str, dict[str, int | None]]:
    """Group → last enqueued, started and completed; ``None`` where the dump says nothing (−1).

    NCCL keeps it by the process's own number of the group, which the entries translate into its name.
    """
    names = {
        str(entry.get("pg_id")): group_of(entry)[0]
        for entry in dump.get("entries", ())
        if isinstance(entry, dict) and entry.get("pg_id") is not None
    }
    found = {}
    statuses = dump.get("pg_status")
    for number, status in statuses.items() if isinstance(statuses, dict) else ():
        name = names.get(str(number), str(number))
        if isinstance(status, dict) and (str(number) in names or name not in names.values()):
            numbers = {short: whole_number(status.get(long)) for short, long in _STATUS.items()}
            found[name] = {
                short: number if number is not None and number >= 0 else None
                for short, number in numbers.items()
            }
    return found


def _groups(dump: dict[str, Any], entries: list[dict[str, Any]], status: dict[str, Any]) -> tuple[Group, ...]:
    """The groups that the dump describes, and those that its entries name without a description.

    gloo describes them all under one empty name, so that only the last remains: it is the default group's
    where the dump knows no other group.
    """
    described: dict[str, str | None] = dict.fromkeys(status)
    for entry in entries:
        name, text = group_of(entry)
        described[name] = described.get(name) or text
    known = {
        str(config.get("name") or name): (
            str(config["desc"]) if config.get("desc") not in (None, "", "undefined") else None,
            ranks_of_text(config.get("ranks")),
        )
        for name, config in _configs(dump)
    }
    unnamed = known.pop("", None)
    if unnamed is not None and len(described) == 1 and not known:
        known[next(iter(described))] = unnamed
    names = {**dict.fromkeys(known), **described}
    return tuple(
        Group(
            name, name, known.get(name, (None, ()))[0] or described.get(name), known.get(name, (None, ()))[1]
        )
        for name in names
    )


# --- what must be said ---------------------------------------------------------------------------


def _say(rank: Rank, entries: list[dict[str, Any]], strange: int, lost: int, cut: bool) -> None:
    if cut:
        rank.note(
            "flight-recorder-cut-off",
            "warning",
            f"the dump is cut off: its first {len(entries)} entries are used",
        )
    if strange:
        rank.note(
            "flight-recorder-strange",
            "warning",
            f"{strange} elements of the dump are no entries and are left out",
        )
    if not entries:
        rank.note(
            "flight-recorder-empty",
            "warning",
            "the dump holds no entry; set TORCH_FR_BUFFER_SIZE=2000 before the start",
        )
        return
    if lost:
        text = (
            f"the ring had overflowed: {lost} older entries are lost and {len(entries)} remain; "
            "a larger TORCH_FR_BUFFER_SIZE keeps more"
        )
        if record_of(entries[0]) < lost:
            text = f"{lost} entries between those that remain are not in the dump: it holds active ones only, or was thinned"
        rank.note("flight-recorder-overflow", "info", text)
    if not any(entry.get("frames") for entry in entries):
        rank.note(
            "flight-recorder-no-stacks",
            "info",
            "the dump has no stacks (JSON dumps never do); the pickle has them",
        )
    version = str((rank.metadata["flight_recorder"] or {}).get("version") or "")
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if parts > _KNOWN_VERSION:
        rank.note(
            "flight-recorder-version",
            "info",
            f"the dump's version {version} is newer than any this was checked with",
        )
