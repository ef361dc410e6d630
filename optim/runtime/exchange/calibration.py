"""What codecs of gradients cost on this machine: rows of a calibration (``trine hardware --calibrate``) for what-ifs.

    {"operation": "codec", "dtype": "int8", "bytes": 4194304, "seconds": 2.1e-3, "quartiles": [2.1e-3, 2.2e-3, 2.3e-3],
     "ratio": 3.9, "ranks": 2}

``bytes`` are those of the plain gradients, ``ratio`` how many times fewer are sent.
"""

from __future__ import annotations

from typing import Any

import torch

from trine.optim.config import CODECS, Communication
from trine.optim.runtime.exchange.break_even import measure_codec
from trine.record.hardware import quartiles_of

__all__ = ["codecs_of"]

#: The gradients are one matrix of so many rows and columns.
SIDE = 1024
#: Repetitions of a codec, whose quartiles are kept.
REPEATS = 7


def codecs_of(device: torch.device, ranks: int = 2) -> list[dict[str, Any]]:
    """Each codec on this device, with as many of PyTorch's threads as there are now where that is the CPU."""
    sample = {"weight": torch.zeros(SIDE, SIDE, device=device)}
    return [_row(name, sample, ranks, device) for name in CODECS]


def _row(name: str, sample: dict[str, torch.Tensor], ranks: int, device: torch.device) -> dict[str, Any]:
    communication = Communication(compression=name)
    ratio, seconds, elements = measure_codec(communication, sample, ranks, device, 1 + REPEATS)
    seconds = seconds[1:]  # the first one warms up
    return {
        "operation": "codec", "dtype": name, "bytes": 4 * elements, "seconds": min(seconds),
        "quartiles": quartiles_of(seconds), "ratio": ratio, "ranks": ranks,
    }  # fmt: skip
