"""Batches of sends and receives (``batch_isend_irecv``, pipeline schedules): one kernel, several messages.

NCCL launches a batch as one ``SendRecv`` kernel when its group ends, and that kernel's metadata names no
peer. PyTorch notes each message just before, in a ``record_param_comms`` of its own; those that led to no kernel
themselves and lie before the launch on its thread are the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..model import MISSING, Table

__all__ = ["messages_of_batches"]

_PEER = ("send", "recv")


def messages_of_batches(
    calls: Sequence[tuple[Any, int]], noted: Mapping[int, Any], device: Table, host: Table
) -> dict[int, list[Any]]:
    """Device row of a batch → its messages, in order of issue.

    ``calls`` are (call, device row) of the communication kernels, ``noted`` is host row → call of what
    ``record_param_comms`` noted; a call has ``operation``, ``peer`` and ``host_row``.
    """
    launched: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    linked = set()
    for call, row in calls:
        linked.add(call.host_row)
        launch = int(device["launch"][row])
        if launch >= 0:
            unnamed = call.peer == MISSING and call.operation in (None, "send_recv", "coalesced", *_PEER)
            launched[int(host["thread"][launch])].append((int(host["start_ns"][launch]), row, unnamed))
    messages: dict[int, list[tuple[int, Any]]] = defaultdict(list)
    for row, call in noted.items():
        if call.operation in _PEER and call.peer >= 0 and row not in linked:
            messages[int(host["thread"][row])].append((int(host["start_ns"][row]), call))
    found: dict[int, list[Any]] = {}
    for thread, waiting in messages.items():
        waiting.sort(key=lambda item: item[0])
        position = 0
        for start, row, unnamed in sorted(launched[thread]):
            first = position
            while position < len(waiting) and waiting[position][0] <= start:
                position += 1
            if unnamed and position > first:
                found[row] = [call for _, call in waiting[first:position]]
    return found
