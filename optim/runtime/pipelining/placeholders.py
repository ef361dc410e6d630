"""What stands in a stage where the model's other parts were: modules without parameters, at the same places.

A stage runs the model's own forward, so that its masks, positions, labels and keyword arguments go on working. What this
stage does not own must answer when it is called, cost nothing, and give itself away where the model needs more of it
than the hidden state that stages hand on:

    StandIn   for what comes before the blocks (embeddings): zeros of the right shape that take no memory
    Skipped   for a block of another stage
    Absent    for what comes behind the blocks on any stage but the last: it must not be called

Outputs of the first two hang on a *witness*, a leaf of autograd that nothing else hangs on. Where a stage's output, or the
loss, reaches a witness, the model takes something past the cut, and training would go on without its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from trine.record.errors import TrainingError

__all__ = [
    "Absent",
    "Placeholder",
    "Skipped",
    "StandIn",
    "is_placeholder",
    "members_of",
    "reached",
    "stood_in",
]


class _NotHere(TrainingError, AttributeError):
    """Something of another stage's module. ``hasattr`` and ``getattr`` with a default go on."""


class Placeholder(nn.Module):
    """The base of all of them. ``name`` is the replaced module's, in the model that was given."""

    name: str
    witness: torch.Tensor

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__()
        self.name = name
        # No parameter: nobody is to train, save or shard it.
        object.__setattr__(
            self, "witness", torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        )

    def __getattr__(self, name: str) -> Any:
        """Raises ``AttributeError`` that says where it is."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            of = self.__dict__.get("name", "a module")
            raise _NotHere(
                f"parallel.pipeline: {of}.{name} is read on a rank that has no {of}, which another stage owns: loss functions "
                "and the model's own code may call such modules, and not read them: take that out, or the key"
            ) from None

    def zeros(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros that hang on the witness; one number is all that they take. While there is noise, that instead."""
        noise = self.__dict__.get("_noise")
        if noise is not None:
            return torch.randn(shape, generator=noise).to(self.witness.device, dtype)
        return self.witness.to(dtype).expand(shape)

    def begin_noise(self) -> None:
        """From here on it answers with noise, the same each time that this begins."""
        object.__setattr__(self, "_noise", torch.Generator().manual_seed(1))

    def end_noise(self) -> None:
        """Zeros again."""
        object.__setattr__(self, "_noise", None)

    def extra_repr(self) -> str:
        """What it stands for."""
        return f"for {self.name}"


class StandIn(Placeholder):
    """For a module with parameters that runs before the blocks.

    What it returns is learned once for each form of its arguments, by running the module itself with zeros for parameters.
    """

    def __init__(self, name: str, module: nn.Module, device: torch.device) -> None:
        super().__init__(name, device)
        shell = module.__class__.__new__(module.__class__)
        shell.__dict__.update(module.__dict__)
        shell._parameters = {}
        object.__setattr__(self, "_shell", shell)
        held: dict[str, torch.Tensor] = {}
        object.__setattr__(self, "_held", held)
        for key, parameter in module._parameters.items():
            # Attributes, not parameters: code that asks for weight.dtype or weight.device finds it.
            if parameter is not None:
                held[key] = self.zeros(parameter.shape, parameter.dtype)
            self._hold(key, held.get(key))
        object.__setattr__(self, "_known", {})

    def begin_noise(self) -> None:
        """Also parameters that are read off it, and what is computed of them."""
        super().begin_noise()
        for key, zeros in self.__dict__["_held"].items():
            self._hold(key, self.zeros(zeros.shape, zeros.dtype))

    def end_noise(self) -> None:
        """Zeros again, those that hang on the witness."""
        super().end_noise()
        for key, zeros in self.__dict__["_held"].items():
            self._hold(key, zeros)

    def _hold(self, key: str, value: torch.Tensor | None) -> None:
        self.__dict__["_shell"].__dict__[key] = self.__dict__[key] = value

    def __getattr__(self, name: str) -> Any:
        """What the module itself has, such as ``embedding_dim``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_shell" not in self.__dict__:
                raise
            return getattr(self.__dict__["_shell"], name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Zeros in the form of the module's output. What is no floating-point tensor is computed."""
        shell, known = self.__dict__["_shell"], self.__dict__["_known"]
        form = (self.training, torch.is_autocast_enabled(self.witness.device.type), _form((arguments, named)))
        if form not in known:
            with torch.no_grad():
                outputs, structure = tree_flatten(shell(*arguments, **named))
            floating = [isinstance(out, torch.Tensor) and out.is_floating_point() for out in outputs]
            known[form] = (
                structure,
                [(out.shape, out.dtype) for out in outputs] if outputs and all(floating) else None,
            )
        structure, shapes = known[form]
        if shapes is not None:
            return tree_unflatten([self.zeros(*shape) for shape in shapes], structure)
        return tree_map(self._hung, shell(*arguments, **named))

    def _hung(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return self.zeros(value.shape, value.dtype)
        return value


class Skipped(Placeholder):
    """For a block of another stage: ``met(placeholder, arguments, named)`` says what it returns."""

    def __init__(self, name: str, index: int, device: torch.device, met: Callable[..., Any]) -> None:
        super().__init__(name, device)
        self.index = index
        object.__setattr__(self, "_met", met)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Zeros before the stage's own blocks; behind them the stage ends here."""
        return self.__dict__["_met"](self, arguments, named)


class Absent(Placeholder):
    """For what comes behind the blocks, where the stage has ended before."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Raises ``TrainingError``: the model does not run in the order in which it was cut."""
        raise TrainingError(
            f"parallel.pipeline: {self.name} is registered behind the blocks and runs before them, so this stage was cut "
            "without it: register it before the blocks, or give trine.optimize example=batch, which shows the order"
        )


def is_placeholder(module: nn.Module) -> bool:
    """Whether a module of a stage stands for one of another stage."""
    return isinstance(module, Placeholder)


def members_of(container: nn.Module) -> list[nn.Module]:
    """The modules of a list that are really there, each place of it."""
    held = container._modules.values()
    return [member for member in held if member is not None and not is_placeholder(member)]


def stood_in(model: nn.Module) -> list[Placeholder]:
    """All placeholders of a stage."""
    return [module for module in model.modules() if isinstance(module, Placeholder)]


def reached(
    output: torch.Tensor, witnesses: dict[int, str], but_through: Iterable[torch.Tensor] = ()
) -> list[str]:
    """Names of the witnesses (id of the tensor → name) that backward from ``output`` would come to.

    ``but_through``: other than by what these hang on.
    """
    found: list[str] = []
    seen = {each.grad_fn for each in but_through}
    waiting = [] if output.grad_fn in seen else [output.grad_fn]
    seen |= set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in witnesses:
            found.append(witnesses[id(leaf)])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return sorted(set(found))


def _form(values: Any) -> tuple[Any, ...]:
    """What decides an output's shape and dtype: those of tensors, and small values themselves."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)[:100]
        for leaf in tree_leaves(values)
    )
