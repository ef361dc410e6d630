"""What is known of a step's work: what no operator tells of keeps its time, whatever is changed."""

from __future__ import annotations

from trine.optim.plan.whatif.graph import HOST, LINK, Graph, Task
from trine.record.errors import UsageError

__all__ = ["with_known_work"]

#: Of a device's time in forward and backward, unknown work from this share on is told.
TOLD_SHARE = 0.05


def with_known_work(graph: Graph, key: str) -> Graph:
    """The graph, with a note of the device's time that no operator tells of. Raises ``UsageError`` where no product is
    known: nothing would change, and that would be no answer."""
    tasks = [task for each in graph.steps[0].ranks for task in each.tasks if _counts(task)]
    if not any(task.kind == "product" for task in tasks):
        raise UsageError(
            f"{key}: this record does not say which of its work is a matrix product: record a deep window, or trace with "
            "record_shapes=True"
        )
    device = [task for task in tasks if task.lane != HOST]
    whole = sum(task.seconds for task in device)
    unknown = sum(task.seconds for task in device if task.kind not in ("product", "memory"))
    if unknown < TOLD_SHARE * whole or whole <= 0:
        return graph
    return graph.with_note(
        f"{unknown / whole:.0%} of the device's forward and backward is work that no operator with shapes tells of: it keeps "
        "its time"
    )


def _counts(task: Task) -> bool:
    return task.name != "" and task.phase in ("forward", "backward") and task.lane != LINK
