"""What numbers were really computed in: a look at the first step, checked against what was asked for.

Autocast is a request. A model that switches it off inside, or casts its inputs, computes in fp32 without a word; so
modules that multiply matrices are asked what came out of them, once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trine.optim.runtime.adoption import plain_name
from trine.optim.techniques._assembly import Effect

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["FirstStep", "matrix_modules"]

logger = logging.getLogger("trine")

_LOW = (torch.bfloat16, torch.float16)
#: They hold matrices and multiply by none.
_NO_PRODUCT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


class FirstStep:
    """Watches one step and adds an effect that says what it saw."""

    def __init__(self, assembly: Assembly, key: str, wanted: torch.dtype) -> None:
        self._assembly = assembly
        self._key = key
        self._wanted = wanted
        self._seen: dict[str, torch.dtype] = {}
        self._gradients: set[torch.dtype] = set()
        self._done = False
        modules, self._compiled = matrix_modules(assembly.model)
        self._handles = [
            module.register_forward_hook(self._watching(name)) for name, module in modules.items()
        ]
        assembly.closers.append(self._stop_watching)
        assembly.inspect.append(self._see_gradients)
        assembly.after_update.append(self._conclude)

    def _watching(self, name: str) -> Any:
        def watch(module: nn.Module, inputs: Any, output: Any) -> None:
            result = output[0] if isinstance(output, tuple) and output else output
            if isinstance(result, torch.Tensor) and torch.is_grad_enabled():
                self._seen.setdefault(name, result.dtype)

        return watch

    def _see_gradients(self) -> None:
        if not self._done:
            parameters = self._assembly.parameters.values()
            self._gradients = {p.grad.dtype for p in parameters if p.grad is not None}

    def _stop_watching(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _conclude(self, stepped: bool) -> None:
        """After the first update that was not skipped."""
        if self._done or not stepped:
            return
        self._done = True
        self._stop_watching()
        other = [name for name, dtype in self._seen.items() if self._is_wrong(dtype)]
        effect = Effect(self._key, "asked for " + _name(self._wanted), f"computed in {self._words()}")
        self._assembly.effects.append(effect)
        if self._assembly.facts.rank == 0:
            logger.info("%s", effect)
            if other:
                logger.warning(
                    "%s: %s was asked for, and %d of %d modules that multiply matrices computed in %s, %s first: "
                    "something in the model switches autocast off there or casts",
                    self._key,
                    _name(self._wanted),
                    len(other),
                    len(self._seen),
                    _name(self._seen[other[0]]),
                    other[0],
                )

    def _is_wrong(self, dtype: torch.dtype) -> bool:
        return dtype != self._wanted if self._wanted in _LOW else dtype in _LOW

    def _words(self) -> str:
        counts: dict[torch.dtype, int] = {}
        for dtype in self._seen.values():
            counts[dtype] = counts.get(dtype, 0) + 1
        parts = []
        if counts:
            listed = [f"{_name(dtype)} in {count}" for dtype, count in counts.items()]
            parts.append(f"matrix products {', '.join(listed)} of {len(self._seen)} modules")
        if self._compiled:
            parts.append("compiled modules not looked into")
        state = {
            value.dtype
            for values in self._assembly.optimizer.state.values()
            if isinstance(values, dict)
            for value in values.values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        }
        parameters = {p.dtype for p in self._assembly.model.parameters()}
        held = {p.dtype for p in self._assembly.parameters.values()}
        parts.append(f"parameters {_names(parameters)}")
        if held != parameters:
            parts.append(f"masters {_names(held)}")
        parts.append(f"gradients {_names(self._gradients)}")
        if state:
            parts.append(f"optimizer state {_names(state)}")
        return "; ".join(parts)


def matrix_modules(model: nn.Module) -> tuple[dict[str, nn.Module], bool]:
    """Name → module with a matrix of its own and no children, and whether compiled ones were left out.

    A hook inside a compiled module would become part of its graph.
    """
    found: dict[str, nn.Module] = {}
    compiled: list[str] = []
    for name, module in model.named_modules():
        if any(name == outer or name.startswith(f"{outer}.") or not outer for outer in compiled):
            continue
        if getattr(module, "_compiled_call_impl", None) is not None:
            compiled.append(name)
            continue
        if isinstance(module, _NO_PRODUCT) or next(module.children(), None) is not None:
            continue
        # Experts hand on the type that they were given, whatever they computed in.
        if hasattr(module, "num_experts"):
            continue
        if any(p.dim() >= 2 and p.is_floating_point() for p in module.parameters(recurse=False)):
            found[plain_name(name)] = module
    return found, bool(compiled)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(map(_name, dtypes))) or "none"
