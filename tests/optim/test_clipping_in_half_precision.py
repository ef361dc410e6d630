"""Clipping over shards where gradients are in half precision."""

from __future__ import annotations

import pytest
import torch

from trine.optim.runtime.local_steps import clip_gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_norm_whose_square_half_precision_cannot_hold_is_clipped_as_pytorch_does(
    dtype: torch.dtype,
) -> None:
    ours, theirs = (torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(2))
    for parameter in (ours, theirs):
        parameter.grad = torch.full((4,), 150.0, dtype=dtype)  # its norm is 300, whose square is beyond fp16

    clip_gradients([ours], 1.0)
    torch.nn.utils.clip_grad_norm_([theirs], 1.0)

    torch.testing.assert_close(ours.grad, theirs.grad)
    assert ours.grad is not None and float(ours.grad[0]) == pytest.approx(0.5, rel=1e-2)
