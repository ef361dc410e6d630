"""Which micro-batches a step is run in: of a stated size, gathered to a global batch, or picked by measured memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from trine.optim.batches import Gathered, joined, pieces_of, pieces_of_size, regrouped, size_of
from trine.optim.runtime.memory_fit import (
    MARGIN,
    Line,
    bytes_of,
    capacity_bytes,
    line_through,
    measured_bytes,
    untouched,
)
from trine.optim.runtime.random_streams import random_streams, restore_random_streams
from trine.optim.techniques._assembly import Effect
from trine.record.errors import UsageError
from trine.record.events import emit

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly, Facts
    from trine.optim.techniques.accumulation import Plan

__all__ = ["FittedMicroBatches", "MicroBatches"]

logger = logging.getLogger("trine")

_MIB = 2**20
#: Measurements after the first guess, at most, before the best of those that fit is taken.
_ROUNDS = 4


class MicroBatches:
    """Cuts a step's samples into micro-batches of one size, the last with what is left."""

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self.plan = plan
        self.size = plan.micro
        self._facts = facts
        self._usual: int | None = plan.share  # samples of a whole step
        self._regroups = False

    def regroup(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The loader's batches, gathered or cut to what a rank takes a step."""
        assert self.plan.share is not None

        def batches() -> Iterator[Any]:
            self._regroups = True
            try:
                yield from regrouped(loader, self.plan.share or 1, self.plan.stated)
            finally:
                self._regroups = False

        return batches()

    def cut(self, batch: Any) -> list[Any]:
        """A step's micro-batches. Raises ``UsageError`` for a batch that is not the stated global batch's share."""
        share, size = self.plan.share, self.size
        if share is not None and not self._regroups:
            found = size_of(batch)
            if found != share:
                raise UsageError(
                    f"{self.plan.stated}, and train_step got {found}: take the batches from engine.steps(loader), which "
                    "gathers and cuts them"
                )
        if isinstance(batch, Gathered):
            if size is None:
                return list(batch.parts)
            if all((size_of(part) or 0) % size == 0 for part in batch.parts[:-1]):
                return [piece for part in batch.parts for piece in pieces_of_size(part, size)]
            batch = joined(batch.parts, self.plan.key)
        if size is None:
            return [batch]
        if not self._facts.layout.meets_over_batches:
            return pieces_of_size(batch, size, self.plan.key)
        # All must run equally many, always: as many as the largest of the first batches has.
        found = size_of(batch) or 0
        self._usual = self._usual or self._largest(found)
        if found == self._usual:
            return pieces_of_size(batch, size, self.plan.key)
        return pieces_of(batch, math.ceil(self._usual / size), f"micro-batches of {self.plan.key}")

    def _largest(self, value: int) -> int:
        """Of the ranks' values."""
        return -self._least(-value)

    def _least(self, value: int) -> int:
        """Of the ranks' values."""
        if self._facts.ranks == 1:
            return value
        held = torch.tensor(value, device=self._facts.device)
        distributed.all_reduce(held, op=distributed.ReduceOp.MIN)
        return int(held)

    def admit(self, arguments: Any) -> int:
        """Loops with their own body bring micro-batches: check that they are of the stated size, and say how large.

        Raises ``UsageError`` where they would have to be cut.
        """
        size, found = self.size, size_of(arguments)
        if found is None:
            raise UsageError(
                f"{self.plan.key}: engine(…) was called without a tensor that has samples: use engine.train_step"
            )
        if size is not None and found > size:
            raise UsageError(
                f"{self.plan.key} = {size}: engine(…) got {found} samples and cannot cut them: use engine.train_step, or "
                f"have the loader yield {size}"
            )
        return found


class FittedMicroBatches(MicroBatches):
    """Picks the largest micro-batch that fits the memory, and changes it as memory allows.

    The first step measures small micro-batches, lays a line through them, and measures what it picks before using it.
    After steps 2, 4, 8, … it looks again: larger where memory is free by then, smaller where it is not. A CUDA
    out-of-memory error before the optimizer step drops that step's gradients and runs it again in pieces half as large.
    The samples of a step are the same throughout.
    """

    def __init__(self, assembly: Assembly, plan: Plan) -> None:
        super().__init__(plan, assembly.facts)
        self._assembly = assembly
        self._points: dict[int, int] = {}  # samples → measured bytes
        self._steps = 0
        self._ceiling: int | None = None  # a size that was too large once is not tried again
        self._changing: list[torch.Tensor] = []  # buffers that a forward changes
        self.out_of_memory = 0
        self.pieces = 1

    def step(
        self,
        batch: Any,
        run: Callable[[list[Any]], torch.Tensor],
        probe: Callable[[Any], None],
        discard: Callable[[], None],
    ) -> torch.Tensor:
        """Run ``batch`` in micro-batches that fit, and return its mean loss.

        Raises ``UsageError`` when one sample alone does not fit.
        """
        if isinstance(batch, Gathered):
            batch = joined(batch.parts, self.plan.key)
        if self._steps & (self._steps - 1) == 0 and self._steps != 1:  # 0, 2, 4, 8, …
            emit("phase", name="other")
            self._pick(batch, probe)
        while True:
            pieces = self.cut(batch)
            self.pieces = len(pieces)
            before = self._remember()
            try:
                mean = run(pieces)
                break
            except torch.OutOfMemoryError as error:
                failed = str(error).partition("\n")[0]
            # Outside of the clause: the error held the frames, and with them the activations.
            discard()
            self._restore(before)
            self._shrink(failed, max(size_of(piece) or 1 for piece in pieces))
        self._steps += 1
        return mean

    # --- picking -------------------------------------------------------------------------------

    def _pick(self, batch: Any, probe: Callable[[Any], None]) -> None:
        """Choose the size. All ranks measure the same sizes in the same order, and take what fits on each of them."""
        most = self._least(size_of(batch) or 1)
        if self.size is None:
            small = max(1, min(2, most // 2))  # batch norm takes no single sample
            for samples in sorted({small, min(2 * small, most)}):
                self._measure(batch, samples, probe)
        else:
            self.size = self._least(self.size)
        capacity = self._capacity()
        chosen = self._search(batch, capacity, most, probe)
        if self.size is not None and chosen <= self.size and self._least(int(self._still_fits(capacity))):
            return
        if chosen == 0:
            raise UsageError(
                f'{self.plan.key} = "auto": one sample needs about {self._line().at(1) / _MIB:.3g} MiB and '
                f"{max(0.0, capacity) / _MIB:.3g} MiB are left: use activation checkpointing (checkpointing.mode), a lower "
                "precision (precision.dtype) or zero.stage"
            )
        self._adopt(chosen, most, capacity)

    def _still_fits(self, capacity: float) -> bool:
        """A little over the margin is no reason to change."""
        return self.size is not None and self._line().at(self.size) <= capacity / MARGIN

    def _search(self, batch: Any, capacity: float, most: int, probe: Callable[[Any], None]) -> int:
        """The largest size that was measured to fit; one below the present size needs no measurement."""
        for _ in range(_ROUNDS):
            wanted = self._least(self._wanted(capacity, most))
            if wanted == 0 or wanted in self._points:
                break
            if self.size is not None and wanted <= self.size:
                return wanted
            self._measure(batch, wanted, probe)
        fitting = [samples for samples, needed in self._points.items() if needed <= capacity]
        return self._least(max(fitting, default=0))

    def _line(self) -> Line:
        usable = [(samples, needed) for samples, needed in self._points.items() if needed < _TOO_MUCH]
        return line_through(usable) if usable else Line(0.0, float(_TOO_MUCH))

    def _wanted(self, capacity: float, most: int) -> int:
        allowed = most if self._ceiling is None else min(most, self._ceiling)
        return _balanced(self._line().largest(capacity, allowed), most)

    def _measure(self, batch: Any, samples: int, probe: Callable[[Any], None]) -> None:
        piece = pieces_of_size(batch, samples, self.plan.key)[0]
        failed = ""
        with untouched(self._assembly.model, self._held(), self._facts.device) as changed:
            try:
                needed = measured_bytes(self._facts.device, lambda: probe(piece))
            except torch.OutOfMemoryError as error:
                failed = str(error).partition("\n")[0] or "no reason given"
        known = {id(buffer) for buffer in self._changing}
        self._changing += [buffer for buffer in changed if id(buffer) not in known]
        if failed:
            if self._facts.layout.meets_in_forward:
                raise self._too_late(failed, samples)
            needed = _TOO_MUCH
            self._ceiling = max(0, min(self._ceiling or samples, samples - 1))
            if self._facts.device_type == "cuda":
                torch.cuda.empty_cache()
        self._points[samples] = needed

    def _capacity(self) -> float:
        """Bytes that a micro-batch may take, once gradients and the optimizer's state are there."""
        assembly = self._assembly
        stated = assembly.config.offload.device_bytes
        if assembly.resident_bytes is not None and stated is not None:  # some of the state lies elsewhere
            return float(stated - assembly.resident_bytes())
        states = [value for values in assembly.optimizer.state.values() for value in values.values()]
        held = self._held()
        tensors = {
            id(p): p for p in (*assembly.model.parameters(), *assembly.model.buffers(), *held)
        }.values()
        capacity = capacity_bytes(
            self._facts.device,
            self._facts.topology.ranks_per_node,
            assembly.config.offload.device_bytes,
            bytes_of([*tensors, *states]),
        )
        capacity -= bytes_of([p for p in tensors if p.requires_grad])
        elsewhere = assembly.config.offload.optimizer != "none"
        if not states and not elsewhere:  # it comes with the first update: two moments, as Adam keeps them
            capacity -= 2 * bytes_of(held)
        # Gradients that are not reduced yet are whole on every rank.
        if assembly.config.zero.stage >= 2 and self._facts.ranks > 1:
            capacity -= sum(p.numel() * p.element_size() for p in assembly.model.parameters())
        return capacity

    def _held(self) -> list[torch.Tensor]:
        return [p for group in self._assembly.optimizer.param_groups for p in group["params"]]

    def _adopt(self, chosen: int, most: int, capacity: float) -> None:
        if chosen == self.size:
            return
        before, self.size = self.size, chosen
        line = self._line()
        effect = Effect(
            self.plan.key,
            "auto" if before is None else str(before),
            f"{math.ceil(most / chosen)} micro-batches of {chosen}",
            f"measured: {line.fixed / _MIB:.3g} MiB + {line.per_sample / _MIB:.3g} MiB a sample, "
            f"{capacity / _MIB:.3g} MiB to spend",
        )
        self._assembly.effects.append(effect)
        if self._facts.rank == 0:
            logger.info("%s", effect)

    # --- running out ---------------------------------------------------------------------------

    def _remember(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        return random_streams(self._facts.device), [buffer.detach().clone() for buffer in self._changing]

    def _restore(self, before: tuple[dict[str, Any], list[torch.Tensor]]) -> None:
        streams, buffers = before
        restore_random_streams(self._facts.device, streams)
        with torch.no_grad():
            for buffer, copy in zip(self._changing, buffers, strict=True):
                buffer.copy_(copy)
        if hasattr(self._assembly.model, "require_forward_param_sync"):
            # DDP's broadcast of buffers belongs to the step's first forward, and this step had it.
            self._assembly.model.require_forward_param_sync = False  # type: ignore[assignment]

    def _shrink(self, failed: str, size: int) -> None:
        self.out_of_memory += 1
        if self._facts.layout.meets_in_forward or (self._facts.ranks > 1 and self._changing):
            raise self._too_late(failed, size)
        if size <= 1:
            raise UsageError(
                f"one sample alone does not fit ({failed}): use activation checkpointing (checkpointing.mode), a lower "
                "precision (precision.dtype) or zero.stage"
            )
        if self._facts.device_type == "cuda":
            torch.cuda.empty_cache()
        self._ceiling = size - 1
        self.size = math.ceil(size / 2)
        logger.warning(
            "out of memory with micro-batches of %d: the step is run again with %d, its samples are the same (%s)",
            size,
            self.size,
            failed,
        )

    def _too_late(self, failed: str, size: int) -> UsageError:
        """Other ranks wait inside of the forward that this one left."""
        layout = self._facts.layout
        shared = "sharded parameters" if layout.gathers else "buffers that ranks share"
        if layout.is_hybrid:
            shared = layout.hybrid_key()
        return UsageError(
            f"out of memory with micro-batches of {size} ({failed}): with {shared} the other ranks cannot be told, so start "
            f"again with accumulation.micro_batch = {max(1, size // 2)}"
        )


#: Stands for a size that did not fit at all.
_TOO_MUCH = 2**62


def _balanced(size: int, most: int) -> int:
    """The smallest size that needs no more micro-batches than ``size`` does."""
    return math.ceil(most / math.ceil(most / size)) if size else 0
