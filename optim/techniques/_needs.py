"""Refusals that several techniques share."""

from __future__ import annotations

import os
import sys
import tempfile

from trine.optim._schema import spell
from trine.optim.techniques._assembly import Facts
from trine.record.errors import UsageError

__all__ = [
    "require_by_element",
    "require_folder",
    "require_no_gradient_hooks",
    "require_plain_gradients",
    "require_plain_layout",
    "require_ranks",
]


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


def require_no_gradient_hooks(key: str, facts: Facts) -> None:
    """Raise ``UsageError`` for hooks on parameters that are to be replaced by parts of them: nobody would call them."""
    for name, parameter in facts.model.named_parameters():
        # PyTorch has no public way to ask for either.
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or after:
            raise UsageError(
                f"{key}: {name} has a hook on its gradient (register_hook), which would not run on a rank's part of it: "
                "remove the hook, or take the key out"
            )


def require_plain_layout(key: str, facts: Facts, why: str, instead: str = "drop one of them") -> None:
    """Raise ``UsageError`` for a key that goes with data parallelism and sharding alone."""
    if facts.layout.is_hybrid:
        other = facts.layout.hybrid_key()
        raise UsageError(f"{key} and {other} cannot be combined: {why}. {instead[:1].upper()}{instead[1:]}")


def require_by_element(key: str, facts: Facts, why: str) -> None:
    """Raise ``UsageError`` for an optimizer that may need a parameter whole, of which ranks are to hold parts."""
    from trine.optim.runtime.local_steps import steps_by_element

    if not steps_by_element(facts.optimizer):
        raise UsageError(
            f"{key}: {type(facts.optimizer).__name__} is not known to update element by element, and each rank holds "
            f"{why}: use one of PyTorch's own, such as AdamW, or drop the key"
        )


def require_folder(path: str, key: str) -> None:
    """Raise ``UsageError`` for what is no folder that can be written, or no system that can reserve space."""
    shown = spell(path)
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib's raises for names that are too long, and takes "" for here
        raise UsageError(
            f"offload.path = {shown}: there is no such folder; make it, on the disk that is to be used"
        )
    try:  # permissions do not say it of the kernel's own file systems, nor of one that is full
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(
            f"offload.path = {shown}: no file can be made there ({error.strerror or error}); name a folder where one can"
        ) from error
    if not sys.platform.startswith("linux"):
        raise UsageError(f'{key} = "nvme" needs Linux (positioned reads and reserved space): use "cpu"')
