"""The blocks of a model that a pipeline can be cut between, and what comes before and behind them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from trine.record.errors import UsageError

__all__ = ["LISTS", "Chain", "chain_of"]

#: What blocks stand in.
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

#: A second list of blocks that holds at least this share of the first one's parameters is part of the computation.
_RIVAL = 0.25


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks that run one after the other, each with the hidden state of the one before."""

    container: str  # the name of their list; empty where the model itself is one
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]

    @property
    def above(self) -> tuple[str, ...]:
        """Names of the modules that the blocks stand in, the model itself (an empty name) first."""
        parts = self.container.split(".") if self.container else []
        return ("", *(".".join(parts[: depth + 1]) for depth in range(len(parts))))

    @property
    def hidden_name(self) -> str:
        """What a block's forward calls its first argument, the hidden state, where it is given by name."""
        return next(iter(inspect.signature(self.blocks[0].forward).parameters), "")

    def __len__(self) -> int:
        return len(self.blocks)


def chain_of(model: nn.Module, begins: Sequence[str] = ()) -> Chain:
    """The model's longest list of blocks, or the list that the blocks in ``begins`` stand in.

    Raises ``UsageError``, naming the key, for models without one, with two, or with one block at two places.
    """
    if begins:
        container = _container_of(model, begins)
    elif isinstance(model, nn.Sequential):
        container = ""
    else:
        container = _largest(model)
    held = model.get_submodule(container)
    names = tuple(f"{container}.{key}" if container else key for key, _ in held.named_children())
    blocks = tuple(held._modules[key] for key, _ in held.named_children())
    members = [block for block in held._modules.values() if block is not None]
    if len(members) > len(blocks):
        raise UsageError(
            f"parallel.pipeline: {type(model).__name__} uses one block at several places of {container or 'itself'}, and a "
            "block belongs to one stage: take the key out"
        )
    if len(blocks) < 2:
        raise UsageError(
            f"parallel.pipeline: {container or type(model).__name__} holds {len(blocks)} block, and stages are cut between "
            "blocks: take the key out"
        )
    return Chain(container, names, tuple(block for block in blocks if block is not None))


def _container_of(model: nn.Module, begins: Sequence[str]) -> str:
    """What the named blocks have in common."""
    known = dict(model.named_modules())
    for name in begins:
        if name not in known:
            raise UsageError(
                f"parallel.split: {type(model).__name__} has no module {name}: name the blocks that begin the second and "
                "later stages, such as blocks.2"
            )
    parents = {name.rpartition(".")[0] for name in begins}
    if len(parents) > 1:
        listed = " and ".join(sorted(parent or "the model" for parent in parents))
        raise UsageError(f"parallel.split: blocks of one list begin the stages, and these are of {listed}")
    parent = parents.pop()
    if not isinstance(known[parent], LISTS):
        raise UsageError(
            f"parallel.split: {begins[0]} stands in a {type(known[parent]).__name__}, and stages are cut between the members "
            "of an nn.ModuleList, nn.ModuleDict or nn.Sequential"
        )
    return parent


def _largest(model: nn.Module) -> str:
    found = sorted(
        ((_is_of_one_kind(held), _weight(held), name) for name, held in _lists(model)), reverse=True
    )
    if not found:
        raise UsageError(
            f"parallel.pipeline: {type(model).__name__} has no list of blocks that run one after the other (an nn.ModuleList "
            "or nn.Sequential of two or more), and a pipeline is cut between them: take the key out"
        )
    (alike, weight, name), *others = found
    rival = next((o for o in others if o[0] == alike and o[1] >= _RIVAL * weight), None)
    if rival is not None:
        raise UsageError(
            f"parallel.pipeline: {type(model).__name__} has two lists of blocks, {name} and {rival[2]}, and a pipeline is "
            "cut along one: say along which by naming its blocks in parallel.split, or take the key out"
        )
    return name


def _is_of_one_kind(held: nn.Module) -> bool:
    return len({type(member) for member in held.children()}) == 1


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _lists(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The outermost lists of two or more."""
    found = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_list = isinstance(child, LISTS) and len(child) >= 2 and _weight(child) > 0
        # Names of unlike parts are a namespace, as GPT's transformer.h and transformer.ln_f, not a list.
        if is_list and (not isinstance(child, nn.ModuleDict) or _is_of_one_kind(child)):
            found.append((path, child))
        else:
            found += _lists(child, f"{path}.")
    return found
