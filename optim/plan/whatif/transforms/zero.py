"""ZeRO: the optimizer works on a rank's shards; stages 2 and 3 gather parameters and scatter gradients block by block.

Stage 1 keeps the all-reduce of gradients and gathers parameters after the update. Stages 2 and 3 are FSDP2: a block's
parameters are gathered before its forward (3: and before its backward), its gradients reduced and scattered after its
backward, each with copies into and out of flat buffers and the host's work for its hooks, which is calibrated by unit and
parameter (Rajbhandari et al., SC 2020; Zhao et al., VLDB 2023). On a device the next block's gather runs beside this one's
work; without one nothing runs beside, since PyTorch waits for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trine.optim.plan.whatif.graph import LINK, Graph, RankStep, Task, mapped
from trine.optim.plan.whatif.operators import Operator
from trine.optim.plan.whatif.times import Link
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._blocks import Block, blocks_of, compute_lane, require_operators
from trine.optim.plan.whatif.transforms._facts import (
    refuse_neutral,
    require_no_pipeline,
    require_one_microbatch,
    require_plain,
)
from trine.optim.plan.whatif.transforms._launches import with_launches
from trine.optim.plan.whatif.transforms._pace import Pace, pace_of
from trine.optim.plan.whatif.transforms._transfers import (
    BUCKET_COPY,
    contention,
    exchanging,
    is_gradient,
    link_of,
    replaced,
    replicas,
    require_exchange,
    require_replicas,
    slowed,
    transfer,
    waiting,
)
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("zero.stage", "zero.reshard_after_forward")
ORDER = 40


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Among which ranks (empty: all) shards are gathered and scattered, over which links, and whether beside the work."""

    group: tuple[int, ...]
    gather: Link
    scatter: Link
    beside: bool


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` where the record has no gradients to shard, or links or memory were not calibrated."""
    stage = change.config.zero.stage
    if stage == 0:
        require_plain(graph, KEYS[0])
        require_replicas(graph, KEYS[0])
        refuse_neutral(graph, change, KEYS)
    _require(graph, change)
    ranks, idle = replicas(graph), link_of(graph, change.times)
    gather = change.times.link("all_gather").among(ranks)
    scatter = change.times.link("reduce_scatter").among(ranks) if stage > 1 else gather
    again = stage == 3 and change.config.zero.reshard_after_forward is not False
    beside = graph.basis == "kernels" and stage > 1

    def changed(step: RankStep) -> list[Task]:
        if not any(task.gradient_bytes for task in step.tasks):
            raise UsageError(
                f"{KEYS[0]}: this record does not say how large parameters are: record a deep window with shapes"
            )
        pace = pace_of(step.tasks, change.times)
        slower = contention(step.tasks, idle, beside)
        exchange = _Exchange(exchanging(step.tasks), slowed(gather, slower), slowed(scatter, slower), beside)
        tasks = _on_shards(step.tasks, ranks, pace)
        if stage == 1:
            found = _gathered_after(tasks, exchange, pace)
        else:
            found = _block_by_block(replace(step, tasks=tuple(tasks)), exchange, again, pace)
        return with_launches(found, step.tasks)

    return mapped(_noted(graph, change, again), changed)


def _noted(graph: Graph, change: Change, again: bool) -> Graph:
    """With what is assumed."""
    if graph.facts.get("hosts", 1) != 1:
        graph = graph.with_note(
            "gathers and scatters between nodes are taken to be as much slower than calibrated within one as all-reduces were"
        )
    if change.config.zero.stage > 1 and change.times.sharded_unit("forward", 1, again) is None:
        graph = graph.with_note(
            "the host's work for shards was not calibrated and is left out: run trine hardware --calibrate again"
        )
    return graph


def _require(graph: Graph, change: Change) -> None:
    """Raises ``UsageError`` where nothing can be said of shards."""
    if change.given.get("ranks") == 1:
        raise UsageError(
            f"{KEYS[0]}: one rank has nobody to share its state with: take ranks = 1 or {KEYS[0]} out"
        )
    require_operators(graph.basis, KEYS[0])
    require_plain(graph, KEYS[0])
    require_replicas(graph, KEYS[0])
    require_exchange(graph, KEYS[0])
    require_no_pipeline(graph, KEYS[0])
    require_one_microbatch(graph, KEYS[0])
    if not change.times:
        raise UsageError("zero.stage: this machine is not calibrated: run trine hardware --calibrate")
    if change.config.zero.stage == 2 and change.config.zero.reshard_after_forward is True:
        raise UsageError("zero.stage = 2 keeps parameters from forward to backward: that is zero.stage = 3")


def _on_shards(tasks: tuple[Task, ...], ranks: int, pace: Pace) -> list[Task]:
    """The optimizer's work on a rank's share of every parameter."""

    def shared(task: Task) -> Task:
        operator = task.operator
        if task.phase != "optimizer" or operator.work is None or operator.kind != "memory":
            return task
        before = pace.times.memory(operator.work, operator.elements, operator.dtype)
        return task.times(
            pace.times.memory(operator.work, max(operator.elements / ranks, 1), operator.dtype) / before
        )

    return [shared(task) for task in tasks]


def _copied(size: float, phase: str, lane: str, pace: Pace) -> Task:
    elements = max(int(size // 4), 1)
    operator = Operator("memory", "copy", None, elements, "fp32")
    return Task(pace.new("copy", elements, "fp32"), phase, lane, operator, "aten::copy_", events=1)


def _gathered_after(tasks: list[Task], exchange: _Exchange, pace: Pace) -> list[Task]:
    """Stage 1: ranks give each other the parameters that they updated."""
    gather = exchange.gather
    size = float(sum(task.gradient_bytes for task in tasks))
    place = max((at for at, task in enumerate(tasks) if task.phase == "optimizer"), default=len(tasks) - 1)
    lane = compute_lane(tasks)
    own = _copied(size / gather.ranks, "optimizer", lane, pace)
    moved = transfer(
        gather.seconds(size), "all_gather", size, "parameters", (own.number,), "optimizer", exchange.group
    )
    back = _copied(size * (gather.ranks - 1) / gather.ranks, "optimizer", lane, pace)
    return [
        *tasks[: place + 1],
        own,
        moved,
        waiting((moved.number,), "optimizer", lane),
        back,
        *tasks[place + 1 :],
    ]


# --- stages 2 and 3 -----------------------------------------------------------------------------------


def _block_by_block(step: RankStep, exchange: _Exchange, again: bool, pace: Pace) -> list[Task]:
    blocks, beside = blocks_of(step), exchange.beside
    units = _units(step, blocks)
    # Buckets and the replicas' buffers go: FSDP2 has neither.
    kept = replaced(
        step, lambda task: is_gradient(task) or (task.lane == LINK and task.issued == "broadcast"), ()
    )
    tasks = [task for task in kept if task.name != BUCKET_COPY]
    before, after = _places(tasks, step, blocks)
    found: list[Task] = []
    last: int | None = None
    lane = compute_lane(tasks)
    for task in tasks:
        for unit, phase in before.get(task.number, ()):
            size, parameters = units[unit]
            twice = again and unit < len(blocks)  # the root's parameters stay
            if size > 0:
                found.append(_hooks(phase, parameters, twice, beside, pace))
                if phase == "forward" or twice:
                    found += _gather(unit, size, phase, exchange, lane, last if beside else None, pace)
        found.append(task)
        last = task.number
        for unit in after.get(task.number, ()):
            size, parameters = units[unit]
            if size > 0 and unit == len(blocks):  # nothing comes before its backward
                found.append(_hooks("backward", parameters, False, beside, pace))
            found += _scatter(unit, size, exchange, lane, pace)
    return _finished(found, lane)


def _hooks(phase: str, parameters: int, again: bool, beside: bool, pace: Pace) -> Task:
    """The host's work for a unit; as much slower than calibrated as products were, where the host computes them."""
    seconds = pace.times.sharded_unit(phase, parameters, again) or 0.0
    return Task(seconds * (1.0 if beside else pace.product), phase, events=parameters)


def _units(step: RankStep, blocks: list[Block]) -> list[tuple[float, int]]:
    """Bytes and number of each block's parameters, and of the root's last: by whose backward each gradient came in."""
    sizes, counts = [0.0] * (len(blocks) + 1), [0] * (len(blocks) + 1)
    sequence = -1
    for task in step.tasks:
        if task.phase != "backward":
            continue
        if task.sequence >= 0:
            sequence = task.sequence
        if task.gradient_bytes:
            unit = _unit_of(sequence, blocks)
            sizes[unit] += task.gradient_bytes
            counts[unit] += 1
    return list(zip(sizes, counts, strict=True))


def _unit_of(sequence: int, blocks: list[Block]) -> int:
    """The block of a backward function; the root's number where it lies before all or behind all."""
    if not blocks or sequence > blocks[-1].sequence:
        return len(blocks)
    for place, block in enumerate(blocks):
        if sequence <= block.sequence:
            low = 2 * blocks[0].sequence - blocks[1].sequence if place == 0 and len(blocks) > 1 else -1
            return len(blocks) if place == 0 and sequence <= low else place
    return len(blocks)


def _places(
    tasks: list[Task], step: RankStep, blocks: list[Block]
) -> tuple[dict[int, list[tuple[int, str]]], dict[int, list[int]]]:
    """Before which task a unit is gathered, and after which its gradients are scattered; by the tasks' numbers."""
    root = len(blocks)
    before: dict[int, list[tuple[int, str]]] = {}
    after: dict[int, list[int]] = {}
    forward = [task for task in tasks if task.phase == "forward" and task.lane != LINK]
    backward = [task for task in tasks if task.phase == "backward" and task.lane != LINK]
    if forward:
        before.setdefault(forward[0].number, []).append((root, "forward"))
    for place, block in enumerate(blocks):
        before.setdefault(step.tasks[block.first].number, []).append((place, "forward"))
    seen: dict[int, int] = {}
    for task in backward:
        if task.sequence >= 0:
            unit = _unit_of(task.sequence, blocks)
            if unit not in seen and unit < root:
                before.setdefault(task.number, []).append((unit, "backward"))
            seen[unit] = task.number
    if backward:
        seen[root] = backward[-1].number
    for unit, number in seen.items():
        after.setdefault(number, []).append(unit)
    return before, after


def _gather(
    unit: int, size: float, phase: str, exchange: _Exchange, lane: str, ahead: int | None, pace: Pace
) -> list[Task]:
    """Copy in, all-gather, copy out. ``ahead``: the task behind which it may begin, where it runs beside the work."""
    link = exchange.gather
    own = _copied(size / link.ranks, phase, lane, pace)
    moved = transfer(link.seconds(size), "all_gather", size, f"gather {phase} {unit}",
                     (own.number if ahead is None else ahead,), phase, exchange.group)  # fmt: skip
    out = replace(_copied(size, phase, lane, pace), after=(moved.number,))
    return [own, moved, out]


def _scatter(unit: int, size: float, exchange: _Exchange, lane: str, pace: Pace) -> list[Task]:
    if size <= 0:
        return []
    into = _copied(size, "backward", lane, pace)
    moved = transfer(exchange.scatter.seconds(size), "reduce_scatter", size, f"scatter {unit}", (into.number,),
                     group=exchange.group)  # fmt: skip
    return [into, moved] if exchange.beside else [into, moved, waiting((moved.number,), "backward")]


def _finished(tasks: list[Task], lane: str) -> list[Task]:
    """The optimizer's first task waits for every scatter."""
    scattered = tuple(task.number for task in tasks if task.lane == LINK and task.issued == "reduce_scatter")
    place = next((at for at, task in enumerate(tasks) if task.phase == "optimizer"), None)
    if place is None or not scattered:
        return tasks
    return [*tasks[:place], waiting(scattered, "optimizer", lane), *tasks[place:]]
