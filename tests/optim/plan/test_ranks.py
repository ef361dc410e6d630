"""Who holds what, and who is whose neighbour, by hand: strides of groups, elements of ranks, what recomputation repeats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as some
from plan_problems import DENSE, MIXTURE
from plan_problems import cluster as small_cluster

from trine.optim.plan.cluster import Cluster
from trine.optim.plan.collectives import all_reduce_s, reduce_scatter_s
from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.constants import Stack, stack_named
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.operators import layer_times
from trine.optim.plan.ranks import Places, crossing_share, place_elements, places_of
from trine.optim.plan.stages import stage_layers
from trine.optim.plan.step import predict
from trine.optim.plan.waits import Waits, waits_of
from trine.optim.plan.workload import Workload
from trine.optim.plan.workload_files import workload_of

MOE = stack_named("megatron-core-moe")


def cluster(nodes: int = 8) -> Cluster:
    return small_cluster(nodes=nodes, per_node=8)


def waits(layouts: Layouts, workload: Workload = DENSE, stack: Stack = MOE, nodes: int = 8) -> Waits:
    return waits_of(Sizes.of(workload), Conditions.of(cluster(nodes=nodes), stack), layouts)


MODELS = ("llama3-8b", "gpt3-13b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3")
powers = some.sampled_from([1, 2, 4, 8])


@given(some.sampled_from(MODELS), powers, powers, powers, some.integers(1, 64), some.booleans())
def test_elements_of_all_ranks_are_the_models_parameters(
    name: str, tensor: int, expert: int, data: int, pipeline: int, expert_tensor: bool
) -> None:
    workload = workload_of(name)
    pipeline = min(pipeline, workload.layers)
    assume(workload.layers % pipeline == 0 or (workload.layers + 2) % pipeline == 0)
    expert = expert if workload.is_mixture and data * tensor % expert == 0 else 1
    sizes, layouts = (
        Sizes.of(workload),
        Layouts.of(tensor=tensor, expert=expert, data=data, pipeline=pipeline),
    )
    shared, experts = (
        sum(column[0] for column in each) for each in _of_ranks(sizes, expert_tensor, layouts, pipeline)
    )
    # Tensor ranks repeat norms, and both ends of a pipeline hold a tied table.
    norms = workload.layers * workload.norm_parameters + workload.final_norm_parameters
    twice = workload.vocab * workload.hidden if workload.tied_embeddings and pipeline > 1 else 0
    ways = expert * (tensor if expert_tensor else 1)
    routed = workload.mixture_layers * workload.experts * workload.expert_parameters
    assert experts * ways == pytest.approx(routed, rel=1e-12)
    found = tensor * shared - (tensor - 1) * norms - twice + experts * ways
    assert found == pytest.approx(workload.parameters, rel=1e-12)


def _of_ranks(
    sizes: Sizes, expert_tensor: bool, layouts: Layouts, pipeline: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of each rank of a pipeline, by the rule for one place after another."""
    three = places_of(sizes, layouts)
    middle, ends = (float(column[0]) for column in stage_layers(sizes.layers, layouts["pipeline"]))
    found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    before = 0.0
    for rank in range(pipeline):
        layers = ends if rank in (0, pipeline - 1) else middle
        dense = min(max(float(sizes.layers[0] - sizes.mixture_layers[0]) - before, 0.0), layers)
        before += layers
        mixture = layers - dense if sizes.mixture_layers[0] > 0 else 0.0
        place = Places(
            *(
                np.asarray([[float(value)]])
                for value in (rank, rank == 0, rank == pipeline - 1, layers, mixture)
            )
        )
        if rank in (0, 1, pipeline - 1):
            # The three that the planner looks at are these.
            row = {0: 0, pipeline - 1: 2}.get(rank, 1) if rank else 0
            for name in ("rank", "first", "last", "layers", "mixture"):
                assert getattr(three, name)[row, 0] == getattr(place, name)[0, 0]
        for kept, elements in zip(found, place_elements(sizes, expert_tensor, layouts, place), strict=True):
            kept.append(elements[0])
    return found


@given(some.integers(1, 130), some.integers(1, 64))
def test_stages_have_a_place_for_every_layer(layers: int, stages: int) -> None:
    middle, ends = (float(column) for column in stage_layers(layers, stages))
    held = layers if stages == 1 else (stages - 2) * middle + 2 * ends
    assert held >= layers and middle - 1 <= ends <= max(middle, layers)
    if layers % stages == 0 or (layers + 2) % stages == 0:
        assert held == layers


def test_experts_are_split_over_a_tensor_group_where_software_does() -> None:
    sizes, layouts = Sizes.of(MIXTURE), Layouts.of(tensor=4, expert=2, data=4)
    whole, split = (
        place_elements(sizes, each, layouts, places_of(sizes, layouts))[1] for each in (False, True)
    )
    assert whole[0, 0] == MIXTURE.layers * MIXTURE.experts * MIXTURE.expert_parameters / 2
    assert split[0, 0] == whole[0, 0] / 4


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        ({"pipeline": 16}, 1 / 15),
        ({"pipeline": 32}, 3 / 31),
        ({"pipeline": 8}, 0),
        ({"pipeline": 4, "tensor": 4}, 1 / 3),
        ({"pipeline": 4, "tensor": 8}, 1),
        ({"pipeline": 2, "data": 32}, 1),
        ({"pipeline": 1, "data": 32}, 0),
    ],
)
def test_neighbouring_stages_share_a_node_where_their_ranks_are_few(
    layout: dict[str, int], share: float
) -> None:
    assert crossing_share(Layouts.of(**layout), np.asarray([8.0]))[0] == pytest.approx(share)


def test_replicas_of_an_expert_lie_a_whole_expert_group_apart() -> None:
    # 64 ranks in nodes of 8, experts over 8: each node has every expert once, so its 8 replicas are one a node.
    layouts = Layouts.of(data=64, expert=8)
    found = waits(layouts, MIXTURE).expert_gradients
    network = Conditions.of(cluster(), MOE).networks[0]
    size = MIXTURE.layers * MIXTURE.experts / 8 * MIXTURE.expert_parameters * MOE.gradient_bytes
    by_hand = all_reduce_s(network, *(np.asarray([float(value)]) for value in (size, 8, 1)))
    assert found.away[0] and found.alone_s == pytest.approx(by_hand)
    # Over 2, a node has each expert four times.
    assert waits(Layouts.of(data=8, expert=2), MIXTURE, nodes=1).expert_gradients.away[0] == np.bool_(False)


def test_experts_over_tensor_groups_exchange_between_nodes() -> None:
    layouts = Layouts.of(data=8, tensor=8, expert=8)
    assert not waits(layouts, MIXTURE).expert.away[0]
    assert waits(layouts, MIXTURE, MOE.with_traits(expert_tensor=True)).expert.away[0]


def test_shard_groups_of_a_node_have_their_replicas_elsewhere() -> None:
    apart = waits(Layouts.of(data=64, shard=8, zero_stage=3)).replicas
    beside = waits(Layouts.of(data=8, shard=4, zero_stage=3), nodes=1).replicas
    assert apart.away[0] and not beside.away[0]
    assert apart.alone_s[0] > beside.alone_s[0] > 0


def test_shard_groups_sum_their_shards_under_zero_one() -> None:
    found = waits(Layouts.of(data=64, zero_stage=1, shard=8)).gradients.alone_s
    network, eight, one = Conditions.of(cluster(), MOE).networks[0], np.asarray([8.0]), np.asarray([1.0])
    size = np.asarray([2.0 * DENSE.parameters])
    inside = 2 * reduce_scatter_s(network, size, eight, eight)
    assert found == pytest.approx(inside + all_reduce_s(network, size / 8, eight, one))


def test_new_parameters_are_gathered_as_wide_as_they_are() -> None:
    narrow, wide = waits(
        Layouts.of(data=64, zero_stage=1, precision=["bf16", "fp32"]), stack=MOE.with_traits(gradient_bytes=4)
    ).gradients.alone_s
    # 4 + 2 bytes an element, or 4 + 4.
    assert wide / narrow == pytest.approx(8 / 6, rel=0.03)


def test_exposed_gradients_are_at_most_all_of_them() -> None:
    stack, layouts = stack_named("deepspeed"), Layouts.of(data=64)
    conditions = Conditions.of(cluster(), stack)
    assert conditions.exposed[0] > 1
    found = predict(DENSE, cluster(), stack, layouts).parts["exposed_gradients"]
    alone = waits_of(Sizes.of(DENSE), conditions, layouts).gradients.reached_s(conditions)
    assert found == pytest.approx(alone)


def test_a_repeated_forward_repeats_its_all_to_alls() -> None:
    layouts = Layouts.of(data=64, expert=8, recompute=["none", "budget", "full"], recomputed_layers=[0, 2, 0])
    once, some, again = predict(MIXTURE, cluster(), MOE, layouts).parts["expert_communication"]
    # But for the share of layers in a rank that also has the head, which recomputation moves a little.
    assert again == pytest.approx(1.5 * once, rel=0.02)
    assert some == pytest.approx((1 + 0.5 * 2 / MIXTURE.layers) * once, rel=0.02)


def test_a_policy_over_operators_repeats_what_it_does_not_keep() -> None:
    llama, layouts = workload_of("llama3-8b"), Layouts.of(recompute=["selective", "full"])

    def repeated(operators: str) -> np.ndarray:
        stack = stack_named("torchtitan").with_traits(operators=operators)
        found = layer_times(Sizes.of(llama), Conditions.of(cluster(), stack), layouts).dense
        return np.asarray(found.recompute_s / found.forward_s)

    alternate, every, scores = (repeated(each)[0] for each in ("alternate", "all", "none"))
    # Keys, the output projection and one of two first matrices: (1024 + 4096 + 14336) of 54,272 columns of 4096; no scores.
    assert (1024 + 4096 + 14336) / (6144 + 4096 + 3 * 14336) * 0.6 < alternate < 0.5
    assert 0 < every < alternate
    assert scores < 0.25 and repeated("none")[1] == pytest.approx(1)


def test_a_device_without_half_precision_has_rates() -> None:
    device = cluster().device.with_changes(flops_per_s={"fp32": 1e12}, matmul_flops_per_s=None)
    found = predict(DENSE, cluster().with_changes(device=device), MOE, Layouts.of(precision="fp32"))
    assert np.isfinite(found.step_s).all()
