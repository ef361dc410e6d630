"""The attention's implementation: ``compute.attention``.

``sdpa`` is PyTorch's scaled_dot_product_attention, which picks a fused kernel and never stores the
sequence × sequence matrix (Dao et al. 2022); ``flash`` is the same, held to the flash kernel, and refused
where that kernel cannot run. ``varlen`` (the flash kernel for sequences end to end) and ``flex`` (flex
attention with a block mask) are for packed rows on CUDA and compute nothing across documents' borders;
``sdpa`` keeps documents apart by a mask. Which module computes attention is the model's to say: a
``set_attention(name)`` method on modules, which list in ``attentions`` what they know beyond ``sdpa``, or
``set_attn_implementation`` as Transformers has it. PyTorch's own ``nn.MultiheadAttention`` uses the fused
kernel already.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("compute.attention",)
ORDER = 10
QUANTITY = "attention time and activation bytes"
NUMERICS = "the same function in another order of summation: losses within 1e-5 in fp32"

#: Of packed rows alone.
_PACKED = ("varlen", "flex")


def refusal(config: Config) -> str | None:
    """``varlen`` and ``flex`` are about documents' borders."""
    wanted = config.compute.attention
    if wanted in _PACKED and not config.data.packing:
        return f'compute.attention = "{wanted}" is for packed rows: set data.packing to true as well, or use "sdpa"'
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Of fp32 runs."""
    return None if config.compute.attention is None else Tolerance(loss=1e-5, gradient=1e-4)


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the model cannot choose its attention, or the kernel cannot run."""
    wanted = config.compute.attention
    if wanted in (None, "auto"):
        return
    switches = _switches(facts.model)
    if not switches:
        raise UsageError(
            f"compute.attention: {type(facts.model).__name__} lets nobody choose its attention: give the module "
            "that computes it a set_attention(name) method, or call scaled_dot_product_attention in it yourself"
        )
    modules = [module for module, _ in switches]
    if wanted == "flash":
        _check_flash(config, facts, modules)
    elif wanted in _PACKED:
        reason = _why_not_packed(str(wanted), config, facts, modules)
        if reason:
            raise UsageError(f'compute.attention = "{wanted}": {reason}: use "sdpa"')


def apply(assembly: Assembly) -> None:
    """Switch every module that can be switched."""
    wanted = assembly.config.compute.attention
    if wanted is None:
        return
    switches = _switches(assembly.model)
    if not switches:  # "auto" on a model that has nothing to switch
        assembly.effects.append(Effect(KEYS[0], "the model's own", "the model's own", "nothing to switch"))
        return
    modules = [module for module, _ in switches]
    name = wanted if wanted in _PACKED else "sdpa"
    if wanted == "auto" and assembly.config.data.packing:
        name = "sdpa" if _why_not_packed("varlen", assembly.config, assembly.facts, modules) else "varlen"
    before = {str(_implementation(module)) for module in modules}
    for _, switch in switches:
        switch(name)
    notes = [f"{len(switches)} modules"] if len(switches) > 1 else []
    notes += _kernel_notes(name, assembly, modules)
    after = "sdpa, the flash kernel alone" if wanted == "flash" else name
    assembly.effects.append(Effect(KEYS[0], " and ".join(sorted(before)), after, "; ".join(notes)))
    if wanted == "flash":
        assembly.contexts.append(_flash_only)


def _check_flash(config: Config, facts: Facts, modules: list[torch.nn.Module]) -> None:
    """CPU's flash kernel takes masks and no dropout; CUDA's the other way round, and half precision alone."""
    kind = facts.device_type
    if kind == "cpu" and _dropout(modules):
        raise UsageError(
            f'compute.attention = "flash": the flash kernel of CPUs has no dropout, and attention drops {_dropout(modules):g}: '
            'use "sdpa", which computes it by plain products there, or no dropout in attention'
        )
    if kind == "cuda" and config.data.packing:
        raise UsageError(
            'compute.attention = "flash" and data.packing cannot be combined on CUDA: its flash kernel takes no mask. Use '
            '"varlen", which is the same kernel for packed rows'
        )
    if kind == "cuda" and not _computes_in_half(config, facts.model):
        raise UsageError(
            'compute.attention = "flash": the flash kernel of CUDA computes in bf16 or fp16: set precision.dtype as well, '
            'or use "sdpa"'
        )


def _why_not_packed(name: str, config: Config, facts: Facts, modules: list[torch.nn.Module]) -> str | None:
    if facts.device_type != "cuda":
        missing = "flex attention has no backward" if name == "flex" else "there is no variable-length kernel"
        return f"{missing} on {facts.device_type} devices"
    unable = next((m for m in modules if name not in getattr(m, "attentions", ())), None)
    if unable is not None:
        return f"{type(unable).__name__} does not list it in attentions"
    if _dropout(modules):
        return f"its kernel has no dropout, and attention drops {_dropout(modules):g}"
    if name == "varlen" and not _computes_in_half(config, facts.model):
        return "its kernel computes in bf16 or fp16, and precision.dtype is neither"
    return None


def _kernel_notes(name: str, assembly: Assembly, modules: list[torch.nn.Module]) -> list[str]:
    """What the kernel that will run has to do with this device, mask and dropout."""
    notes = []
    if assembly.config.data.packing:
        notes.append("documents apart by a mask" if name == "sdpa" else "nothing computed across documents")
    if name == "sdpa" and assembly.facts.device_type == "cpu" and _dropout(modules):
        notes.append(
            "with dropout CPUs have no fused kernel: PyTorch's math one, which stores the whole matrix"
        )
    return notes


def _computes_in_half(config: Config, model: torch.nn.Module) -> bool:
    if config.precision.dtype in ("bf16", "fp16"):
        return True
    return all(p.element_size() == 2 for p in model.parameters() if p.is_floating_point())


def _dropout(modules: list[torch.nn.Module]) -> float:
    """The largest dropout that the modules of attention state: a number, a Dropout, or Transformers' configuration."""
    found = [0.0]
    for module in modules:
        stated = getattr(module, "dropout", None)
        config = getattr(module, "config", None)
        candidates = [stated, getattr(stated, "p", None)]
        candidates += [getattr(config, name, None) for name in ("attention_dropout", "attn_pdrop")]
        found += [float(each) for each in candidates if isinstance(each, (int, float))]
    return max(found)


def _switches(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Any]]:
    """Modules that can be told, with the method to tell them. The outermost of each branch speaks."""
    from trine.optim.runtime.adoption import unwrapped

    inner = unwrapped(model)
    whole = getattr(inner, "set_attn_implementation", None)
    if callable(whole):
        return [(inner, whole)]
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
