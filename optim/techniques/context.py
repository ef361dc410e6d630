"""Context parallelism: ``parallel.context`` ranks share each sequence.

Every rank of the group is given the whole batch and computes on its part of each sequence: two chunks, one near the
beginning and one near the end, so that all see equally many keys under a causal mask. Attention gathers keys and values;
everything else of a transformer works token by token. Activations, and logits with them, take 1 / context of their bytes.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("parallel.context",)
ORDER = 8
QUANTITY = "activation bytes per rank"
NUMERICS = "unchanged but for the order of summation: losses within 1e-10 in fp64, 1e-5 relative in fp32"


def refusal(config: Config) -> str | None:
    """What no model could do."""
    if config.parallel.context == 1:
        return None
    reasons = {
        "data.packing": "attention over parts of a sequence knows no borders of documents",
        "compute.compile": "the gathering of keys breaks the graph in each block",
    }
    for key, why in reasons.items():
        if config[key]:
            return f"parallel.context and {key} cannot be combined in this version: {why}. Drop one of them"
    if config.parallel.pipeline > 1:
        return (
            "parallel.context and parallel.pipeline cannot be combined in this version: stages do not hand on where tokens "
            "stand in their sequence. Drop one of them"
        )
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Sums over a sequence are made of its parts'."""
    return Tolerance(1e-5, 1e-4) if config.parallel.context > 1 else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` for a model whose attention or positions cannot be reached."""
    degree = config.parallel.context
    if degree == 1:
        return
    from trine.optim.runtime.adoption import unwrapped
    from trine.optim.runtime.context import POSITIONS

    model = unwrapped(facts.model)
    taken = inspect.signature(model.forward).parameters
    if not any(name in taken for name in POSITIONS):
        raise UsageError(
            f"parallel.context = {degree}: the forward of {type(model).__name__} takes neither {' nor '.join(POSITIONS)}, so "
            "it cannot be told where a rank's tokens stand in their sequence: give it such an argument, or drop the key"
        )


def apply(assembly: Assembly) -> None:
    """Cut micro-batches, and have attention gather keys and values."""
    if assembly.config.parallel.context == 1:
        return
    from trine.optim.runtime.context import Sequences
    from trine.optim.runtime.context_attention import patched
    from trine.optim.runtime.meshes import group_of

    facts = assembly.facts
    group = group_of(facts, "context")
    assert group is not None, "degrees above one have a group"
    sequences = Sequences(assembly.model, group)
    assembly.closers += [patched(), sequences.rest]
    assembly.part = sequences.part
    assembly.uncounted = sequences.uncounted
    assembly.rehearsals.append(lambda loss_fn, batch: sequences.rehearse(assembly, loss_fn, batch))
    assembly.backward_contexts.append(sequences.backward)
    assembly.after_update.append(sequences.rest)
    assembly.discard.append(sequences.rest)
    attending = sequences.attending
    assembly.metrics["context/sent_bytes"] = lambda: float(attending.sent_bytes)
    assembly.after_step.append(attending.forget)
    assembly.finish.append(_finish)
    degree = facts.layout.context
    assembly.effects.append(
        Effect(
            KEYS[0],
            "whole sequences a rank",
            f"1/{degree} of each",
            f"head and tail chunks of {2 * degree}; keys and values are gathered",
        )
    )


def _finish(assembly: Assembly) -> None:
    """Last of all, after what chooses the attention: parts can be attended to by the fused one alone."""
    from trine.optim.runtime.adoption import unwrapped
    from trine.optim.runtime.context_transformers import NAME, is_of_transformers, register

    assembly.admit = _admit
    model: Any = unwrapped(assembly.model)
    if is_of_transformers(model):
        register()
        model.set_attn_implementation(NAME)
        return
    switched = [module for module in model.modules() if _computes_by_hand(module)]
    for module in switched:
        module.set_attention("sdpa")
    if switched:
        assembly.effects.append(
            Effect("compute.attention", "manual", "sdpa", "which parallel.context reaches; the same function")
        )


def _computes_by_hand(module: torch.nn.Module) -> bool:
    return (
        callable(getattr(module, "set_attention", None)) and getattr(module, "implementation", "") == "manual"
    )


def _admit(given: Any) -> None:
    raise UsageError(
        "parallel.context cuts sequences in engine.train_step: pass loss_fn=… to trine.optimize, in place of engine(batch), "
        "engine.backward(loss) and engine.step()"
    )
