"""Model FLOPs, counted once from the operators that a step really runs.

A dispatch mode watches one early step and adds up PyTorch's own formulas
(``torch.utils.flop_counter``), with formulas added for the attention kernels it lacks: the CPU's flash
attention counts as zero there. Two sums result:

``counted``
    model FLOPs: what the mathematics needs. Recomputation is left out, both activation checkpointing's and
    the scores that flash attention computes a second time in its backward.
``executed``
    all that ran.

Attention is counted in full, not halved for a causal mask, as in ``torch.utils.flop_counter``. Matrix products,
convolutions and attention count; elementwise work does not, as in every published convention.

Dispatch modes cannot look into code that ``torch.compile`` generated, and running one would make PyTorch leave
it: with compiled code in the process nothing is counted and the record says so; the named conventions
(:mod:`trine.profiler.conventions`) stand in. The counted step is slower (tens of µs an operator) and named in
the record, so that statistics can leave it out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from .protocols import Note

__all__ = ["FlopCounter", "attention_backward_flops", "attention_flops"]

Shape = tuple[int, ...]

#: The second step counts: in the first, lazy set-up and ``torch.compile`` have not shown yet.
COUNTED_STEP = 1

#: Heavy operators of other libraries that have no formula are named, not passed over: these words tell them.
_HEAVY = ("attention", "attn", "matmul", "gemm", "grouped_mm", "linear", "_rnn", "lstm", "gru", "conv")


def attention_flops(query: Shape, key: Shape, value: Shape) -> int:
    """FLOPs of attention's two products; shapes (batch, heads, sequence, head size). Heads of ``key`` may be fewer."""
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (size + value[3])


def attention_backward_flops(query: Shape, key: Shape, value: Shape) -> tuple[int, int]:
    """(model, recomputed) FLOPs of a flash attention's backward.

    The model part is the gradients of two products, four products in all; recomputed are the scores, which
    such kernels do not keep (Dao et al., FlashAttention, 2022, section 3.1).
    """
    batch, heads, length, size = query
    return (
        4 * batch * heads * length * key[2] * (size + value[3]),
        2 * batch * heads * length * key[2] * size,
    )


class FlopCounter:
    """Counts one step. The :class:`~trine.profiler.protocols.FlopCounting` of the session."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._first: int | None = None
        self._mode: Any = None
        self._over = False

    def begin_step(self, index: int) -> None:
        """Start counting when this is the step to count."""
        if self._mode is not None:  # the step was given up and begins anew
            self.close()
            self._open()
            return
        if self._first is None:
            self._first = index
        if self._over or index < self._first + COUNTED_STEP or _active_modes():
            return  # a mode of the loop's own may be left before this step ends: a later step is counted
        self._over = True
        if _compiled_code_runs():
            self._note(
                "flops-compiled",
                "info",
                "model FLOPs were not counted: operators inside code of torch.compile cannot be seen; "
                "where the model's shape is known the named conventions stand in",
            )
            return
        self._open()

    def _open(self) -> None:
        mode = _counting_mode()
        mode.__enter__()
        self._mode = mode

    def end_step(self, index: int) -> Mapping[str, float] | None:
        """The counts of the step that was counted; ``None`` for all others."""
        mode, self._mode = self._mode, None
        if mode is None:
            return None
        _leave(mode)
        self._note("flops-step", "info", f"step {index} was slowed down by counting its FLOPs")
        if mode.unknown:
            self._note(
                "flops-incomplete",
                "warning",
                f"operators without a FLOPs formula were not counted: {', '.join(sorted(mode.unknown)[:6])}",
            )
        if _compiled_code_runs():
            self._note(
                "flops-compiled",
                "warning",
                f"torch.compile was first used in step {index}, whose FLOPs were being counted: the count is left out",
            )
            return None
        if not mode.model:
            return None
        return {"counted": float(mode.model), "executed": float(mode.model + mode.recomputed)}

    def close(self) -> None:
        """Stop counting in the middle of a step: the loop ended early. A later step is counted instead."""
        mode, self._mode = self._mode, None
        if mode is not None:
            _leave(mode)
            self._over = False


def _compiled_code_runs() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    # Wrappers alone do not count: libraries decorate functions that a run never calls.
    return dynamo is not None and bool(dynamo.counters["stats"].get("unique_graphs", 0))


def _active_modes() -> list[Any]:
    """Dispatch modes of this thread, outermost first. torch is imported here."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def _leave(mode: Any) -> None:
    """Leave the mode, also from under one that the loop has entered since and not left yet.

    Leaving takes the innermost mode, whichever that is. So ours is taken out by hand, and the mode above it will put
    back what ours had found (``old_*_flags`` of ``TorchDispatchMode``).
    """
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    modes = _active_modes()
    if mode not in modes or modes[-1] is mode:
        mode.__exit__(None, None, None)
        return
    inside = modes[modes.index(mode) + 1 :]
    for _ in (mode, *inside):
        _pop_mode()
    for name, found in vars(mode).items():
        if name.startswith("old_") and found and vars(inside[0]).get(name):
            vars(inside[0])[name][-1] = found[-1]
    for other in inside:
        _push_mode(other)


def _counting_mode() -> Any:
    """A dispatch mode with ``model``, ``recomputed`` and ``unknown``. torch is imported here."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    formulas: dict[Any, Callable[..., tuple[int, int]]] = {
        packet: _plain(formula) for packet, formula in flop_registry.items()
    }
    formulas.update(_attention_formulas(torch.ops.aten, flop_registry))
    plain_types = (torch.Tensor, torch.nn.Parameter)

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Runs every operator as it is and adds its FLOPs up."""

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.model = 0
            self.recomputed = 0
            self.unknown: set[str] = set()
            self._twice_differentiable: dict[int, bool] = {}

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Else torch.compile leaves what it first meets in this step uncompiled for the rest of the run."""
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            # A subclass (DTensor, quantised weights) unwraps first; then its local operators come here.
            if any(kind not in plain_types for kind in types):
                return NotImplemented
            kwargs = kwargs or {}
            recomputing = self._recomputing()
            out = func(*args, **kwargs)
            packet = getattr(func, "_overloadpacket", func)
            formula = formulas.get(packet)
            if formula is not None:
                try:
                    model, again = formula(*args, out_val=out, **kwargs)
                except (TypeError, ValueError, AssertionError, IndexError, AttributeError):
                    self.unknown.add(str(packet))
                else:
                    self.model += 0 if recomputing else model
                    self.recomputed += again + (model if recomputing else 0)
            elif any(word in str(packet) for word in _HEAVY) and "backward" not in str(packet):
                self.unknown.add(str(packet))
            return out

        def _recomputing(self) -> bool:
            """Forward work inside a backward pass: activation checkpointing.

            A backward pass runs with gradients off, unless a second derivative was asked for; what a
            checkpoint recomputes runs with them on.
            """
            task = torch._C._current_graph_task_id()
            if task == -1:
                return False
            recording = torch.is_grad_enabled()
            if task not in self._twice_differentiable:
                self._twice_differentiable[task] = recording and not _inside_checkpoint()
            return recording and not self._twice_differentiable[task]

    return Counting()


def _inside_checkpoint() -> bool:
    frame = sys._getframe(1)
    found = frame
    while found is not None:
        if found.f_code.co_filename.endswith("checkpoint.py"):
            return True
        found = found.f_back  # type: ignore[assignment]
    return False


def _plain(formula: Callable[..., int]) -> Callable[..., tuple[int, int]]:
    """A formula of ``torch.utils.flop_counter``, none of whose work is recomputation."""

    def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> tuple[int, int]:
        return int(formula(*args, out_val=out_val, **kwargs)), 0

    return counted


def _attention_formulas(aten: Any, registry: Mapping[Any, Any]) -> dict[Any, Callable[..., tuple[int, int]]]:
    """Formulas for attention: what the registry lacks, and backwards without their recomputation."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[int, int]:
        return attention_flops(tuple(query.shape), tuple(key.shape), tuple(value.shape)), 0

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[int, int]:
        return attention_backward_flops(tuple(query.shape), tuple(key.shape), tuple(value.shape))

    def packed_backward(formula: Callable[..., int]) -> Callable[..., tuple[int, int]]:
        # Five equal products, the first of which recomputes the scores.
        def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> tuple[int, int]:
            total = int(formula(*args, out_val=out_val, **kwargs))
            return total * 4 // 5, total - total * 4 // 5

        return counted

    found: dict[Any, Callable[..., tuple[int, int]]] = {}
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"):
        _add(found, aten, f"_scaled_dot_product_{kind}", forward)
        _add(found, aten, f"_scaled_dot_product_{kind}_backward", backward)
    _add(found, aten, "_scaled_dot_product_flash_attention_for_cpu", forward)
    _add(found, aten, "_scaled_dot_product_flash_attention_for_cpu_backward", backward)
    for name in ("_flash_attention_backward", "_efficient_attention_backward"):
        packet = getattr(aten, name, None)
        if packet in registry:
            found[packet] = packed_backward(registry[packet])
    # 2mnk for each product of a grouped matrix multiplication, whatever the groups' sizes.
    _add(found, aten, "_grouped_mm", _grouped_mm)
    return found


def _add(found: dict[Any, Any], aten: Any, name: str, formula: Any) -> None:
    packet = getattr(aten, name, None)
    if packet is not None:
        found[packet] = formula


def _grouped_mm(left: Any, right: Any, *_: Any, **__: Any) -> tuple[int, int]:
    """A (m, k) or (groups, m, k) and B (groups, k, n) or (k, n): every row of A meets one k × n matrix."""
    if len(left.shape) == 2 and len(right.shape) == 2:
        # Offsets along k: each group's product is (m, k_group) × (k_group, n), and the k sum up.
        return 2 * int(left.shape[0]) * int(left.shape[1]) * int(right.shape[1]), 0
    return 2 * prod(int(size) for size in left.shape) * int(right.shape[-1]), 0
