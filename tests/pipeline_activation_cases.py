"""Runs of pipelines and of tensor parallelism that watch what is saved; importable by spawned ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any
from unittest import mock

import optim_cases
import torch

import trine
from trine.optim.runtime import checkpointed
from trine.optim.runtime.saved_tensors import SavedTensors
from trine.record import events
from trine.samples.gpt import loss_of

__all__ = ["run"]


def run(rank: int, changes: Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Three steps of SGD: losses, parameters' sums, calls of blocks in the last step, and what was held."""
    naive = options.pop("naive", False)
    model = optim_cases.small_gpt(**{"layers": 4, **options})
    calls = [0]
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    metrics: dict[str, float] = {}
    stop = events.listen(
        lambda kind, values: metrics.update({values["name"]: values["value"]}) if kind == "metric" else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    torch.manual_seed(7 + rank // 2)
    if naive:
        for region in _regions(engine):
            region.splits_backward = False
    live = _Live(engine)
    losses = []
    try:
        for batch in optim_cases.batches(3, 8):
            calls[0] = 0
            losses.append(float(engine.train_step(batch)))
        return {
            "losses": losses,
            "sums": [float(_local(p).double().sum()) for p in engine.parameters().values()],
            "calls": calls[0],
            "live": live.most,
            "held": live.saved.held_bytes,
            "metrics": metrics,
        }
    finally:
        stop()
        engine.close()


def _regions(engine: Any) -> list[checkpointed.Region]:
    found = []
    for module in engine.model.modules():
        found += [
            each
            for each in getattr(vars(module).get("forward"), "args", ())
            if isinstance(each, checkpointed.Region)
        ]
    return found


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "_local_tensor", parameter).detach()


class _Live:
    """Counts micro-batches of which anything is saved, by the packed objects' lives."""

    def __init__(self, engine: Any) -> None:
        self.saved = next(each for each in engine._assembly.contexts if isinstance(each, SavedTensors))
        self.saved.counting = self.saved.always_counting = True
        self.saved.for_record_alone = False
        self.most = 0
        self._shared = {buffer.untyped_storage()._cdata for buffer in engine.model.buffers()}
        self._by_forward: dict[int, list[Any]] = {}
        self._forward = 0
        engine._assembly.contexts.append(self._begin)
        token = self.saved._token
        self.saved._token = mock.Mock(side_effect=lambda tensor: self._note(tensor, token(tensor)))

    def _begin(self) -> Any:
        self._forward += 1
        return contextlib.nullcontext()

    def _note(self, tensor: torch.Tensor, token: Any) -> Any:
        if token._reference.address in self._shared or not tensor.is_floating_point():
            return token  # masks, and the batch's own tokens
        self._by_forward.setdefault(self._forward, []).append(weakref.ref(token))
        self.most = max(
            self.most,
            sum(any(each() is not None for each in tokens) for tokens in self._by_forward.values()),
        )
        return token
