"""residual + dropout(x + bias) for CPUs, keeping one byte an element for backward instead of one of x's."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["BiasDropoutResidual"]


class BiasDropoutResidual(torch.autograd.Function):
    """Draws the same random numbers as ``nn.Dropout``, into a mask of bytes: the result is the same.

    PyTorch's dropout on CPUs keeps its scaled mask in x's own precision (aten/src/ATen/native/Dropout.cpp).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float
    ) -> torch.Tensor:
        """``p`` is between 0 and 1, both excluded."""
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - p)
        scale = 1.0 / (1.0 - p)
        kept = x if bias is None else x + bias
        ctx.save_for_backward(mask)
        ctx.scale, ctx.x_dtype, ctx.residual_dtype = scale, x.dtype, residual.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        scaled = kept.mul(scale).mul_(mask)
        same = scaled.dtype == residual.dtype and scaled.shape == residual.shape
        return scaled.add_(residual) if same else scaled + residual

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, bias and residual."""
        (mask,) = ctx.saved_tensors
        of_x = gradient.mul(ctx.scale).mul_(mask)
        of_bias = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[1]:
            of_bias = of_x.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return of_x.to(ctx.x_dtype), of_bias, gradient.to(ctx.residual_dtype), None
