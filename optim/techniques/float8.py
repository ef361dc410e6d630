"""Linear layers in 8-bit floating point, by torchao: ``precision.float8``.

Inputs, weights and gradients are scaled by their largest magnitude as they come and multiplied as e4m3
and e5m2 (Micikevicius et al. 2022), twice bf16's rate on Hopper and Ada. Layers whose sizes are no multiples of 16
cannot run on the float8 units and stay as they are, and so does the output layer, which is the one
that training is most sensitive to.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "KEYS",
    "NUMERICS",
    "ORDER",
    "QUANTITY",
    "apply",
    "check",
    "convert",
    "fitting",
    "refusal",
    "tolerance",
]

KEYS = ("precision.float8",)
#: Before compile, which makes float8 fast, and before anything is wrapped or sharded.
ORDER = 12
QUANTITY = "matmul time"
NUMERICS = (
    "linear layers round to 4 bits of mantissa, scaled by tensor: losses within 2 % relative over 30 steps"
)

#: Sizes that the float8 units take.
_MULTIPLE = 16


def refusal(config: Config) -> str | None:
    """Everything of this key can be applied."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """e4m3 has three bits behind the point."""
    return Tolerance(2e-2, 3e-1) if config.precision.float8 else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the device, the package or the model has no place for it."""
    if not config.precision.float8:
        return
    import torch

    if facts.device_type != "cuda":
        raise UsageError(
            "precision.float8 needs a device with float8 units (NVIDIA compute capability 8.9 or later, such as L40 or "
            f"H100), and the model is on {facts.device_type}: take the key out"
        )
    capability = torch.cuda.get_device_capability(facts.device)
    if torch.version.hip is None and capability < (8, 9):
        name = torch.cuda.get_device_name(facts.device)
        raise UsageError(
            f"precision.float8 needs compute capability 8.9 or later, and {name} has "
            f"{'.'.join(map(str, capability))}: take the key out"
        )
    if find_spec("torchao") is None:
        raise UsageError(
            "precision.float8 is done by torchao, which is not installed: pip install 'trine[float8]', or take the key "
            "out"
        )
    if not fitting(facts.model):
        raise UsageError(
            f"precision.float8: no nn.Linear of {type(facts.model).__name__} has sizes that are multiples of "
            f"{_MULTIPLE}: take the key out"
        )


def fitting(model: torch.nn.Module) -> list[str]:
    """Names of the linear layers that are converted: sizes in multiples of 16, the output layer left out.

    The output layer is the one whose weight an embedding shares, or the model's last where it is as wide as an embedding
    is long.
    """
    from torch import nn

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    shared = {id(table.weight) for table in tables}
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    last = next(reversed(linear), None)
    if last is not None and linear[last].out_features in {table.num_embeddings for table in tables}:
        del linear[last]
    return [
        name
        for name, module in linear.items()
        if module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
        and id(module.weight) not in shared
    ]


def apply(assembly: Assembly) -> None:
    """Exchange the linear layers; their parameters stay the objects that the optimizer holds."""
    if not assembly.config.precision.float8:
        return
    names = convert(assembly.model)
    compiled = assembly.config.compute.compile
    note = (
        "" if compiled else 'without compute.compile the casts are kernels of their own: set it to "blocks"'
    )
    assembly.effects.append(
        Effect(KEYS[0], "none", f"{len(names)} linear layers, scaled by tensor as they come", note)
    )


def convert(model: torch.nn.Module, emulate: bool = False) -> list[str]:
    """Exchange them in place and return their names. ``emulate`` rounds to float8 and multiplies in fp32, anywhere.

    Raises ``UsageError`` where torchao's conversion would give the optimizer other parameters.
    """
    torchao = import_module("torchao.float8")
    names = set(fitting(model))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    torchao.convert_to_float8_training(
        model,
        config=torchao.Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda module, name: name in names,
    )
    if {name: id(parameter) for name, parameter in model.named_parameters()} != before:
        raise UsageError(
            "precision.float8: this version of torchao replaces parameters, so the optimizer would train nothing: take "
            "the key out, or make the optimizer after torchao's own convert_to_float8_training"
        )
    return sorted(names)
