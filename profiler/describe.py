"""What a session says about its run: where it runs, what it trains, and ``rank.json`` and ``run.json``."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trine.record.store import RankWriter

from . import facts
from .collectors import parameters_of
from .conventions import convention_flops
from .facts import autocast_dtype
from .groups import process_groups

if TYPE_CHECKING:
    from .parts import Parts

__all__ = [
    "FACTS_AFTER_STEPS",
    "LENGTHS_AFTER_STEPS",
    "autocast_dtype",
    "description",
    "device_of",
    "facts_at_start",
    "facts_in_training",
    "final",
    "padding_facts",
    "place",
    "run_started_ns",
    "torch_optimizers",
    "warn_without_steps",
    "witness_of",
    "write_run",
]

logger = logging.getLogger("trine")

#: Facts that only training shows (optimizer state, rebuilt buckets, autocast) are read after these steps.
FACTS_AFTER_STEPS = frozenset({2, 12})
#: Lengths of sequences are written more often, in case the run is killed.
LENGTHS_AFTER_STEPS = frozenset({50, 200, 1_000, 5_000})
#: The first session of a process began with it; a later one begins by itself.
_sessions = itertools.count()


def place() -> tuple[int, int, int]:
    """(rank, world size, local rank): of the process group, else of the launcher's environment."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return rank, world_size, int(os.environ.get("LOCAL_RANK", str(rank)))


def device_of(models: Sequence[Any], optimizers: Sequence[Any]) -> tuple[str, int]:
    """(type, index) of the device that trains: where the parameters are, else the one that is in use, else the CPU.

    A device that nobody has used yet is not touched: asking it would make a context on it.
    """
    for parameter in parameters_of(models, optimizers):
        if parameter.device.type != "meta":
            return parameter.device.type, parameter.device.index or 0
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else getattr(torch, accelerator.type, None)
    is_used = getattr(module, "is_initialized", None)
    if accelerator is None or is_used is None or not is_used():
        return "cpu", 0
    return accelerator.type, torch.accelerator.current_device_index()


def witness_of(models: Sequence[Any], optimizers: Sequence[Any]) -> Any:
    """A trainable parameter whose version counter tells of updates that no optimizer hook sees."""
    trainable = [p for p in parameters_of(models, optimizers) if p.requires_grad]
    return trainable[-1] if trainable else None


def torch_optimizers(optimizers: Sequence[Any]) -> list[Any]:
    """Those that are ``torch.optim``'s: their groups and state can be read."""
    return [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer)]


def facts_at_start(session: Parts) -> dict[str, Any]:
    """What is known before the first step."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    exposed = "measured" if session.device[0] == "cpu" else "end of backward"
    return {
        "versions": facts.version_facts(),
        "device": facts.device_facts(*session.device),
        "backend": torch.distributed.get_backend() if distributed else None,
        "exposed_communication": exposed if distributed else "none",
        "run_started_ns": session.run_started_ns,
        **facts_in_training(session),
    }


def facts_in_training(session: Parts) -> dict[str, Any]:
    """What training itself shows; read a few times, each replacing the one before."""
    optimizers = torch_optimizers(session.optimizers)
    model = facts.model_facts(session.models, optimizers, session.sequence)
    if model is not None:
        # Gradients have usually been freed here: they were read when the optimizer had just used them.
        for name, metric in (("gradient_bytes", "gradients"), ("optimizer_bytes", "optimizer")):
            model[name] = session.collectors.held.get(f"memory/{metric}_bytes") or model[name]
    result = {
        "model": model,
        "precision": facts.precision_facts(session.models, session.autocast),
        "optimizer": facts.optimizer_facts(optimizers),
        "data_parallel": facts.data_parallel_facts(session.models),
        "loader": facts.loader_facts(session.loader) if session.loader is not None else None,
        "compile": facts.is_compiled(session.models),
        **padding_facts(session),
    }
    counted = session.facts.get("flops")
    result["flops"] = {**_conventions(session, model), **(counted or {})} or None
    return {name: value for name, value in result.items() if value is not None}


def padding_facts(session: Parts) -> dict[str, Any]:
    """How long the sequences were, where batches said so."""
    found = session.padding.facts()
    return {} if found is None else {"padding": found}


def run_started_ns() -> int:
    """When this run began, Unix ns: with its process, if this is the process's first session and nobody sits at a
    prompt in it; else now. The process's age is known to 10 ms (``/proc/self/stat``, proc(5), field 22)."""
    now = time.time_ns()
    if next(_sessions) or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return now
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:  # noqa: PTH123 - a file of the kernel
            ticks = int(file.read().rpartition(")")[2].split()[19])
        if ticks <= 0:  # a sandbox that does not keep it
            return now
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now  # no Linux
    return now - max(round(age_s * 1e9), 0)


def _conventions(session: Parts, model: dict[str, Any] | None) -> dict[str, Any]:
    """FLOPs by the named conventions, for the tokens of one step of this rank."""
    tokens = session.tokens_per_step
    if model is None or not tokens:
        return {}
    return convention_flops(model["shape"], model["parameters_without_embedding"], tokens)


def description(session: Parts) -> dict[str, Any]:
    """``rank.json`` as it should be now."""
    background = session.background
    source = session.collectors.source
    groups = session.guard.run("groups", process_groups) or ()
    if groups:
        session.groups = [
            {"id": group.id, "name": group.name, "description": group.description, "ranks": list(group.ranks)}
            for group in groups
        ]
    device = session.facts.get("device", {})
    return {
        "local_rank": session.local_rank,
        "metadata": {**session.facts, "collectives_source": "none" if source is None else source.name},
        "groups": session.groups,
        "devices": [
            {
                "index": device.get("index", 0),
                "name": device.get("name"),
                "memory_bytes": device.get("memory_bytes"),
            }
        ]
        if device
        else [],
        "clock": {"offset_ns": session.anchor.offset_ns},
        "notes": session.guard.notes,
        "overflow": dict(background.overflow) if background is not None else {},
    }


def write_run(session: Parts, writer: RankWriter) -> None:
    """``run.json``, by the first rank alone."""
    if session.rank != 0:
        return
    known = (
        "model",
        "device",
        "versions",
        "backend",
        "precision",
        "optimizer",
        "data_parallel",
        "configuration",
    )
    writer.describe_run(
        {
            "name": session.path.name,
            "world_size": session.world_size,
            "command": sys.argv,
            "folder": os.getcwd(),  # noqa: PTH109 - a string for JSON
            **{name: session.facts.get(name) for name in known},
        }
    )


def final(error: BaseException | None) -> dict[str, Any]:
    """How the run ended: ``finished``, ``stopped`` by the user or ``failed``, and by which exception."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        state = "finished"
    else:
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    line = None if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return {"state": state, "ended_ns": time.time_ns(), "error": line}


def warn_without_steps(session: Parts) -> None:
    """A session that saw no step has written nothing: say why, since silence would look like success."""
    logger.warning(
        "%s: no step was seen, so nothing was recorded; iterate over prof.steps(loader), or call prof.step() after each",
        session.path,
    )
