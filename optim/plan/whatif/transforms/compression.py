"""Gradients in fewer bytes: less on the link, and a codec's time beside it.

    T(bucket) = collectives · α + S / (ratio · β) + S · codec

The codec's seconds a byte and its ratio are measured on this machine, on gradients drawn at random, by ``trine hardware
--calibrate``. It runs on the thread that communicates, so it takes cores from computing as a transfer does.
"""

from __future__ import annotations

from dataclasses import replace

from trine.optim.config import CODECS
from trine.optim.plan.whatif.graph import Graph, RankStep, Task, mapped
from trine.optim.plan.whatif.transforms import Change
from trine.optim.plan.whatif.transforms._facts import refuse_neutral, require_plain
from trine.optim.plan.whatif.transforms._transfers import (
    contention,
    is_gradient,
    link_of,
    replicas,
    require_exchange,
)

__all__ = ["KEYS", "ORDER", "apply"]

KEYS = ("communication.compression",)
#: Behind what makes links faster and rings longer: no link changes what a codec takes.
ORDER = 78
#: Codecs that are sums of 16-bit numbers: a processor adds those more slowly, a byte, than it adds fp32.
_HALVES = ("bf16", "fp16")


def apply(graph: Graph, change: Change) -> Graph:
    """Raises ``UsageError`` where the record has no all-reduces or the codec was not calibrated."""
    name = change.config.communication.compression
    if name == "none":
        refuse_neutral(graph, change, KEYS)
    require_exchange(graph, KEYS[0])
    require_plain(graph, KEYS[0])
    link = link_of(graph, change.times)
    wire = link_of(graph, change.times, "bf16") if name in _HALVES else link
    codec, ratio = change.times.codec(name, replicas(graph))
    calls = CODECS[name]

    def changed(step: RankStep) -> list[Task]:
        factor = contention(step.tasks, link)

        def compressed(task: Task) -> Task:
            moved = factor * (calls * wire.alpha_s + task.bytes / ratio / wire.bytes_per_s)
            return replace(task, seconds=moved + codec * task.bytes, bytes=int(task.bytes / ratio))

        return [compressed(task) if is_gradient(task) else task for task in step.tasks]

    return mapped(graph, changed)
