"""What a caller asks of a plan, checked: models, clusters, numbers and pins by the types that Python passes.

A command line hands over text that it has parsed; a notebook hands over anything. Each is refused in one line, before a search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

from trine.optim.plan.cluster import Cluster
from trine.optim.plan.cluster_files import cluster_of, sized
from trine.optim.plan.constants import Stack, stack_named
from trine.optim.plan.cost import parse_count
from trine.optim.plan.from_module import workload_of_module
from trine.optim.plan.workload import Workload
from trine.optim.plan.workload_files import workload_of
from trine.record.errors import UsageError

__all__ = [
    "Module",
    "asked_cluster",
    "asked_number",
    "asked_pins",
    "asked_search",
    "asked_share",
    "asked_stack",
    "asked_tokens",
    "asked_whole",
    "asked_workload",
]

#: The software that a plan is for where nobody says.
_USUAL_STACK = "megatron-core"
#: Families that Megatron-Core has no kernels for.
_STACKS = {"cpu": "trine", "tpu": "maxtext"}


class Module(Protocol):
    """What a ``torch.nn.Module`` shows of itself: torch is not imported here."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """By their names."""

    def named_modules(self) -> Iterable[tuple[str, Any]]:
        """By their names."""


def asked_workload(model: Any, sequence: int | None) -> Workload:
    """Of a name, a file, a workload, or a live module, whose sequences' length only the caller knows."""
    if isinstance(model, Workload):
        return model if sequence is None else model.with_changes(sequence=sequence)
    if isinstance(model, str | Path):
        return workload_of(model, sequence=sequence)
    if not hasattr(model, "named_parameters"):
        raise UsageError(
            f"model must be a known model's name, a file, a Workload or a torch.nn.Module, not {_shown(model)}"
        )
    if sequence is None:
        raise UsageError(
            f"sequence: {type(model).__name__} does not say how many tokens a sample has: sequence=2048"
        )
    return workload_of_module(model, sequence=sequence)


def asked_cluster(cluster: Any, devices: int | None) -> Cluster:
    """Of a name, a file or a cluster, with as many devices as are asked for."""
    if isinstance(cluster, Cluster):
        return cluster if devices is None else sized(cluster, devices)
    if isinstance(cluster, str | Path):
        return cluster_of(cluster, devices)
    raise UsageError(
        f"cluster must be a known cluster's or device's name, a file or a Cluster, not {_shown(cluster)}"
    )


def asked_stack(stack: Any, cluster: Cluster) -> Stack:
    """What is asked for; else what trains on such devices."""
    if isinstance(stack, Stack):
        return stack
    if stack is not None and not isinstance(stack, str):
        raise UsageError(f"stack must be a software stack's name, not {_shown(stack)}")
    return stack_named(stack or _STACKS.get(cluster.device.family, _USUAL_STACK))


def asked_whole(name: str, value: Any) -> int | None:
    """A whole number, or None where it is not asked for."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name} must be a whole number, not {_shown(value)}")
    return int(value)


def asked_number(name: str, value: Any) -> float | None:
    """A number, or None where it is not asked for."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number, not {_shown(value)}")
    return float(value)


def asked_share(name: str, value: Any) -> float:
    """A number that has to be given."""
    found = asked_number(name, value)
    if found is None:
        raise UsageError(f"{name} must be a number, not None")
    return found


def asked_tokens(value: Any) -> float | None:
    """A number of tokens, also as people write it: ``"15T"``."""
    return parse_count(value) if isinstance(value, str) else asked_number("tokens", value)


def asked_pins(pins: Any) -> list[str]:
    """As people write them: ``["tensor=8", "schedule=1f1b,zb-v"]``."""
    if isinstance(pins, Mapping):
        return [f"{name}={_pinned(value)}" for name, value in pins.items()]
    return _words("pins", pins, 'pins={"tensor": 8} or ["tensor=8"]')


def asked_search(search: Any) -> list[str]:
    """Names of what is searched, too."""
    return _words("search", search, 'search=["precision"]')


def _words(name: str, value: Any, example: str) -> list[str]:
    words = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    strange = next((word for word in words if not isinstance(word, str)), None)
    if strange is not None:
        raise UsageError(f"{name} must be words, not {_shown(strange)}: {example}")
    return words


def _pinned(value: Any) -> str:
    values = value if isinstance(value, list | tuple | set | frozenset | range) else [value]
    return ",".join(str(int(one) if isinstance(one, bool) else one) for one in values)


def _shown(value: Any) -> str:
    """A value for a message: short ones as they are, others by their type."""
    words = repr(value)
    return words if len(words) <= 40 and "\n" not in words else f"a {type(value).__name__}"
