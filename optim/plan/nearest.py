"""What to say where nothing can be planned: which constraint failed, and the nearest layout that would work.

Near is what changes the fewest of the settled things, by the fewest doublings. Where no layout at all fits the devices, the
nearest is more of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from trine.optim.plan.columns import Column
from trine.optim.plan.constraints import SAVED
from trine.optim.plan.layouts import KINDS, OFFLOADED, Layouts
from trine.optim.plan.leanest import leanest
from trine.optim.plan.plainest import plainest
from trine.optim.plan.problem import Pins, Problem, divisors
from trine.optim.plan.reasons import layout_words
from trine.optim.plan.search import Found, Searcher
from trine.optim.plan.space import NothingKept, shapes
from trine.record.errors import UsageError

__all__ = ["distance", "refusal"]

#: As many doublings of the nodes are tried.
_DOUBLINGS = 10
#: Share of a device's memory that is left free where nobody says.
_USUAL_HEADROOM = 0.1
#: Of the distances from the pins so many are tried, the nearest first, before all at once.
_RINGS = 8
#: Pins of what saves memory that are given up one by one: a budget's layers go with it.
_SAVINGS = (("recompute", "recomputed_layers"), *((name,) for name in OFFLOADED))


def refusal(problem: Problem, reason: str) -> UsageError:
    """The error of a problem that has no answer: its reason, and what would work."""
    return UsageError(f"no layout works: {reason}; {_nearest(problem)}")


def _nearest(problem: Problem) -> str:
    free = problem
    for several in _freed(problem):
        near = [found for free in several if (found := _near(free, problem.pins)) is not None]
        if near:
            return f"nearest that works: {min(near)[1]}"
        free = several[-1]
        if not SAVED & free.pins.keys() and (searcher := _searcher(free)) is not None:
            return _elsewhere(problem, searcher)
    return _nearest_batch(free)


def _searcher(problem: Problem) -> Searcher | None:
    """None where no layout keeps the constraints."""
    try:
        return Searcher(problem, shapes(problem))
    except NothingKept:
        return None


def _elsewhere(problem: Problem, free: Searcher) -> str:
    """Where nothing fits the devices, whatever it saves: less room left free than was asked for, more devices, shorter sequences.

    ``free``: without the pins. They hold on more devices and with less room, before they are given up.
    """
    if problem.headroom > _USUAL_HEADROOM:
        own = _searcher(problem)
        for searcher in (free,) if own is None else (own, free):
            if (share := _headroom(searcher)) is not None:
                return f"nearest that works: a memory headroom of {share}"
    if problem.cluster.between is None:
        return "use a device with more memory, or give the cluster a link between nodes and more nodes"
    fewer = [problem]
    fewer += [one for several in _freed(problem) for one in several if one.pins != problem.pins]
    for pinned in fewer:
        if (found := _more_devices(pinned)) is not None:
            return found
    most = problem.devices * 2**_DOUBLINGS
    for pinned in fewer:
        if (found := _shorter(pinned)) is not None:
            return f"nothing fits up to {most} devices; {found}"
    return f"nothing fits up to {most} devices: use a device with more memory"


def _headroom(searcher: Searcher) -> float | None:
    """The largest, to a hundredth, with which something fits; None where that leaves less than is usual."""
    found, memory_bytes = leanest(searcher), searcher.problem.cluster.device.memory_bytes
    if found is None or found.needed_bytes > memory_bytes * (1 - _USUAL_HEADROOM):
        return None
    return int((1 - found.needed_bytes / memory_bytes) * 100) / 100


def _freed(problem: Problem) -> Iterator[list[Problem]]:
    """With fewer and fewer pins: what saves memory and what numbers are computed in, ever less of what saves, none.

    Problems with as many pins come together. Where a pin goes beyond the software, so may what is near to it.
    """
    numbers = problem.without_pins()
    beyond = _beyond(problem)
    groups = [names for names in _SAVINGS if problem.pins.keys() & names]
    saved = {name: values for name, values in problem.pins.items() if name in SAVED}
    layers = saved.get("recomputed_layers")
    if layers is not None:
        saved["recomputed_layers"] = tuple(min(count, problem.workload.layers) for count in layers)
    for count in range(len(groups), -1, -1):
        several = []
        for chosen in combinations(groups, count):
            names = {name for group in chosen for name in group}
            own = {name: values for name, values in saved.items() if name in names}
            several.append(replace(numbers, pins={**numbers.pins, **beyond, **own}))
        yield several
    yield [replace(problem, pins={})]


def _beyond(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Columns that are pinned to what the software does not offer: that, and what it does; of ZeRO every stage, which are in order."""
    found = {}
    for name, offered in problem.abilities.choices.items():
        codes = [KINDS[name].index(value) if name in KINDS else int(value) for value in offered]
        if name not in SAVED and not set(problem.pins.get(name, ())) <= {*codes}:
            every = range(4) if name == "zero_stage" else (*codes, *problem.pins[name])
            found[name] = tuple(sorted(set(every)))
    return {name: values for name, values in found.items() if name not in problem.without_pins().pins}


def _near(problem: Problem, pins: Pins) -> tuple[float, str] | None:
    """How far from the pins the nearest are that fit, and the fastest of them; None where nothing does."""
    searcher = _searcher(problem)
    if searcher is None:
        return None
    candidates = searcher.shapes.take(searcher.leanest_bytes <= problem.capacity_bytes)
    near = distance(candidates, {name: values for name, values in pins.items() if name not in SAVED})
    limits = np.unique(np.round(near, 6))
    for limit in (*limits[:_RINGS], np.inf):
        chosen = candidates.take(near <= limit + 1e-6)
        if not len(chosen):
            continue
        nearest = Searcher(problem, chosen)
        found = nearest.fastest(1)
        if len(found.step_s):
            return float(limit), _spelled(nearest, found)
    return None


def _spelled(searcher: Searcher, found: Found) -> str:
    """The first of what was found, or what is as fast and plainer."""
    return layout_words(plainest(searcher, found.layouts.row(0)))


def distance(layouts: Layouts, pins: Pins) -> Column:
    """Doublings between each layout and the pins, one for each kind that differs."""
    total = np.zeros(len(layouts))
    for name, values in pins.items():
        column = layouts[name]
        if name in KINDS:
            total += ~np.isin(column, values)
            continue
        away = [np.abs(np.log2(np.maximum(column, 0.5) / max(value, 0.5))) for value in values]
        total += np.min(away, axis=0)
    return total


def _nearest_batch(problem: Problem) -> str:
    """The nearest global batch that something divides."""
    batch = problem.global_batch
    tried = {
        size
        for part in divisors(problem.devices)
        for size in (batch // part * part, -(-batch // part) * part)
        if size >= 1 and size != batch
    }
    for size in sorted(tried, key=lambda size: (abs(size - batch), size)):
        try:
            searcher = Searcher(
                replace(problem, global_batch=size), shapes(replace(problem, global_batch=size))
            )
        except NothingKept:
            continue
        if (searcher.leanest_bytes <= problem.capacity_bytes).any():
            return f"nearest that works: a global batch of {size}"
    return "no global batch makes it work on these devices: choose another number of devices"


def _more_devices(problem: Problem) -> str | None:
    """The fewest doublings of the nodes on which something fits."""
    cluster = problem.cluster
    for power in range(1, _DOUBLINGS + 1):
        larger = replace(problem, cluster=cluster.with_changes(nodes=cluster.nodes * 2**power))
        if (found := _fastest(larger)) is not None:
            return f"nearest that works: {larger.devices} devices, {found}"
    return None


def _shorter(problem: Problem) -> str | None:
    """The fewest halvings of the sequence with which something fits."""
    workload = problem.workload
    for power in range(1, workload.sequence.bit_length()):
        length = workload.sequence >> power
        shorter = replace(problem, workload=workload.with_changes(sequence=length))
        if (found := _fastest(shorter)) is not None:
            return f"nearest that works: sequences of {length} tokens, {found}"
    return None


def _fastest(problem: Problem) -> str | None:
    """Of all that fit, spelled; None where nothing does."""
    searcher = _searcher(problem)
    found = None if searcher is None else searcher.fastest(1)
    return (
        _spelled(searcher, found)
        if searcher is not None and found is not None and len(found.step_s)
        else None
    )
