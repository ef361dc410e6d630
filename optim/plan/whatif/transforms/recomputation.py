"""Activations recomputed in backward: a block's forward runs again before its backward begins.

PyTorch's checkpoint stops a recomputation once all that was saved is there again (``early_stop``): the block's last product
saves its inputs before it runs, so neither it nor what follows is repeated. ``selective`` keeps the results of products,
as :mod:`trine.optim.techniques.checkpointing` does, and repeats the rest.
"""

from __future__ import annotations

from dataclasses import replace

from trine.optim.plan.whatif.graph import Graph, RankStep, Task, mapped, renumbered
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._blocks import Block, blocks_of, require_operators
from trine.optim.plan.whatif.transforms._facts import refuse_neutral, require_one_microbatch, require_plain
from trine.record.errors import UsageError

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("checkpointing.mode", "checkpointing.every")
ORDER = 10


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` where a step holds no repeated blocks, or the mode is decided by measurement."""
    wanted = change.config.checkpointing
    if wanted.mode == "none":
        refuse_neutral(graph, change, KEYS)
    require_operators(graph.basis, KEYS[0])
    require_plain(graph, KEYS[0])
    require_one_microbatch(graph, KEYS[0])
    if wanted.mode not in ("full", "selective"):
        raise UsageError(
            f'checkpointing.mode = "{wanted.mode}" is decided by measurement as the run begins: ask for "full" or "selective"'
        )
    return mapped(graph, lambda step: _recomputed(step, wanted.every, wanted.mode == "selective"))


def _recomputed(step: RankStep, every: int, selective: bool) -> list[Task]:
    blocks = blocks_of(step)
    if not blocks:
        raise UsageError("checkpointing.mode: no repeated blocks were found among this record's products")
    pending = sorted(blocks[::every], key=lambda block: -block.sequence)
    found: list[Task] = []
    for task in step.tasks:
        while pending and task.phase == "backward" and 0 <= task.sequence <= pending[0].sequence:
            found += _again(step, pending.pop(0), selective)
        found.append(task)
    if pending:
        raise UsageError("checkpointing.mode: this record does not say where each block's backward begins")
    return found


def _again(step: RankStep, block: Block, selective: bool) -> list[Task]:
    tasks = step.tasks[block.first : block.last]
    last = max(place for place, task in enumerate(tasks) if task.kind == "product")
    return renumbered(
        replace(task, phase="backward", recomputed=True)
        for task in tasks[:last]
        if task.kind in ("memory", "glue") or (task.kind == "product" and not selective)
    )
