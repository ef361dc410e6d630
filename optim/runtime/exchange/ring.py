"""Ring all-reduce: reduce-scatter, then all-gather, each of n-1 steps round a ring (Patarasuk and Yuan, JPDC 69, 2009).

Every rank sends S/n bytes a step and 2(n-1)/n · S in all, which no all-reduce can do with less; the price is 2(n-1)
latencies. The sum of a chunk is formed along the ring in one order and handed round complete: the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trine.optim.runtime.exchange.schedule import Message, Plan, Step, merged, part_bounds

__all__ = ["all_gather_steps", "reduce_scatter_steps", "ring_plan", "ring_steps"]

#: Place in the ring → rank in the process group.
Peers = Callable[[int], int]


def ring_plan(rank: int, ranks: int) -> Plan:
    """This rank's plan, over ``ranks`` chunks."""
    return Plan(ranks, merged(ring_steps(rank, ranks, 1, lambda place: place)))


def ring_steps(
    place: int, places: int, chunks_in_part: int, peer: Peers, first: int = 0, number: int = 0
) -> Iterator[Step]:
    """Both halves over ``places`` parts of ``chunks_in_part`` chunks, from chunk ``first`` and step ``number`` on."""
    yield from reduce_scatter_steps(place, places, chunks_in_part, peer, first, number)
    yield from all_gather_steps(place, places, chunks_in_part, peer, first, number + places - 1)


def reduce_scatter_steps(
    place: int, places: int, chunks_in_part: int, peer: Peers, first: int = 0, number: int = 0
) -> Iterator[Step]:
    """places - 1 steps; afterwards the part of this place's own number is complete here."""
    for step in range(places - 1):
        out = part_bounds((place - step - 1) % places, chunks_in_part, first)
        into = part_bounds((place - step - 2) % places, chunks_in_part, first)
        yield Step(
            number + step,
            sends=(Message(peer((place + 1) % places), *out),),
            adds=(Message(peer((place - 1) % places), *into),),
        )


def all_gather_steps(
    place: int, places: int, chunks_in_part: int, peer: Peers, first: int = 0, number: int = 0
) -> Iterator[Step]:
    """places - 1 steps; each place hands on its own part, then what it received."""
    for step in range(places - 1):
        out = part_bounds((place - step) % places, chunks_in_part, first)
        into = part_bounds((place - step - 1) % places, chunks_in_part, first)
        yield Step(
            number + step,
            sends=(Message(peer((place + 1) % places), *out),),
            copies=(Message(peer((place - 1) % places), *into),),
        )
