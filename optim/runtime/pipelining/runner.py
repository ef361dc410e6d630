"""Runs a step's micro-batches over the stages of this rank, by a schedule of ``torch.distributed.pipelining``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.pipelining.schedules import get_schedule_class

from trine.optim.batches import Divisible, Gathered
from trine.optim.runtime.lost_ranks import announce
from trine.optim.runtime.pipelining.messages import Forms, Messages, Worked
from trine.optim.runtime.pipelining.schedules import Schedule, ideal_bubble, orders_of
from trine.optim.runtime.pipelining.split import rank_of_stage
from trine.record.errors import TrainingError, UsageError
from trine.record.events import emit, is_heard

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from trine.optim.runtime.pipelining.stage_module import Stage, Task

__all__ = ["Runner"]

#: As the record's table has them.
_DIRECTIONS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}

_made = 0  # runners, counted alike on all ranks: their messages are kept apart


class Runner:
    """The stages of one rank of a pipeline. ``backward_contexts`` are entered round each step."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        group: distributed.ProcessGroup,
        device: torch.device,
        task: Task,
        backward_contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
    ) -> None:
        global _made
        _made += 1
        self._modules, self._schedule, self._group, self._device = list(stages), schedule, group, device
        self._task, self._contexts = task, backward_contexts
        self._ranks = distributed.get_world_size(group)
        self._count = stages[0].count
        last = rank_of_stage(self._count - 1, self._ranks, schedule.turned)
        #: The rank, of all, that computes the loss.
        self.last_rank = distributed.get_global_rank(group, last)
        #: What this rank did in the step that ran last; empty on devices, whose work the host's clock does not time.
        self.worked: list[Worked] = []
        self._forms = Forms(f"trine/pipeline/{_made}/{group.group_name}")
        self._messages: list[Messages] = []
        self._schedules: dict[int, Any] = {}
        self._began = self._ended = 0
        #: Of the step that ran last.
        self.microbatches = 0

    def run(self, pieces: list[Any], losses: Callable[[Any, Any, int], torch.Tensor]) -> None:
        """All micro-batches, forward and backward. Raises ``UsageError`` for a number that the schedule cannot run."""
        chunks = len(self._modules)
        problem = self._schedule.problem(self._ranks, chunks, len(pieces))
        if problem:
            raise UsageError(f"parallel.pipeline: a step of {len(pieces)} micro-batches: {problem}")
        self._prepare(pieces, losses)
        schedule = self._scheduled(len(pieces))
        for stage in self._messages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self._began = time.perf_counter_ns()
        try:
            with ExitStack() as stack:
                stack.enter_context(_quiet())
                for context in self._contexts:
                    stack.enter_context(context())
                schedule._step_microbatches(
                    kwarg_mbs=[{}] * len(pieces), target_mbs=[None] * len(pieces), return_outputs=False
                )
            self._require_used(len(pieces))
        except BaseException as error:  # the other stages wait for this one's messages
            announce(error, distributed.get_rank())
            raise
        finally:
            schedule._internal_losses.clear()
            self._finish()

    def evaluate(self, pieces: list[Any], losses: Callable[[Any, Any, int], torch.Tensor]) -> None:
        """Forward alone, without gradients: stage after stage, each over all micro-batches."""
        self._prepare(pieces, losses)
        sent: list[Any] = []
        local = {stage.stage_index: stage for stage in self._messages}
        try:
            with torch.no_grad():
                for stage in self._messages:
                    stage.has_backward = False
                    stage.clear_runtime_states()
                for stage in self._messages:
                    held: list[int] = []
                    for index in range(len(pieces)):
                        self._forward(stage, index, local, sent, held)
                    for index in held:
                        self._send(stage, index, sent)
            for work in sent:
                work.wait()
        except BaseException as error:
            announce(error, distributed.get_rank())
            raise
        finally:
            for stage in self._messages:
                stage.clear_runtime_states()
            self._finish()

    def _forward(
        self, stage: Messages, index: int, local: Mapping[int, Messages], sent: list[Any], held: list[int]
    ) -> None:
        if stage.stage_index - 1 not in local:
            for work in _begun(stage.get_fwd_recv_ops(index)):
                work.wait()
        output = stage.forward_one_chunk(index)
        following = local.get(stage.stage_index + 1)
        if following is not None:
            following.set_local_fwd_input(output, index)
            stage.fwd_cache.pop(index)
        elif self._group.rank() == self._ranks - 1 and not self._schedule.turned:
            # Back to the first rank, which takes them when it has sent all of its own. NCCL runs the messages of two ranks
            # in the order in which each asks for them, and a send waits for its receive: every message must be received
            # before the first goes back.
            held.append(index)
        else:
            self._send(stage, index, sent)

    def _send(self, stage: Messages, index: int, sent: list[Any]) -> None:
        sent += _begun(stage.get_fwd_send_ops(index))
        stage.fwd_cache.pop(index)

    def guard(self, position: int, guard: Callable[[], AbstractContextManager[None]]) -> None:
        """Let the last stage's backward of this micro-batch run in what ``guard`` makes."""
        self._task.guards[position] = guard

    def backward_after(self, work: tuple[int, int]) -> tuple[int, int] | None:
        """(stage, micro-batch) whose backward comes after that of ``work`` on this rank."""
        order = orders_of(self._schedule, self._ranks, len(self._modules), self.microbatches)
        backwards = [(stage, index) for kind, stage, index in order[self._group.rank()] if kind in "BI"]
        place = backwards.index(work) + 1 if work in backwards else len(backwards)
        return backwards[place] if place < len(backwards) else None

    # --- what is measured --------------------------------------------------------------------------

    def settled(self) -> None:
        """Every rank of the pipeline has come to the end of the step: its time is known, and what was done is told."""
        self._ended = time.perf_counter_ns()
        if self.worked and is_heard():
            emit("microbatches", rows=[(_DIRECTIONS[kind], *rest) for kind, *rest in self.worked])

    def bubble(self) -> float | None:
        """The part of the last step in which this rank computed nothing, from its start to the last rank's end."""
        if not self.worked or self._ended <= self._began:
            return None
        busy = sum(end - begin for _, _, _, begin, end in self.worked)
        return 1.0 - busy / (self._ended - self._began)

    def ideal(self) -> float | None:
        """What the schedule leaves at best with these times of forward and backward, if all stages were alike."""
        if not self.microbatches:
            return None
        return ideal_bubble(self._schedule, self._ranks, len(self._modules), self.microbatches)

    # --- parts -------------------------------------------------------------------------------------

    def _prepare(self, pieces: list[Any], losses: Callable[[Any, Any, int], torch.Tensor]) -> None:
        if not self._messages:  # now that data parallelism has wrapped the stages
            worked = self.worked if self._device.type == "cpu" else None
            for module in self._modules:
                stage = Messages(
                    module,
                    module.index,
                    module.count,
                    self._device,
                    self._group,
                    self._task,
                    self._forms,
                    worked,
                )
                stage.stage_index_to_group_rank = {
                    index: rank_of_stage(index, self._ranks, self._schedule.turned)
                    for index in range(self._count)
                }
                self._messages.append(stage)
                trained = any(parameter.requires_grad for parameter in module.parameters())
                self._forms.tell_trained(module.index, trained)
        self._task.pieces, self._task.losses = pieces, losses
        self.worked.clear()
        self.microbatches = len(pieces)
        numbers = [self._forms.number((form_of(piece), module_modes(self._modules))) for piece in pieces]
        for stage in self._messages:
            stage.numbers = numbers

    def _require_used(self, microbatches: int) -> None:
        """Raise ``TrainingError`` where the loss depends on nothing that stages before, which are trained, handed on.

        One process would leave their gradients out; a pipeline sends zeros, with which weight decay and momentum would move
        the parameters all the same.
        """
        for stage, times in self._task.unused.items():
            if times == microbatches and any(self._forms.is_trained(before) for before in range(stage)):
                raise TrainingError(
                    f"parallel.pipeline: the loss depends on nothing that stage {stage} was handed (a detach(), no_grad() or an "
                    "output that is not used), and stages before it are trained: freeze them (requires_grad_(False)), or "
                    "take parallel.pipeline out"
                )

    def _finish(self) -> None:
        self._task.pieces, self._task.losses = [], None
        self._task.guards.clear()
        self._task.unused.clear()

    def _scheduled(self, microbatches: int) -> Any:
        """PyTorch's schedule for so many; made once."""
        if microbatches not in self._schedules:
            kind: Any = get_schedule_class(self._schedule.name)
            stages = self._messages if self._schedule.several else self._messages[0]
            self._schedules[microbatches] = kind(
                stages, microbatches, loss_fn=_output_itself, scale_grads=False
            )
        return self._schedules[microbatches]


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs the whole schedule beside each error that it passes on."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _output_itself(output: torch.Tensor, target: Any) -> torch.Tensor:
    """The last stage returns the loss: the program's loss function is called in it."""
    return output


def _begun(operations: list[distributed.P2POp]) -> list[Any]:
    return [operation.op(operation.tensor, operation.peer, group=operation.group) for operation in operations]


def module_modes(stages: Sequence[Stage]) -> tuple[bool, bool]:
    """What else may change the form of hidden states: training, and whether gradients are on."""
    return stages[0].training, torch.is_grad_enabled()


def form_of(piece: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of a micro-batch's tensors, which decide those of every hidden state."""
    found: list[Any] = []

    def visit(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append((tuple(value.shape), value.dtype))
        elif isinstance(value, Divisible):
            value.rebuilt(visit)
        elif isinstance(value, Gathered):
            visit(value.parts)
        elif isinstance(value, Mapping):
            for each in value.values():
                visit(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                visit(each)
        return value

    visit(piece)
    return tuple(found)
