"""What a search takes by itself, what it takes where it is asked to, and what a processor has no use for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_problems import DENSE, cluster, problem

from trine.optim.plan import Bandwidth, Link
from trine.optim.plan.layouts import COMPRESSIONS, OFFLOADS, Layouts
from trine.optim.plan.memory import memory_of
from trine.optim.plan.planning import plan
from trine.optim.plan.problem import SEARCHABLE, parse_searched
from trine.optim.plan.space import BUCKETS, saving_choices, shapes
from trine.optim.plan.step import predict
from trine.record.errors import UsageError


def test_what_changes_numbers_is_searched_where_it_is_asked_for() -> None:
    asked = {"global_batch": 8, "stack": "trine", "pins": ["pipeline=1", "context=1"], "top": 1}
    far = cluster(80.0).with_changes(between=Link(Bandwidth.gigabits_per_s(10), kind="infiniband"))
    plain = plan(DENSE, far, **asked)
    assert plain.best.layout["precision"] == "bf16" and plain.best.layout["compression"] == "none"
    wide = plan(DENSE, far, search=["compression"], **asked)
    assert wide.best.layout["compression"] != "none" and wide.best.step.value < plain.best.step.value
    assert wide.problem.searched == ("compression",)
    assert any("compression searched" in text for text in wide.assumptions)
    assert plain.tally.shapes < wide.tally.shapes <= 3 * plain.tally.shapes
    slow = cluster(80.0).with_changes(
        device=cluster().device.with_changes(flops_per_s={"fp32": 312e12, "bf16": 19e12})
    )
    assert plan(DENSE, slow, search=["precision"], **asked).best.layout["precision"] == "fp32"
    every = plan(
        DENSE,
        cluster(6.0),
        search="all",
        global_batch=8,
        stack="trine",
        top=1,
        pins=["pipeline=1", "tensor=1"],
    )
    assert every.problem.searched == SEARCHABLE
    keys = [(one.column, one.value) for one in every.alternatives]
    assert len(keys) == len(set(keys))
    # What is always searched may be named, and pins settle the rest.
    assert parse_searched(["recompute, precision"]) == ("precision",)
    with pytest.raises(UsageError, match="pinned and searched"):
        plan(DENSE, cluster(), search=["compression"], pins=["compression=bf16"])
    with pytest.raises(UsageError, match="did you mean 'precision'"):
        parse_searched(["precison"])


@pytest.mark.parametrize("gigabits_per_s", [0.1, 10, 200, 3200])
def test_no_compression_that_is_left_out_is_faster(gigabits_per_s: float) -> None:
    asked = replace(problem(stack="trine"), searched=("compression",))
    tried = {COMPRESSIONS[code] for code in np.unique(shapes(asked)["compression"])}
    layouts = Layouts.of(data=4, compression=list(COMPRESSIONS), zero_stage=[0] * len(COMPRESSIONS))
    far = asked.cluster.with_changes(
        between=Link(Bandwidth.gigabits_per_s(gigabits_per_s), kind="infiniband")
    )
    step_s = predict(DENSE, far, asked.stack, layouts).step_s
    assert len(tried) < len(COMPRESSIONS)
    assert step_s.min() == step_s[[COMPRESSIONS.index(name) for name in tried]].min()


def test_large_buffers_of_software_may_be_made_smaller() -> None:
    assert set(np.unique(shapes(problem(stack="torchtitan"))["bucket_bytes"])) == {0}
    asked = problem(stack="deepspeed")
    found = shapes(asked)
    assert set(np.unique(found["bucket_bytes"])) == {0, *BUCKETS}
    assert not ((found["bucket_bytes"] > 0) & (found["zero_stage"] == 3)).any()
    own, small = memory_of(
        DENSE, asked.cluster, asked.stack, Layouts.of(data=4, zero_stage=1, bucket_bytes=[0, BUCKETS[0]])
    ).peak_bytes
    assert small < own


def test_another_nodes_memory_is_searched_where_there_is_one() -> None:
    far = OFFLOADS.index("remote")
    assert far not in saving_choices(problem())["optimizer_offload"]
    asked = replace(problem(), searched=("remote",))
    assert saving_choices(asked)["optimizer_offload"][-1] == far
    for between in (
        None,
        asked.cluster.between,
    ):  # a cluster of the package keeps its link, however few nodes are asked
        alone = replace(asked, cluster=cluster().with_changes(between=between, nodes=1))
        assert far not in saving_choices(alone)["optimizer_offload"]


def test_another_nodes_memory_is_refused_where_there_is_no_other() -> None:
    pins = ["optimizer_offload=remote"]
    assert plan(DENSE, cluster(80.0), global_batch=8, top=1, pins=pins).best.remote_bytes > 0
    with pytest.raises(
        UsageError,
        match="optimizer_offload=remote is another node's memory, and test cluster is planned as one",
    ):
        plan(DENSE, cluster(80.0, nodes=1), global_batch=8, top=1, pins=pins)


def test_no_plan_asks_a_software_for_a_compression_that_it_has_lost() -> None:
    for name in ("deepspeed", "megatron-deepspeed"):  # 1-bit Adam was removed from DeepSpeed
        asked = replace(problem(stack=name), searched=("compression",))
        assert set(np.unique(shapes(asked)["compression"])) == {0}


def test_a_processor_trains_in_single_precision_and_has_nothing_to_move_to_its_host() -> None:
    processor = cluster(80.0).with_changes(device=cluster().device.with_changes(family="cpu"))
    found = plan(DENSE, processor, global_batch=8, top=1, pins=["pipeline=1", "tensor=1"])
    assert found.problem.stack.name == "trine" and found.best.layout["precision"] == "fp32"
    assert (
        plan(DENSE, cluster(80.0), global_batch=8, top=1, pins=["pipeline=1", "tensor=1"]).problem.stack.name
        == "megatron-core"
    )
    assert saving_choices(found.problem)["optimizer_offload"] == (0,)
    with pytest.raises(UsageError, match="optimizer_offload=cpu frees nothing: test device is a processor"):
        plan(DENSE, processor, global_batch=8, pins=["optimizer_offload=cpu"])


def test_what_trains_on_such_devices_is_planned_for_where_nobody_says() -> None:
    tpu = cluster(80.0).with_changes(device=cluster().device.with_changes(family="tpu"))
    asked = {"global_batch": 8, "top": 1, "pins": ["pipeline=1", "tensor=1", "context=1"]}
    assert plan(DENSE, tpu, **asked).problem.stack.name == "maxtext"
    assert plan(DENSE, tpu, stack="pytorch", **asked).problem.stack.name == "pytorch"
