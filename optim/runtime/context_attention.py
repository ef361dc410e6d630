"""Attention over a sequence that lies in parts on several ranks: each gathers keys and values, and keeps its queries.

As Llama 3 was trained (Grattafiori et al. 2024, section 3.3.2): keys and values are gathered, which grouped queries make
small, and every kernel and mask stays what it is. PyTorch's own ``context_parallel`` passes keys round a ring; its operators
are those of CUDA's kernels alone. Both cut a sequence alike: into 2n chunks of which rank r of n has the chunks r and
2n - 1 - r, so that under a causal mask all ranks see equally many keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn import functional

from trine.record.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Attending", "current", "patched", "positions_of", "use"]

#: Their names from PyTorch 2.13 on, and before.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

_sdpa = functional.scaled_dot_product_attention


def positions_of(length: int, ranks: int, place: int, device: torch.device | None = None) -> torch.Tensor:
    """Where the tokens that rank ``place`` of ``ranks`` holds stand in a sequence of ``length``, (length / ranks,).

    Its head chunk first, then its tail chunk. ``length`` is a multiple of 2 · ``ranks``.
    """
    chunk = length // (2 * ranks)
    whole = torch.arange(length, device=device).view(2 * ranks, chunk)
    return torch.cat([whole[place], whole[2 * ranks - 1 - place]])


class Attending:
    """Attention of this rank's queries to the keys of all ranks of a group."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self._ranks = distributed.get_world_size(group)
        self._place = distributed.get_rank(group)
        self._masks: dict[tuple[int, int, torch.device], torch.Tensor] = {}
        #: Attentions since the engine was made.
        self.calls = 0
        #: Bytes of keys and values that this rank sent, forward and backward, since :meth:`forget`.
        self.sent_bytes = 0

    def forget(self) -> None:
        """Begin to count anew."""
        self.sent_bytes = 0

    def count(self, part: torch.Tensor) -> None:
        """Count what leaves this rank when ``part`` is gathered, or scattered as a sum of such parts."""
        self.sent_bytes += (self._ranks - 1) * part.numel() * part.element_size()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Of (…, length of a part, size); as ``scaled_dot_product_attention`` of the whole sequence has it here. Collective."""
        self.calls += 1
        key, value = self._gathered(key, value)
        options: dict[str, Any] = {"dropout_p": dropout, "scale": scale, "enable_gqa": enable_gqa}
        if not is_causal:
            return _sdpa(query, key, value, **options)
        chunk = query.shape[-2] // 2
        parts = []
        for rows, place in zip(
            torch.split(query, chunk, -2), (self._place, 2 * self._ranks - 1 - self._place), strict=True
        ):
            seen = (place + 1) * chunk
            keys, values = key[..., :seen, :], value[..., :seen, :]
            parts.append(_masked(rows, keys, values, self._mask(chunk, seen, query.device), options))
        return torch.cat(parts, -2)

    def _gathered(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all ranks, in the order of the sequence; in one exchange where both have one shape."""
        if key.shape == value.shape:
            whole: torch.Tensor = _Gather.apply(torch.stack((key, value)), self, self._group)  # type: ignore[no-untyped-call]
            return whole[0], whole[1]
        return (
            _Gather.apply(key, self, self._group),  # type: ignore[no-untyped-call]
            _Gather.apply(value, self, self._group),  # type: ignore[no-untyped-call]
        )

    def _mask(self, rows: int, seen: int, device: torch.device) -> Any:
        """The last ``rows`` of a causal mask of ``seen`` keys."""
        if device.type == "cuda":  # which its flash kernel computes without a mask in memory
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(rows, seen)
        kind = (rows, seen, device)
        if kind not in self._masks:
            if len(self._masks) > 8:  # of batches that were padded to many widths
                self._masks.clear()
            self._masks[kind] = torch.ones(rows, seen, dtype=torch.bool, device=device).tril(seen - rows)
        return self._masks[kind]


class _Gather(torch.autograd.Function):
    """Parts (…, part, size) of all ranks as (…, sequence, size); backward sums gradients where the parts belong."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, attending: Attending, group: distributed.ProcessGroup
    ) -> torch.Tensor:
        ctx.attending, ctx.group = attending, group
        ranks = distributed.get_world_size(group)
        part = part.contiguous()
        attending.count(part)
        parts = part.new_empty((ranks, *part.shape))
        _all_gather(parts.view(-1), part.view(-1), group=group)
        heads, tails = parts.chunk(2, -2)
        return torch.cat([*heads, *reversed(tails.unbind())], -2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ranks = distributed.get_world_size(ctx.group)
        chunks = gradient.chunk(2 * ranks, -2)
        pairs = [torch.cat([chunks[place], chunks[2 * ranks - 1 - place]], -2) for place in range(ranks)]
        parts = torch.stack(pairs)
        own = torch.empty_like(pairs[0], memory_format=torch.contiguous_format)
        ctx.attending.count(own)
        _reduce_scatter(own.view(-1), parts.view(-1), group=ctx.group)
        return own, None, None


# --- in the place of PyTorch's -----------------------------------------------------------------

_current: Attending | None = None
_users = 0


def use(attending: Attending | None) -> None:
    """From now on attention is over this group's parts; ``None``: of what each rank has, as ever."""
    global _current
    _current = attending


def current() -> Attending | None:
    """What :func:`use` was last told."""
    return _current


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: dict[str, Any]
) -> torch.Tensor:
    """PyTorch's causal bias knows attention by what stands in ``torch.nn.functional``, and calls that in its turn."""
    standing = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _sdpa
    try:
        return _sdpa(query, key, value, mask, **options)
    finally:
        functional.scaled_dot_product_attention = standing


def patched() -> Callable[[], None]:
    """Have ``torch.nn.functional.scaled_dot_product_attention`` ask :func:`current`; returns what takes it back.

    As PyTorch's ``context_parallel`` does. A mode would also see calls that were looked up before; but it has no part in
    what backward recomputes of a block.
    """
    global _users
    _users += 1
    functional.scaled_dot_product_attention = _attention
    taken = False

    def take_back() -> None:
        nonlocal taken
        global _users
        if taken:
            return
        taken = True
        _users -= 1
        if not _users:
            functional.scaled_dot_product_attention = _sdpa
            use(None)

    return take_back


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if _current is None:
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:
        raise UsageError(
            "parallel.context: attention was called with a mask, which holds this rank's part of the sequence alone: use "
            "is_causal=True, or drop the key"
        )
    return _current.attend(query, key, value, dropout_p, is_causal, scale, enable_gqa)
