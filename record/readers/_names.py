"""Ranks as people write them into the names of files and folders.

    rank_of_name("rank3.json")                      3
    rank_of_name("nccl_trace_rank_12")              12
    rank_of_name("node1_rank5/trace.json")          5
    rank_of_name("snapshot_0.pickle")               0
    rank_of_name("host_21147.1698955063520869240.pt.trace.json")   None: a process and a time
    rank_of_name("tp0_pp1.json"), rank_of_name("node1_local_rank3.json")   None: a place in a layout

What the content of a file states always counts more; readers ask here only where it states nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePath

__all__ = ["MOST_RANKS", "natural", "rank_of_name", "ranks_of_names", "short_names"]

#: No job has more ranks. A damaged world size must not have a reader count to it.
MOST_RANKS = 1_000_000

#: Folders above a file whose names may tell files apart (``rank_3/profile/trace.json``).
_DEEPEST = 4

_LETTERS_BEFORE = r"(?<![a-zA-Z])"
_NUMBER = r"(\d{1,6})(?!\d)"  # no job has a million ranks; a longer number is a time or an identity

_RANK = re.compile(rf"(?:([a-zA-Z]+)[-_ ]?)?{_LETTERS_BEFORE}rank[-_ =]?{_NUMBER}", re.IGNORECASE)
_MEMBER = re.compile(rf"{_LETTERS_BEFORE}(?:worker|trainer|process|proc|r)[-_]?{_NUMBER}", re.IGNORECASE)
_LOCAL = re.compile(rf"{_LETTERS_BEFORE}(?:gpu|device|cuda|local[-_]?rank)[-_]?{_NUMBER}", re.IGNORECASE)
_NODE = re.compile(rf"{_LETTERS_BEFORE}(?:node|host|machine|nodeid)[-_]?{_NUMBER}", re.IGNORECASE)
#: ``tp0``, ``pp_rank_1``: a place along one dimension of a layout.
_DIMENSION = re.compile(
    rf"{_LETTERS_BEFORE}(tp|pp|dp|ep|cp|sp|mp|fsdp|stage)(?:[-_]?rank)?[-_]?{_NUMBER}", re.IGNORECASE
)
#: The last thing before the endings: ``trace_3.json.gz``, ``kineto-3.pt.trace.json``, ``dump_3``.
_LAST = re.compile(r"(?:^|([a-zA-Z]*)[-_.])(\d{1,6})(?:\.[a-zA-Z]\w{0,9})*$")
#: The first thing: ``3_trace.json``; an address (``10-0-0-3``) or a date (``2024-05``) is none.
_FIRST = re.compile(r"^(\d{1,6})[-_.](?!\d)")

#: An address or a date, whose last part is no rank.
_FIGURES = re.compile(
    r"(?<!\d)(?:\d{1,3}[-.]\d{1,3}[-.]\d{1,3}[-.]\d{1,3}|(?:19|20)\d\d[-_.]\d\d[-_.]\d\d)(?!\d)"
)

_OTHER_RANKS = frozenset({"local", "node", "group", "tp", "pp", "dp", "ep", "cp", "sp", "mp", "fsdp"})
#: What counts something else than ranks, when a bare number follows.
_COUNTED = frozenset(
    {
        *("step", "steps", "iter", "iteration", "it", "epoch", "window", "attempt", "version", "v", "run", "job", "part"),
        *("pid", "port", "time", "seed", "batch", "cycle", "shard", "of", "world", "size", "node", "host", "seq", "layer"),
        *("jobid", "trial", "phase", "try", "report"),
    }
)  # fmt: skip


def rank_of_name(name: str, *, certain: bool = False) -> int | None:
    """The rank that a file's name states, else its folder's; ``None`` where neither does.

    ``certain``: the word ``rank`` must stand before it. Of a file that lies alone, a bare number may be
    anything.
    """
    parts = [part for part in PurePath(name).parts if part not in ("/", "..")]
    for part in reversed(parts[-2:]):
        for pattern in _PATTERNS[: 1 if certain else None]:
            rank = pattern(part)
            if rank is not None:
                return rank
    return None


def ranks_of_names(names: Sequence[str]) -> list[int] | None:
    """A rank for each name, from the most certain part that tells all of them apart: the file's, else a
    folder's up to four levels above. ``None`` where none does."""
    parts = [PurePath(name).parts for name in names]
    for pattern in _PATTERNS:
        for level in range(1, _DEEPEST + 1):
            found = [pattern(part[-level]) if len(part) >= level else None for part in parts]
            ranks = [rank for rank in found if rank is not None]
            if len(ranks) == len(names) == len(set(ranks)):
                return ranks
    return None


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which rank10 comes after rank9; numbers of any length, other scripts' digits are text."""
    parts = [part for part in re.split(r"([0-9]+)", name) if part]
    return [
        (0, len(part.lstrip("0")), part.lstrip("0")) if part.isascii() and part.isdecimal() else (1, 0, part)
        for part in parts
    ]


# --- the ways of writing it, most certain first -------------------------------------------------


def short_names(names: Sequence[str], among: Sequence[str], most: int = 4) -> str:
    """``rank0.json, rank1.json and 6 more``: without folders, but where two of ``among`` would be called alike."""
    names = sorted(names, key=natural)
    times = Counter(_parts(name, 1) for name in among)
    shown = [_parts(name, 1 if times[_parts(name, 1)] < 2 else 2) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _parts(name: str, count: int) -> str:
    """The last parts of a path."""
    return "/".join(name.replace("\\", "/").split("/")[-count:])


def _stated(part: str) -> int | None:
    """``rank3``: a global rank, said to be one where several ranks stand in the name."""
    found = [(match[1] or "", int(match[2])) for match in _RANK.finditer(part)]
    ranks = [(word.lower(), rank) for word, rank in found if word.lower() not in _OTHER_RANKS]
    for word, rank in ranks:
        if word in ("global", "world"):
            return rank
    return ranks[0][1] if ranks else None


def _member(part: str) -> int | None:
    """``worker3``, ``r3``; a process of five digits is its number in the system."""
    match = _MEMBER.search(part)
    return None if match is None or _an_identity(match[1]) else int(match[1])


def _local(part: str) -> int | None:
    """``gpu3``, ``local_rank3``: the rank where there is one node."""
    match = _LOCAL.search(part)
    return None if match is None or _NODE.search(part) else int(match[1])


def _along_one_dimension(part: str) -> int | None:
    """``pp_rank_3`` alone; with a second dimension beside it the rank depends on the layout."""
    found = _DIMENSION.findall(part)
    return int(found[0][1]) if len(found) == 1 and not _NODE.search(part) else None


def _last(part: str) -> int | None:
    if _names_a_place(part):
        return None
    match = _LAST.search(part)
    if match is None or (match[1] or "").lower() in _COUNTED or _an_identity(match[2]):
        return None
    return int(match[2])


def _first(part: str) -> int | None:
    match = _FIRST.match(part)
    return None if match is None or _names_a_place(part) or _an_identity(match[1]) else int(match[1])


def _names_a_place(part: str) -> bool:
    """Whether numbers of the name are a node's, a layout's, an address or a date: a bare one is likely one too."""
    return bool(
        _DIMENSION.search(part) or _FIGURES.search(part) or (_LOCAL.search(part) and _NODE.search(part))
    )


def _an_identity(digits: str) -> bool:
    """A process number rather than a rank: five digits or more that nobody padded with zeros."""
    return len(digits) > 4 and not digits.startswith("0")


_PATTERNS: tuple[Callable[[str], int | None], ...] = (
    _stated,
    _member,
    _local,
    _along_one_dimension,
    _last,
    _first,
)
