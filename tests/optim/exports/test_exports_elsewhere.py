"""What an exported layout takes under other software than it was planned for, and which kinds of parallelism an export loses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import export_cases as cases
import pytest
from hypothesis import given, settings

from trine.optim.config import Config
from trine.optim.exports import Exported, dialect_names, write
from trine.optim.exports._reading import exported_of_layout
from trine.optim.exports._software import STACKS
from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.constants import stack_named, stacks
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory import memory_of
from trine.optim.plan.step import predict
from trine.optim.plan.units import spell_bytes, spell_seconds

CLUSTER = cluster_of("dgx-h100", 64)
#: The fastest of 64 devices under Megatron-Core.
ROW: dict[str, Any] = {"data": 32, "context": 2, "zero_stage": 1, "microbatches": 16}


def planned(row: dict[str, Any], stack: str = "megatron-core", headroom: float = 0.1) -> Exported:
    exported = exported_of_layout(row, cases.DENSE, 8, stack_named(stack))
    assert exported.devices is not None
    return replace(exported, cluster=cluster_of("dgx-h100", exported.devices), headroom=headroom)


def numbers(row: dict[str, Any], stack: str) -> tuple[str, str]:
    layouts = Layouts.of(**row)
    step_s = predict(cases.DENSE, CLUSTER, stack_named(stack), layouts).step_s[0]
    peak = memory_of(cases.DENSE, CLUSTER, stack_named(stack), layouts).peak_bytes[0]
    return f"{spell_seconds(float(step_s))} a step", spell_bytes(float(peak))


def test_every_dialect_has_its_software() -> None:
    assert {key.partition(" ")[0] for key in STACKS} == set(dialect_names())
    assert all(name in stacks() for names in STACKS.values() for name in names)


def test_another_software_takes_what_it_takes_with_what_is_written() -> None:
    before, after = numbers(ROW, "megatron-core"), numbers({**ROW, "zero_stage": 2}, "torchtitan")
    assert before != after
    assert write("torchtitan", planned(ROW)).elsewhere == (
        f"planned for megatron-core ({before[0]}, {before[1]}); under torchtitan this layout takes {after[0]}, {after[1]}: "
        "plan with --stack torchtitan"
    )


def test_what_does_not_fit_elsewhere_is_said_with_the_room() -> None:
    needed = numbers({**ROW, "zero_stage": 2}, "trine")[1]
    line = write("pytorch", planned(ROW)).elsewhere
    assert f"under trine this layout does not fit: {needed}, and 72.0 GiB may be used" in line
    # A single micro-batch's gradients are sharded as they come.
    alone = {**ROW, "microbatches": 1}
    assert "does not fit" in write("pytorch", planned(alone, headroom=0.4)).elsewhere
    assert "does not fit" not in write("pytorch", planned(alone)).elsewhere
    tight = replace(CLUSTER, host_memory_bytes=2**30)
    moved = replace(planned({**ROW, "optimizer_offload": "cpu"}), cluster=tight)
    assert "a node's memory does not hold what is moved there" in write("deepspeed", moved).elsewhere


@pytest.mark.parametrize(
    ("stack", "dialect"),
    [
        ("megatron-core", "megatron"),
        ("megatron-bridge-26", "megatron"),
        ("torchtitan", "torchtitan"),
        ("trine", "pytorch"),
        ("deepspeed", "deepspeed"),
        ("fsdp", "accelerate"),
    ],
)
def test_nothing_is_said_of_the_software_that_was_planned_for(stack: str, dialect: str) -> None:
    assert write(dialect, planned(ROW, stack)).elsewhere == ""


def test_a_plan_without_its_cluster_and_a_software_without_numbers_say_so() -> None:
    alone = exported_of_layout(ROW, cases.DENSE, 8, stack_named("megatron-core"))
    line = write("torchtitan", alone).elsewhere
    assert "does not hold what a prediction for torchtitan needs: plan with --stack torchtitan" in line
    assert "no stack of the planner is Colossal-AI" in write("colossalai", planned(ROW)).elsewhere
    assert write("torchtitan", Exported(Config())).elsewhere == ""


def test_ranks_that_an_export_loses_are_predicted_as_data_ranks() -> None:
    row = {**ROW, "data": 8, "context": 4, "pipeline": 2, "microbatches": 16}
    written = write("pytorch", planned(row))
    assert written.lost == ("parallel.context",)
    assert written.cannot[0] == "the layout as planned: context 4 is not in the export"
    lone = {**row, "data": 32, "context": 1, "microbatches": 4, "zero_stage": 2}
    assert numbers(lone, "trine")[1] in written.elsewhere  # that of sequences that nobody shares
    both = write("deepspeed", planned(row))
    assert (both.lost, both.left) == (("parallel.context",), ("parallel.pipeline",))
    assert both.cannot[0] == (
        "the layout as planned: context 4 is not in the export, and pipeline 2 is the program's, or another file's"
    )


@pytest.mark.slow
@settings(max_examples=15)
@given(cases.exported_layouts())
def test_any_layout_has_one_line_elsewhere(exported: Exported) -> None:
    assert exported.devices is not None
    nodes = max(1, -(-exported.devices // 8))
    known = replace(exported, cluster=replace(CLUSTER, nodes=nodes), headroom=0.1)
    for name in dialect_names():
        written = write(name, known)
        assert "\n" not in written.elsewhere and "cannot be predicted" not in written.elsewhere
        told = any(line.startswith("the layout as planned") for line in written.cannot[:1])
        assert told == bool(written.lost or written.left)
