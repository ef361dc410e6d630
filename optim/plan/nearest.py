"""What to say where nothing can be planned: which constraint failed, and the nearest layout that would work.

Near is what changes the fewest of the settled things, by the fewest doublings. Where no layout at all fits the devices, the
nearest is more of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trine.optim.plan.columns import Column
from trine.optim.plan.constraints import SAVED
from trine.optim.plan.layouts import KINDS, OFFLOADED, Layouts
from trine.optim.plan.memory import memory_of
from trine.optim.plan.plainest import plainest
from trine.optim.plan.problem import Pins, Problem, divisors
from trine.optim.plan.reasons import host_too_small, layout_words, too_large
from trine.optim.plan.search import Found, Searcher
from trine.optim.plan.space import NothingKept, savings, savings_words, shapes
from trine.record.errors import UsageError

__all__ = ["distance", "leanest_words", "refusal"]

#: As many doublings of the nodes are tried.
_DOUBLINGS = 10
#: Share of a device's memory that is left free where nobody says.
_USUAL_HEADROOM = 0.1


def refusal(problem: Problem, reason: str) -> UsageError:
    """The error of a problem that has no answer: its reason, and what would work."""
    return UsageError(f"no layout works: {reason}; {_nearest(problem)}")


def leanest_words(searcher: Searcher) -> str:
    """Why nothing fits: of the leanest layout, how much it lacks and what takes most."""
    row = int(np.argmin(searcher.leanest_bytes))
    every, _ = savings(searcher.problem, searcher.shapes.take([row]), ("recompute", *OFFLOADED))
    if not len(every):
        return savings_words(searcher.problem, searcher.shapes.take([row]))
    problem = searcher.problem
    found = memory_of(problem.workload, problem.cluster, problem.stack, every)
    away = found.host_bytes + found.remote_bytes
    within = found.peak_bytes <= problem.capacity_bytes
    if within.any():
        return host_too_small(float(away[within].min()), problem)
    least = int(np.argmin(found.peak_bytes))
    categories = {name: float(column[least]) for name, column in found.parts.items()}
    return f"the leanest layout {too_large(float(found.peak_bytes[least]), categories, problem)}"


def _nearest(problem: Problem) -> str:
    for free in _freed(problem):
        try:
            searcher = Searcher(free, shapes(free))
        except NothingKept:
            continue
        found = _near(searcher, problem.pins)
        if found is not None:
            return f"nearest that works: {found}"
        if not SAVED & free.pins.keys():
            return _elsewhere(problem, float(searcher.leanest_bytes.min()))
    return _nearest_batch(free)


def _elsewhere(problem: Problem, leanest_bytes: float) -> str:
    """Where nothing fits the devices, whatever it saves: less room left free than was asked for, more devices, shorter sequences."""
    memory_bytes = problem.cluster.device.memory_bytes
    if problem.headroom > _USUAL_HEADROOM and leanest_bytes <= memory_bytes * (1 - _USUAL_HEADROOM):
        share = int((1 - leanest_bytes / memory_bytes) * 100) / 100
        return f"nearest that works: a memory headroom of {share}"
    if problem.cluster.between is None:
        return "use a device with more memory, or give the cluster a link between nodes and more nodes"
    # What was asked for of memory holds on more devices, before it is given up.
    for free in _freed(problem):
        if (found := _more_devices(free)) is not None:
            return found
    most = problem.devices * 2**_DOUBLINGS
    shorter = _shorter(problem.without_pins())
    return f"nothing fits up to {most} devices{': use a device with more memory' if shorter is None else '; ' + shorter}"


def _freed(problem: Problem) -> Iterator[Problem]:
    """With fewer and fewer pins: what saves memory and what numbers are computed in, that alone, none."""
    numbers = problem.without_pins()
    saved = {name: values for name, values in problem.pins.items() if name in SAVED}
    if saved:
        layers = saved.get("recomputed_layers")
        if layers is not None:
            saved["recomputed_layers"] = tuple(min(count, problem.workload.layers) for count in layers)
        yield replace(numbers, pins={**numbers.pins, **saved})
    yield numbers
    yield replace(problem, pins={})


def _near(searcher: Searcher, pins: Pins) -> str | None:
    """The fastest of those that are nearest to the pins, else of all that fit; None where nothing does."""
    candidates = searcher.shapes.take(searcher.leanest_bytes <= searcher.problem.capacity_bytes)
    if not len(candidates):
        return None
    near = distance(candidates, pins)
    for limit in (near.min(), np.inf):
        nearest = Searcher(searcher.problem, candidates.take(near <= limit + 1e-9))
        found = nearest.fastest(1)
        if len(found.step_s):
            return _spelled(nearest, found)
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
    try:
        searcher = Searcher(problem, shapes(problem))
    except NothingKept:
        return None
    found = searcher.fastest(1)
    return _spelled(searcher, found) if len(found.step_s) else None
