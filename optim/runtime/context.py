"""Sequences cut over ranks: this rank's part of a batch, and the model told where its tokens stand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.utils.weak import WeakTensorKeyDictionary

from trine.optim._stages import evaluating
from trine.optim.batches import tensors_of, with_tensors
from trine.optim.runtime.context_attention import Attending, current, positions_of, use
from trine.optim.runtime.context_transformers import is_of_transformers, loss_arguments
from trine.optim.runtime.late_checks import LateChecks
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["IGNORED", "POSITIONS", "Sequences"]

#: Targets without a loss, as torch.nn.functional.cross_entropy has it.
IGNORED = -100
#: What a model's forward takes the tokens' places by.
POSITIONS = ("position_ids", "positions")
#: Chunks of this many tokens are enough to see whether a program can be cut.
_REHEARSED = 4
_KEY = "parallel.context"


@dataclass(frozen=True, slots=True)
class _Part:
    """What is known of a tensor that was cut."""

    positions: torch.Tensor
    shifted: torch.Tensor | None = None  # of unshifted labels: this rank's part of the shifted ones
    valid: torch.Tensor | None = None  # how many of those the whole sequence has


class Sequences:
    """Cuts micro-batches, and runs the model on parts where it is given them."""

    def __init__(self, model: nn.Module, group: distributed.ProcessGroup) -> None:
        self.attending = Attending(group)
        self._group = group
        self._ranks = distributed.get_world_size(group)
        self._place = distributed.get_rank(group)
        self._parts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._late = LateChecks()
        self._unequal: torch.Tensor | None = None  # whether parts hold different numbers of targets
        self._cuts = False  # a micro-batch is on its way
        self._calls = 0
        self._parameters = inspect.signature(model.forward).parameters
        self._of_transformers = is_of_transformers(model)
        self._kind = type(model).__name__  # before anything wraps it
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave),
        ]

    # --- what the engine calls -----------------------------------------------------------------

    def part(self, piece: Any) -> Any:
        """This rank's part of a micro-batch: of every tensor that is as long as the token ids, its tokens alone.

        Raises ``UsageError`` for a length that cannot be cut evenly, and for padding on the left.
        """
        self._late.look()
        length = self._length(piece)
        positions = positions_of(length, self._ranks, self._place)
        index: dict[torch.device, torch.Tensor] = {}
        self._unequal = None

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != length:
                return tensor
            here = index.setdefault(tensor.device, positions.to(tensor.device, non_blocking=True))
            part = tensor.index_select(1, here)
            self._parts[part] = _Part(here)
            return part

        local = with_tensors(piece, cut)
        self._look_at_targets(piece, local, length)
        self._look_at_padding(piece)
        self._cuts = torch.is_grad_enabled()
        return local

    def uncounted(self) -> None:
        """The loss came without a token count. Raises ``UsageError`` where parts hold different numbers of targets."""
        if self._unequal is None:
            return
        self._late.expect(
            self._unequal,
            f"{_KEY}: ranks hold different numbers of targets that are not {IGNORED}, and the mean of their means is another "
            "loss: have loss_fn return (mean loss, token count)",
        )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Round a backward, which recomputes the attention of checkpointed blocks."""
        use(self.attending)
        try:
            yield
        finally:
            use(None)

    def rest(self, stepped: bool = False) -> None:
        """The step is over: the model may be given whole sequences again."""
        self._cuts = False
        self._unequal = None
        use(None)

    def rehearse(self, assembly: Assembly, loss_fn: Callable[[Any, Any], Any], batch: Any) -> None:
        """Is the mean of the parts' losses the whole sequence's? On the first few tokens of the first batch, once.

        Raises ``UsageError`` on all ranks where it is not: where attention does not go through
        ``scaled_dot_product_attention``, where ``loss_fn`` compares a token with its neighbour. Collective.
        """
        length = self._length(batch)
        short = min(length, 2 * self._ranks * _REHEARSED)

        def beginning(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, :short] if tensor.dim() >= 2 and tensor.shape[1] == length else tensor

        few = with_tensors(batch, beginning)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            device = assembly.facts.device
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            stack.enter_context(evaluating(assembly.model))
            for context in assembly.contexts:
                stack.enter_context(context())
            # Autocast would blur what is compared.
            stack.enter_context(torch.autocast(assembly.facts.device_type, enabled=False))
            whole = _weighed(loss_fn(assembly.model, few))
            parts = _weighed(loss_fn(assembly.model, self.part(few)))
        self.rest()
        distributed.all_reduce(parts, group=self._group)
        apart = (parts[0] / parts[1] - whole[0] / whole[1]).abs() / (whole[0] / whole[1]).abs()
        precise = all(p.element_size() >= 4 for p in assembly.model.parameters())
        if float(apart) > (1e-4 if precise else 2e-2):  # not where a loss has no valid target, and is NaN
            raise UsageError(
                f"{_KEY}: over the first {short} tokens the parts' losses come to {float(parts[0] / parts[1]):.6g}, and the "
                f"whole sequence's to {float(whole[0] / whole[1]):.6g}: something compares tokens across the cut. Shift "
                "labels where the batch is made, so that loss_fn has a target for each token, or drop the key"
            )

    # --- round the model's forward -------------------------------------------------------------

    def _enter(
        self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = [*tensors_of(arguments), *tensors_of(named)]
        known = [self._parts[tensor] for tensor in given if tensor in self._parts]
        if not known:
            if self._cuts and torch.is_grad_enabled():
                raise UsageError(f"{_KEY}: {_unknown()}")
            use(None)
            return None
        part = known[0]
        for tensor in given:
            if tensor.dim() >= 2 and tensor.shape[1] == len(part.positions) and tensor not in self._parts:
                raise UsageError(f"{_KEY}: {_unknown()}")
        use(self.attending)
        self._calls = self.attending.calls
        names = list(self._parameters)
        bound = {*names[: len(arguments)], *(name for name, value in named.items() if value is not None)}
        name = next(name for name in POSITIONS if name in self._parameters)
        if name not in bound:
            # Transformers broadcasts over a batch dimension of its own.
            named = {**named, name: part.positions.unsqueeze(0) if self._of_transformers else part.positions}
        labels = named.get("labels")  # of whole sequences they are not cut
        targets = self._parts[labels] if labels is not None and labels in self._parts else None
        if targets is not None and targets.shifted is not None and targets.valid is not None:
            named = {**named, **loss_arguments(targets.shifted, targets.valid, self._ranks)}
            self._unequal = None  # the loss is the whole sequence's
        return arguments, named

    def _leave(self, model: nn.Module, arguments: Any, result: Any) -> None:
        was_used = current() is self.attending
        use(None)
        if was_used and self.attending.calls == self._calls:
            raise UsageError(
                f"{_KEY}: no attention of {self._kind} went through "
                "torch.nn.functional.scaled_dot_product_attention, looked up when it is called: each rank would see its own "
                "part of the sequence alone. Have the model call that, or drop the key"
            )

    # --- parts ---------------------------------------------------------------------------------

    def _length(self, batch: Any) -> int:
        ids = next((t for t in tensors_of(batch) if t.dim() == 2 and not t.is_floating_point()), None)
        if ids is None:
            raise UsageError(
                f"{_KEY}: the batch holds no token ids, integers of (batch, sequence), whose length is to be cut"
            )
        length = int(ids.shape[1])
        if length % (2 * self._ranks):
            up = -(-length // (2 * self._ranks)) * 2 * self._ranks
            raise UsageError(
                f"{_KEY} = {self._ranks} cuts a sequence into {2 * self._ranks} equal chunks, and this batch is {length} tokens "
                f"wide: pad it on the right, as to {up}, or have data.shape_buckets do so with such widths"
            )
        return length

    def _look_at_targets(self, whole: Any, local: Any, length: int) -> None:
        """Whether parts hold equally many targets; Transformers' labels, which its models shift, are kept shifted too."""
        labels = whole.get("labels") if self._of_transformers and isinstance(whole, Mapping) else None
        for tensor in tensors_of(whole):
            if tensor.dim() != 2 or tensor.shape[1] != length or tensor.is_floating_point():
                continue
            targets = nn.functional.pad(tensor[:, 1:], (0, 1), value=IGNORED) if tensor is labels else tensor
            valid = (targets != IGNORED).view(len(targets), 2 * self._ranks, -1).sum((0, 2))
            by_rank = valid[: self._ranks] + valid[self._ranks :].flip(0)
            unequal = (by_rank != by_rank[0]).any()
            self._unequal = unequal if self._unequal is None else self._unequal | unequal
            if tensor is labels:
                part = self._parts[local["labels"]]
                shifted = targets.index_select(1, part.positions)
                self._parts[local["labels"]] = _Part(part.positions, shifted, valid.sum())

    def _look_at_padding(self, whole: Any) -> None:
        """A causal token sees none that stands behind it: padding on the right needs no mask, on the left it would."""
        mask = whole.get("attention_mask") if isinstance(whole, Mapping) else None
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self._late.expect(
                (mask[:, 1:] > mask[:, :-1]).any(),
                f"{_KEY}: attention_mask has padding before tokens, and attention over parts takes no mask: pad on the right",
            )


def _weighed(result: Any) -> torch.Tensor:
    """(weight × mean, weight) of what loss_fn returned, in float64 where there is one."""
    mean, weight = result if isinstance(result, tuple) else (result, 1.0)
    wide = torch.float32 if mean.device.type == "mps" else torch.float64
    mean = mean.detach().reshape(()).to(wide)
    count = torch.as_tensor(weight, device=mean.device, dtype=wide).reshape(())
    return torch.stack([torch.where(count == 0, torch.zeros_like(mean), mean * count), count])


def _unknown() -> str:
    return (
        "the model was handed a tensor that loss_fn made from the batch's, and it is one rank's part of the sequence: a shift "
        "there loses tokens at the cut. Make ids and targets of one length before the batch is given to train_step"
    )
