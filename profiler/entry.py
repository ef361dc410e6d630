"""``trine.profile``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trine.record.errors import UsageError
from trine.record.store import DEFAULT_MAX_BYTES, SMALLEST_MAX_BYTES

from .parts import Size
from .session import Session
from .windows import parse_windows

__all__ = ["profile"]


def profile(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    windows: Any = "default",
    tokens: Size = None,
    samples: Size = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    flops: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> Session:
    """Measure a training loop and write its record to the folder ``path``, one sub-folder a rank.

        with trine.profile("runs/a", model=model, optimizer=optimizer) as prof:
            for batch in prof.steps(loader):
                ...

    ``model``, ``optimizer``: one or a sequence of them; without a model, forward is what lies between the batch and
    backward. ``windows``: deep windows of ``torch.profiler``: ``"default"`` (one, steps 10–12), ``None`` for none, or
    a schedule (docs/profiling.md). ``tokens``, ``samples``: of a batch, a number or a function of it, where the
    batch's shapes do not tell. ``max_bytes``: of a rank's record on disk. ``flops``: count model FLOPs in one early
    step. ``metadata``: facts of your own to keep in the record, such as ``{"note": "new loader"}``.

    Never raises into the loop, never waits for a device, never changes a number. On a path that cannot be written it
    logs one warning and records nothing. Raises ``UsageError`` here, before training, for ``windows`` that are not
    understood and for ``max_bytes`` too small.
    """
    parse_windows(windows)
    if max_bytes < SMALLEST_MAX_BYTES:
        raise UsageError(f"max_bytes is {max_bytes}: a rank's record needs at least {SMALLEST_MAX_BYTES}")
    return Session(
        Path(path),
        models=_sequence(model),
        optimizers=_sequence(optimizer),
        windows=windows,
        tokens=tokens,
        samples=samples,
        max_bytes=max_bytes,
        flops=flops,
        metadata=dict(metadata or {}),
    )


def _sequence(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, (list, tuple, set)) else (value,)
