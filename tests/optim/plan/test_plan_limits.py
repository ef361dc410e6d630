"""What hosts and pins do to alternatives and to the largest that fits."""

from __future__ import annotations

from typing import Any

from plan_problems import DENSE, cluster

from trine.optim.plan.layouts import Layouts
from trine.optim.plan.limits import any_words
from trine.optim.plan.memory import memory_of
from trine.optim.plan.planning import plan


def test_hosts_that_hold_no_more_limit_alternatives_and_the_largest_that_fits() -> None:
    asked: dict[str, Any] = {
        "global_batch": 64,
        "stack": "trine",
        "top": 1,
        "pins": ["recompute=none", "activation_offload=cpu", "tensor=1", "context=1", "micro_batch=1,2,4,8"],
        "largest": True,
    }
    roomy = plan(DENSE, cluster(8.0), **asked)
    host = int(roomy.best.host_bytes * 1.05)
    full = plan(DENSE, cluster(8.0, host_memory_bytes=host), **asked)
    assert full.best.hosts_hold and full.best.host_bytes <= host
    for limits in (full.limits, full.largest):
        assert limits is not None and limits.micro_batch is not None
        found = memory_of(
            DENSE,
            full.problem.cluster,
            full.problem.stack,
            Layouts.of(**{**limits.micro_batch.layout, "micro_batch": limits.micro_batch.value}),
        )
        assert found.hosts_hold[0]
    overfull = [one for one in full.alternatives if "of a node's host" in one.reason]
    assert overfull and not any(one.fits for one in overfull)
    assert all(one.reason.startswith("does not fit: what is offloaded takes ") for one in overfull)


def test_a_value_that_fits_beside_other_degrees_is_not_said_to_fail() -> None:
    found = plan("llama3-70b", "dgx-h100", devices=1024, top=10)
    degrees = ("tensor", "context", "pipeline")
    alike = [row for row in found.ranked if row.layout["recompute"] == found.best.layout["recompute"]]
    ranked = {(name, row.layout[name]) for row in alike for name in degrees}
    told = {(one.column, one.value): one.fits for one in found.alternatives if one.column in degrees}
    both = told.keys() & ranked
    assert len(both) > 3 and all(told[each] for each in both)


def test_the_largest_of_any_layout_is_without_offload_unless_it_is_pinned() -> None:
    asked: dict[str, Any] = {"global_batch": 8, "stack": "deepspeed", "top": 1, "largest": True}
    device = cluster(4.0)
    plain, pinned = (plan(DENSE, device, pins=pins, **asked) for pins in ([], ["optimizer_offload=cpu"]))
    assert plain.best.layout["optimizer_offload"] == "cpu"
    assert plain.largest is not None and plain.largest.micro_batch is None
    assert any_words(plain.problem) == "of any layout without offload"
    assert pinned.largest is not None and pinned.largest.micro_batch is not None
    assert pinned.largest.micro_batch.layout["optimizer_offload"] == "cpu"
    assert any_words(pinned.problem) == "of any layout"
