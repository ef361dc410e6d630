"""What a pipeline's schedule leaves idle, and what it holds, by formula: columns over layouts, no simulation.

    bubble_s(codes, pipeline, chunks, microbatches, forward_s, input_s, weight_s, message_s)
    in_flight(codes, pipeline, chunks, microbatches, rank)

Symbols: p ranks, m micro-batches, v chunks a rank; F, B, W seconds of a *rank* (all its chunks) on one micro-batch:
forward, gradient of the input, gradient of the weights; t = F + B + W; c seconds of a message. With equal ranks:

    GPipe (Huang et al. 2019)                   (p − 1) t + 2 (p − 1) c
    1F1B (Narayanan et al. 2019)                (p − 1) t + 2 (p − 1) (1 + (m − 1) / p) c
    interleaved (Narayanan et al. 2021)         (p − 1) t / v + 2 (p v − 1) c, and stalls where m < p
    breadth-first (Lamy-Poirier 2023)           (p − 1) t / v + 2 (p − 1) c, and stalls where m < p
    ZB-H1 (Qi et al. 2023)                      (p − 1) (F + B − W + 4 c)
    ZB-H2 (Qi et al. 2023)                      (p − 1) (F + B − 2 W + 2 c)
    interleaved with W apart                    (p − 1) (F + B − W + 4 c) / v, and (v − 1) p c
    DualPipe-V (DeepSeek-AI 2024)               (p − 1) (F + B − W + 8 c) / 2
    ZB-V (Qi et al. 2023)                       (p − 1) F / 2 where F = B = W; else see the function

A rank of a 1F1B order waits for every message that it turns round (the next forward waits for a backward that waits for
the neighbour), hence the term in m; the zero-bubble orders fill that wait with W. The message terms were derived from the
critical path and hold in the simulator (:mod:`trine.optim.plan.simulator`), against which tests compare all of this.

Unequal ranks (the embedding on the first, the head on the last) are taken by their own times: every formula is the
critical path through one rank, and the longest over the first, the last, their neighbours and the middle counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trine.optim.plan.layouts import SCHEDULES

__all__ = ["Seconds", "StageTimes", "bubble_s", "busiest_s", "in_flight"]

Seconds = npt.NDArray[np.float64]

#: (forward, gradient of the input, gradient of the weights), each a scalar or a column.
StageTimes = tuple[Any, Any, Any]

#: Schedules whose stages come back along the ranks as a V: the first and the last stage lie on the first rank.
FOLDED = ("zb-v", "dualpipe-v")


@dataclass(frozen=True, slots=True)
class _View:
    """The pipeline as five of its ranks see it (first, last, their neighbours, the middle): arrays (5, layouts).

    Triples hold F, B and W. ``ahead`` and ``behind``: summed over the ranks before and after; ``middle``: of a rank
    without embedding or head.
    """

    p: Seconds
    m: Seconds
    v: Seconds
    c: Seconds
    place: Seconds
    own: tuple[Seconds, Seconds, Seconds]
    ahead: tuple[Seconds, Seconds, Seconds]
    behind: tuple[Seconds, Seconds, Seconds]
    middle: tuple[Seconds, Seconds, Seconds]
    first_weight: Seconds  # W of the first rank
    bypassed: bool

    @property
    def total(self) -> Seconds:
        """t of each."""
        return self.own[0] + self.own[1] + self.own[2]

    @property
    def others(self) -> tuple[Seconds, Seconds, Seconds]:
        """Summed over all other ranks."""
        return _triple([one + other for one, other in zip(self.ahead, self.behind, strict=True)])

    @property
    def after(self) -> Seconds:
        """How many ranks come behind."""
        return self.p - 1 - self.place


def bubble_s(
    schedules: Any,
    pipeline: Any,
    chunks: Any,
    microbatches: Any,
    forward_s: Any,
    input_s: Any,
    weight_s: Any,
    message_s: Any,
    *,
    first: StageTimes | None = None,
    last: StageTimes | None = None,
    bypassed: bool = False,
) -> Seconds:
    """Seconds of a step beyond what the busiest rank computes: ``microbatches · busiest_s + bubble_s`` is the pipeline's span.

    All arguments are scalars or columns of one length; ``schedules`` are codes of ``layouts.SCHEDULES``. The times are of a
    rank (all chunks) on one micro-batch; ``first`` and ``last`` those of the first and the last *stage's* rank where they
    differ (for schedules that fold, both lie on the first rank and add up). ``message_s``: from a rank to its neighbour.

    ``bypassed``: measured as Qi et al. do, each rank from its own first start to its own last end, which is what a step
    costs where no rank waits for the others before its optimizer; else from the first start to the last end of all.
    """
    codes, columns = _columns(
        schedules, (pipeline, chunks, microbatches, message_s), (forward_s, input_s, weight_s), first, last
    )
    found = np.zeros(codes.shape)
    for code in np.unique(codes):
        rows = codes == code
        name = SCHEDULES[int(code)]
        see = _view([column[rows] for column in columns], name in FOLDED, bypassed)
        work = see.m * see.total
        idle = (work + _BUBBLES[name](see)).max(axis=0) - work.max(axis=0)
        # One rank has nobody to wait for.
        found[rows] = np.where(see.p[0] > 1, np.maximum(idle, 0.0), 0.0)
    return found


def busiest_s(
    schedules: Any,
    pipeline: Any,
    forward_s: Any,
    input_s: Any,
    weight_s: Any,
    *,
    first: StageTimes | None = None,
    last: StageTimes | None = None,
) -> Seconds:
    """Seconds that the busiest rank computes on one micro-batch; arguments as in :func:`bubble_s`."""
    codes, columns = _columns(schedules, (pipeline, 1, 1, 0.0), (forward_s, input_s, weight_s), first, last)
    found = np.zeros(codes.shape)
    folds = np.isin(codes, [SCHEDULES.index(name) for name in FOLDED])
    for folded in (False, True):
        rows = folds == folded
        if rows.any():
            found[rows] = _view([column[rows] for column in columns], folded, False).total.max(axis=0)
    return found


def _columns(
    schedules: Any,
    sizes: tuple[Any, ...],
    times: StageTimes,
    first: StageTimes | None,
    last: StageTimes | None,
) -> tuple[npt.NDArray[Any], list[Seconds]]:
    """Codes, and the rest as columns of one length: p, v, m, c, then the times of a middle, the first, the last rank."""
    given = (*sizes, *times, *(first or times), *(last or times))
    floats = [np.atleast_1d(np.asarray(each, dtype=np.float64)) for each in given]
    codes, *columns = np.broadcast_arrays(np.atleast_1d(np.asarray(schedules)), *floats)
    return codes, columns


def _view(columns: list[Seconds], folded: bool, bypassed: bool) -> _View:
    """The pipeline from its five ranks; ``folded``: the first rank holds the last stage too."""
    p, v, m, c = columns[:4]
    middle, head, tail = columns[4:7], columns[7:10], columns[10:13]
    if folded:
        head = [start + end - one for start, end, one in zip(head, tail, middle, strict=True)]
        tail = middle
    places = np.clip(np.stack([0 * p, 0 * p + 1, p // 2, p - 2, p - 1]), 0, p - 1)
    own, ahead, behind = [], [], []
    for one, start, end in zip(middle, head, tail, strict=True):
        alone = np.where(p == 1, start + end - one, start)
        own.append(np.where(places == 0, alone, np.where(places == p - 1, end, one)))
        ahead.append(np.where(places > 0, start + (places - 1) * one, 0.0))
        behind.append(np.where(places < p - 1, end + (p - 2 - places) * one, 0.0))

    def wide(column: Seconds) -> Seconds:
        return np.broadcast_to(column, places.shape)

    return _View(
        p=wide(p),
        m=wide(m),
        v=wide(v),
        c=wide(c),
        place=places,
        own=_triple(own),
        ahead=_triple(ahead),
        behind=_triple(behind),
        middle=_triple([wide(each) for each in middle]),
        first_weight=wide(head[2]),
        bypassed=bypassed,
    )


def _triple(parts: list[Any]) -> tuple[Seconds, Seconds, Seconds]:
    return parts[0], parts[1], parts[2]


# --- schedules: what a rank has to wait, by the critical path through it ------------------------------------------------


def _positive(value: Any) -> Any:
    return np.maximum(value, 0.0)


def _breadth_first(see: _View) -> Seconds:
    """Fill and drain of one chunk's length; with fewer micro-batches than ranks each further chunk waits for the first.

    Every chunk is a phase of its own at the pace of its slowest rank, so that with several chunks embedding and head are
    both paid in full.
    """
    others = sum(see.ahead) + sum(see.behind)
    ends = [all_ - (see.p - 1) * one for all_, one in zip(see.others, see.middle, strict=True)]
    found = others / see.v + 2 * (see.p - 1) * see.c
    for part in ((0,), (1, 2)):
        inside = sum(see.middle[each] for each in part) / see.v
        found = found + (see.v - 1) * _positive(see.p * (inside + see.c) - see.m * inside)
        found = found + np.where(see.v > 1, see.m * _positive(sum(ends[each] for each in part)), 0.0)
    return np.asarray(found)


def _one_by_one(see: _View) -> Seconds:
    """1F1B. A micro-batch's way to the end and back holds up the forward that follows its backward, again and again."""
    forward, backward = see.own[0], see.own[1] + see.own[2]
    away = sum(see.behind) + 2 * see.c * see.after
    ahead = sum(see.ahead) + 2 * see.c * see.place
    short = away - see.after * see.total
    held = see.after * see.total + short * (1 + (see.m - 1) / (see.after + 1))
    idle = _positive(away - see.after * forward) + _positive(away - see.after * backward)
    return np.asarray(ahead + np.where(short >= 0, held, idle))


def _interleaved(see: _View) -> Seconds:
    """Narayanan et al. 2021; each further chunk waits until the round's first micro-batch has come round."""
    others = sum(see.ahead) + sum(see.behind)
    forward, backward = see.middle[0] / see.v, (see.middle[1] + see.middle[2]) / see.v
    stalls = _come_round(see, forward, forward) + _come_round(see, backward, backward)
    return np.asarray(others / see.v + 2 * (see.p - 1) * see.c + stalls)


def _come_round(see: _View, away: Seconds, work: Seconds) -> Seconds:
    """Seconds that further chunks wait for a micro-batch that passes all ranks while a rank works on its round."""
    return np.asarray((see.v - 1) * _positive(see.p * (away + see.c) - _round(see.p, see.m) * work))


def _round(p: Seconds, m: Seconds) -> Seconds:
    """Micro-batches of a round: as many as ranks, or a few more, so that all rounds are alike."""
    return np.asarray(m // np.maximum(m // p, 1))


def _zero_bubble(see: _View, depth: int) -> Seconds:
    """ZB-H1 (``depth`` 1) and ZB-H2 (2): the warm-up has ``depth`` forwards a rank, and as many W wait for the drain."""
    forward, inputs, weight = see.own
    away = see.behind[0] + see.behind[1] + 2 * see.c * see.after
    ahead = see.ahead[0] + see.ahead[1] + 2 * see.c * see.place
    saved = np.minimum(depth * see.place, see.m - 1) * weight
    lead = np.minimum(depth * see.after, see.m - 1)
    before = _positive(away - lead * forward)
    # With no more micro-batches than the warm-up has, they go to the end and back once.
    again = see.m - 1 > depth * see.after
    idle = before + np.where(again, _positive(away - lead * (inputs + weight)), 0.0)
    # Round trips that even without W are longer than what is in flight.
    short = _positive(away - depth * see.after * see.total)
    held = short * np.maximum((see.m - 1) / (depth * see.after + 1) - 1, 0.0)
    # The first rank ends with its W behind the last B; this one has all of its own in t.
    drained = ahead - saved + see.first_weight - weight + idle + held
    if see.bypassed:
        return np.asarray(drained)
    late = see.ahead[0] + see.c * see.place + before
    # With few micro-batches a middle rank ends last: gradients reach it when forwards have long run out.
    few = _positive(2 * see.p - 1 - see.m) if depth == 2 else np.zeros_like(see.m)
    back = np.ceil(few / 2)
    late = late + np.where(see.place == see.p - 1, back * (see.middle[1] + see.c) - few % 2 * weight, 0.0)
    return np.asarray(np.maximum(drained, late))


def _zb_v(see: _View) -> Seconds:
    """The V, in chunks' times; each term is a path that can be the longest: two ranks' turns, the warm-up's or drain's chain.

    The paths were read from the simulator's critical paths over many times and shapes.
    """
    f, i, w = (each / 2 for each in see.middle)
    p, c, n = see.p, see.c, see.p - 1
    if see.bypassed:
        paths = (
            2 * n * (i - w) + (6 * p - 8) * c,
            (2 * p - 3) * f + i - 2 * n * w + (4 * p - 6) * c,
            n * (2 * f - i - w) + 2 * n * c,
            i + (p - 2) * w - n * f + 2 * n * c,
            n * (i - f) + (4 * p - 6) * c,
        )
    else:
        paths = (
            n * i + (5 * p - 7) * c,
            (2 * p - 3) * f - (p - 2) * i + (3 * p - 5) * c,
            i + (p - 2) * w + (3 * p - 3) * c,
            f + (p - 2) * w + (3 * p - 5) * c,
            n * (f + c),
        )
    # A first rank that embedding and head keep busier is idle only for messages; then others end their W behind it.
    first = 3 * n * c + (0.0 if see.bypassed else (p - 2) * w)
    even = np.maximum.reduce([np.asarray(path) for path in paths])
    return np.asarray(np.where((see.place == 0) & (see.total > sum(see.middle)), first, even))


def _dualpipe_v(see: _View) -> Seconds:
    """(p − 1)(F + B − W) of a chunk: forwards and backwards of a pair one after the other, not at once as published."""
    f, i, w = (each / 2 for each in see.middle)
    start = (2 if see.bypassed else 3) * see.c
    even = np.maximum(f + i - w + 4 * see.c, f + start)
    # A first rank that embedding and head keep busier has no idle time for F in its warm-up.
    first = _positive(i - w) + 4 * see.c
    busier = (see.place == 0) & (see.total > sum(see.middle))
    return np.asarray((see.p - 1) * np.where(busier, first, even))


def _interleaved_zb(see: _View) -> Seconds:
    """Interleaved, with W in the drain: the bubble of ZB-H1, of a chunk."""
    ahead, behind = see.ahead, see.behind
    forward = (ahead[0] + behind[0]) / see.v
    inputs = (ahead[1] + behind[1]) / see.v
    weight = (see.p - 1) * see.own[2] / see.v
    n = see.p - 1
    alone = inputs + 2 * n * see.c if see.bypassed else forward + 3 * n * see.c
    chunk = [each / see.v for each in see.middle]
    further = _come_round(see, chunk[0], chunk[0]) + _come_round(see, chunk[1], chunk[1] + chunk[2])
    # With fewer micro-batches than ranks W comes behind what it should fill.
    further = further + np.where(see.v > 1, _positive(see.p - see.m) * chunk[2], 0.0)
    return np.asarray(np.maximum(forward + inputs - weight + 4 * n * see.c, alone) + further)


_BUBBLES: Mapping[str, Callable[[_View], Seconds]] = {
    "gpipe": _breadth_first,
    "1f1b": _one_by_one,
    "interleaved": _interleaved,
    "looped-bfs": _breadth_first,
    "zb-h1": lambda see: _zero_bubble(see, 1),
    "zb-h2": lambda see: _zero_bubble(see, 2),
    "zb-v": _zb_v,
    "dualpipe-v": _dualpipe_v,
    "interleaved-zb": _interleaved_zb,
}


# --- memory -------------------------------------------------------------------------------------------------------------


def in_flight(
    schedules: Any, pipeline: Any, chunks: Any, microbatches: Any, rank: Any, weight_share: Any = 1.0
) -> Seconds:
    """Micro-batches whose activations a rank holds at its peak, in units of what all its chunks keep for one.

    ``weight_share``: the part of the activations that is still needed between B and W (Qi et al. 2023: 32 of
    34 + 5 as/h), for the schedules that tell the two apart. Arguments are scalars or columns; ``rank`` from 0.
    """
    given = (schedules, pipeline, chunks, microbatches, rank, weight_share)
    codes, p, v, m, r, share = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(each, dtype=np.float64)) for each in given)
    )
    after = p - 1 - r
    size = _round(p, m)
    lead = np.where(v > 1, 2 * after + (v - 1) * size + 1, after + 1)
    waits = {
        "gpipe": m,
        "looped-bfs": m,
        "1f1b": after + 1,
        "interleaved": lead / v,
        "zb-h1": _held(after + 1, r, m, share),
        "zb-h2": _held(2 * after + 1, 2 * r, m, share),
        "zb-v": p + 0 * m,
        "dualpipe-v": p + 0.5 + 0 * m,
        "interleaved-zb": _held((v - 1) * size + after + 1, r, m * v, share) / v,
    }
    found = np.zeros(p.shape)
    for code in np.unique(codes):
        found = np.where(codes == code, waits[SCHEDULES[int(code)]], found)
    return np.where(p == 1, np.where(np.isin(codes, _ALL_FIRST), m, 1.0), np.minimum(found, m))


def _held(lead: Seconds, waiting: Seconds, m: Seconds, share: Seconds) -> Seconds:
    """``lead`` forwards in full, and as many as wait for W in part, no more than there are."""
    return np.asarray(np.minimum(lead, m) + np.minimum(waiting, _positive(m - lead)) * share)


#: Schedules that run all forwards first.
_ALL_FIRST = [SCHEDULES.index(name) for name in ("gpipe", "looped-bfs")]
