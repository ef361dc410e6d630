"""A weak reference to a tensor's storage: its address is not reused while the reference lives, its memory is freed."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["WeakStorage"]


class WeakStorage:
    """Of a tensor."""

    __slots__ = ("_reference", "address")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        #: Tells storages apart for as long as this object lives.
        self.address: int = self._reference.cdata

    def get(self) -> torch.UntypedStorage | None:
        """The storage, or ``None`` when it is gone."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.address)
        return found
