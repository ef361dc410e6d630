"""What codecs of gradients cost on this machine: rows of a calibration that only the runtime can measure.

    {"operation": "codec", "dtype": "int8", "bytes": 4194304, "seconds": 2.1e-3, "ratio": 3.9, "ranks": 2}

``bytes`` are those of the plain gradients, ``ratio`` how many times fewer are sent.
"""

from __future__ import annotations

from typing import Any

from trine.record.hardware import Peaks

__all__ = ["codecs_of"]

NAMES = ("bf16", "fp16", "int8", "qsgd", "powersgd", "onebit", "terngrad")
#: The gradients are one matrix of so many rows and columns.
SIDE = 1024


def codecs_of(peaks: Peaks, ranks: int = 2) -> list[dict[str, Any]]:
    """Each codec on the device that ``peaks`` are of, with its threads; under a second."""
    import torch

    from trine.optim.config import Communication
    from trine.optim.runtime.exchange.break_even import measure_codec

    device = torch.device("cpu" if peaks.threads is not None else "cuda")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(peaks.threads or before)
        sample = {"weight": torch.zeros(SIDE, SIDE, device=device)}
        found = []
        for name in NAMES:
            ratio, seconds, elements = measure_codec(Communication(compression=name), sample, ranks, device)
            found.append(
                {
                    "operation": "codec",
                    "dtype": name,
                    "bytes": 4 * elements,
                    "seconds": seconds,
                    "ratio": ratio,
                    "ranks": ranks,
                }
            )
    finally:
        torch.set_num_threads(before)
    return found
