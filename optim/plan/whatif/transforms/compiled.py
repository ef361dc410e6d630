"""Compiled regions: chains of work on memory become one pass each, and the host no longer dispatches each operator.

Between two products a compiler joins what works element by element or row by row: what is in between is neither written nor
read. A chain then costs one pass over its largest tensor, one more for each reduction over rows (its results are needed
before its inputs are read again), and the arithmetic of its functions: what their calibrated time is above a pass. Products
stay the library's. The measured chain is scaled by the ratio of the calibrated times of both forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trine.optim.plan.whatif.graph import LINK, Graph, RankStep, Task, mapped
from trine.optim.plan.whatif.operators import ARITHMETIC
from trine.optim.plan.whatif.times import OperationTimes
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._blocks import require_operators
from trine.optim.plan.whatif.transforms._facts import refuse_neutral
from trine.optim.plan.whatif.transforms._known import with_known_work
from trine.optim.plan.whatif.transforms._pace import Pace, pace_of
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("compute.compile",)
ORDER = 30

#: The name of what was joined.
COMPILED = "compiled"
#: Work that reduces rows, so that its inputs are read twice.
_REDUCTIONS = frozenset({"softmax", "softmax_backward", "layer_norm", "layer_norm_backward"})


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` where the record holds no operators or memory was not calibrated."""
    if graph.facts.get("compile"):
        raise UsageError("compute.compile: the recorded run is compiled already: record one that is not")
    if change.config.compute.compile is False:
        refuse_neutral(graph, change, KEYS)
    require_operators(graph.basis, KEYS[0])
    if not change.times:
        raise UsageError("compute.compile: this machine is not calibrated: run trine hardware --calibrate")
    graph = with_known_work(graph, KEYS[0])
    joined = mapped(graph, lambda step: _compiled(step, change.times))
    if not any(task.name == COMPILED for each in joined.steps[0].ranks for task in each.tasks):
        raise UsageError(
            "compute.compile: no operators of forward or backward were found that a compiler would join: its trace holds no "
            "shapes of theirs, or no numbers of autograd's"
        )
    return joined


def _compiled(step: RankStep, times: OperationTimes) -> list[Task]:
    """Chains joined; glue inside them shrinks as operators become fewer."""
    pace = pace_of(step.tasks, times)
    found: list[Task] = []
    chain: list[Task] = []
    between: list[Task] = []
    inner = 0  # of what lies between: what the chain's next operator came after
    for task in step.tasks:
        inside = task.phase in ("forward", "backward") and task.lane != LINK
        if inside and task.kind == "memory" and task.sequence >= 0 and _same_place(chain, task):
            chain.append(task)
            inner = len(between)
        elif inside and task.kind == "glue" and not task.after and chain and not task.gradient_bytes:
            between.append(task)
        else:
            found += _joined(chain, between[:inner], between[inner:], pace)
            chain, between, inner = [], [], 0
            if inside and task.kind == "memory" and task.sequence >= 0:
                chain.append(task)
            else:
                found.append(task)
    return [*found, *_joined(chain, between[:inner], between[inner:], pace)]


def _same_place(chain: Sequence[Task], task: Task) -> bool:
    if not chain:
        return True
    first = chain[0]
    return (first.lane, first.phase, first.recomputed) == (task.lane, task.phase, task.recomputed)


def _joined(chain: Sequence[Task], between: Sequence[Task], behind: Sequence[Task], pace: Pace) -> list[Task]:
    """``behind`` is the dispatch of what follows the chain: it stays."""
    if len(chain) < 2:
        # In their order: what lies between follows the only task.
        return [*chain, *between, *behind]
    times = pace.times
    apart = sum(
        times.memory(str(task.operator.work), task.operator.elements, task.operator.dtype) for task in chain
    )
    measured = sum(task.seconds for task in chain)
    fused = min(fused_s(chain, times), apart)
    seconds = pace.changed(measured, apart, fused, _passes(chain) / len(chain))
    largest = max(chain, key=lambda task: task.operator.elements)
    # What others wait for is the end of the chain.
    joined = replace(chain[-1], seconds=seconds, operator=replace(largest.operator, work="multiply"), name=COMPILED,
                     gradient_bytes=sum(task.gradient_bytes for task in chain),
                     after=tuple(number for task in chain for number in task.after))  # fmt: skip
    return [*(task.times(1 / len(chain)) for task in between), joined, *behind]


def _passes(chain: Sequence[Task]) -> int:
    """Over memory: one, and one more for each reduction; at most as many as operators."""
    return min(1 + sum(task.operator.work in _REDUCTIONS for task in chain), len(chain))


def fused_s(chain: Sequence[Task], times: OperationTimes) -> float:
    """Calibrated time of a chain as one pass, without any launch."""
    largest = max(chain, key=lambda task: task.operator.elements).operator
    seconds = _passes(chain) * times.memory("multiply", largest.elements, largest.dtype)
    for task in chain:
        operator = task.operator
        if operator.work in ARITHMETIC:
            whole = times.memory(str(operator.work), operator.elements, operator.dtype)
            one_pass = times.memory("multiply", operator.elements, operator.dtype)
            seconds += max(whole - one_pass * (2 if operator.work in _REDUCTIONS else 1), 0.0)
    return seconds
