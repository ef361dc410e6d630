"""Where the random generators stand: PyTorch's on the host and the device, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_streams", "restore_random_streams"]


def random_streams(device: torch.device) -> dict[str, Any]:
    """Tensors, numbers and strings. numpy's is there where the program has imported it."""
    streams: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        streams["numpy"] = (str(name), torch.from_numpy(keys.astype("int64")), *rest)
    return streams


def restore_random_streams(device: torch.device, streams: Mapping[str, Any]) -> None:
    """Set them back."""
    torch.set_rng_state(streams["torch"].cpu())
    random.setstate(streams["python"])
    if device.type == "cuda" and "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"].cpu(), device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in streams:
        name, keys, *rest = streams["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
