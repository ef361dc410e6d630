"""Parameters that are on the device around their block's forward and backward alone, fetched one block ahead.

Between uses ``parameter.data`` is the home: a tensor in the host's memory, pinned beside a device, or mapped from a file.
Whoever reads the parameter finds its values there (a checkpoint, an evaluation's own code, the optimizer). Around its block it
is the device's tensor, always over one storage that is emptied and filled again: what autograd saved of it, views too, is the
same storage. FSDP2 does so with what it gathers.

A block's backward begins at its outputs' gradients and has ended when its inputs' have passed: nodes of the block were made
later than the one that stands before its inputs, and the engine of autograd runs later ones first.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from trine.optim.runtime.buffer_pool import BufferPool
from trine.optim.runtime.host_memory import Copier, CudaCopier
from trine.optim.runtime.tiers.faults import Faults
from trine.optim.runtime.tiers.files import DamagedTier, Region, TierFile
from trine.optim.runtime.tiers.slots import is_dense
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Facts

__all__ = ["BlockParameters", "is_away"]

logger = logging.getLogger("trine")

_THREADS = 2

#: Blocks that an engine takes off the device. A second one would give their parameters homes that the first writes over.
_AWAY: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_away(block: nn.Module) -> bool:
    """Whether an engine that was not closed takes this block's parameters off the device."""
    return block in _AWAY


@dataclass(slots=True, eq=False)
class _Held:
    """One parameter of a block."""

    parameter: nn.Parameter
    home: torch.Tensor
    there: torch.Tensor  # on the device, over a storage that is empty between uses
    region: Region | None

    @property
    def bytes(self) -> int:
        """Of the parameter."""
        return self.home.numel() * self.home.element_size()

    def follow(self) -> None:
        """Where a program put another tensor in the parameter's place (``parameter.data = …``), that is its home now.

        Raises ``UsageError`` for one that lies on disk: its place there cannot follow.
        """
        given = self.parameter.data
        if given.data_ptr() == self.home.data_ptr() or not given.numel():
            return
        if self.region is not None:
            raise UsageError(
                f"{self.region.name}: its .data was replaced by another tensor, while offload.parameters has its values in a file: "
                "write them in place, parameter.copy_(…) under torch.no_grad()"
            )
        home = given if given.device.type == "cpu" and given.is_contiguous() else given.to("cpu").contiguous()
        self.home = home.pin_memory() if self.home.is_pinned() and not home.is_pinned() else home
        self.parameter.data = self.home


@dataclass(slots=True, eq=False)
class _Block:
    module: nn.Module
    held: list[_Held]
    place: int
    is_here: bool = False
    #: Copies and reads under way: (what is read, its buffer beside a device).
    reading: list[tuple[Future[None], _Held, torch.Tensor | None]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    is_coming: bool = False

    @property
    def bytes(self) -> int:
        """Of all its parameters."""
        return sum(held.bytes for held in self.held)


class BlockParameters:
    """``homes`` are the blocks and the tier of each, ``cpu`` or ``nvme``; ``file`` is where the latter go."""

    def __init__(
        self,
        facts: Facts,
        homes: Mapping[nn.Module, str],
        names: Mapping[nn.Parameter, str],
        file: TierFile | None,
        faults: Faults,
        overlap: bool = True,
        copier: Copier | None = None,
    ) -> None:
        self._device = facts.device
        is_cuda = facts.device_type == "cuda"
        self._copier = copier or (CudaCopier(facts.device) if is_cuda else Copier())
        self._faults = faults
        self._pool = BufferPool(pinned=is_cuda)
        self._threads = (
            ThreadPoolExecutor(_THREADS, thread_name_prefix="trine-parameters")
            if overlap and file is not None
            else None
        )
        self._overlap = overlap
        #: Parameter → its place in the file.
        self.regions: dict[nn.Parameter, Region] = {}
        self._order: list[_Block] = []  # as forward used them the first time
        self._ended = False  # a backward's end is told once
        self._closing = False
        self._here_bytes = 0
        #: Most bytes of these parameters on the device at once, since it was last asked for.
        self._most_bytes = 0
        self.moved_bytes = 0
        self.wait_ns = 0
        self._handles: list[Any] = []
        self._blocks = [
            self._block(place, module, tier, names, file)
            for place, (module, tier) in enumerate(homes.items())
        ]
        _AWAY.update(homes)

    def _block(
        self,
        place: int,
        module: nn.Module,
        tier: str,
        names: Mapping[nn.Parameter, str],
        file: TierFile | None,
    ) -> _Block:
        held = []
        for parameter in module.parameters():
            region = None
            if tier == "nvme" and parameter.numel() and is_dense(parameter):
                assert file is not None
                region = file.take(
                    names.get(parameter, "a parameter"), "values", parameter.detach(), parameter.dtype
                )
                region.cut([(0, parameter.numel())])
                region.fill(parameter.detach())
                region.watch(parameter)
                self.regions[parameter] = region
                home = region.tensor
            else:
                home = torch.empty_like(parameter.detach(), device="cpu").copy_(parameter.detach())
                home = home.pin_memory() if self._device.type == "cuda" else home
            # Of its own: the parameter's storage may be part of a larger one.
            there = torch.empty_like(parameter.detach())
            there.untyped_storage().resize_(0)
            parameter.data = home
            held.append(_Held(parameter, home, there, region))
        block = _Block(module, held, place)
        self._handles += [
            module.register_forward_pre_hook(
                lambda _, arguments, named, block=block: self._before(block, arguments, named),
                prepend=True,
                with_kwargs=True,
            ),
            module.register_forward_hook(
                lambda _, arguments, result, block=block: self._after(block, result),
            ),
        ]
        return block

    def host_bytes(self) -> int:
        """In the host's memory now: homes there, and buffers."""
        homes = sum(each.bytes for block in self._blocks for each in block.held if each.region is None)
        return homes + self._pool.total_bytes

    def peak_bytes(self) -> int:
        """Most bytes on the device at once since the last call."""
        found, self._most_bytes = self._most_bytes, self._here_bytes
        return found

    def release_all(self) -> None:
        """Every block home, whatever was under way: a step has ended, or was given up."""
        self._ended = False
        for block in self._blocks:
            if block.is_coming:
                self._drop(block)
            if block.is_here:
                self._release(block)

    def settle(self) -> None:
        """Compare what is on disk with its checksums; between steps."""
        self.release_all()
        try:
            for region in self.regions.values():
                region.notice()
                region.verify()
        except DamagedTier as error:
            self._faults.report(error)
        self._faults.agree()

    def filled(self) -> None:
        """A checkpoint has filled what is on disk: from now on that is compared."""
        for region in self.regions.values():
            region.notice()

    def close(self) -> None:
        """Parameters stay on the device again, and modules are as they were."""
        for handle in self._handles:
            handle.remove()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None  # also when the process ends, when no thread starts any more
        self._closing = True
        for block in self._blocks:
            _AWAY.discard(block.module)
            try:
                self._fetch(block)
            except (
                UsageError
            ) as error:  # its step was refused, or there is none to come: the program keeps what it put there
                logger.error("%s", error)

    # --- hooks ---------------------------------------------------------------------------------

    def _before(self, block: _Block, arguments: Any, named: Any) -> tuple[Any, Any]:
        self._fetch(block)
        backward = torch._C._current_graph_task_id() != -1
        if not backward:
            if block not in self._order:
                self._order.append(block)
            self._ahead(block, 1)
        if not torch.is_grad_enabled():
            return arguments, named
        leaves, shape = tree_flatten((arguments, named))
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if places and not backward:
            passed = _Passing.apply(self, block, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
            for place, tensor in zip(places, passed, strict=True):
                leaves[place] = tensor
            arguments, named = tree_unflatten(leaves, shape)
        return arguments, named

    def _after(self, block: _Block, result: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation: backward needs it next
        outputs = [
            leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if outputs and torch.is_grad_enabled():
            register_multi_grad_hook(outputs, lambda _: self._enter_backward(block), mode="any")
            if self._order_is_whole and block is self._order[-1]:
                return  # backward begins with it
        self._release(block)

    @property
    def _order_is_whole(self) -> bool:
        return len(self._order) == len(self._blocks)

    def _enter_backward(self, block: _Block) -> None:
        if not self._ended:
            self._ended = True
            torch.autograd.Variable._execution_engine.queue_callback(self.release_all)
        self._fetch(block)
        self._ahead(block, -1)

    # --- moving --------------------------------------------------------------------------------

    def _ahead(self, block: _Block, direction: int) -> None:
        """Begin to fetch the block that comes next."""
        if not self._overlap or block not in self._order:
            return
        place = self._order.index(block) + direction
        if 0 <= place < len(self._order):
            following = self._order[place]
            if not following.is_here and not following.is_coming:
                self._start(following)

    def _fetch(self, block: _Block) -> None:
        if block.is_here:
            return
        if not block.is_coming:
            self._start(block)
        self._arrive(block)

    def _start(self, block: _Block) -> None:
        for held in block.held:
            held.follow()
        block.is_coming = True
        self._here_bytes += block.bytes
        self._most_bytes = max(self._most_bytes, self._here_bytes)
        self.moved_bytes += block.bytes
        for held in block.held:
            held.there.untyped_storage().resize_(held.bytes)
            if held.region is None:
                block.events.append(self._copier.copy(_bytes_of(held.there), _bytes_of(held.home)))
                continue
            held.region.notice()
            buffer = self._pool.take(held.bytes) if self._copier.is_asynchronous else None
            into = _bytes_of(held.there) if buffer is None else buffer[: held.bytes]
            if self._threads is None:
                future: Future[None] = Future()
                try:
                    held.region.read_whole(into)
                    future.set_result(None)
                except DamagedTier as error:
                    future.set_exception(error)
            else:
                future = self._threads.submit(held.region.read_whole, into)
            block.reading.append((future, held, buffer))

    def _arrive(self, block: _Block) -> None:
        """The computing stream may use the block; the host waits for the disk alone."""
        before = time.monotonic_ns()
        damaged: DamagedTier | None = None
        for future, held, buffer in block.reading:
            try:
                future.result()
            except DamagedTier as error:
                damaged = error
            if buffer is not None:
                event = self._copier.copy(_bytes_of(held.there), buffer[: held.bytes])
                block.events.append(event)
                self._pool.give_back(buffer, event)
        block.reading.clear()
        for event in block.events:
            if event is not None:
                self._copier.wait(event, self._copier.computing())
        block.events.clear()
        self.wait_ns += time.monotonic_ns() - before
        for held in block.held:
            held.parameter.data = held.there
        block.is_here, block.is_coming = True, False
        if damaged is None:
            return
        if self._closing:  # whoever closes an engine after its error wants to hear of that
            logger.error("%s", damaged)
            return
        if not torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            raise damaged  # an evaluation: no step follows in which ranks would hear of it
        self._faults.report(damaged)

    def _drop(self, block: _Block) -> None:
        """Fetched for nobody: end what is under way."""
        for future, _, buffer in block.reading:
            future.exception()
            if buffer is not None:
                self._pool.give_back(buffer)
        block.reading.clear()
        block.is_here, block.is_coming = True, False
        for event in block.events:
            if event is not None:
                self._copier.wait(event, self._copier.computing())
        block.events.clear()
        self._release(block)

    def _release(self, block: _Block) -> None:
        if not block.is_here:
            return
        for held in block.held:
            held.parameter.data = held.home
            # The same stream computes with it and gives the memory out again: no event is needed.
            held.there.untyped_storage().resize_(0)
        self._here_bytes -= block.bytes
        block.is_here = False

    def leave_backward(self, block: _Block) -> None:
        """Its inputs' gradients have passed."""
        self._release(block)


class _Passing(torch.autograd.Function):
    """Hands inputs on; in backward it comes after everything in the block."""

    @staticmethod
    def forward(
        context: Any, owner: BlockParameters, block: _Block, *inputs: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        context.owner, context.block = owner, block
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        context.owner.leave_backward(context.block)
        return (None, None, *gradients)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All its memory, in order; (bytes,) uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
