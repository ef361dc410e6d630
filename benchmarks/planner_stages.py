"""How long the stages of the pipelines that Qi et al. 2023 profiled take: profiled, by dimensions, and as the package plans them.

``benchmarks/planner_bubbles.py`` makes bubble rates of them and says where they are from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trine.optim.plan import Bandwidth, Cluster, Layouts, Link, Workload
from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.constants import Stack, stack_named
from trine.optim.plan.devices import device_named
from trine.optim.plan.operators import layer_times
from trine.optim.plan.refine import work_of
from trine.optim.plan.step import rank_times

__all__ = ["PROFILE", "PROFILED", "SEQUENCE", "Machine", "Size", "fit", "package_s", "stages_s"]

SEQUENCE = 1024

#: (hidden, ranks, micro-batches) → microseconds of a stage's F, B and W, and of a message (Qi et al. 2023).
PROFILE: Mapping[tuple[int, int, int], tuple[float, float, float, float]] = {
    (2304, 8, 24): (18522, 18086, 9337, 601),
    (2304, 8, 32): (18513, 18086, 9331, 626),
    (2304, 8, 64): (18546, 18097, 9321, 762),
    (4096, 8, 24): (29718, 29444, 19927, 527),
    (4096, 8, 32): (29802, 29428, 19530, 577),
    (4096, 8, 64): (29935, 29621, 19388, 535),
    (5120, 16, 48): (11347, 11248, 8132, 377),
    (5120, 16, 64): (11307, 11254, 8101, 379),
    (5120, 16, 128): (11325, 11308, 8109, 378),
    (6144, 32, 96): (10419, 10207, 7715, 408),
    (6144, 32, 128): (10408, 10204, 7703, 408),
    (6144, 32, 256): (10402, 10248, 7698, 460),
}
#: Heads by hidden size (table 3 of the paper); else of 128 elements.
HEADS = {2304: 24, 4096: 32, 5120: 40, 6144: 48}


class Size(NamedTuple):
    """What stages' times depend on."""

    layers: int
    hidden: int
    ranks: int
    micro_batch: int

    @property
    def heads(self) -> int:
        """Of attention."""
        return HEADS.get(self.hidden, max(self.hidden // 128, 1))

    @property
    def message_bytes(self) -> float:
        """Of a micro-batch's activations between two stages, in 16 bits."""
        return 2.0 * self.micro_batch * SEQUENCE * self.hidden


#: The models that were profiled.
PROFILED = (Size(22, 2304, 8, 6), Size(30, 4096, 8, 3), Size(46, 5120, 16, 1), Size(62, 6144, 32, 1))
VOCABULARY = 50304
#: Shares of the best matmul's rate and of the memory's that a fit tries.
SHARES = tuple(product(np.arange(0.7, 1.1, 0.01).tolist(), np.arange(0.4, 1.3, 0.025).tolist()))


@dataclass(frozen=True, slots=True)
class Machine:
    """Constants of the machine and its software: shares of the best matmul's and the memory's rate, B over F, and of a message."""

    matmul: float
    memory: float
    by_input: float
    latency_s: float
    bytes_per_s: float


def _cluster(ranks: int) -> Cluster:
    """Nodes of eight A100 SXM 80 GB with RoCE between them (section 5.1)."""
    return Cluster(
        device_named("A100-SXM-80GB"),
        devices_per_node=min(ranks, 8),
        nodes=max(ranks // 8, 1),
        inside=Link(Bandwidth.gigabytes_per_s(600, directions=2)),
        between=Link(Bandwidth.gigabits_per_s(1600, devices=8), kind="roce"),
    )


def workload_of(size: Size) -> Workload:
    """A GPT of these dimensions, with dropout."""
    return Workload(
        name="published",
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        ffn=4 * size.hidden,
        vocab=VOCABULARY,
        sequence=SEQUENCE,
        learned_positions=True,
        dropout=True,
    )


def stack_of() -> Stack:
    """Their software: attention's scores lie in memory, and element-wise kernels are not joined, as the paper's count of
    activations (34 sbh + 5 as²b) has it."""
    return stack_named("Megatron-LM").with_traits(fused_attention=False, fused=False)


@lru_cache(maxsize=64)
def stages_s(size: Size, shares: tuple[tuple[float, float], ...]) -> npt.NDArray[np.float64]:
    """Seconds of F, B and W of the mean stage, embedding and head among them: a row for each (matmul, memory) of ``shares``."""
    matmul, memory = np.array(shares).T
    conditions = replace(Conditions.of(_cluster(size.ranks), stack_of()), matmul=matmul, memory=memory)
    layouts = Layouts.of(
        pipeline=size.ranks, micro_batch=size.micro_batch, microbatches=[size.ranks] * len(shares)
    )
    times = layer_times(Sizes.of(workload_of(size)), conditions, layouts)
    columns = []
    for name in ("forward_s", "input_s", "weight_s"):
        ends = getattr(times.head, name) + getattr(times.embedding, name)
        column = (getattr(times.dense, name) * size.layers + ends) / size.ranks
        columns.append(np.broadcast_to(column, (len(layouts),)))
    return np.stack(columns, axis=1)


@lru_cache(maxsize=64)
def package_s(size: Size) -> tuple[float, float, float, float]:
    """Seconds of F, B and W of the mean stage and of a message between neighbours, as the package plans them."""
    layouts = Layouts.of(pipeline=size.ranks, micro_batch=size.micro_batch, microbatches=size.ranks)
    times = rank_times(workload_of(size), _cluster(size.ranks), stack_of(), layouts)
    work = work_of(times, layouts, 0)
    forward, by_input, by_weight = (
        float(np.mean(each)) for each in (work.forward_s, work.input_s, work.weight_s)
    )
    return forward, by_input, by_weight, work.message_s


@lru_cache(maxsize=8)
def fit(hidden: int) -> Machine:
    """Constants from the published profiles of all models but those of a hidden size: least squares of logarithms, and a line
    for messages."""
    means = {
        size: np.mean([line for key, line in PROFILE.items() if key[0] == size.hidden], axis=0) / 1e6
        for size in PROFILED
        if size.hidden != hidden
    }

    # Logarithms of profiled over modelled F and W: (models, shares, 2).
    ratios = np.stack([np.log(mean[[0, 2]] / stages_s(size, SHARES)[:, ::2]) for size, mean in means.items()])
    matmul, memory = SHARES[int(np.argmin(np.square(ratios).sum(axis=(0, 2))))]
    by_input = float(np.exp(np.mean([np.log(mean[1] / mean[0]) for mean in means.values()])))
    sizes = np.array([size.message_bytes for size in means])
    slope, latency = np.polyfit(sizes, [mean[3] for mean in means.values()], 1)
    return Machine(matmul, memory, by_input, float(latency), float(1 / slope))
