"""How ranks ask each other where they are, past their collectives: through the store that made the process group.

A rank that asks is read by the others' threads as soon as they stand still for half a second. As long as nobody asks
and everybody goes on, nothing is sent.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from torch import distributed

from trine.optim.runtime.connections import pairs_of_ports, shut_down

__all__ = ["END", "PathStore", "Place"]

logger = logging.getLogger("trine")

#: The end of a forward, as an element of a path.
END = -1

#: A rank that has not moved for so long looks whether somebody asks.
_STILL_S = 0.5
#: So long a rank waits for one that failed before it takes the failure for the reason: its program may catch the error,
#: skip the batch and go on.
PATIENCE_S = 20.0
#: Between two looks: of the watching thread, and of a rank that asks.
_LOOK_S, _ASK_S = 0.25, 0.005
#: Who asks alone waits so long before it calls on the others.
_ALONE_S = 0.1
#: A rank that asks gives up where another gives no sign for so long: it is gone, and the backend will say so.
_SILENT_S = 20.0
#: Nor does it ask longer than this: ranks that do something else for a while are the backend's to wait for.
_LONGEST_S = 60.0
#: A rank that tells why nobody can go on waits so long until all have heard: its end may be that of the store.
_HEARD_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: its latest forward, the modules that it entered in it, and the forwards before."""

    forward: int
    kind: str
    path: list[int]
    before: dict[int, tuple[str, list[int]]]

    def at(self, forward: int) -> Place | None:
        """The same of an earlier forward, where it is remembered."""
        if forward == self.forward:
            return self
        known = self.before.get(forward)
        return None if known is None else Place(forward, known[0], known[1], {})

    def to_json(self) -> str:
        """Paths that occur several times are written once."""
        unique: list[list[int]] = []
        recent = []
        for forward, (kind, path) in [*self.before.items(), (self.forward, (self.kind, self.path))]:
            if path not in unique:
                unique.append(path)
            recent.append([forward, kind, unique.index(path)])
        return json.dumps({"paths": unique, "recent": recent})

    @staticmethod
    def from_json(text: str) -> Place:
        """What :meth:`to_json` wrote."""
        told = json.loads(text)
        found = {forward: (kind, told["paths"][place]) for forward, kind, place in told["recent"]}
        forward, (kind, path) = list(found.items())[-1]
        return Place(forward, kind, path, found)


class _Rank(Protocol):
    progress: int
    busy: bool

    def place(self) -> Place: ...


class PathStore:
    """One rank's side. Every rank makes as many of these as the others, in the same order."""

    _made = 0

    def __init__(self, rank: _Rank, number: int, peers: list[int]) -> None:
        # Keys of two engines, and of two process groups one after the other, must not meet.
        PathStore._made += 1
        store: Any = distributed.distributed_c10d._get_default_store()
        self._prefix = f"trine/paths/{PathStore._made}"
        self._store = store
        self._rank = rank
        self._number = number
        self._others = [peer for peer in peers if peer != number]
        self._signed = False
        #: Why no rank can go on, in words.
        self.verdict: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trine-paths", daemon=True)
        self._thread.start()

    def _key(self, *parts: object) -> str:
        return "/".join((self._prefix, *map(str, parts)))

    # --- a rank that left its path ---------------------------------------------------------------------

    def ask(self, ordered: bool) -> tuple[int, Place] | None:
        """Wait until every other rank is known to be here too (``None``), or one to be elsewhere: which, and where.

        Returns when others give no sign of life: what they do then is the backend's to say.
        """
        mine = self._rank.place()
        try:
            self._store.set(self._key("at", self._number), mine.to_json())
            return self._wait_for(mine, ordered)
        except (RuntimeError, ValueError) as error:
            logger.debug("other ranks could not be asked for their path: %s", error)
            return None

    def _wait_for(self, mine: Place, ordered: bool) -> tuple[int, Place] | None:
        left = dict.fromkeys(self._others, time.monotonic())  # when each was last heard of
        heard: dict[int, str] = {}
        began = called = time.monotonic()
        is_called = False
        pause = _ASK_S
        while left and self.verdict is None:
            for other in list(left):
                if not self._store.check([self._key("at", other)]):
                    continue
                text = self._store.get(self._key("at", other)).decode()
                if text == heard.get(other):
                    continue
                heard[other] = text
                left[other] = time.monotonic()
                theirs = Place.from_json(text).at(mine.forward)
                state = _compare(mine, theirs, Place.from_json(text).forward, ordered)
                if state == "apart":
                    assert theirs is not None
                    return other, theirs
                if state == "alike":
                    del left[other]
            now = time.monotonic()
            if left and now - (called if is_called else began) > (1.0 if is_called else _ALONE_S):
                self._store.set(self._key("news"), "1")  # others look at it when they stand still
                called, is_called = now, True
            if now - began > _LONGEST_S:
                break
            silent = [other for other, last in left.items() if now - last > _SILENT_S]
            if silent and not self._alive(silent):
                logger.warning("ranks %s gave no sign of where they are", ", ".join(map(str, silent)))
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if is_called and self.verdict is None:
            self._store.delete_key(self._key("news"))
        return None

    def _alive(self, ranks: list[int]) -> bool:
        """Whether their threads answer, although their places do not change: long computations are no silence."""
        asked = str(time.time_ns())
        self._store.set(self._key("call"), asked)
        end = time.monotonic() + 4 * _STILL_S
        while time.monotonic() < end:
            answers = [self._key("here", rank) for rank in ranks]
            if all(self._store.check([key]) and self._store.get(key).decode() == asked for key in answers):
                return True
            time.sleep(0.05)
        return False

    def tell(self, verdict: str) -> None:
        """Why no rank can go on, to all; returns when they have heard, or after a while."""
        self.verdict = verdict
        try:
            self._publish_connections()
            self._store.set(self._key("verdict"), verdict)
            self._store.set(self._key("news"), "1")
            end = time.monotonic() + _HEARD_S
            while time.monotonic() < end:
                if all(self._store.check([self._key("heard", other)]) for other in self._others):
                    return
                time.sleep(0.02)
        except (RuntimeError, ValueError) as error:
            logger.debug("other ranks could not be told: %s", error)

    # --- a rank that raised ----------------------------------------------------------------------------

    def sign(self, forward: int, said: str) -> None:
        """This rank raised, and may or may not go on."""
        try:
            self._store.set(self._key("failed", self._number), json.dumps([forward, said]))
            self._store.set(self._key("news"), "1")
            self._signed = True
        except (RuntimeError, ValueError) as error:
            logger.debug("no sign of the failure could be left: %s", error)

    def withdraw(self) -> None:
        """It went on."""
        if self._signed:
            self._signed = False
            self._store.set(self._key("failed", self._number), json.dumps([-1, ""]))
            self._store.delete_key(self._key("news"))

    def explanation(self) -> str | None:
        """After an exchange failed: what is known of why."""
        if self.verdict is not None:
            return self.verdict
        try:
            if self._store.check([self._key("verdict")]):
                return str(self._store.get(self._key("verdict")).decode())
            return self._failure(None)
        except (RuntimeError, ValueError) as error:
            logger.debug("the group's store could not be asked: %s", error)
            return None

    def _failure(self, forward: int | None) -> str | None:
        for other in self._others:
            key = self._key("failed", other)
            if self._store.check([key]):
                at, said = json.loads(self._store.get(key).decode())
                if at == forward or (forward is None and said):
                    return str(said)
        return None

    # --- a rank that stands still ----------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _watch(self) -> None:
        last, since = -1, time.monotonic()
        told = ""
        while not self._stop.wait(_LOOK_S):
            if self._rank.progress != last:
                last, since = self._rank.progress, time.monotonic()
                continue
            still_s = time.monotonic() - since
            if still_s < _STILL_S or self.verdict is not None:
                continue
            try:
                told = self._look(still_s, told)
            except (RuntimeError, ValueError) as error:
                logger.debug("the group's store is gone, and paths are watched no more: %s", error)
                return

    def _look(self, still_s: float, told: str) -> str:
        if not self._store.check([self._key("news")]):
            return told
        if self._store.check([self._key("verdict")]):
            self._hear(self._store.get(self._key("verdict")).decode())
            return told
        place = self._rank.place()
        text = place.to_json()
        if text != told:
            self._store.set(self._key("at", self._number), text)
        if self._store.check([self._key("call")]):
            self._store.set(self._key("here", self._number), self._store.get(self._key("call")))
        waits = self._rank.busy and still_s > PATIENCE_S
        failure = self._failure(place.forward) if waits else None
        if failure is not None:
            self._store.set(self._key("verdict"), failure)
            self._hear(failure)
        return text

    def _hear(self, verdict: str) -> None:
        """Take it, and end what this rank waits in."""
        self.verdict = verdict
        self._publish_connections()
        self._store.set(self._key("heard", self._number), "1")
        _abort_groups()
        self._end_connections()

    def _publish_connections(self) -> None:
        pairs = list(pairs_of_ports(_port_of(self._store)))
        self._store.set(self._key("connections", self._number), json.dumps(pairs))

    def _end_connections(self) -> None:
        """gloo cannot be aborted: what connects it to the others is shut down, as they name theirs."""
        left = list(self._others)
        end = time.monotonic() + _HEARD_S
        while left and time.monotonic() < end:
            for other in list(left):
                key = self._key("connections", other)
                if self._store.check([key]):
                    theirs = json.loads(self._store.get(key).decode())
                    shut_down(pairs_of_ports(_port_of(self._store)), [(a, b) for a, b in theirs])
                    left.remove(other)
            time.sleep(0.02)


def _port_of(store: Any) -> int | None:
    """Where the store is reached; ``None`` for one that needs no connection."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    return port if isinstance(port, int) else None


def _abort_groups() -> None:
    """Collectives that wait for ranks that will not come end with an error, where the backend can: NCCL, not gloo."""
    for group in list(distributed.distributed_c10d._world.pg_map):
        try:
            group.abort()
        except (RuntimeError, AttributeError) as error:  # it ended already, or its backend cannot
            logger.debug("a process group could not be aborted: %s", error)


def _compare(mine: Place, theirs: Place | None, their_forward: int, ordered: bool) -> str:
    """``alike``, ``apart``, or ``open`` where the other has not come so far."""
    if theirs is None:
        return "alike" if their_forward > mine.forward else "open"  # too long ago to be remembered
    if theirs.kind != mine.kind:
        return "apart"
    if not ordered:
        if not theirs.path or theirs.path[-1] != END:
            return "open"
        return "alike" if theirs.path == mine.path else "apart"
    if any(a != b for a, b in zip(mine.path, theirs.path, strict=False)):
        return "apart"
    return "alike" if len(theirs.path) >= len(mine.path) else "open"
