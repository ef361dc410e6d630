"""Low-precision parameters with fp32 master copies in the optimizer: ``precision.master_weights``.

Parameters are stored as ``precision.dtype`` says (or stay in the low precision that they have), which
halves their bytes, their gradients' and what replicas exchange; the optimizer updates fp32 masters.
Beside the optimizer's state it costs those. With ``zero.stage`` of 2 or 3 the shards themselves are the
masters, and FSDP2 gathers them in low precision: nothing is done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("precision.master_weights",)
#: Before DDP makes its buckets; the masters follow when ZeRO has cut what the optimizer holds.
ORDER = 33
QUANTITY = "parameter and gradient bytes; bytes sent"
NUMERICS = (
    "parameters and gradients round to 8 bits of mantissa (bf16) or 11 (fp16), updates do not: losses within 2e-3 and "
    "6e-4 relative of fp32 over 30 steps"
)


def refusal(config: Config) -> str | None:
    """Everything of this key can be applied."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Rounding of parameters, beyond that of autocast."""
    if not config.precision.master_weights:
        return None
    return Tolerance(6e-4, 1e-2) if config.precision.dtype == "fp16" else Tolerance(2e-3, 5e-2)


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where nothing says in what to store parameters, and for fp16 without masters."""
    import torch

    if not config.precision.master_weights:
        _refuse_bare_fp16(facts)
        return
    wanted = config.precision.dtype
    stored = {p.dtype for p in facts.model.parameters() if p.is_floating_point()}
    if wanted == "fp32":
        raise UsageError(
            'precision.master_weights keeps fp32 copies of low-precision parameters, and precision.dtype = "fp32": '
            'use "bf16" or "fp16", or drop precision.master_weights'
        )
    if wanted is None and not stored & {torch.bfloat16, torch.float16}:
        raise UsageError(
            "precision.master_weights keeps fp32 copies of low-precision parameters, and the model's are "
            f'{" and ".join(sorted(map(str, stored)))}: set precision.dtype = "bf16" as well'
        )
    if torch.float64 in stored:
        raise UsageError(
            "precision.master_weights: the model has float64 parameters, which fp32 masters would round: drop the key, "
            "or convert the model to float32"
        )
    layout = facts.layout
    if config.zero.stage < 2 and layout.is_hybrid and layout.size("replicate", "expert", "context") > 1:
        raise UsageError(
            f"precision.master_weights and {layout.hybrid_key()} cannot be combined with zero.stage = {config.zero.stage}: "
            "parameters that FSDP2 replicates are its own masters. Set zero.stage = 2 or 3 as well, or drop one of them"
        )
    if config.zero.stage < 2:
        from trine.optim.runtime.replicas import cannot_be_wrapped_anew

        lost = cannot_be_wrapped_anew(facts.model)
        if lost:
            raise UsageError(
                f"precision.master_weights wraps the model anew, and this DistributedDataParallel has {lost}"
            )
    if isinstance(facts.optimizer, torch.optim.LBFGS):
        raise UsageError(
            "precision.master_weights: LBFGS keeps its own list of parameters, so masters cannot be put under it: use "
            "another optimizer, or drop the key"
        )


def _refuse_bare_fp16(facts: Facts) -> None:
    """An adaptive optimizer over fp16 parameters: the squares of gradients and an epsilon of 1e-8 are zero there.

    The first update divides by nought, and every parameter is NaN at the second step.
    """
    import torch

    for group in facts.optimizer.param_groups:
        if group.get("eps") is None:
            continue
        if any(parameter.dtype == torch.float16 for parameter in group["params"]):
            raise UsageError(
                f"{type(facts.optimizer).__name__} holds float16 parameters, in which its eps = {group['eps']:g} and "
                "squares of gradients round to zero, so that training turns to NaN: set precision.master_weights = "
                'true and precision.dtype = "fp16", or keep the parameters in fp32'
            )


def apply(assembly: Assembly) -> None:
    """Store the parameters in low precision now, and put masters under the optimizer when all else is done."""
    config = assembly.config
    if not config.precision.master_weights or config.zero.stage >= 2:
        return
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from trine.optim.runtime.masters import Masters, lower
    from trine.optim.runtime.replicas import wrap_anew
    from trine.optim.runtime.sharding import start_alike

    wrapped = isinstance(assembly.model, DistributedDataParallel)
    if assembly.facts.ranks > 1 and not wrapped:
        start_alike(assembly)  # DDP would do so for the rounded values alone
    dtype = _storage(assembly)
    before = {p.dtype for p in assembly.model.parameters() if p.is_floating_point()}
    originals = lower(assembly.model, dtype)
    if isinstance(assembly.model, DistributedDataParallel):  # its buckets are of the old type
        assembly.model = wrap_anew(assembly.model, {})
    names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in before))
    assembly.effects.append(
        Effect(
            KEYS[0],
            f"parameters in {names}",
            f"in {str(dtype).removeprefix('torch.')}, updated in float32 masters",
            "gradients are exchanged in the parameters' precision" if assembly.facts.ranks > 1 else "",
        )
    )

    def install(ready: Assembly) -> None:
        ready.state["masters"] = Masters(ready, originals)
        originals.clear()
        torch.clear_autocast_cache()

    assembly.finish.append(install)


def _storage(assembly: Assembly) -> torch.dtype:
    """What to store parameters as: what was asked for, else the low precision that most of them have."""
    import torch

    wanted = assembly.config.precision.dtype
    if wanted is not None:
        return torch.float16 if wanted == "fp16" else torch.bfloat16
    sizes = {
        dtype: sum(p.numel() for p in assembly.model.parameters() if p.dtype == dtype)
        for dtype in (torch.bfloat16, torch.float16)
    }
    return max(sizes, key=lambda dtype: sizes[dtype])
