"""``torch.compile`` of the repeated blocks or of the whole model: ``compute.compile``.

``blocks`` compiles each member of the model's longest list of like modules: equal blocks share one
compilation, and gradients still leave block by block, so that communication can hide behind them.
``model`` compiles everything; under data parallel PyTorch cuts the graph at the buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
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
]

KEYS = ("compute.compile",)
ORDER = 30
QUANTITY = "elementwise and launch time; costs compile time once"
NUMERICS = "the same operators fused: losses within 1e-5 relative in fp32; dropout draws other random numbers than without"


#: torch._dynamo's DDPOptimizer asserts that no bucket is smaller than DDP's first one.
LEAST_BUCKET_MIB = 1.0


def refusal(config: Config) -> str | None:
    """Everything of this key can be applied."""
    return None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` without a compiler, or without blocks to compile."""
    wanted = config.compute.compile
    if wanted is False:
        return
    if facts.device_type == "cpu":
        _require_compiler()
    if wanted == "blocks" and not repeated_blocks(facts.model):
        raise UsageError(
            f'compute.compile = "blocks": {type(facts.model).__name__} has no list of like modules '
            '(an nn.ModuleList of two or more): use compute.compile = "model"'
        )
    bucket = config.communication.bucket_mib
    if (
        wanted == "model"
        and facts.ranks > 1
        and isinstance(bucket, (int, float))
        and bucket < LEAST_BUCKET_MIB
    ):
        raise UsageError(
            f'communication.bucket_mib = {bucket:g} is too small for compute.compile = "model": PyTorch cuts the '
            f'graph at buckets of {LEAST_BUCKET_MIB:g} MiB or more. Use that, or compute.compile = "blocks"'
        )


def apply(assembly: Assembly) -> None:
    """Compile in place, so that names in the state dictionary stay as they are."""
    wanted = assembly.config.compute.compile
    if wanted is False:
        return
    if wanted == "model":
        assembly.model.compile()
        assembly.effects.append(Effect(KEYS[0], "eager", "the whole model", "compiled at its first step"))
        return
    blocks = repeated_blocks(assembly.model)
    for block in blocks:
        block.compile()
    kind = type(blocks[0]).__name__
    assembly.effects.append(
        Effect(KEYS[0], "eager", f"{len(blocks)} blocks of {kind}", "compiled at the first step")
    )


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Members of the list of like modules that holds the most parameters; empty when there is none."""
    import torch

    best: list[torch.nn.Module] = []
    weight = 0
    for module in model.modules():
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) or len(module) < 2:
            continue
        members = list(module)
        if len({type(member) for member in members}) > 1:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > weight:
            best, weight = members, size
    return best


def _require_compiler() -> None:
    import os
    import shutil

    wanted = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([wanted] if wanted else ["g++", "clang++", "c++", "cl"])):
        raise UsageError(
            f"compute.compile needs a C++ compiler on a CPU, and there is no {wanted or 'g++ or clang++'} here: "
            "install one (Debian: apt install g++), or take the key out"
        )
