"""A stage as ``torch.distributed.pipelining`` runs it, with messages of its own.

PyTorch's ``PipelineStage`` learns the shapes of what it receives by running the model and its loss on the first
micro-batch once more, and keeps a buffer for each micro-batch of a step for ever. Here a stage tells the next one the shape
of its output once for each form of a micro-batch, through the group's store, where nothing can wait for itself; later
steps know it. Batches whose shapes change from step to step therefore cost one look-up each, and buffers live from the
message to the backward that they are for. Schedules, the split of backward and FSDP2's part are PyTorch's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from trine.optim.runtime.lost_ranks import has_failed
from trine.record.errors import TrainingError

if TYPE_CHECKING:
    from trine.optim.runtime.pipelining.stage_module import Task

__all__ = ["Form", "Forms", "Messages", "Worked"]

#: (direction F, B, I or W; stage; micro-batch; start and end by perf_counter_ns)
Worked = tuple[str, int, int, int, int]

#: Between two looks for what a stage hands on, when it has not come soon.
_PAUSE_S = 0.05

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class Form:
    """What a stage hands on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    returned: int | None  # values in the tuple that a block returns; None: a tensor

    def packed(self) -> str:
        """As text, for the store."""
        return json.dumps([list(self.shape), str(self.dtype), self.returned])

    @classmethod
    def unpacked(cls, text: str | bytes) -> Form:
        """The inverse."""
        shape, dtype, returned = json.loads(text)
        return cls(tuple(shape), _DTYPES[dtype], returned)


@dataclass(slots=True)
class Forms:
    """Forms of what a stage's border has carried, by the form of the micro-batch, and where new ones are told.

    Every rank of a pipeline is given the same micro-batches, so all number their forms alike.
    """

    prefix: str
    numbers: dict[Any, int] = field(default_factory=dict)  # form of a micro-batch → its number
    known: dict[tuple[int, int], Form] = field(default_factory=dict)  # (stage that sends, number)

    def number(self, form: Any) -> int:
        """Of a micro-batch's form, counted as they come."""
        return self.numbers.setdefault(form, len(self.numbers))

    def tell(self, stage: int, number: int, form: Form) -> None:
        """To the next stage, once. Raises ``TrainingError`` where the same micro-batch gave another before."""
        before = self.known.get((stage, number))
        if before is None:
            _store().set(self._key(stage, number), form.packed())
            self.known[stage, number] = form
        elif (before.shape, before.dtype) != (form.shape, form.dtype):
            raise TrainingError(
                f"parallel.pipeline: stage {stage} hands on {tuple(form.shape)} of {form.dtype}, and a micro-batch of the same "
                f"shapes gave {tuple(before.shape)} of {before.dtype} before: a pipeline needs hidden states whose shape "
                "follows from the batch's"
            )

    def hear(self, stage: int, number: int, rank: int) -> Form:
        """Of the stage before, which ``rank`` holds; waits where it is new. Raises ``DistError`` where that rank failed."""
        if (stage, number) not in self.known:
            store, key = _store(), self._key(stage, number)
            # Looked for again and again: a get that waits would keep this process's other threads from the store.
            end, pause = time.monotonic() + store.timeout.total_seconds(), 0.001
            while not store.check([key]):
                if time.monotonic() > end:
                    raise TrainingError(
                        f"parallel.pipeline: stage {stage} did not say what it hands on in {store.timeout}: look at the log of "
                        "the rank that has it"
                    )
                if pause >= _PAUSE_S and has_failed(rank):
                    raise distributed.DistError(f"rank {rank} failed before it said what it hands on")
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_S)
            self.known[stage, number] = Form.unpacked(store.get(key))
            store.delete_key(key)
        return self.known[stage, number]

    def tell_trained(self, stage: int, trained: bool) -> None:
        """Whether a stage has parameters that are trained; every rank tells it of its own, once."""
        _store().set(f"{self.prefix}/trained/{stage}", "1" if trained else "")

    def is_trained(self, stage: int) -> bool:
        """Of any stage."""
        return bool(_store().get(f"{self.prefix}/trained/{stage}"))

    def _key(self, stage: int, number: int) -> str:
        return f"{self.prefix}/{stage}/{number}"


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


class Messages(PipelineStage):
    """Stage ``module.index``; ``numbers`` of the forms of this step's micro-batches are set before each step."""

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        count: int,
        device: torch.device,
        group: distributed.ProcessGroup,
        task: Task,
        forms: Forms,
        worked: list[Worked] | None,
    ) -> None:
        super().__init__(module, index, count, device, group=group)
        self._task, self._forms = task, forms
        #: What was done when, where the host's clock tells; None on devices, whose work it does not time.
        self.worked = worked
        self.numbers: list[int] = []
        self._hidden: dict[int, torch.Tensor] = {}  # received, and not yet used
        self._gradients: dict[int, torch.Tensor] = {}
        #: Micro-batches whose backward was not divided, although the schedule divides it.
        self._whole: set[int] = set()

    # --- set up ------------------------------------------------------------------------------------

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> None:
        self.chunks = num_microbatches
        self._stage_meta.inputs = () if self.is_first else (None,)  # type: ignore[assignment]
        # What PyTorch looks at to see that messages go to neighbours alone.
        self.args_recv_info = {0: ()}
        self.grad_recv_info = {0: ()}
        self.act_send_info = {} if self.is_last else {0: [self.stage_index + 1]}

    def _prepare_backward_infra(self, num_microbatches: int, *others: Any, **named: Any) -> None:
        self.chunks = num_microbatches

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was inferred."""

    def clear_runtime_states(self) -> None:
        """Forget what a step that failed left."""
        super().clear_runtime_states()
        for kept in (self.bwd_cache, self.backward_state, self.dw_runner, self._hidden, self._gradients):
            kept.clear()
        self._whole.clear()

    # --- messages ----------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """The hidden state from the stage before."""
        if self.is_first:
            return []
        before = self._resolve_peer_global_rank(self.stage_index - 1)
        form = self._forms.hear(self.stage_index - 1, self.numbers[fwd_chunk_id], before)
        self._task.returned = form.returned
        buffer = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        self._hidden[fwd_chunk_id] = buffer
        return [self._operation(distributed.irecv, buffer, self.stage_index - 1)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        """The hidden state to the next stage."""
        if self.is_last:
            return []
        (hidden,), _ = self.fwd_cache[fwd_chunk_id]
        form = Form(tuple(hidden.shape), hidden.dtype, self._task.returned)
        self._forms.tell(self.stage_index, self.numbers[fwd_chunk_id], form)
        return [self._operation(distributed.isend, hidden.detach(), self.stage_index + 1)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """The gradient of what this stage handed on; it has that form."""
        if self.is_last or not self.has_backward:
            return []
        form = self._forms.known[self.stage_index, self.numbers[bwd_chunk_id]]
        buffer = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        self._gradients[bwd_chunk_id] = buffer
        return [self._operation(distributed.irecv, buffer, self.stage_index + 1)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        """The gradient of what was received."""
        if self.is_first or not self.has_backward:
            return []
        (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
        if gradient is None:  # the loss does not depend on it
            self._task.unused[self.stage_index] += 1
            form = self._forms.known[self.stage_index - 1, self.numbers[bwd_chunk_id]]
            gradient = torch.zeros(form.shape, dtype=form.dtype, device=self.device)
        return [self._operation(distributed.isend, gradient.contiguous(), self.stage_index - 1)]

    def _operation(self, kind: Callable[..., Any], tensor: torch.Tensor, stage: int) -> distributed.P2POp:
        return distributed.P2POp(kind, tensor, self._resolve_peer_global_rank(stage), self.group)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """From a stage of the same rank."""
        self._hidden[mb_index] = prev_stage_outputs.detach()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """From a stage of the same rank."""
        (gradient,) = next_stage_bwd_outputs
        if gradient is None:  # the loss does not depend on it
            self._task.unused[self.stage_index + 1] += 1
            gradient = torch.zeros_like(self.fwd_cache[mb_index][0][0])
        self._gradients[mb_index] = gradient

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        hidden = self._hidden.pop(fwd_chunk_id)
        return (hidden.requires_grad_(self.has_backward and torch.is_grad_enabled()),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        return (self._gradients.pop(bwd_chunk_id),)

    # --- work --------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> torch.Tensor:
        """Forward of one micro-batch. Errors of the program's stay as they are."""
        began = time.perf_counter_ns()
        received = () if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        output: torch.Tensor = self.submod(*received, position=fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = ((output,), list(received))
        self._note("F", fwd_chunk_id, began)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of one micro-batch, of all or of the input alone."""
        began = time.perf_counter_ns()
        direction = "B" if full_backward else "I"
        if not full_backward and not self.is_first:
            (output,), (hidden,) = self.fwd_cache[bwd_chunk_id]
            if output.requires_grad and not reaches(output, hidden):
                # PyTorch finds the parameters behind a gradient of the input; here there is none, and they would get none.
                self._whole.add(bwd_chunk_id)
                full_backward = True
        with self._guarded(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._note(direction, bwd_chunk_id, began)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The rest of a backward that was of the input alone."""
        began = time.perf_counter_ns()
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
        else:
            with self._guarded(bwd_chunk_id):
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._note("W", bwd_chunk_id, began)

    def _guarded(self, index: int) -> AbstractContextManager[None]:
        guard = self._task.guards.get(index) if self.is_last else None
        return nullcontext() if guard is None else guard()

    def _note(self, direction: str, index: int, began: int) -> None:
        if self.worked is not None:
            self.worked.append((direction, self.stage_index, index, began, time.perf_counter_ns()))


def reaches(output: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether a gradient of ``output`` comes to ``leaf``, by the autograd graph. Both require gradients."""
    wanted = get_gradient_edge(leaf).node
    seen = {get_gradient_edge(output).node}
    left = list(seen)
    while left:
        node = left.pop()
        if node is wanted:
            return True
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        left += following
    return False
