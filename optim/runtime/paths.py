"""Ranks that run different modules: found before their collectives meet, and named.

Sharded modules gather their parameters when they are called, so ranks must call the same ones in the same order. Where
one skips a block that others run (stochastic depth drawn from a rank's own seed, a branch on the data), FSDP2 gathers
one block's shards into another's, silently where sizes agree, or waits for ever; DistributedDataParallel waits for
gradients that do not come.

No message is sent while ranks do as they did before. Each rank compares its path with its own of the forward before,
module by module, which costs a microsecond each. Were the ranks alike then and are they apart now, at least one of them
has left its path: it stops there, before the module's collective, and asks the others through the group's store
(:mod:`trine.optim.runtime.path_store`). All that left it alike go on; else every rank raises ``TrainingError``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trine.optim.layout import IN_MODULES
from trine.optim.runtime.adoption import plain_name
from trine.optim.runtime.lost_ranks import is_of_a_group
from trine.optim.runtime.path_store import END, PathStore, Place
from trine.optim.runtime.shard_units import sharded_units
from trine.record.errors import TrainingError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Paths", "watch_paths"]

logger = logging.getLogger("trine")

#: Forwards that a rank remembers for others that are behind: on a device the host runs ahead.
_REMEMBERED = 64


def watch_paths(assembly: Assembly) -> None:
    """Hook the modules whose calls must be the same on all ranks, where there are any."""
    facts = assembly.facts
    if facts.ranks == 1 or facts.backend in (None, "fake"):
        return
    ordered = not isinstance(assembly.model, DistributedDataParallel)
    units = _ordered_units(assembly) if ordered else _replicated_units(assembly)
    peers = _peers(assembly)
    if not units or len(peers) < 2:
        return
    names = list(dict.fromkeys(units.values()))
    paths = Paths(names, ordered, facts.rank, peers, facts.layout.replicate > 1)
    if not ordered:
        paths.synchronises = lambda: bool(getattr(assembly.model, "require_backward_grad_sync", True))
    places = {name: place for place, name in enumerate(names)}
    handles = [
        module.register_forward_pre_hook(_entering(paths, places[name], assembly), prepend=True)
        for module, name in units.items()
    ]
    assembly.contexts.insert(0, paths.forward)
    if assembly.pipeline is not None:
        assembly.pipeline = _Watched(assembly.pipeline, paths)
    assembly.after_update.append(paths.after_update)
    assembly.paths = paths
    assembly.closers.append(lambda: _stop(paths, handles))


class Paths:
    """One rank's way through the model, forward by forward."""

    def __init__(
        self, names: list[str], ordered: bool, rank: int, peers: list[int], has_replicas: bool = False
    ) -> None:
        self._names = names
        self._has_replicas = has_replicas
        self._ordered = ordered
        self._rank = rank
        #: Whether the next backward exchanges gradients: where it does not, replicas may use what they like.
        self.synchronises: Callable[[], bool] = lambda: True
        self._open = 0
        self._muted = False  # nothing of this forward is compared
        self._now: list[int] = []
        self._known: list[int] | None = None
        self._cursor = 0
        self._kind = ""
        self._before: dict[str, list[int]] = {}  # kind → the path of the forward before
        self._forward = 0
        self._step = 0
        self._remembered: OrderedDict[int, tuple[str, list[int]]] = OrderedDict()
        #: Grows as the rank goes on; a watcher tells by it whether the rank is stuck.
        self.progress = 0
        #: Between the begin of a forward and the update.
        self.busy = False
        self._store = PathStore(self, rank, peers)

    # --- where this rank is --------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward, the loss included."""
        self._open += 1
        try:
            if self._open == 1:
                self._begin("training" if torch.is_grad_enabled() else "evaluation")
            yield
            if self._open == 1:
                self._end()
        finally:
            self._open -= 1

    def enter(self, unit: int) -> None:
        """A module is about to run."""
        if not self._open or self._muted or torch._C._current_graph_task_id() != -1:
            return  # the last: recomputed in backward, whose order follows the forward's
        self.progress += 1
        self._now.append(unit)
        known = self._known
        if not self._ordered or known is None:
            return
        if self._cursor < len(known) and known[self._cursor] == unit:
            self._cursor += 1
            return
        self._ask()
        # All ranks are here alike, so they go on from the same place of the same path.
        if unit in known[self._cursor :]:
            self._cursor = known.index(unit, self._cursor) + 1

    def after_update(self, stepped: bool) -> None:
        """The optimizer step has ended."""
        self.progress += 1
        self.busy = False
        self._step += 1

    def place(self) -> Place:
        """What others are told of this rank. Also called by the watching thread."""
        return Place(self._forward, self._kind, list(self._now), dict(self._remembered))

    @property
    def step(self) -> int:
        """Optimizer steps that have ended."""
        return self._step

    @property
    def last_name(self) -> str | None:
        """The module that this rank entered last in this forward."""
        entered = [unit for unit in self._now if unit != END]
        return self._names[entered[-1]] if entered else None

    # --- whether others are elsewhere ----------------------------------------------------------------

    def _begin(self, kind: str) -> None:
        self.require_together()
        # Replicas communicate in backward alone: one of them may evaluate while the others wait for it.
        self._muted = kind == "evaluation" and (self._has_replicas or not self._ordered)
        if self._muted:
            return
        changed = self._forward > 0 and kind != self._kind
        self._store.withdraw()
        self._forward += 1
        self.progress += 1
        self.busy = True
        self._kind = kind
        self._now = []
        self._cursor = 0
        self._known = self._before.get(kind)
        if changed and self._ordered:
            self._ask()

    def _end(self) -> None:
        if self._muted:
            return
        if not self._ordered and not self.synchronises():
            self._now = []
            return
        self.progress += 1
        now = self._now if self._ordered else sorted(set(self._now))
        self._now = [*now, END]
        known = self._known
        alike = known is not None and (self._cursor == len(known) if self._ordered else known == now)
        if not alike:
            self._ask()
        self._before[self._kind] = now
        self._remembered[self._forward] = (self._kind, self._now)
        if len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)
        if self._kind == "evaluation":
            self.busy = False

    def _ask(self) -> None:
        apart = self._store.ask(self._ordered)
        if apart is not None:
            self._store.tell(self.told(*apart))
            self.require_together()

    def told(self, other: int, theirs: Place) -> str:
        """In words: where this rank and another one are apart."""
        if theirs.kind != self._kind:
            where = (
                f"rank {self._rank} runs a forward for {self._kind} and rank {other} one for {theirs.kind}"
            )
        else:
            where = self._where(other, theirs.path)
        way = "every rank must call the same modules in the same order"
        if not self._ordered:
            way = (
                "DistributedDataParallel waits for gradients of all modules: call the same ones on every rank, or give "
                "trine.optimize the model in DistributedDataParallel(..., find_unused_parameters=True)"
            )
        return (
            f"optimizer step {self._step}: ranks take different paths through the model: {where}; {way} (draw stochastic "
            "depth from a seed that all ranks share, and let no branch hang on a rank's own data)"
        )

    def _where(self, other: int, theirs: list[int]) -> str:
        ours = self._now
        if not self._ordered:
            for unit in [*ours, *theirs]:
                if (unit in ours) != (unit in theirs):
                    ran, skipped = (self._rank, other) if unit in ours else (other, self._rank)
                    return f"rank {ran} ran {self._names[unit]} and rank {skipped} did not"
        place = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        after = f"after {self._names[ours[place - 1]]} " if place else ""
        return (
            f"{after}rank {self._rank} {self._did(ours[place])} and rank {other} {self._did(theirs[place])}"
        )

    def _did(self, unit: int) -> str:
        return "ended its forward" if unit == END else f"entered {self._names[unit]}"

    # --- what is raised ------------------------------------------------------------------------------

    @property
    def verdict(self) -> str | None:
        """Why no rank can go on."""
        return self._store.verdict

    def require_together(self) -> None:
        """Raise ``TrainingError`` where ranks were found apart."""
        if self._store.verdict is not None:
            raise TrainingError(self._store.verdict)

    def failed(self, error: BaseException) -> None:
        """This rank's step raised: leave a sign for those that wait for it."""
        forward = self._forward if self.busy else self._forward + 1  # it would have been the next
        self.busy = False
        if self.verdict is None:
            words = " ".join(str(error).partition("\n")[0].split())
            said = f"{type(error).__name__}: {words}" if words else type(error).__name__
            entered = self.last_name
            where = f", after it entered {entered}" if entered else ""
            self._store.sign(
                forward,
                f"optimizer step {self._step}: rank {self._rank} failed{where} ({said}), and the "
                "other ranks waited for it: look at its log, and start again from a checkpoint",
            )

    def told_of(self, error: BaseException) -> TrainingError | None:
        """What an exception means here: ranks that are apart, or another that raised; ``None`` where neither is known.

        Others then learn that this rank failed, if by itself: where its group failed, another rank is the reason.
        """
        if isinstance(error, TrainingError) and str(error) == self.verdict:
            return None
        said = self.verdict
        of_a_group = is_of_a_group(error)
        if said is None and of_a_group:
            said = self._store.explanation()
        if said is not None:
            return TrainingError(said)
        if of_a_group:
            self.busy = False
        else:
            self.failed(error)
        return None

    def close(self) -> None:
        """Stop watching."""
        self._store.close()


class _Watched:
    """A pipeline whose stages' modules are watched while it runs: a step is one forward here."""

    def __init__(self, pipeline: Any, paths: Paths) -> None:
        self._pipeline = pipeline
        self._paths = paths

    def run(self, *arguments: Any, **named: Any) -> Any:
        """All micro-batches, forward and backward."""
        with self._paths.forward():
            return self._pipeline.run(*arguments, **named)

    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        """All micro-batches, forward."""
        with self._paths.forward():
            return self._pipeline.evaluate(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


def _entering(paths: Paths, place: int, assembly: Assembly) -> Callable[..., None]:
    def entering(module: nn.Module, arguments: Any) -> None:
        paths.enter(place)

    if assembly.config.compute.compile is False:
        return entering
    uncompiled: Callable[..., None] = torch._compile._disable_dynamo(entering)
    return uncompiled


def _stop(paths: Paths, handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    paths.close()


def _ordered_units(assembly: Assembly) -> dict[nn.Module, str]:
    """Modules that communicate when they are called: those of FSDP2 and of tensor and expert parallelism."""
    from torch.distributed.fsdp import FSDPModule

    roots = list(assembly.stages)
    found: dict[nn.Module, str] = {}
    for root in roots:
        for name, module in root.named_modules():
            if module is root:
                continue
            if isinstance(module, FSDPModule) or _communicates(module):
                found[module] = plain_name(name)
    return found


def _communicates(module: nn.Module) -> bool:
    for parameter in module.parameters(recurse=False):
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and any(
            part in IN_MODULES for name in mesh.mesh_dim_names or () for part in name.split("_")
        ):
            return True
    return False


def _replicated_units(assembly: Assembly) -> dict[nn.Module, str]:
    """Blocks under DistributedDataParallel that have gradients to exchange; none where it looks for unused ones itself."""
    model = assembly.model
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return {}
    if assembly.config.compute.compile is not False:
        return {}  # hooks would break compiled graphs apart, and DDP itself complains one step later
    inner = model.module
    names = {module: name for name, module in inner.named_modules()}
    return {
        unit: plain_name(names[unit])
        for unit in sharded_units(inner)
        if any(parameter.requires_grad for parameter in unit.parameters())
    }


def _peers(assembly: Assembly) -> list[int]:
    """Ranks that run the same modules: all, or those of the same stage of a pipeline."""
    layout = assembly.facts.layout
    stage = layout.place("pipeline")
    ranks = range(assembly.facts.ranks)
    return [rank for rank in ranks if dataclasses.replace(layout, rank=rank).place("pipeline") == stage]
