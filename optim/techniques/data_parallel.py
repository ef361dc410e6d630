"""Replicas that average their gradients: PyTorch's DistributedDataParallel and its ``communication`` keys.

Gradients travel in buckets (Li et al., VLDB 2020): a bucket leaves when all its gradients are there, while
backward goes on. Few large buckets pay few latencies, but the last one leaves at the very end and is fully
exposed; many small ones hide more and pay more latencies. ``bucket_mib = "auto"`` begins with the √ rule below and
decides after five steps from the times at which gradients were really ready.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques._needs import require_no_gradient_hooks, require_plain_layout, require_ranks
from trine.optim.techniques.compilation import LEAST_BUCKET_MIB
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "KEYS",
    "NUMERICS",
    "ORDER",
    "QUANTITY",
    "apply",
    "best_bucket_bytes",
    "check",
    "refusal",
    "tolerance",
]

KEYS = (
    "communication.bucket_mib",
    "communication.first_bucket_mib",
    "communication.gradient_as_view",
    "communication.static_graph",
    "communication.overlap",
    "parallel.data",
)
ORDER = 40
QUANTITY = "exposed communication"
NUMERICS = "unchanged but for the order of summation: losses within 1e-6 relative in fp32"

_OPTIONS = KEYS[:5]
_BUCKET, _FIRST, _AS_VIEW, _STATIC, _OVERLAP = _OPTIONS
_MIB = 2**20
#: PyTorch's default, which follows a first bucket of another size.
_DEFAULT_MIB = 25.0


def refusal(config: Config) -> str | None:
    """Degrees of data parallelism other than all ranks come with the other kinds of parallelism."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Buckets change the order of summation within the all-reduce."""
    return Tolerance(1e-6, 1e-5) if any(config[key] is not None for key in _OPTIONS) else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where there is nothing to communicate, or the replicas do not fit the ranks."""
    wanted = [key for key in _OPTIONS if config[key] is not None]
    if wanted:
        require_ranks(wanted[0], facts)
        require_plain_layout(
            wanted[0],
            facts,
            "it is an option of DistributedDataParallel, and beside it FSDP2 averages gradients",
        )
    if facts.layout.is_hybrid:
        _check_unwrapped(facts)
        require_no_gradient_hooks(facts.layout.hybrid_key(), facts)
        return
    _check_whole(config, facts)
    replicas = config.parallel.data
    if config.zero.stage == 0 and replicas not in ("auto", facts.ranks):  # ZeRO's check knows of shards
        raise UsageError(
            f"parallel.data = {replicas}: this version makes one replica a rank, and there are {facts.ranks}: "
            'write "auto"'
        )
    if config.communication.static_graph and config.accumulation.splits:
        key = next(key for key in config.changes() if key.startswith("accumulation."))
        raise UsageError(
            f"{_STATIC} and {key} cannot be combined: a static graph wants "
            "gradients synchronised in its first backward, which accumulation leaves out. Drop one of them"
        )
    if config.communication.overlap is False:
        for key in (_BUCKET, _FIRST):
            if config[key] is not None:
                raise UsageError(
                    f"{_OVERLAP} = false sends all gradients in one bucket after backward, and {key} cuts them: "
                    "drop one of them"
                )
    _check_compiled(config, facts)
    if wanted or config.communication.nccl:
        _check_wrapper(wanted[0] if wanted else "communication.nccl", facts)


def apply(assembly: Assembly) -> None:
    """Wrap the model, or wrap it anew with other options when it is wrapped already."""
    facts = assembly.facts
    if facts.ranks == 1 or assembly.config.zero.stage >= 2:  # FSDP2 averages by itself
        return
    if facts.layout.is_hybrid:
        _replicate(assembly)
        return
    from torch.nn.parallel import DistributedDataParallel

    from trine.optim.runtime.replicas import DdpTimes, wrap, wrap_anew

    automatic = _Automatic(assembly) if assembly.config.communication.bucket_mib == "auto" else None
    options = _options(assembly, automatic)
    given = assembly.model
    if isinstance(given, DistributedDataParallel):
        if options:
            assembly.model = wrap_anew(given, options)
    else:
        assembly.model = wrap(given, facts.device, options)
        assembly.effects.append(
            Effect("parallel.data", "one process each", f"{facts.ranks} replicas", f"DDP on {facts.backend}")
        )
    # Looked up at each call: the model may be wrapped anew later.
    assembly.synchronise = lambda wanted: setattr(assembly.model, "require_backward_grad_sync", wanted)
    # Else a program that goes on by itself, after an accumulation that was left, would train its replicas apart.
    assembly.closers.append(lambda: setattr(assembly.model, "require_backward_grad_sync", True))
    _tell(assembly, options, automatic)
    if automatic is not None:
        automatic.start()
    times = DdpTimes(lambda: assembly.model)
    assembly.metrics["communication/exposed_ns"] = times.exposed_ns
    assembly.metrics["communication/overlap"] = times.overlap
    assembly.after_step.append(times.after_step)


def _replicate(assembly: Assembly) -> None:
    from trine.optim.runtime.sharding import replicate_model

    replicate_model(assembly)
    layout = assembly.facts.layout
    replicas = layout.size("replicate", "expert", "context")
    if replicas > 1:
        assembly.effects.append(
            Effect(
                "parallel.data",
                "one process each",
                f"{replicas} ranks that average",
                f"PyTorch's replicate, {layout}",
            )
        )


def best_bucket_bytes(gradient_bytes: int, alpha_s: float, bytes_per_s: float) -> int:
    """Bucket size that leaves the least time exposed, by a latency–bandwidth model.

    With ``n`` equal buckets behind a longer backward, what stays exposed is the last bucket's transfer
    S/(nβ), and every bucket costs a latency α on the way: n·α + S/(nβ) is least at n = √(S/(αβ)).
    ``gradient_bytes`` is S; α in seconds and β in bytes a second as ``trine hardware --calibrate``
    measures them. At least 64 KiB, at most S.
    """
    buckets = max(1.0, math.sqrt(gradient_bytes / (alpha_s * bytes_per_s)))
    return max(min(gradient_bytes, 64 * 2**10), math.ceil(gradient_bytes / buckets))


# --- parts -------------------------------------------------------------------------------------


def _check_whole(config: Config, facts: Facts) -> None:
    """Replicas are of whole parameters; ZeRO's own check speaks for its shards."""
    if facts.ranks == 1 or config.zero.stage != 0:
        return
    for name, parameter in facts.model.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise UsageError(
                f"parallel.data: {name} is sharded already (a DTensor), and ranks replicate whole parameters: give "
                "trine.optimize the model as it was before fully_shard, with zero.stage = 3 to shard it"
            )


def _check_unwrapped(facts: Facts) -> None:
    """Other kinds of parallelism replace parameters under a wrapper's feet."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(facts.model, (DistributedDataParallel, FSDPModule)):
        raise UsageError(
            f"{facts.layout.hybrid_key()} takes the plain model, and this is wrapped ({type(facts.model).__name__}): give "
            "trine.optimize what is inside"
        )


def _check_compiled(config: Config, facts: Facts) -> None:
    """Compiled regions (``compute.fuse``) keep PyTorch's cutter out; blocks and whole models do not."""
    if config.compute.compile is False or facts.ranks == 1:
        return
    size = max(
        (config[key] for key in (_BUCKET, _FIRST) if isinstance(config[key], (int, float))), default=None
    )
    if config[_BUCKET] not in (None, "auto") and size is not None and size < LEAST_BUCKET_MIB:
        raise UsageError(
            f"{_BUCKET} = {size:g} is too small for compute.compile: PyTorch cuts compiled graphs at DDP's buckets and takes "
            f"none below {LEAST_BUCKET_MIB:g} MiB. Use that, or drop one of them"
        )


def _check_wrapper(key: str, facts: Facts) -> None:
    """A wrapper that the program made is replaced by one with other options: nothing of it may get lost."""
    if facts.ranks == 1:
        return
    from trine.optim.runtime.replicas import cannot_be_wrapped_anew

    lost = cannot_be_wrapped_anew(facts.model)
    if lost:
        raise UsageError(
            f"{key} makes DistributedDataParallel anew, and this one has {lost}, or take the key out"
        )


def _options(assembly: Assembly, automatic: _Automatic | None) -> dict[str, Any]:
    """Arguments of DistributedDataParallel."""
    communication = assembly.config.communication
    options: dict[str, Any] = {}
    bucket: Any = automatic.first_mib if automatic is not None else communication.bucket_mib
    if communication.overlap is False:
        bucket = _gradient_bytes(assembly) / _MIB + 1.0  # never full before backward ends
    if communication.first_bucket_mib is not None:
        # One cap a bucket, the last for all that follow.
        options["bucket_cap_mb_list"] = [communication.first_bucket_mib, bucket or _DEFAULT_MIB]
    if bucket is not None:
        options["bucket_cap_mb"] = bucket
    if communication.gradient_as_view is not None:
        options["gradient_as_bucket_view"] = communication.gradient_as_view
    if communication.static_graph is not None:
        options["static_graph"] = communication.static_graph
    if assembly.process_group is not None:
        options["process_group"] = assembly.process_group
    return options


def _tell(assembly: Assembly, options: dict[str, Any], automatic: _Automatic | None) -> None:
    for key in _OPTIONS:
        value = assembly.config[key]
        if value is None or (key == _OVERLAP and value is True):  # DDP overlaps by itself
            continue
        if key == _BUCKET and automatic is not None:
            effect = Effect(key, "PyTorch's default", f"{options['bucket_cap_mb']:.3g}", automatic.note)
        elif key == _OVERLAP:
            effect = Effect(key, "while backward goes on", "after backward, in one bucket")
        else:
            effect = Effect(key, "PyTorch's default", str(value))
        assembly.effects.append(effect)


def _gradient_bytes(assembly: Assembly) -> int:
    from trine.optim.runtime.memory_fit import bytes_of

    return bytes_of(p for p in assembly.model.parameters() if p.requires_grad)


class _Automatic:
    """The first guess by the √ rule, and what will decide later."""

    def __init__(self, assembly: Assembly) -> None:
        from trine.optim.runtime.buckets import LEAST_CAP_BYTES
        from trine.optim.runtime.links import link_of

        self._assembly = assembly
        link = link_of("all_reduce", assembly.facts.device, assembly.process_group)
        self._seconds: Callable[[float], float] = link.seconds
        self._told = str(link)
        # Ring, tree and two-level know what they cost.
        predicted: Any = getattr(getattr(assembly.reduction, "sum_over", None), "seconds", None)
        if assembly.reduction is not None and predicted is not None and predicted(_MIB) is not None:
            self._seconds = predicted
            self._told = f"communication.algorithm = {assembly.reduction.name} as predicted"
        if assembly.config.communication.compression != "none":
            self._told += ", as if not compressed"
        size = best_bucket_bytes(_gradient_bytes(assembly), link.alpha_s, link.bytes_per_s)
        #: PyTorch cut the compiled graph at these buckets: they stay.
        self._is_final = assembly.config.compute.compile == "model"
        is_compiled = assembly.config.compute.compile is not False
        self._least_bytes = int(LEAST_BUCKET_MIB * _MIB) if is_compiled else LEAST_CAP_BYTES
        size = max(size, self._least_bytes if is_compiled else 0)
        self._first_bytes = size
        self.first_mib = size / _MIB
        later = "" if self._is_final else "; decided after the first steps"
        self.note = f"√ rule from {link}{later}"

    def start(self) -> None:
        """Measure when gradients are ready, and decide."""
        assembly = self._assembly
        first = assembly.config.communication.first_bucket_mib
        assembly.metrics["communication/bucket_bytes"] = lambda: float(self._first_bytes)
        if self._is_final:
            return
        from trine.optim.runtime.bucket_tuning import BucketTuning

        tuning = BucketTuning(
            assembly,
            self._first_bytes,
            self._seconds,
            self._told,
            self._least_bytes,
            first_cap_bytes=None if first is None else int(first * _MIB),
        )
        assembly.metrics["communication/bucket_bytes"] = lambda: float(tuning.cap_bytes)
        assembly.after_step.append(tuning.after_step)
