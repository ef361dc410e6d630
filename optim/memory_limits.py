"""Configurations that cannot fit are refused before they are applied, with the nearest change that would fit.

Two looks. Parameters, gradients and optimizer state follow from the model, the optimizer and the layout by arithmetic,
in no time, and are a lower bound: what is above the device's memory is hopeless. Where there is an example of a batch,
a step is predicted (:mod:`trine.optim.memory_prediction`) with all that it needs besides.

Refused is only what needs more than *all* of the device: what a device keeps for itself, and what its allocator loses,
come on top. From nine tenths on there is a warning.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trine.optim.memory_prediction import MARGIN, predict_memory, spelled_bytes
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

    from trine.optim.config import Config
    from trine.optim.techniques import Facts

__all__ = ["Least", "least_bytes", "require_fit"]

logger = logging.getLogger("trine")

#: Moments that PyTorch's optimizers keep, each of the parameter's size and type (torch/optim/*.py).
_MOMENTS = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "RMSprop": 1,
}
#: A prediction in ``trine.optimize`` is given up after this, and training goes on.
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Least:
    """Bytes that one rank holds at an optimizer step, whatever its batch: a lower bound."""

    parameters: float
    gradients: float
    optimizer_state: float
    buckets: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer_state + self.buckets

    @property
    def dominant(self) -> str:
        """The largest."""
        parts = {name: getattr(self, name) for name in ("parameters", "gradients", "optimizer_state")}
        return max(parts, key=lambda name: parts[name])


def least_bytes(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Config, ranks: int
) -> Least:
    """By the formula of Rajbhandari et al. 2020, figure 1, with this model's own parameters and optimizer.

    Model parallelism divides all; what is replicated under it is left out, and of unknown optimizers what they have not
    yet made: the figure may be too low and is never too high.
    """
    from trine.optim.layout import layout_of

    layout = layout_of(config, 0, ranks)
    parts = layout.size("pipeline", "tensor", "expert")
    stage, shards = config.zero.stage, layout.shard * layout.context
    low = config.precision.master_weights
    stored = held = trained = 0.0
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        wide = parameter.numel() * 4 if parameter.is_floating_point() else size
        narrow = parameter.numel() * 2 if low and parameter.is_floating_point() else size
        stored += wide if low and stage >= 2 else narrow  # FSDP2's shards are the masters themselves
        if parameter.requires_grad:
            trained += wide if low and stage >= 2 else narrow
            held += wide if low else size
    masters = held if low and stage < 2 else 0.0
    state = _moments(optimizer) * held + masters
    offload = config.offload
    moved = offload.optimizer != "none" or offload.parameters != "none"
    buckets = trained if ranks > 1 and stage < 2 and not layout.is_hybrid else 0.0
    if config.communication.gradient_as_view:
        buckets = 0.0
    return Least(
        0.0 if offload.parameters != "none" else stored / parts / (shards if stage >= 3 else 1),
        0.0 if moved else trained / parts / (shards if stage >= 2 else 1),
        0.0 if offload.optimizer != "none" else state / parts / (shards if stage >= 1 else 1),
        buckets,
    )


def _moments(optimizer: torch.optim.Optimizer) -> int:
    kind = type(optimizer).__name__
    moments = _MOMENTS.get(kind, 0)
    defaults = optimizer.defaults
    if kind in ("Adam", "AdamW") and defaults.get("amsgrad"):
        moments += 1
    if kind in ("SGD", "RMSprop") and defaults.get("momentum"):
        moments += 1
    if kind == "RMSprop" and defaults.get("centered"):
        moments += 1
    return moments


def require_fit(config: Config, facts: Facts, capacity_bytes: Any, clip_norm: float | None) -> None:
    """Raise ``UsageError`` for a configuration that needs more than the device has.

    ``capacity_bytes``: ``"device"`` (what the device has, or ``offload.device_bytes``; on the CPU nothing is refused), a
    number of bytes, or ``None`` to look at nothing. Rank 0 looks for all.
    """
    _require_capacity(capacity_bytes)
    if capacity_bytes is None or facts.rank != 0 or facts.backend == "fake":
        return
    capacity = _capacity(config, facts) if capacity_bytes == "device" else capacity_bytes
    if capacity is None:
        return
    least = least_bytes(facts.model, facts.optimizer, config, facts.ranks)
    if least.total > capacity and capacity != config.offload.device_bytes:  # which has plans of its own
        raise UsageError(
            f"this configuration needs at least {spelled_bytes(least.total)} on each rank for parameters, gradients and "
            f"optimizer state (most of it {_spelled(least.dominant)}, {spelled_bytes(getattr(least, least.dominant))}), and "
            f"the device holds {spelled_bytes(capacity)}: {_way_by_arithmetic(config, facts, capacity)}"
        )
    if facts.example is not None and facts.loss_fn is not None:
        _require_step(config, facts, capacity, clip_norm)


def _require_capacity(value: Any) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not (value is None or value == "device" or is_number):
        raise UsageError(
            f'capacity_bytes = {value!r}: it takes "device", a number of bytes, or None to refuse nothing for its memory'
        )


def _capacity(config: Config, facts: Facts) -> int | None:
    """All of a CUDA device, or what ``offload.device_bytes`` says of it; on the CPU what that says, for predicted steps."""
    stated = config.offload.device_bytes
    if facts.device_type != "cuda":
        return stated if facts.example is not None else None
    import torch

    whole = int(torch.cuda.get_device_properties(facts.device).total_memory)
    return whole if stated is None or facts.example is None else min(whole, stated)


def _require_step(config: Config, facts: Facts, capacity: int, clip_norm: float | None) -> None:
    try:
        predicted = _predicted(config, facts, clip_norm)
    except UsageError as error:
        logger.warning("whether a step fits into %s is not known: %s", spelled_bytes(capacity), error)
        return
    if predicted.needed_bytes <= capacity * MARGIN:
        return
    if predicted.needed_bytes <= capacity:
        logger.warning(
            "a step is predicted to need %s of the %s that the device holds: it may run out of memory",
            spelled_bytes(predicted.needed_bytes),
            spelled_bytes(capacity),
        )
        return
    while_ = "a step" if predicted.peak_bytes >= predicted.start_peak_bytes else "applying this configuration"
    parts = (
        predicted.at_peak_bytes
        if predicted.peak_bytes >= predicted.start_peak_bytes
        else predicted.start_bytes
    )
    most = max(parts, key=lambda kind: parts[kind])
    raise UsageError(
        f"{while_} is predicted to need {spelled_bytes(predicted.needed_bytes)} on each rank (most of it {_spelled(most)}, "
        f"{spelled_bytes(parts[most])}), and the device holds {spelled_bytes(capacity)}: "
        f"{_way_by_prediction(config, facts, capacity, clip_norm)}"
    )


def _predicted(config: Config, facts: Facts, clip_norm: float | None) -> Any:
    assert facts.loss_fn is not None
    return predict_memory(
        facts.model,
        config,
        ranks=facts.ranks,
        batch=facts.example,
        loss_fn=facts.loss_fn,
        optimizer=facts.optimizer,
        clip_norm=clip_norm,
        ranks_per_node=facts.topology.ranks_per_node,
        timeout_s=_TIMEOUT_S,
    )


def _stages(config: Config, ranks: int) -> list[dict[str, Any]]:
    return [{"zero.stage": stage} for stage in (1, 2, 3) if ranks > 1 and stage > config.zero.stage]


def _way_by_arithmetic(config: Config, facts: Facts, capacity: float) -> str:
    for changes in [*_stages(config, facts.ranks), {"offload.optimizer": "cpu"}]:
        least = least_bytes(facts.model, facts.optimizer, config.with_changes(changes), facts.ranks)
        if least.total <= capacity:
            return (
                f"{_assigned(changes)} needs at least {spelled_bytes(least.total)}; capacity_bytes=None in trine.optimize "
                "leaves this look out"
            )
    return "use more ranks with zero.stage = 3, or a smaller model"


def _way_by_prediction(config: Config, facts: Facts, capacity: float, clip_norm: float | None) -> str:
    """The first change of those that cost least that is predicted to fit."""
    tried: list[dict[str, Any]] = []
    if config.accumulation.steps == 1 and config.accumulation.micro_batch is None:
        tried += [{"accumulation.steps": 2}, {"accumulation.steps": 4}]
    tried += _stages(config, facts.ranks)[-2:]
    if config.checkpointing.mode == "none":
        tried += [{"checkpointing.mode": "selective"}, {"checkpointing.mode": "full"}]
        if facts.ranks > 1 and config.zero.stage < 3:
            tried.append({"zero.stage": 3, "checkpointing.mode": "full"})
    for changes in tried:
        try:
            predicted = _predicted(config.with_changes(changes), facts, clip_norm)
        except UsageError:  # not with this model or these keys
            continue
        if predicted.needed_bytes <= capacity * MARGIN:
            return (
                f"{_assigned(changes)} is predicted to need {spelled_bytes(predicted.needed_bytes)}; capacity_bytes=None in "
                "trine.optimize leaves this look out"
            )
    return "no single change was found that fits: use more ranks, smaller batches, or offload.optimizer"


def _assigned(changes: dict[str, Any]) -> str:
    spelled = [f'{key} = "{v}"' if isinstance(v, str) else f"{key} = {v}" for key, v in changes.items()]
    return " and ".join(spelled)


def _spelled(kind: str) -> str:
    return kind.replace("_", " ")
