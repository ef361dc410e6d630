"""Causal attention that ends at each document's border, where rows hold several documents.

    visible = visible_of(documents, "sdpa")        # once a forward
    mixed = attend(query, key, value, visible)     # in each layer; (rows, heads, length, width) each

Three ways, the same function: a block-diagonal mask (``sdpa``; any device), PyTorch's variable-length flash kernel
(``varlen``; CUDA, half precision: nothing is computed across borders), and flex attention with a block mask (``flex``;
CUDA, since flex has no backward on CPU).
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from trine.optim.runtime.documents import Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["Visible", "attend", "visible_of"]

#: Every token before and none behind, as this version of PyTorch says it.
_CAUSAL: dict[str, Any] = (
    {"is_causal": True}
    if "is_causal" in inspect.signature(varlen_attn).parameters
    else {"window_size": (-1, 0)}
)
#: What a token may see: a mask (rows, 1, length, length), a block mask, or the documents themselves.
Visible: TypeAlias = "torch.Tensor | BlockMask | Documents"


def visible_of(documents: Documents, implementation: str) -> Visible:
    """What ``implementation`` needs to keep documents apart: made once a forward, for all layers.

    ``varlen`` takes the borders as they are, ``flex`` a block mask; all else a mask, true where a token sees another.
    """
    if implementation == "varlen":
        return documents
    if implementation == "flex":
        return _block_mask(documents.numbers)
    return documents.mask()


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: Visible, dropout: float = 0.0
) -> torch.Tensor:
    """softmax(QKᵀ/√d)V within documents. (rows, heads, length, width) each; fewer heads of key and value are shared.

    Raises ``ValueError`` for dropout where the kernel has none (varlen, flex).
    """
    shared = query.shape[1] != key.shape[1]  # grouped-query attention
    if isinstance(visible, torch.Tensor):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=dropout, enable_gqa=shared
        )
    if dropout:
        raise ValueError("variable-length and flex attention have no dropout: use sdpa, or no dropout")
    if isinstance(visible, Documents):
        return _varlen(query, key, value, visible, shared)
    mixed: torch.Tensor = _compiled_flex()(query, key, value, block_mask=visible, enable_gqa=shared)
    return mixed


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, shared: bool
) -> torch.Tensor:
    """Rows end to end, as one sequence with borders; padding at a row's end is a document of its own."""
    rows, heads, length, width = query.shape
    flat = [each.transpose(1, 2).reshape(rows * length, -1, width) for each in (query, key, value)]
    options = {**_CAUSAL, "enable_gqa": True} if shared else _CAUSAL
    borders, longest = documents.cu_seqlens, documents.longest
    mixed: Any = varlen_attn(*flat, borders, borders, longest, longest, **options)
    result: torch.Tensor = mixed.view(rows, length, heads, width).transpose(1, 2)
    return result


def _block_mask(numbers: torch.Tensor) -> BlockMask:
    rows, length = numbers.shape

    def same_document(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (numbers[row, query] == numbers[row, key])

    mask: BlockMask = _compiled_block_mask()(same_document, rows, None, length, length, device=numbers.device)
    return mask


@functools.lru_cache(maxsize=1)
def _compiled_block_mask() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    """Without compilation flex attention stores the whole matrix of scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
