"""One stage of a pipeline: the whole model's forward, with everything that other stages own replaced.

    stage(received, position=3)    the hidden state that the next stage begins with; of the last stage the loss

The model tree is copied shallowly along the way to its list of blocks, so that names, keyword arguments, masks and the
model's own code stay; modules that the stage owns are the given ones. The program's loss function is called on every stage:
it is left by an exception, which no program catches, where the first block of the next stage is called. What stands between
two blocks in the model's code therefore runs once, on the earlier stage.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trine.optim.runtime.pipelining.chain import Chain
from trine.optim.runtime.pipelining.looking import output_of, used
from trine.optim.runtime.pipelining.placeholders import (
    Absent,
    Skipped,
    StandIn,
    reached,
    stood_in,
)
from trine.record.errors import TrainingError, UsageError

__all__ = ["LocalStages", "Stage", "Task", "stages_of"]


class _Left(BaseException):
    """The stage ends here, with this hidden state. No ``except Exception`` of a program's catches it."""

    #: Contexts round the forward: it has run as far as it is to.
    ends_forward = True

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(slots=True)
class Task:
    """What the stages of a rank run now. ``losses`` as the engine has it."""

    pieces: list[Any] = field(default_factory=list)
    losses: Callable[[Any, Any, int], torch.Tensor] | None = None
    #: How many values a block returns in a tuple; ``None`` for a tensor alone. Blocks of one model are alike.
    returned: int | None = None
    #: Micro-batch → what the last stage's backward of it runs in.
    guards: dict[int, Callable[[], AbstractContextManager[None]]] = field(default_factory=dict)
    #: Stage → micro-batches of this step whose loss did not depend on what it was handed.
    unused: Counter[int] = field(default_factory=Counter)


class Stage(nn.Module):
    """Stage ``index`` of ``count``, with blocks ``first`` to ``end`` of the chain, the end excluded.

    ``behind`` are modules, by id, that run behind the blocks; ``shared`` those of other stages that this one needs too.
    """

    #: What the rank's stages run now; they share one.
    task: Task

    def __init__(
        self,
        model: nn.Module,
        chain: Chain,
        index: int,
        count: int,
        blocks: tuple[int, int],
        device: torch.device,
        behind: frozenset[int] = frozenset(),
        shared: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.index, self.count = index, count
        self.first, self.end = blocks
        self.chain_names = chain.names
        self._device = device
        self._hidden_name = chain.hidden_name
        self._copies: list[tuple[nn.Module, nn.Module]] = []  # of a container, and what it is a copy of
        self._behind, self._shared = behind, shared
        self._replaced: dict[int, nn.Module] = {}  # outside the blocks, by the id of what was given
        self._pipeline_model = self._hollow(model, chain)
        self._modes = [original.training for _, original in self._copies]
        object.__setattr__(self, "task", Task())
        self._received: torch.Tensor | None = None
        self._next = -1  # block that is to be called; −1 while no forward runs
        self._dtype = torch.float32  # of the hidden state
        self._is_checked = False

    @property
    def is_first(self) -> bool:
        """Whether it begins with the batch."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the loss."""
        return self.index == self.count - 1

    @property
    def model(self) -> nn.Module:
        """What the program's loss function is called with."""
        return self._pipeline_model

    def forward(self, *received: torch.Tensor, position: int = -1) -> torch.Tensor:
        """Micro-batch ``position`` of the task. ``received``: nothing on the first stage, else the hidden state."""
        task: Task = self.task
        if task.losses is None:
            raise UsageError(
                "parallel.pipeline: this rank holds a part of the model, which does not run alone: use engine.train_step"
                "(batch), and engine.evaluate(batch) without gradients"
            )
        self._follow()
        is_looked_at = torch.is_grad_enabled() and not self._is_checked
        with self._returned(is_looked_at) as calls:
            try:
                output = self._run(task, received, position)
                has_left = False
            except _Left as left:
                output, has_left = _sendable(left.hidden), True
        if is_looked_at:
            self._is_checked = True
            self._require_no_gradient_past_it(output)
            if not has_left:
                self._require_no_penalty(output, calls)
            # Behind a whole forward: only now it is known that the loss function calls the model as one.
            if not self.is_first and (has_left or calls):
                self._require_no_value_past_it(task, received, position)
        if has_left:
            return _receivable(output)
        if not self.is_last:
            raise TrainingError(
                f"parallel.pipeline: the loss function returned on stage {self.index} of {self.count} before the model called "
                f"{self.chain_names[self.end]}: a pipeline runs models that call their blocks in order, each step alike"
            )
        return _receivable(output)

    def _run(self, task: Task, received: tuple[torch.Tensor, ...], position: int) -> torch.Tensor:
        assert task.losses is not None
        self._received = received[0] if received else None
        self._next = 0
        try:
            return task.losses(self.model, task.pieces[position], position)
        finally:
            self._next, self._received = -1, None

    @contextmanager
    def _returned(self, is_wanted: bool) -> Iterator[list[Any]]:
        """What the model itself returns inside, each time."""
        calls: list[Any] = []
        if not is_wanted:
            yield calls
            return
        handle = self.model.register_forward_hook(lambda module, inputs, output: calls.append(output))
        try:
            yield calls
        finally:
            handle.remove()

    def _require_no_value_past_it(
        self, task: Task, received: tuple[torch.Tensor, ...], position: int
    ) -> None:
        """Raises ``TrainingError`` where what other stages compute is used without a gradient."""

        def leave(_: nn.Module, arguments: Any, returned: Any) -> None:
            found = output_of(returned)
            raise _Left(torch.zeros(()) if found is None else found)

        def run() -> torch.Tensor:
            handle = self.model.register_forward_hook(leave)
            try:
                return self._run(task, received, position)
            except _Left as left:
                return left.hidden
            finally:
                handle.remove()

        taken = used(self.model, stood_in(self.model), run, self._device)
        if taken:
            raise TrainingError(
                f"parallel.pipeline: stage {self.index} of {self.count} uses values of {', '.join(taken)} beside the hidden "
                "state (as a mask or a detached gate does), another stage has those, and stages hand on the hidden state "
                "alone: compute it from the batch, cut elsewhere by parallel.split, or take the key out"
            )

    def _follow(self) -> None:
        """A program may set the mode of the model that it gave, as well as that of ``engine.model``."""
        modes = [original.training for _, original in self._copies]
        for (copy, _), mode, before in zip(self._copies, modes, self._modes, strict=True):
            if mode != before:
                copy.training = mode
        self._modes = modes

    # --- what happens at blocks --------------------------------------------------------------------

    def watch_blocks(self) -> None:
        """See each own block's call before any hook: FSDP2, which was there before, is to see what was received.

        To be called last, when blocks are compiled and wrapped.
        """
        own = [self.model.get_submodule(name) for name in self.chain_names[self.first : self.end]]
        for place, block in enumerate(own, start=self.first):
            inner = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = _Watched(self, place, block, inner)

    def enter(self, place: int, block: nn.Module, arguments: Any, named: Any) -> tuple[Any, Any]:
        """The arguments that own block ``place`` is to be called with."""
        if self._next < 0:  # recomputed, or called by the program
            return arguments, named
        if self._next != place:
            raise self._out_of_order(place)
        self._next = place + 1
        if place > self.first or self._received is None:
            return arguments, named
        hidden, self._received = self._received, None
        if arguments:
            return (hidden, *arguments[1:]), named
        return (), {**named, self._hidden_name: hidden}

    def left(self, output: Any) -> None:
        """What an own block returned: those of other stages return the like."""
        if not isinstance(output, torch.Tensor):
            self.task.returned = len(output) if isinstance(output, (tuple, list)) else None

    def _met(self, skipped: Skipped, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """A block of another stage is called."""
        if skipped.index < self.first and self._next == skipped.index:
            self._next += 1
            like = self._received
            assert like is not None, "a stage behind the first was called without a hidden state"
            zeros = skipped.zeros(like.shape, like.dtype)
            returned = self.task.returned
            return zeros if returned is None else (zeros, *(None,) * (returned - 1))
        if skipped.index == self.end == self._next:
            hidden = arguments[0] if arguments else named.get(self._hidden_name)
            if not isinstance(hidden, torch.Tensor):
                raise TrainingError(
                    f"parallel.pipeline: {skipped.name} is called with a {type(hidden).__name__} as its first argument, and "
                    "stages hand on one tensor, the hidden state: take the key out"
                )
            raise _Left(hidden)
        raise self._out_of_order(skipped.index)

    def _out_of_order(self, place: int) -> TrainingError:
        expected = self.chain_names[self._next] if self._next < len(self.chain_names) else "no further block"
        return TrainingError(
            f"parallel.pipeline: the model calls {self.chain_names[place]} where stage {self.index} of {self.count} expects "
            f"{expected}: a pipeline runs models that call each block once and in order"
        )

    def _require_no_penalty(self, loss: torch.Tensor, calls: list[Any]) -> None:
        """Raises ``TrainingError`` where the loss takes parameters of this stage's blocks: it lacks those of the others."""
        if not calls:
            return
        own = {
            id(parameter): f"{block}.{name}"
            for block in self.chain_names[self.first : self.end]
            for name, parameter in self.model.get_submodule(block).named_parameters()
        }
        through = [
            leaf for leaf in tree_leaves(calls) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        taken = reached(loss, own, through)
        if taken:
            raise TrainingError(
                f"parallel.pipeline: the loss takes {taken[0]} otherwise than through the model's output, as a penalty over "
                "model.parameters() does, and the last stage has only its own: use the optimizer's weight_decay, or take the "
                "key out"
            )

    def _require_no_gradient_past_it(self, output: torch.Tensor) -> None:
        """Raises ``TrainingError`` where something else than the hidden state should have been handed on."""
        witnesses = {id(each.witness): each.name for each in stood_in(self.model)}
        witnesses |= {id(witness): name for name, witness in self._attributes.items()}
        leaking = reached(output, witnesses)
        if leaking:
            raise TrainingError(
                f"parallel.pipeline: stage {self.index} of {self.count} needs {', '.join(leaking)} beside the hidden "
                "state, and another stage owns that: give trine.optimize example=batch, so that it is kept where it is "
                "needed, or cut elsewhere by parallel.split"
            )

    # --- the hollow copy ---------------------------------------------------------------------------

    def _hollow(self, model: nn.Module, chain: Chain) -> nn.Module:
        self._attributes: dict[str, torch.Tensor] = {}
        top = copied = self._copy(model)
        prefix = ""
        for name in chain.container.split(".") if chain.container else []:
            original = self._copies[-1][1]
            for key, child in original._modules.items():
                if key != name and child is not None:
                    copied._modules[key] = self._beside(f"{prefix}{key}", child)
            self._strip(copied, original, prefix)
            child = original._modules[name]
            assert child is not None, "the list of blocks was found there"
            copied._modules[name] = following = self._copy(child)
            prefix, copied = f"{prefix}{name}.", following
        for place, (name, block) in enumerate(zip(chain.names, chain.blocks, strict=True)):
            own = self.first <= place < self.end
            key = name.rpartition(".")[2]
            copied._modules[key] = block if own else Skipped(name, place, self._device, self._met)
        self._strip(copied, self._copies[-1][1], prefix)
        return top

    def _copy(self, module: nn.Module) -> nn.Module:
        copy = module.__class__.__new__(module.__class__)
        copy.__dict__.update(module.__dict__)
        for key, value in module.__dict__.items():
            if isinstance(value, OrderedDict):  # hooks: those that are added to the copy are not the model's
                copy.__dict__[key] = value.copy()
        copy._modules = dict(module._modules)
        copy._parameters = dict(module._parameters)
        copy._buffers = dict(module._buffers)
        self._copies.append((copy, module))
        return copy

    def _strip(self, copied: nn.Module, original: nn.Module, prefix: str) -> None:
        """Parameters of the containers themselves are the first and the last stage's."""
        if self.is_first or self.is_last or id(original) in self._shared:
            return
        for key, parameter in list(copied._parameters.items()):
            if parameter is not None:
                witness = torch.zeros((), dtype=torch.float32, device=self._device, requires_grad=True)
                self._attributes[f"{prefix}{key}"] = witness
                del copied._parameters[key]
                copied.__dict__[key] = witness.to(parameter.dtype).expand(parameter.shape)

    def _beside(self, name: str, module: nn.Module) -> nn.Module:
        """A module outside the blocks, or what stands for it on this stage."""
        if id(module) not in self._replaced:
            self._replaced[id(module)] = self._beside_once(name, module)
        return self._replaced[id(module)]

    def _beside_once(self, name: str, module: nn.Module) -> nn.Module:
        parts = [part for part in module.modules() if any(p is not None for p in part._parameters.values())]
        if all(self._owns(part) for part in parts):
            return module
        if any(parameter is not None for parameter in module._parameters.values()):
            if id(module) in self._behind:
                return Absent(name, self._device)
            return StandIn(name, module, self._device)
        copied = self._copy(module)
        for key, child in module._modules.items():
            if child is not None:
                copied._modules[key] = self._beside(f"{name}.{key}", child)
        return copied

    def _owns(self, module: nn.Module) -> bool:
        if id(module) in self._shared:
            return True
        return self.is_last if id(module) in self._behind else self.is_first


class LocalStages(nn.Module):
    """All stages of a rank that holds several."""

    def __init__(self, stages: list[Stage]) -> None:
        super().__init__()
        for stage in stages:
            self.add_module(f"_pipeline_stage_{stage.index}", stage)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Raises ``UsageError``: a schedule runs them."""
        raise UsageError(
            "parallel.pipeline: this rank holds parts of the model, which do not run alone: use engine.train_step(batch), and "
            "engine.evaluate(batch) without gradients"
        )


def stages_of(model: nn.Module) -> list[nn.Module]:
    """The stages that a rank's model is made of; the model itself where there is no pipeline."""
    return list(model.children()) if isinstance(model, LocalStages) else [model]


class _Watched:
    """Stands before a block's own call, compiled or not, so that no hook sees what the stage replaces."""

    __slots__ = ("_block", "_inner", "_place", "_stage")

    def __init__(self, stage: Stage, place: int, block: nn.Module, inner: Callable[..., Any]) -> None:
        self._stage, self._place, self._block, self._inner = stage, place, block, inner

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        arguments, named = self._stage.enter(self._place, self._block, arguments, named)
        output = self._inner(*arguments, **named)
        self._stage.left(output)
        return output


def _sendable(hidden: torch.Tensor) -> torch.Tensor:
    """Contiguous, as backends send it, and no view, which schedules that split backward could not detach in place."""
    hidden = hidden.contiguous()
    return hidden.clone() if hidden._is_view() else hidden


def _receivable(output: torch.Tensor) -> torch.Tensor:
    """Where all is frozen so far, the schedules send a gradient back nevertheless."""
    if torch.is_grad_enabled() and not output.requires_grad:
        return output.detach().requires_grad_()
    return output
