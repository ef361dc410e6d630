"""Replicas that average their gradients: PyTorch's DistributedDataParallel and its ``communication`` keys.

Gradients travel in buckets (Li et al., VLDB 2020): a bucket leaves when all its gradients are there, while
backward goes on. Few large buckets pay few latencies, but the last one leaves at the very end and is fully
exposed; many small ones hide more and pay more latencies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques.compilation import LEAST_BUCKET_MIB
from trine.record.errors import UsageError
from trine.record.hardware import Peaks, calibrated, processor_name

if TYPE_CHECKING:
    import torch

__all__ = [
    "KEYS",
    "NUMERICS",
    "ORDER",
    "QUANTITY",
    "apply",
    "best_bucket_bytes",
    "check",
    "refusal",
]

KEYS = (
    "communication.bucket_mib",
    "communication.first_bucket_mib",
    "communication.gradient_as_view",
    "communication.static_graph",
    "parallel.data",
)
ORDER = 40
QUANTITY = "exposed communication"
NUMERICS = "unchanged but for the order of summation: losses within 1e-6 relative in fp32"

_MIB = 2**20


def refusal(config: Config) -> str | None:
    """Degrees of data parallelism other than all ranks come with the other kinds of parallelism."""
    return None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where there is nothing to communicate, or the replicas do not fit the ranks."""
    wanted = [key for key in KEYS[:4] if config[key] is not None]
    if wanted and facts.ranks == 1:
        raise UsageError(
            f"{wanted[0]} is about several ranks, and this process is alone: start it with torchrun "
            "(and torch.distributed.init_process_group), or take the key out"
        )
    replicas = config.parallel.data
    if config.zero.stage == 0 and replicas not in ("auto", facts.ranks):  # ZeRO's check knows of shards
        raise UsageError(
            f"parallel.data = {replicas}: this version makes one replica a rank, and there are {facts.ranks}: "
            'write "auto"'
        )
    if config.communication.static_graph and config.accumulation.steps not in (1,):
        raise UsageError(
            "communication.static_graph and accumulation.steps cannot be combined: a static graph wants "
            "gradients synchronised in its first backward, which accumulation leaves out. Drop one of them"
        )


def apply(assembly: Assembly) -> None:
    """Wrap the model, or wrap it anew with other options when it is wrapped already."""
    facts = assembly.facts
    if facts.ranks == 1 or assembly.config.zero.stage >= 2:  # FSDP2 averages by itself
        return
    from torch.nn.parallel import DistributedDataParallel

    keys, bucket_note = _options(assembly)
    given = assembly.model
    if isinstance(given, DistributedDataParallel):
        if keys:
            assembly.model = _wrap_anew(given, keys)
    else:
        device_ids = None if facts.device_type == "cpu" else [facts.device]
        assembly.model = DistributedDataParallel(given, device_ids=device_ids, **keys)
        assembly.effects.append(
            Effect("parallel.data", "one process each", f"{facts.ranks} replicas", f"DDP on {facts.backend}")
        )
    wrapped = assembly.model
    assembly.synchronise = lambda wanted: setattr(wrapped, "require_backward_grad_sync", wanted)
    for key in KEYS[:4]:
        value = assembly.config[key]
        if value is not None:
            note = bucket_note if key == "communication.bucket_mib" else ""
            shown = f"{keys['bucket_cap_mb']:.3g}" if value == "auto" and "bucket_cap_mb" in keys else value
            assembly.effects.append(Effect(key, "PyTorch's default", str(shown), note))


def best_bucket_bytes(gradient_bytes: int, alpha_s: float, bytes_per_s: float) -> int:
    """Bucket size that leaves the least time exposed, by a latency–bandwidth model.

    With ``n`` equal buckets behind a longer backward, what stays exposed is the last bucket's transfer
    S/(nβ), and every bucket costs a latency α on the way: n·α + S/(nβ) is least at n = √(S/(αβ)).
    ``gradient_bytes`` is S; α in seconds and β in bytes a second as ``trine hardware --calibrate``
    measures them. At least 64 KiB, at most S.
    """
    buckets = max(1.0, math.sqrt(gradient_bytes / (alpha_s * bytes_per_s)))
    return max(min(gradient_bytes, 64 * 2**10), math.ceil(gradient_bytes / buckets))


def _options(assembly: Assembly) -> tuple[dict[str, Any], str]:
    """Arguments of DistributedDataParallel, and how an ``auto`` bucket was decided."""
    communication = assembly.config.communication
    keys: dict[str, Any] = {}
    note = ""
    bucket = communication.bucket_mib
    if bucket == "auto":
        bucket, note = _automatic_bucket_mib(assembly)
    if communication.first_bucket_mib is not None:
        # One cap a bucket, the last for all that follow; 25 MiB is PyTorch's default.
        keys["bucket_cap_mb_list"] = [communication.first_bucket_mib, bucket or 25.0]
    if bucket is not None:
        keys["bucket_cap_mb"] = bucket
    if communication.gradient_as_view is not None:
        keys["gradient_as_bucket_view"] = communication.gradient_as_view
    if communication.static_graph is not None:
        keys["static_graph"] = communication.static_graph
    return keys, note


def _automatic_bucket_mib(assembly: Assembly) -> tuple[float | None, str]:
    import torch

    facts = assembly.facts
    name = torch.cuda.get_device_name(facts.device) if facts.device_type == "cuda" else processor_name()
    measured: Peaks | None = calibrated(name)
    collective = measured.collective if measured else {}
    if not collective or collective.get("backend") != facts.backend:
        return None, (
            "PyTorch's default: the all-reduce of this machine is not measured yet; run trine hardware --calibrate"
        )
    alpha, beta = float(collective["alpha_s"]), float(collective["bytes_per_s"])
    gradients = sum(p.numel() * p.element_size() for p in assembly.model.parameters() if p.requires_grad)
    size = best_bucket_bytes(gradients, alpha, beta)
    if assembly.config.compute.compile == "model":
        size = max(size, int(LEAST_BUCKET_MIB * _MIB))
    return size / _MIB, f"√ rule from α {alpha * 1e6:.0f} µs and β {beta / 1e9:.2f} GB/s"


def _wrap_anew(given: torch.nn.parallel.DistributedDataParallel, keys: dict[str, Any]) -> torch.nn.Module:
    """A new wrapper round the same module. The old one must never train again: it no longer averages."""
    from torch.nn.parallel import DistributedDataParallel

    kept = {
        "device_ids": given.device_ids,
        "output_device": given.output_device if given.device_ids else None,
        "process_group": given.process_group,
        "find_unused_parameters": given.find_unused_parameters,
        "gradient_as_bucket_view": given.gradient_as_bucket_view,
        "static_graph": given.static_graph,
    }
    given.reducer._remove_autograd_hooks()
    wrapped = DistributedDataParallel(given.module, **{**kept, **keys})

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise UsageError(
            "this DistributedDataParallel was replaced by trine.optimize and no longer averages gradients: "
            "call engine(batch), or engine.model"
        )

    given.forward = refuse  # type: ignore[method-assign]
    return wrapped
