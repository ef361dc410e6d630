"""Recomputed against original activations: the check that ``torch.utils.checkpoint`` leaves out.

PyTorch compares shape, dtype and device of what a checkpointed region saves in its forward and in its recomputation.
Python's ``random``, a ``torch.Generator`` of one's own, or any state that flips between the two gives wrong gradients
without a word. A watch compares checksums of every such tensor:

    with RecomputationWatch(model) as watch:
        loss_of(model, batch).backward()
    watch.differences          [("blocks.3", "recomputed activations differ from the original: …")]

It watches every checkpoint that is not reentrant, whoever made it; regions inside a compiled graph are recomputed by
the compiler and not seen. One reduction a saved tensor, twice: for sampled steps, not for all. Nothing is read from a
device before the differences are asked for, and no random number is drawn.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from trine.optim.runtime.adoption import plain_name
from trine.optim.runtime.checkpointed import current_region

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["RecomputationWatch", "install"]

#: PyTorch's name for comparing shape, dtype and device; what every checkpoint uses that does not say otherwise.
_CHECK = "default"
_CHUNK = 2**22  # elements
_SEEDS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RecomputationWatch:
    """Compares what is recomputed with what was, while it is entered. Not reentrant; one at a time in a process.

    ``tolerance``: relative differences, estimated, that count as equal; 0 asks for the same bits. Kernels that add in
    no fixed order (scatter on a device) need a little.
    """

    def __init__(self, model: nn.Module, tolerance: float = 0.0) -> None:
        self._names = {id(module): plain_name(name + ".")[:-1] for name, module in model.named_modules()}
        self._tolerance = tolerance
        self._entered: list[str] = []
        self._order = itertools.count()
        self._pairs: list[tuple[_Saved, _Saved]] = []
        self._handles: list[Any] = []
        self._original: Any = None
        self._hook: Any = None
        self._frames: list[
            tuple[int, int]
        ] = []  # checkpoints that are entered: number, modules entered before

    def __enter__(self) -> Self:
        checks = torch_checkpoint._allowed_determinism_checks_to_fns
        if getattr(checks[_CHECK], "__self__", None).__class__ is RecomputationWatch:
            raise RuntimeError("a RecomputationWatch is entered already: leave it first")
        self._original = checks[_CHECK]
        checks[_CHECK] = self._saved
        self._hook = torch_checkpoint._checkpoint_hook
        torch_checkpoint._checkpoint_hook = self._naming(self._hook)  # type: ignore[misc]
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch_checkpoint._allowed_determinism_checks_to_fns[_CHECK] = self._original
        torch_checkpoint._checkpoint_hook = self._hook  # type: ignore[misc]
        for handle in self._handles:
            handle.remove()
        self._entered.clear()
        self._frames.clear()

    @property
    def compared(self) -> int:
        """Tensors that were recomputed and compared so far; none: nothing was checkpointed in what ran."""
        return len(self._pairs)

    @property
    def regions(self) -> int:
        """Regions that were recomputed and compared so far."""
        return len(set(self._regions().values()))

    @property
    def differences(self) -> list[tuple[str, str]]:
        """(module, what) for each region that differs, in the order of the forward; reads from the device."""
        regions = self._regions()
        found: dict[str, str] = {}
        for original, again in sorted(self._pairs, key=lambda pair: pair[0].order):
            region = regions[original.frame]
            if region in found:
                continue
            apart = original.apart_from(again)
            if apart is not None and apart > self._tolerance:
                found[region] = _words(original, region, apart)
        return list(found.items())

    def _regions(self) -> dict[int, str]:
        """Checkpoint → its module. Of those that are not ours: the one module that it entered, or the one it is in."""
        within: dict[int, set[str]] = {}
        for original, _ in self._pairs:
            within.setdefault(original.frame, set()).add(original.child)
        return {
            original.frame: original.region
            or (original.child if len(within[original.frame]) == 1 else original.parent)
            or "the model"
            for original, _ in self._pairs
        }

    def _enter_module(self, module: nn.Module, arguments: Any) -> None:
        self._entered.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._entered:
            self._entered.pop()

    def _naming(self, hook: Any) -> Any:
        """PyTorch's hook round a checkpoint's forward, noting where it begins."""
        frames, entered, numbers = self._frames, self._entered, self._order

        class Noting(hook):  # type: ignore[misc]
            def __enter__(self) -> Any:
                frames.append((next(numbers), len(entered)))
                return super().__enter__()

            def __exit__(self, *raised: object) -> Any:
                if frames:
                    frames.pop()
                return super().__exit__(*raised)

        return Noting

    def _saved(self, tensor: torch.Tensor) -> _Saved:
        """Called by PyTorch for each saved tensor of a region, then for each recomputed one."""
        where = self._entered[-1] if self._entered else ""
        frame, first = self._frames[-1] if self._frames else (-1, 0)
        parent = self._entered[first - 1] if 0 < first <= len(self._entered) else ""
        child = self._entered[first] if first < len(self._entered) else parent
        region = current_region() or ""
        # Outside of dispatch modes: a selective checkpoint would count these operators as the region's own.
        with torch.no_grad(), _disable_current_modes():
            sums = _checksums(tensor.detach())
        return _Saved(
            self, next(self._order), frame, region, parent, child, where, self._original(tensor), sums
        )


def install(assembly: Assembly, every: int) -> None:
    """Watch every ``every``-th step of an engine; differences are logged once and told as a metric.

    The metric ``checkpointing/recomputation_differences`` counts regions that differed in the watched steps so far.
    """
    import logging

    logger = logging.getLogger("trine")
    state: dict[str, Any] = {"watch": None, "step": 0, "found": 0}

    def begin() -> None:
        state["watch"] = RecomputationWatch(assembly.model).__enter__()

    def end() -> None:
        watch, state["watch"] = state["watch"], None
        if watch is not None:
            watch.__exit__(None, None, None)
            for name, what in watch.differences:
                if not state["found"]:
                    logger.error("%s: %s", name, what)
                state["found"] += 1
        state["step"] += 1
        if state["step"] % every == 0:
            begin()

    begin()
    assembly.after_step.append(end)
    assembly.metrics["checkpointing/recomputation_differences"] = lambda: float(state["found"])
    assembly.closers.append(lambda: state["watch"] and state["watch"].__exit__(None, None, None))


@dataclass(eq=False)
class _Saved:
    """Stands in for the metadata that PyTorch compares; equal by that alone, and remembered in pairs."""

    watch: RecomputationWatch
    order: int
    frame: int  # which checkpoint
    region: str  # its module, where the checkpoint is ours
    parent: str  # the module that it was entered in, and the first one within
    child: str
    where: str  # the innermost module
    metadata: dict[str, Any]
    sums: (
        torch.Tensor
    )  # (6,), int64: checksum, weighted checksum; then float64 bits: square norm, three projections

    def __ne__(self, other: object) -> bool:
        if not isinstance(other, _Saved):
            return True
        different = self.metadata != other.metadata
        if not different:  # else PyTorch raises by itself
            self.watch._pairs.append((self, other))
        return bool(different)

    def __eq__(self, other: object) -> bool:
        return not self != other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return repr(self.metadata)

    def apart_from(self, other: _Saved) -> float | None:
        """``None`` for the same bits, else the estimated relative difference."""
        mine, theirs = self.sums.cpu(), other.sums.cpu()
        if torch.equal(mine[:2], theirs[:2]):
            return None
        a, b = mine[2:].view(torch.float64), theirs[2:].view(torch.float64)
        size = math.sqrt(max(float(a[0]), float(b[0])))
        difference = float((a[1:] - b[1:]).square().mean().sqrt())
        return float("inf") if size == 0 or math.isnan(difference) else difference / size


def _checksums(tensor: torch.Tensor) -> torch.Tensor:
    """Two checksums of the bits, the square norm, and three projections on signs: E⟨δ, ±1⟩² = ‖δ‖² measures a difference.

    A chunk at a time, because the numbers are eight bytes wide and activations fill memory as it is.
    """
    if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    sums = torch.zeros(6, dtype=torch.int64, device=flat.device)
    wide = torch.float32 if flat.device.type == "mps" else torch.float64
    sizes = torch.zeros(4, dtype=wide, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        number = torch.arange(start + 1, start + 1 + part.numel(), device=flat.device)
        bits = part.to(torch.uint8) if part.dtype == torch.bool else part.view(_WHOLE[part.element_size()])
        bits = bits.to(torch.int64)
        sums[:2] += torch.stack([bits.sum(), (bits * number).sum()])  # modulo 2^64
        values = part.to(wide)
        sizes += torch.stack(
            [values.square().sum(), *((values * _signs(number, seed)).sum() for seed in _SEEDS)]
        )
    sums[2:] = sizes.to(torch.float64).view(torch.int64)
    return sums


def _signs(number: torch.Tensor, seed: int) -> torch.Tensor:
    """1 or -1 for each number, mixed as Appleby's MurmurHash3 finalises: signs that no generator was asked for."""
    mixed = number * seed
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    return ((mixed ^ (mixed >> 16)) & 1) * 2 - 1


def _words(original: _Saved, region: str, apart: float) -> str:
    shape = tuple(original.metadata["shape"])
    kind = str(original.metadata["dtype"]).removeprefix("torch.")
    where = f", first in {original.where}" if original.where not in ("", region) else ""
    size = f"by about {apart:.1e} of its norm" if apart != float("inf") else "by values that are not finite"
    return (
        f"recomputed activations differ from the original: a {kind} tensor {shape}{where}, {size}; something in it is "
        "not repeated (Python's random, a torch.Generator of its own, a state that changes): gradients are wrong"
    )
