"""Plans of the user's: patterns of module names, each with a style.

    [parallel.plan]
    "blocks.*.mixer.in" = "column"
    "blocks.*.mixer.out" = "row"

``*`` stands for one part of a name, ``**`` for any number of them. Styles: ``column`` and ``row`` cut a linear layer by its
outputs and inputs, ``qkv`` and ``gate_up`` by the outputs of three or two equal matrices that lie side by side, ``embedding``
and ``head`` by the vocabulary; ``sequence`` is a norm between the cut regions, and ``replicate`` keeps a module whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from trine.optim._globs import matches
from trine.optim.runtime.adoption import without_inserted
from trine.optim.runtime.pipelining.placeholders import Placeholder
from trine.optim.runtime.tensor_plans.roles import is_linear
from trine.record.errors import UsageError

__all__ = ["STYLES", "styles_of"]

STYLES = ("column", "row", "qkv", "gate_up", "embedding", "head", "sequence", "replicate")
_LINEAR = frozenset({"column", "row", "qkv", "gate_up", "head"})


def styles_of(model: nn.Module, own: Mapping[str, str], is_stage: bool = False) -> dict[str, str]:
    """Module name → style; the last pattern that matches holds.

    Raises ``UsageError`` for what matches nothing, but in a pipeline's stage, and for a style that the module cannot have.
    """
    found: dict[str, str] = {}
    # Of a stage too, the names are the model's; what stands there for a module of another stage has no style.
    named = {name: module for name, module in model.named_modules() if not isinstance(module, Placeholder)}
    for pattern, style in own.items():
        if style not in STYLES:
            raise UsageError(
                f'parallel.plan: "{pattern}" is to be {style!r}: a style is one of {", ".join(STYLES)}'
            )
        matched = [name for name in named if name and matches(pattern, without_inserted(name))]
        if not matched and not is_stage:
            listed = ", ".join(name for name in named if name and name.count(".") <= 1)[:200]
            raise UsageError(f'parallel.plan: no module is called "{pattern}"; there are {listed}')
        for name in matched:
            if style in _LINEAR and not is_linear(named[name]):
                raise UsageError(
                    f'parallel.plan: {name} is a {type(named[name]).__name__}, and "{style}" cuts a linear layer'
                )
            if style == "embedding" and not isinstance(named[name], nn.Embedding):
                raise UsageError(
                    f'parallel.plan: {name} is a {type(named[name]).__name__}, and "embedding" cuts an nn.Embedding'
                )
            found[name] = style
    return found
