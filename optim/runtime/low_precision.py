"""Saved activations in fewer bits: bf16, fp16 or fp8, back in their own type when backward asks for them.

The forward is untouched; gradients see activations rounded to 8 (bf16), 11 (fp16) or 4 bits (fp8, e4m3) of mantissa
(cf. Chen et al. 2021, "ActNN"). fp16 and fp8 have a narrow range, so each tensor is scaled by a power of two, which
itself rounds nothing, such that its largest magnitude lies near the top of the range.

What is rounded: floating tensors that carry gradients. What is not, although floating: statistics of norms and of
attention (a log-sum-exp off by 2⁻⁸ of itself is wrong by percents once it is exponentiated), masks, log-probabilities,
inputs of checkpointed modules, double precision, and what compiled code or a custom function saves, whose meaning is
not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trine.optim.runtime.checkpointed import keeps_inputs_exact
from trine.optim.runtime.tensor_pool import TensorPool, empty_flat

if TYPE_CHECKING:
    from trine.optim.runtime.saved_tensors import Store, Stored

__all__ = ["DTYPES", "LowPrecision"]

#: ``activations.dtype`` → the type that is stored.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}

#: Their outputs are exponentiated in backward: a rounding of ε of the logarithm is one of e^ε of the probability.
_LOGARITHMS = ("LogSoftmaxBackward0", "LogsumexpBackward0", "LogBackward0")


class LowPrecision:
    """Stores in ``dtype``; with ``inner``, hands the low-precision tensor on to that store."""

    def __init__(
        self, dtype: torch.dtype, inner: Store | None = None, pool: TensorPool | None = None
    ) -> None:
        self._dtype = dtype
        self._inner = inner
        self._pool = pool

    def choose(self, tensor: torch.Tensor) -> Store | None:
        """This one for what can be rounded, else whatever ``inner`` says."""
        if self._is_rounded(tensor):
            return self
        return None if self._inner is None else self._inner.choose(tensor)

    def device_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Of the stored type, or what the inner store leaves of it."""
        if self._inner is not None:
            return self._inner.device_bytes(elements, self._dtype)
        return elements * self._dtype.itemsize

    def put(self, flat: torch.Tensor) -> Stored:
        """Round and keep, or hand on."""
        scale = _scale(flat, self._dtype) if self._dtype is not torch.bfloat16 else None
        scaled = flat
        if scale is not None:
            scaled = torch.mul(flat, scale, out=empty_flat(self._pool, flat.numel(), flat.dtype, flat.device))
        if self._dtype is torch.float8_e4m3fn:  # it has no infinity, and conversion would make 448 of one
            scaled = scaled.masked_fill(~flat.isfinite(), float("nan"))
        low = empty_flat(self._pool, flat.numel(), self._dtype, flat.device).copy_(scaled)
        inner = None if self._inner is None else self._inner.choose(low)
        return _Rounded(low if inner is None else inner.put(low), scale, flat, self._pool)

    def _is_rounded(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not tensor.requires_grad:
            return False
        if tensor.element_size() <= self._dtype.itemsize or keeps_inputs_exact():
            return False
        node = tensor.grad_fn
        return node is None or node.name() not in _LOGARITHMS


class _Rounded:
    """The low-precision tensor, here or in the inner store, and its scale."""

    __slots__ = ("_low", "_pool", "_scale", "device_bytes", "dtype", "elements")

    def __init__(
        self,
        low: torch.Tensor | Stored,
        scale: torch.Tensor | None,
        flat: torch.Tensor,
        pool: TensorPool | None,
    ) -> None:
        self._pool = pool
        self._low = low
        self._scale = scale
        self.dtype = flat.dtype
        self.elements = flat.numel()
        kept = low.numel() * low.element_size() if isinstance(low, torch.Tensor) else low.device_bytes
        self.device_bytes = kept + (0 if scale is None else scale.element_size())

    def get(self) -> torch.Tensor:
        low = self._low if isinstance(self._low, torch.Tensor) else self._low.get()
        if self._scale is None:
            return self._empty(self.dtype, low).copy_(low)
        # In fp32: a scale near fp16's limits times the value would leave the type of the result on the way.
        wide = self._empty(torch.float32, low).copy_(low).div_(self._scale)
        return wide if self.dtype == torch.float32 else self._empty(self.dtype, low).copy_(wide)

    def _empty(self, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        return empty_flat(self._pool, self.elements, dtype, like.device)


def _scale(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A power of two, float32 on the tensor's device: the largest magnitude comes to a quarter to half of the type's.

    One where nothing is to be scaled (all zero, or nothing finite). Reads nothing from the device.
    """
    largest = torch.nan_to_num(flat.abs().amax().float(), nan=0.0, posinf=0.0)
    top = torch.finfo(dtype).max / 2  # float32's logarithm may round the quotient up to the next power
    exponent = torch.floor(torch.log2(top / largest.clamp_min(2.0**-100))).clamp(-126, 100)
    return torch.where(largest > 0, torch.exp2(exponent), torch.ones_like(exponent))
