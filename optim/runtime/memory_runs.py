"""The run behind a prediction of memory: in a process of its own, as one of many ranks, without values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from trine.optim.memory_prediction import CUDA_BLOCK_BYTES
from trine.optim.runtime.counted_steps import counted
from trine.optim.runtime.pretended_ranks import (
    AsOnCuda,
    PretendedLedger,
    WithoutMemory,
    faked_batch,
    faked_model,
    faked_optimizer,
    pretend,
)
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.config import Config

__all__ = ["Request", "run"]


@dataclass(slots=True)
class Request:
    """What :func:`trine.predict_memory` was given."""

    model: Any
    optimizer: Any
    config: Config
    loss_fn: Callable[[Any, Any], Any]
    batch: Any
    clip_norm: float | None
    ranks: int
    rank: int
    ranks_per_node: int | None
    device_type: str | None


def run(request: Request) -> dict[str, dict[str, int]]:
    """Bytes by kind, as :func:`trine.optim.runtime.counted_steps.counted` gives them. Spoils this process."""
    pretend(request.ranks, request.rank, request.ranks_per_node)
    device_type = request.device_type or _device_type(request.model)
    on_cuda = device_type == "cuda"
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _model(request.model)
    with mode:
        model, optimizer = _made(request, model, mode)
        batch = request.batch
        if callable(batch):
            batch = batch()
        batch = faked_batch(batch, mode)
        ledger = PretendedLedger(CUDA_BLOCK_BYTES if on_cuda else 1)
        return counted(
            ledger,
            (model, optimizer),
            request.config,
            request.loss_fn,
            batch,
            request.clip_norm,
            AsOnCuda() if on_cuda else nullcontext(),
        )


def _device_type(model: Any) -> str:
    if isinstance(model, nn.Module):
        kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
        if len(kinds) == 1:
            return kinds.pop()
    return "cpu"


def _model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise UsageError(
                f"trine.predict_memory takes a torch.nn.Module or a function that makes one, not a {type(model).__name__}"
            )
        with WithoutMemory():  # type: ignore[no-untyped-call]
            model = model()
        if not isinstance(model, nn.Module):
            raise UsageError(f"the function for the model gave a {type(model).__name__}, no torch.nn.Module")
    return model


def _made(
    request: Request, model: nn.Module, mode: FakeTensorMode
) -> tuple[nn.Module, torch.optim.Optimizer]:
    if isinstance(model, DistributedDataParallel):
        model = model.module
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UsageError(
                f"{name} is sharded already (a DTensor): predict with the model as it was before fully_shard"
            )
    parameters = faked_model(model, mode)
    optimizer = request.optimizer
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    faked_optimizer(optimizer, parameters, mode)  # one that the program made holds what the model had
    return model, optimizer
