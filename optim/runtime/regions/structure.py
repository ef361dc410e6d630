"""What of a live model can be computed as regions: by a protocol that its modules offer, or by their structure.

A module offers the protocol with ``fusable``, a mapping from names in ``compute.fuse`` to the function of this package
that it will call, and ``set_fused(names)``, which holds from the next call on. By structure: PyTorch's norms, and the
norms, gated feed-forwards and rotary positions of Transformers' Llama, Qwen, Mistral, Gemma and models like them. Such
a module's own forward is run once beside ours on a few numbers, and is left alone where they differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from trine.optim.runtime import regions
from trine.optim.runtime.plain_tensors import is_plain

__all__ = ["Part", "fuse", "parts_of"]

#: Names of Transformers' activations, each with the one of ours that computes the same.
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One module that can compute a region."""

    name: str  # in compute.fuse
    module: nn.Module
    function: str  # of trine.optim.runtime.regions
    change: Callable[[], None] | None  # None: by set_fused


def parts_of(model: nn.Module, names: Iterable[str]) -> list[Part]:
    """Every part of ``model`` that one of ``names`` is about. Changes nothing."""
    wanted = set(names)
    return [part for module in model.modules() for part in _parts(module) if part.name in wanted]


def fuse(parts: Iterable[Part]) -> None:
    """Compute these as regions from now on. State, hooks and names of the modules stay."""
    by_protocol: dict[int, tuple[nn.Module, set[str]]] = {}
    for part in parts:
        if part.change is not None:
            part.change()
        else:
            by_protocol.setdefault(id(part.module), (part.module, set()))[1].add(part.name)
    for module, names in by_protocol.values():
        module.set_fused(names)  # type: ignore[operator]


def _parts(module: nn.Module) -> Iterator[Part]:
    fusable = getattr(module, "fusable", None)
    if isinstance(fusable, Mapping) and callable(getattr(module, "set_fused", None)):
        for name, function in fusable.items():
            yield Part(name, module, function, None)
        return
    if "forward" in vars(module):
        return  # somebody replaced it already
    for find in (_norm_of_pytorch, _rms_norm, _gated_feed_forward):
        found = find(module)
        if found is not None:
            name, function, forward = found
            yield Part(name, module, function, partial(_replace, module, forward))
            return
    if hasattr(module, "q_proj") and hasattr(module, "k_proj"):
        home = sys.modules.get(type(module).__module__)
        theirs = getattr(home, "apply_rotary_pos_emb", None)
        if theirs is not None and (getattr(theirs, "_is_trines", False) or _rotates_halves(theirs)):
            yield Part("rotary", module, "rotary", partial(_replace_rotary, home, theirs))


def _replace(module: nn.Module, forward: Forward) -> None:
    # Bound, so that copies of the model are bound to themselves.
    forward.__name__ = "forward"
    module.forward = MethodType(forward, module)


# --- norms -------------------------------------------------------------------------------------

Found = tuple[str, str, Forward] | None


def _norm_of_pytorch(module: nn.Module) -> Found:
    own = type(module).forward
    if own is nn.LayerNorm.forward and len(module.normalized_shape) == 1:  # type: ignore[arg-type]

        def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
            return regions.layer_norm(input, self.weight, self.bias, self.eps)

        return "norm", "layer_norm", forward
    if own is nn.RMSNorm.forward and len(module.normalized_shape) == 1:  # type: ignore[arg-type]

        def forward_rms(self: Any, x: torch.Tensor) -> torch.Tensor:
            return regions.rms_norm(x, self.weight, self.eps)

        return "norm", "rms_norm", forward_rms
    return None


def _rms_norm(module: nn.Module) -> Found:
    """Transformers' Llama norms scale by their weight, Gemma's by one more: the numbers say which."""
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    if (
        not type(module).__name__.endswith("RMSNorm")
        or not isinstance(eps, float)
        or not _is_plain(weight, 1)
    ):
        return None
    for offset in (0.0, 1.0):

        def forward(
            self: Any, hidden_states: torch.Tensor, eps: float = eps, offset: float = offset
        ) -> torch.Tensor:
            return regions.rms_norm(hidden_states, self.weight, eps, offset)

        reference = partial(regions.bodies.rms_norm, weight=weight, eps=eps, offset=offset)
        if _agree(module, len(weight), reference):
            return "norm", "rms_norm", forward
    return None


# --- gated feed-forward ------------------------------------------------------------------------


def _gated_feed_forward(module: nn.Module) -> Found:
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
    if activation is None or not all(_is_plain(getattr(part, "weight", None), 2) for part in parts):
        return None

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = self.down_proj(regions.gated(self.gate_proj(x), self.up_proj(x), activation))
        return done

    gate, up, down = parts

    def reference(x: torch.Tensor) -> Any:
        return down(regions.bodies.gated(gate(x), up(x), activation))

    return ("mlp", "gated", forward) if _agree(module, gate.weight.shape[1], reference) else None


# --- rotary positions --------------------------------------------------------------------------


def _rotates_halves(theirs: Forward) -> bool:
    """Whether it computes what ours does, called as Transformers' models call it."""
    query, key = (torch.linspace(low, 1.0, 48).view(1, 2, 3, 8) for low in (-1.0, 0.0))
    cosine, sine = (table[None] for table in regions.rotary_tables(torch.arange(3), 8))
    try:
        with torch.no_grad():
            found = theirs(query, key, cosine, sine)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    ours = regions.bodies.rotary(query, key, cosine[:, None], sine[:, None])
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, ours, strict=True))


def _replace_rotary(home: Any, theirs: Forward) -> None:
    """The function is its module's, so every model of that kind in this process calls ours from now on."""
    if getattr(theirs, "_is_trines", False):
        return

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        if more or named.get("unsqueeze_dim", 1) != 1 or cos.dim() != 3:
            return theirs(q, k, cos, sin, *more, **named)
        return regions.rotary(q, k, cos[:, None], sin[:, None])

    apply_rotary_pos_emb._is_trines = True  # type: ignore[attr-defined]
    home.apply_rotary_pos_emb = apply_rotary_pos_emb


# --- trying ------------------------------------------------------------------------------------


def _is_plain(weight: Any, dimensions: int) -> bool:
    """A tensor that computes here: not sharded, not on the meta device, not quantised."""
    return (
        isinstance(weight, torch.Tensor)
        and weight.dim() == dimensions
        and weight.is_floating_point()
        and is_plain(weight)
        and weight.device.type != "meta"
    )


def _agree(module: nn.Module, width: int, ours: Forward) -> bool:
    """Whether the module's own forward computes the same on a few numbers, without its hooks."""
    parameter = next(module.parameters())
    x = torch.linspace(-1.5, 2.0, 6 * width, dtype=torch.float32).view(2, 3, width).to(parameter)
    try:
        with torch.no_grad():
            theirs, found = type(module).forward(module, x), ours(x)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    loose = 1e-5 if x.element_size() >= 4 else 2e-2
    return isinstance(theirs, torch.Tensor) and torch.allclose(theirs, found, rtol=loose, atol=loose)
