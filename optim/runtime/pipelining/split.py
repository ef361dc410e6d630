"""Where to cut a chain of blocks: into stages of equal cost. Pure arithmetic.

One stage a rank: the largest stage is as small as it can be, exactly, by dynamic programming over contiguous parts (the
linear partition problem; Kernighan 1971). Several stages a rank: what counts is what a rank holds together. Where there
are few enough ways to cut, all are tried; else the cuts of the largest stage are moved while the largest rank falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

__all__ = ["equal_numbers", "largest_rank", "partition", "rank_of_stage", "stage_costs", "stages_of_rank"]

#: Ways to cut that are all tried.
MOST_WAYS = 20_000


def stages_of_rank(place: int, ranks: int, chunks: int, turned: bool) -> tuple[int, ...]:
    """The stages of a pipeline's rank: one after the other round the ranks, or (``turned``) there and back, as a V."""
    if not turned:
        return tuple(place + chunk * ranks for chunk in range(chunks))
    return tuple(chunk * ranks + (place if chunk % 2 == 0 else ranks - 1 - place) for chunk in range(chunks))


def rank_of_stage(stage: int, ranks: int, turned: bool) -> int:
    """The inverse of :func:`stages_of_rank`."""
    chunk, place = divmod(stage, ranks)
    return ranks - 1 - place if turned and chunk % 2 else place


def equal_numbers(blocks: int, stages: int) -> tuple[int, ...]:
    """First block of each stage, as equal in number as can be; the first stages hold one more."""
    size, more = divmod(blocks, stages)
    return tuple(stage * size + min(stage, more) for stage in range(stages))


def stage_costs(
    costs: Sequence[float], begins: Sequence[int], before: float, behind: float
) -> tuple[float, ...]:
    """What each stage costs. ``before`` and ``behind``: of what the first and the last stage hold beside blocks."""
    ends = [*begins[1:], len(costs)]
    sums = [math.fsum(costs[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    sums[0] += before
    sums[-1] += behind
    return tuple(sums)


def largest_rank(sums: Sequence[float], ranks: int, turned: bool) -> float:
    """The cost of the rank that holds most."""
    held = [0.0] * ranks
    for stage, cost in enumerate(sums):
        held[rank_of_stage(stage, ranks, turned)] += cost
    return max(held)


def partition(
    costs: Sequence[float],
    ranks: int,
    chunks: int = 1,
    *,
    turned: bool = False,
    before: float = 0.0,
    behind: float = 0.0,
) -> tuple[int, ...]:
    """The first block of each of ranks × chunks stages; each stage holds one block or more.

    ``costs`` of blocks, ``before`` and ``behind`` in one unit, none below nought. Raises ``ValueError`` for fewer blocks
    than stages.
    """
    stages = ranks * chunks
    if len(costs) < stages:
        raise ValueError(f"{len(costs)} blocks cannot make {stages} stages")
    begins = _smallest_largest(costs, stages, before, behind)
    if chunks == 1:
        return begins

    def measure(cut: Sequence[int]) -> tuple[float, float]:
        sums = stage_costs(costs, cut, before, behind)
        return largest_rank(sums, ranks, turned), max(sums)

    if math.comb(len(costs) - 1, stages - 1) <= MOST_WAYS:
        return min(((0, *cut) for cut in combinations(range(1, len(costs)), stages - 1)), key=measure)
    return _descended(begins, len(costs), measure)


def _smallest_largest(costs: Sequence[float], stages: int, before: float, behind: float) -> tuple[int, ...]:
    """Contiguous parts whose largest sum is smallest. O(stages × blocks²)."""
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[end]: the smallest largest part of costs[:end] in so many stages, and where the last of them begins.
    best = [(before + sums[end], 0) for end in range(count + 1)]
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        extra = behind if stage == stages - 1 else 0.0
        row = [(math.inf, 0)] * (count + 1)
        for end in range(stage + 1, count + 1):
            row[end] = min(
                (max(best[begin][0], sums[end] - sums[begin] + extra), begin) for begin in range(stage, end)
            )
        cuts.append([begin for _, begin in row])
        best = row
    begins = [count]
    for row_cuts in reversed(cuts):
        begins.append(row_cuts[begins[-1]])
    return (0, *reversed(begins[1:]))


def _descended(
    begins: tuple[int, ...], count: int, measure: Callable[[Sequence[int]], tuple[float, float]]
) -> tuple[int, ...]:
    """Move one or two cuts by one block while that helps."""
    best, least = begins, measure(begins)
    moved = True
    while moved:
        moved = False
        for cut in _neighbours(best, count):
            found = measure(cut)
            if found < least:
                best, least, moved = cut, found, True
                break
    return best


def _neighbours(begins: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    found = []
    places = range(1, len(begins))
    for first in places:
        for second in places:
            for one in (-1, 1):
                for other in (-1, 0, 1):
                    cut = list(begins)
                    cut[first] += one
                    cut[second] += other
                    rising = all(a < b for a, b in pairwise(cut))
                    if rising and cut[-1] < count:
                        found.append(tuple(cut))
    return found
