"""Training state off the device: ``offload.optimizer``, ``offload.parameters`` and what bounds and paces them.

optimizer      the optimizer's moments, and master copies, in the host's memory or on disk; the update runs on the host,
               tile by tile (Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity)
parameters     a block's parameters are on the device around its forward and backward alone; with zero.stage = 3 the
               shards are in the host's memory, by PyTorch's CPUOffloadPolicy
"auto"         the hottest state on the device, then in the host's memory, then on disk, under device_bytes and cpu_bytes
tile_mib       MiB of parameters whose update is one tile: of three tiles one comes in, one is updated, one goes back.
               It bounds the temporaries of an optimizer that nothing is offloaded of, too
overlap        false: one after the other, for measuring
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques._needs import require_folder
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = (
    "offload.optimizer",
    "offload.parameters",
    "offload.path",
    "offload.tile_mib",
    "offload.overlap",
    "offload.device_bytes",
    "offload.cpu_bytes",
)
ORDER = 46  # after sharding; tiers are made when all is done, of what the optimizer holds then
QUANTITY = "offload/device_bytes"
NUMERICS = (
    "the same bits on a CPU; on a device the host's rounding of the update: losses within 1e-6 relative"
)


def refusal(config: Config) -> str | None:
    """Keys that would do nothing where nothing is offloaded."""
    offload = config.offload
    auto = "auto" in (offload.optimizer, offload.parameters)
    if offload.path is not None and not offload.path.strip():
        return f'offload.path = "{offload.path}" names no folder: name one on the disk that is to be used, or take the key out'
    if (
        offload.path is not None
        and not auto
        and "nvme"
        not in (
            offload.optimizer,
            offload.parameters,
            offload.activations,
        )
    ):
        return 'offload.path is where offload.optimizer, .parameters or .activations = "nvme" writes: set one, or take the path out'
    if offload.cpu_bytes is not None and not auto:
        return 'offload.cpu_bytes bounds offload.optimizer or offload.parameters = "auto": set one of them, or drop it'
    if offload.overlap is not None and not _tiles(config) and offload.parameters == "none":
        return "offload.overlap says how offloaded state travels, and nothing is: set offload.optimizer, or drop it"
    micro = (config.accumulation.steps, config.accumulation.micro_batch)
    if offload.device_bytes is not None and not auto and "auto" not in (*micro, config.parallel.shard):
        return (
            'offload.device_bytes is what the device may hold, for accumulation.micro_batch = "auto", '
            'offload.optimizer = "auto" and parallel.shard = "auto": set one of them as well, or drop it'
        )
    return None


def _tiles(config: Config) -> bool:
    return config.offload.optimizer != "none" or config.offload.tile_mib is not None


def tolerance(config: Config) -> Tolerance | None:
    """Tiles change no bit; a host's processor rounds an update otherwise than a device does."""
    offload = config.offload
    if offload.optimizer == "none" and offload.parameters == "none":
        return None if offload.tile_mib is None else Tolerance(0.0, 0.0)
    return Tolerance(1e-6, 0.0)


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the optimizer cannot be cut, or blocks cannot come and go."""
    offload = config.offload
    if _tiles(config):
        _check_optimizer(config, facts)
        _check_layout(config, facts)
    if offload.parameters != "none":
        _check_parameters(config, facts)
    if offload.path is not None and (offload.optimizer != "none" or offload.parameters != "none"):
        require_folder(
            offload.path, "offload.optimizer" if offload.optimizer != "none" else "offload.parameters"
        )


def _key(config: Config) -> str:
    return "offload.optimizer" if config.offload.optimizer != "none" else "offload.tile_mib"


def _check_optimizer(config: Config, facts: Facts) -> None:
    from trine.optim.runtime.local_steps import steps_by_element

    optimizer, key = facts.optimizer, _key(config)
    kind = type(optimizer).__name__
    if not steps_by_element(optimizer):
        raise UsageError(
            f"{key}: {kind} is none of PyTorch's optimizers that update element by element, so that its step cannot be cut "
            "into tiles: use one of them, such as AdamW, or take the offload.* keys of the optimizer out"
        )
    for group in optimizer.param_groups:
        for flag in ("differentiable", "capturable"):
            if group.get(flag):
                raise UsageError(
                    f"{key}: an optimizer with {flag}=True cannot be stepped in tiles: drop {flag}=True"
                )
        rate = group.get("lr")
        device = getattr(rate, "device", None)
        if device is not None and device.type != "cpu" and config.offload.optimizer != "none":
            raise UsageError(f"{key}: a learning rate that is a tensor on {device}: give a number")
    _check_sparse(key, facts)


def _check_sparse(key: str, facts: Facts) -> None:
    for name, module in facts.model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"{key}: {name} makes sparse gradients, which cannot be cut into tiles: make it with sparse=False, or take "
                "the offload.* keys of the optimizer out"
            )


def _check_layout(config: Config, facts: Facts) -> None:
    own = {id(parameter) for parameter in facts.model.parameters()}
    held: list[torch.Tensor] = [p for group in facts.optimizer.param_groups for p in group["params"]]
    if config.offload.optimizer != "none" and any(id(parameter) not in own for parameter in held):
        raise UsageError(
            "offload.optimizer: some of the optimizer's parameters are not the model's, and would not be moved: put them into "
            "the model, or into an optimizer of their own"
        )


def _check_parameters(config: Config, facts: Facts) -> None:
    offload, stage = config.offload, config.zero.stage
    if stage == 3:
        if offload.parameters != "cpu":
            raise UsageError(
                f'offload.parameters = "{offload.parameters}" and zero.stage = 3 cannot be combined: FSDP2 keeps its shards in '
                'the host\'s memory at most: use offload.parameters = "cpu"'
            )
        if config.zero.quantized_weights:
            raise UsageError(
                "offload.parameters and zero.quantized_weights cannot be combined: what is gathered in int8 is made on the "
                "device. Drop one of them"
            )
        return
    if stage:
        raise UsageError(
            f"offload.parameters and zero.stage = {stage} cannot be combined: parameters are whole on the device from forward "
            "to backward there. Use zero.stage = 3, or drop one of them"
        )
    if facts.layout.is_hybrid:
        raise UsageError(
            f"offload.parameters and {facts.layout.hybrid_key()} cannot be combined but with zero.stage = 3, whose shards can "
            "lie in the host's memory: set that, or drop one of them"
        )
    if facts.ranks > 1 and facts.device_type == "cuda":
        raise UsageError(
            "offload.parameters on several devices needs zero.stage = 3: DistributedDataParallel loses sight of parameters "
            'that leave the device. Set it, with offload.parameters = "cpu"'
        )
    trained = any(parameter.requires_grad for parameter in facts.model.parameters())
    if trained and offload.optimizer == "none":
        raise UsageError(
            "offload.parameters: the update of parameters that are not on the device runs where they are: set "
            f'offload.optimizer = "{offload.parameters}" as well'
        )
    if offload.parameters == "auto" and offload.optimizer != "auto":
        raise UsageError(
            'offload.parameters = "auto" places parameters before the optimizer\'s state: set offload.optimizer = "auto" as well'
        )
    if config.compute.compile is not False:
        raise UsageError(
            "offload.parameters and compute.compile cannot be combined: compiled code does not wait for parameters that come "
            "and go. Drop one of them"
        )
    from trine.optim.runtime.shard_units import sharded_units
    from trine.optim.runtime.tiers.block_parameters import is_away

    units = sharded_units(facts.model)
    if not units:
        raise UsageError(
            "offload.parameters: the model has no list of like blocks (a ModuleList or Sequential) whose parameters could come "
            "and go: take the key out"
        )
    if any(is_away(unit) for unit in units):
        raise UsageError(
            "offload.parameters: another engine offloads this model's parameters, and would write over what this one trains: "
            "call its close() first"
        )


def apply(assembly: Assembly) -> None:
    """Make the tiers when every technique has been applied."""
    config = assembly.config
    by_fsdp = config.offload.parameters != "none" and config.zero.stage == 3
    if by_fsdp:
        assembly.effects.append(
            Effect(
                "offload.parameters",
                "shards on the device",
                "shards in the host's memory",
                "by FSDP2's CPUOffloadPolicy; the update runs there",
            )
        )
    if not _tiles(config) and (by_fsdp or config.offload.parameters == "none"):
        return

    def install(ready: Assembly) -> None:
        from trine.optim.runtime.tiers.install import Tiers

        Tiers(ready)

    assembly.finish.append(install)
