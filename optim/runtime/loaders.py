"""Loaders made anew with something changed: other workers, another order, other batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from trine.optim._inputs import length_of

__all__ = ["changed", "remade"]


def remade(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A DataLoader over the same data in the same order, but for ``changes`` to its arguments.

    A new ``batch_sampler`` replaces the sampler.
    """
    keys: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "in_order": loader.in_order,
    }
    if isinstance(loader.dataset, IterableDataset):
        keys |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        keys["batch_sampler"] = loader.batch_sampler
    else:
        keys |= {"batch_size": None, "sampler": loader.sampler}
    keys |= changes
    return DataLoader(loader.dataset, **keys)


def changed(loader: Iterable[Any], change: Callable[[Any], Any], uncollated: bool = False) -> Iterable[Any]:
    """The loader with each batch changed: in the workers of a DataLoader, else as batches come.

    ``uncollated``: ``change`` takes a list of samples as well, so PyTorch's own collate, which stacks samples of one
    length alone, is left out.
    """
    if type(loader) is not DataLoader:
        return _Sized(loader, change) if length_of(loader) is not None else _Changed(loader, change)
    collate = loader.collate_fn
    if uncollated and collate is default_collate and loader.batch_size is not None:
        return remade(loader, collate_fn=change)
    return remade(loader, collate_fn=_Both(collate, change))


@dataclass(frozen=True)
class _Both:
    """A collate_fn, then a change. A class, since workers that are spawned take it over by pickle."""

    collate: Callable[[Any], Any]
    change: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        return self.change(self.collate(samples))


class _Changed:
    def __init__(self, batches: Iterable[Any], change: Callable[[Any], Any]) -> None:
        self._batches = batches
        self._change = change

    def __iter__(self) -> Iterator[Any]:
        return map(self._change, self._batches)


class _Sized(_Changed):
    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
