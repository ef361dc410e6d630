"""This rank's part of a tensor: without autograd where there is nothing to differentiate, and with it where there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trine.optim.runtime.local_steps import clip_gradients
from trine.optim.runtime.plain_tensors import local


@pytest.fixture
def gradient() -> Iterator[DTensor]:
    """Sharded over a group of one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield DTensor.from_local(torch.full((4,), 150.0), DeviceMesh("cpu", [0]), [Shard(0)])
    finally:
        distributed.destroy_process_group()


def test_a_gradients_part_is_what_it_holds(gradient: DTensor) -> None:
    assert torch.is_grad_enabled()
    assert local(gradient) is gradient._local_tensor
    assert torch.is_grad_enabled()


def test_a_parameters_part_leads_its_gradient_back(gradient: DTensor) -> None:
    parameter = torch.nn.Parameter(gradient)
    (3 * local(parameter)).sum().backward()
    assert isinstance(parameter.grad, DTensor)
    assert parameter.grad.to_local().tolist() == [3.0] * 4


def test_clipping_asks_for_each_part_once(gradient: DTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, asked = torch.nn.Parameter(torch.zeros_like(gradient)), []
    parameter.grad = gradient
    to_local = DTensor.to_local
    monkeypatch.setattr(DTensor, "to_local", lambda self: asked.append(self) or to_local(self))
    clip_gradients([parameter], 1.0)
    assert [id(each) for each in asked] == [id(gradient)]
    torch.testing.assert_close(gradient._local_tensor, torch.full((4,), 0.5))
