"""Bytes of activations: what a layer keeps of a token for backward, and what is alive for a moment around its backward.

The components are Korthikanti et al. 2022 (section 4), each by itself, so that models without dropout, with
gates, with few key heads, low-rank attention, fused attention or experts are sums of other components. With
two norms, GELU, f = 4h, k = a and dropout they come to

    none                              s b h (10 + 24/t + 5 a s/(h t))
    and sequence parallel             s b h (34 + 5 a s/h) / t
    selective                         without 5 a s/h
    full                              2 s b h, divided by t where the layer's input is split

Selective policies over operators (torchtitan's, ours) keep a layer's input, attention's output, and what some
matmuls make.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trine.optim.plan.columns import Column
from trine.optim.plan.constants import Stack
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory_traits import MemoryTraits
from trine.optim.plan.workload import Workload

__all__ = ["LayerBytes", "element_bytes", "layer_bytes", "logit_bytes", "tokens_of"]


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Of one micro-batch and one layer, on one rank.

    ``whole``: kept without recomputation. ``kept``: by the layout's policy (under ``budget``, of a layer that
    is not recomputed). ``input``: what a recomputed layer keeps. ``working``: alive at the peak of a layer's
    backward beyond what is kept.
    """

    whole: Column
    kept: Column
    input: Column
    working: Column


@dataclass(frozen=True, slots=True)
class _Parts:
    """Columns that every component is made of. ``element``: bytes; ``saved``: of a matmul's input;
    ``spread``: ranks that split norms and dropout; ``gathered``: that split the inputs of column-parallel
    matrices; ``tensor``: matrices and heads."""

    workload: Workload
    element: Column
    saved: Column
    spread: Column
    gathered: Column
    tensor: Column
    joined: bool
    fused_attention: bool


def element_bytes(layouts: Layouts) -> Column:
    """Of what is computed with: 4 in fp32 and tf32, else 2 (fp8 is for matmuls alone)."""
    return np.where(layouts.is_kind("precision", "fp32", "tf32"), 4.0, 2.0)


def tokens_of(workload: Workload, layouts: Layouts) -> Column:
    """Tokens of a micro-batch that one rank of context sees."""
    return np.asarray(layouts["micro_batch"] * workload.sequence / layouts["context"])


def layer_bytes(
    workload: Workload,
    stack: Stack,
    traits: MemoryTraits,
    layouts: Layouts,
    *,
    mixture: bool,
    frozen: bool = False,
) -> LayerBytes:
    """Of a dense layer or of one of experts, a row a layout. ``frozen``: weights are not trained."""
    parts = _parts(workload, stack, traits, layouts)
    scores = _scores(parts)
    attention = _attention(parts) + scores
    middle, middle_gradient = (
        _experts(parts, layouts, stack, frozen) if mixture else _dense(parts, workload.ffn, frozen)
    )
    norms = _norms(parts)
    whole = attention + middle + norms
    layer_input = parts.element * workload.hidden / parts.spread
    selective = _operators(parts, stack, mixture, middle) if stack.operators != "none" else whole - scores
    policy = layouts["recompute"]
    kept = np.select(
        [policy == 1, policy == 2], [np.broadcast_to(selective, whole.shape), layer_input], whole
    )
    # Gradients beside what they are made from: of the feed-forward's matrices, then, when those are gone, of
    # the scores; and of the layer's own in- and output.
    gradients = np.maximum(middle_gradient, _score_gradients(parts, scores) - middle) + 2 * layer_input
    again = np.where(policy == 3, np.where(layouts["recomputed_layers"] > 0, whole, 0.0), whole - kept)
    tokens = tokens_of(workload, layouts)
    return LayerBytes(
        whole=tokens * whole,
        kept=tokens * kept,
        input=tokens * layer_input,
        working=tokens * (again + gradients),
    )


def _parts(workload: Workload, stack: Stack, traits: MemoryTraits, layouts: Layouts) -> _Parts:
    element = element_bytes(layouts)
    fp8 = layouts.is_kind("precision", "fp8")
    tensor = layouts["tensor"].astype(np.float64)
    spread = np.where(layouts["sequence"] > 0, tensor, 1.0)
    return _Parts(
        workload=workload,
        element=element,
        saved=np.where(fp8, traits.fp8_input_bytes, element),
        spread=spread,
        gathered=np.ones_like(spread) if traits.keeps_gathered else spread,
        tensor=tensor,
        joined=stack.fused,
        fused_attention=stack.fused_attention,
    )


def _norms(parts: _Parts) -> Column:
    """Inputs of norms, and dropout's masks of a byte after attention and feed-forward.

    Where a root-mean-square norm is a chain of 32-bit kernels (not ``fused``), its input in 32 bits and its
    quotient are kept, too.
    """
    workload = parts.workload
    chain = 8.0 if not parts.joined and not workload.norm_bias else 0.0
    found = workload.norms * (parts.element + chain) + 2.0 * workload.dropout
    return np.asarray(found * workload.hidden / parts.spread)


def _attention(parts: _Parts) -> Column:
    """The projections' input; queries, keys and values; attention's output. Low-rank attention has its
    compressed vectors, too."""
    workload = parts.workload
    into = parts.saved * workload.hidden / parts.gathered
    # Queries, keys, values and output have (a + k)·2d elements; low-rank attention makes keys for every head.
    inner = (workload.heads + workload.kv_heads) * workload.score_size
    output = workload.heads * (workload.latent.value_head_size if workload.latent else workload.head_size)
    found = into + (parts.element * (inner - output) + parts.saved * output) / parts.tensor
    if workload.latent is not None:
        low = workload.latent.kv_rank + workload.latent.rope_head_size + workload.latent.query_rank
        found = found + 2 * parts.element * low / parts.spread
    return np.asarray(found)


def _scores(parts: _Parts) -> Column:
    """Softmax's output and, with dropout, its mask and result; fused attention keeps one 32-bit sum a head and token."""
    workload = parts.workload
    if parts.fused_attention:
        return np.asarray(4.0 * workload.heads / parts.tensor)
    each = parts.element + (1 + parts.element) * workload.dropout
    return np.asarray(each * workload.heads * workload.sequence / parts.tensor)


def _score_gradients(parts: _Parts, scores: Column) -> Column:
    """Of softmax's output and of its input, where they are in memory."""
    each = 2 * parts.element * parts.workload.heads * parts.workload.sequence / parts.tensor
    return 0.0 * scores if parts.fused_attention else np.asarray(each)


def _between(parts: _Parts, size: float, frozen: bool) -> Column:
    """Of a feed-forward of ``size`` between its matrices: what its first matrices make, and the input of its last."""
    into_last = 0.0 * parts.saved if frozen else parts.saved
    if not parts.workload.gated:
        return np.asarray((parts.element + into_last) * size)
    return np.asarray((2 * parts.element + into_last + (0.0 if parts.joined else 1.0) * parts.element) * size)


def _dense(parts: _Parts, size: float, frozen: bool) -> tuple[Column, Column]:
    """Kept of a feed-forward; its gradients at the peak of its backward."""
    workload = parts.workload
    into = (0.0 if frozen else 1.0) * parts.saved * workload.hidden / parts.gathered
    kept = into + _between(parts, size, frozen) / parts.tensor
    gradients = (3.0 if workload.gated else 2.0) * parts.element * size / parts.tensor
    return np.asarray(kept), np.asarray(gradients)


def _experts(parts: _Parts, layouts: Layouts, stack: Stack, frozen: bool) -> tuple[Column, Column]:
    """Of a layer of experts on its busiest rank: copies of tokens sent out and their results, experts,
    router, shared experts.

    Experts that are split over the tensor group gather its tokens; else the group's tokens are shared out among it.
    """
    workload = parts.workload
    copies = workload.experts_per_token * np.where(layouts["expert"] > 1, workload.load_imbalance, 1.0)
    ranks = np.ones_like(parts.tensor) if stack.expert_tensor else parts.tensor
    moved = copies / ranks * workload.hidden
    inside = copies / parts.tensor * _between(parts, workload.expert_ffn, frozen)
    # The sent copies are the first matrix's input; what comes back is weighted and kept for the weights' gradient.
    dispatched = moved * (parts.saved + parts.element)
    router = 2 * 4.0 * workload.experts / parts.spread + parts.element * workload.hidden / parts.gathered
    kept = dispatched + inside + router
    gradients = copies / parts.tensor * (3.0 if workload.gated else 2.0) * parts.element * workload.expert_ffn
    gradients = gradients + 2 * parts.element * moved
    if workload.shared_experts:
        shared, beside = _dense(parts, workload.shared_experts * workload.shared_ffn, frozen)
        # Its input is the router's.
        kept = kept + shared - parts.saved * workload.hidden / parts.gathered
        gradients = gradients + beside
    return np.asarray(kept), np.asarray(gradients)


def _operators(parts: _Parts, stack: Stack, mixture: bool, middle: Column) -> Column:
    """Kept by a policy over operators: every second matmul (queries, values, the feed-forward's first) or
    all, and attention's output.

    Where kernels are launched one by one, outputs that nothing needs are held, too: the last matmul's.
    """
    workload = parts.workload
    output = workload.heads * (workload.latent.value_head_size if workload.latent else workload.head_size)
    inner = (workload.heads + workload.kv_heads) * workload.score_size
    every = stack.operators == "all"
    projected = inner - output if every else output + workload.kv_heads * output / workload.heads
    inside = parts.element * (projected + output) + 4.0 * workload.heads
    held = (2.0 if every else 1.0) * (not parts.joined)
    # A layer's input; sums over tensor ranks are not made twice.
    across = 1.0 + held + np.where(parts.tensor > 1, 2.0, 0.0)
    kept = inside / parts.tensor + parts.element * workload.hidden * across / parts.spread
    if mixture:
        # Grouped products of experts are one operator each, all of them kept.
        return np.asarray(kept + middle)
    matrices = 2.0 if every and workload.gated else 1.0
    return np.asarray(kept + parts.element * matrices * workload.ffn / parts.tensor)


def logit_bytes(
    workload: Workload, stack: Stack, traits: MemoryTraits, layouts: Layouts
) -> tuple[Column, Column]:
    """Of one micro-batch at the peak of the loss, and of a further one whose forward is done but whose backward is not.

    A fused loss reads the 16-bit logits and writes their gradient.
    """
    half = element_bytes(layouts)
    copies = np.where(layouts["tensor"] > 1, traits.split_logit_copies, traits.logit_copies)
    wide = half == 4.0
    plain = 4.0 * copies + half * traits.keeps_half_logits * ~wide
    peak = 2 * half if stack.fused_loss else plain
    elements = tokens_of(workload, layouts) * workload.vocab / layouts["tensor"]
    return np.asarray(elements * peak), np.asarray(elements * (half if stack.fused_loss else 4.0))
