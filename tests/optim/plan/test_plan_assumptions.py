"""What a plan says that it rests on: where constants and latencies come from, and what nobody said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from plan_problems import DENSE, MIXTURE

from trine.optim.plan.cluster import Cluster, Link
from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.collectives import LINK_CONSTANTS, Network, all_reduce_s
from trine.optim.plan.planning import plan
from trine.optim.plan.units import Bandwidth
from trine.optim.plan.workload_files import workload_of


@pytest.mark.parametrize(("device", "carried"), [("dgx-a100-80", True), ("dgx-h100", False)])
@pytest.mark.slow
def test_constants_from_other_families_and_even_experts_are_told(device: str, carried: bool) -> None:
    dense, mixture = (
        plan(model, cluster_of(device, devices=8), global_batch=16, stack="megatron-core").assumptions
        for model in (DENSE, MIXTURE)
    )
    assert any("carried over from others" in text for text in dense) == carried
    assert [any("experts get equally many tokens" in text for text in each) for each in (dense, mixture)] == [
        False,
        True,
    ]


def test_drives_that_nobody_described_are_told() -> None:
    pins = ["optimizer_offload=nvme", "recompute=none"]
    here = cluster_of("dgx-h100", devices=8)
    for known, count in ((None, 1), (Bandwidth.parse("6 GB/s"), 0)):
        node = here.with_changes(nvme=known)
        found = plan(DENSE, node, global_batch=16, stack="deepspeed", top=1, pins=pins).assumptions
        told = [text for text in found if "nobody said whether" in text]
        assert len(told) == count and all("3 GB/s a device are taken" in text for text in told)
    plain = plan(DENSE, here, global_batch=16, stack="deepspeed", top=1, pins=pins[1:]).assumptions
    assert not any("drives" in text for text in plain)


def test_a_sequence_as_long_as_the_model_takes_is_told(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 1000,
    }
    config |= {"intermediate_size": 1024, "max_position_embeddings": 4096}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    here = cluster_of("dgx-h100", devices=8)
    for sequence, told in ((None, 1), (1024, 0)):
        found = plan(
            file, here, global_batch=16, sequence=sequence, top=1, pins=["recompute=none"]
        ).assumptions
        assert sum("sequences of 4,096 tokens: nobody said" in text for text in found) == told
    assert not workload_of(file).with_changes(sequence=2048).sequence_is_most


def test_modules_of_multi_token_prediction_that_are_left_out_are_told() -> None:
    here = cluster_of("dgx-h100", devices=8)
    for modules, told in ((1, 1), (0, 0)):
        model = MIXTURE.with_changes(multi_token_modules=modules)
        found = plan(model, here, global_batch=16, top=1, pins=["recompute=none"]).assumptions
        assert sum("multi-token prediction, of which the model has 1" in text for text in found) == told


def latencies(cluster: Cluster) -> list[str]:
    found = plan(DENSE, cluster, global_batch=16, stack="megatron-core", top=1, pins=["recompute=none"])
    return [text for text in found.assumptions if text.startswith("collectives ")]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("dgx-a100-80", []),
        ("dgx-h100", []),
        ("aws-p5", ["between nodes over efa"]),
        ("gcp-a3", ["between nodes over ethernet"]),
        ("grand-teton-h100", ["between nodes over roce"]),
        ("jean-zay-a100", ["between nodes over omnipath"]),
        ("mi300x", ["inside a node over xgmi", "between nodes over roce"]),
        ("tpu-v5p", ["inside a node over ici", "between nodes over ici"]),
    ],
)
@pytest.mark.slow
def test_latencies_without_logs_of_their_own_are_told(name: str, told: list[str]) -> None:
    one = cluster_of(name)
    lines = latencies(one.with_changes(nodes=2))
    assert [
        line.partition("collectives ")[2].partition(" start")[0].partition(" take")[0] for line in lines
    ] == told
    assert all(len(line.partition(": ")[2]) > 15 for line in lines)
    assert len(latencies(one)) == sum("inside" in each for each in told)


def test_latencies_that_were_measured_on_the_link_need_no_word() -> None:
    one = cluster_of("mi300x")
    assert one.inside is not None
    measured = Link(
        one.inside.bandwidth, "xgmi", note="measured between 8 ranks", constants={"start_factor": 1.0}
    )
    assert latencies(one.with_changes(inside=measured)) == []
    bandwidth = Link(measured.bandwidth, "xgmi", note=measured.note, constants={"bandwidth_efficiency": 1.0})
    assert len(latencies(one.with_changes(inside=bandwidth))) == 1


def test_what_is_infinibands_is_as_infinibands() -> None:
    for kind in ("roce", "omnipath"):
        found = LINK_CONSTANTS[kind]
        assert "infiniband's" in found.latency_source
        assert found.latency_factor == LINK_CONSTANTS["infiniband"].latency_factor


#: Logs of nccl-tests, an all-reduce of 16 devices on two nodes: bytes and microseconds, of the sources that the constants name.
LOGGED = {
    "efa": ("b200", 400, {8: 50.6, 64: 55.6, 256: 57.1}, 1.1),
    "ethernet": ("gcp-a3", 200, {2**16: 159.4, 2**17: 159.3, 2**18: 167.1, 2**19: 174.2, 2**20: 203.2}, 1.35),
}


@pytest.mark.parametrize("kind", LOGGED)
def test_small_all_reduces_over_efa_and_ethernet_take_what_was_logged(kind: str) -> None:
    name, gigabits_per_s, logged, most = LOGGED[kind]
    between = Link(Bandwidth.gigabits_per_s(gigabits_per_s), kind=kind)
    network = Network.of(cluster_of(name, devices=16).with_changes(between=between))
    found = all_reduce_s(network, np.asarray([*logged], dtype=float), 16, 8) * 1e6
    assert (np.abs(np.log(found / [*logged.values()])) < np.log(most)).all()


def test_learned_positions_as_long_as_the_sequence_are_told() -> None:
    told = [
        sum("learned positions: a row for each of a sequence's 8192" in text for text in found.assumptions)
        for found in (
            plan(model, "dgx-h100", sequence=8192, top=1, pins="pipeline=1")
            for model in ("gpt2", "llama3-8b")
        )
    ]
    assert told == [1, 0]


def test_the_usual_batch_of_processors_is_one_that_a_person_would_run() -> None:
    node = cluster_of("dgx-h100", devices=2)
    processor = node.with_changes(device=node.device.with_changes(family="cpu"))
    found = {family: plan("gpt2", one, top=1) for family, one in (("cpu", processor), ("hopper", node))}
    assert {family: one.problem.global_batch for family, one in found.items()} == {"cpu": 4, "hopper": 4096}
    told = {
        family: next(text for text in one.assumptions if "nobody said, so" in text)
        for family, one in found.items()
    }
    assert "2 Ki tokens a rank" in told["cpu"] and "4 Mi tokens;" in told["hopper"]
