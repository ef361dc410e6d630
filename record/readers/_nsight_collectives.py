"""Collectives of an export: communication kernels, and what NCCL's own ranges around their launches say.

    ncclGroupStart  ncclSend ncclRecv ncclSend ncclRecv  ncclGroupEnd ─ launches one SendRecv kernel

A kernel belongs to the NCCL range around its launch; from ``ncclGroupEnd`` on the calls since the group's start
count. Many sends and receives together are how PyTorch does an all-to-all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import operation_of
from ..model import DEVICE_KINDS, MISSING, Group, Table
from ._kineto_terms import bytes_of, operation_of_call
from ._nsight_payloads import NcclPayload
from ._nsight_ranges import NCCL_CALL

__all__ = ["GroupRanks", "collectives_of"]

Array = npt.NDArray[Any]

_COMMUNICATION = DEVICE_KINDS.index("communication")

#: Calls of NCCL's interface → operations.
_OPERATIONS = {
    "ncclAllReduce": "all_reduce",
    "ncclAllGather": "all_gather",
    "ncclReduceScatter": "reduce_scatter",
    "ncclBroadcast": "broadcast",
    "ncclBcast": "broadcast",
    "ncclReduce": "reduce",
    "ncclSend": "send",
    "ncclRecv": "recv",
    "ncclAlltoAll": "all_to_all",
    "ncclAllToAll": "all_to_all",
    "ncclAllToAllv": "all_to_all",
    "ncclGather": "gather",
    "ncclScatter": "scatter",
}
#: Ranges around a launch whose names may say what a SendRecv kernel is for.
_DEPTH = 24

#: Communicator → global ranks of its members by their rank in it, where known.
GroupRanks = dict[int, tuple[int, ...]]


@dataclass(slots=True)
class _Call:
    operation: str
    start_ns: int
    row: int
    payload: NcclPayload


def collectives_of(
    device: Table | None,
    host: Table | None,
    payloads: dict[int, NcclPayload],
    members: GroupRanks,
    sharing: int = 1,
) -> tuple[Table | None, tuple[Group, ...]]:
    """The collectives of a rank, one a communication kernel, and the groups that NCCL named.

    ``payloads`` is host row → payload; ``sharing`` the devices whose ranks share the host rows: their thread calls
    NCCL for each of them in one group. Sends and receives without their peer stay so: NCCL counts ranks within the
    communicator, and ``members`` may not know it.
    """
    if device is None:
        return None, ()
    rows = np.flatnonzero(device["kind"] == _COMMUNICATION)
    if not len(rows):
        return None, ()
    around = _Around(host, payloads) if host is not None else None
    found = [_row(row, device, host, around, members, sharing) for row in rows.tolist()]
    _name_by_stream(found, device)
    columns = {name: [one[name] for one in found] for name in found[0]}
    for name in ("operation", "group", "state"):
        columns[name] = [device.strings.code(value) for value in columns[name]]
    table = Table("collectives", columns, device.strings)
    return table, _groups(members, {one["group"] for one in found})


def _name_by_stream(rows: list[dict[str, Any]], device: Table) -> None:
    """A SendRecv kernel whose launch was not captured is what all others on its stream are, when they agree."""
    seen: dict[tuple[int, int], set[str]] = defaultdict(set)
    places = [
        (int(device["device"][one["device_row"]]), int(device["stream"][one["device_row"]])) for one in rows
    ]
    for place, one in zip(places, rows, strict=True):
        seen[place].add(one["operation"])
    for place, one in zip(places, rows, strict=True):
        others = seen[place] - {"send_recv"}
        if one["operation"] == "send_recv" and one["host_row"] < 0 and others == {"all_to_all"}:
            one["operation"] = "all_to_all"


def _groups(members: GroupRanks, used: set[str | None]) -> tuple[Group, ...]:
    named = {_group_name(number): ranks for number, ranks in members.items()}
    return tuple(
        Group(name, name, None, named.get(name, ())) for name in sorted(name for name in used if name)
    )


def _group_name(communicator: int) -> str:
    return f"nccl {communicator & 0xFFFFFFFFFFFFFFFF:x}"


def _row(
    row: int, device: Table, host: Table | None, around: _Around | None, members: GroupRanks, sharing: int
) -> dict[str, Any]:
    launch = int(device["launch"][row])
    name = device.strings.text(int(device["name"][row])) or ""
    calls = around.calls(launch) if around is not None and launch >= 0 else []
    if sharing > 1 and len(calls) % sharing == 0:
        calls = calls[: len(calls) // sharing]
    operation, payload = _said(calls)
    own = operation_of(name)
    if operation is None or (own not in (None, "send_recv", operation) and operation != "all_to_all"):
        operation, payload = own, (payload if operation is None else NcclPayload())
    if operation in (None, "send_recv") and around is not None and launch >= 0:
        operation = around.named(launch) or operation
    ranks = members.get(payload.communicator, ())
    size = len(ranks) or (max(0, payload.ranks))
    in_bytes, out_bytes = _sizes(operation, payload.bytes, size)
    return {
        "operation": operation,
        "group": None if payload.communicator == MISSING else _group_name(payload.communicator),
        "peer": _peer(operation, payload, ranks),
        "in_bytes": in_bytes,
        "out_bytes": out_bytes,
        "bytes": bytes_of(operation, in_bytes, out_bytes),
        "state": "completed",
        "issued_ns": int(host["start_ns"][launch]) if host is not None and launch >= 0 else MISSING,
        "start_ns": int(device["start_ns"][row]),
        "end_ns": int(device["end_ns"][row]),
        "device_row": row,
        "host_row": calls[0].row if calls else launch,
        "step": int(device["step"][row]),
    }


def _said(calls: Sequence[_Call]) -> tuple[str | None, NcclPayload]:
    """What the calls behind one kernel are together, with their bytes added up."""
    if not calls:
        return None, NcclPayload()
    operations = [call.operation for call in calls]
    first = calls[0].payload
    one_kind = len(set(operations)) == 1
    if set(operations) == {"send", "recv"}:
        sends = [call.payload for call in calls if call.operation == "send"]
        receives = len(operations) - len(sends)
        operation = "all_to_all" if len(sends) > 1 and len(sends) == receives else "send_recv"
        return operation, NcclPayload(first.communicator, _added(sends), ranks=first.ranks)
    if not one_kind:
        return None, NcclPayload(first.communicator, ranks=first.ranks)
    if len(calls) == 1:
        return operations[0], first
    size = _added([call.payload for call in calls])
    return operations[0], NcclPayload(first.communicator, size, root=first.root, ranks=first.ranks)


def _added(payloads: Sequence[NcclPayload]) -> int:
    sizes = [payload.bytes for payload in payloads]
    return sum(sizes) if sizes and all(0 <= size < 1 << 50 for size in sizes) else MISSING


def _sizes(operation: str | None, own: int, ranks: int) -> tuple[int, int]:
    """Bytes in and out of a call from what NCCL counts: the smaller side of a gather or a scatter."""
    if not 0 <= own < 1 << 50:
        return MISSING, MISSING
    many = own * ranks if ranks else MISSING
    if operation in ("all_gather", "gather"):
        return own, many
    if operation in ("reduce_scatter", "scatter"):
        return many, own
    return own, own


def _peer(operation: str | None, payload: NcclPayload, ranks: tuple[int, ...]) -> int:
    """The other side of a pair or the root of a tree as a global rank, MISSING where it is not known."""
    number = payload.peer if operation in ("send", "recv") else payload.root
    if operation not in ("send", "recv", "broadcast", "reduce", "gather", "scatter"):
        return MISSING
    return ranks[number] if 0 <= number < len(ranks) and ranks[number] >= 0 else MISSING


class _Around:
    """Finds the NCCL calls behind a launch."""

    def __init__(self, host: Table, payloads: dict[int, NcclPayload]) -> None:
        self._host = host
        self._payloads = payloads
        strings = host.strings.values
        self._nccl = {code: name for code, name in enumerate(strings) if NCCL_CALL.match(name)}
        self._threads = self._calls_by_thread()
        self._places = {row: at for line in self._threads.values() for at, (_, row, _) in enumerate(line)}

    def _calls_by_thread(self) -> dict[int, list[tuple[int, int, str]]]:
        """Thread → (start, row, name) of its NCCL ranges in order."""
        host = self._host
        rows = np.flatnonzero(np.isin(host["name"], list(self._nccl)))
        rows = rows[np.argsort(host["start_ns"][rows], kind="stable")]
        found: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for row in rows.tolist():
            place = (int(host["start_ns"][row]), row, self._nccl[int(host["name"][row])])
            found[int(host["thread"][row])].append(place)
        return found

    def _parents(self, row: int) -> Iterator[int]:
        parents = self._host["parent"]
        for _ in range(_DEPTH):
            row = int(parents[row])
            if row < 0:
                return
            yield row

    def calls(self, launch: int) -> list[_Call]:
        """The NCCL calls that a launch carries out."""
        for row in self._parents(launch):
            name = self._nccl.get(int(self._host["name"][row]))
            if name == "ncclGroupEnd":
                return self._in_group(row)
            if name in _OPERATIONS:
                return [self._call(row, name)]
        return []

    def _call(self, row: int, name: str) -> _Call:
        start = int(self._host["start_ns"][row])
        return _Call(_OPERATIONS[name], start, row, self._payloads.get(row, NcclPayload()))

    def _in_group(self, end_row: int) -> list[_Call]:
        """Calls between a group's start and the range of its end; groups may lie in groups."""
        line = self._threads[int(self._host["thread"][end_row])]
        return self._back_from(line, self._places[end_row])

    def _back_from(self, line: list[tuple[int, int, str]], place: int) -> list[_Call]:
        calls = []
        depth = 1
        for _, row, name in reversed(line[max(0, place - 4096) : place]):
            if name == "ncclGroupEnd":
                depth += 1
            elif name == "ncclGroupStart":
                depth -= 1
                if depth == 0:
                    break
            elif name in _OPERATIONS:
                calls.append(self._call(row, name))
        else:
            return []  # the capture began inside the group
        calls.reverse()
        return calls

    def named(self, launch: int) -> str | None:
        """What the annotations around a launch call a kernel that only sends and receives."""
        for row in self._parents(launch):
            text = self._host.strings.text(int(self._host["name"][row])) or ""
            if "alltoall" in text.lower().replace("_", "").replace(" ", ""):
                return "all_to_all"
            if text.startswith(("nccl:", "c10d::", "_c10d_functional::")):
                return operation_of_call(text.split(":")[-1])
        return None
