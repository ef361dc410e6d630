"""Batches prepared beside the training: ``data.workers``, ``data.pin_memory``, ``data.prefetch``.

PyTorch's loader is made anew with the same data, sampler and order and with other processes; the
random numbers that it draws in this process are the same, so losses are too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError
from trine.record.hardware import usable_cores

__all__ = [
    "KEYS",
    "NUMERICS",
    "ORDER",
    "QUANTITY",
    "apply",
    "automatic_workers",
    "check",
    "refusal",
    "tolerance",
]

KEYS = ("data.workers", "data.pin_memory", "data.prefetch")
ORDER = 70
QUANTITY = "data time"
NUMERICS = "unchanged, unless the dataset draws random numbers itself: workers draw their own"


def refusal(config: Config) -> str | None:
    """Everything of these keys can be applied."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """The same batches in the same order."""
    return None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` for pinned memory where there is no device to copy to."""
    if config.data.pin_memory and facts.device_type == "cpu":
        raise UsageError(
            "data.pin_memory speeds copies to a device up, and the model is on the CPU: take the key out"
        )


def apply(assembly: Assembly) -> None:
    """Have ``engine.steps`` remake the loader that it is given."""
    data = assembly.config.data
    if data.workers is None and data.pin_memory is None:
        return
    workers = data.workers
    note = ""
    if workers == "auto":
        workers = automatic_workers(assembly.facts.ranks)
        note = f"cores that {assembly.facts.ranks} ranks leave over"

    def remake(loader: Iterable[Any]) -> Iterable[Any]:
        return _remade(loader, workers, data.pin_memory, data.prefetch)

    assembly.loaders.append(remake)
    for key, value in (("data.workers", workers), ("data.pin_memory", data.pin_memory)):
        if value is not None:
            assembly.effects.append(
                Effect(key, "the loader's own", str(value), note if key == "data.workers" else "")
            )


def automatic_workers(ranks: int) -> int:
    """Workers a rank from the cores that training leaves over; at most four, none where none is left."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    cores = usable_cores()
    return max(0, min(4, cores // local - 1))


def _remade(
    loader: Iterable[Any], workers: int | None, pin_memory: bool | None, prefetch: int | None
) -> Iterable[Any]:
    from torch.utils.data import DataLoader, IterableDataset

    from trine.optim.runtime.loaders import remade

    if type(loader) is not DataLoader:
        raise UsageError(
            f"data.workers: engine.steps got a {type(loader).__name__}, and only a torch DataLoader can be given "
            "workers: pass the DataLoader itself, or take the key out"
        )
    count = loader.num_workers if workers is None else workers
    if isinstance(loader.dataset, IterableDataset) and count > max(1, loader.num_workers):
        raise UsageError(
            f"data.workers = {count}: each worker would read the whole of an iterable dataset, and samples "
            "would repeat: set data.workers to 1, or give the dataset an order by index"
        )
    return remade(
        loader,
        num_workers=count,
        pin_memory=loader.pin_memory if pin_memory is None else pin_memory,
        multiprocessing_context=loader.multiprocessing_context if count else None,
        persistent_workers=count > 0,
        prefetch_factor=(prefetch or loader.prefetch_factor or 2) if count else None,
    )
