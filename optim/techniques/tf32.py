"""TF32 for matrices stored in fp32: ``precision.tf32``.

Tensor cores of NVIDIA's Ampere generation and later multiply fp32 matrices with 10 bits of mantissa and
add up in fp32, several times faster. A switch of the whole process, for cuBLAS and for cuDNN; it is put
back when the engine closes.
"""

from __future__ import annotations

from collections.abc import Callable

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "switch", "tolerance"]

KEYS = ("precision.tf32",)
ORDER = 51
QUANTITY = "matmul time"
NUMERICS = "products of fp32 matrices round to 10 bits of mantissa: losses within 1e-3 relative over 30 steps"


def refusal(config: Config) -> str | None:
    """Everything of this key can be applied."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """As far as fp16's autocast, which has the same mantissa."""
    return Tolerance(1e-3, 1e-2) if config.precision.tf32 else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the device has no TF32."""
    if not config.precision.tf32:
        return
    if facts.device_type != "cuda":
        raise UsageError(
            f"precision.tf32 is for NVIDIA devices of compute capability 8.0 or later, and the model is on "
            f"{facts.device_type}: take the key out"
        )
    import torch

    major, minor = torch.cuda.get_device_capability(facts.device)
    if torch.version.hip is None and major < 8:
        name = torch.cuda.get_device_name(facts.device)
        raise UsageError(
            f"precision.tf32 needs compute capability 8.0 or later, and {name} has {major}.{minor}: take the key out"
        )


def apply(assembly: Assembly) -> None:
    """Switch it until the engine closes."""
    wanted = assembly.config.precision.tf32
    if wanted is None:
        return
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    assembly.closers.append(switch(wanted))
    words = {True: "on", False: "off"}
    note = "" if assembly.config.precision.dtype in (None, "fp32") else "autocast leaves little in fp32"
    assembly.effects.append(
        Effect(KEYS[0], words[before], words[wanted], note or "cuBLAS and cuDNN, the whole process")
    )


def switch(wanted: bool) -> Callable[[], None]:
    """Set TF32 for matrix products and convolutions; what is returned puts both back as they were."""
    import torch

    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = wanted

    def restore() -> None:
        products.allow_tf32, convolutions.allow_tf32 = before

    return restore
