"""PyTorch: our own configuration, which ``trine.optimize`` applies to a program with PyTorch's own means."""

from __future__ import annotations

from trine.optim.config import Config
from trine.optim.exports._account import Account, Written
from trine.optim.exports._exported import Exported
from trine.optim.layout import arranged
from trine.optim.techniques import refusals

__all__ = ["NAME", "TOOL", "export"]

NAME = "pytorch"
TOOL = "PyTorch, by trine.optimize"

#: What DistributedDataParallel does with its buckets, and what replaces its all-reduce: FSDP2, which averages from
#: ``zero.stage`` 2 on and beside other kinds of parallelism, has no such thing (``docs/layouts.md``, ``docs/zero.md``).
_OF_REPLICAS = (
    "communication.bucket_mib",
    "communication.first_bucket_mib",
    "communication.gradient_as_view",
    "communication.static_graph",
    "communication.overlap",
    "communication.algorithm",
    "communication.nccl",
)
_DEGREES = ("parallel.tensor", "parallel.context", "parallel.pipeline", "parallel.expert")
_COMPRESSION = "communication.compression"
#: Keys that mean nothing without compression.
_OF_COMPRESSION = (
    _COMPRESSION,
    "communication.compression_levels",
    "communication.compression_rank",
    "communication.compression_warmup_steps",
)


def export(exported: Exported) -> Written:
    """The configuration as TOML, without what the runtime would refuse; that is named."""
    config = exported.config
    account = Account(exported, TOOL)
    parallel = config.parallel
    is_hybrid = max(parallel.tensor, parallel.context, parallel.pipeline, parallel.expert) > 1
    dropped: dict[str, str] = {}
    changed: dict[str, object] = {}
    if is_hybrid and config.zero.stage == 1:
        changed["zero.stage"] = 2
        account.misses(
            "zero.stage", "beside other kinds of parallelism gradients are sharded too: written as 2"
        )
    if is_hybrid and config.zero.stage == 0 and config.precision.master_weights and _averages(exported):
        dropped["precision.master_weights"] = (
            "beside other kinds of parallelism the shards of ZeRO 2 and 3 are the masters: left out, parameters stay float32"
        )
    if is_hybrid or config.zero.stage >= 2:
        dropped |= dict.fromkeys(
            _OF_REPLICAS, "is DistributedDataParallel's, and FSDP2 averages here: left out"
        )
        if is_hybrid or config.communication.compression == "powersgd":
            why = "is of whole gradients over all ranks, and FSDP2 hands out shards here: left out"
            dropped |= dict.fromkeys(_OF_COMPRESSION, why)
        if is_hybrid:
            dropped["zero.quantized_weights"] = "is of plain sharding alone: left out"
    adapted = _without(config, dropped).with_changes(changed)
    for key, reason in refusals(adapted).items():
        dropped[key] = reason
    adapted = _without(adapted, dropped)
    for key, reason in dropped.items():
        account.misses(key, reason)
    if exported.devices is not None and not dropped.keys().isdisjoint(_DEGREES):
        adapted = _refitted(adapted, exported.devices, account)
    account.says(*adapted.changes())
    return account.written({"trine.toml": adapted.to_toml()})


def _averages(exported: Exported) -> bool:
    """Whether ranks of a hybrid layout share parameters with others, or parts of them."""
    parallel = exported.config.parallel
    return max(parallel.tensor, parallel.context, parallel.expert) > 1 or exported.replicas != 1


def _refitted(config: Config, devices: int, account: Account) -> Config:
    """With a degree left out its ranks see batches of their own: over all of them the batch must divide."""
    config = _without(config, dict.fromkeys(("parallel.data", "parallel.shard"), ""))
    for key in ("parallel.data", "parallel.shard"):
        account.misses(key, f'written as "auto": what is left out of {devices} ranks sees batches of its own')
    ranks = arranged(config, 0, devices).data_ranks
    whole = config.accumulation.global_batch
    key = "parallel.microbatches" if config.parallel.pipeline > 1 else "accumulation.micro_batch"
    planned = config[key]
    if not isinstance(whole, int) or not isinstance(planned, int) or whole % (ranks * planned) == 0:
        return config
    fitting = [n for n in range(1, planned + 1) if whole % (ranks * n) == 0]
    if not fitting:
        account.misses(
            "accumulation.global_batch",
            f"{ranks} ranks see batches of their own then, and it does not divide over them: give another",
        )
        return _without(config, {"accumulation.global_batch": ""})
    account.misses(key, f"{ranks} ranks see batches of their own then: written as {fitting[-1]}")
    return config.with_changes({key: fitting[-1]})


def _without(config: Config, keys: dict[str, str]) -> Config:
    default = Config()
    return config.with_changes({key: default[key] for key in keys if config[key] != default[key]})
