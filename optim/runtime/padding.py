"""Padding of the batches that a loader gives: before and after they were packed, grouped or padded further.

Padding waste is padded tokens over all tokens, as the analyses define it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trine.optim._inputs import length_of
from trine.optim.batches import Gathered
from trine.optim.runtime.packing import Packed
from trine.optim.runtime.sequences import lengths_of

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["PaddingCount", "count_padding"]

logger = logging.getLogger("trine")


class PaddingCount:
    """Tokens and slots of the last batch, and of all since the loader began."""

    def __init__(self, key: str, slots_before: Callable[[], int] | None = None) -> None:
        """``slots_before()``: slots that the batches up to the last would have had; else what packed ones say."""
        self.batches = self.tokens = self.slots = self.slots_before = 0
        self._key = key
        self._slots_before = slots_before
        self._last: tuple[int, int, int] | None = None  # tokens, slots, slots before

    def take(self, batch: Any) -> None:
        """Count a batch in host memory; one that does not say its padding counts as unknown."""
        found = _counted(batch)
        self._last = found
        if found is not None:
            self.batches += 1
            self.tokens += found[0]
            self.slots += found[1]
            self.slots_before += found[2]
        if self._slots_before is not None:
            self.slots_before = self._slots_before()

    def waste(self) -> float | None:
        """Of the last batch."""
        return None if self._last is None or not self._last[1] else 1 - self._last[0] / self._last[1]

    def waste_before(self) -> float | None:
        """Of the last batch as it came; where widths are the change, padded to its longest; where the order is, of all
        batches so far in the old order, padded to their longest."""
        if self._slots_before is not None:
            return 1 - self.tokens / self.slots_before if self.slots_before else None
        return None if self._last is None or not self._last[2] else 1 - self._last[0] / self._last[2]

    def __str__(self) -> str:
        if not self.slots or not self.slots_before:
            return f"{self._key}: batches did not say how much of them is padding"
        before, now = 1 - self.tokens / self.slots_before, 1 - self.tokens / self.slots
        return (
            f"{self._key}: padding {before:.1%} before, {now:.1%} now; {self.slots_before} → {self.slots} slots for "
            f"{self.tokens} tokens in {self.batches} batches"
        )


def count_padding(assembly: Assembly, key: str, slots_before: Callable[[], int] | None = None) -> None:
    """Tell ``padding/waste`` and ``padding/waste_before`` of each step, and both in the log when a loader ends.

    Where several keys change batches, the one that is applied last counts.
    """
    count = PaddingCount(key, slots_before)
    assembly.metrics["padding/waste"] = count.waste
    assembly.metrics["padding/waste_before"] = count.waste_before

    def last(assembled: Assembly) -> None:
        if assembled.metrics["padding/waste"] == count.waste:
            assembled.loaders.append(lambda loader: _counting(loader, count))

    assembly.finish.append(last)


def _counted(batch: Any) -> tuple[int, int, int] | None:
    if isinstance(batch, Gathered):
        parts = [_counted(part) for part in batch.parts]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        tokens, slots, before = (sum(column) for column in zip(*known, strict=True))
        return tokens, slots, before
    if isinstance(batch, Packed):
        return sum(batch.document_lengths), batch.slots, batch.slots_before
    found = lengths_of(batch)
    if found is None or not found[0]:
        return None
    return sum(found[0]), found[1], len(found[0]) * max(found[0])


def _counting(loader: Iterable[Any], count: PaddingCount) -> Iterable[Any]:
    return _CountingSized(loader, count) if length_of(loader) is not None else _Counting(loader, count)


class _Counting:
    """In the training process, where metrics are read."""

    def __init__(self, batches: Iterable[Any], count: PaddingCount) -> None:
        self._batches = batches
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._count.take(batch)
            yield batch
        logger.info("%s", self._count)


class _CountingSized(_Counting):
    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
