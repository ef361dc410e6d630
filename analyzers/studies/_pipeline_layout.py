"""Which ranks make a pipeline, in which order, and how many such pipelines there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ._pipeline_work import Work

__all__ = ["Layout", "lay_out"]


@dataclass(frozen=True, slots=True)
class Layout:
    """``replicas``: pipelines, each its ranks in the order of their first stages. ``places``: which rank of the
    pipeline each is, counted with those that are missing."""

    replicas: tuple[tuple[Work, ...], ...]
    places: tuple[int, ...]
    missing: tuple[int, ...]  # stages that no rank here holds
    chunks: int
    looped: bool
    inferred: bool

    def stage_of(self, rank: int) -> int:
        """The place of a rank whose stages the source does not number."""
        for replica in self.replicas:
            for place, work in zip(self.places, replica, strict=True):
                if work.rank == rank:
                    return place
        return -1


def lay_out(parts: Mapping[int, Work], corrections: Mapping[int, int]) -> Layout | str:
    """The pipelines; in words why there is none."""
    works = [parts[rank] for rank in sorted(parts)]
    if any(stage < 0 for work in works for stage in work.stages):
        return _inferred(works, corrections)
    by_stages: dict[tuple[int, ...], list[Work]] = defaultdict(list)
    for work in works:
        by_stages[work.stages].append(work)
    held = sorted(by_stages)
    count = min(len(found) for found in by_stages.values())
    replicas = tuple(tuple(by_stages[stages][number] for stages in held) for number in range(count))
    chunks = max(len(stages) for stages in held)
    every = sorted({stage for stages in held for stage in stages})
    ranks = -(-(every[-1] + 1) // chunks)
    missing = _missing(held, every, ranks, chunks)
    if len(held) + len(missing) < 2:
        return "one stage alone was found; a pipeline has two or more"
    looped = all(later - earlier == ranks for stages in held for earlier, later in pairwise(stages))
    return Layout(replicas, tuple(stages[0] for stages in held), missing, chunks, looped, inferred=False)


def _missing(
    held: Sequence[tuple[int, ...]], every: Sequence[int], ranks: int, chunks: int
) -> tuple[int, ...]:
    """Pipeline ranks without work here, by their first stage."""
    if chunks == 1:
        return tuple(stage for stage in range(ranks) if stage not in every)
    first = {stages[0] for stages in held}
    return tuple(stage for stage in range(ranks) if stage not in first)


def _inferred(works: Sequence[Work], corrections: Mapping[int, int]) -> Layout | str:
    """From messages where they name neighbours, else by who began first: a stage cannot begin before the one before."""
    if len(works) < 2:
        return "one rank alone was given and it does not say which stage it is; give those of all stages"
    by_rank = {work.rank: work for work in works}
    if all(work.source == "messages" for work in works):
        chains = []
        for head in (work for work in works if work.before is None or work.before not in by_rank):
            chain, seen = [head], {head.rank}
            while (following := chain[-1].after) in by_rank and following not in seen:
                chain.append(by_rank[following])
                seen.add(following)
            if len(chain) > 1:
                chains.append(tuple(chain))
        if not chains:
            return "the messages between the ranks that are here make no chain of stages"
        longest = max(len(chain) for chain in chains)
        whole = tuple(chain for chain in chains if len(chain) == longest)
        return Layout(whole, tuple(range(longest)), (), 1, looped=True, inferred=True)
    ordered = sorted(
        works, key=lambda work: (float(np.median(work.begin)) + corrections.get(work.rank, 0), work.rank)
    )
    return Layout((tuple(ordered),), tuple(range(len(ordered))), (), 1, looped=True, inferred=True)
