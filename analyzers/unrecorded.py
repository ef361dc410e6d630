"""Whether a job ran on a device whose work its source does not hold: then the host's operators say little.

On an accelerator the host only launches. Where the launched work was not recorded, or the file breaks off before it,
a host that seems idle may be waiting for a device that is busy, and nobody can tell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trine.record.kernels import is_launch
from trine.record.model import MISSING, Quality, Rank, Table

from .breakdown import has_device_work
from .idle import waiting_backward

__all__ = ["CUT", "UNRECORDED", "about_unrecorded_device", "is_unrecorded"]

#: The note of a rank whose device's work is missing.
UNRECORDED = "device-not-recorded"
#: Notes of readers that say that a file is not whole.
CUT = frozenset({"truncated-file", "damaged-file"})
#: In a file that breaks off: launching calls without their work, as a share, from which on the device's work is not
#: all there.
LOST_SHARE = 0.1
#: Back ends of torch.distributed that move data between devices alone.
_DEVICE_BACKENDS = frozenset({"nccl", "rccl", "xccl", "ccl", "hccl", "mccl", "cncl"})

#: What collectives of these are called on the host.
_DEVICE_SPANS = tuple(f"{backend}:" for backend in sorted(_DEVICE_BACKENDS))

_CURE = "record with torch.profiler's activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] (XPU, MTIA on theirs)"


def about_unrecorded_device(rank: Rank, quality: Sequence[Quality]) -> Quality | None:
    """The note to add where a trace lacks its device's work; None where it is there or there was no device.

    ``quality`` are the rank's notes so far. A native record's phases tell without a trace, so it has no such note.
    """
    if rank.format == "trine" or rank.host is None or any(note.id == UNRECORDED for note in quality):
        return None
    cut = any(note.id in CUT for note in quality)
    if has_device_work(rank):
        made, lost = _launches(rank.host, rank.device) if cut else (0, 0)
        if not lost or lost < LOST_SHARE * made:
            return None
        message = (
            f"the file breaks off, and {lost:,} of the {made:,} calls that launched work have none in it; copy the whole "
            "file from where it was written"
        )
    elif cut and not (_of_processors(rank) and _device_named(rank) is None):
        message = (
            "the file breaks off before any work of a device; copy the whole file from where it was written"
        )
    elif (named := _device_named(rank)) is not None:
        message = f"{named}, but none of the device's work was recorded; {_CURE}"
    else:
        return None
    return Quality(UNRECORDED, "warning", message, rank.rank)


def is_unrecorded(quality: Sequence[Quality]) -> str | None:
    """What the note says, where a rank's notes have it."""
    return next((note.message for note in quality if note.id == UNRECORDED), None)


def _of_processors(rank: Rank) -> bool:
    """Whether the job's ranks talk through a back end of processors alone."""
    return rank.metadata.get("backend") in ("gloo", "mpi") and not rank.devices


def _device_named(rank: Rank) -> str | None:
    """What shows that the job ran on a device."""
    name = next((device.name for device in rank.devices if device.name), None)
    if name is not None:
        return f"the job's device is named ({name})"
    backend = rank.metadata.get("backend")
    if isinstance(backend, str) and backend.lower() in _DEVICE_BACKENDS:
        return f"the job's ranks talk through {backend}"
    assert rank.host is not None
    if any(name.startswith(_DEVICE_SPANS) for name in rank.host.strings.values):
        return "the job's ranks talk through a device's back end"
    made, _ = _launches(rank.host, None)
    if made:
        return f"{made:,} calls launched work on a device"
    if len(waiting_backward(rank.host).start):
        # Without a device autograd runs on the thread that calls it.
        return "the backward pass ran on another thread, as only a device's does"
    return None


def _launches(host: Table, device: Table | None) -> tuple[int, int]:
    """How many calls put work on a device, and how many of these have no work."""
    codes = np.unique(host["name"][host["correlation"] != MISSING])
    names = host.strings.values
    launching = [code for code in codes.tolist() if code >= 0 and is_launch(names[code])]
    rows = np.flatnonzero(np.isin(host["name"], launching) & (host["correlation"] != MISSING))
    found = np.zeros(0, dtype=np.int64) if device is None else device["correlation"]
    return len(rows), int((~np.isin(host["correlation"][rows], found)).sum())
