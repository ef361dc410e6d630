"""Every storage that lives while a training step runs, by what it is for: the bytes at the peak, kind by kind.

One ledger serves real tensors and fake ones, so that a prediction and the run that it predicts are counted by the same
rules. It sees what passes PyTorch's dispatcher: what a kernel allocates for itself and frees before it returns is not
seen, nor is what a backend of the process group allocates.

``torch.distributed._tools`` has MemTracker and FSDPMemTracker, which work alike and were weighed: the first knows no
gathered parameters, the second takes FSDP2 models alone and one forward a step, and both decide what a storage is for
when it is allocated. Here a storage's kind is the most telling of all that it ever was, and decided at the end, from
the log. A test holds totals equal to FSDPMemTracker's.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch._guards import active_fake_mode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["KINDS", "Ledger", "tensors_in"]

#: What a storage can be for, the most telling first: one that was several things counts as the first of them.
KINDS = (
    "parameters",
    "buffers",
    "batch",
    "optimizer_state",
    "gathered_parameters",
    "gradients",
    "communication",
    "activations",
    "temporary",
)
_RANK = {kind: place for place, kind in enumerate(KINDS)}


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entered around training steps; afterwards ``peak()`` and ``at_end()``.

    ``rounding`` is the least block of the device's allocator in bytes: sizes are rounded up to its multiples (512 in
    CUDA's caching allocator, 1 on the CPU).
    """

    def __init__(self, rounding: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounding = rounding
        self._numbers: dict[int, int] = {}  # id of a living storage → its number in the log
        self._alive: dict[int, tuple[Any, int]] = {}  # number → weak reference, bytes
        self._kinds: list[int] = []  # by number: the place in KINDS
        self._log: list[tuple[int, int]] = []  # (number, change in bytes)
        #: While set, operators are neither seen nor changed.
        self.paused = False
        self._in_optimizer = False
        self._entry_mode: Any = None
        self._undo: list[Callable[[], None]] = []

    # --- what there was before ---------------------------------------------------------------------

    def tag(self, tensors: Iterable[Any], kind: str) -> None:
        """These tensors' storages are of this kind, if they were not of a more telling one; unknown ones are entered."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, _RANK[kind])

    def tag_model(self, model: torch.nn.Module) -> None:
        """Parameters, buffers and gradients of a model; and of FSDP2's modules what they gather."""
        self.tag(model.parameters(), "parameters")
        self.tag(model.buffers(), "buffers")
        self.tag([p.grad for p in model.parameters()], "gradients")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._tag_gathered(module)

    def tag_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """State, and what the optimizer holds besides the model's parameters: master copies."""
        self.tag((p for group in optimizer.param_groups for p in group["params"]), "optimizer_state")
        for values in optimizer.state.values():
            self.tag(values.values() if isinstance(values, dict) else (), "optimizer_state")

    def _tag_gathered(self, module: FSDPModule) -> None:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                self.tag(getattr(parameter, "all_gather_outputs", ()), "gathered_parameters")
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    self.tag([whole], "gathered_parameters")
                    self.tag([whole.grad], "gradients")
                self.tag([parameter.unsharded_accumulated_grad], "gradients")

    # --- what it says ------------------------------------------------------------------------------

    def peak(self, since: int = 0, until: int | None = None) -> dict[str, int]:
        """Bytes of each kind at the moment when most bytes were alive, between two marks; their sum is the peak."""
        alive = most = 0
        last = -1
        for place, (_, change) in enumerate(self._log[:until]):
            alive += change
            if alive > most and place >= since:
                most, last = alive, place
        return self._at(last)

    def at_end(self) -> dict[str, int]:
        """Bytes of each kind that are alive now."""
        return self._at(len(self._log) - 1)

    def most_of(self, since: int = 0) -> dict[str, int]:
        """The most bytes of each kind from a mark on; kinds have it at different times, so their sum is no peak."""
        now: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for place, (number, change) in enumerate(self._log):
            kind = self._kinds[number]
            now[kind] += change
            if place >= since:
                most[kind] = max(most[kind], now[kind])
            elif place == since - 1:
                most = Counter(now)
        return {kind: most[place] for place, kind in enumerate(KINDS)}

    def mark(self) -> int:
        """Where the log ends now."""
        return len(self._log)

    def _at(self, last: int) -> dict[str, int]:
        found: Counter[int] = Counter()
        for number, change in self._log[: last + 1]:
            found[self._kinds[number]] += change
        return {kind: found[place] for place, kind in enumerate(KINDS)}

    # --- watching ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._entry_mode = active_fake_mode()
        self._undo = [
            register_optimizer_step_pre_hook(self._before_optimizer).remove,
            register_optimizer_step_post_hook(self._after_optimizer).remove,
            self._watch_resizing(),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *arguments: object) -> None:
        super().__exit__(*arguments)  # type: ignore[no-untyped-call]
        while self._undo:
            self._undo.pop()()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its operators on the local parts come here again
        if self.paused:
            return function(*arguments, **named)
        result = self.run(function, arguments, named)
        # DTensor asks nested fake tensors for shapes: those are no memory.
        if active_fake_mode() is self._entry_mode:
            self._see(function, arguments, named, result)
        return result

    def run(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The operator itself."""
        return function(*arguments, **named)

    def _see(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        space = function.namespace
        if space in ("c10d", "_c10d_functional"):
            for tensor in tensors_in((arguments, named, result)):
                self._note(tensor, _RANK["communication"])
            return
        if space == "fsdp" and function is torch.ops.fsdp.chunk_cat.default:
            for tensor in tensors_in(arguments[0]):
                self._note(tensor, _RANK["gradients"])
        kind = self._kind_now()
        for tensor in tensors_in(result):
            self._note(tensor, kind)

    def _kind_now(self) -> int:
        if self._in_optimizer:
            return _RANK["temporary"]
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return _RANK["activations"]  # forward, or recomputation inside of backward
        return _RANK["temporary"]

    def _note(self, tensor: torch.Tensor, kind: int) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and other tensors without one storage
            return
        number = self._numbers.get(id(storage))
        if number is None:
            self._enter_storage(storage, kind)
        elif kind < self._kinds[number]:
            self._kinds[number] = kind

    def _enter_storage(self, storage: torch.UntypedStorage, kind: int) -> None:
        number = len(self._kinds)
        key = id(storage)

        def gone(_: Any) -> None:
            self._numbers.pop(key, None)
            _, size = self._alive.pop(number)
            self._log.append((number, -size))

        size = self._rounded(storage.nbytes())
        self._numbers[key] = number
        self._kinds.append(kind)
        self._alive[number] = (weakref.ref(storage, gone), size)
        self._log.append((number, size))

    def _rounded(self, size: int) -> int:
        return -(-size // self._rounding) * self._rounding

    def _watch_resizing(self) -> Callable[[], None]:
        """FSDP2 frees and takes a gathered parameter's memory by resizing its storage, which is no operator."""
        original: Any = torch.UntypedStorage.resize_
        ledger = self

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            ledger._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return lambda: setattr(torch.UntypedStorage, "resize_", original)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        number = self._numbers.get(id(storage))
        if number is None:
            self._enter_storage(storage, _RANK["temporary"])
            return
        reference, before = self._alive[number]
        size = self._rounded(storage.nbytes())
        self._alive[number] = (reference, size)
        self._log.append((number, size - before))

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_optimizer = True
        self.tag((p.grad for group in optimizer.param_groups for p in group["params"]), "gradients")

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_optimizer = False
        self.tag_optimizer(optimizer)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
