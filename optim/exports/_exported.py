"""What is exported: a configuration, and what is known of the model, the layout and the machines that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from trine.optim.config import Config
from trine.optim.layout import Layout, arranged
from trine.optim.plan.cluster import Cluster
from trine.optim.plan.constants import Stack
from trine.optim.plan.memory_traits import memory_traits
from trine.optim.plan.workload import Workload
from trine.record.errors import UsageError

__all__ = ["Batch", "Exported"]

#: Tiers that state is moved to.
_ELSEWHERE = ("cpu", "nvme")


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples: of a micro-batch, micro-batches of a step on a rank, and of a step over all ranks; None: not known."""

    micro: int | None
    count: int | None
    whole: int | None

    def over(self, times: int) -> Batch:
        """The same over so many times the ranks, in fewer and then smaller micro-batches; rounded up to a larger whole."""
        if self.whole is None or (self.micro is None and self.count is None):
            return self
        share = (self.micro or 1) * (self.count or 1)
        fewer = -(-share // times)
        whole = self.whole * fewer * times // share
        if self.micro is None or self.count is None:
            return Batch(self.micro and fewer, self.count and fewer, whole)
        micro = next(size for size in range(self.micro, 0, -1) if fewer % size == 0)
        return Batch(micro, fewer // micro, whole)


@dataclass(frozen=True, slots=True)
class Exported:
    """The input of every dialect.

    ``layout``: the planner's row, as ``Layouts.row`` gives it, where the configuration was made of one; ``lacks``: its columns
    that the configuration cannot say, each with a line. ``devices`` and ``nodes`` of the job, where they are known.
    ``stack``: the software that the plan is for, where it says so; ``cluster`` and ``headroom``: what it is planned on, and the share
    of a device's memory that stays free.
    """

    config: Config
    workload: Workload | None = None
    layout: Mapping[str, int | str] | None = None
    devices: int | None = None
    nodes: int | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)
    stack: Stack | None = None
    cluster: Cluster | None = None
    headroom: float = 0.0

    def __post_init__(self) -> None:
        for name in ("devices", "nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be 1 or more, not {value}")
        if self.devices is not None and self.nodes is not None and self.devices % self.nodes:
            raise UsageError(f"{self.devices} devices do not divide over {self.nodes} nodes")

    @property
    def is_mixture(self) -> bool:
        """Whether the model is known to have experts."""
        if self.workload is not None:
            return self.workload.is_mixture
        return self.config.parallel.expert > 1

    @property
    def expert_parts(self) -> int:
        """Tensor ranks that each expert is split over: where nobody says, experts are whole."""
        return self.config.parallel.tensor if self.stack is not None and self.stack.expert_tensor else 1

    @property
    def gradient_bytes(self) -> float | None:
        """Of an element of the gradients that the plan's software sums in bf16, as its memory counts them."""
        return None if self.stack is None else memory_traits(self.stack).bf16_gradient_bytes

    @property
    def operators(self) -> str:
        """Which matmuls the plan's selective recomputation keeps; "none" where it repeats attention's scores alone."""
        return "none" if self.stack is None else self.stack.operators

    @property
    def grid(self) -> Layout | None:
        """Degrees over all devices; None where their number is not known. Raises ``UsageError`` where they do not fit."""
        return None if self.devices is None else arranged(self.config, 0, self.devices)

    @property
    def zero_stage(self) -> int:
        """ZeRO's; where one rank has all of the state every stage is the same, so there what tools ask for before they move it."""
        stage, offload = self.config.zero.stage, self.config.offload
        if stage or self.data_ranks != 1 or self.config.parallel.context != 1:
            return stage
        if offload.parameters in _ELSEWHERE and self.config.parallel.pipeline == 1:
            return 3
        return 1 if offload.optimizer in _ELSEWHERE else 0

    @property
    def replicas(self) -> int | None:
        """Ranks that hold a copy of the same parameters, or of the same shard; None where it is not known."""
        grid = self.grid
        if grid is not None:
            return grid.replicate
        data = self.config.parallel.data
        return data if isinstance(data, int) else None

    @property
    def shards(self) -> int | None:
        """Ranks that ZeRO shards over, 1 without it; None where it is not known."""
        if self.config.zero.stage == 0:
            return 1
        grid = self.grid
        if grid is not None:
            return grid.shard
        shard = self.config.parallel.shard
        return shard if isinstance(shard, int) else None

    @property
    def data_ranks(self) -> int | None:
        """Ranks that see different batches; None where it is not known."""
        grid = self.grid
        if grid is not None:
            return grid.data_ranks
        if self.replicas is None or self.shards is None:
            return None
        return self.replicas * self.shards * self.config.parallel.expert

    @property
    def batch(self) -> Batch:
        """As the layout has it, else what the configuration and the ranks give. Raises ``UsageError`` at a contradiction."""
        if self.layout is not None:
            micro, count = int(self.layout["micro_batch"]), int(self.layout["microbatches"])
            return Batch(micro, count, micro * count * int(self.layout["data"]))
        accumulation, parallel = self.config.accumulation, self.config.parallel
        known: dict[str, Any] = {
            "micro": accumulation.micro_batch,
            "count": parallel.microbatches if parallel.pipeline > 1 else None,
            "whole": accumulation.global_batch,
        }
        if known["count"] is None and accumulation.steps != "auto":
            known["count"] = accumulation.steps if accumulation.steps > 1 else None
        found = {name: value if isinstance(value, int) else None for name, value in known.items()}
        return _completed(Batch(**found), self.data_ranks)


def _completed(batch: Batch, ranks: int | None) -> Batch:
    """What follows from the others: whole = micro · count · ranks; micro-batches count one where only their size is known."""
    micro, count, whole = batch.micro, batch.count, batch.whole
    if ranks is None:
        return batch
    given = [part for part in (micro, count) if part is not None]
    if whole is not None and (
        whole % (prod(given) * ranks) or (len(given) == 2 and whole != prod(given) * ranks)
    ):
        raise UsageError(
            f"accumulation.global_batch = {whole} is not made of micro-batches of {micro or 'any size'}, "
            f"{count or 'any number'} a step, on {ranks} ranks with different batches: change one of them"
        )
    if whole is not None and len(given) < 2:
        share = whole // (prod(given) * ranks)
        micro, count = (
            (share if micro is None else micro),
            (count if count is not None else 1 if micro is None else share),
        )
    elif micro is not None:
        count = count or 1
        whole = micro * count * ranks
    return Batch(micro, count, whole)
