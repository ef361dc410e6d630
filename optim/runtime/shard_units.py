"""Which modules are a model's repeated blocks, which FSDP2 gathers and frees on their own, and which it must by dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from trine.optim.runtime.pipelining.chain import LISTS
from trine.optim.runtime.pipelining.placeholders import members_of
from trine.record.errors import UsageError

__all__ = ["like_members", "odd_dtypes", "sharded_units"]

#: Lists of like modules that hold less of the model than this stay with the root: a gather of its own would not pay.
_LEAST_SHARE = 0.05


def sharded_units(model: nn.Module) -> list[nn.Module]:
    """Modules that are gathered and freed on their own: members of the outermost lists of like modules.

    A member that shares a parameter with another or with the rest, or stands in the lists twice, is left to the root:
    two groups would shard one parameter twice.
    """
    whole = sum(p.numel() for p in model.parameters())
    found = [member for members in _lists(model, whole) for member in members]
    times = Counter(id(module) for module in found)
    uses: Counter[int] = Counter()
    for _, module in model.named_modules(remove_duplicate=False):
        uses.update(id(p) for p in module.parameters(recurse=False))
    units = []
    for member in found:
        inside: Counter[int] = Counter()
        for _, module in member.named_modules(remove_duplicate=False):
            inside.update(id(p) for p in module.parameters(recurse=False))
        alone = all(uses[key] == count for key, count in inside.items())
        if inside and alone and times[id(member)] == 1:
            units.append(member)
    return units


def like_members(module: nn.Module) -> list[nn.Module]:
    """Members of a list of two or more modules of one type; empty for any other module.

    What stands in a pipeline's stage for blocks of other stages is no member.
    """
    if not isinstance(module, LISTS) or len(module) < 2:
        return []
    members = members_of(module)
    return members if len({type(member) for member in members}) == 1 else []


def _lists(module: nn.Module, whole: int) -> Iterable[list[nn.Module]]:
    members = like_members(module)
    if members and sum(p.numel() for p in module.parameters()) >= _LEAST_SHARE * whole:
        yield members
        return
    for child in module.children():
        yield from _lists(child, whole)


def odd_dtypes(unit: nn.Module, but: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Submodules to shard on their own since FSDP2 wants one dtype a group: those without the unit's main dtype.

    Raises ``UsageError`` for a module that itself holds several.
    """
    apart = {id(module) for skipped in but for module in skipped.modules()}
    modules = [module for module in unit.modules() if id(module) not in apart]
    sizes: Counter[torch.dtype] = Counter()
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter.dim():
                sizes[parameter.dtype] += parameter.numel()
    if len(sizes) < 2:
        return []
    # What the unit holds itself cannot be apart from it, however little it is.
    own = {p.dtype for p in unit.parameters(recurse=False) if p.requires_grad and p.dim()}
    main = own.pop() if len(own) == 1 else sizes.most_common(1)[0][0]
    odd = []
    for module in modules:
        kinds = {p.dtype for p in module.parameters(recurse=False) if p.requires_grad and p.dim()}
        if len(kinds) > 1:
            listed = " and ".join(sorted(map(str, kinds)))
            raise UsageError(
                f"zero.stage: a {type(module).__name__} holds parameters of {listed}, and FSDP2 shards one dtype a "
                "module: convert it to one, or use zero.stage = 1"
            )
        if kinds and kinds != {main} and module is not unit:
            odd.append(module)
    return odd
