"""What one side of `trine verify` writes down in each rank: losses, gradients, replicas, recomputed activations.

A file a rank, ``rank-3.json`` with the numbers and ``rank-3.npz`` with the sketches of gradients, when the steps that
were asked for are done or the script ends. Looking costs a sketch of each gradient and a checksum of each
parameter a step; the training's numbers are not touched.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from trine.optim.runtime.adoption import named_parameters
from trine.optim.runtime.fingerprints import bits_of, shard_of, sketch_of, whole
from trine.optim.runtime.recomputation import RecomputationWatch
from trine.optim.runtime.tensor_plans import in_given_order
from trine.record.events import listen

if TYPE_CHECKING:
    from trine.optim.config import Config
    from trine.optim.techniques._assembly import Assembly, Reordered

__all__ = ["WATCHED_STEPS", "Witness", "seed_all"]

#: Steps whose recomputed activations are compared with the original ones: two checksums of every saved tensor.
WATCHED_STEPS = 3

logger = logging.getLogger("trine")


def seed_all(seed: int) -> None:
    """Python's, numpy's and torch's generators: both sides draw the same, as far as they draw from these."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


class Witness:
    """Watches one training run in this process; ``trine.optim._override`` hands it the engine.

    ``config``: what engines apply instead of the script's own; ``None`` leaves the script's own. After ``steps``
    optimizer steps the script is ended, by ``SystemExit``, where its next step would begin. ``proved``: what is compared
    with the plain run; ``None`` for the script's own.
    """

    def __init__(self, folder: Path, config: Config | None, steps: int, proved: Config | None = None) -> None:
        self._folder = folder
        self._proved = proved
        self._config = config
        self._steps = steps
        self._losses: list[float | None] = []
        self._sketches: dict[str, numpy.ndarray] = {}
        self._norms: dict[int, float] = {}
        self._bits: list[dict[str, tuple[str, int]]] = []
        self._recomputed: list[tuple[str, str]] = []
        self._regions = 0
        self._watch: RecomputationWatch | None = None
        self._engine = False
        self._told: dict[str, Any] = {}
        self._loss: float | None = None  # of the step that is running, by a loop without an engine
        self._parts = 0
        self._parameters: Callable[[], dict[str, torch.Tensor]] = dict
        self._orders: Callable[[], dict[str, Reordered]] = dict
        self._written = False
        self._place: dict[str, Any] | None = None  # read while the process group is alive
        self._undo: list[Callable[[], None]] = []

    # --- with an engine ------------------------------------------------------------------------

    def configuration(self, given: Config) -> Config:
        """What the engine applies."""
        self._proved = given if self._proved is None else self._proved
        return given if self._config is None else self._config

    def divides_by(self, given: Config) -> Config:
        """What is proved, on both sides."""
        return given if self._proved is None else self._proved

    def attach(self, assembly: Assembly) -> None:
        """Look through the engine's own hooks."""
        self._engine = True
        self._told = {
            "configuration": assembly.config.to_dict(),
            "effects": [str(effect) for effect in assembly.effects],
        }
        self._parameters = lambda: dict(assembly.parameters)
        self._orders = lambda: assembly.reordered
        self._watch_recomputation(assembly.model)
        assembly.inspect.append(self._take_gradients)
        assembly.after_update.append(lambda stepped: self._take_replicas())
        self._undo.append(listen(self._on_event))

    def _on_event(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "step_end" and values.get("loss") is not None:
            # One entry a step, also where an update was skipped.
            self._losses.append(float(values["loss"]))

    # --- without ---------------------------------------------------------------------------------

    def watch_loop(self, models: list[Any], optimizers: list[Any], config: Config | None) -> None:
        """Look at a loop that has no engine, through hooks of every optimizer and of ``Tensor.backward``."""
        if self._engine:
            return
        self._told = {"configuration": {} if config is None else config.to_dict()}
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        if models:
            self._watch_recomputation(models[0])
        names: dict[str, torch.Tensor] = {}
        for position, model in enumerate(models):
            prefix = f"{type(getattr(model, 'module', model)).__name__}." if position else ""
            names |= {prefix + name: parameter for name, parameter in named_parameters(model).items()}
        self._parameters = lambda: names
        last = optimizers[-1] if optimizers else None

        def before(optimizer: Any, *_: Any) -> None:
            if optimizer is last:
                # GradScaler leaves unscaling to fused kernels, and its scale with the optimizer, for this one call.
                self._take_gradients(getattr(optimizer, "grad_scale", None))

        def after(optimizer: Any, *_: Any) -> None:
            if optimizer is last:
                self._take_replicas()
                self._losses.append(None if self._loss is None else self._loss / max(1, self._parts))
                self._loss, self._parts = None, 0

        self._undo += [
            register_optimizer_step_pre_hook(before).remove,
            register_optimizer_step_post_hook(after).remove,
        ]
        self._watch_losses()

    def _watch_losses(self) -> None:
        original: Any = torch.Tensor.backward
        witness = self

        def backward(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            if tensor.numel() == 1:
                witness._loss = (witness._loss or 0.0) + float(tensor.detach())
                witness._parts += 1
            return original(tensor, *arguments, **named)

        torch.Tensor.backward = backward  # type: ignore[assignment, method-assign]
        self._undo.append(lambda: setattr(torch.Tensor, "backward", original))

    def _watch_recomputation(self, model: torch.nn.Module) -> None:
        """From here to the end of step :data:`WATCHED_STEPS`; whoever made the checkpointed regions."""
        self._watch = RecomputationWatch(model).__enter__()
        self._undo.append(self._end_watch)

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
            self._regions += watch.regions
            self._recomputed += watch.differences

    # --- what is written down --------------------------------------------------------------------

    def _take_gradients(self, scale: torch.Tensor | None = None) -> None:
        if self.done:
            self.finish()
            raise SystemExit(0)
        self._place = self._place or _place()
        step = len(self._bits)  # a step that is skipped has no gradients, and counts
        total = 0.0
        for name, parameter in self._parameters().items():
            if parameter.grad is None:
                continue
            gradient = in_given_order(whole(parameter.grad), self._orders().get(name))
            gradient = gradient if scale is None else gradient / scale
            total += float(gradient.double().square().sum())
            self._sketches[f"{step}/{name}"] = sketch_of(gradient)
        self._norms[step] = total**0.5

    def _take_replicas(self) -> None:
        found = {}
        for name, parameter in self._parameters().items():
            local, part = shard_of(parameter)
            found[name] = (part, bits_of(local))
        self._bits.append(found)
        if len(self._bits) == WATCHED_STEPS:
            self._end_watch()

    @property
    def has_engine(self) -> bool:
        """Whether the script has called ``trine.optimize``."""
        return self._engine

    @property
    def done(self) -> bool:
        """As many steps as were asked for."""
        return len(self._bits) >= self._steps

    def finish(self) -> None:
        """Write the files, once, and take the hooks out."""
        if self._written:
            return
        self._written = True
        for undo in reversed(self._undo):
            undo()
        place = self._place or _place()
        self._folder.mkdir(parents=True, exist_ok=True)
        numpy.savez(self._folder / f"rank-{place['rank']}.npz", **self._sketches)  # type: ignore[arg-type]
        facts = {
            **place,
            "engine": self._engine,
            "losses": self._losses[: self._steps],
            "gradient_norms": self._norms,
            "bits": self._bits[: self._steps],
            "recomputed_regions": self._regions,
            "recomputation_differences": self._recomputed,
            **self._told,
        }
        (self._folder / f"rank-{place['rank']}.json").write_text(json.dumps(facts))


def _place() -> dict[str, Any]:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return {"rank": 0, "ranks": 1, "backend": None}
    return {
        "rank": distributed.get_rank(),
        "ranks": distributed.get_world_size(),
        "backend": distributed.get_backend(),
    }
