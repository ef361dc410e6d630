"""Which operators' results a selectively checkpointed module keeps, so that backward need not run them again.

By default the products of linear layers, convolutions, and fused attention are kept: they cost most to recompute.
Elementwise operations, norms and softmax are recomputed, and so are batched products, which in attention written by
hand are the sequence × sequence matrices: many bytes for few operations (Korthikanti et al. 2022, section 5).

An operator that draws random numbers is never kept. Its recomputation is skipped then, the generator is not advanced,
and every later draw of the region differs from the original's, silently.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trine.optim.runtime.weak_storage import WeakStorage
from trine.record.errors import UsageError

__all__ = ["DEFAULT", "contexts_that_keep", "counting_kept", "refusing_changed_results", "require_operators"]

#: What is kept where ``checkpointing.operators`` says nothing.
DEFAULT = ("matmul", "convolution", "attention")

#: A word of ``checkpointing.operators`` → the operators it stands for; those that a build lacks are left out.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm",
        "aten.addmm",
        "aten.linear",
        "aten._scaled_mm",
        "aten._grouped_mm",
        "aten._scaled_grouped_mm",
    ),
    "batched_matmul": ("aten.bmm", "aten.baddbmm"),
    "convolution": ("aten.convolution",),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_attention_math_for_mps",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
        "higher_order.flex_attention",
    ),
    "norm": ("aten.native_layer_norm", "aten._fused_rms_norm", "aten.native_group_norm"),
    "activation": ("aten.gelu", "aten.silu", "aten.relu", "aten.tanh", "aten.sigmoid"),
    "softmax": ("aten._softmax",),
}


def contexts_that_keep(
    operators: tuple[str, ...],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """``context_fn`` of ``torch.utils.checkpoint``: around the original forward, and around its recomputation."""
    found: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    found = create_selective_checkpoint_contexts(functools.partial(_policy, operators))  # type: ignore[no-untyped-call]
    return found


def require_operators(names: Iterable[str]) -> None:
    """Raise ``UsageError`` for a name that is no group and no operator, and for operators that draw numbers."""
    for name in names:
        if name in GROUPS:
            continue
        packet = _operator(name)
        if packet is None:
            words = ", ".join(f'"{word}"' for word in GROUPS)
            raise UsageError(
                f'checkpointing.operators: "{name}" is no operator of this PyTorch: write one as "aten.mm", or one of '
                f"the groups {words}"
            )
        if any(_draws(getattr(packet, overload)) for overload in _overloads(packet)):
            raise UsageError(
                f'checkpointing.operators: "{name}" draws random numbers; kept, it would leave the generator behind '
                "and every later dropout of the module would differ in the recomputation: take it out"
            )


def _policy(operators: tuple[str, ...], context: Any, operator: Any, *arguments: Any, **named: Any) -> Any:
    if getattr(operator, "overloadpacket", operator) not in _kept(operators):
        return CheckpointPolicy.PREFER_RECOMPUTE
    if _draws_now(operator, arguments, named):
        return CheckpointPolicy.PREFER_RECOMPUTE
    given = context.op_output if isinstance(context.op_output, tuple) else (context.op_output,)
    outputs = [output for output in given if type(output) is torch.Tensor]
    if _counts.versions is not None:
        _counts.versions += [(str(operator), output, output._version) for output in outputs]
    if _counts.kept is not None:
        _counts.kept += [WeakStorage(output) for output in outputs]
    return CheckpointPolicy.MUST_SAVE


class _Counts(threading.local):
    kept: list[WeakStorage] | None = None
    versions: list[tuple[str, torch.Tensor, int]] | None = None


_counts = _Counts()


@contextmanager
def refusing_changed_results(name: str) -> Iterator[None]:
    """Raise ``UsageError`` where a kept result is modified in place later on: backward would be given the modified one."""
    versions: list[tuple[str, torch.Tensor, int]] = []
    before, _counts.versions = _counts.versions, versions
    try:
        yield
    finally:
        _counts.versions = before
    for operator, output, version in versions:
        if output._version != version:
            raise UsageError(
                f"checkpointing.operators keeps the result of {operator} in {name}, which is modified in place after "
                'it: write that operation out of place (inplace=False), or use checkpointing.mode = "full"'
            )


@contextmanager
def counting_kept() -> Iterator[Callable[[], int]]:
    """While entered, what selective checkpoints keep is noted; the function gives the bytes of what is still there."""
    kept: list[WeakStorage] = []
    before, _counts.kept = _counts.kept, kept

    def alive_bytes() -> int:
        storages = [weak.get() for weak in {weak.address: weak for weak in kept}.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    try:
        yield alive_bytes
    finally:
        _counts.kept = before


@functools.lru_cache(maxsize=16)
def _kept(operators: tuple[str, ...]) -> frozenset[Any]:
    names = [member for name in operators for member in GROUPS.get(name, (name,))]
    return frozenset(found for name in names if (found := _operator(name)) is not None)


def _operator(name: str) -> Any | None:
    namespace, _, rest = name.partition(".")
    if namespace == "higher_order":
        return getattr(torch.ops.higher_order, rest, None)
    try:
        return getattr(getattr(torch.ops, namespace), rest)
    except (AttributeError, RuntimeError):
        return None


def _overloads(packet: Any) -> list[str]:
    return list(packet.overloads()) if hasattr(packet, "overloads") else []


def _draws(operator: Any) -> bool:
    """Whether it draws whatever its arguments: fused attention does so only with dropout."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
    return tagged and "dropout_p" not in {argument.name for argument in operator._schema.arguments}


def _draws_now(operator: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = named.get("dropout_p", argument.default_value)
            return float(arguments[position] if position < len(arguments) else given or 0.0) > 0.0
    return True
