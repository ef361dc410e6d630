"""Causal attention that ends at each document's border, where rows hold several documents.

    visible = visible_of(documents, "sdpa")        # once a forward
    mixed = attend(query, key, value, visible)     # in each layer; (rows, heads, length, width) each

Three ways, the same function: a block-diagonal mask (``sdpa``; any device), PyTorch's variable-length flash kernel
(``varlen``; CUDA, half precision: nothing is computed across borders), and flex attention with a block mask (``flex``;
CUDA, since flex has no backward on CPU).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn import functional

from trine.optim.runtime.documents import Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["Visible", "attend", "visible_of"]

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
    return _flex(query, key, value, visible, shared)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, shared: bool
) -> torch.Tensor:
    """Rows end to end, as one sequence with borders; padding at a row's end is a document of its own."""
    from torch.nn.attention.varlen import varlen_attn  # takes seconds to load, and few need it

    rows, heads, length, width = query.shape
    query, key, value = (
        each.transpose(1, 2).reshape(rows * length, -1, width) for each in (query, key, value)
    )
    options: dict[str, Any] = {"enable_gqa": True} if shared else {}  # of PyTorch 2.13 on
    borders, longest = documents.cu_seqlens, documents.longest
    # Every token before and none behind it.
    mixed: Any = varlen_attn(
        query, key, value, borders, borders, longest, longest, window_size=(-1, 0), **options
    )
    result: torch.Tensor = mixed.view(rows, length, heads, width).transpose(1, 2)
    return result


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: BlockMask, shared: bool
) -> torch.Tensor:
    """Compiled by itself where nothing around it is: else it would store the whole matrix of scores."""
    from torch.nn.attention.flex_attention import flex_attention

    flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
    mixed: torch.Tensor = flex(query, key, value, block_mask=visible, enable_gqa=shared)
    return mixed


def _block_mask(numbers: torch.Tensor) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = numbers.shape

    def same_document(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (numbers[row, query] == numbers[row, key])

    make: Any = create_block_mask if torch.compiler.is_compiling() else _compiled(create_block_mask)
    mask: BlockMask = make(same_document, rows, None, length, length, device=numbers.device)
    return mask


@functools.lru_cache(maxsize=2)
def _compiled(function: Any) -> Any:
    return torch.compile(function)
