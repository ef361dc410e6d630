"""Hints for NCCL on a communicator of their own.

NCCL reads ``NCCL_ALGO`` and ``NCCL_PROTO`` whenever it makes a communicator (its ``ncclTopoTuneModel``), and the numbers
of channels from the communicator's configuration (``minCTAs``, ``maxCTAs``; NCCL user guide, "Creating a communicator
with options"). Most other variables are read once in a process. So a process group is made here, its communicator at
once, with the variables set for that moment alone: the program's other groups stay as they are, whenever they were made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

__all__ = ["environment_of", "hinted_group"]

_VARIABLES = {"algo": "NCCL_ALGO", "proto": "NCCL_PROTO"}
_FIELDS = {"min_channels": "min_ctas", "max_channels": "max_ctas", "cga_cluster_size": "cga_cluster_size"}


def hinted_group(hints: Mapping[str, Any], device: torch.device) -> distributed.ProcessGroup:
    """A process group of all ranks whose communicator follows ``hints``. Collective over all ranks."""
    options = distributed.ProcessGroupNCCL.Options()
    for name, field in _FIELDS.items():
        if name in hints:
            setattr(options.config, field, hints[name])
    with _set(environment_of(hints)):
        group: distributed.ProcessGroup = distributed.new_group(
            backend="nccl", pg_options=options, group_desc="trine gradients, with NCCL hints"
        )
        # Communicators are made by the first collective: it must be now, while the variables are set.
        distributed.all_reduce(torch.zeros(1, device=device), group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return group


def environment_of(hints: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that ``hints`` come to."""
    found = {}
    for name, variable in _VARIABLES.items():
        if name in hints:
            value = hints[name]
            found[variable] = ",".join(value) if isinstance(value, (list, tuple)) else value
    return found


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
