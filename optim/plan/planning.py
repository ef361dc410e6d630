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
from trine.optim.plan.cluster import Cluster
from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.constants import Stack, device_constants, network_constants, stack_named
from trine.optim.plan.cost import Range, RunCost, run_cost
from trine.optim.plan.jitter import Interval, interval
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.limits import Limits, limits_of, limits_of_any
from trine.optim.plan.memory import memory_of
from trine.optim.plan.nearest import leanest_words, refusal
from trine.optim.plan.problem import Problem, parse_pins
from trine.optim.plan.reasons import bound_by, lost_by, part_words
from trine.optim.plan.refine import idle_of
from trine.optim.plan.search import Found, Searcher, Tally
from trine.optim.plan.space import NothingKept, shapes
from trine.optim.plan.splits import Split, splits_of
from trine.optim.plan.step import predict
from trine.optim.plan.workload import Convention, Workload
from trine.optim.plan.workload_files import workload_of
from trine.record.errors import UsageError

__all__ = ["Candidate", "Plan", "plan"]

#: Fewer devices than the smallest cluster whose variation was measured have no interval of their own.
_JITTER_FROM = 64
_CONVENTION: Convention = "megatron"
#: The best so many are simulated.
_SIMULATED = 5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout and what is predicted of it.

    ``step``: seconds, and where nine of ten runs that no fit had seen lay (with their variation at scale). ``parts_s`` sum to it.
    ``memory_bytes``: of the rank that needs most, by category; they sum to ``peak_bytes``. ``mfu`` by ``Plan.convention``.
    ``source``: "simulator" or "formula", of what the pipeline leaves idle. ``beyond``: what the stack does not offer.
    """

    layout: dict[str, int | str]
    step: Range
    parts_s: dict[str, float]
    source: str
    tokens_per_s: Range
    mfu: float
    mfu_precision: str
    peak_bytes: float
    memory_bytes: dict[str, float]
    stage: int
    host_bytes: float
    disk_bytes: float
    remote_bytes: float
    bound: str
    lost_by: str | None
    beyond: tuple[str, ...]
    cost: RunCost | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """``ranked``: for each way to divide the devices its fastest layout, the best first. ``front``: layouts that no other beats in
    both step time and memory. ``alternatives``: the winner with one thing changed, and what that costs. ``losers``: how many
    shapes lost to the winner mostly by what. ``assumptions``: what the figures rest on; ``unfitted``: those of them whose
    constants no run was fitted on. ``jitter``: variation of the best one's steps, None for few devices."""

    problem: Problem
    ranked: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    alternatives: tuple[Alternative, ...]
    losers: dict[str, int]
    splits: tuple[Split, ...]
    limits: Limits
    largest: Limits | None
    jitter: Interval | None
    assumptions: tuple[str, ...]
    unfitted: tuple[str, ...]
    tally: Tally
    convention: Convention = _CONVENTION

    @property
    def best(self) -> Candidate:
        """The winner."""
        return self.ranked[0]


def plan(
    model: str | Path | Workload,
    cluster: str | Path | Cluster,
    *,
    devices: int | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    stack: str | Stack = "megatron-core",
    memory_headroom: float = 0.1,
    top: int = 10,
    pins: Mapping[str, Any] | Iterable[str] = (),
    tokens: float | None = None,
    price: float | None = None,
    largest: bool = False,
) -> Plan:
    """Search all layouts of ``model`` on ``cluster`` for the fastest that fits.

    ``devices``: of the job (the cluster's own). ``global_batch``: sequences a step (4 Mi tokens). ``pins``: what is settled,
    ``{"tensor": 8, "schedule": ["1f1b", "zb-v"]}`` or ``["tensor=8"]``. ``tokens`` and ``price`` (of a device for an hour) give days
    and money. ``largest``: look for the largest micro-batch and context of any layout, too.

    Raises ``UsageError`` or ``UnreadableInput`` in one line: which constraint failed, and the nearest layout that works.
    """
    if top < 1:
        raise UsageError(f"top must be at least 1, not {top}")
    if price is not None and tokens is None:
        raise UsageError("a price needs the tokens to train on: tokens=15e12, or --tokens 15T")
    problem = Problem.of(
        _workload(model, sequence),
        cluster_of(cluster, devices) if not isinstance(cluster, Cluster) else _sized(cluster, devices),
        stack if isinstance(stack, Stack) else stack_named(stack),
        global_batch=global_batch,
        headroom=memory_headroom,
        pins=parse_pins(_pin_words(pins)),
    )
    try:
        searcher = Searcher(problem, shapes(problem))
    except NothingKept as error:
        raise refusal(problem, str(error)) from None
    found = searcher.fastest(max(top, _SIMULATED))
    if not len(found.step_s):
        raise refusal(problem, leanest_words(searcher))
    variation = _variation(problem, 1.0)
    return _Writer(problem, searcher, tokens, price, variation).plan(found, top, largest)


def _variation(problem: Problem, step_s: float) -> Interval | None:
    """How steps and runs vary on so many devices; None for few."""
    if problem.devices < _JITTER_FROM:
        return None
    return interval(step_s, problem.devices, family=problem.cluster.device.family)


def _workload(model: str | Path | Workload, sequence: int | None) -> Workload:
    if not isinstance(model, Workload):
        return workload_of(model, sequence=sequence)
    return model if sequence is None else model.with_changes(sequence=sequence)


def _sized(cluster: Cluster, devices: int | None) -> Cluster:
    if devices is None or devices == cluster.devices:
        return cluster
    if devices < 1 or devices % cluster.devices_per_node:
        raise UsageError(f"{devices} devices fill no whole number of nodes of {cluster.devices_per_node}")
    return cluster.with_changes(nodes=devices // cluster.devices_per_node)


def _pin_words(pins: Mapping[str, Any] | Iterable[str]) -> list[str]:
    if not isinstance(pins, Mapping):
        return list(pins)
    words = []
    for name, value in pins.items():
        values = value if isinstance(value, list | tuple | set | frozenset) else [value]
        words.append(f"{name}={','.join(str(int(one) if isinstance(one, bool) else one) for one in values)}")
    return words


@dataclass(frozen=True, slots=True)
class _Writer:
    """Turns what was found into a plan."""

    problem: Problem
    searcher: Searcher
    tokens: float | None
    price: float | None
    variation: Interval | None  # of a step of a second

    def plan(self, found: Found, top: int, largest: bool) -> Plan:
        """With the best few simulated and ranked anew."""
        ranked = self.candidates(found.layouts)
        ranked = self._simulated(ranked, found.layouts)
        best = ranked[0]
        ranked = [self._compared(one, best) for one in ranked[:top]]
        chosen = _row_layouts(best.layout)
        offloaded = any(
            best.layout[name] != "none"
            for name in ("optimizer_offload", "parameter_offload", "activation_offload")
        )
        return Plan(
            problem=self.problem,
            ranked=tuple(ranked),
            front=self._front(best, offloaded),
            alternatives=alternatives(self.searcher, chosen),
            losers=self._losers(best),
            splits=splits_of(self.problem.workload, best.layout),
            limits=limits_of(self.problem, chosen),
            largest=limits_of_any(self.searcher) if largest else None,
            jitter=_variation(self.problem, best.step.value),
            assumptions=self._assumptions(best),
            unfitted=self._unfitted(),
            tally=self.searcher.tally,
        )

    def candidates(self, layouts: Layouts) -> list[Candidate]:
        """By formula."""
        problem = self.problem
        times = predict(problem.workload, problem.cluster, problem.stack, layouts)
        memory = memory_of(problem.workload, problem.cluster, problem.stack, layouts)
        found = []
        for row in range(len(layouts)):
            parts = {
                name: float(np.broadcast_to(column, len(layouts))[row])
                for name, column in times.parts.items()
            }
            plain = layouts.row(row)
            step = self._range(float(times.step_s[row]), float(times.low_s[row]), float(times.high_s[row]))
            found.append(
                self._timed(
                    Candidate(
                        layout=plain,
                        step=step,
                        parts_s=parts,
                        source="formula",
                        tokens_per_s=step,
                        mfu=0.0,
                        mfu_precision=_mfu_precision(str(plain["precision"])),
                        peak_bytes=float(memory.peak_bytes[row]),
                        memory_bytes={name: float(column[row]) for name, column in memory.parts.items()},
                        stage=int(memory.stage[row]),
                        host_bytes=float(memory.host_bytes[row]),
                        disk_bytes=float(memory.disk_bytes[row]),
                        remote_bytes=float(memory.remote_bytes[row]),
                        bound="",
                        lost_by=None,
                        beyond=problem.beyond_the_stack(plain),
                    )
                )
            )
        return found

    def _range(self, value: float, low: float, high: float) -> Range:
        """The predictions' own interval, wider by how runs of so many devices vary."""
        if self.variation is None:
            return Range(value, low, high)
        return Range(value, low * float(self.variation.mean_low_s), high * float(self.variation.mean_high_s))

    def _timed(self, one: Candidate) -> Candidate:
        """With all that follows from its step."""
        problem, step = self.problem, one.step
        tokens = problem.global_batch * problem.workload.sequence
        flops = problem.workload.model_flops(_CONVENTION) * tokens / step.value / problem.devices
        cost = None
        if self.tokens is not None:
            cost = run_cost(step, tokens, problem.devices, self.tokens, self.price)
        return replace(
            one,
            tokens_per_s=Range(tokens / step.value, tokens / step.high, tokens / step.low),
            mfu=flops / problem.cluster.device.peak(one.mfu_precision),
            bound=bound_by(one.parts_s),
            cost=cost,
        )

    def _simulated(self, ranked: list[Candidate], layouts: Layouts) -> list[Candidate]:
        """The best few by what their schedules leave idle event by event, until the best few all are."""
        problem = self.problem
        rows = dict(enumerate(ranked))
        done: set[int] = set()
        while True:
            order = sorted(rows, key=lambda row: rows[row].step.value)
            row = next((row for row in order[:_SIMULATED] if row not in done), None)
            if row is None:
                return [rows[row] for row in order]
            done.add(row)
            idle = idle_of(problem.workload, problem.cluster, problem.stack, layouts, row)
            if idle is not None:
                one = rows[row]
                steady = one.parts_s["pipeline_messages"] + one.parts_s["pipeline_bubble"]
                parts = one.parts_s | {"pipeline_bubble": idle.bubble_s, "pipeline_messages": idle.messages_s}
                factor = (one.step.value - steady + idle.bubble_s + idle.messages_s) / one.step.value
                rows[row] = self._timed(
                    replace(one, parts_s=parts, step=one.step.times(factor), source="simulator")
                )

    def _compared(self, one: Candidate, best: Candidate) -> Candidate:
        return one if one is best else replace(one, lost_by=lost_by(one.parts_s, best.parts_s))

    def _front(self, best: Candidate, offload: bool) -> tuple[Candidate, ...]:
        found = self.candidates(self.searcher.front(offload=offload).layouts)
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

    def _constants(self) -> list[tuple[str, str]]:
        """What constants the plan rests on, and where they come from."""
        problem, cluster = self.problem, self.problem.cluster
        device = cluster.device
        own = "measured on this machine" if device.constants else device_constants(device.family).provenance
        found = [
            (f"software {problem.stack.name}", problem.stack.provenance),
            (f"device family {device.family}", own),
        ]
        links = {
            "inside a node": cluster.inside,
            "between nodes": cluster.between if cluster.nodes > 1 else None,
        }
        for where, link in links.items():
            if link is not None:
                note = f", {link.note}" if link.note else ""
                measured = (
                    "measured on this machine" if link.constants else network_constants(link.kind).provenance
                )
                found.append(
                    (f"{where} {link.kind} at {link.bandwidth} a device and direction{note}", measured)
                )
        return [(what, source or "starting values") for what, source in found]

    def _assumptions(self, best: Candidate) -> tuple[str, ...]:
        problem = self.problem
        found = [f"{what}: {source}" for what, source in self._constants()]
        found.append(
            f"another software than {problem.stack.name} may differ by a quarter and more on the same layout"
        )
        if problem.batch_is_usual:
            found.append(
                f"global batch {problem.global_batch}: nobody said, so about 4 Mi tokens; --global-batch"
            )
        if best.beyond:
            found.append(
                f"{problem.stack.name} does not offer {', '.join(best.beyond)}: planned because it is pinned"
            )
        return tuple(found)

    def _unfitted(self) -> tuple[str, ...]:
        known = ("fitted on", "measured on")
        return tuple(
            f"{what}: {source}" for what, source in self._constants() if not source.startswith(known)
        )


def _mfu_precision(precision: str) -> str:
    """Shares of fp8 runs are of the 16-bit peak, as their authors give them."""
    return "bf16" if precision == "fp8" else precision


def _row_layouts(row: Mapping[str, int | str]) -> Layouts:
    return Layouts.of(**row)
