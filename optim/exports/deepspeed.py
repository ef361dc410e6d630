"""DeepSpeed's JSON, by the writer that ``engine = "deepspeed"`` uses, with the parallel degrees that it reads besides.

The engine cuts tensors and spreads experts by itself, where a program of DeepSpeed's own has its configuration do so:
``tensor_parallel.autotp_size``, ``sequence_parallel_size``, ``expert_parallel`` (``deepspeed/runtime/config.py`` and
``deepspeed/runtime/tensor_parallel/config.py`` of 0.19).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from trine.optim.config import Config
from trine.optim.dialects.deepspeed_pairs import BESIDE
from trine.optim.dialects.deepspeed_writing import to_deepspeed, without_counterpart
from trine.optim.exports._account import Account, Written
from trine.optim.exports._exported import Batch, Exported
from trine.record.errors import UsageError

__all__ = ["NAME", "TOOL", "export", "moves_checkpoints", "tables_of"]

NAME = "deepspeed"
TOOL = "DeepSpeed 0.19"

_BATCH = ("accumulation.global_batch", "accumulation.micro_batch", "accumulation.steps")
#: Our degree → where DeepSpeed has it, and the table that goes with it.
_DEGREES: dict[str, Any] = {
    "parallel.context": lambda degree: {"sequence_parallel_size": degree},
    "parallel.tensor": lambda degree: {"tensor_parallel": {"autotp_size": degree}},
    "parallel.expert": lambda degree: {"expert_parallel": {"enabled": True, "autoep_size": degree}},
}
#: Where a flag says this degree, a grid of the program's own counts ranks.
_FLAGGED = "parallel.tensor"
#: What Trine does to model and loader whoever runs the step, and DeepSpeed's file does not.
_IN_THE_PROGRAM = {
    "checkpointing": "the program does it: torch.utils.checkpoint, or deepspeed.checkpointing.checkpoint, around its blocks",
    "compute": "the program does it, where it makes the model",
    "data": "the program does it, where it makes the loader",
    "precision": "the program does it: torch.backends.cuda.matmul.allow_tf32",
}


def export(exported: Exported) -> Written:
    """``ds_config.json``. Clipping is written as off: a configuration leaves it to the loop."""
    account = Account(exported, TOOL)
    config = exported.config.with_changes({"zero.stage": exported.zero_stage})
    tables = tables_of(replace(exported, config=config), account)
    if exported.config.parallel.pipeline > 1:
        account.leaves(
            "parallel.pipeline",
            "a pipeline is a PipelineModule that the program makes: megatron-deepspeed has one",
        )
        account.misses("parallel.microbatches", "is of the pipeline: written as gradient_accumulation_steps")
        for key in ("parallel.schedule", "parallel.chunks", "parallel.split"):
            account.misses(key, "is of the pipeline")
    account.notes("gradient_clipping is written as 0.0, which clips nothing: set it to your norm")
    return account.written({"ds_config.json": json.dumps(tables, indent=2) + "\n"})


def tables_of(exported: Exported, account: Account, apart: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The JSON's tables, with all that DeepSpeed reads; what it does not is named on ``account``.

    ``apart``: keys that another file says, which the tables then leave out.
    """
    refused = {} if _FLAGGED in apart else _refused(exported.config)
    for key, why in refused.items():
        account.misses(key, why)
    default = Config()
    config = exported.config.with_changes({key: default[key] for key in refused})
    account.says("engine")
    moved = _moved_checkpoints(config, account, apart)
    for key in config.changes():
        if key in BESIDE and key not in (*_BATCH, *apart):
            account.misses(key, _IN_THE_PROGRAM[key.partition(".")[0]])
    sayable = _sayable(config, account)
    found = to_deepspeed(sayable) | moved
    account.says(*sayable.changes())
    lost = exported.config.parallel.context // config.parallel.context
    batch = _spread_batch(exported, account, lost)
    _write_batch(found, batch, account, 1 if _FLAGGED in apart else config.parallel.tensor)
    for key, table in _DEGREES.items():
        if key not in (*apart, *refused) and account.takes(key):
            found |= table(config[key])
    if "sequence_parallel_size" in found:
        _write_mesh(found, exported, account)
    if config.compute.compile == "blocks":
        account.says("compute.compile")
        found["compile"] = {"deepcompile": True}
        only = "" if config.zero.stage else ", and without ZeRO that is torch.compile alone"
        account.notes(
            f"compile.deepcompile: nothing is compiled before the program calls engine.compile(){only}"
        )
    _account_for_ranks(exported, account)
    return found


def moves_checkpoints(config: Config) -> bool:
    """Whether what recomputed blocks keep goes to host memory, which DeepSpeed's own checkpointing does."""
    return config.checkpointing.mode == "full" and config.offload.activations == "cpu"


def _moved_checkpoints(config: Config, account: Account, apart: frozenset[str]) -> dict[str, Any]:
    """The table that says so, where no flag does."""
    if not moves_checkpoints(config) or "checkpointing.mode" in apart:
        return {}
    account.says("offload.activations")
    account.notes(
        "activation_checkpointing.cpu_checkpointing is heeded by deepspeed.checkpointing.checkpoint alone, around the program's blocks"
    )
    return {"activation_checkpointing": {"cpu_checkpointing": True}}


def _sayable(config: Config, account: Account) -> Config:
    """What the writer takes: without other keys, and without those whose value DeepSpeed has not."""
    default = Config()
    apart = {
        key for key in config.changes() if key in BESIDE or key == "engine" or key.startswith("parallel.")
    }
    if moves_checkpoints(config):
        apart.add("offload.activations")
    if config.compute.compile == "blocks":
        apart.add("compute.compile")
    sayable = config.with_changes({key: default[key] for key in apart})
    for _ in range(len(config.changes()) + 1):  # each round takes one out at least
        missing = without_counterpart(sayable)
        if not missing:
            return sayable
        for key, reason in missing.items():
            account.misses(key, _reason(reason, key))
        sayable = sayable.with_changes({key: default[key] for key in missing})
    raise UsageError(f"{TOOL} cannot say {', '.join(without_counterpart(sayable))}")


def _reason(reason: str, key: str) -> str:
    """Without what the line already begins with, nor the way out that an export is no place for."""
    words = reason.removeprefix(key).removesuffix(', or train with engine = "torch"')
    return words.split(": ", 1)[-1].strip(" :") if words.startswith(" = ") else words.strip(" :")


def _refused(config: Config) -> dict[str, str]:
    """Keys that it raises at beside others, with what happens instead.

    AutoEP beside AutoTP has neither stages, nor sequence ranks, nor offload, nor DeepCompile (``validate_folding_global`` in
    ``deepspeed/module_inject/auto_ep_folding.py``); a ``PipelineModule`` takes no ``mpu``, which would bring sequence ranks.
    """
    parallel = config.parallel
    found: dict[str, str] = {}
    if parallel.context > 1 and parallel.pipeline > 1:
        found["parallel.context"] = (
            "its pipeline has no sequence ranks: left out, and they see batches of their own there"
        )
    if parallel.tensor == 1 or parallel.expert == 1:
        return found
    if parallel.pipeline > 1 or parallel.context > 1:
        beside = "a pipeline" if parallel.pipeline > 1 else "sequence ranks"
        return found | {
            "parallel.expert": f"AutoEP refuses tensor ranks beside {beside}: experts are whole on each rank"
        }
    why = "AutoEP refuses it beside tensor ranks"
    offloads = [key for key in config.changes() if key.startswith("offload.")]
    if "offload.activations" in offloads:  # the rest is of its tier as well
        offloads = [key for key in offloads if key in ("offload.optimizer", "offload.parameters")]
    found |= dict.fromkeys(offloads, f"{why}: state stays on the device")
    if config.compute.compile == "blocks":
        found["compute.compile"] = f"{why}: nothing is compiled"
    return found


def _spread_batch(exported: Exported, account: Account, times: int) -> Batch:
    """The step's samples where so many times the ranks see batches of their own: in fewer micro-batches, named where they change."""
    planned = exported.batch
    batch = planned.over(times)
    if batch == planned:
        return batch
    ranks = "these ranks" if exported.data_ranks is None else f"{exported.data_ranks * times} ranks"
    smaller = f", of micro-batches of {batch.micro}" if batch.micro != planned.micro else ""
    account.misses(
        "parallel.microbatches",
        f"{ranks} see batches of their own then: gradient_accumulation_steps is written as {batch.count}{smaller}",
    )
    if batch.whole != planned.whole:
        account.misses("accumulation.global_batch", f"it does not divide over them: written as {batch.whole}")
    return batch


def _write_batch(found: dict[str, Any], batch: Batch, account: Account, times: int) -> None:
    """All of the three that are known; DeepSpeed finds the third itself.

    ``times``: ranks that DeepSpeed takes for one with a batch of its own each, where the layout has one batch. It checks the
    three against each other before it knows of tensor ranks (``DeepSpeedConfig`` of ``deepspeed.initialize``), so that the
    whole is left to it then.
    """
    known = {
        "train_batch_size": batch.whole,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.count,
    }
    if times > 1 and batch.whole is not None:
        del known["train_batch_size"]
        if batch.micro is None or batch.count is None:
            account.misses("accumulation.global_batch", "how many a rank has is not known: give --devices")
        else:
            account.notes(
                f"train_batch_size is left out: DeepSpeed counts a batch a rank there, and finds {batch.whole * times} where "
                f"the layout has {batch.whole}"
            )
    for key in _BATCH:
        account.says(key)
    found |= {name: value for name, value in known.items() if value is not None}


def _write_mesh(found: dict[str, Any], exported: Exported, account: Account) -> None:
    """Groups of sequence ranks are made of both sizes (``deepspeed.initialize``), which have to fill all ranks."""
    account.notes(
        "sequence_parallel_size: attention over those ranks is the model's: deepspeed.sequence.layer.DistributedAttention"
    )
    if exported.config.parallel.tensor > 1:
        account.notes(
            "data_parallel_size: DeepSpeed has no mesh of tensor and sequence ranks: give deepspeed.initialize an mpu"
        )
    elif exported.data_ranks is None:
        account.notes("data_parallel_size: without it there are no groups of sequence ranks: give --devices")
    else:
        found["data_parallel_size"] = exported.data_ranks


def _account_for_ranks(exported: Exported, account: Account) -> None:
    """Replicas are the ranks that are left over; groups that shard among themselves there are for parameters alone."""
    if exported.config.parallel.shard is None:
        account.says("parallel.data")
        return
    for key in ("parallel.data", "parallel.shard"):
        account.misses(
            key,
            "state is sharded over all data-parallel ranks: zero_hpz_partition_size keeps a copy of parameters a node alone",
        )
