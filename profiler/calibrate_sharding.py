"""What sharding a unit costs its host: FSDP2's hooks, gathers into and out of flat buffers, and its reduction, without bytes.

    {"operation": "sharded_unit", "phase": "forward", "again": true, "parameters": 16, "seconds": 9e-4, "quartiles": [...]}

Of one unit with so many parameters of a few elements: the host's own time in forward or backward, beyond what the same unit
takes whole. ``again``: parameters are freed after forward and gathered again before backward (ZeRO 3), or kept (2). Waiting
for the other ranks does not count, and what moving bytes takes is measured elsewhere.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from trine.record.hardware import quartiles_of

__all__ = ["PARAMETERS", "measure_sharding"]

#: Parameters of a unit: two numbers tell what a unit costs and what each of its parameters does.
PARAMETERS = (2, 16)
UNITS = 4
#: Rows of each parameter: one at least for every rank.
ROWS, COLUMNS = 16, 4
WARM_UP, REPEATS = 2, 13


class _Unit(torch.nn.Module):
    """Multiplies by each of its parameters."""

    def __init__(self, parameters: int, device: torch.device) -> None:
        super().__init__()
        self.factors = torch.nn.ParameterList(
            torch.ones(ROWS, COLUMNS, device=device) for _ in range(parameters)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in self.factors:
            x = x * factor
        return x


def measure_sharding(device: torch.device) -> list[dict[str, Any]]:
    """Every row above. All ranks of the default group call it alike; about a second."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Left to itself FSDP2 takes the machine's accelerator, where the ranks may be on the CPU.
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    found: list[dict[str, Any]] = []
    for parameters in PARAMETERS:
        whole = _host_seconds(_units(parameters, device), device)
        for again in (False, True):
            model = _units(parameters, device)
            for unit in model:
                fully_shard(unit, mesh=mesh, reshard_after_forward=again)
            fully_shard(model, mesh=mesh, reshard_after_forward=again)  # has no parameters of its own
            sharded = _host_seconds(model, device)
            for phase, longer, before in zip(("forward", "backward"), sharded, whole, strict=True):
                beyond = [max(seconds - min(before), 0.0) / UNITS for seconds in longer]
                row = {"phase": phase, "again": again, "parameters": parameters, "seconds": min(beyond)}
                found.append({"operation": "sharded_unit", **row, "quartiles": quartiles_of(beyond)})
    return found


def _units(parameters: int, device: torch.device) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(_Unit(parameters, device) for _ in range(UNITS)))


def _host_seconds(model: torch.nn.Module, device: torch.device) -> tuple[list[float], list[float]]:
    """Of each forward and each backward the seconds that the host worked. A device's backward has a thread of its own."""
    clock = time.thread_time if device.type == "cpu" else time.process_time
    x = torch.ones(ROWS, COLUMNS, device=device, requires_grad=True)
    forward, backward = [], []
    for _ in range(WARM_UP + REPEATS):
        began = clock()
        loss = model(x).sum()
        between = clock()
        loss.backward()
        forward.append(between - began)
        backward.append(clock() - between)
        model.zero_grad()
    return forward[WARM_UP:], backward[WARM_UP:]
