"""After a sharded update: every rank gives the others the rows that it updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed, nn

__all__ = ["Gathering"]

#: Of what a rank gathers at once; two buckets are on their way at a time, which bounds the extra memory.
BUCKET_BYTES = 32 * 2**20

#: Its name from PyTorch 2.13 on, and before.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class Gathering:
    """All-gathers row shards of whole parameters in flat buckets, so that all ranks end with the same bits."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: distributed.ProcessGroup) -> None:
        self._group = group
        self._shards = distributed.get_world_size(group)
        self._place = distributed.get_rank(group)
        self._buckets = _buckets(parameters)

    def run(self) -> None:
        """Parameters as their owners have them, everywhere. Blocks the calling thread (on CUDA: its stream)."""
        pending: list[tuple[list[nn.Parameter], torch.Tensor, distributed.Work]] = []
        for bucket in self._buckets:
            if len(pending) == 2:
                self._finish(*pending.pop(0))
            pending.append(self._start(bucket))
        for each in pending:
            self._finish(*each)

    def _start(self, bucket: list[nn.Parameter]) -> tuple[list[nn.Parameter], torch.Tensor, distributed.Work]:
        lengths = [self._length(parameter) for parameter in bucket]
        own = bucket[0].new_zeros(sum(lengths))
        for parameter, piece in zip(bucket, torch.split(own, lengths), strict=True):
            rows = self._rows(parameter, self._place)
            piece[: rows.numel()].copy_(rows.reshape(-1))
        gathered = own.new_empty(self._shards * own.numel())
        return bucket, gathered, _all_gather(gathered, own, group=self._group, async_op=True)

    def _finish(self, bucket: list[nn.Parameter], gathered: torch.Tensor, work: distributed.Work) -> None:
        work.wait()
        lengths = [self._length(parameter) for parameter in bucket]
        for place, flat in enumerate(gathered.chunk(self._shards)):
            if place == self._place:
                continue
            for parameter, piece in zip(bucket, torch.split(flat, lengths), strict=True):
                rows = self._rows(parameter, place)
                rows.copy_(piece[: rows.numel()].view(rows.shape))

    def _length(self, parameter: nn.Parameter) -> int:
        """Elements of the longest shard, which all are padded to."""
        rows = -(-parameter.shape[0] // self._shards)
        return rows * (parameter.numel() // max(parameter.shape[0], 1))

    def _rows(self, parameter: nn.Parameter, place: int) -> torch.Tensor:
        size = -(-parameter.shape[0] // self._shards)
        return parameter.data[place * size : (place + 1) * size]


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in their order, by dtype, cut at about ``BUCKET_BYTES``."""
    found: list[list[nn.Parameter]] = []
    for kind in dict.fromkeys((parameter.dtype, parameter.device) for parameter in parameters):
        size = 0
        for parameter in parameters:
            if (parameter.dtype, parameter.device) != kind:
                continue
            if not size or size >= BUCKET_BYTES:
                found.append([])
                size = 0
            found[-1].append(parameter)
            size += parameter.numel() * parameter.element_size()
    return found
