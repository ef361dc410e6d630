"""What a case is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """One configuration, where it runs, and how near to the plain run it must stay."""

    name: str
    changes: Mapping[str, Any]
    ranks: int = 1
    dtype: str = "float64"
    tolerance: float = 1e-10
    optimizer: str = "adamw"
    by_last: bool = False
    #: Changes of the sample's GPTConfig (dropout, attention, …).
    model: Mapping[str, Any] = field(default_factory=dict)
    #: "windows" of text, all of one length; or "documents" of different ones, padded.
    data: str = "windows"
    #: Environment of the ranks, such as TRINE_RANKS_PER_NODE.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Clips gradients' norm, so that a norm counted twice shows.
    clip_norm: float | None = None
    #: Too long for the tests that people run by default.
    slow: bool = False
