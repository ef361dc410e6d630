"""What software keeps in memory beside a model's own numbers: facts about it, and at most two fitted scalars each.

:file:`memory.toml` has a table for each kind of software and says which stacks
(:mod:`trine.optim.plan.constants`) are of it; a kind with a ``family`` takes from that what it does not
state. Facts come from its source and documentation, named beside each; ``fragmentation`` and ``fixed_bytes``
were fitted to published peaks by ``benchmarks/planner_memory.py``, which prints how far off they are on
tables that they had no part in.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from trine.optim.plan.constants import Spread, Stack, stacks

__all__ = ["MemoryTraits", "memory_spread", "memory_traits"]


@dataclass(frozen=True, slots=True)
class MemoryTraits:
    """Of a kind of software. Bytes are of an element in half precision; in fp32 weights, gradients and two
    moments have 4 each.

    ``masters``: weights are kept in 16 bits beside 32-bit masters; else they are 32-bit and cast where used.
    ``replica_masters``: that is so in replicas alone, whose gradients are then exchanged in 16 bits and summed in 32
    over micro-batches (:func:`~trine.optim.plan.ranks.in_replicas`). ``bf16_gradient_bytes`` and ``fp16_gradient_bytes``: of all gradients that are held until the step
    (DeepSpeed's optimizer with 32-bit sums beside gradients in bf16 is for stages below 2: from there
    ``fp16_gradient_bytes`` counts). ``keeps_gradients``: they, or a pool of their own, stay from step to
    step; else backward makes them in what activations leave. ``sums_whole_gradients``: under ZeRO 2 and 3
    ranks synchronise with the last micro-batch alone, and hold whole sums until then; else they reduce each
    micro-batch's. ``step_bytes``: of a rank's share of the
    optimizer's state, more while it updates under ZeRO, in one piece (``flat_step``) or parameter by
    parameter. ``gradient_copies``: buckets that repeat the gradients (DDP's). ``bucket_bytes``: fixed buffers
    of gradient reduction and gathers, where there are several data ranks.

    ``logit_copies``: 32-bit copies of the logits when the loss's backward peaks; ``split_logit_copies``:
    where the vocabulary is split over tensor ranks. ``keeps_half_logits``: the block of the 16-bit ones is
    held then, too. ``keeps_outputs``: a stage keeps its output for each micro-batch in flight, and one
    message more; else frees it when sent. ``keeps_gathered``: what sequence parallelism gathers before
    matmuls is saved; else saved split and gathered again.
    ``fp8_input_bytes``: of an element of a matmul's saved input under fp8; ``fp8_weight_bytes``: of fp8
    copies of the weights. ``prefetch``: blocks gathered ahead under ZeRO 3. ``live_parameters``: that ZeRO 3
    leaves gathered, 0 for those blocks alone. ``context_bytes``: the device's context with the code of
    kernels.

    ``family``: the kind whose fitted constants it has.

    Fitted: ``fragmentation``, what the allocator holds beyond tensors, as a share of them; ``fixed_bytes``,
    workspaces and what else is counted nowhere.
    """

    kind: str
    family: str
    stacks: tuple[str, ...] = ()
    masters: bool = True
    replica_masters: bool = False
    bf16_gradient_bytes: float = 4.0
    fp16_gradient_bytes: float = 4.0
    keeps_gradients: bool = True
    sums_whole_gradients: bool = False
    step_bytes: float = 0.0
    flat_step: bool = False
    gradient_copies: float = 0.0
    bucket_bytes: float = 0.0
    logit_copies: float = 3.0
    split_logit_copies: float = 3.0
    keeps_half_logits: bool = True
    keeps_outputs: bool = False
    keeps_gathered: bool = False
    fp8_input_bytes: float = 2.0
    fp8_weight_bytes: float = 0.0
    prefetch: int = 1
    live_parameters: float = 0.0
    context_bytes: float = 0.55e9
    fragmentation: float = 0.0
    fixed_bytes: float = 0.0
    provenance: str = ""


@cache
def _content() -> Mapping[str, Any]:
    return tomllib.loads(files(__package__).joinpath("memory.toml").read_text(encoding="utf-8"))


@cache
def memory_spread() -> Spread:
    """How far published peaks lie from predictions by constants that they had no part in: factors, for nine of ten."""
    return Spread(**_content()["spread"])


@cache
def _kinds() -> Mapping[str, MemoryTraits]:
    content = {kind: given for kind, given in _content().items() if kind != "spread"}
    found: dict[str, MemoryTraits] = {}
    for kind, given in content.items():
        family = given.get("family", kind)
        values: dict[str, Any] = {**content[family], **given, "family": family}
        values["stacks"] = tuple(given.get("stacks", ()))
        found[kind] = MemoryTraits(kind=kind, **values)
    return found


def memory_traits(stack: Stack) -> MemoryTraits:
    """Of the kind that names the stack, or its parent; of ``pytorch`` where none does."""
    kinds = _kinds()
    name, seen = stack.name, set[str]()
    while name and name not in seen:
        seen.add(name)
        for traits in kinds.values():
            if name in traits.stacks:
                return traits
        name = stacks()[name].parent if name in stacks() else stack.parent
    return kinds["pytorch"]
