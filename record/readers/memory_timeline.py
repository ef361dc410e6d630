"""Reader of ``torch.profiler``'s ``export_memory_timeline``: its JSON and its raw form, each plain or gzip.

``*.json`` is ``[times, sizes]``: µs, and for each a list of bytes by category with a leading zero.
``*.raw.json.gz`` is a list of ``[time, action, bytes, category]``: ns, -1 for tensors that were there
before; actions preexisting, create, increment_version and destroy; a version's rows come in pairs, of
which the first takes away what the second puts back under another category. Categories are indexes into
the profiler's own list. ``*.html`` holds a picture and no numbers.

Layout: torch/profiler/_memory_profiler.py, ``MemoryProfileTimeline``.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UnreadableInput
from ..model import Job, Rank, RankSource, Strings, Table
from ._pickles import read_bytes
from ._unstated import job_of_unstated

__all__ = ["FORMAT", "open_job", "open_paths", "recognizes"]

Array = npt.NDArray[Any]

FORMAT = "memory_timeline"

#: The profiler's categories in its order. What autograd holds for itself is short-lived; model inputs are neither
#: state nor activations.
_CATEGORIES = (
    "parameters",
    "optimizer_state",
    "inputs",
    "temporary",
    "activations",
    "gradients",
    "temporary",
    "unattributed",
)
_NEW, _DESTROYED = 2, 4
#: What a device's allocator rounds to, and the share of new tensors that must be so. Tensors from before, which are
#: not rounded, may go in the microsecond in which another comes.
_GRAIN_BYTES, _ROUNDED_SHARE = 512, 0.9

_HEAD_BYTES = 1 << 12
_NUMBER = rb"-?\d{1,20}"
_RAW = re.compile(
    rb"\s*\[\s*\[\s*(?:-1|\d{9,20})\s*,\s*[1-4]\s*,\s*" + _NUMBER + rb"\s*,\s*[0-7]\s*\]\s*[,\]]"
)
_SIZES = re.compile(
    rb"\s*\[\s*\[(?:\s*-?\d{1,20}(?:\.0)?\s*,)*\s*-?\d{1,20}(?:\.0)?\s*(?:\]\s*,\s*\[\s*\[\s*0\s*,|,?\s*-?\d*$)"
)
_PICTURE = re.compile(rb"<title>GPU Memory Timeline HTML</title>")


def recognizes(path: Path) -> bool:
    """Whether a file is an exported timeline, by its first numbers (of the picture, its title). Never raises."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head[:2] == b"\x1f\x8b":
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except (OSError, zlib.error):
        return False
    return bool(_RAW.match(head) or _SIZES.match(head) or _PICTURE.search(head))


def open_job(path: Path) -> Job:
    """The job of one timeline: one rank."""
    return open_paths([path], path)


def open_paths(paths: Sequence[Path], origin: Path) -> Job:
    """The ranks that these timelines make, numbered by their names, else by their order.

    Raises ``UnreadableInput`` for the picture (``.html``), which holds no numbers.
    """
    for path in paths:
        with path.open("rb") as file:
            if _PICTURE.search(file.read(_HEAD_BYTES)):
                raise UnreadableInput(
                    f"{path} is the picture of a memory timeline and holds no numbers; export it as "
                    '"timeline.raw.json.gz" (or take a snapshot: torch.cuda.memory._dump_snapshot)'
                )
    return job_of_unstated(paths, origin, FORMAT, read_rank, "memory timelines")


def read_rank(source: RankSource) -> Rank:
    """One timeline as table ``memory``. Raises ``UnreadableInput`` with one line."""
    data = read_bytes(source.path)
    rank = Rank(source.rank, str(source.path), FORMAT, Strings())
    if _RAW.match(data):
        end = data.rfind(b"]") + 1
        rows = _numbers(data[:end], np.int64, 4)
        if rows is None:
            raise _unreadable(source.path)
        if not data[:end].rstrip().endswith(b"]]") and data.rstrip()[-1:] != b"]":
            rank.note("truncated", "warning", f"the file is cut off; its {len(rows)} complete rows are used")
        _fill_from_events(rank, rows)
        return rank
    middle = data.find(b"]") + 1
    times, sizes = (
        _numbers(data[:middle], np.float64, 1),
        _numbers(data[middle:], np.float64, len(_CATEGORIES) + 1),
    )
    if times is None or sizes is None or len(times) != len(sizes) or not len(times):
        raise _unreadable(source.path)
    del data
    _fill_from_sizes(rank, times[:, 0], sizes)
    return rank


def _unreadable(path: Path) -> UnreadableInput:
    return UnreadableInput(
        f"{path} is no whole memory timeline (neither [times, sizes] nor a list of [time, action, bytes, category]); "
        "export it again with torch.profiler's export_memory_timeline"
    )


def _numbers(data: bytes, kind: type, columns: int) -> Array | None:
    """Rows of numbers of a list of lists (of a plain list where ``columns`` is 1), without an object for each; None
    where there is anything else."""
    rows = data.count(b"[") - 1 if columns > 1 else None
    plain = data.translate(None, b"[] \t\r\n").strip(b",")
    if plain.translate(None, b"0123456789-+.eE,"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is no number is a warning to numpy
            numbers: Array = np.fromstring(plain, dtype=kind, sep=",")
    except (ValueError, DeprecationWarning):
        return None
    if len(numbers) % columns or rows not in (None, len(numbers) // columns):
        return None
    return numbers.reshape(-1, columns)


# --- the raw form ------------------------------------------------------------------------------


def _fill_from_events(rank: Rank, rows: Array) -> None:
    time, action, amount, category = rows.T
    odd = (action < 1) | (action > _DESTROYED) | (category < 0) | (category >= len(_CATEGORIES))
    odd |= (np.abs(amount) > 1 << 50) | (time > 1 << 61)
    if odd.any():
        rank.note(
            "memory-odd-events", "warning", f"{int(odd.sum())} rows are of no known kind and were left out"
        )
        time, action, amount, category = (column[~odd] for column in (time, action, amount, category))
    before = time < 0
    first = int(time[~before].min()) if (~before).any() else 0
    order = np.argsort(np.where(before, np.iinfo(np.int64).min, time), kind="stable")
    time, amount, category, before = (
        c[order] for c in (np.where(before, first, time), amount, category, before)
    )
    codes = np.array([rank.strings.code(name) for name in _CATEGORIES])
    held, alloc, freed = (rank.strings.code(name) for name in ("held", "alloc", "free_requested"))
    created = (action[order] == _NEW) & ~before
    total = np.cumsum(amount)
    if total.min(initial=0) < 0:
        rank.note(
            "memory-release-unmatched",
            "warning",
            f"more is released than was allocated ({-int(total.min())} bytes); the total is raised by as much",
        )
        total = total - total.min()
    rank.memory = Table(
        "memory",
        {
            "time_ns": time,
            "bytes": amount,
            "category": codes[category],
            "device": np.full(len(time), _device_of(amount[created])),
            "allocated_bytes": total,
            "action": np.where(before, held, np.where(amount < 0, freed, alloc)),
        },
        rank.strings,
    )
    _note_device(rank)


def _device_of(created: Array) -> int:
    """Which device sizes in bytes of new tensors are of: 0, or -1 for the host. A device's allocator rounds all of
    them up to :data:`_GRAIN_BYTES` (c10/cuda/CUDACachingAllocator.cpp, ``kMinBlockSize``), the host's none."""
    rounded = (created % _GRAIN_BYTES == 0).mean() if len(created) else 1.0
    return 0 if rounded >= _ROUNDED_SHARE else -1


# --- [times, sizes] ----------------------------------------------------------------------------


def _fill_from_sizes(rank: Rank, time: Array, sizes: Array) -> None:
    """Changes of each category's bytes between the points of the curve."""
    level = sizes[:, 1:]
    good = np.isfinite(time) & np.isfinite(level).all(axis=1)
    good &= (np.abs(time) < 1 << 52) & (np.abs(level) < 1 << 50).all(axis=1)
    if not good.all():
        text = f"{int((~good).sum())} points are no possible numbers and were left out"
        rank.note("memory-odd-events", "warning", text)
    order = np.argsort(time[good], kind="stable")
    ns = time[good][order].astype(np.int64) * 1000
    change = np.diff(level[good][order].astype(np.int64), axis=0, prepend=0)
    jumps = change.sum(axis=1)
    # Within a point what is released comes first: the curve has no higher value between two points.
    point, category = np.nonzero(change)
    amount = change[point, category]
    inside = np.lexsort((category, amount > 0, point))
    point, category, amount = point[inside], category[inside], amount[inside]
    codes = np.array([rank.strings.code(name) for name in _CATEGORIES])
    held, alloc, freed = (rank.strings.code(name) for name in ("held", "alloc", "free_requested"))
    rank.memory = Table(
        "memory",
        {
            "time_ns": ns[point],
            "bytes": amount,
            "category": codes[category],
            "device": np.full(len(point), _device_of(jumps[1:][jumps[1:] > 0])),
            "allocated_bytes": np.cumsum(amount),
            "action": np.where(point == 0, held, np.where(amount < 0, freed, alloc)),
        },
        rank.strings,
    )
    rank.note(
        "memory-curve-only",
        "info",
        "the timeline holds sums by category: single tensors and owners are not known",
    )
    _note_device(rank)


def _note_device(rank: Rank) -> None:
    assert rank.memory is not None
    of_host = bool((rank.memory["device"] < 0).any())
    of = "the host, whose sizes are not rounded" if of_host else "a device that the file does not name"
    rank.note(
        "memory-tensors-only",
        "info",
        f"a memory timeline counts what the profiler saw of tensors, here on {of}: "
        "what the allocator reserved, and what was there before and never used, is not in it",
    )
