"""Refusals that several techniques share."""

from __future__ import annotations

from trine.optim.techniques._assembly import Facts
from trine.record.errors import UsageError

__all__ = ["require_plain_gradients", "require_plain_layout", "require_ranks"]


def require_ranks(key: str, facts: Facts) -> None:
    """Raise ``UsageError`` for a key about several ranks in a process that is alone."""
    if facts.ranks == 1:
        raise UsageError(
            f"{key} is about several ranks, and this process is alone: start it with torchrun "
            "(and torch.distributed.init_process_group), or take the key out"
        )


def require_plain_gradients(key: str, facts: Facts) -> None:
    """Raise ``UsageError`` where a communication hook of the program's, or sparse gradients, forbid one of ours."""
    from trine.optim.runtime.replicas import hook_of

    hook = hook_of(facts.model)
    if hook:
        raise UsageError(
            f"{key}: this DistributedDataParallel has a communication hook of its own, {hook}; drop the key, or give the "
            "model without the hook"
        )
    sparse = [name for name, each in facts.model.named_modules() if getattr(each, "sparse", False) is True]
    if sparse:
        raise UsageError(
            f"{key} takes dense gradients, and {sparse[0]} has sparse ones: set its sparse=False, or drop the key"
        )


def require_plain_layout(key: str, facts: Facts, why: str, instead: str = "drop one of them") -> None:
    """Raise ``UsageError`` for a key that goes with data parallelism and sharding alone."""
    if facts.layout.is_hybrid:
        other = facts.layout.hybrid_key()
        raise UsageError(f"{key} and {other} cannot be combined: {why}. {instead[:1].upper()}{instead[1:]}")
