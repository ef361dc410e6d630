"""How the all-reduce of gradients goes over the machine: ``communication.algorithm`` and ``communication.nccl``.

``ring``, ``tree`` and ``two_level`` are Trine's own, over point-to-point messages, for backends and networks whose own
choice is poor; ``auto`` compares them with the backend's own all-reduce for each size, from latency and bandwidth
measured inside and across nodes, and leaves everything as it is where the backend's is the fastest. ``nccl`` is a table
of hints for NCCL, applied to a communicator that is made for the gradients.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from trine.optim._schema import spell
from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques._needs import require_plain_gradients, require_plain_layout, require_ranks
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trine.optim.topology import Topology

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("communication.algorithm", "communication.nccl")
ORDER = 36
QUANTITY = "communication time; bytes between nodes"
NUMERICS = "unchanged but for the order of summation: losses within 1e-6 relative in fp32"

_ALGORITHM, _NCCL = KEYS
#: Compressions that send their values through any all-reduce; the others have an exchange of their own.
_SUMMED = ("none", "bf16", "fp16")
#: NCCL's own names, as its environment variables take them.
_NCCL_NAMES = {
    "algo": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT"),
    "proto": ("LL", "LL128", "Simple"),
}
_NCCL_NUMBERS = {"min_channels": (1, 64), "max_channels": (1, 64), "cga_cluster_size": (0, 8)}


def refusal(config: Config) -> str | None:
    """A hint that NCCL has not, or a value that it does not take."""
    hints = config.communication.nccl
    if not hints:
        return None
    for name, value in hints.items():
        reason = _reason_against(name, value)
        if reason:
            return reason
    least, most = hints.get("min_channels"), hints.get("max_channels")
    if least is not None and most is not None and least > most:
        return f"{_NCCL}: min_channels = {least} is above max_channels = {most}"
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Another order of summation."""
    return Tolerance(1e-6, 1e-5) if config.communication.algorithm is not None else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where there is nothing to choose, or where another technique exchanges gradients."""
    key = next((key for key in KEYS if config[key]), None)
    if key is None:
        return
    require_ranks(key, facts)
    require_plain_layout(
        key, facts, "it is about the all-reduce of DistributedDataParallel, and here FSDP2 averages"
    )
    if config.zero.stage >= 2:
        raise UsageError(
            f"{key} is about DDP's all-reduce, and zero.stage = {config.zero.stage} scatters gradients by FSDP2: "
            "take the key out; parallel.shard with fewer ranks than all shards inside nodes and replicates across"
        )
    if config.communication.algorithm is not None:
        _check_algorithm(config, facts)
    if config.communication.nccl:
        _check_nccl(config, facts)


def apply(assembly: Assembly) -> None:
    """Set the reduction that DDP's hook will run, or the process group that DDP will use."""
    communication = assembly.config.communication
    if communication.nccl:
        from trine.optim.runtime.nccl_hints import hinted_group

        assembly.process_group = hinted_group(communication.nccl, assembly.facts.device)
        shown = ", ".join(f"{name} {_words(value)}" for name, value in communication.nccl.items())
        assembly.effects.append(
            Effect(_NCCL, "NCCL's own choice", shown, "on a communicator for gradients alone")
        )
    if communication.algorithm is not None:
        _apply_algorithm(assembly, communication.algorithm)


# --- parts -------------------------------------------------------------------------------------


def _check_algorithm(config: Config, facts: Facts) -> None:
    topology = facts.topology
    compression = config.communication.compression
    if compression not in _SUMMED:
        raise UsageError(
            f'communication.compression = "{compression}" has an exchange of its own, which {_ALGORITHM} cannot '
            f'change: drop one of them, or compress to "bf16"'
        )
    if config.communication.algorithm == "two_level":
        _check_levels(topology)
    require_plain_gradients(_ALGORITHM, facts)


def _check_levels(topology: Topology) -> None:
    way_out = f'use {_ALGORITHM} = "ring", or say where nodes end with TRINE_RANKS_PER_NODE'
    if topology.nodes == 1:
        raise UsageError(
            f'{_ALGORITHM} = "two_level" needs several nodes, and the launcher says that all {topology.ranks} ranks '
            f"are on one: {way_out}"
        )
    if topology.ranks_per_node == 1:
        raise UsageError(
            f'{_ALGORITHM} = "two_level" needs several ranks on a node, and there is one on each: {way_out}'
        )


def _check_nccl(config: Config, facts: Facts) -> None:
    if facts.device_type != "cuda" or facts.backend not in ("nccl", "undefined"):
        raise UsageError(
            f"{_NCCL} has hints for NCCL, and gradients travel by {facts.backend} on {facts.device_type} here: "
            "take the key out"
        )
    replacing = ((_ALGORITHM, None), ("communication.compression", "none"), ("accumulation.delayed", False))
    for key, plain in replacing:
        if config[key] != plain:
            raise UsageError(
                f"{_NCCL} is about DDP's all-reduce, which {key} = {spell(config[key])} replaces: drop one of them, "
                "or set NCCL_ALGO and NCCL_PROTO in the launcher's environment"
            )


def _apply_algorithm(assembly: Assembly, algorithm: str) -> None:
    from trine.optim.runtime.exchange import selection
    from trine.optim.runtime.exchange.hooks import install
    from trine.optim.runtime.exchange.sums import AllReduce
    from trine.optim.runtime.exchange.thread import thread_of
    from trine.optim.runtime.exchange.trial import corrected
    from trine.optim.runtime.memory_fit import bytes_of

    facts = assembly.facts
    topology = facts.topology
    gradients = bytes_of(p for p in assembly.model.parameters() if p.requires_grad)
    names = selection.candidates(algorithm, topology)
    # A ring has nothing to decide by them, but bucket_mib = "auto" has.
    is_needed = algorithm != "ring" or assembly.config.communication.bucket_mib == "auto"
    costs = selection.measure_costs(topology, facts.device) if is_needed else None
    if costs is not None:
        costs = corrected(costs, names, gradients, facts.device)
    if costs is None:
        choices: tuple[selection.Range, ...] = (selection.Range(gradients, "ring", 0.0),)
        note = f"{topology.ranks} ranks"
    else:
        choices = selection.ranges(costs, names, gradients)
        note = selection.inputs(costs)
    if {choice.name for choice in choices} == {"backend"}:
        assembly.effects.append(
            Effect(_ALGORITHM, "the backend's own", "the backend's own at every size", note)
        )
        return
    thread = thread_of(assembly)
    selection.connect(thread.group, facts.device)
    summed = selection.Selected(choices, costs, topology, thread.group)
    reduction = AllReduce(summed, facts.ranks, name=algorithm)
    assembly.reduction = reduction
    assembly.finish.append(install)
    assembly.effects.append(Effect(_ALGORITHM, "the backend's own", selection.described(choices), note))
    if assembly.config.communication.compression == "none":
        _count(assembly, reduction.sent_bytes)


def _count(assembly: Assembly, sent_bytes: Callable[[], int]) -> None:
    """Bytes of the step that ends, from a count since the start."""
    before = [0]
    assembly.metrics["communication/sent_bytes"] = lambda: float(sent_bytes() - before[0])
    assembly.after_step.append(lambda: before.__setitem__(0, sent_bytes()))


def _reason_against(name: str, value: Any) -> str | None:
    if name in _NCCL_NAMES:
        known = _NCCL_NAMES[name]
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(each, str) or each not in known:
                return f"{_NCCL}: {name} = {each!r} is none of {', '.join(known)}{_near(each, known)}"
        return None if value else f"{_NCCL}: {name} names nothing: take it out"
    if name in _NCCL_NUMBERS:
        least, most = _NCCL_NUMBERS[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            return f"{_NCCL}: {name} = {value!r} is no whole number from {least} to {most}"
        return None
    known = (*_NCCL_NAMES, *_NCCL_NUMBERS)
    return (
        f"{_NCCL}: there is no hint {name}{_near(name, known)}: it takes {', '.join(known)}; NCCL reads its other "
        "settings once, before its first communicator: set them in the launcher's environment"
    )


def _near(value: Any, known: tuple[str, ...]) -> str:
    lowered = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(value).lower(), lowered, n=1)
    return f' (did you mean "{lowered[near[0]]}"?)' if near else ""


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
