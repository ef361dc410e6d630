"""What techniques work on: the live model and optimizer, and what is known about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trine.optim.layout import Layout
from trine.optim.topology import Topology

if TYPE_CHECKING:
    import torch

    from trine.optim.config import Config
    from trine.optim.engine import Engine
    from trine.optim.runtime.exchange import Reduction
    from trine.optim.runtime.exchange.thread import CommunicationThread
    from trine.optim.runtime.paths import Paths

__all__ = [
    "Assembly",
    "Deferred",
    "Effect",
    "Facts",
    "Fitting",
    "Pipelined",
    "Reordered",
    "Scaler",
    "Stateful",
    "since_last",
]


@dataclass(frozen=True, slots=True)
class Facts:
    """Where the model runs, taken from the model and the process group before anything changes."""

    device: torch.device
    topology: Topology
    layout: Layout  # what the configuration makes of the ranks
    backend: str | None  # of the default process group; None without one
    model: torch.nn.Module  # as it was given
    optimizer: torch.optim.Optimizer
    #: ``loss_fn(model, batch)``, and a batch like those to come, where the program gave them.
    loss_fn: Callable[[Any, Any], Any] | None = None
    example: Any = None

    @property
    def device_type(self) -> str:
        """``cpu``, ``cuda``, ..."""
        return self.device.type

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self.topology.ranks

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.topology.rank


@dataclass(frozen=True, slots=True)
class Effect:
    """What a technique changed, in words that a log line and a report can carry."""

    key: str
    before: str
    after: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.before} → {self.after}" + (f" ({self.note})" if self.note else "")


class Stateful(Protocol):
    """What a checkpoint must hold besides model and optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings in dictionaries."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back, on the same rank."""


@dataclass(frozen=True, slots=True)
class Reordered:
    """A parameter that stands in another order than in the model that was given, as a fused qkv projection whose heads are
    spread over tensor ranks. Checkpoints hold it, and its optimizer state, in the order that was given.

    ``blocks`` are (first row here, first row there, rows), along ``dimension``, in the coordinates of whole tensors: of the
    DTensor's global shape, however it is sharded beside that. Together they are all rows, once.
    """

    dimension: int
    blocks: tuple[tuple[int, int, int], ...]


class Scaler(Stateful, Protocol):
    """Scales losses so that small gradients survive a low-precision backward."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on."""

    def unscale(self, gradients: list[torch.Tensor]) -> bool:
        """Divide in place, before clipping; whether all are finite, agreed by all ranks."""

    def update(self, was_finite: bool) -> None:
        """After each step, taken or skipped."""


class Fitting(Protocol):
    """Runs a step in micro-batches whose size it picks."""

    def step(
        self,
        batch: Any,
        run: Callable[[list[Any]], torch.Tensor],
        probe: Callable[[Any], None],
        discard: Callable[[], None],
    ) -> torch.Tensor:
        """The mean loss that ``run(micro-batches)`` returns.

        ``probe(micro-batch)`` is forward and backward alone, to be measured; ``discard()`` forgets the gradients of a
        ``run`` that failed before the optimizer step.
        """


class Pipelined(Protocol):
    """Runs forward and backward of a step's micro-batches over the stages of a pipeline."""

    #: The rank, of all, that computes the loss.
    last_rank: int

    def run(self, pieces: list[Any], losses: Callable[[Any, Any, int], torch.Tensor]) -> None:
        """All micro-batches, forward and backward; gradients are left where they belong.

        ``losses(model, piece, position)`` calls the program's loss function with ``model`` in the place of the whole one,
        and returns the 0-dimensional tensor to call backward on.
        """

    def evaluate(self, pieces: list[Any], losses: Callable[[Any, Any, int], torch.Tensor]) -> None:
        """Forward alone, without gradients."""

    def guard(self, position: int, guard: Callable[[], AbstractContextManager[None]]) -> None:
        """From within ``losses``: the backward of this micro-batch's loss is to run in what ``guard`` makes."""

    def backward_after(self, work: tuple[int, int]) -> tuple[int, int] | None:
        """(stage, micro-batch) whose backward comes after that of ``work`` on this rank."""


class Deferred(Protocol):
    """Averages gradients in the background and gives them back one step later."""

    def exchange(self, weight: Any) -> Any | None:
        """Take this step's summed gradients of this weight away, and put the step before's in place.

        Returns the mean over ranks of that step's weights, and leaves the mean over ranks of its sums in the gradients;
        ``None`` where there was no such step.
        """

    def flush(self) -> Any | None:
        """The same with none to take away: the last step's, once."""


@dataclass(slots=True)
class Assembly:
    """The run under construction. Techniques replace or extend its parts in their order.

    One step runs, in this order: ``cut`` the batch; for each micro-batch ``synchronise(last?)``, ``contexts`` around
    forward and loss, backward of the scaled loss; then once ``collect``, dividing by the summed weights, ``exchange``,
    unscaling, ``inspect``, clipping, ``optimizer.step()``, ``after_update(stepped?)``, ``zero_grad``.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    config: Config
    facts: Facts
    #: Name, as in the model that was given → the parameter that the optimizer holds for it (a shard, a master copy, or
    #: itself). :func:`trine.optim.runtime.adoption.replace_parameters` keeps it.
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    #: Name → the order that the model which was given has it in, where that is another.
    reordered: dict[str, Reordered] = field(default_factory=dict)
    #: Every name in the model that was given, of parameters and buffers → the first name of the same tensor: tied ones
    #: have several, and a part of the model may know only the others.
    first_names: dict[str, str] = field(default_factory=dict)
    #: Entered around every forward, the loss included.
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    #: Entered around every backward.
    backward_contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    #: Applied to the loader by ``engine.steps``, in order.
    loaders: list[Callable[[Iterable[Any]], Iterable[Any]]] = field(default_factory=list)
    #: Micro-batches of a step, for loops with a body of their own.
    accumulation: int = 1
    #: A batch → its micro-batches; ``None`` cuts into ``accumulation`` equal pieces.
    cut: Callable[[Any], list[Any]] | None = None
    #: A micro-batch → what of it this rank computes on, where ranks share samples.
    part: Callable[[Any], Any] | None = None
    #: Told of losses that came without a token count; raises where that matters.
    uncounted: Callable[[], None] | None = None
    #: Run once, with the loss function and the first batch, before the first step; raise where they cannot be used.
    rehearsals: list[Callable[[Callable[[Any, Any], Any], Any], None]] = field(default_factory=list)
    #: Whether ``train_step`` runs the steps (there is a ``loss_fn``), so that batches can be cut and gathered.
    whole_steps: bool = False
    #: Sees what ``engine(...)`` is called with while gradients are on; raises where only ``train_step`` can do it.
    admit: Callable[[Any], None] | None = None
    #: Runs each step of ``train_step``, in place of one pass over ``cut``'s micro-batches.
    fitting: Fitting | None = None
    #: Runs forward and backward over the stages of a pipeline, in place of the engine's own loop over micro-batches.
    pipeline: Pipelined | None = None
    #: The modules that data parallelism wraps, one a local stage of a pipeline; empty: the model.
    parts: list[torch.nn.Module] = field(default_factory=list)
    #: Names of parameters that stand on another rank too and are counted there, as a head tied to an embedding.
    duplicates: set[str] = field(default_factory=set)
    #: Modules whose parameters are spread over a dimension of data parallelism: they average over the others alone.
    spread: dict[torch.nn.Module, str] = field(default_factory=dict)
    #: Whether all ranks were given the parameters of rank 0.
    started_alike: bool = False
    #: After ``collect``: swaps this step's gradients for those of the step before.
    deferred: Deferred | None = None
    #: Takes whether the next backward synchronises gradients.
    synchronise: Callable[[bool], None] | None = None
    scaler: Scaler | None = None
    #: After the last backward: move gradients to the parameters that the optimizer holds.
    collect: list[Callable[[], None]] = field(default_factory=list)
    #: After normalising: what else happens to gradients before clipping; false where this step has none to apply yet.
    exchange: list[Callable[[], bool]] = field(default_factory=list)
    #: Sees the gradients that the update will use, unscaled and not yet clipped; changes nothing.
    inspect: list[Callable[[], None]] = field(default_factory=list)
    #: After the update, taken (true) or skipped.
    after_update: list[Callable[[bool], None]] = field(default_factory=list)
    #: Forget gradients that lie where ``zero_grad`` does not reach, when a step is given up.
    discard: list[Callable[[], None]] = field(default_factory=list)
    #: After each step has ended; the place for what measures first and changes later.
    after_step: list[Callable[[], None]] = field(default_factory=list)
    #: How a flat bucket of gradients becomes its mean over the replicas; ``None``: the backend's all-reduce.
    reduction: Reduction | None = None
    #: What DDP averages over where it is not the default group: one with hints of its own.
    process_group: torch.distributed.ProcessGroup | None = None
    #: Runs ``reduction``; :func:`trine.optim.runtime.exchange.thread.thread_of` makes it when first needed.
    communication: CommunicationThread | None = None
    #: Compares the modules that this rank calls with those of the others; set when all techniques have been applied.
    paths: Paths | None = None
    #: Makes the engine, where another runs the steps than this package's own.
    engine: Callable[..., Engine] | None = None
    #: As ``trine.optimize`` was given it, for those that clip by themselves.
    clip_norm: float | None = None
    #: Run once, when every technique has been applied.
    finish: list[Callable[[Assembly], None]] = field(default_factory=list)
    #: Name → state that a checkpoint must hold. Where other ranks go on than those that saved, one that has
    #: ``load_resharded(states, rank, ranks)`` is given the states of all that saved; others start anew, and that is said.
    state: dict[str, Stateful] = field(default_factory=dict)
    #: Called before parameters and optimizer state are read or written from outside, by a checkpoint, between steps: waits
    #: for what is being written to slower memory, and raises ``TrainingError`` where that is damaged.
    settle: list[Callable[[], None]] = field(default_factory=list)
    #: Called when a checkpoint has filled parameters and optimizer state: what is there now is what is right.
    filled: list[Callable[[], None]] = field(default_factory=list)
    #: (what the optimizer holds, key) → the tensor that this state is to be read into, where it does not lie beside the
    #: parameter: in the host's memory, or over a file. ``optimizer.state`` gets it; this rank's part where it is sharded.
    home_of: Callable[[torch.Tensor, str], torch.Tensor | None] | None = None
    #: Bytes of parameters, gradients and optimizer state on the device while it trains, as planned, where some of them lie
    #: elsewhere.
    resident_bytes: Callable[[], int] | None = None
    #: Name → its value in the step that ends; read at the end of each step, told as ``metric`` events.
    metrics: dict[str, Callable[[], float | None]] = field(default_factory=dict)
    #: Stop threads, remove files; called by ``engine.close`` and when the process ends.
    closers: list[Callable[[], None]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    @property
    def stages(self) -> list[torch.nn.Module]:
        """The modules that data parallelism wraps: the model, or with a pipeline one module a local stage."""
        return self.parts or [self.model]


def since_last(total: Callable[[], int]) -> Callable[[], float]:
    """For :attr:`Assembly.metrics`: what a count has grown by since the last reading."""
    before = 0

    def read() -> float:
        nonlocal before
        now = total()
        grown, before = now - before, now
        return float(grown)

    return read
