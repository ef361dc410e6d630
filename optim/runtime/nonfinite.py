"""Gradients that are not finite, and micro-batches that count nothing: seen before they reach the parameters.

A gradient that is NaN or infinite stays in an optimizer's moments for ever, so it must be found before the update. Reading
every gradient would cost as much as a seventh of the optimizer; by default two parts are read, a ten-thousandth of that:

- parameters of one dimension (biases, norms). What is not finite in backward reaches all that lie before it.
- the first row of each matrix. Of a product's gradient Σ dy·xᵀ a column is not finite, in every row, where an input x
  was not, also where dy was zero, as behind a saturated activation: the loss and the biases look sound then.

``skip`` reads everything, and so does loss scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed

from trine.optim.runtime.plain_tensors import local
from trine.record.errors import TrainingError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = [
    "Policy",
    "Watch",
    "counts_nothing",
    "is_zero_of_nothing",
    "leaves_of",
    "unread",
    "zero_gradients",
    "zeroed",
]

Policy = Literal["raise", "skip", "allow"]

#: Flags beside those of parameters.
_ELSEWHERE, _NOTHING = "a shard of another rank", "no valid token"

#: Losses whose gradients are zero, not 0/0, where no target is valid.
_ZERO_OF_NOTHING = ("NllLossBackward", "NllLoss2DBackward", "ChunkedLinearCrossEntropy")

_WAY_OUT = (
    'lower the learning rate, clip the gradients (clip_norm) or look at the batch; nonfinite="skip" in trine.optimize '
    "leaves such steps out"
)


class Watch:
    """Looks at the gradients of each step, by one policy on all ranks."""

    def __init__(self, assembly: Assembly, policy: Policy) -> None:
        self._assembly = assembly
        self._policy = policy
        self._flags: torch.Tensor | None = None  # of the step that runs, where the answer can wait
        self._deferred: tuple[int, list[str], torch.Tensor, Callable[[], None]] | None = None
        self._loss: torch.Tensor | None = None  # sum of the step's losses on this rank

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different gradients, so that what one finds the others do not."""
        facts = self._assembly.facts
        return facts.layout.is_hybrid or (
            facts.ranks > 1
            and any(hasattr(parameter, "to_local") for parameter in self._assembly.parameters.values())
        )

    @property
    def waits(self) -> bool:
        """Whether the answer is needed before the update: always but on a device, where it is read a step later.

        There too when steps are to be skipped, or a loss scaler waits for its own answer anyway.
        """
        asynchronous = self._assembly.facts.device_type == "cuda"
        return not asynchronous or self._policy == "skip" or self._assembly.scaler is not None

    def saw(self, loss: torch.Tensor) -> None:
        """Remember a micro-batch's loss: it tells which rank a fault came from."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def look(self) -> torch.Tensor | None:
        """How many of the watched gradients of this rank are not finite, on the device; ``None``: not looked at."""
        if self._policy == "allow" or self._assembly.scaler is not None:
            return None  # a scaler looks at every gradient itself
        whole = self._policy == "skip"
        gradients = [
            _part(local(p.grad), whole) for p in self._assembly.parameters.values() if p.grad is not None
        ]
        if self.waits and self._assembly.facts.device_type == "cpu":
            return _count_on_cpu(gradients)
        self._flags = _flags(gradients, self._assembly.facts.device)
        return self._flags.sum()

    def defer(self, step: int, agreed: torch.Tensor | None, nothing: torch.Tensor | None = None) -> None:
        """On a device: have this step's flags copied to the host, to be read at the next step.

        ``agreed``: how many there are over all ranks, where ranks hold different gradients. ``nothing``: whether no token
        was valid.
        """
        if self._flags is None:
            return
        names = [name for name, p in self._assembly.parameters.items() if p.grad is not None]
        flags = [self._flags]
        for extra, value in ((_ELSEWHERE, agreed), (_NOTHING, nothing)):
            if value is not None:
                names.append(extra)
                flags.append((value > 0).to(self._flags.dtype).reshape(1))
        self._deferred = (step, names, *_on_its_way(torch.cat(flags)))
        self._flags = None

    def read_deferred(self) -> None:
        """Raise ``TrainingError`` where the step before had such gradients. Waits for that step's backward alone."""
        if self._deferred is None:
            return
        step, names, flags, arrive = self._deferred
        self._deferred = None
        arrive()
        found = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
        if _NOTHING in found:
            raise TrainingError(
                f"optimizer step {step}: no batch held a valid token, so the loss had no mean. On a device this is read one "
                'step late; the update was one of zero gradients. Leave such batches out, or pass nonfinite="skip"'
            )
        if found:
            raise TrainingError(
                f"optimizer step {step}: the gradient of {found[0]} was not finite ({len(found)} of {len(names)} "
                "gradients). On a device this is read one step late, so the parameters have taken it in: go back to a "
                f"checkpoint, then {_WAY_OUT}"
            )

    def forget(self) -> None:
        """The step has ended."""
        self._loss = None

    def error(self, step: int) -> TrainingError:
        """What to raise for this step's gradients; called on every rank, before gradients are dropped."""
        return TrainingError(f"optimizer step {step}: {self.describe()}. Nothing was updated: {_WAY_OUT}")

    def describe(self) -> str:
        """The first parameter at fault and the ranks whose loss was not finite. Every rank must call it alike."""
        parameters = self._assembly.parameters
        bad = [
            name
            for name, p in parameters.items()
            if p.grad is not None and not bool(torch.isfinite(local(p.grad)).all())
        ]
        loss = math.nan if self._loss is None else float(self._loss)
        mine = (bad, loss)
        facts = self._assembly.facts
        by_rank: list[Any] = [None] * facts.ranks
        if facts.ranks > 1:
            distributed.all_gather_object(by_rank, mine)
        else:
            by_rank = [mine]
        order = {name: place for place, name in enumerate(parameters)}
        found = sorted({name for names, _ in by_rank for name in names}, key=lambda name: order.get(name, 0))
        lost = [str(rank) for rank, (_, value) in enumerate(by_rank) if not math.isfinite(value)]
        which = f"the gradient of {found[0]} is not finite" if found else "a gradient is not finite"
        where = ""
        if facts.ranks > 1 and lost:
            where = f"; the loss of rank{'s' if len(lost) > 1 else ''} {', '.join(lost)} was not finite"
        elif lost:
            where = "; the loss was not finite either"
        return f"{which} ({len(found)} of {len(parameters)} parameters{where})"


def _part(gradient: torch.Tensor, whole: bool) -> torch.Tensor:
    """What is read of a gradient: all of a vector or where ``whole``, a matrix's first row."""
    if whole or gradient.dim() <= 1 or gradient.layout != torch.strided or not gradient.shape[0]:
        return gradient
    return gradient.select(0, 0)


def _count_on_cpu(gradients: list[torch.Tensor]) -> torch.Tensor:
    """One pass in C++ for all tensors of a type; multiplying by one changes no bit."""
    # Whatever the program's default dtype and device.
    found = torch.zeros((), dtype=torch.float32, device="cpu")
    one = torch.ones_like(found)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.layout != torch.strided or gradient.is_complex():
            found += float(not torch.isfinite(_values(gradient)).all())
        else:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, found, one)
    return found


def _flags(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """(gradients,): 1.0 where one is not finite. Does not synchronise."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float32, device=device)
    norms = torch._foreach_norm([_values(gradient) for gradient in gradients], torch.inf)
    return (~torch.isfinite(torch.stack([norm.float() for norm in norms]))).float()


def _on_its_way(flags: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """A copy on the host, and what to call before it is read. The device goes on meanwhile."""
    if flags.device.type != "cuda":
        return flags.cpu(), lambda: None
    kept = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
    kept.copy_(flags, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return kept, event.synchronize


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def unread(value: Any) -> bool:
    """Whether a number is on a device, so that to know it is to wait for it."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def counts_nothing(weight: Any) -> bool:
    """Whether a weight is known to be zero without waiting for a device."""
    return not unread(weight) and float(weight) == 0.0


@contextmanager
def zero_gradients(
    model: torch.nn.Module, loss: torch.Tensor, where: torch.Tensor | None = None
) -> Iterator[None]:
    """While open, a backward of ``loss`` adds exact zeros, whatever it computes, and takes part in all exchanges.

    The loss of a micro-batch without valid tokens is 0/0, and NaN times its weight of zero is still NaN. Hooks of leaf
    tensors run before gradients are accumulated or put into a bucket. ``where``: only where this flag is set, which is
    on the device and not read.
    """

    with zeroed((*model.parameters(), *leaves_of(loss)), where):
        yield


@contextmanager
def zeroed(leaves: Iterable[torch.Tensor], where: torch.Tensor | None = None) -> Iterator[None]:
    """While open, backwards give these leaves exact zeros; ``where``: only where this flag is set."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient) if where is None else gradient.masked_fill(where, 0.0)

    unique = {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
    handles = [leaf.register_hook(hook) for leaf in unique.values()]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_zero_of_nothing(loss: torch.Tensor) -> bool:
    """Whether this loss has gradients of zero where nothing counts, as cross-entropy with ignored targets has."""
    node: Any = loss.grad_fn
    while node is not None and node.name().startswith(("ToCopyBackward", "MulBackward")):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(_ZERO_OF_NOTHING)


def leaves_of(loss: torch.Tensor) -> Iterable[torch.Tensor]:
    """What a backward of ``loss`` accumulates into; under FSDP these are no parameters of the model."""
    seen: set[Any] = set()
    open_nodes = [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        open_nodes += [following for following, _ in node.next_functions]
