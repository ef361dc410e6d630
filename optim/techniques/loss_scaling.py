"""Loss scaling for fp16: ``precision.loss_scale``.

fp16 has five bits of exponent: gradients below 6e-8 round to zero and above 65504 to infinity. The
loss is scaled up before backward and the gradients down after it; a step that overflowed is left
out, and the scheduler does not move. Under ``precision.dtype = "fp16"`` it is on, and dynamic,
unless a number is given.
"""

from __future__ import annotations

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("precision.loss_scale",)
ORDER = 52
QUANTITY = "skipped_steps"
NUMERICS = "powers of two change no bit that fp16 can hold; steps that overflow are left out and counted"


def refusal(config: Config) -> str | None:
    """Everything of this key can be applied."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """A power of two changes nothing; what fp16 itself does is stated with ``precision.dtype``."""
    return None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where a gradient would be unscaled by another scale than its own."""
    if config.precision.dtype == "fp16" and config.accumulation.delayed:
        raise UsageError(
            'accumulation.delayed and precision.dtype = "fp16" cannot be combined: a gradient that waits one step '
            'would be divided by the next step\'s precision.loss_scale. Use precision.dtype = "bf16", or drop delayed'
        )


def apply(assembly: Assembly) -> None:
    """Give the assembly its scaler, and the record what it does."""
    precision = assembly.config.precision
    if precision.dtype != "fp16" and not _stored_in_fp16(assembly):
        return
    from trine.optim.runtime.loss_scaling import GROWTH_INTERVAL, LossScaler

    wanted = precision.loss_scale
    facts = assembly.facts
    parts = facts.device if facts.layout.is_hybrid and facts.ranks > 1 else None
    scaler = LossScaler("auto" if wanted is None else wanted, facts.ranks, agree_on=parts)
    assembly.scaler = scaler
    assembly.state["loss_scaling"] = scaler
    assembly.metrics["loss_scale"] = lambda: scaler.current
    assembly.metrics["skipped_steps"] = lambda: float(scaler.skipped)
    if wanted in (None, "auto"):
        note = f"halved by a step that overflows, doubled after {GROWTH_INTERVAL} that do not"
        if wanted is None:
            note = f"fp16's default; {note}"
        assembly.effects.append(Effect(KEYS[0], "none", f"dynamic from {scaler.current:g}", note))
    else:
        assembly.effects.append(Effect(KEYS[0], "none", f"fixed at {scaler.current:g}"))


def _stored_in_fp16(assembly: Assembly) -> bool:
    """fp16 parameters that masters made trainable: their gradients are fp16 whatever autocast does."""
    import torch

    return assembly.config.precision.master_weights and any(
        parameter.dtype == torch.float16 for parameter in assembly.model.parameters()
    )
