"""Pipelines that run on paper: orders of known schedules, timed by what each piece of work waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trine.analyzers import analyze
from trine.analyzers.results import Analysis
from trine.record.model import Job, Rank, RankSource, Strings, Table

#: (direction, stage, micro-batch)
Action = tuple[str, int, int]
Timed = tuple[str, int, int, int, int]

FORWARD, BACKWARD, INPUT, WEIGHT = "forward", "backward", "backward_input", "backward_weight"
LENGTHS = {FORWARD: 1_000_000, BACKWARD: 2_000_000, INPUT: 1_000_000, WEIGHT: 1_000_000}


def gpipe(rank: int, p: int, m: int) -> list[Action]:
    return [(kind, rank, index) for kind in (FORWARD, BACKWARD) for index in range(m)]


def one_by_one(rank: int, p: int, m: int) -> list[Action]:
    lead = min(p - rank, m)
    order = [(FORWARD, rank, index) for index in range(lead)]
    for index in range(m):
        order.append((BACKWARD, rank, index))
        if lead + index < m:
            order.append((FORWARD, rank, lead + index))
    return order


def zero_bubble_1(rank: int, p: int, m: int) -> list[Action]:
    """ZB-H1's order: as many forwards ahead as 1F1B, and weights' gradients where the input's are late."""
    order: list[Action] = []
    for kind, stage, index in one_by_one(rank, p, m):
        order.append((INPUT if kind == BACKWARD else kind, stage, index))
        if kind == BACKWARD and index >= rank:
            order.append((WEIGHT, stage, index - rank))
    return order + [(WEIGHT, rank, index) for index in range(m - rank, m)]


def interleaved(rank: int, p: int, m: int, v: int = 2) -> list[Action]:
    """Megatron-LM's: micro-batches in groups of p, a chunk at a time; m is a multiple of p."""

    def virtual(place: int, back: bool) -> tuple[int, int]:
        chunk = (place % (p * v)) // p
        return (v - 1 - chunk if back else chunk) * p + rank, place // (p * v) * p + place % p

    total = m * v
    lead = min(2 * (p - rank - 1) + (v - 1) * p, total)
    order = [(FORWARD, *virtual(place, False)) for place in range(lead)]
    for place in range(total):
        if lead + place < total:
            order.append((FORWARD, *virtual(lead + place, False)))
        order.append((BACKWARD, *virtual(place, True)))
    return order


def breadth_first(rank: int, p: int, m: int, v: int = 2) -> list[Action]:
    ahead = [(FORWARD, chunk * p + rank, index) for chunk in range(v) for index in range(m)]
    return ahead + [(BACKWARD, chunk * p + rank, index) for chunk in reversed(range(v)) for index in range(m)]


def timed(
    orders: Sequence[Sequence[Action]], stages: int, length: Callable[[Action], int] = lambda a: LENGTHS[a[0]]
) -> list[list[Timed]]:
    """When each action of each rank began and ended: at once after the rank's last and what it depends on."""
    done: dict[Action, int] = {}
    places = [0] * len(orders)
    now = [0] * len(orders)
    found: list[list[Timed]] = [[] for _ in orders]
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                needs = _needs(action, stages)
                known = [next((done[a] for a in options if a in done), None) for options in needs]
                if any(time is None for time in known):
                    break
                begin = max([now[rank], *(time for time in known if time is not None)])
                now[rank] = done[action] = begin + length(action)
                found[rank].append((*action, begin, now[rank]))
                places[rank] += 1
                moved = True
        assert moved, "the order of these actions is a deadlock"
    return found


def _needs(action: Action, stages: int) -> list[list[Action]]:
    """Each a choice of actions of which one must be done."""
    kind, stage, index = action
    if kind == FORWARD:
        return [[(FORWARD, stage - 1, index)]] if stage else []
    if kind == WEIGHT:
        return [[(INPUT, stage, index)]]
    needs: list[list[Action]] = [[(FORWARD, stage, index)]]
    if stage < stages - 1:
        needs.append([(BACKWARD, stage + 1, index), (INPUT, stage + 1, index)])
    return needs


def rank_with(
    rank: int, iterations: Mapping[int, Sequence[Timed]], begins: Mapping[int, int], world: int
) -> Rank:
    """A rank whose table of micro-batches holds these."""
    strings = Strings()
    rows = [(step, begins[step], *work) for step, works in iterations.items() for work in works]
    table = Table(
        "microbatches",
        {
            "step": [row[0] for row in rows],
            "direction": [strings.code(row[2]) for row in rows],
            "stage": [row[3] for row in rows],
            "index": [row[4] for row in rows],
            "start_ns": [row[1] + row[5] for row in rows],
            "end_ns": [row[1] + row[6] for row in rows],
        },
        strings,
    )
    ends = {step: begins[step] + max(work[4] for work in works) for step, works in iterations.items()}
    steps = Table(
        "steps",
        {"index": list(ends), "start_ns": [begins[step] for step in ends], "end_ns": list(ends.values())},
        strings,
    )
    return Rank(
        rank, "on paper", "pipeline_schedule", strings, steps=steps, microbatches=table, world_size=world
    )


def job_of(ranks: Sequence[Rank]) -> Job:
    by_rank = {rank.rank: rank for rank in ranks}
    sources = tuple(
        RankSource(rank, Path("paper"), lambda source: by_rank[source.rank]) for rank in sorted(by_rank)
    )
    return Job(Path("paper"), ranks[0].format, sources, None)


def pipeline(
    order: Callable[[int, int, int], list[Action]],
    p: int,
    m: int,
    *,
    chunks: int = 1,
    iterations: int = 5,
    length: Callable[[Action], int] = lambda action: LENGTHS[action[0]],
    first: int = 1,
    offsets: Mapping[int, int] | None = None,
) -> list[Rank]:
    """Ranks that ran a schedule several times alike; the first iteration ``first`` times as slow."""
    found = timed([order(rank, p, m) for rank in range(p)], p * chunks, length)
    slow = timed([order(rank, p, m) for rank in range(p)], p * chunks, lambda action: first * length(action))
    span = max(work[4] for works in slow for work in works) + 1_000_000
    begins = {step: span * step for step in range(1, iterations + 1)}
    return [
        rank_with(
            rank,
            {
                step: [
                    (
                        *work[:3],
                        work[3] + (offsets or {}).get(rank, 0),
                        work[4] + (offsets or {}).get(rank, 0),
                    )
                    for work in (slow if step == 1 else found)[rank]
                ]
                for step in begins
            },
            begins,
            p,
        )
        for rank in range(p)
    ]


def analysed(ranks: Sequence[Rank]) -> Analysis:
    return analyze(job_of(ranks))
