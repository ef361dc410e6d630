"""The cases of ``benchmarks/parity.py``, which are the core of the runtime's tests too.

A case's tolerance is relative, on the loss of every step (``by_last``: on the mean of the last five, for what is only
right on average). 1e-10 in float64 is for what is exact by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "Case"]


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
    #: Environment of the ranks, such as TRINE_RANKS_PER_NODE.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Too long for the tests that people run by default.
    slow: bool = False


_PRECISION = (
    Case("bf16 autocast", {"precision.dtype": "bf16"}, dtype="float32", tolerance=2e-3),
    Case("fp32 said aloud", {"precision.dtype": "fp32"}, tolerance=0.0),
)
_FUSED = (
    Case("fused optimizer", {"compute.fuse": ["optimizer"]}),
    Case("sdpa", {"compute.attention": "sdpa"}, dtype="float32", tolerance=1e-5),
)
_SEQUENCES: tuple[Case, ...] = ()
_ACCUMULATION = (
    Case("accumulation 2", {"accumulation.steps": 2}, optimizer="sgd"),
    Case("accumulation 2 on 2", {"accumulation.steps": 2}, ranks=2, optimizer="sgd"),
)
_DATA_PARALLEL = (
    Case("nothing changed on 2", {}, ranks=2, optimizer="sgd"),
    Case("small buckets on 2", {"communication.bucket_mib": 0.05}, ranks=2),
    Case("gradient as view on 2", {"communication.gradient_as_view": True}, ranks=2),
)
_COMPRESSION: tuple[Case, ...] = ()
_TOPOLOGY: tuple[Case, ...] = ()
_ZERO: tuple[Case, ...] = ()
_CHECKPOINTING: tuple[Case, ...] = ()
_ACTIVATIONS: tuple[Case, ...] = ()
_COMBINATIONS: tuple[Case, ...] = ()

CASES: tuple[Case, ...] = (
    *_PRECISION,
    *_FUSED,
    *_SEQUENCES,
    *_ACCUMULATION,
    *_DATA_PARALLEL,
    *_COMPRESSION,
    *_TOPOLOGY,
    *_ZERO,
    *_CHECKPOINTING,
    *_ACTIVATIONS,
    *_COMBINATIONS,
)
