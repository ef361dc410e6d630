"""What each block of a model costs, and what comes before and behind the blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trine.optim.runtime.pipelining.chain import Chain

__all__ = ["Costs", "estimated"]


@dataclass(frozen=True, slots=True)
class Costs:
    """In one unit. ``before`` and ``behind``: of what the first and the last stage hold beside their blocks."""

    blocks: tuple[float, ...]
    before: float
    behind: float
    kind: str  # estimated, measured


def estimated(model: nn.Module, chain: Chain) -> Costs:
    """By parameters: a product with a matrix costs in proportion to it, a look-up in an embedding next to nothing.

    How often a convolution's kernel is applied is unknown here, so that its parameters count once: give ``example=`` where
    that misleads.
    """
    inside = {id(module) for block in chain.blocks for module in block.modules()}
    before = behind = 0.0
    passed = False
    for module in model.modules():
        if id(module) in inside:
            passed = True
        elif passed:
            behind += _own(module)
        else:
            before += _own(module)
    return Costs(tuple(float(_cost(block)) for block in chain.blocks), before, behind, "estimated")


def _cost(module: nn.Module) -> float:
    return max(sum(_own(each) for each in module.modules()), 1.0)


def _own(module: nn.Module) -> float:
    """Multiplications a sample position, in the number of the parameters that take part."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 0.0
    return float(sum(parameter.numel() for parameter in module.parameters(recurse=False)))
