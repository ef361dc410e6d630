"""What one batch shows of a model, before it is cut: the cost of each block, and what more than the hidden state is needed.

Forward and backward run on the whole model, on rank 0, which tells the others: times differ from rank to rank, and a plan
must not. Gradients, buffers and random numbers are left as they were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from trine.optim.batches import to_device
from trine.optim.runtime.memory_fit import untouched
from trine.optim.runtime.pipelining.chain import Chain
from trine.optim.runtime.pipelining.costs import Costs
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Facts

__all__ = ["Shown", "show"]

#: Runs whose times are looked at, after one that is not.
RUNS = 3

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """The same on every rank. Names are of modules with parameters of their own, outside the blocks."""

    costs: Costs
    behind: frozenset[str]  # that run first behind the blocks
    begins: tuple[int, ...]  # first block of each stage
    #: Name → stages, beside its own, that need what the module computes; or the module itself, where its parameters are
    #: used elsewhere. ``""``: of the model's own parameters.
    needed: dict[str, tuple[int, ...]]


def show(
    facts: Facts,
    chain: Chain,
    loss_fn: LossFunction,
    batch: Any,
    cut: Callable[[Costs], tuple[int, ...]],
) -> Shown:
    """Measured on rank 0. ``cut(costs)`` decides where stages begin. Collective; raises ``UsageError`` on all ranks alike."""
    told: list[Any] = [None]
    if facts.rank == 0:
        try:
            told = [_shown(facts, chain, loss_fn, to_device(batch, facts.device), cut)]
        except Exception as error:  # noqa: BLE001 - told on every rank: none may wait for another
            said = " ".join(str(error).split())
            told = [said if isinstance(error, UsageError) else f"{type(error).__name__}: {said}"]
    if facts.ranks > 1:
        distributed.broadcast_object_list(told, src=0)
    if isinstance(told[0], str):
        start = "" if told[0].startswith("parallel.") else "parallel.pipeline: the example could not be run: "
        raise UsageError(f"{start}{told[0]}")
    found: Shown = told[0]
    return found


def _shown(
    facts: Facts,
    chain: Chain,
    loss_fn: LossFunction,
    batch: Any,
    cut: Callable[[Costs], tuple[int, ...]],
) -> Shown:
    model = facts.model
    with untouched(model, (), facts.device):
        watch = _Watch(model, chain, facts.device)
        with watch.installed():
            for _ in range(RUNS + 1):
                watch.begin()
                torch.autograd.backward([_loss(loss_fn, model, batch)])
                watch.end()
        costs = watch.costs()
        begins = cut(costs)
        needed = _leaks(model, chain, loss_fn, batch, begins, watch.behind)
    return Shown(costs, frozenset(watch.behind), begins, needed)


def _loss(loss_fn: LossFunction, model: nn.Module, batch: Any) -> torch.Tensor:
    result = loss_fn(model, batch)
    loss: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return loss


# --- times -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """Monotonic times, in ns, of one forward and backward."""

    began: int = 0
    entered: list[int] = field(default_factory=list)  # of each block, in forward
    left: int = 0  # of the last block
    backward: int = 0  # began; when the gradient of the last block's output was there
    reached: dict[int, int] = field(default_factory=dict)  # block → when the gradient of its input was there
    ended: int = 0


class _Watch:
    """Hooks that take times at blocks, and see what runs behind them."""

    def __init__(self, model: nn.Module, chain: Chain, device: torch.device) -> None:
        self._model, self._chain, self._device = model, chain, device
        self._runs: list[_Run] = []
        self.behind: set[str] = set()
        self._met: set[str] = set()

    def _now(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()

    def begin(self) -> None:
        """A forward begins."""
        self._runs.append(_Run(began=self._now()))

    def end(self) -> None:
        """Its backward has ended."""
        self._runs[-1].ended = self._now()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """With the hooks in place."""
        handles: list[Any] = []
        for place, block in enumerate(self._chain.blocks):
            handles.append(block.register_forward_pre_hook(self._entering(place), with_kwargs=True))
        handles.append(self._chain.blocks[-1].register_forward_hook(self._leaving))
        for name, module in outside(self._model, self._chain):
            handles.append(module.register_forward_pre_hook(self._meeting(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, place: int) -> Callable[..., None]:
        def entering(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            run = self._runs[-1]
            if len(run.entered) != place:
                expected = self._chain.names[min(len(run.entered), len(self._chain) - 1)]
                raise UsageError(
                    f"parallel.pipeline: the model calls {self._chain.names[place]} where {expected} should come: a pipeline "
                    "runs models that call each block once and in order"
                )
            run.entered.append(self._now())
            hidden = arguments[0] if arguments else named.get(self._chain.hidden_name)
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(partial(self._reached, run.reached, place))  # type: ignore[no-untyped-call]

        return entering

    def _reached(self, times: dict[int, int], place: int, gradient: torch.Tensor) -> None:
        times[place] = self._now()

    def _leaving(self, block: nn.Module, arguments: Any, output: Any) -> None:
        run = self._runs[-1]
        run.left = self._now()
        hidden = output if isinstance(output, torch.Tensor) else output[0]

        def reached(gradient: torch.Tensor) -> None:
            run.backward = self._now()

        if hidden.requires_grad:
            hidden.register_hook(reached)

    def _meeting(self, name: str) -> Callable[..., None]:
        def meeting(module: nn.Module, arguments: Any) -> None:
            if name not in self._met:
                self._met.add(name)
                if self._runs[-1].entered:
                    self.behind.add(name)

        return meeting

    def costs(self) -> Costs:
        """Seconds, medians over the runs but the first."""
        rows = [self._times(run) for run in self._runs[1:]]
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        return Costs(tuple(medians[1:-1]), medians[0], medians[-1], "measured")

    def _times(self, run: _Run) -> list[float]:
        """Before the blocks, of each block, behind them; forward and backward."""
        if len(run.entered) < len(self._chain):
            missing = self._chain.names[len(run.entered)]
            raise UsageError(
                f"parallel.pipeline: the loss function ends before {missing} is called: a pipeline runs models that call each "
                "block once and in order"
            )
        marks = [run.began, *run.entered, run.left]
        forward = [later - earlier for earlier, later in pairwise(marks)]
        known = run.backward or run.ended
        back: list[int] = []
        for place in reversed(range(len(self._chain))):
            reached = run.reached.get(place, run.ended if place == 0 else known)
            back.append(max(0, reached - known))
            known = reached
        back.reverse()
        # Between the last block's end and its output's gradient lie the head's forward and backward, and the loss.
        behind = max(0, (run.backward or run.ended) - run.left)
        before = forward[0] + max(0, run.ended - known)
        blocks = [(forward[1 + place] + back[place]) / 1e9 for place in range(len(self._chain))]
        return [before / 1e9, *blocks, behind / 1e9]


def outside(model: nn.Module, chain: Chain) -> list[tuple[str, nn.Module]]:
    """Modules with parameters of their own, neither in a block nor above the blocks."""
    inside = {id(module) for block in chain.blocks for module in block.modules()}
    containers = {id(model.get_submodule(name)) for name in chain.above}
    return [
        (name, module)
        for name, module in model.named_modules()
        if id(module) not in inside
        and id(module) not in containers
        and any(parameter is not None for parameter in module._parameters.values())
    ]


# --- what more than the hidden state is needed ----------------------------------------------------------


def _leaks(
    model: nn.Module,
    chain: Chain,
    loss_fn: LossFunction,
    batch: Any,
    begins: Sequence[int],
    behind: set[str],
) -> dict[str, tuple[int, ...]]:
    """Hidden states are detached at the cuts: a parameter of another stage that still gets a gradient is needed there."""
    outputs: list[torch.Tensor] = []

    def cutting(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        key = None if arguments else chain.hidden_name
        hidden = arguments[0] if key is None else named[key]
        outputs.append(hidden)
        leaf = hidden.detach().requires_grad_()
        return ((leaf, *arguments[1:]), named) if key is None else (arguments, {**named, key: leaf})

    handles = [
        chain.blocks[begin].register_forward_pre_hook(cutting, with_kwargs=True) for begin in begins[1:]
    ]
    # What frozen parameters compute is needed as well, and only a gradient shows it.
    frozen = [each for each in model.parameters() if not each.requires_grad and each.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        outputs.append(_loss(loss_fn, model, batch))
    finally:
        for handle in handles:
            handle.remove()
    try:
        needed = _needed(outputs, _owned(model, chain, begins, behind))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    _refuse_blocks(needed, chain, len(begins))
    if needed:
        _refuse_dropout(model, chain, sorted(needed))
    return {name: tuple(sorted(stages)) for name, stages in needed.items()}


def _needed(
    outputs: Sequence[torch.Tensor], owners: Mapping[nn.Parameter, tuple[str, set[int]]]
) -> dict[str, set[int]]:
    """Name of a module → the stages beside its own whose output hangs on its parameters."""
    needed: dict[str, set[int]] = {}
    for stage, output in enumerate(outputs):
        elsewhere = [
            (parameter, module)
            for parameter, (module, stages) in owners.items()
            if stage not in stages and parameter.requires_grad
        ]
        if not elsewhere or not output.requires_grad:
            continue
        found = torch.autograd.grad(
            output.sum(), [parameter for parameter, _ in elsewhere], allow_unused=True, retain_graph=True
        )
        for gradient, (_, module) in zip(found, elsewhere, strict=True):
            if gradient is not None:
                needed.setdefault(module, set()).add(stage)
    return needed


def _owned(
    model: nn.Module, chain: Chain, begins: Sequence[int], behind: set[str]
) -> dict[nn.Parameter, tuple[str, set[int]]]:
    """Each parameter → the name of its module or block, and the stages that have it anyway."""
    last = len(begins) - 1
    owners: dict[nn.Parameter, tuple[str, set[int]]] = {}

    def own(parameter: nn.Parameter, name: str, stages: set[int]) -> None:
        owners.setdefault(parameter, (name, set()))[1].update(stages)

    for place, (name, block) in enumerate(zip(chain.names, chain.blocks, strict=True)):
        stage = sum(begin <= place for begin in begins) - 1
        for parameter in block.parameters():
            own(parameter, name, {stage})
    for name, module in outside(model, chain):
        for parameter in module.parameters(recurse=False):
            own(parameter, name, {last} if name in behind else {0})
    for name in chain.above:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            own(parameter, name, {0, last})
    return owners


def _refuse_blocks(needed: dict[str, set[int]], chain: Chain, stages: int) -> None:
    for name, needing in needed.items():
        if name in chain.names:
            stage = min(needing)
            raise UsageError(
                f"parallel.pipeline: stage {stage} of {stages} needs what {name} computes beside the hidden state, as with a "
                "skip connection, or its parameters, as with a penalty in the loss, and stages hand on the hidden state alone: cut "
                "elsewhere by parallel.split, use the optimizer's weight_decay for a penalty, or take the key out"
            )


def _refuse_dropout(model: nn.Module, chain: Chain, needed: Sequence[str]) -> None:
    """A stage that computes it again would draw other random numbers."""
    inside = {id(module) for block in chain.blocks for module in block.modules()}
    for name, module in model.named_modules():
        active = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if active and id(module) not in inside:
            raise UsageError(
                f"parallel.pipeline: several stages need what {needed[0]} computes, and {name} would drop other values on "
                f"each: set its p to 0, or take the key out"
            )
