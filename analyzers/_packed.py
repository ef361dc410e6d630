"""Parts of a rank that stay pickled until they are asked for: as objects a thousand ranks' parts take three times
the memory, and no study looks at another's."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .results import RankSummary

__all__ = ["PackedParts", "packed"]


class PackedParts(Mapping[str, Any]):
    """What a mapping of parts holds, each unpickled anew when it is taken."""

    __slots__ = ("_packed",)

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._packed = {key: pickle.dumps(part, pickle.HIGHEST_PROTOCOL) for key, part in parts.items()}

    def __getitem__(self, key: str) -> Any:
        return pickle.loads(self._packed[key])

    def __contains__(self, key: object) -> bool:
        return key in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def packed(summary: RankSummary) -> RankSummary:
    """The summary with its parts packed, for the journey from a worker and the wait for the other ranks."""
    return replace(summary, parts=PackedParts(summary.parts))
