"""The step run by DeepSpeed: ``engine = "deepspeed"``.

The same configuration, written as DeepSpeed's own (:mod:`trine.optim.dialects.deepspeed`) and handed to it; the loop stays
as it is. Keys about the model and the loader are applied by Trine either way. A key that DeepSpeed has no counterpart for
is refused by name: with ``engine = "torch"`` all of them can be had.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.dialects.deepspeed_writing import no_counterpart, to_deepspeed
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("engine",)
#: After everything that changes the model: DeepSpeed takes it over as it then is.
ORDER = 95
QUANTITY = "step time; bytes per rank"
NUMERICS = "unchanged but for the order of sums: losses within 1e-5 relative in fp32, more in low precision"

#: Releases that the tests have run with.
_TESTED = "0.19"
_OTHERWISE = 'or set engine = "torch"'

logger = logging.getLogger("trine")


def refusal(config: Config) -> str | None:
    """What DeepSpeed has no counterpart for."""
    if config.engine != "deepspeed":
        return None
    reason = no_counterpart(config) or _not_the_same(config)
    return None if reason is None else f'engine = "deepspeed": {reason}'


def _not_the_same(config: Config) -> str | None:
    """What DeepSpeed takes, and trains otherwise than the plain run: found by the tests."""
    precision, stage = config.precision, config.zero.stage
    if precision.master_weights and stage == 0:
        # FP16_UnfusedOptimizer.initialize_optimizer_states: Adam's bias correction is one step ahead for good.
        return (
            "precision.master_weights without ZeRO begins with an update of zero gradients there, which Adam counts: set "
            f"zero.stage = 1, {_OTHERWISE}"
        )
    if precision.dtype == "fp16" and not precision.master_weights:
        return (
            'precision.dtype = "fp16" by autocast leaves clipping and overflow to two scalers there: set '
            f"precision.master_weights = true and zero.stage = 1, {_OTHERWISE}"
        )
    return None


def tolerance(config: Config) -> Tolerance | None:
    """DeepSpeed sums gradients in buckets of its own and updates flat partitions in float32.

    In low precision it computes all of the model and adds gradients up in that, where autocast keeps norms in float32.
    """
    if config.engine != "deepspeed":
        return None
    return Tolerance(1e-5, 1e-1 if config.precision.master_weights else 1e-3)


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where DeepSpeed is missing, or cannot train this model on this device."""
    if config.engine != "deepspeed":
        return
    _require_installed()
    _require_device(config, facts)
    _require_model(config, facts)
    if "nvme" in (config.offload.optimizer, config.offload.parameters):
        _require_disk(facts)


def apply(assembly: Assembly) -> None:
    """Hand model, optimizer and configuration to DeepSpeed."""
    if assembly.config.engine != "deepspeed":
        return
    from trine.optim.runtime.deepspeed_engine import hand_over

    stage = assembly.config.zero.stage
    hand_over(assembly, to_deepspeed(assembly.config, assembly.facts))
    assembly.effects.append(
        Effect(
            "engine",
            "torch",
            f"deepspeed {version('deepspeed')}",
            f"ZeRO stage {stage}" if stage else "gradients averaged over replicas",
        )
    )


def _require_installed() -> None:
    if find_spec("deepspeed") is None:
        raise UsageError(
            f"engine = \"deepspeed\": DeepSpeed is not installed: pip install 'trine[deepspeed]', {_OTHERWISE}"
        )
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        return
    if not found.startswith(f"{_TESTED}."):
        logger.warning(
            'engine = "deepspeed" is tested with DeepSpeed %s, and this is %s: run trine verify once',
            _TESTED,
            found,
        )


def _require_device(config: Config, facts: Facts) -> None:
    kind = facts.device_type
    if kind not in ("cpu", "cuda"):
        raise UsageError(
            f'engine = "deepspeed" is tested on the CPU and on CUDA, and the model is on {kind}: move it, {_OTHERWISE}'
        )
    if kind == "cuda" and facts.backend is not None and "nccl" not in facts.backend:
        raise UsageError(
            f'engine = "deepspeed" on CUDA communicates by NCCL, and the process group is {facts.backend}: '
            f'init_process_group("nccl"), {_OTHERWISE}'
        )
    if kind == "cpu":
        quantized = {
            "zero.quantized_weights": config.zero.quantized_weights,
            'communication.compression = "int8"': config.communication.compression == "int8",
        }
        for key, wanted in quantized.items():
            if wanted:
                raise UsageError(f'engine = "deepspeed": {key} needs CUDA there: take it out, {_OTHERWISE}')


def _require_model(config: Config, facts: Facts) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(facts.model, DistributedDataParallel):
        raise UsageError(
            'engine = "deepspeed" wraps the model itself: give trine.optimize the module inside '
            f"DistributedDataParallel, {_OTHERWISE}"
        )
    low = [
        name
        for name, parameter in facts.model.named_parameters()
        if parameter.requires_grad and parameter.dtype != torch.float32
    ]
    if low:
        kept = dict(facts.model.named_parameters())[low[0]].dtype
        raise UsageError(
            f'engine = "deepspeed" keeps parameters in float32, or float32 copies of them, and {low[0]} is of {kept}: '
            f"convert the model with model.float(), {_OTHERWISE}"
        )
    if config.zero.stage or config.precision.master_weights:
        _require_new(facts.optimizer)


def _require_new(optimizer: torch.optim.Optimizer) -> None:
    """DeepSpeed's partitions begin without the moments that a live optimizer has."""
    if any(optimizer.state.values()):
        raise UsageError(
            f'engine = "deepspeed" would begin {type(optimizer).__name__} anew, and it has state of steps already taken: '
            f"give it before its first step, {_OTHERWISE}, which carries the state over"
        )


def _require_disk(facts: Facts) -> None:
    from trine.optim.runtime.deepspeed_engine import can_use_disk

    if not can_use_disk(facts.device_type):
        raise UsageError(
            'engine = "deepspeed": offload to "nvme" needs its asynchronous I/O, which wants libaio and a compiler here: '
            f'install libaio-dev, use "cpu", {_OTHERWISE}'
        )
