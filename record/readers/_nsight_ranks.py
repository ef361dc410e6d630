"""Which ranks an export holds: one a process, or one a device where one process drives several.

A report of one node holds all its processes (``nsys profile torchrun …``); started once a rank
(``mpirun … nsys profile python …``) it holds one. Ranks' numbers come, most certain first, from what NCCL said
when it made its communicators, from the environment, from the file's name, from the order of devices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UnreadableInput
from ..model import MISSING, Quality
from ._names import MOST_RANKS, rank_of_name
from ._nsight_database import Database, opened
from ._nsight_payloads import NcclPayload, Payloads

__all__ = [
    "Communicators",
    "FoundExport",
    "Place",
    "devices_of",
    "explore",
    "known_tables",
    "owner_of_device",
    "read_communicators",
]

#: A process holds another device too for a moment (a barrier, a context): below this share of its kernels
#: that is no second rank.
_MAIN_SHARE = 0.9
#: A process with fewer kernels than this share of the busiest one's is a helper, not a rank.
_HELPER_SHARE = 0.001

_DEVICE_TABLES = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
)
_HOST_TABLES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS")
_ENVIRONMENT = re.compile(r'^\s*(\w+)\s*=\s*"?(\d{1,9})"?\s*$')
#: Each says the rank of the process that nsys started; a launcher has none of them.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is in an export: its process (``globalPid``) and device; ``None`` is all there is."""

    process: int | None
    device: int | None

    def __str__(self) -> str:
        return f"process={_or_all(self.process)} device={_or_all(self.device)}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """What ``str`` gave."""
        found = re.fullmatch(r"process=(-?\d+|all) device=(-?\d+|all)", text)
        assert found is not None
        return cls(*(None if part == "all" else int(part) for part in found.groups()))


def _or_all(value: int | None) -> str:
    return "all" if value is None else str(value)


@dataclass(slots=True)
class Communicators:
    """What NCCL said when it made them: communicator → (rank in it → process), its size, and ranks in the world."""

    size: dict[int, int] = field(default_factory=dict)
    members: dict[int, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))

    def world(self) -> int | None:
        """The largest communicator, which is the world where all ranks met."""
        return max(self.size, key=lambda one: (self.size[one], one), default=None)


@dataclass(slots=True)
class FoundExport:
    """One file and the ranks in it, each with its number where something states it."""

    path: Path
    places: list[tuple[Place, int | None]]
    world_size: int | None = None
    start_ns: int | None = None  # Unix time at which the capture began
    size: int = 0
    notes: list[Quality] = field(default_factory=list)


def known_tables(database: Database) -> frozenset[str]:
    """Tables by which an export is known as one of Nsight Systems."""
    return frozenset(
        name
        for name in database.tables
        if name.startswith("CUPTI_ACTIVITY_KIND_")
        or name in ("NVTX_EVENTS", "META_DATA_EXPORT", "EXPORT_META_DATA", "TARGET_INFO_GPU", "OSRT_API")
    )


def explore(path: Path) -> FoundExport:
    """The ranks of one export. Raises ``UnreadableInput`` where it is no export, or holds no work at all."""
    with opened(path) as database:
        if not known_tables(database):
            raise UnreadableInput(
                f"{path} is an SQLite database without the tables of Nsight Systems; export a report with"
                " nsys export --type sqlite"
            )
        notes: list[Quality] = []
        places = _places(database, notes)
        if not places:
            damaged = "; ".join(f"{table}: {why}" for table, why in sorted(database.damaged.items()))
            raise UnreadableInput(
                f"{path} holds no kernels, copies, runtime calls or NVTX ranges"
                + (f" that can be read ({damaged})" if damaged else "")
                + "; profile with nsys profile --trace=cuda,nvtx and export again"
            )
        communicators = read_communicators(database)
        ranks, world = _stated(database, places, communicators, notes)
        return FoundExport(
            path=path,
            places=list(zip(places, ranks, strict=True)),
            world_size=world,
            start_ns=_began(database),
            size=path.stat().st_size,
            notes=notes,
        )


def _began(database: Database) -> int | None:
    rows = database.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), limit=1)
    return rows[0][0] if rows and isinstance(rows[0][0], int) and 0 < rows[0][0] < 1 << 62 else None


# --- processes and devices -----------------------------------------------------------------------


def _places(database: Database, notes: list[Quality]) -> list[Place]:
    work: dict[tuple[int | None, int | None], int] = defaultdict(int)
    for table in _DEVICE_TABLES:
        if not database.has(table, "start"):
            continue
        process, device = (
            name if database.has(table, name) else "NULL" for name in ("globalPid", "deviceId")
        )
        rows = database.ask(table, f"SELECT {process}, {device}, COUNT(*) FROM {table} GROUP BY 1, 2")
        for one, other, count in rows:
            work[_whole(one), _whole(other)] += int(count)
        if work:
            break
    if not work:
        return _host_places(database)
    if all(process is None for process, _ in work):
        return _without_processes(database, work, notes)
    return _by_process(work, notes)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and value != MISSING else None


def _host_places(database: Database) -> list[Place]:
    """An export without device work: a rank for each process that called the runtime or opened a range."""
    for table in _HOST_TABLES:
        if database.has(table, "start", "globalTid"):
            query = f"SELECT globalTid & ~16777215, COUNT(*) FROM {table} GROUP BY 1 ORDER BY 2 DESC"
            rows = [
                (process, count)
                for process, count in database.ask(table, query)
                if _whole(process) is not None
            ]
            if rows:
                most = rows[0][1]
                return [Place(process, None) for process, count in sorted(rows) if count >= most * 0.1]
        if database.has(table, "start") and database.holds_rows(table):
            return [Place(None, None)]
    return []


def _without_processes(
    database: Database, work: Mapping[tuple[int | None, int | None], int], notes: list[Quality]
) -> list[Place]:
    devices = sorted(device for _, device in work if device is not None)
    notes.append(
        Quality(
            "nsight-no-process",
            "info",
            "kernels do not say their process (no globalPid): "
            + (
                f"each of the {len(devices)} devices is taken for a rank"
                if len(devices) > 1
                else "all is one rank"
            ),
        )
    )
    if len(devices) < 2:
        return [Place(None, devices[0] if devices else None)]
    processes = _calling_processes(database)
    owners = owner_of_device(database, devices, processes) if len(processes) > 1 else {}
    return [Place(owners.get(device), device) for device in devices]


def _calling_processes(database: Database) -> list[int]:
    table = _HOST_TABLES[0]
    if not database.has(table, "globalTid"):
        return []
    rows = database.ask(table, f"SELECT DISTINCT globalTid & ~16777215 FROM {table}")
    return sorted(process for (process,) in rows if _whole(process) is not None)


def owner_of_device(database: Database, devices: list[int], processes: list[int]) -> dict[int, int]:
    """Device → process, where kernels do not say it: the one whose calls have the kernels' correlations, and
    start before them."""
    kernels, calls = _DEVICE_TABLES[0], _HOST_TABLES[0]
    if not (database.has(kernels, "correlationId", "deviceId") and database.has(calls, "correlationId")):
        return {}
    query = (
        f"SELECT k.deviceId, r.globalTid & ~16777215, COUNT(*) FROM {kernels} k JOIN {calls} r "
        "ON r.correlationId = k.correlationId AND r.start <= k.start GROUP BY 1, 2 ORDER BY 3 DESC"
    )
    owners: dict[int, int] = {}
    for device, process, _ in database.ask(kernels, query):
        if device in devices and device not in owners and process not in owners.values():
            owners[device] = process
    return owners


def _by_process(work: Mapping[tuple[int | None, int | None], int], notes: list[Quality]) -> list[Place]:
    per_process: dict[int, dict[int | None, int]] = defaultdict(dict)
    for (process, device), count in work.items():
        if process is not None:
            per_process[process][device] = count
    most = max(sum(devices.values()) for devices in per_process.values())
    places: list[Place] = []
    helpers = 0
    for process, devices in sorted(per_process.items()):
        total = sum(devices.values())
        if total < most * _HELPER_SHARE:
            helpers += 1
            continue
        if len(devices) == 1 or max(devices.values()) >= total * _MAIN_SHARE:
            places.append(Place(process, None))
            continue
        driven = [device for device, count in devices.items() if count >= total * (1 - _MAIN_SHARE)]
        places += [Place(process, device) for device in sorted(d for d in driven if d is not None)]
        text = f"process {_pid(process)} drives {len(driven)} devices: each is taken for a rank"
        notes.append(Quality("nsight-one-process", "info", text))
    if helpers:
        text = f"{helpers} processes ran fewer than 1 in 1,000 of the busiest one's kernels and are left out"
        notes.append(Quality("nsight-helpers", "info", text))
    main = {process: max(devices, key=lambda d: devices[d]) for process, devices in per_process.items()}
    return sorted(
        places,
        key=lambda place: (
            place.device if place.device is not None else main[place.process or 0] or 0,
            place.process or 0,
        ),
    )


def devices_of(database: Database, place: Place) -> int:
    """How many devices share the host rows of a rank: all that its process drives, where each is a rank."""
    table = _DEVICE_TABLES[0]
    if place.process is None or place.device is None or not database.has(table, "globalPid", "deviceId"):
        return 1
    query = f"SELECT COUNT(DISTINCT deviceId) FROM {table} WHERE globalPid = ?"
    found = database.ask(table, query, (place.process,))
    return max(int(found[0][0]), 1) if found else 1


def _pid(process: int) -> int:
    return (process >> 24) & 0xFFFFFF


# --- their numbers -------------------------------------------------------------------------------


def read_communicators(database: Database) -> Communicators:
    """Communicators as ``ncclCommInit…`` described them, where payloads were exported."""
    found = Communicators()
    table = "NVTX_EVENTS"
    held = [name for name in ("binaryData", "jsonText") if database.has(table, name)]
    if not held or not database.has(table, "globalTid"):
        return found
    text = "e.text" if database.has(table, "text") else "NULL"
    by_id = ""
    if database.has(table, "textId") and database.has("StringIds", "id", "value"):
        by_id = "OR e.textId IN (SELECT id FROM StringIds WHERE value LIKE 'ncclCommInit%' OR value LIKE 'ncclCommSplit%')"
    columns = ", ".join(f"e.{name}" if name in held else "NULL" for name in ("binaryData", "jsonText"))
    given = " OR ".join(f"e.{name} IS NOT NULL" for name in held)
    query = (
        f"SELECT e.globalTid & ~16777215, {columns} FROM {table} e WHERE ({given}) AND "
        f"({text} LIKE 'ncclCommInit%' OR {text} LIKE 'ncclCommSplit%' {by_id})"
    )
    payloads = Payloads(database)
    for process, blob, said in database.ask(table, query):
        payload = payloads.decode(blob, said)
        if payload is not None and isinstance(process, int):
            _enter(found, process, payload)
    return found


def _enter(found: Communicators, process: int, payload: NcclPayload) -> None:
    if payload.communicator == MISSING or not 0 <= payload.rank < payload.ranks <= MOST_RANKS:
        return
    found.size[payload.communicator] = payload.ranks
    found.members[payload.communicator][payload.rank] = (process, payload.device)


def _stated(
    database: Database, places: list[Place], communicators: Communicators, notes: list[Quality]
) -> tuple[list[int | None], int | None]:
    """Numbers of the ranks as something states them, and the size of the world."""
    variables = _environment(database)
    world = next(
        (variables[name] for name in _WORLD_VARIABLES if 0 < variables.get(name, 0) <= MOST_RANKS), None
    )
    largest = communicators.world()
    if largest is not None:
        members = communicators.members[largest]
        ranks = [_in_communicator(place, members) for place in places]
        if all(rank is not None for rank in ranks) and len(set(ranks)) == len(ranks):
            return ranks, communicators.size[largest]
    if len(places) == 1:
        rank = next((variables[name] for name in _RANK_VARIABLES if name in variables), None)
        if rank is None:
            rank = rank_of_name(database.path.name)
        if rank is not None and (world is None or rank < world):
            return [rank], world
        return [None], world
    return [None] * len(places), None


def _in_communicator(place: Place, members: Mapping[int, tuple[int, int]]) -> int | None:
    mine = {
        rank
        for rank, (process, device) in members.items()
        if process == place.process and (place.device is None or device in (place.device, MISSING))
    }
    return mine.pop() if len(mine) == 1 else None


def _environment(database: Database) -> dict[str, int]:
    """Numbers in the environment of the one process that nsys started."""
    found: dict[str, int] = {}
    rows = database.rows("META_DATA_CAPTURE", ("name", "value"))
    for name, value in rows:
        if isinstance(name, str) and name.endswith("ENVIRONMENT_VARIABLE") and isinstance(value, str):
            match = _ENVIRONMENT.match(value)
            if match:
                found[match[1]] = int(match[2])
    return found
