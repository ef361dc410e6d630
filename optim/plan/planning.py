"""Plans: the best layouts of a model on a cluster, what each costs, why the others lost, and what the numbers rest on.

found = plan("llama3-70b", "dgx-h100", devices=1024, global_batch=1024)
found.best.step.value, found.best.layout["tensor"], found.ranked[1].lost_by, found.front, found.limits.context
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trine.optim.plan.alternatives import Alternative, alternatives
from trine.optim.plan.asked import (
    Module,
    asked_cluster,
    asked_number,
    asked_pins,
    asked_search,
    asked_share,
    asked_stack,
    asked_tokens,
    asked_whole,
    asked_workload,
)
from trine.optim.plan.assumptions import assumptions_of, unfitted_of
from trine.optim.plan.busier import Busier, busier
from trine.optim.plan.candidates import CONVENTION, SIMULATED, Candidate, Predictor
from trine.optim.plan.cluster import Cluster
from trine.optim.plan.constants import Stack
from trine.optim.plan.jitter import Interval, interval
from trine.optim.plan.layouts import OFFLOADED, Layouts
from trine.optim.plan.leanest import leanest_words
from trine.optim.plan.limits import Limits, limits_of, limits_of_any
from trine.optim.plan.nearest import refusal
from trine.optim.plan.plainest import plainest, plainness
from trine.optim.plan.problem import Problem, parse_pins, parse_searched
from trine.optim.plan.reasons import SAME, layout_words, lost_by, part_words
from trine.optim.plan.search import Found, Searcher, Tally
from trine.optim.plan.space import NothingKept, shapes
from trine.optim.plan.splits import Split, splits_of
from trine.optim.plan.step import predict
from trine.optim.plan.units import spell_bytes, spell_seconds
from trine.optim.plan.workload import Convention, Workload
from trine.record.errors import UsageError

__all__ = ["ORDER_KNOWN_TO", "Candidate", "Plan", "plan"]

#: Fewer devices than the smallest cluster whose variation was measured have no interval of their own.
_JITTER_FROM = 64
#: What trusting the planner's order cost on average in published sweeps of layouts that its constants had not seen
#: (``benchmarks/planner.py``, "time lost by the pick").
ORDER_KNOWN_TO = 0.029


@dataclass(frozen=True, slots=True)
class Plan:
    """``ranked``: for each way to divide the devices its fastest layout, the best first. ``front``: layouts that no other beats in
    both step time and memory. ``alternatives``: the winner with one thing changed, and what that costs. ``losers``: how many
    shapes lost to the winner mostly by what. ``busier``: the batch that its pipeline would need to be busy, where it is not. ``assumptions``: what the figures rest on; ``unfitted``: those of them whose
    constants no run was fitted on. ``jitter``: variation of the best one's steps, None for few devices."""

    problem: Problem
    ranked: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    alternatives: tuple[Alternative, ...]
    losers: dict[str, int]
    splits: tuple[Split, ...]
    limits: Limits
    largest: Limits | None
    busier: Busier | None
    jitter: Interval | None
    assumptions: tuple[str, ...]
    unfitted: tuple[str, ...]
    tally: Tally
    convention: Convention = CONVENTION

    @property
    def best(self) -> Candidate:
        """The winner."""
        return self.ranked[0]

    @property
    def tied(self) -> int:
        """Leading rows whose order is not known: the first, and those within :data:`ORDER_KNOWN_TO` of it."""
        limit = self.best.step.value * (1 + ORDER_KNOWN_TO)
        return sum(one.step.value <= limit for one in self.ranked)

    def __str__(self) -> str:
        problem, best = self.problem, self.best
        low, value, high = (spell_seconds(each) for each in (best.step.low, best.step.value, best.step.high))
        return (
            f"{problem.workload.name} on {problem.devices} x {problem.cluster.device.name}, {problem.stack.name}: "
            f"{layout_words(best.layout)}; {value} a step ({low} to {high}), MFU {best.mfu.value:.0%}, "
            f"{spell_bytes(best.peak.value)} a device; the best of {len(self.ranked)} rows"
        )


def plan(
    model: str | Path | Workload | Module,
    cluster: str | Path | Cluster,
    *,
    devices: int | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    stack: str | Stack | None = None,
    memory_headroom: float = 0.1,
    top: int = 10,
    pins: Mapping[str, Any] | Iterable[str] = (),
    search: Iterable[str] = (),
    tokens: float | str | None = None,
    price: float | None = None,
    largest: bool = False,
) -> Plan:
    """Search all layouts of ``model`` on ``cluster`` for the fastest that fits.

    ``model``: a known model's name, a file, a workload, or a live module, which needs ``sequence``. ``devices``: of the job (the
    cluster's own). ``global_batch``: sequences a step (4 Mi tokens; on processors 2 Ki a rank). ``pins``: what is settled,
    ``{"tensor": 8, "schedule": ["1f1b", "zb-v"]}`` or ``["tensor=8"]``. ``search``: what is searched beside the usual choices
    (:data:`~trine.optim.plan.problem.SEARCHABLE`). ``stack``: megatron-core; on processors trine, on TPUs maxtext. ``tokens``
    (``15e12`` or ``"15T"``) and ``price`` (of a device for an hour) give days and money. ``largest``: look for the largest
    micro-batch and context of any layout, too.

    Raises ``UsageError`` or ``UnreadableInput`` in one line: which constraint failed, and the nearest layout that works.
    """
    count, trained, priced = asked_whole("top", top) or 0, asked_tokens(tokens), asked_number("price", price)
    _refuse(count, trained, priced)
    hardware = asked_cluster(cluster, asked_whole("devices", devices))
    problem = Problem.of(
        asked_workload(model, asked_whole("sequence", sequence)),
        hardware,
        asked_stack(stack, hardware),
        global_batch=asked_whole("global_batch", global_batch),
        headroom=asked_share("memory_headroom", memory_headroom),
        pins=parse_pins(asked_pins(pins)),
        searched=parse_searched(asked_search(search)),
    )
    searcher, found = _searched(problem, max(count, SIMULATED))
    variation = _variation(problem, 1.0)
    return _Writer(searcher, Predictor(problem, trained, priced, variation)).plan(found, count, largest)


def _refuse(top: int, tokens: float | None, price: float | None) -> None:
    """Before anything is read. Raises ``UsageError`` for a report that nobody can write."""
    if top < 1:
        raise UsageError(f"top must be at least 1, not {top}")
    if price is not None and tokens is None:
        raise UsageError("a price needs the tokens to train on: tokens=15e12, or --tokens 15T")


def _searched(problem: Problem, count: int) -> tuple[Searcher, Found]:
    """The best ``count`` ways to divide the devices. Raises ``UsageError`` where nothing works."""
    try:
        searcher = Searcher(problem, shapes(problem))
    except NothingKept as error:
        raise refusal(problem, str(error)) from None
    found = searcher.fastest(count)
    if not len(found.step_s):
        raise refusal(problem, leanest_words(searcher))
    return searcher, found


def _variation(problem: Problem, step_s: float) -> Interval | None:
    """How steps and runs vary on so many devices; None for few."""
    if problem.devices < _JITTER_FROM:
        return None
    return interval(step_s, problem.devices, family=problem.cluster.device.family)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Turns what was found into a plan."""

    searcher: Searcher
    predictor: Predictor

    @property
    def problem(self) -> Problem:
        return self.searcher.problem

    def plan(self, found: Found, top: int, largest: bool) -> Plan:
        """With the best few simulated and ranked anew."""
        ranked = self.predictor.simulated(self.predictor.candidates(found.layouts))
        ranked = self._plainest_first([self._plainest(one) for one in ranked[: max(top, SIMULATED)]])
        best = ranked[0]
        ranked = [self._compared(one, best) for one in ranked[:top]]
        chosen = _row_layouts(best.layout)
        offloaded = any(best.layout[name] != "none" for name in OFFLOADED)
        return Plan(
            problem=self.problem,
            ranked=tuple(ranked),
            front=self._front(best, offloaded),
            alternatives=alternatives(self.predictor, self.searcher, chosen),
            losers=self._losers(best),
            splits=splits_of(
                self.problem.workload, best.layout, expert_tensor=self.problem.stack.expert_tensor
            ),
            limits=limits_of(self.problem, chosen),
            largest=limits_of_any(self.searcher) if largest else None,
            busier=busier(self.problem, best.layout, best.parts_s),
            jitter=_variation(self.problem, best.step.value),
            assumptions=assumptions_of(self.problem, best),
            unfitted=unfitted_of(self.problem),
            tally=self.searcher.tally,
        )

    def _plainest(self, one: Candidate) -> Candidate:
        """As fast, and plainer, where there is such a layout."""
        row = plainest(self.searcher, one.layout)
        if row == one.layout:
            return one
        other = self.predictor.candidates(Layouts.of(**row))[0]
        if one.source == "simulator":
            other = self.predictor.exact(other)
        return other if other.step.value <= one.step.value * (1 + SAME) else one

    def _plainest_first(self, ranked: list[Candidate]) -> list[Candidate]:
        """In ascending time; before them the plainest of those that are as fast as the first."""
        ranked = sorted(ranked, key=lambda one: one.step.value)
        limit = ranked[0].step.value * (1 + SAME)
        first = min((one for one in ranked if one.step.value <= limit), key=lambda one: plainness(one.layout))
        return [first, *(one for one in ranked if one is not first)]

    def _compared(self, one: Candidate, best: Candidate) -> Candidate:
        return one if one is best else replace(one, lost_by=lost_by(one.parts_s, best.parts_s))

    def _front(self, best: Candidate, offload: bool) -> tuple[Candidate, ...]:
        found = self.predictor.candidates(self.searcher.front(offload=offload).layouts)
        return tuple(self._compared(one, best) for one in found)

    def _losers(self, best: Candidate) -> dict[str, int]:
        """Shapes by why they lost: too large whatever they save, too large as they are, or mostly by one part of the step."""
        searcher, room = self.searcher, self.problem.capacity_bytes
        counts: Counter[str] = Counter()
        never = searcher.leanest_bytes > room
        saving = ~never & (searcher.plain_bytes > room)
        counts["do not fit, whatever they save"] = int(never.sum())
        counts["fit only with recomputation or offload"] = int(saving.sum())
        rest = searcher.shapes.take(~never & ~saving)
        if len(rest):
            times = predict(self.problem.workload, self.problem.cluster, self.problem.stack, rest)
            names = list(times.parts)
            more = np.stack(
                [np.broadcast_to(times.parts[name], len(rest)) - best.parts_s[name] for name in names]
            )
            slower = times.step_s > best.step.value
            for position, count in Counter(more.argmax(axis=0)[slower].tolist()).items():
                counts[part_words(names[position])] = count
        return {name: count for name, count in counts.most_common() if count}


def _row_layouts(row: Mapping[str, int | str]) -> Layouts:
    return Layouts.of(**row)
