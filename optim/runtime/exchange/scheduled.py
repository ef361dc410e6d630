"""Runs a :class:`Plan` with point-to-point messages: what ring, tree and two-level have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed

from trine.optim.runtime.exchange.schedule import Message, Plan, Step, bounds

__all__ = ["ScheduledSum"]


class ScheduledSum:
    """Sums a flat tensor in place over ``group`` by a plan; a ``SumOver``, to be called in one order on every rank.

    ``plan_of`` gives this rank's plan for a tensor of so many bytes. Values are added in the tensor's own dtype; what
    travels is bytes, so every dtype that can be added can be summed. Every rank ends with the same bits: each chunk is
    summed on one path and handed round complete. Raises ``ValueError`` for a tensor that is not flat and contiguous,
    and ``RuntimeError``, from the backend, where a peer left or did not answer within the group's timeout.
    """

    def __init__(self, plan_of: Callable[[int], Plan], group: distributed.ProcessGroup) -> None:
        self._plan_of = plan_of
        self._group = group
        #: Bytes that this rank has sent since the start.
        self.sent_bytes = 0

    def __call__(self, flat: torch.Tensor) -> None:
        """Replace ``flat``, (elements,), by its sum over the ranks."""
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(f"an all-reduce takes a flat contiguous tensor, not {tuple(flat.shape)}")
        plan = self._plan_of(flat.numel() * flat.element_size())
        scratch = flat.new_empty(_scratch_elements(plan, flat.numel()))
        for step in plan.steps:
            self._run(step, plan.chunks, flat, scratch)

    def _run(self, step: Step, chunks: int, flat: torch.Tensor, scratch: torch.Tensor) -> None:
        def part(message: Message) -> torch.Tensor:
            elements = flat.numel()
            return flat[bounds(elements, chunks, message.first) : bounds(elements, chunks, message.last)]

        operations = []
        for message in step.sends:
            values = part(message)
            operations.append(self._operation(distributed.isend, values, message.peer))
            self.sent_bytes += values.numel() * values.element_size()
        added: dict[Message, torch.Tensor] = {}
        used = 0
        for message in step.adds:
            size = part(message).numel()
            added[message] = scratch[used : used + size]
            used += size
        # Between two ranks messages match by their order, which is the chunks' order on both sides.
        for message in sorted((*step.adds, *step.copies)):
            values = added[message] if message in added else part(message)
            operations.append(self._operation(distributed.irecv, values, message.peer))
        full = [
            operation for operation in operations if operation.tensor.numel()
        ]  # empty on both sides alike
        if not full:
            return
        for work in distributed.batch_isend_irecv(full):
            work.wait()
        for message, values in added.items():
            part(message).add_(values)

    def _operation(
        self, function: Callable[..., distributed.Work | None], values: torch.Tensor, peer: int
    ) -> distributed.P2POp:
        return distributed.P2POp(function, values.view(torch.uint8), group=self._group, group_peer=peer)


def _scratch_elements(plan: Plan, elements: int) -> int:
    """The most that is received to be added in one step."""
    return max(
        (
            sum(
                bounds(elements, plan.chunks, m.last) - bounds(elements, plan.chunks, m.first)
                for m in step.adds
            )
            for step in plan.steps
        ),
        default=0,
    )
