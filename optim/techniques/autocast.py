"""Lower precision by autocast: ``precision.dtype``.

Matmuls, convolutions and attention compute in bf16; reductions, norms and losses stay in fp32, and
so do the parameters, their gradients and the optimizer's state (Micikevicius et al. 2018; PyTorch's
automatic mixed precision). bf16 has fp32's range, so nothing needs scaling.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.record.errors import UsageError

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal"]

KEYS = ("precision.dtype",)
ORDER = 50
QUANTITY = "matmul time and activation bytes"
NUMERICS = "bf16 rounds to 8 bits of mantissa: losses within 2e-3 relative of fp32 over 30 steps"


def refusal(config: Config) -> str | None:
    """fp16 needs loss scaling, which this version lacks."""
    if config.precision.dtype == "fp16":
        return 'precision.dtype = "fp16" needs loss scaling, which this version lacks: use "bf16"'
    return None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the device has no autocast, or no bf16."""
    if config.precision.dtype != "bf16":
        return
    import torch

    kind = facts.device_type
    if not torch.amp.is_autocast_available(kind):
        raise UsageError(
            f'precision.dtype = "bf16": PyTorch has no autocast for {kind} devices; take the key out'
        )
    if kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(facts.device)
        raise UsageError(f'precision.dtype = "bf16": {name} has no bf16 units; take the key out')
    low = [
        name for name, p in facts.model.named_parameters() if p.is_floating_point() and p.element_size() < 4
    ]
    if low:
        raise UsageError(
            f'precision.dtype = "bf16" is autocast over fp32 parameters, and {low[0]} is stored in less: take '
            "the key out, or keep the parameters in fp32"
        )


def apply(assembly: Assembly) -> None:
    """Autocast around every forward; ``fp32`` switches it off where the program has it on."""
    wanted = assembly.config.precision.dtype
    if wanted is None:
        return
    import torch

    kind = assembly.facts.device_type

    def context() -> AbstractContextManager[Any]:
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=wanted == "bf16")

    assembly.contexts.append(context)
    note = ""
    if wanted == "bf16" and kind == "cpu" and not processor_has_bf16():
        note = "this CPU has no bf16 instructions: expect it to be slower"
    assembly.effects.append(Effect(KEYS[0], "as the program has it", f"{wanted} autocast", note))


def processor_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX-512 BF16, AMX, or Arm's BF16 extension)."""
    import platform
    from pathlib import Path

    if platform.machine() == "arm64":
        return True  # Apple's from the second generation on; PyTorch emulates nothing there
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # unknown: say nothing rather than warn without reason
    words = set(facts.split())
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & words)
