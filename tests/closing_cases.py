"""What the tests of closing run on each rank; importable by spawned processes."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import trine
from trine.optim.runtime.exchange.thread import CommunicationThread

__all__: list[str] = []


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch).pow(2).mean()
    return result


def synchronised_after_closing(rank: int, changes: dict[str, Any]) -> tuple[bool, bool, bool, int]:
    """A program's own wrapper: before an engine, while one accumulates, after it was closed; and groups that are left."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    wrapped = DistributedDataParallel(model)
    groups = len(distributed.distributed_c10d._world.pg_map)
    engine = trine.optimize(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), changes)
    before = wrapped.require_backward_grad_sync
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()
    during = wrapped.require_backward_grad_sync
    engine.discard()
    engine.close()
    left = len(distributed.distributed_c10d._world.pg_map) - groups
    return before, during, wrapped.require_backward_grad_sync, left


def closed_by_its_own_thread(rank: int) -> tuple[bool, bool]:
    """As the garbage collector does when it finds an engine while the thread runs: no failure, and the thread ends."""
    thread = CommunicationThread(torch.device("cpu"))
    flat = torch.ones(2)
    thread.submit(thread.close, flat).wait()
    thread._thread.join(5)
    return thread.failure is None, thread._thread in threading.enumerate()
