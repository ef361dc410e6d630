"""Which schedule a pipeline ran, told from the order of its work, and the bubble that it would have at best.

Ideals, with p stages, m micro-batches, v chunks a stage, and F, B, W the times of a forward, of the gradient of
the input and of that of the weights:

    GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019)              (p − 1) / (m + p − 1)
    interleaved 1F1B (Narayanan et al. 2021), breadth-first (Lamy-Poirier 2023)   (p − 1) / (v m + p − 1)
    ZB-H1 (Qi et al. 2023)     (p − 1)(F + B − W) / (m (F + B + W) + (p − 1)(F + B − W))
    ZB-H2 (the same)           (p − 1)(F + B − 2W) / (m (F + B + W) + (p − 1)(F + B − 2W))
    ZB-V (Qi et al. 2024)      0, where F, B and W take alike
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Action", "Ideal", "ideal_bubble", "recognise"]

#: (direction code of ``_pipeline_work.DIRECTIONS``, chunk, micro-batch), in the order in which they began.
Action = tuple[int, int, int]

_FORWARD = 0
_WHOLE = 1
_SPLIT = (2, 3)


@dataclass(frozen=True, slots=True)
class Ideal:
    """The schedule's bubble ratio at best, and the formula with its numbers in it."""

    ratio: float
    formula: str


def recognise(
    orders: Sequence[Sequence[Action]], places: Sequence[int], stages: int, looped: bool
) -> str | None:
    """The schedule's name as torch.distributed.pipelining has it (ZB-H1 and ZB-H2 as their paper has it).

    ``orders``: of some pipeline ranks what each did in one iteration; ``places``: which of the ``stages`` ranks
    they are; ``looped``: chunk c of rank r is stage c × ranks + r (else the chunks turn back, as a V). None
    where no known schedule has this order.
    """
    if not orders or stages < 2 or not all(orders):
        return None
    chunks = {len({chunk for _, chunk, _ in order}) for order in orders}
    if len(chunks) != 1:
        return None
    v = chunks.pop()
    split = any(direction in _SPLIT for order in orders for direction, _, _ in order)
    pairs = list(zip(orders, places, strict=True))
    if v == 1:
        if not split and all(_all_forwards_first(order) for order in orders):
            return "GPipe"
        if not split and all(_one_by_one(order, stages - place) for order, place in pairs):
            return "1F1B"
        if split and all(_leads(order) == min(stages - place, _count(order)) for order, place in pairs):
            return "ZB-H1"
        if split and all(
            _leads(order) == min(2 * (stages - place) - 1, _count(order)) for order, place in pairs
        ):
            return "ZB-H2"
        return None
    if split and not looped and any(direction == _WHOLE for order in orders for direction, _, _ in order):
        return "DualPipeV"  # splits backwards at its ends alone
    if split:
        return "InterleavedZeroBubble" if looped else "ZBVZeroBubble"
    if not looped:
        return None
    if all(_all_forwards_first(order) for order in orders):
        return "LoopedBFS"
    if all(_interleaved(order, stages, place, v) for order, place in pairs):
        return "Interleaved1F1B"
    return None


def _count(order: Sequence[Action]) -> int:
    return sum(direction == _FORWARD for direction, _, _ in order)


def _leads(order: Sequence[Action]) -> int:
    """Forwards before the first backward."""
    return next((place for place, (direction, _, _) in enumerate(order) if direction != _FORWARD), len(order))


def _all_forwards_first(order: Sequence[Action]) -> bool:
    """Fill, then drain, of more than one micro-batch."""
    count = _count(order)
    return count > 1 and _leads(order) == count


def _one_by_one(order: Sequence[Action], depth: int) -> bool:
    """``depth`` forwards (all, where there are fewer), then backward and forward in turns, then backwards."""
    count = _count(order)
    lead = min(depth, count)
    expected = [True] * lead
    for _ in range(count - lead):
        expected += [False, True]
    expected += [False] * lead
    return [direction == _FORWARD for direction, _, _ in order] == expected


def _interleaved(order: Sequence[Action], stages: int, place: int, v: int) -> bool:
    """The warm-up of Megatron-LM's interleaved schedule, and turns after it. One forward more or less is let pass."""
    lead = _leads(order)
    warm_up = min(2 * (stages - place - 1) + (v - 1) * stages + 1, _count(order))
    if abs(lead - warm_up) > 1:
        return False
    steady = [direction == _FORWARD for direction, _, _ in order[lead : len(order) - lead]]
    return all(one != other for one, other in pairwise(steady))


def ideal_bubble(
    schedule: str | None, stages: int, microbatches: int, chunks: int, times: tuple[float, float, float]
) -> Ideal | None:
    """What the schedule would leave idle with even stages; None for a schedule without a formula.

    ``times``: F, B and W in ns (B the input's gradient where the backward is split, else all of it; W then 0).
    """
    p, m, v = stages, microbatches, chunks
    if m < 1 or p < 1:
        return None
    if schedule in ("GPipe", "1F1B"):
        return Ideal((p - 1) / (m + p - 1), f"({p} − 1) / ({m} + {p} − 1)")
    if schedule in ("Interleaved1F1B", "LoopedBFS"):
        return Ideal((p - 1) / (v * m + p - 1), f"({p} − 1) / ({v} × {m} + {p} − 1)")
    forward, inputs, weights = times
    if schedule in ("ZB-H1", "ZB-H2") and min(times) > 0:
        factor = 1 if schedule == "ZB-H1" else 2
        lost = max((p - 1) * (forward + inputs - factor * weights), 0.0)
        name = "W" if factor == 1 else "2W"
        formula = f"({p} − 1)(F + B − {name}) / ({m}(F + B + W) + ({p} − 1)(F + B − {name}))"
        return Ideal(lost / (m * (forward + inputs + weights) + lost), formula)
    if schedule == "ZBVZeroBubble":
        return Ideal(0.0, "where forward, input gradient and weight gradient take alike")
    return None
