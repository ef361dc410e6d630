"""Cross-entropy of a linear layer's outputs, a chunk of rows at a time: the logits never exist as a whole.

With a vocabulary of V and N tokens, logits, their fp32 copy, their log-softmax and their gradient are N·V numbers
each: for large vocabularies the peak of a whole training step. Here a chunk's logits are turned into its gradient at
once, in forward, and only the gradients of hidden states and weight are kept. The idea is Liger's (Hsu et al. 2024)
and PyTorch's own ``linear_cross_entropy`` (2.13); this one runs from PyTorch 2.11 on, and under autocast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["ChunkedLinearCrossEntropy", "rows_of_a_chunk"]

#: A chunk is not cut further: matmuls of fewer rows read the weight for too little work.
_LEAST_ROWS = 128


def rows_of_a_chunk(rows: int, hidden: int, vocabulary: int) -> int:
    """As many rows as make a chunk's logits about as big as all hidden states: N·H / V, at least 128."""
    return max(1, min(rows, max(_LEAST_ROWS, rows * hidden // max(vocabulary, 1))))


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Mean (or sum) over the targets that are not ``ignored``; gradients are made in forward, scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignored: int,
        chunk: int,
        dtype: torch.dtype,
        mean: bool,
        training: bool,
    ) -> torch.Tensor:
        """(N, H), (V, H), (V) and (N) to a scalar in at least fp32.

        ``dtype`` is what matmuls compute in; gradients are made only where ``training`` (``needs_input_grad`` does not
        know of ``torch.no_grad``).
        """
        wide = torch.promote_types(dtype, torch.float32)
        for_hidden, for_weight, for_bias = (training and needed for needed in ctx.needs_input_grad[:3])
        narrow = weight.to(dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        count = (targets != ignored).sum().to(wide) if mean else torch.ones_like(total)
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        of_weight = torch.zeros_like(weight) if for_weight else None
        of_bias = torch.zeros_like(bias) if bias is not None and for_bias else None
        for start in range(0, hidden.shape[0], chunk):
            rows = hidden[start : start + chunk].to(dtype)
            wanted = targets[start : start + chunk]
            logits = functional.linear(rows, narrow, None if bias is None else bias.to(dtype)).to(wide)
            valid = wanted != ignored
            at = torch.where(valid, wanted, 0)[:, None]
            norm = torch.logsumexp(logits, -1, keepdim=True)
            total += torch.where(valid, (norm - logits.gather(-1, at))[:, 0], 0.0).sum()
            if not (for_hidden or for_weight or for_bias):
                continue
            # Softmax minus one at the target, in the logits' own memory; nothing for ignored rows.
            logits.sub_(norm).exp_()
            logits.scatter_add_(-1, at, logits.new_full((), -1.0).expand_as(at))
            gradient = logits.masked_fill_(~valid[:, None], 0.0).to(dtype)
            if of_hidden is not None:
                of_hidden[start : start + chunk] = gradient @ narrow
            if of_weight is not None:
                of_weight += gradient.t() @ rows
            if of_bias is not None:
                of_bias += logits.sum(0)
        # Divided in backward, where a scaled loss keeps small numbers in fp16's range. No valid target: no gradient,
        # and a loss that is not a number, as PyTorch has it.
        ctx.gradients, ctx.divisor = (of_hidden, of_weight, of_bias), count.clamp(min=1.0)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scales what forward made, in place: a second backward through the same loss is an error."""
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy made its gradients in forward and gave them away in the first backward: "
                "compute the loss again, or take cross_entropy out of compute.fuse for retain_graph=True"
            )
        made, ctx.gradients = ctx.gradients, None
        factor = gradient / ctx.divisor
        scaled = [None if each is None else each.mul_(factor) for each in made]
        return (*scaled, None, None, None, None, None, None)
