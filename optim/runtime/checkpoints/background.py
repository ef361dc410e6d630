"""Saving in the background: what is written is copied to the host's memory, and training goes on from there.

Weighed: PyTorch's ``dcp.async_save`` copies everything that a rank holds, replicas of others' parts included, before it
plans; its process executor wants a second process a rank with ports of its own, and its thread executor is this, without
checksums, a description and a rename in the end. So DCP's planner and storage are driven from here: the plan comes first,
and only what this rank is to write is copied, to buffers that are kept for the next save (pinned, where there is a device
to copy from).
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed.checkpoint.metadata import MetadataIndex

from trine.optim.runtime.checkpoints.ranks import Ranks, reason_of
from trine.optim.runtime.checkpoints.writing import Job, written
from trine.optim.runtime.groups import end_group
from trine.optim.runtime.lost_ranks import is_of_a_group
from trine.record.errors import TrainingError

if TYPE_CHECKING:
    from trine.optim.runtime.checkpoints.parts import SavePlanner

__all__ = ["Background", "Saving"]

logger = logging.getLogger("trine")


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, folder: Path, future: Future[Path]) -> None:
        #: Where it will be.
        self.folder = folder
        self._future = future
        self._told = False

    def done(self) -> bool:
        """Whether it is whole, or has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until it is whole: its folder. Raises what went wrong, and ``TimeoutError`` after ``timeout`` seconds."""
        try:
            return self._future.result(timeout)
        finally:
            self._told = self._future.done()

    def settle(self) -> None:
        """Wait, and raise what went wrong unless :meth:`result` has told it."""
        told = self._told
        try:
            self.result()
        except Exception:
            if not told:
                raise


class Background:
    """Writes one checkpoint at a time on a thread, over a process group of its own."""

    def __init__(self, device: torch.device, rank: int, ranks: int) -> None:
        """Every rank must make it at the same point, since it makes a group."""
        self._device = device
        group = None
        if ranks > 1:  # gloo, also beside NCCL: collectives of two threads must not meet on one group
            group = distributed.new_group(backend="gloo", group_desc="trine checkpoints")
        self.ranks = Ranks(rank, ranks, group)
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    @property
    def host_bytes(self) -> int:
        """Of the buffers, which are kept."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def begin(self, job: Job) -> Saving:
        """Copy what this rank writes, then write it in the background. Raises on every rank where one has no memory for it."""
        assert job.plans.mine is not None
        indices = [item.index for item in job.plans.mine.items]
        self.ranks.all(lambda: self._copy(job.planner, indices), job.what)
        future: Future[Path] = Future()
        # Not a daemon: the process waits for it when it ends.
        thread = threading.Thread(target=self._run, args=(job, future), name="trine-checkpoint")
        saving = Saving(job.folder, future)
        thread.start()
        return saving

    def _copy(self, planner: SavePlanner, indices: list[MetadataIndex]) -> None:
        is_cuda = self._device.type == "cuda"
        copies: dict[MetadataIndex, torch.Tensor] = {}
        with torch.no_grad():
            for index in indices:
                values = planner.lookup_object(index)
                buffer = self._buffers.get(index)
                if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
                    buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=is_cuda)
                copies[index] = buffer.copy_(values, non_blocking=is_cuda)
        if is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        planner.copies = self._buffers = copies  # those of tensors that are no more are let go

    def _run(self, job: Job, future: Future[Path]) -> None:
        try:
            found = written(job, self.ranks)
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
            told = _in_words(error, job)
            logger.error("%s", str(told).partition("\n")[0])
            future.set_exception(told)
        else:
            future.set_result(found)

    def close(self) -> None:
        """End the group; nothing may be under way."""
        self._buffers.clear()
        if self.ranks.group is not None:
            end_group(self.ranks.group)


def _in_words(error: BaseException, job: Job) -> BaseException:
    if not is_of_a_group(error):
        return error
    reason = reason_of(error).partition(". This is typically")[0]
    told = TrainingError(
        f"{job.what}: a rank was lost, or the process group ended before engine.close() ({reason})"
    )
    told.__cause__ = error
    return told
