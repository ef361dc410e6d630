"""Ends what a rank waits in where its backend cannot: gloo's collectives know no abort, and wait for their timeout.

Two processes know a connection between them by its pair of ports. Ranks that are to end tell each other their pairs, and
each shuts down those that another has too: gloo then fails at once, as when a peer dies. The store's connections stay.
Linux alone; elsewhere the wait ends with the other process, or with the group's timeout.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

__all__ = ["pairs_of_ports", "shut_down"]

_ESTABLISHED = "01"  # include/net/tcp_states.h


def pairs_of_ports(but: int | None = None) -> dict[tuple[int, int], int]:
    """(own port, other's port) of each established TCP connection of this process → its descriptor.

    ``but``: connections of this port, at either end, are left out.
    """
    descriptors = _sockets()
    found: dict[tuple[int, int], int] = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
        except OSError:  # no Linux
            continue
        for line in lines:
            fields = line.split()
            own, other = (int(fields[place].rpartition(":")[2], 16) for place in (1, 2))
            if fields[3] == _ESTABLISHED and fields[9] in descriptors and but not in (own, other):
                found[own, other] = descriptors[fields[9]]
    return found


def shut_down(own: dict[tuple[int, int], int], others: Iterable[tuple[int, int]]) -> int:
    """End the connections of ``own`` that another process names from its side. How many there were."""
    ended = 0
    for theirs in others:
        descriptor = own.get((theirs[1], theirs[0]))
        if descriptor is None:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended by itself
            continue
        ended += 1
    return ended


def _sockets() -> dict[str, int]:
    """Inode → descriptor of this process's sockets."""
    found = {}
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return {}
    for entry in folder.iterdir():
        try:
            target = entry.readlink().name
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found[target[8:-1]] = int(entry.name)
    return found
