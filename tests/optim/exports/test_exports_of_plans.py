"""What a plan's software decides in the exports to both Megatrons: how experts are cut, stages filled, state moved."""

from __future__ import annotations

import json
from typing import Any

import export_cases as cases
import pytest

from trine.optim.exports import Exported, write
from trine.optim.exports._reading import exported_of_layout
from trine.optim.plan.constants import stack_named
from trine.optim.plan.workload import Workload


def flags(exported: Exported) -> dict[str, str]:
    return cases.flags_of(write("megatron", exported).text)


def flags_and_tables(exported: Exported) -> tuple[dict[str, str], dict[str, Any]]:
    """Of Megatron-DeepSpeed."""
    files = write("megatron-deepspeed", exported).files
    return cases.flags_of(files["megatron.flags"]), json.loads(files["ds_config.json"])


@pytest.mark.parametrize(
    ("pipeline", "first", "middle", "last"), [(16, "Et*7", "t*8", "t*7L"), (128, "E", "t*1", "L")]
)
def test_stages_have_the_layers_that_the_plan_counted(
    pipeline: int, first: str, middle: str, last: str
) -> None:
    long = cases.DENSE.with_changes(layers=126)  # embedding and head stand for a layer each
    row = {"pipeline": pipeline, "microbatches": 2 * pipeline}
    stages = flags(exported_of_layout(row, long))["--pipeline-model-parallel-layout"].split("|")
    assert stages == [first, *[middle] * (pipeline - 2), last]


@pytest.mark.parametrize(
    ("stack", "expert", "parts"),
    [("megatron-core", 2, "4"), ("megatron-core", 1, "4"), ("megatron-bridge", 2, "1"), (None, 2, "1")],
)
def test_experts_are_cut_as_the_plan_cut_them(stack: str | None, expert: int, parts: str) -> None:
    row = {"data": 4, "tensor": 4, "sequence": 1, "expert": expert}
    known = None if stack is None else stack_named(stack)
    exported = exported_of_layout(row, cases.MIXTURE, stack=known)
    assert flags(exported)["--expert-tensor-parallel-size"] == parts
    assert "--expert-tensor-parallel-size" not in flags(exported_of_layout(row, cases.DENSE, stack=known))


def test_rounds_of_interleaved_stages_are_the_plans() -> None:
    row = {"pipeline": 8, "schedule": "interleaved", "chunks": 2}
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    for count, size in ((8, None), (9, "9"), (18, "9"), (16, None)):
        written = write("megatron", exported_of_layout({**row, "microbatches": count}, cases.DENSE))
        assert cases.flags_of(written.text).get(flag) == size
        assert not any("in rounds of" in line for line in written.cannot)
    few = write("megatron", exported_of_layout({**row, "microbatches": 7}, cases.DENSE))
    assert any("rounds of 8 micro-batches or more, and a step has 7" in line for line in few.cannot)


@pytest.mark.parametrize("dialect", ["megatron", "megatron-deepspeed"])
def test_selective_is_said_where_the_plan_recomputes_operators(dialect: str) -> None:
    row = {"data": 4, "recompute": "selective"}
    for stack, told in (("megatron-core", 0), ("trine", 1), ("torchtitan", 1)):
        written = write(dialect, exported_of_layout(row, cases.DENSE, stack=stack_named(stack)))
        assert sum("attention's scores alone there" in line for line in written.cannot) == told


def test_state_of_one_data_rank_is_moved_as_planned() -> None:
    row = {"tensor": 8, "optimizer_offload": "cpu"}
    found = flags(exported_of_layout(row, cases.DENSE))
    assert {"--use-distributed-optimizer", "--optimizer-cpu-offload"} <= found.keys()
    both = flags_and_tables(exported_of_layout(row, cases.DENSE))
    assert both[0]["--zero-stage"] == "1" and "--cpu-optimizer" in both[0]
    assert both[1]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    several = write("megatron", exported_of_layout({**row, "data": 2}, cases.DENSE))
    assert "--optimizer-cpu-offload" not in several.text and "offload.optimizer" in cases.named(several)


def test_checkpoints_of_recomputed_blocks_go_to_host_memory() -> None:
    exported = exported_of_layout({"data": 8, "recompute": "full", "activation_offload": "cpu"}, cases.DENSE)
    found, tables = flags_and_tables(exported)
    assert "--checkpoint-in-cpu" in found and "activation_checkpointing" not in tables
    assert "offload.activations" not in cases.named(write("megatron-deepspeed", exported))
    alone = write("deepspeed", exported)
    assert json.loads(alone.text)["activation_checkpointing"] == {"cpu_checkpointing": True}
    assert "offload.activations" not in cases.named(alone)


@pytest.mark.parametrize(
    ("workload", "pipeline", "told"),
    [(cases.MIXTURE, 4, True), (cases.MIXTURE, 1, False), (cases.DENSE, 4, False)],
)
def test_mixtures_beside_a_pipeline_are_named_for_megatron_deepspeed(
    workload: Workload, pipeline: int, told: bool
) -> None:
    row = {"data": 8, "expert": 8, "pipeline": pipeline, "microbatches": 8}
    cannot = write("megatron-deepspeed", exported_of_layout(row, workload)).cannot
    assert any("its mixtures have no pipeline" in line for line in cannot) == told
