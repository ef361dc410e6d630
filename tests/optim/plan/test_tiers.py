"""What offload costs, by hand, and beside the memory that it frees."""

from __future__ import annotations

import numpy as np
import pytest
from plan_problems import DENSE, MIXTURE, cluster

from trine.optim.plan.cluster import Cluster
from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.constants import stack_named
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory import memory_of
from trine.optim.plan.memory_activations import layer_bytes
from trine.optim.plan.memory_traits import memory_traits
from trine.optim.plan.step import predict
from trine.optim.plan.tiers import activation_bytes
from trine.optim.plan.units import Bandwidth
from trine.optim.plan.workload import Workload
from trine.optim.plan.workload_files import model_names, workload_of

STACK = stack_named("torchtitan")
CONDITIONS = Conditions.of(cluster(), STACK)


def offload(on: Cluster, workload: Workload = DENSE, **layout: object) -> float:
    found = predict(workload, on, STACK, Layouts.of(**layout))
    return float(found.parts["offload"][0])


def test_activations_of_a_gelu_layer_are_korthikantis_without_scores_and_dropout() -> None:
    # 34 sbh less 5 as²b is counted with dropout masks (3 sbh) and 16-bit sums; without them 2·(4 h + 4 h + 8 h) = 32 bytes, s b h.
    gpt = workload_of("gpt3-175b")
    found = activation_bytes(Sizes.of(gpt), CONDITIONS, Layouts.of(micro_batch=2, recompute=["none", "full"]))
    tokens = 2 * gpt.sequence
    assert found[0] == pytest.approx(32 * tokens * gpt.hidden)
    assert found[1] == pytest.approx(2 * tokens * gpt.hidden)


@pytest.mark.parametrize("name", ["llama3-70b", "gpt3-175b", "mixtral-8x7b"])
def test_what_travels_is_what_memory_is_freed_of(name: str) -> None:
    workload = workload_of(name)
    layouts = Layouts.of(data=4, zero_stage=3, activation_offload="cpu", recompute=["none", "full"])
    freed = memory_of(workload, cluster(), STACK, layouts).host_bytes / cluster().devices_per_node
    moved = activation_bytes(Sizes.of(workload), CONDITIONS, layouts) * workload.layers
    assert moved == pytest.approx(freed, rel=0.1)


@pytest.mark.parametrize("stack", ["megatron-core", "megatron-core-moe", "torchtitan", "trine"])
def test_what_travels_is_what_memory_counts(stack: str) -> None:
    software = stack_named(stack)
    conditions, traits = Conditions.of(cluster(), software), memory_traits(software)
    layouts = Layouts.of(
        tensor=[1, 4, 4, 1],
        sequence=[0, 0, 1, 0],
        recompute=["none", "none", "full", "none"],
        precision=["bf16", "bf16", "bf16", "fp32"],
    )
    for name in model_names():
        workload = workload_of(name)
        each = {False: workload.layers - workload.mixture_layers, True: workload.mixture_layers}
        kept = sum(
            layers * layer_bytes(workload, software, traits, layouts, mixture=mixture).kept
            for mixture, layers in each.items()
            if layers
        )
        # But for the compressed vectors of low-rank attention.
        room = 0.08 if workload.latent else 0.03
        moved = workload.layers * activation_bytes(Sizes.of(workload), conditions, layouts)
        assert moved == pytest.approx(kept, rel=room), name


def test_activations_hide_behind_computing_where_the_link_is_fast() -> None:
    plain = predict(DENSE, cluster(), STACK, Layouts.of())
    compute = float(plain.parts["compute"][0])
    fast, slow = (cluster(host_link=Bandwidth.gigabytes_per_s(rate)) for rate in (1000, 1))
    assert offload(fast, activation_offload="cpu") < 0.06 * compute
    both_ways = 2 * float(activation_bytes(Sizes.of(DENSE), CONDITIONS, Layouts.of())[0]) * DENSE.layers / 1e9
    waited = offload(slow, activation_offload="cpu")
    assert both_ways - compute < waited < both_ways


def test_tiers_are_as_far_as_their_links() -> None:
    near = cluster(host_link=Bandwidth.gigabytes_per_s(50), nvme=Bandwidth.gigabytes_per_s(5))
    layout = {"data": 4, "zero_stage": 3, "microbatches": 2}
    cpu, nvme, remote = (
        offload(near, parameter_offload=tier, **layout) for tier in ("cpu", "nvme", "remote")
    )
    assert nvme == pytest.approx(10 * cpu)
    assert remote == pytest.approx(2 * cpu)  # 200 Gb/s between nodes are 25 GB/s
    assert offload(near, parameter_offload="cpu", **{**layout, "microbatches": 4}) == pytest.approx(2 * cpu)


def test_optimizer_state_elsewhere_travels_or_is_updated_there() -> None:
    near = cluster(host_link=Bandwidth.gigabytes_per_s(50), nvme=Bandwidth.gigabytes_per_s(5))
    tiers = ("none", "cpu", "nvme", "remote")
    found = predict(DENSE, near, STACK, Layouts.of(optimizer_offload=tiers, data=4, zero_stage=1))
    own = DENSE.parameters / 4
    assert found.parts["offload"] == pytest.approx(
        np.asarray([0, own * 4 / 50e9, own * 4 / 50e9 + own * 24 / 5e9, own * 24 / 25e9]), rel=0.02
    )
    optimizer = found.parts["optimizer"]
    assert optimizer[1] == optimizer[2] > optimizer[0] == optimizer[3]


def test_no_offload_makes_a_step_shorter() -> None:
    slow = cluster().with_changes(
        device=cluster().device.with_changes(memory_bandwidth=Bandwidth.gigabytes_per_s(5))
    )
    for on in (cluster(), slow):
        for workload in (DENSE, MIXTURE):
            plain = float(predict(workload, on, STACK, Layouts.of(data=4, zero_stage=3)).step_s[0])
            for column in ("optimizer_offload", "parameter_offload", "activation_offload"):
                away = Layouts.of(data=4, zero_stage=3, **{column: ["cpu", "nvme", "remote"]})
                assert (predict(workload, on, STACK, away).step_s >= plain).all()


def test_what_lies_elsewhere_travels_in_its_own_precision() -> None:
    moved = {"data": 8, "zero_stage": 3, "microbatches": 4}
    for tiers in ({"optimizer_offload": "cpu"}, {"parameter_offload": "cpu"}):
        half, single = (
            offload(cluster(), precision=precision, **moved, **tiers) for precision in ("bf16", "fp32")
        )
        assert single == pytest.approx(2 * half)
    # On a drive moments lie, and a master beside weights in 16 bits.
    half, single = (
        offload(cluster(), precision=precision, optimizer_offload="nvme", **moved)
        for precision in ("bf16", "fp32")
    )
    assert single < half
