"""How long a step takes: what layers compute, what ranks tell each other, what the schedule leaves idle, and what is fixed.

    found = predict(workload, cluster, stack_named("megatron-core"), layouts)
    found.step_s, found.low_s, found.high_s, found.parts["exposed_gradients"], found.mfu("megatron")

Columns over layouts; no simulation. Parts sum to the step. Symbols as in :mod:`trine.optim.plan.layouts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from trine.optim.plan.closed_form import bubble_s, busiest_s
from trine.optim.plan.cluster import Cluster
from trine.optim.plan.columns import Column, Conditions, Sizes
from trine.optim.plan.constants import Stack, spread
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory import MemoryEstimate, memory_of
from trine.optim.plan.operators import LayerTimes, Pass, layer_times, repeated_share
from trine.optim.plan.stages import stage_layers
from trine.optim.plan.traffic import Traffic, layer_calls, traffic_of
from trine.optim.plan.waits import Waits, waits_of
from trine.optim.plan.workload import Convention, Workload

__all__ = ["PARTS", "Estimates", "RankTimes", "parts_of", "predict", "rank_times"]

#: What a step's time is made of.
PARTS = (
    "compute",
    "recomputation",
    "tensor_communication",
    "context_communication",
    "expert_communication",
    "pipeline_bubble",
    "pipeline_messages",
    "exposed_gradients",
    "gathers",
    "offload",
    "optimizer",
    "overhead",
)


#: Between the sum of host's and device's time (1) and the longer of both (infinite).
_ALONGSIDE = 3.0


def _longer(host_s: Column, device_s: Column) -> Column:
    """Of a host that runs ahead of its device for some of the time."""
    longest = np.maximum(np.maximum(host_s, device_s), 1e-30)
    ratio = np.minimum(host_s, device_s) / longest
    return np.asarray(longest * (1 + ratio**_ALONGSIDE) ** (1 / _ALONGSIDE))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Predictions, a row a layout. ``parts``: seconds a step by name, which sum to ``step_s``.

    ``low_s`` to ``high_s``: where nine of ten runs that no fit had seen lay. ``stack``: the software they are for (``software``, with its
    traits); the same inputs under another differ by a quarter and more.
    """

    layouts: Layouts
    workload: Workload
    cluster: Cluster
    stack: str
    parts: Mapping[str, Column]
    step_s: Column
    low_s: Column
    high_s: Column
    software: Stack
    frozen: bool = False

    @property
    def memory(self) -> MemoryEstimate:
        """What each layout needs of a device's memory, computed when it is asked for."""
        return memory_of(self.workload, self.cluster, self.software, self.layouts, frozen=self.frozen)

    @property
    def tokens_per_s(self) -> Column:
        """Of the whole job."""
        return self.layouts.global_batch * self.workload.sequence / self.step_s

    def mfu(self, convention: Convention = "megatron", precision: str = "bf16") -> Column:
        """Share of the devices' dense peak of ``precision`` that the model's FLOPs by ``convention`` come to."""
        flops = self.workload.model_flops(convention) * self.tokens_per_s
        return np.asarray(flops / self.layouts.devices / self.cluster.device.peak(precision))


def predict(
    workload: Workload, cluster: Cluster, stack: Stack, layouts: Layouts, *, frozen: bool = False
) -> Estimates:
    """Every layout's step. ``frozen``: weights are not trained, only adapters beside them.

    A layout is taken as it is: whether it divides, fits the memory or the cluster is for the search to say.
    """
    parts = parts_of(Sizes.of(workload, frozen=frozen), Conditions.of(cluster, stack), layouts)
    step_s = sum(parts.values(), np.zeros(len(layouts)))
    known = spread()
    return Estimates(
        layouts=layouts,
        workload=workload,
        cluster=cluster,
        stack=stack.name,
        parts=parts,
        step_s=step_s,
        low_s=step_s * known.low,
        high_s=step_s * known.high,
        software=stack,
        frozen=frozen,
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """Seconds of one rank on one micro-batch (all its chunks): forward, backward by input and by weight."""

    forward_s: Column
    input_s: Column
    weight_s: Column

    @property
    def total_s(self) -> Column:
        return self.forward_s + self.input_s + self.weight_s

    def plus(self, forward: Column, by_input: Column, by_weight: Column) -> _Rank:
        return _Rank(self.forward_s + forward, self.input_s + by_input, self.weight_s + by_weight)

    @property
    def times(self) -> tuple[Column, Column, Column]:
        return self.forward_s, self.input_s, self.weight_s


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What ranks of a pipeline take for one micro-batch (all their chunks): a middle one, and the first and last without and
    with the embedding and the head. ``message_s``: from one rank to the next; ``steady_messages_s``: what a rank waits for its
    own, once the pipeline is full. ``layers``: of the model."""

    middle: _Rank
    ends: _Rank
    first: _Rank
    last: _Rank
    middle_layers: Column
    message_s: Column
    steady_messages_s: Column
    layers: Column


def rank_times(workload: Workload, cluster: Cluster, stack: Stack, layouts: Layouts) -> RankTimes:
    """Of every layout: what a simulation of its schedule is made of."""
    return _ranks(Sizes.of(workload), Conditions.of(cluster, stack), layouts, None)[0]


def _ranks(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, waits: Waits | None
) -> tuple[RankTimes, Traffic, _Layer]:
    times = layer_times(sizes, conditions, layouts)
    traffic = traffic_of(sizes, conditions, layouts, times, waits or waits_of(sizes, conditions, layouts))
    layer = _Layer.of(sizes, conditions, layouts, times, traffic)
    middle_layers, end_layers = stage_layers(sizes.layers, layouts["pipeline"])
    ends = layer.rank(end_layers)
    embedding, head = _trained(times.embedding, sizes), _trained(times.head, sizes)
    found = RankTimes(
        middle=layer.rank(middle_layers),
        ends=ends,
        first=ends.plus(embedding.forward_s + traffic.embedding_s, embedding.input_s, embedding.weight_s),
        last=ends.plus(head.forward_s, head.input_s + traffic.head_s, head.weight_s),
        middle_layers=middle_layers,
        message_s=traffic.message_s,
        steady_messages_s=traffic.steady_messages_s,
        layers=np.broadcast_to(sizes.layers, middle_layers.shape),
    )
    return found, traffic, layer


def parts_of(
    sizes: Sizes, conditions: Conditions, layouts: Layouts, waits: Waits | None = None
) -> dict[str, Column]:
    """Seconds a step by name (:data:`PARTS`); sizes and conditions of length one, or a row a layout.

    ``waits``: the same of an earlier call with other constants.
    """
    ranks, traffic, layer = _ranks(sizes, conditions, layouts, waits)
    middle, first, last, middle_layers = ranks.middle, ranks.first, ranks.last, ranks.middle_layers
    count = layouts["microbatches"].astype(np.float64)
    busiest = busiest_s(
        layouts["schedule"], layouts["pipeline"], *middle.times, first=first.times, last=last.times
    )
    idle, messages = (
        bubble_s(
            layouts["schedule"],
            layouts["pipeline"],
            layouts["chunks"],
            layouts["microbatches"],
            *middle.times,
            message_s,
            first=first.times,
            last=last.times,
        )
        for message_s in (np.zeros(len(layouts)), traffic.message_s)
    )
    # Parts of the busiest rank, by the middle rank's mixture of them.
    share = busiest * count / np.maximum(middle_layers * layer.total_s * count, 1e-30)
    work = {name: value * middle_layers * count * share for name, value in layer.parts.items()}
    return {
        **{name: np.zeros(len(layouts)) for name in PARTS},
        **work,
        "pipeline_bubble": idle,
        "pipeline_messages": messages - idle + traffic.steady_messages_s * count,
        "exposed_gradients": traffic.exposed_gradients_s,
        "gathers": work["gathers"] + traffic.first_gather_s,
        "offload": traffic.offload_s,
        "optimizer": traffic.optimizer_s,
        "overhead": work["overhead"] + conditions.microbatch_s * count + conditions.step_s,
    }


def _trained(block: Pass, sizes: Sizes) -> Pass:
    """Without weight gradients where weights are frozen."""
    return Pass(
        block.forward_s,
        block.input_s,
        block.weight_s * (1 - sizes.frozen),
        block.recompute_s,
        block.scores_s,
        block.kernels,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """An average layer of a rank: seconds of its passes with what they wait for, and the parts of their sum."""

    passes: _Rank
    parts: Mapping[str, Column]

    @property
    def total_s(self) -> Column:
        return self.passes.total_s

    def rank(self, layers: Column) -> _Rank:
        return _Rank(
            self.passes.forward_s * layers, self.passes.input_s * layers, self.passes.weight_s * layers
        )

    @classmethod
    def of(
        cls, sizes: Sizes, conditions: Conditions, layouts: Layouts, times: LayerTimes, traffic: Traffic
    ) -> _Layer:
        average = partial(times.average, sizes=sizes)
        forward, by_input = average("forward_s"), average("input_s")
        by_weight = average("weight_s") * (1 - sizes.frozen)
        again = average("recompute_s")
        by_host = 1 - conditions.captured
        one_s = conditions.launch_s * by_host
        calls_ahead, calls_behind = (
            calls * conditions.call_s * by_host for calls in layer_calls(sizes, layouts)
        )
        launch_s = average("kernels") * one_s + calls_ahead
        repeats = np.where(forward > 0, again / forward, 0.0)
        ahead = forward + traffic.forward_s
        behind = by_input + by_weight + again + traffic.backward_s
        # The host launches kernels one by one, and is behind for some of a layer and ahead for others: neither the longer of both
        # nor their sum. Backward launches twice as many kernels.
        repeated = repeated_share(sizes, layouts)
        launch_behind_s = average("kernels") * (2 + repeats) * one_s + calls_behind + repeated * calls_ahead
        wait_ahead = _longer(launch_s, ahead) - ahead
        wait_behind = _longer(launch_behind_s, behind) - behind
        return cls(
            _Rank(ahead + wait_ahead, by_input + again + traffic.backward_s + wait_behind, by_weight),
            {
                "compute": forward + by_input + by_weight,
                "recomputation": again,
                "tensor_communication": traffic.tensor_s,
                "context_communication": traffic.context_s,
                "expert_communication": traffic.expert_s,
                "gathers": traffic.gather_s,
                "overhead": wait_ahead + wait_behind,
            },
        )
