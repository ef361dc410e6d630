"""Entries of a flight recorder's dump as rows."""

from __future__ import annotations

from typing import Any

from ..model import MISSING, Strings, Table
from ._flight_dumps import shapes_text, stack_text, types_text, whole_number

__all__ = ["entries_table", "group_of", "record_of"]


def record_of(entry: dict[str, Any]) -> int:
    """The recorder's own number of an entry, MISSING where it has none."""
    number = whole_number(entry.get("record_id", entry.get("id")))
    return MISSING if number is None else number


def group_of(entry: dict[str, Any]) -> tuple[str, str | None]:
    """Name and description; before version 2 an entry has its group's number alone."""
    pair = entry.get("process_group")
    if isinstance(pair, (list, tuple)) and pair:
        described = str(pair[1]) if len(pair) > 1 and pair[1] not in (None, "", "undefined") else None
        return str(pair[0]), described
    return str(entry.get("pg_id", "0")), None


def _sequence(entry: dict[str, Any]) -> int:
    number = whole_number(entry.get("collective_seq_id", entry.get("seq_id")))
    return MISSING if number is None else number


def entries_table(entries: list[dict[str, Any]], status: dict[str, Any], strings: Strings) -> Table:
    """The table ``flight_recorder``, a row an entry in the order given. ``status``: see ``flight_status``."""
    says_states = any(entry.get("state") in ("started", "completed") for entry in entries)
    columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}
    for entry in entries:
        group, _ = group_of(entry)
        name = str(entry.get("profiling_name", "unknown"))
        operation = name.partition(":")[2] or name
        row = {
            "record": record_of(entry),
            "group": strings.code(group),
            "sequence": _sequence(entry),
            "peer_sequence": _number(entry.get("p2p_seq_id")),
            "is_peer": int(bool(entry.get("is_p2p", operation.partition(" ")[0] in ("send", "recv")))),
            "operation": strings.code(operation),
            "in_shapes": strings.code(shapes_text(entry.get("input_sizes"))),
            "out_shapes": strings.code(shapes_text(entry.get("output_sizes"))),
            "in_types": strings.code(types_text(entry.get("input_dtypes"))),
            "out_types": strings.code(types_text(entry.get("output_dtypes"))),
            "state": strings.code(_state(entry, status.get(group), says_states)),
            "created_ns": _time(entry.get("time_created_ns")),
            "started_ns": _time(entry.get("time_discovered_started_ns")),
            "completed_ns": _time(entry.get("time_discovered_completed_ns")),
            "timeout_ns": _milliseconds(entry.get("timeout_ms")),
            "thread": strings.code(_thread(entry)),
            "stack": strings.code(stack_text(entry.get("frames"))),
        }
        for column, values in columns.items():
            values.append(row[column])
    return Table("flight_recorder", columns, strings)


_COLUMNS = (
    *("record", "group", "sequence", "peer_sequence", "is_peer", "operation", "in_shapes", "out_shapes"),
    *("in_types", "out_types", "state", "created_ns", "started_ns", "completed_ns", "timeout_ns", "thread", "stack"),
)  # fmt: skip


def _state(entry: dict[str, Any], status: dict[str, int | None] | None, says_states: bool) -> str:
    """What became of the entry. Gloo never updates the state and only retires what is done; NCCL's watchdog
    retires what has failed as well, so that there the state counts."""
    state = str(entry.get("state") or "scheduled")
    if state == "completed" or _time(entry.get("time_discovered_completed_ns")) != MISSING:
        return "completed"
    if not says_states and entry.get("retired"):
        return "completed"
    if not entry.get("is_p2p") and status is not None:
        sequence = _sequence(entry)
        done, begun = status.get("last_completed"), status.get("last_started")
        if done is not None and MISSING < sequence <= done:
            return "completed"
        if begun is not None and MISSING < sequence <= begun:
            return "started"
    return "started" if state == "started" else "scheduled"


def _number(value: Any) -> int:
    number = whole_number(value)
    return MISSING if number is None else number


def _time(value: Any) -> int:
    """JSON writes 0 for a time that there is not."""
    number = whole_number(value)
    return MISSING if number is None or number <= 0 else number


def _milliseconds(value: Any) -> int:
    number = whole_number(value)
    return MISSING if number is None or not 0 < number < 2**42 else number * 1_000_000


def _thread(entry: dict[str, Any]) -> str | None:
    name, number = entry.get("thread_name"), entry.get("thread_id")
    return f"{name or ''} {number or ''}".strip() or None
