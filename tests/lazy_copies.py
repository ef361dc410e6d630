"""Copies that happen as late as a device's may, for tests of what is moved beside the computation."""

from __future__ import annotations

import threading
from typing import Any

import torch

from trine.optim.runtime.host_memory import Copier
from trine.optim.runtime.weak_storage import WeakStorage

__all__ = ["LazyCopier"]


class LazyEvent:
    """Happens when somebody waits for it, as late as a device may be."""

    def __init__(self, copier: LazyCopier) -> None:
        self.copier = copier
        self.number = len(copier.queue) + copier.done

    def synchronize(self) -> None:
        self.copier.run_to(self.number)


class LazyCopier(Copier):
    """A stream whose copies happen only when they are waited for, on memory that must still be there by then."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.queue: list[tuple[Any, Any]] = []
        self.done = 0
        self.lock = threading.RLock()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> LazyEvent:
        # Views that hold nothing: memory that was let go too early is filled with something else, as a device's is.
        ends = (WeakStorage(target), WeakStorage(source))
        sizes = [(end.storage_offset(), end.numel()) for end in (target, source)]
        with self.lock:
            self.queue.append((ends, sizes))
            return LazyEvent(self)

    def computing(self) -> str:
        return "computing"

    def wait(self, event: LazyEvent, stream: Any) -> None:
        event.synchronize()

    def finish(self) -> None:
        self.run_to(self.done + len(self.queue))

    def run_to(self, number: int) -> None:
        with self.lock:
            while self.done < number:
                ends, sizes = self.queue.pop(0)
                self.done += 1
                storages = [end.get() for end in ends]
                if None in storages:
                    raise AssertionError("memory was let go before its copy")
                target, source = (
                    torch.empty(0, dtype=torch.uint8).set_(storage, offset, (count,), (1,))
                    for storage, (offset, count) in zip(storages, sizes, strict=True)
                )
                target.copy_(source)
