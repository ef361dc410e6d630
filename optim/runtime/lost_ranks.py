"""A rank that was killed, crashed or is stuck: what the others say instead of their backend's socket error.

A backend knows an address or nothing. The group's store, which every rank can reach, tells more: each rank that fails
leaves a sign there, and those that leave none are the ones to look at.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
from torch import distributed

from trine.record.errors import TrainingError

__all__ = ["PATIENCE_S", "announce", "explained", "has_failed", "is_of_a_group"]

logger = logging.getLogger("trine")

#: How long ranks that failed wait for each other's signs.
PATIENCE_S = 10.0

_SIGN = "trine/lost_ranks"
#: Where a rank says why it ends, when others wait for its messages.
_LAST_WORDS = "trine/last_words"

#: A tag that no message has.
_NEVER_SENT = 31_977

#: What gloo, NCCL and the store say when a peer is gone or late. gloo raises plain RuntimeErrors.
_WORDS = (
    "gloo/transport",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out waiting",
    "ncclremoteerror",
    "ncclsystemerror",
    "nccl communicator was aborted",
    "collective operation timeout",
)


def is_of_a_group(error: BaseException) -> bool:
    """Whether an exception says that a peer of a process group is gone or late, or the group itself."""
    if isinstance(error, distributed.DistError):
        return True
    text = str(error).lower()
    if isinstance(error, ValueError):  # what PyTorch says of a group that the program has destroyed
        return text.startswith("group ") and "is not registered" in text
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)


def explained(
    error: BaseException, rank: int, ranks: int, step: int, patience_s: float = PATIENCE_S
) -> TrainingError | None:
    """What to raise in place of a failed exchange: which ranks gave no sign. ``None`` for any other error.

    Waits at most ``patience_s`` for the signs of the other ranks. The process group is of no use afterwards.
    """
    if ranks == 1 or not distributed.is_initialized() or not is_of_a_group(error):
        return None
    _let_peers_know()
    silent, store_lost = _silent(rank, ranks, patience_s)
    words = _last_words(ranks)
    said = " ".join(str(error).partition("\n")[0].split())
    cut = said.find(". This is typically")
    said = said[:cut] if cut > 0 else said
    if store_lost:
        which = "the group's store does not answer, so the process that keeps it (rank 0 or the launcher) has ended"
    elif words:
        which = "; ".join(f"rank {other} failed by itself: {line}" for other, line in words.items())
    elif not silent:
        which = "every rank is alive and failed alike, so look at the network between them"
    else:
        named = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        which = f"{named} gave no sign within {patience_s:g} s: killed, crashed, or busy elsewhere"
    return TrainingError(
        f"optimizer step {step}: rank {rank} lost its group; {which}. Look at the end of that log, and start again from a "
        f"checkpoint (the {distributed.get_backend()} backend said: {said})"
    )


def announce(error: BaseException, rank: int) -> None:
    """This rank fails by itself, in the midst of messages that others wait for: they are told why, and fail now.

    The process groups are of no use afterwards. Does nothing for errors of the groups, which :func:`explained` is for.
    """
    if not distributed.is_initialized() or is_of_a_group(error):
        return
    said = " ".join(str(error).split()) or type(error).__name__
    try:
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"{_LAST_WORDS}/{rank}", said[:1000])
        store.set(f"{_SIGN}/{rank}", "1")
    except (RuntimeError, ValueError) as lost:
        logger.debug("the group's store could not be told: %s", lost)
    _let_peers_know()


def has_failed(rank: int) -> bool:
    """Whether that rank left a sign. Raises what the group's store does where it does not answer."""
    store = distributed.distributed_c10d._get_default_store()
    return any(store.check([f"{kind}/{rank}"]) for kind in (_LAST_WORDS, _SIGN))


def _last_words(ranks: int) -> dict[int, str]:
    """What ranks said that failed by themselves."""
    try:
        store = distributed.distributed_c10d._get_default_store()
        keys = {rank: f"{_LAST_WORDS}/{rank}" for rank in range(ranks)}
        return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    except (RuntimeError, ValueError) as error:
        logger.debug("the group's store could not be asked: %s", error)
        return {}


def _let_peers_know() -> None:
    """Close this rank's connections, so that ranks that wait for it fail now and not at their timeout.

    Of all groups: stages of a pipeline have one of their own. gloo alone: NCCL's watchdog does so itself.
    """
    for group in list(distributed.distributed_c10d._world.pg_map):
        if distributed.get_backend(group) != "gloo":
            continue
        for peer in distributed.get_process_group_ranks(group):
            if peer != distributed.get_rank():
                _close(group, peer)


def _close(group: distributed.ProcessGroup, peer: int) -> None:
    """A message that does not come in time closes gloo's connection, on both sides; ``abort`` leaves idle ones open."""
    try:
        waited = distributed.irecv(torch.empty(1), peer, group=group, tag=_NEVER_SENT)
        if waited is not None:
            waited.wait(timedelta(milliseconds=1))
    except RuntimeError as error:  # what it is for; or the connection was closed already
        logger.debug("the connection to rank %d was closed: %s", peer, error)


def _silent(rank: int, ranks: int, patience_s: float) -> tuple[list[int], bool]:
    """Ranks that left no sign in time, and whether the store was lost."""
    try:
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"{_SIGN}/{rank}", "1")
        end = time.monotonic() + patience_s
        silent = [other for other in range(ranks) if other != rank]
        while silent and time.monotonic() < end:
            silent = [other for other in silent if not store.check([f"{_SIGN}/{other}"])]
            if silent:
                time.sleep(0.05)
    except (RuntimeError, ValueError) as error:
        logger.debug("the group's store could not be asked: %s", error)
        return [], True
    return silent, False
