"""Layouts of a plan with all that is predicted of them, each number with its interval: by formula, the best few simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trine.optim.plan.constants import Spread, Stack
from trine.optim.plan.cost import Range, RunCost, run_cost
from trine.optim.plan.jitter import Interval
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory import MemoryEstimate, memory_of
from trine.optim.plan.problem import Problem
from trine.optim.plan.reasons import bound_by
from trine.optim.plan.refine import idle_of
from trine.optim.plan.step import Estimates, predict
from trine.optim.plan.workload import Convention

__all__ = ["CONVENTION", "NEW_SOFTWARE", "SIMULATED", "Candidate", "Predictor", "is_published", "peak_of"]

CONVENTION: Convention = "megatron"
#: Where nine of ten runs lay of tables all of whose software no other table has, as factors on the prediction
#: (``benchmarks/planner_new_software.py``). Of software that no published run declares intervals are at least as wide.
NEW_SOFTWARE = Spread(0.698, 1.2)
#: The best so many are simulated.
SIMULATED = 5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout and what is predicted of it.

    ``step``: seconds, and where nine of ten runs that no fit had seen lay (with their variation at scale); ``tokens_per_s``, ``mfu``
    (by ``Plan.convention``, of the peak of ``mfu_precision``) and ``cost`` follow from it. ``parts_s`` sum to its value.
    ``peak``: bytes of the rank that needs most, and where nine of ten published peaks lay; ``memory_bytes`` by category sum to its
    value. ``source``: "simulator" or "formula", of what the pipeline leaves idle. ``beyond``: what the stack does not offer.
    """

    layout: dict[str, int | str]
    step: Range
    parts_s: dict[str, float]
    source: str
    tokens_per_s: Range
    mfu: Range
    mfu_precision: str
    peak: Range
    memory_bytes: dict[str, float]
    stage: int
    host_bytes: float
    disk_bytes: float
    remote_bytes: float
    hosts_hold: bool
    bound: str
    lost_by: str | None
    beyond: tuple[str, ...]
    cost: RunCost | None = None


@dataclass(frozen=True, slots=True)
class Predictor:
    """Of the layouts of a problem. ``tokens`` and ``price``: of a run; ``variation``: of a step of a second, None for few devices."""

    problem: Problem
    tokens: float | None
    price: float | None
    variation: Interval | None

    def candidates(self, layouts: Layouts) -> list[Candidate]:
        """By formula."""
        problem = self.problem
        times = predict(problem.workload, problem.cluster, problem.stack, layouts)
        memory = memory_of(problem.workload, problem.cluster, problem.stack, layouts)
        return [self._candidate(layouts, times, memory, row) for row in range(len(layouts))]

    def _candidate(self, layouts: Layouts, times: Estimates, memory: MemoryEstimate, row: int) -> Candidate:
        plain = layouts.row(row)
        step = self.range_s(*(float(column[row]) for column in (times.step_s, times.low_s, times.high_s)))
        return self._timed(
            Candidate(
                layout=plain,
                step=step,
                parts_s={
                    name: float(np.broadcast_to(column, len(layouts))[row])
                    for name, column in times.parts.items()
                },
                source="formula",
                tokens_per_s=step,
                mfu=step,
                mfu_precision=_mfu_precision(str(plain["precision"])),
                peak=peak_of(memory, row),
                memory_bytes={name: float(column[row]) for name, column in memory.parts.items()},
                stage=int(memory.stage[row]),
                host_bytes=float(memory.host_bytes[row]),
                disk_bytes=float(memory.disk_bytes[row]),
                remote_bytes=float(memory.remote_bytes[row]),
                hosts_hold=bool(memory.hosts_hold[row]),
                bound="",
                lost_by=None,
                beyond=self.problem.beyond_the_stack(plain),
            )
        )

    def range_s(self, value: float, low: float, high: float) -> Range:
        """The predictions' own interval, wider for software without a published run, and by how runs of so many devices vary."""
        if not is_published(self.problem.stack):
            low, high = min(low, value * NEW_SOFTWARE.low), max(high, value * NEW_SOFTWARE.high)
        if self.variation is None:
            return Range(value, low, high)
        return Range(value, low * float(self.variation.mean_low_s), high * float(self.variation.mean_high_s))

    def _timed(self, one: Candidate) -> Candidate:
        """With all that follows from its step."""
        problem, step = self.problem, one.step
        tokens = problem.global_batch * problem.workload.sequence
        flops = problem.workload.model_flops(CONVENTION) * tokens
        peak = problem.devices * problem.cluster.device.peak(one.mfu_precision)
        share = step.dividing(flops / peak)
        cost = None
        if self.tokens is not None:
            cost = run_cost(step, tokens, problem.devices, self.tokens, self.price)
        return replace(
            one,
            tokens_per_s=step.dividing(tokens),
            # No run is above the peak, however far the interval of steps reaches.
            mfu=replace(share, high=max(share.value, min(share.high, 1.0))),
            bound=bound_by(one.parts_s),
            cost=cost,
        )

    def simulated(self, ranked: list[Candidate]) -> list[Candidate]:
        """The best few by what their schedules leave idle event by event, until the best few all are."""
        rows = dict(enumerate(ranked))
        done: set[int] = set()
        while True:
            order = sorted(rows, key=lambda row: rows[row].step.value)
            row = next((row for row in order[:SIMULATED] if row not in done), None)
            if row is None:
                return [rows[row] for row in order]
            done.add(row)
            rows[row] = self.exact(rows[row])

    def exact(self, one: Candidate) -> Candidate:
        """Simulated, where it has a pipeline."""
        problem = self.problem
        idle = idle_of(problem.workload, problem.cluster, problem.stack, Layouts.of(**one.layout), 0)
        if idle is None:
            return one
        steady = one.parts_s["pipeline_messages"] + one.parts_s["pipeline_bubble"]
        parts = one.parts_s | {"pipeline_bubble": idle.bubble_s, "pipeline_messages": idle.messages_s}
        factor = (one.step.value - steady + idle.bubble_s + idle.messages_s) / one.step.value
        return self._timed(replace(one, parts_s=parts, step=one.step.times(factor), source="simulator"))


def is_published(stack: Stack) -> bool:
    """Whether its own constants were fitted on published runs: without them they are priors, or a parent's."""
    return stack.provenance.startswith("fitted")


def peak_of(memory: MemoryEstimate, row: int) -> Range:
    """A layout's peak in bytes with its interval."""
    return Range(*(float(column[row]) for column in (memory.peak_bytes, memory.low_bytes, memory.high_bytes)))


def _mfu_precision(precision: str) -> str:
    """Shares of fp8 runs are of the 16-bit peak, as their authors give them."""
    return "bf16" if precision == "fp8" else precision
