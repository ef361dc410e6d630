"""The attention's implementation: ``compute.attention``.

``sdpa`` is PyTorch's scaled_dot_product_attention, which picks a fused kernel and never stores the
sequence × sequence matrix (Dao et al. 2022); ``flash`` is the same, held to the flash kernel, and
fails loudly where that kernel cannot run. Which module computes attention is the model's to say:
a ``set_attention(name)`` method on modules, or ``set_attn_implementation`` as Transformers has it.
PyTorch's own ``nn.MultiheadAttention`` uses the fused kernel already.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal"]

KEYS = ("compute.attention",)
ORDER = 10
QUANTITY = "attention time and activation bytes"
NUMERICS = "the same function in another order of summation: losses within 1e-5 in fp32"


def refusal(config: Config) -> str | None:
    """``varlen`` and ``flex`` come with packing."""
    wanted = config.compute.attention
    if wanted in ("varlen", "flex"):
        return f'compute.attention = "{wanted}" needs packed sequences, which this version lacks: use "sdpa"'
    return None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the model has no way to choose its attention."""
    wanted = config.compute.attention
    if wanted in ("sdpa", "flash") and not _switches(facts.model):
        raise UsageError(
            f"compute.attention: {type(facts.model).__name__} lets nobody choose its attention: give the module "
            "that computes it a set_attention(name) method, or call scaled_dot_product_attention in it yourself"
        )


def apply(assembly: Assembly) -> None:
    """Switch every module that can be switched."""
    wanted = assembly.config.compute.attention
    if wanted is None:
        return
    switches = _switches(assembly.model)
    if not switches:  # "auto" on a model that has nothing to switch
        assembly.effects.append(Effect(KEYS[0], "the model's own", "the model's own", "nothing to switch"))
        return
    before = {str(_implementation(module)) for module, _ in switches}
    for _, switch in switches:
        switch("sdpa")
    note = f"{len(switches)} modules" if len(switches) > 1 else ""
    assembly.effects.append(Effect(KEYS[0], " and ".join(sorted(before)), "sdpa", note))
    if wanted == "flash":
        assembly.contexts.append(_flash_only)


def _switches(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Any]]:
    """Modules that can be told, with the method to tell them. The outermost of each branch speaks."""
    whole = getattr(getattr(model, "module", model), "set_attn_implementation", None)
    if callable(whole):
        return [(model, whole)]
    return [
        (module, module.set_attention)
        for module in model.modules()
        if callable(getattr(module, "set_attention", None))
    ]


def _implementation(module: torch.nn.Module) -> str:
    named = getattr(module, "implementation", None)
    if named is None:
        named = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return str(named or "the model's own")


def _flash_only() -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context: AbstractContextManager[Any] = sdpa_kernel([SDPBackend.FLASH_ATTENTION])
    return context
