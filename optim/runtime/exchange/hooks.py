"""The assembly's reduction as the communication hook of DistributedDataParallel.

DDP calls the hook for each bucket when its gradients are there, in the same order on every rank, while backward goes on;
the reduction runs on the communication thread, and DDP waits for all of them at the end of backward. Buckets are made
anew after the first step, so pieces go by the parameter's name, never by the bucket's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trine.optim.runtime.adoption import plain_name
from trine.optim.runtime.exchange import Bucket, Piece, Reduction
from trine.optim.runtime.exchange.sums import AllReduce, backend_sum
from trine.optim.runtime.exchange.thread import CommunicationThread, thread_of
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["AllReduce", "backend_sum", "bucket_of", "install"]


def bucket_of(bucket: Any, names: Mapping[torch.Tensor, str]) -> Bucket:
    """DDP's ``GradBucket`` in our terms. ``names``: parameter → its name in the model that was given."""
    start = 0
    pieces = []
    for parameter in bucket.parameters():
        pieces.append(Piece(names[parameter], start, tuple(parameter.shape)))
        start += parameter.numel()
    return Bucket(bucket.buffer(), tuple(pieces))


def install(assembly: Assembly) -> None:
    """Make ``assembly.model``, once it is a DDP, average by ``assembly.reduction``.

    To be called when every technique has been applied (``assembly.finish``), and again after the model was wrapped anew;
    calling it twice for one wrapper does nothing. Without a reduction nothing is installed: DDP's own all-reduce stays.
    Raises ``UsageError`` where the program has a communication hook of its own.
    """
    reduction = assembly.reduction
    wrapped = assembly.model
    if reduction is None or not isinstance(wrapped, DistributedDataParallel):
        return
    installed = [state for _, state in wrapped._comm_hooks]
    if any(isinstance(state, _State) and state.reduction is reduction for state in installed):
        return
    if installed:
        raise UsageError(
            "this DistributedDataParallel has a communication hook of its own, and communication.compression or "
            "communication.algorithm would add a second: drop the key, or give the model without the hook"
        )
    names = {p: plain_name(name) for name, p in wrapped.module.named_parameters()}
    wrapped.register_comm_hook(_State(reduction, thread_of(assembly), names), _hook)


class _State:
    """What the hook needs besides the bucket."""

    def __init__(
        self, reduction: Reduction, thread: CommunicationThread, names: Mapping[torch.Tensor, str]
    ) -> None:
        self.reduction = reduction
        self.thread = thread
        self.names = names


def _hook(state: Any, bucket: Any) -> Any:
    ours = bucket_of(bucket, state.names)
    return state.thread.submit(lambda: state.reduction.mean(ours), ours.flat)


# DDP compares the annotations with classes, which annotations kept as strings are not: it must find none.
_hook.__annotations__ = {}
