"""Regions of the model, and the optimizer, computed in few kernels: ``compute.fuse``.

A chain of elementwise operators reads and writes memory once an operator; fused, once. ``norm``, ``mlp``, ``rotary``
and ``bias_dropout_residual`` are found in the live model (:mod:`trine.optim.runtime.regions.structure`): modules that
offer ``set_fused`` as they offer ``set_attention``, PyTorch's own norms, and Transformers' models by their structure.
``cross_entropy`` needs a model that computes its own loss, for the logits are never made as a whole: the sample GPT
shows how. ``optimizer`` is the optimizer's step (:mod:`_fused_optimizer`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.techniques import _fused_optimizer
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.runtime.regions.structure import Part

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("compute.fuse",)
ORDER = 15
QUANTITY = "elementwise, loss and optimizer time; activation bytes"
NUMERICS = (
    "the same functions rounded in another order: losses within 1e-5 in fp32, 1e-10 in fp64; dropout draws other "
    "random numbers where it is compiled for CUDA"
)

_OPTIMIZER = "optimizer"

#: What a name needs, for the refusal of a model that has none of it.
_NEEDS = {
    "bias_dropout_residual": "a set_fused method that has it: call regions.bias_dropout_residual in the model, or use "
    'compute.compile = "blocks"',
    "mlp": "a gated feed-forward (gate_proj, up_proj, down_proj, act_fn) or a set_fused method that has it",
    "norm": "an nn.LayerNorm, an nn.RMSNorm or one that computes as Transformers' RMSNorms do",
    "rotary": "rotary positions as Transformers has them (apply_rotary_pos_emb) or a set_fused method that has them",
    "cross_entropy": "a set_fused method that has it: let the model compute its loss by regions.linear_cross_entropy, "
    "as trine.samples.gpt does",
}


def refusal(config: Config) -> str | None:
    """Every value can be applied; whether this model has such modules is for :func:`check`."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Another order of rounding."""
    return Tolerance(loss=1e-5, gradient=1e-4) if config.compute.fuse else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` for a name that nothing in the model or optimizer answers to."""
    if _OPTIMIZER in config.compute.fuse:
        _fused_optimizer.check(facts)
    wanted = _regions(config)
    if not wanted:
        return
    from trine.optim.runtime.regions.structure import parts_of

    found = {part.name for part in parts_of(facts.model, wanted)}
    for name in wanted:
        if name not in found:
            raise UsageError(
                f'compute.fuse: {type(facts.model).__name__} has no module for "{name}", which needs '
                f"{_NEEDS[name]}; else take it out"
            )


def apply(assembly: Assembly) -> None:
    """Switch modules and optimizer where they stand."""
    config = assembly.config
    wanted = _regions(config)
    if wanted:
        from trine.optim.runtime.compile_watch import watch_compilation
        from trine.optim.runtime.regions.structure import fuse, parts_of

        parts = parts_of(assembly.model, wanted)
        fuse(parts)
        for name in wanted:
            of_name = [part for part in parts if part.name == name]
            how, note, compiles = _said(of_name, assembly)
            assembly.effects.append(Effect(KEYS[0], f"{name} in {_counted(of_name)}", how, note))
            if compiles:
                watch_compilation(assembly, KEYS[0])
    if _OPTIMIZER in config.compute.fuse:
        _fused_optimizer.apply(assembly)


def _regions(config: Config) -> list[str]:
    return [name for name in config.compute.fuse if name != _OPTIMIZER]


def _counted(parts: list[Part]) -> str:
    kinds = Counter(type(part.module).__name__ for part in parts)
    return " and ".join(f"{count} {kind}" + "s" * (count > 1) for kind, count in kinds.items())


def _said(parts: list[Part], assembly: Assembly) -> tuple[str, str, bool]:
    """What computes these from now on, what to know about that, and whether it compiles."""
    import torch

    from trine.optim.runtime import regions

    device = assembly.facts.device
    dtype = next(p.dtype for p in assembly.model.parameters() if p.is_floating_point())
    here = torch.empty(0, dtype=dtype, device=device)
    how, notes = set(), set()
    for function in sorted({part.function for part in parts}):
        chosen = regions.implementation(function, here)
        if assembly.config.compute.compile is not False and function in regions.COMPILED:
            how.add("left to compute.compile")
        elif chosen == "pytorch":
            said, note = _of_pytorch(function, device.type)
            how.add(said)
            notes |= {note} if note else set()
        else:
            how.add({"liger": "Liger's kernel", "compiled": "compiled region"}[chosen])
            if chosen == "compiled" and function == "bias_dropout_residual":
                notes.add("draws other random numbers than nn.Dropout")
    return " and ".join(sorted(how)), "; ".join(sorted(notes)), "compiled region" in how


def _of_pytorch(function: str, device_type: str) -> tuple[str, str]:
    """What stands in where neither Liger nor the compiler is used, and why."""
    from trine.optim.runtime import regions

    if function == "linear_cross_entropy":
        return "chunks of rows", "the logits are never whole"
    if function == "bias_dropout_residual" and device_type == "cpu":
        return "one function", "keeps a byte an element for backward; the same random numbers"
    missing = regions.compiler_missing(device_type)
    if missing:
        return "plain PyTorch", f"compiling needs {missing}"
    return "PyTorch's own kernel", f"no compiled one is faster on a {device_type.upper()}"
