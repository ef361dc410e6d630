"""What a plan that cannot be made names instead: the fewest settled things changed, and a layout that is the leanest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.constants import stack_named
from trine.optim.plan.layouts import OFFLOADED
from trine.optim.plan.leanest import leanest
from trine.optim.plan.memory import memory_of
from trine.optim.plan.planning import Plan, plan
from trine.optim.plan.problem import Problem
from trine.optim.plan.reasons import layout_words
from trine.optim.plan.search import Searcher
from trine.optim.plan.space import savings, shapes
from trine.optim.plan.workload_files import workload_of
from trine.record.errors import UsageError


def asked(cluster: str = "dgx-h100", **changes: Any) -> Plan:
    """Of 16 devices and 64 sequences of Llama 3 8B, unless ``changes`` say otherwise."""
    return plan("llama3-8b", cluster, **{"devices": 16, "global_batch": 64, "top": 1, **changes})


def told(cluster: str = "dgx-h100", **changes: Any) -> tuple[str, str]:
    """Why a plan cannot be made, and what is named instead."""
    with pytest.raises(UsageError) as caught:
        asked(cluster, **changes)
    reason, _, nearest = str(caught.value).partition("nearest that works: ")
    assert nearest and "\n" not in nearest
    return reason, nearest


@pytest.mark.slow
def test_a_shorter_sequence_keeps_the_pins_that_it_can_keep() -> None:
    pins = {"context": 8}
    _, nearest = told(devices=8, sequence=100_000_000, pins=pins)
    tokens = int(nearest.partition("sequences of ")[2].split()[0])
    found = asked(devices=8, sequence=tokens, pins=pins).best.layout
    assert nearest == f"sequences of {tokens} tokens, {layout_words(found)}" and found["context"] == 8
    # What divides no devices is given up: there the layout is any.
    assert "sequences of " in told(devices=8, sequence=100_000_000, pins={"context": 3})[1]


def test_savings_are_given_up_one_by_one() -> None:
    saved = {"recompute": "selective", "schedule": "looped-bfs"}
    known = {"stack": "trine", "global_batch": 48}
    _, nearest = told("dgx-a100-80", pins={**saved, "parameter_offload": "nvme"}, **known)
    assert "recompute selective" in nearest and "looped-bfs" in nearest and "parameter on" not in nearest
    assert asked("dgx-a100-80", pins=saved, **known).best.layout["recompute"] == "selective"
    # Where a degree is at fault, all of them stay.
    _, nearest = told(pins={"recompute": "selective", "optimizer_offload": "cpu", "tensor": 16})
    assert "recompute selective" in nearest and "optimizer on cpu" in nearest


def test_parameters_that_are_moved_say_where_they_need_sharding() -> None:
    reason, nearest = told(pins={"parameter_offload": "cpu", "two_level": 1})
    assert "parameter_offload needs zero_stage 3, not 0, beside " in reason
    assert " ranks of data x context: whole parameters are used where they are" in reason
    # One data rank has them whole.
    assert "parameter on cpu" in nearest and "data" not in nearest and "ZeRO" not in nearest
    alone = {"parameter_offload": "cpu", "data": 1, "context": 1}
    assert asked(pins=alone).best.layout["zero_stage"] == 0


def test_a_stage_beyond_the_software_has_its_neighbours() -> None:
    pins = {"parameter_offload": "cpu", "zero_stage": 2}
    reason, nearest = told(pins=pins)
    assert "needs zero_stage 3, not 2, beside " in reason
    assert "ZeRO 3" in nearest and "parameter on cpu" in nearest
    found = asked(pins={**pins, "zero_stage": 3}).best
    assert layout_words(found.layout) == nearest and found.beyond
    # A pin beyond the software that another's failure has nothing to do with stays.
    assert "zb-v" in told(pins={"schedule": "zb-v", "pipeline": 4, "micro_batch": 7})[1]


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"shard": 3}, "shard 3 does not divide data "),
        ({"shard": 3, "zero_stage": 1}, "shard 3 does not divide data "),
        ({"shard": 4, "zero_stage": 0}, "shard 4 needs a zero_stage of 1 or more"),
    ],
)
def test_a_shard_group_is_told_what_it_breaks(pins: dict[str, int], words: str) -> None:
    reason, _ = told(pins=pins)
    assert reason.startswith(f"no layout works: {words}")
    assert ("needs" in reason) == ("needs" in words)
    assert asked(pins={"shard": 4, "zero_stage": 1}).best.layout["shard"] == 4


def least_bytes(devices: int) -> float:
    """Of every layout, one by one: the least that any needs of a device."""
    problem = Problem.of(
        workload_of("llama3-8b"),
        cluster_of("dgx-h100", devices),
        stack_named("megatron-core"),
        global_batch=64,
        headroom=0.98,
    )
    every, _ = savings(problem, shapes(problem), ("recompute", *OFFLOADED))
    found = memory_of(problem.workload, problem.cluster, problem.stack, every)
    own = leanest(Searcher(problem, shapes(problem)))
    assert own is not None and own.needed_bytes == pytest.approx(float(np.min(found.needed_bytes)))
    return own.needed_bytes


def test_the_leanest_is_the_least_of_all() -> None:
    least = least_bytes(32)
    reason, nearest = told(devices=32, memory_headroom=0.98)
    shown = float(reason.partition("does not fit: ")[2].split()[0])
    assert shown == pytest.approx(least / 2**30, abs=0.06)
    share = float(nearest.partition("a memory headroom of ")[2])
    assert asked(devices=32, memory_headroom=share).best.peak.value <= (1 - share) * 80 * 2**30
    with pytest.raises(UsageError, match="does not fit"):
        asked(devices=32, memory_headroom=round(share + 0.01, 2))


def test_less_headroom_is_told_of_what_the_pins_leave() -> None:
    pins = {"recompute": "none", "optimizer_offload": "none", "tensor": 1, "pipeline": 1}
    _, nearest = told(memory_headroom=0.985, pins=pins)
    share = float(nearest.partition("a memory headroom of ")[2])
    assert asked(memory_headroom=share, pins=pins).best.layout["recompute"] == "none"
