"""Lower precision by autocast: ``precision.dtype``.

Matmuls, convolutions and attention compute in bf16 or fp16; reductions, norms and losses stay in
fp32, and so do the parameters, their gradients and the optimizer's state (Micikevicius et al. 2018;
PyTorch's automatic mixed precision). bf16 has fp32's range, so nothing needs scaling; fp16 rounds
eight times finer and needs the loss scaled (:mod:`trine.optim.techniques.loss_scaling`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "processor_has", "refusal", "tolerance"]

KEYS = ("precision.dtype",)
ORDER = 50
QUANTITY = "matmul time and activation bytes"
NUMERICS = "bf16 rounds to 8 bits of mantissa, fp16 to 11: losses within 2e-3 and 6e-4 relative of fp32 over 30 steps"


def refusal(config: Config) -> str | None:
    """Everything of this key can be applied."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """bf16 keeps 8 bits of mantissa, fp16 11; gradients of small parameters are sums of many rounded numbers."""
    stated = {"bf16": Tolerance(2e-3, 5e-2), "fp16": Tolerance(6e-4, 1e-2)}
    return stated.get(config.precision.dtype or "")


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the device has no autocast, or no bf16."""
    wanted = config.precision.dtype
    if wanted not in ("bf16", "fp16"):
        return
    import torch

    kind = facts.device_type
    if not torch.amp.is_autocast_available(kind):
        raise UsageError(
            f'precision.dtype = "{wanted}": PyTorch has no autocast for {kind} devices; take the key out'
        )
    if wanted == "bf16" and kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(facts.device)
        raise UsageError(f'precision.dtype = "bf16": {name} has no bf16 units; take the key out')
    if config.precision.master_weights:
        return
    low = [
        name for name, p in facts.model.named_parameters() if p.is_floating_point() and p.element_size() < 4
    ]
    if low:
        raise UsageError(
            f'precision.dtype = "{wanted}" is autocast over fp32 parameters, and {low[0]} is stored in less: set '
            "precision.master_weights = true, take the key out, or keep the parameters in fp32"
        )


def apply(assembly: Assembly) -> None:
    """Autocast around every forward; ``fp32`` switches it off where the program has it on."""
    wanted = assembly.config.precision.dtype
    if wanted is None:
        return
    import torch

    from trine.optim.runtime.dtypes import FirstStep

    kind = assembly.facts.device_type
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[wanted]
    low = dtype if wanted != "fp32" else torch.bfloat16

    def context() -> AbstractContextManager[Any]:
        return torch.autocast(kind, dtype=low, enabled=wanted != "fp32")

    assembly.contexts.append(context)
    note = ""
    if kind == "cpu" and wanted != "fp32" and not processor_has(wanted):
        note = f"this CPU has no {wanted} instructions: expect it to be slower"
    assembly.effects.append(Effect(KEYS[0], "as the program has it", f"{wanted} autocast", note))

    def watch(finished: Assembly) -> None:
        FirstStep(finished, KEYS[0], dtype)

    assembly.finish.append(watch)


def processor_has(dtype: str) -> bool:
    """Whether this CPU multiplies ``bf16`` or ``fp16`` in hardware (AVX-512, AMX, or Arm's extensions)."""
    import platform
    from pathlib import Path

    if platform.machine() == "arm64":
        return True  # Apple's from the second generation on; PyTorch emulates nothing there
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # unknown: say nothing rather than warn without reason
    names = {
        "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
        "fp16": {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"},
    }
    return bool(names[dtype] & set(facts.split()))
