"""What an engine does under a layout: whose batch a rank is given, steps over a pipeline's stages, evaluations."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from trine.optim._inputs import require_count, require_loss, weighed
from trine.optim._override import current_override
from trine.optim.batches import Divisible, pieces_of, size_of, tensors_of, to_device
from trine.optim.layout import layout_of
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

    from trine.optim.config import Config
    from trine.optim.layout import Layout
    from trine.optim.runtime.update import Update
    from trine.optim.techniques import Assembly, Facts

__all__ = ["Staged", "evaluating"]

#: Of a tensor, what two ranks' copies are compared by.
_READ_BYTES = 1 << 20


class Staged:
    """The part of an engine that knows of layouts."""

    config: Config
    _assembly: Assembly
    _facts: Facts
    _loss_fn: Callable[[Any, Any], Any] | None
    _update: Update
    _contexts: Callable[[], AbstractContextManager[Any]]
    _same_batches: bool

    @property
    def layout(self) -> Layout:
        """The degree of each kind of parallelism, and this rank's place."""
        return self._facts.layout

    @property
    def data_ranks(self) -> int:
        """How many different batches a step has: what a sampler divides the data by (``num_replicas``)."""
        return self._shares.data_ranks

    @property
    def data_rank(self) -> int:
        """Which of them this rank takes (a sampler's ``rank``). Ranks of one pipeline or tensor group share theirs."""
        return self._shares.data_rank

    @property
    def _shares(self) -> Layout:
        """The layout that data are divided by; `trine verify` gives its plain run the samples of the other."""
        override = current_override()
        if override is None:
            return self._facts.layout
        return layout_of(self.config, self._facts.rank, self._facts.ranks)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Mean loss of a batch without gradients, in evaluation mode; also over a pipeline, where all its ranks call it.

        Dropout is off while it runs; the modes of modules are put back. Raises ``UsageError`` without a ``loss_fn``.
        """
        import torch

        if self._loss_fn is None:
            raise UsageError("engine.evaluate needs loss_fn: pass loss_fn=… to trine.optimize")
        self._require_same_batch(batch)
        assembly = self._assembly
        tally = _Tally(self)
        with torch.no_grad(), evaluating(assembly.model):
            pieces = self._pieces(to_device(batch, self._facts.device))
            tally.expect(pieces)
            if assembly.pipeline is not None:
                assembly.pipeline.evaluate(pieces, tally.loss)
                return tally.shared(assembly.pipeline.last_rank)
            for position, piece in enumerate(pieces):
                tally.loss(assembly.model, piece, position)
            return tally.mean()

    def _pieces(self, batch: Any) -> list[Any]:
        assembly = self._assembly
        return pieces_of(batch, assembly.accumulation) if assembly.cut is None else assembly.cut(batch)

    def _run_stages(self, pieces: list[Any]) -> None:
        """Forward and backward of all micro-batches over the pipeline; every rank then knows loss and weights."""
        from trine.optim.runtime.meshes import group_of

        pipeline = self._assembly.pipeline
        assert pipeline is not None
        samples = [float(size_of(piece) or 1) for piece in pieces]
        whole = sum(samples) if len(pieces) > 1 else samples[0]

        def losses(model: Any, piece: Any, position: int) -> torch.Tensor:
            result = self._call(model, piece)
            loss, weight, counted = self._weighed(result, piece, samples[position] / whole, len(pieces))
            scaled, guard = self._update.weigh(loss, weight, counted)
            if guard is not None:
                pipeline.guard(position, guard)
            return scaled

        pipeline.run(pieces, losses)
        group = group_of(self._facts, "pipeline")
        assert group is not None
        self._update.share(pipeline.last_rank, group)

    def _call(self, model: Any, piece: Any) -> Any:
        """What the program's loss function returns of a micro-batch."""
        assert self._loss_fn is not None
        piece = to_device(piece, self._facts.device)
        if self._assembly.part is not None:
            piece = self._assembly.part(piece)
        with self._contexts():
            return self._loss_fn(model, piece)

    def _weighed(self, result: Any, piece: Any, share: float, pieces: int) -> tuple[torch.Tensor, Any, bool]:
        """Loss, weight and whether that is a count of tokens; ``share`` of the samples where none is given."""
        if pieces > 1 and isinstance(piece, Divisible) and not isinstance(result, tuple):
            raise UsageError(
                "data.packing with micro-batches: they hold different numbers of tokens, and the mean of their means is "
                "another loss: have loss_fn return (mean loss, token count)"
            )
        loss, weight, counted = weighed(result, share, piece)
        require_loss(loss)
        if counted:
            require_count(weight)
        elif self._assembly.uncounted is not None:
            self._assembly.uncounted()
        return loss, weight, counted

    def _rehearse(self, batch: Any) -> None:
        """What must be tried with the program's own loss function, before the first step."""
        assert self._loss_fn is not None
        rehearsals, self._assembly.rehearsals = self._assembly.rehearsals, []
        for rehearsal in rehearsals:
            rehearsal(self._loss_fn, batch)

    def _refuse_under_pipeline(self, call: str) -> None:
        if self._assembly.pipeline is not None:
            raise UsageError(
                f"{call} runs the whole model, and parallel.pipeline has its stages on several ranks: use "
                "engine.train_step(batch) with loss_fn=…, and engine.evaluate(batch) for evaluations"
            )

    def _require_same_batch(self, batch: Any) -> None:
        """Ranks of one pipeline, tensor or context group are given the same batch: looked at once, in the first step.

        Raises ``UsageError`` on all ranks at once.
        """
        layout = self._facts.layout
        if self._same_batches or layout.size("pipeline", "context", "tensor") == 1:
            return
        from torch import distributed

        found: list[Any] = [None] * layout.ranks
        distributed.all_gather_object(found, (layout.data_rank, _fingerprint(batch)))
        first: dict[int, tuple[int, Any]] = {}
        for rank, (place, seen) in enumerate(found):
            other, expected = first.setdefault(place, (rank, seen))
            if seen != expected:
                raise UsageError(
                    f"ranks {other} and {rank} are given different batches, and {layout.hybrid_key()} has them share theirs: "
                    "sample with engine.data_rank and engine.data_ranks (or trine.layout_of), not with rank and world size"
                )
        self._same_batches = True


class _Tally:
    """The mean of an evaluation's losses."""

    def __init__(self, engine: Staged) -> None:
        self._engine = engine
        self._samples: list[float] = []
        self._summed: Any = 0.0
        self._weight: Any = 0.0

    def expect(self, pieces: list[Any]) -> None:
        """What samples are weighed by."""
        self._samples = [float(size_of(piece) or 1) for piece in pieces]

    def loss(self, model: Any, piece: Any, position: int) -> torch.Tensor:
        """Count one in."""
        engine = self._engine
        result = engine._call(model, piece)
        loss, weight, _ = engine._weighed(result, piece, self._samples[position], len(self._samples))
        self._summed = self._summed + loss.detach() * weight
        self._weight = self._weight + weight
        return loss

    def mean(self) -> torch.Tensor:
        """Over the ranks that share the sequences; NaN where nothing was counted."""
        facts = self._engine._facts
        if facts.layout.context > 1:
            from torch import distributed

            from trine.optim.runtime.meshes import group_of

            value = self._value()
            distributed.all_reduce(value, group=group_of(facts, "context"))
            return value[0] / value[1]
        mean: torch.Tensor = self._summed / self._weight
        return mean

    def _value(self) -> torch.Tensor:
        """(weight × loss, weight) as ranks exchange them."""
        import torch

        facts = self._engine._facts
        wide = torch.float32 if facts.device_type == "mps" else torch.float64
        value = torch.zeros(2, dtype=wide, device=facts.device)
        value[0], value[1] = self._summed, self._weight
        return value

    def shared(self, source: int) -> torch.Tensor:
        """The mean that the last stage knows, on all ranks of the pipeline."""
        from torch import distributed

        from trine.optim.runtime.meshes import group_of

        value = self._value()
        distributed.broadcast(value, source, group=group_of(self._engine._facts, "pipeline"))
        return value[0] / value[1]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; afterwards each as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _fingerprint(batch: Any) -> list[tuple[Any, ...]]:
    """Shape, type and a checksum of the first mebibyte of each tensor."""
    import torch

    found: list[tuple[Any, ...]] = []
    for tensor in tensors_of(batch):
        flat = tensor.detach().reshape(-1)[: _READ_BYTES // max(tensor.element_size(), 1)].cpu().contiguous()
        read = zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
        found.append((tuple(tensor.shape), str(tensor.dtype), read))
    return found
