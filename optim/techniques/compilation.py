"""``torch.compile`` of the repeated blocks or of the whole model: ``compute.compile``.

``blocks`` compiles each member of the model's longest list of like modules: equal blocks share one
compilation, and gradients still leave block by block, so that communication can hide behind them.
``model`` compiles everything; under data parallel PyTorch cuts the graph at the buckets.

Compiling costs seconds to minutes, once a shape: what it cost, and whether it goes on, is told
(:mod:`trine.optim.runtime.compile_watch`). On CPUs compiled dropout draws the random numbers of the eager one, which is
also faster there than the compiler's own (docs/fused.md).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "KEYS",
    "LEAST_BUCKET_MIB",
    "NUMERICS",
    "ORDER",
    "QUANTITY",
    "apply",
    "check",
    "refusal",
    "repeated_blocks",
    "tolerance",
]

KEYS = ("compute.compile",)
ORDER = 30
QUANTITY = "elementwise and launch time; costs compile time once"
NUMERICS = (
    "the same operators fused: losses within 1e-5 relative in fp32; dropout draws other random numbers than without, "
    "except on CPUs"
)

#: torch._dynamo's DDPOptimizer, which sees every graph compiled inside DDP's forward, asserts that no bucket is smaller
#: than DDP's first one.
LEAST_BUCKET_MIB = 1.0


def refusal(config: Config) -> str | None:
    """Everything of this key can be applied."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Another order of rounding."""
    return None if config.compute.compile is False else Tolerance(loss=1e-5, gradient=1e-4)


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` without a compiler, or without blocks to compile."""
    wanted = config.compute.compile
    if wanted is False:
        return
    from trine.optim.runtime.regions import find_missing

    missing = find_missing(facts.device_type)
    if missing:
        raise UsageError(f"compute.compile needs {missing}: install it, or take the key out")
    if wanted == "blocks" and not repeated_blocks(facts.model):
        raise UsageError(
            f'compute.compile = "blocks": {type(facts.model).__name__} has no list of like modules '
            '(an nn.ModuleList of two or more): use compute.compile = "model"'
        )


def apply(assembly: Assembly) -> None:
    """Compile in place, so that names in the state dictionary stay as they are."""
    wanted = assembly.config.compute.compile
    if wanted is False:
        return
    from trine.optim.runtime.compile_watch import watch_compilation

    note = "compiled at the first step"
    options: dict[str, Any] | None = None
    if assembly.facts.device_type == "cpu":
        options = {"fallback_random": True}
    elif _has_dropout(assembly.model):
        note += "; dropout draws other random numbers"
    dynamic = _dynamic(assembly)
    if wanted == "model":
        assembly.model.compile(options=options, dynamic=dynamic)
        assembly.effects.append(Effect(KEYS[0], "eager", "the whole model", note))
    else:
        blocks = repeated_blocks(assembly.model)
        for block in blocks:
            block.compile(options=options, dynamic=dynamic)
        kind = type(blocks[0]).__name__
        assembly.effects.append(Effect(KEYS[0], "eager", f"{len(blocks)} blocks of {kind}", note))
    watch_compilation(assembly, KEYS[0])


def _dynamic(assembly: Assembly) -> bool | None:
    """Whether one code serves several shapes; ``None``: from the second shape on, which is PyTorch's own way.

    Padded to buckets, shapes are few and worth their own code. Divided tensors must have it: Inductor of PyTorch 2.13
    fails on DTensors of unknown sizes.
    """
    buckets = assembly.config.data.shape_buckets
    if buckets:
        # One more for a last batch.
        _compile_up_to(16 if buckets == "auto" else len(buckets) + 1, assembly)
    if assembly.config.parallel.tensor > 1:
        _compile_alike(assembly)
    return False if buckets or assembly.config.parallel.tensor > 1 else None


def _compile_alike(assembly: Assembly) -> None:
    """Have every rank compile what the others do.

    Compiled blocks reduce what is divided by other collectives than the blocks themselves. A rank that had compiled the
    same functions before, for a validation of its own, say, would come to PyTorch's limit before the others and run them
    uncompiled: its collectives would pair with others of the same size, and all would train on what those mixed.
    """
    import torch

    torch._dynamo.reset_code_caches()
    _compile_up_to(64, assembly)


def _compile_up_to(times: int, assembly: Assembly) -> None:
    """Raise PyTorch's limit of compilations of one function, at which it runs it uncompiled, until the engine closes."""
    import torch

    limits: Any = torch._dynamo.config
    assembly.closers.append(functools.partial(setattr, limits, "recompile_limit", limits.recompile_limit))
    limits.recompile_limit = max(limits.recompile_limit, times)


def _has_dropout(model: torch.nn.Module) -> bool:
    from torch.nn.modules.dropout import _DropoutNd

    return any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Members of the list of like modules that holds the most parameters; empty when there is none."""
    from trine.optim.runtime.pipelining.stage_module import stages_of
    from trine.optim.runtime.shard_units import like_members

    stages = stages_of(model)
    if stages != [model]:  # a rank with several stages of a pipeline
        return [block for stage in stages for block in repeated_blocks(stage)]
    best: list[torch.nn.Module] = []
    weight = 0
    for module in model.modules():
        members = like_members(module)
        size = sum(parameter.numel() for parameter in module.parameters()) if members else 0
        if size > weight:
            best, weight = members, size
    return best
