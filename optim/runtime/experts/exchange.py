"""Rows of tokens from rank to rank and back, with gradients that travel the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

__all__ = ["Traffic", "exchanged", "rooted"]


class Traffic:
    """Counts the bytes that leave this rank, in forward and in backward."""

    def __init__(self) -> None:
        #: Since the last :meth:`forget`, to other ranks alone.
        self.sent_bytes = 0

    def count(self, rows: torch.Tensor, sent: Sequence[int], place: int) -> None:
        """An exchange in which ``sent[p]`` of ``rows`` go to place p, and this rank stands at ``place``."""
        size = rows[0].numel() if len(rows) else 0
        self.sent_bytes += (sum(sent) - sent[place]) * size * rows.element_size()

    def forget(self) -> None:
        """Begin anew."""
        self.sent_bytes = 0


def exchanged(
    rows: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: distributed.ProcessGroup,
    traffic: Traffic,
    gradient_scale: float = 1.0,
) -> torch.Tensor:
    """Rows (n, …) of which the first ``sent[0]`` go to the group's first rank, and so on; those that came, by sender.

    Collective, and collective in backward, where gradients are multiplied by ``gradient_scale``. PyTorch's
    ``all_to_all_single_autograd`` does the same without the scale; this one counts its bytes in both directions.
    """
    way = (list(sent), list(received), group, traffic)
    result: torch.Tensor = _Exchange.apply(rows, way, gradient_scale)  # type: ignore[no-untyped-call]
    return result


def rooted(rows: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """``rows``, of which there are none, as if ``parameters`` had computed them: their gradients are zeros.

    Without it a rank that got no token would have no backward, and leave the others waiting in theirs.
    """
    result: torch.Tensor = _Rooted.apply(rows, *parameters)  # type: ignore[no-untyped-call]
    return result


#: Rows sent to each rank, rows received, the group and what counts them.
_Way = tuple[list[int], list[int], distributed.ProcessGroup, Traffic]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, way: _Way, gradient_scale: float) -> torch.Tensor:
        ctx.way, ctx.gradient_scale = way, gradient_scale
        return _all_to_all(rows, *way)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sent, received, group, traffic = ctx.way
        arrived = _all_to_all(gradient, received, sent, group, traffic)
        return arrived if ctx.gradient_scale == 1.0 else arrived.mul_(ctx.gradient_scale), None, None


def _all_to_all(
    rows: torch.Tensor,
    sent: list[int],
    received: list[int],
    group: distributed.ProcessGroup,
    traffic: Traffic,
) -> torch.Tensor:
    traffic.count(rows, sent, distributed.get_rank(group))
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    distributed.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _Rooted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
