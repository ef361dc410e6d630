"""Collectives of a trace: from metadata where there is some, else from names and from the calls around them.

Three generations of files: metadata on the kernel itself (2023-10 on, where profiled so), metadata on
the host's ``record_param_comms`` (2.2 on), and before that only ``nccl:all_reduce`` annotations around the
launch, with the tensor's shape when shapes were recorded. On gloo there is no device; the annotations on its
worker threads are the collectives.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..kernels import operation_of
from ..model import MISSING, Strings, Table
from ._kineto_batches import messages_of_batches
from ._kineto_events import DECODE_ERRORS, CollectiveArguments
from ._kineto_terms import bytes_of, dtype_of, integer_of, operation_of_call, ranks_of, text_of

__all__ = ["collectives_table"]

Array = npt.NDArray[Any]

_ANNOTATION = re.compile(r"^(?:nccl|rccl|gloo|mpi|ucc|xccl|ccl|hccl)::?_?(\w+)")
_PEER = re.compile(r"(?:->|<-)\s*(\d+)|(?:send|recv) .*?(?:rank )?(\d+)\s*$")
_OPERATOR = re.compile(r"^c10d::_?(\w+)|^(?:_c10d_functional|c10d_functional)::_?(\w+)")


@dataclass(slots=True)
class _Call:
    """What is known of one collective before it becomes a row."""

    operation: str | None = None
    group: str | None = None
    sequence: int = MISSING
    peer: int = MISSING
    in_bytes: int = MISSING
    out_bytes: int = MISSING
    dtype: str | None = None
    group_size: int | None = None
    label: str | None = None
    host_row: int = -1
    groups: list[tuple[str, str | None, tuple[int, ...]]] = field(default_factory=list)


# --- metadata ------------------------------------------------------------------------------------


def _external(arguments: CollectiveArguments) -> int:
    return integer_of(arguments.old_external_id if arguments.external_id is None else arguments.external_id)


def _from_metadata(arguments: CollectiveArguments) -> _Call:
    call = _Call()
    if arguments.collective is not None:
        call.operation = operation_of_call(str(arguments.collective))
    call.group = text_of(arguments.group) or text_of(arguments.old_group)
    size = integer_of(arguments.group_size)
    call.group_size = size if size > 0 else None
    call.sequence = integer_of(arguments.sequence)
    if arguments.dtype is not None:
        call.dtype, width = dtype_of(str(arguments.dtype))
        call.dtype = call.dtype or text_of(arguments.dtype)
        for side, elements in (("in_bytes", arguments.in_elements), ("out_bytes", arguments.out_elements)):
            count = integer_of(elements)
            if width and 0 <= count < 2**55:
                setattr(call, side, count * width)
    if call.operation in ("send", "recv"):
        call.peer = integer_of(
            arguments.destination_rank if call.operation == "send" else arguments.source_rank
        )
    if call.group is not None:
        ranks = ranks_of(
            arguments.group_ranks, size, integer_of(arguments.rank_start), integer_of(arguments.rank_stride)
        )
        if ranks:
            call.groups.append((call.group, text_of(arguments.group_description), ranks))
    return call


def _complete(call: _Call, other: _Call) -> None:
    """Fill what ``call`` lacks from ``other``."""
    for name in ("operation", "group", "dtype", "group_size", "label"):
        if getattr(call, name) is None:
            setattr(call, name, getattr(other, name))
    for name in ("sequence", "peer", "in_bytes", "out_bytes"):
        if getattr(call, name) == MISSING:
            setattr(call, name, getattr(other, name))
    if call.host_row < 0:
        call.host_row = other.host_row
    call.groups += other.groups


# --- the calls around a launch -------------------------------------------------------------------


def _elements(shapes: str | None, types: str | None) -> tuple[int, str | None, int]:
    """Elements of the first tensor (or tensors of the first list), dtype and its width; zeros when unknown."""
    try:
        dims = msgspec.json.decode(shapes or "")
        names = msgspec.json.decode(types or "[]")
    except DECODE_ERRORS:
        return 0, None, 0
    if not isinstance(dims, list) or not isinstance(names, list):
        return 0, None, 0
    for dim, name in zip(dims, names, strict=False):
        dtype, width = dtype_of(name) if isinstance(name, str) else (None, 0)
        if dtype is None or not isinstance(dim, list):
            continue
        tensors = dim if dim and isinstance(dim[0], list) else [dim]
        sizes = [math.prod(tensor) for tensor in tensors if all(type(n) is int for n in tensor)]
        return sum(sizes), dtype, width
    return 0, None, 0


class _Host:
    """Looks up what the host says about a call."""

    def __init__(self, host: Table | None, metadata: dict[int, _Call]) -> None:
        self.host = host
        self.metadata = metadata
        self._annotations: dict[int, _Call | None] = {}

    def around(self, row: int) -> Iterable[_Call]:
        """What the spans that enclose a row tell, innermost first."""
        assert self.host is not None
        parents = self.host["parent"]
        for _ in range(64):
            if row < 0:
                return
            call = self.at(row)
            if call is not None:
                yield call
            row = int(parents[row])

    def at(self, row: int) -> _Call | None:
        if row not in self._annotations:
            self._annotations[row] = self.metadata.get(row) or self._annotation(row)
        return self._annotations[row]

    def _annotation(self, row: int) -> _Call | None:
        host = self.host
        assert host is not None
        name = host.strings.text(int(host["name"][row])) or ""
        match = _ANNOTATION.match(name) or _OPERATOR.match(name)
        if match is None:
            return None
        operation = operation_of_call(match[match.lastindex or 1])
        if operation in (None, "coalesced"):  # a batch of what its messages say, or its kernel's name
            return None
        call = _Call(operation, host_row=row)
        if name.startswith(("c10d", "_c10d")):
            return call  # its arguments are lists of lists: the annotation inside says it better
        if operation in ("send", "recv"):
            peer = _PEER.search(name)
            call.peer = int(peer[1] or peer[2]) if peer else MISSING
        shapes = host.strings.text(int(host["shapes"][row]))
        elements, dtype, width = _elements(shapes, host.strings.text(int(host["types"][row])))
        if dtype is not None:
            call.dtype = dtype
            call.in_bytes = elements * width
            if operation in ("all_reduce", "broadcast", "reduce", "send", "recv", "all_to_all"):
                call.out_bytes = call.in_bytes
        return call


# --- the table -----------------------------------------------------------------------------------


def collectives_table(
    marked: Sequence[tuple[str, int, CollectiveArguments]],
    device: Table | None,
    host: Table | None,
    strings: Strings,
    world: tuple[int, ...] = (),
    other: int = MISSING,
) -> tuple[Table | None, list[tuple[str, str | None, tuple[int, ...]]]]:
    """The collectives of a rank and the groups that their metadata names.

    ``marked`` are the communication kernels, ``record_param_comms``, send and receive rows with their arguments.
    ``world``: the ranks of the only group, where there is one alone. ``other``: the only rank beside this one, in a
    job of two: whatever is sent or received goes to it or comes from it, also where the trace names no peer.
    """
    marked, peers = _without_peers(marked, host, world)
    metadata = {row: _from_metadata(arguments) for kind, row, arguments in marked if kind == "host"}
    for row, call in metadata.items():
        call.host_row = row
    look = _Host(host, metadata)
    by_external = {_external(arguments): row for kind, row, arguments in marked if kind == "host"}
    groups = [group for call in metadata.values() for group in call.groups]
    calls: list[tuple[_Call, int]] = []
    for kind, row, arguments in marked:
        if kind == "device" and device is not None:
            call = _device_call(row, arguments, device, look, by_external)
            groups += call.groups
            calls.append((call, row))
    if device is not None and host is not None:
        batches = messages_of_batches(calls, metadata, device, host)
        calls = [(one, row) for call, row in calls for one in batches.get(row, [call])]
    if device is not None:
        _name_by_stream(calls, device)
    rows = _device_rows(calls, device, host)
    rows += _host_rows(host, look, peers)
    if not rows:
        return None, groups
    for values in rows:
        if values["peer"] == MISSING and values["operation"] in ("send", "recv"):
            values["peer"] = other
    rows.sort(key=lambda row: (row["start_ns"], row["device_row"]))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for name in ("operation", "group", "dtype", "state", "label"):
        columns[name] = [strings.code(value) for value in columns[name]]
    return Table("collectives", columns, strings), groups


def _without_peers(
    marked: Sequence[tuple[str, int, CollectiveArguments]], host: Table | None, world: tuple[int, ...]
) -> tuple[list[tuple[str, int, CollectiveArguments]], dict[int, int]]:
    """The marks that are collectives, and for the others (``c10d::send``, ``c10d::recv_``) host row → peer.

    They name the peer by its place in a group that they do not name, so it is known where there is one group.
    """
    names = () if host is None else (host.strings.find("c10d::send"), host.strings.find("c10d::recv_"))
    kept, peers = [], {}
    for kind, row, arguments in marked:
        if kind != "host" or host is None or int(host["name"][row]) not in names:
            kept.append((kind, row, arguments))
            continue
        try:
            inputs = msgspec.json.decode(arguments.concrete)  # tensors, group, peer, tag
            place = int(inputs[2])
        except (*DECODE_ERRORS, IndexError, TypeError, KeyError):
            continue
        if 0 <= place < len(world):
            peers[row] = world[place]
    return kept, peers


def _device_call(
    row: int, arguments: CollectiveArguments, device: Table, look: _Host, by_external: Mapping[int, int]
) -> _Call:
    call = _from_metadata(arguments)
    number = _external(arguments)
    linked = by_external.get(number)
    if linked is not None and number > 0:
        _complete(call, look.metadata[linked])
    launch = int(device["launch"][row])
    if launch >= 0 and look.host is not None:
        for other in look.around(launch):
            if call.operation in (None, other.operation) or other.operation is None:
                _complete(call, other)
    if call.operation is None:
        call.operation = operation_of(device.strings.text(int(device["name"][row])) or "")
    if call.host_row < 0:
        call.host_row = launch
    return call


def _name_by_stream(calls: list[tuple[_Call, int]], device: Table) -> None:
    """NCCL's ``SendRecv`` without a launch record is what all others on its stream are, when they agree."""
    seen: dict[tuple[int, int], set[str]] = defaultdict(set)
    where = {row: (int(device["device"][row]), int(device["stream"][row])) for _, row in calls}
    for call, row in calls:
        name = device.strings.text(int(device["name"][row])) or ""
        if call.operation not in (None, "send_recv") and "sendrecv" in name.lower().replace("_", ""):
            seen[where[row]].add(call.operation)
    for call, row in calls:
        if call.operation == "send_recv" and len(seen[where[row]]) == 1:
            call.operation = next(iter(seen[where[row]]))


def _row(call: _Call, **values: Any) -> dict[str, Any]:
    in_bytes, out_bytes = call.in_bytes, call.out_bytes
    if call.group_size and call.operation == "all_gather" and out_bytes == MISSING and in_bytes != MISSING:
        out_bytes = in_bytes * call.group_size
    return {
        "operation": call.operation,
        "group": call.group,
        "sequence": call.sequence,
        "peer": call.peer,
        "in_bytes": in_bytes,
        "out_bytes": out_bytes,
        "bytes": bytes_of(call.operation, in_bytes, out_bytes),
        "dtype": call.dtype,
        "state": "completed",
        "label": call.label,
        **values,
    }


def _device_rows(
    calls: list[tuple[_Call, int]], device: Table | None, host: Table | None
) -> list[dict[str, Any]]:
    rows = []
    for call, row in calls:
        assert device is not None
        launch = int(device["launch"][row])
        issued = int(host["start_ns"][launch]) if host is not None and launch >= 0 else MISSING
        rows.append(
            _row(
                call,
                issued_ns=issued,
                start_ns=int(device["start_ns"][row]),
                end_ns=int(device["end_ns"][row]),
                device_row=row,
                host_row=call.host_row,
                step=int(device["step"][row]),
            )
        )
    return rows


def _host_rows(host: Table | None, look: _Host, peers: Mapping[int, int]) -> list[dict[str, Any]]:
    """Collectives that ran on the host: gloo's and MPI's annotations, on their own worker threads."""
    if host is None:
        return []
    names = host.strings.values
    running = [code for code, name in enumerate(names) if re.match(r"(?:gloo|mpi|ucc):", name)]
    picked = np.flatnonzero(np.isin(host["name"], running)).tolist()
    issues = _issues(host, picked, look)
    rows = []
    for row in picked:
        call = look.at(row)
        if call is None:
            continue
        issue = issues.get(row, -1)
        if call.peer == MISSING:
            call.peer = peers.get(issue, MISSING)
        rows.append(
            _row(
                call,
                issued_ns=int(host["start_ns"][issue]) if issue >= 0 else MISSING,
                start_ns=int(host["start_ns"][row]),
                end_ns=int(host["end_ns"][row]),
                device_row=-1,
                host_row=row,
                step=int(host["step"][row]),
            )
        )
    return rows


def _issues(host: Table, running: list[int], look: _Host) -> dict[int, int]:
    """The row that issued each host collective: the ``c10d::`` operator of the same operation and shape, in order.

    Only where both were recorded equally often; a worker thread runs what was queued in order.
    """
    operators = [code for code, name in enumerate(host.strings.values) if name.startswith("c10d::")]
    issued: dict[tuple[str | None, str], list[tuple[int, int]]] = defaultdict(list)
    ran: dict[tuple[str | None, str], list[tuple[int, int]]] = defaultdict(list)
    for rows, into in ((np.flatnonzero(np.isin(host["name"], operators)).tolist(), issued), (running, ran)):
        for row in rows:
            call = look.at(row)
            shapes = re.findall(r"\d+", host.strings.text(int(host["shapes"][row])) or "")
            if call is not None:
                into[call.operation, ",".join(shapes)].append((int(host["start_ns"][row]), row))
    found: dict[int, int] = {}
    for key, begun in ran.items():
        called = issued.get(key, [])
        if len(called) == len(begun):
            for (start, row), (issue, operator) in zip(sorted(begun), sorted(called), strict=True):
                if issue <= start:
                    found[row] = operator
    return found
