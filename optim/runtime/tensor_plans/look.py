"""A look at what blocks compute once they are cut, before any of it is trained on.

The structure says which matrices are cut, not what the code between them does: a norm, a softmax or a mean over a projection
sees this rank's heads or features alone, and with ``parallel.sequence`` so does what mixes tokens in the residual. So at the
first forward a block of each kind runs twice on its real input, cut and as a copy whose matrices are whole, without dropout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from trine.optim.runtime.adoption import without_inserted
from trine.optim.runtime.autocast_cache import without_cached_casts
from trine.optim.runtime.memory_fit import untouched
from trine.optim.runtime.tensor_plans.cutting import Cut, order_of
from trine.optim.runtime.tensor_plans.interleaving import in_given_order
from trine.optim.runtime.tensor_plans.roles import Block
from trine.optim.runtime.tensor_plans.styles import moved
from trine.record.errors import UsageError

__all__ = ["Copies", "copies_of", "look_at"]

#: How far outputs of one token may be apart, of their length: well above what another order of summation makes.
_FAR = {torch.float64: 1e-7, torch.float32: 5e-3, torch.float16: 5e-2}
_FAR_IN_OTHERS = 0.15
#: What differs from layer to layer and is no other kind of block.
_OF_LAYERS = frozenset({"layer_idx", "layer_id", "index"})

#: Block → a copy of it as it was given, without values of parameters; or why there is none.
Copies = Mapping[str, "nn.Module | str"]
Tell = Callable[[str, str], None]


def copies_of(blocks: Sequence[Block], model: nn.Module) -> Copies:
    """Of one block of each kind, before anything is cut. They take no memory but that of their buffers."""
    found: dict[str, nn.Module | str] = {}
    kinds: set[tuple[Any, ...]] = set()
    empty = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    for block in blocks:
        kind = _kind(block.module)
        if kind in kinds:
            continue
        kinds.add(kind)
        # Configurations stay those of the live model: techniques that come later switch attention there.
        configurations = [getattr(each, "config", None) for each in block.module.modules()]
        memo = {id(each): each for each in configurations if each is not None}
        try:
            found[block.name] = copy.deepcopy(block.module, {**memo, **empty})
        except Exception as error:  # noqa: BLE001 - modules may hold anything
            found[block.name] = f"it cannot be copied ({type(error).__name__})"
    return found


def _kind(block: nn.Module) -> tuple[Any, ...]:
    numbers = tuple(
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and key not in _OF_LAYERS
    )
    return type(block), repr(block), numbers


def look_at(
    blocks: Iterable[Block],
    copies: Copies,
    cuts: Sequence[Cut],
    mesh: DeviceMesh,
    plain: Placement,
    tell: Tell,
) -> None:
    """Have each block with a copy compared with it when it is first called. Collective there.

    ``plain``: what hidden states between blocks mean. ``tell(block, why)``: it could not be compared. The call raises
    ``UsageError`` on all ranks of the group where a block computes something else.
    """
    orders = {(id(cut.module), cut.key): cut for cut in cuts}
    for block in blocks:
        whole = copies.get(block.name)
        if isinstance(whole, str):
            tell(block.name, whole)
        elif whole is not None:
            look = _Look(block.name, block.module, whole, orders, mesh, plain, tell)
            look.handle = block.module.register_forward_pre_hook(look, with_kwargs=True)


class _CutFails(Exception):
    """The whole copy of a block runs, and the block does not."""


@dataclass(slots=True)
class _Look:
    """The hook on one block; behind those that cut its input."""

    name: str
    block: nn.Module
    whole: nn.Module | None
    orders: Mapping[tuple[int, str], Cut]
    mesh: DeviceMesh
    plain: Placement
    tell: Tell
    handle: Any = None

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.handle.remove()
        why, apart, fails = "", 0.0, ""
        try:
            apart = self._apart(arguments, named)
        except _CutFails as error:
            apart, fails = math.inf, str(error)
        except Exception as error:  # noqa: BLE001 - the block's own call says what is wrong with it
            why = f"a copy of it does not run by itself ({type(error).__name__})"
        self.whole = None
        told = torch.tensor([float(bool(why)), float(not apart <= 1)], device=self.mesh.device_type)
        distributed.all_reduce(told, distributed.ReduceOp.MAX, self.mesh.get_group())
        if told[0]:
            self.tell(self.name, why or "not on every rank")
        elif told[1]:
            raise UsageError(self._fails(fails) if fails else self._said())

    def _fails(self, error: str) -> str:
        return (
            f"parallel.tensor: {self.name} does not run once it is cut, since its code has whole sizes, or cuts or views what "
            "layers give in another way than Trine took them to lie (write -1 for heads in view and reshape, or say what its "
            f"layers are in parallel.plan; else drop parallel.tensor): {error}"
        )

    def _said(self) -> str:
        start = f"parallel.tensor: {self.name} computes something else once it is cut: "
        across = (
            "code in it looks across heads or inner features (a norm, softmax, mean or slopes over all of them), of which "
            "a rank has some"
        )
        if self.plain != Replicate():
            return (
                f"{start}{across}, or across tokens or at positions in the residual, which parallel.sequence cuts: drop "
                "parallel.sequence; if this comes again, keep that module whole in parallel.plan"
            )
        return f'{start}{across}: keep that module whole with "replicate" in parallel.plan, or drop parallel.tensor'

    def _apart(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> float:
        """The largest distance of a token's two outputs, in units of what is allowed."""
        assert self.whole is not None
        device = next(self.block.parameters()).device
        with (
            torch.no_grad(),
            without_cached_casts(),
            untouched(self.block, (), device),
            _evaluating(self.block),
        ):
            values = self._values()
            self._follow()
            self.whole.eval()
            gathered = self._copied(arguments, named, whole=True)
            first = _hidden(functional_call(self.whole, values, *gathered))
            gathered = self._copied(arguments, named, whole=True)
            again = _hidden(functional_call(self.whole, values, *gathered))
            own, keywords = self._copied(arguments, named, whole=False)
            if not torch.isfinite(first).all() or not torch.equal(first, again):
                raise ValueError("its output is not finite, or another each time")
            try:
                output = _hidden(self.block.forward(*own, **keywords))
            except (torch.OutOfMemoryError, distributed.DistError):
                raise
            except (RuntimeError, ValueError) as error:
                raise _CutFails(str(error).strip().split("\n")[0][:200]) from error
            cut = moved(output, self.mesh, self.plain, Replicate())
            return _distance(cut, first) / self._far(first)

    def _far(self, output: torch.Tensor) -> float:
        kind = output.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else output.dtype
        return _FAR.get(dtype, _FAR_IN_OTHERS)

    def _values(self) -> dict[str, torch.Tensor]:
        """Parameters as they were given, gathered, and buffers. Collective."""
        found = {without_inserted(name): buffer.clone() for name, buffer in self.block.named_buffers()}
        for prefix, module in self.block.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                cut = self.orders.get((id(module), key))
                order = None if cut is None else order_of(cut, self.mesh)
                name = without_inserted(f"{prefix}.{key}" if prefix else key)
                found[name] = in_given_order(value, None if order is None else order.reordered)
        return found

    def _follow(self) -> None:
        """What was switched by name since the copy was made, as the kind of attention."""
        assert self.whole is not None
        live = {without_inserted(name): module for name, module in self.block.named_modules()}
        for name, module in self.whole.named_modules():
            for key, value in vars(live[name]).items() if name in live else ():
                if isinstance(value, str):
                    setattr(module, key, value)

    def _copied(
        self, arguments: tuple[Any, ...], named: dict[str, Any], whole: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments that the call may change; the first tensor, the hidden state, gathered where ``whole``."""
        leaves, form = tree_flatten((arguments, named))
        is_first = True
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                leaves[place] = copy.deepcopy(leaf)
                continue
            leaf = leaf.detach()
            if is_first and whole:
                leaf = moved(leaf, self.mesh, self.plain, Replicate())
            is_first, leaves[place] = False, leaf.clone()
        copied: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, form)
        return copied


class _evaluating:  # noqa: N801 - a context
    """Dropout off; the modes of modules are put back one by one."""

    def __init__(self, block: nn.Module) -> None:
        self._modes = [(module, module.training) for module in block.modules()]

    def __enter__(self) -> None:
        for module, _ in self._modes:
            module.training = False

    def __exit__(self, *_: object) -> None:
        for module, mode in self._modes:
            module.training = mode


def _hidden(output: Any) -> torch.Tensor:
    found = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(found, torch.Tensor):
        raise TypeError("a block returns its hidden state first")
    return found.detach()


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of tokens, as part of their length; that of very short ones is taken as a tenth of the usual."""
    one, other = one.double(), other.double()
    lengths = other.norm(dim=-1)
    usual = lengths.clamp_min(0.1 * float(lengths.median())).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((one - other).norm(dim=-1) / usual).max())
