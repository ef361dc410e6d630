"""Ranks of one tensor group compute the same forward: whether its input is the same is looked at before they meet in it.

Ranks that were given batches of different widths would meet with messages of different sizes, on which gloo aborts the process;
different batches of one width would train on as if each rank's losses were of the same. On devices reading the input would
wait for all that is queued there, so that only ranks on processors look.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import distributed, nn

from trine.optim.batches import tensors_of
from trine.record.errors import UsageError

__all__ = ["look_at_inputs"]

_READ_BYTES = 2**16  # of each tensor


def look_at_inputs(model: nn.Module, group: distributed.ProcessGroup) -> Any:
    """Compare what ``model`` is called with, each time, over ``group``. Collective; the hook's handle.

    The call raises ``UsageError`` on all ranks at once where they are given different tensors.
    """

    def look(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        own = _checksum((arguments, named))
        told = torch.tensor([own, -own], dtype=torch.int64)
        distributed.all_reduce(told, distributed.ReduceOp.MAX, group)
        if int(told[0]) != -int(told[1]):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of((arguments, named)))
            raise UsageError(
                f"parallel.tensor: the ranks of one group call the model with different tensors (here {shapes}), and compute "
                "one forward together: give them the same batch, sampled with engine.data_rank and engine.data_ranks, and draw "
                "what is random in loss_fn from a generator that is seeded alike"
            )

    return model.register_forward_pre_hook(look, with_kwargs=True)


def _checksum(values: Any) -> int:
    found = 0
    for tensor in tensors_of(values):
        found = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), found)
        read = tensor.detach().reshape(-1)[: _READ_BYTES // max(tensor.element_size(), 1)].contiguous()
        if read.numel():
            found = zlib.crc32(read.view(torch.uint8).numpy().tobytes(), found)
    return found
