"""Operations of a step that lie about their calibrated times say how far calibrated times are to be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from whatif_steps import a_step, calibration, run, with_tasks

from trine.optim.plan.whatif.build import Steady
from trine.optim.plan.whatif.graph import LINK, Task
from trine.optim.plan.whatif.predict import Interval, Recorded
from trine.optim.plan.whatif.scatter import scatter_of
from trine.optim.plan.whatif.times import MOST_DEVIATION, OperationTimes

BF16 = {"precision.dtype": "bf16"}


def altered(factor: Callable[[Task], float]) -> Recorded:
    """The step by hand, each task so many times as long; its steady steps all alike."""
    found = with_tasks(run(), lambda task: task.times(factor(task)))
    return replace(found, steady=Steady(np.full(30, found.base_s[5]), {}))


def is_tall(task: Task) -> bool:
    """Whether it is a product of more than 64 rows: some of the step's are, others not."""
    return task.operator.product is not None and task.operator.product.rows > 64


def width(gain: Interval) -> float:
    return gain.high - gain.low


def test_operations_that_take_what_was_calibrated_leave_no_doubt() -> None:
    found = altered(lambda task: 1.0)
    assert scatter_of(found.graph, calibration()) == {
        "product": pytest.approx(0.0, abs=1e-9),
        "memory": pytest.approx(0.0, abs=1e-9),
    }  # one size of transfers says nothing of how sizes differ
    assert width(found.what_if(BF16).gain) == pytest.approx(0.0, abs=1e-9)


def test_a_step_that_is_slower_as_a_whole_is_its_pace_and_no_scatter() -> None:
    found = altered(lambda task: 3.0)
    assert max(scatter_of(found.graph, calibration()).values()) == pytest.approx(0.0, abs=1e-9)
    assert width(found.what_if(BF16).gain) == pytest.approx(0.0, abs=1e-9)


def test_products_apart_from_each_other_make_their_times_as_doubtful() -> None:
    wide = altered(lambda task: 1.2 if is_tall(task) else 1.0)
    tasks = [task for task in wide.graph.steps[0].ranks[0].tasks if task.kind == "product"]
    whole = sum(task.seconds for task in tasks)
    slow = sum(task.seconds for task in tasks if is_tall(task)) / whole
    scatter = scatter_of(wide.graph, calibration())
    assert scatter["product"] == pytest.approx(math.log(1.2) * math.sqrt(slow * (1 - slow)))
    gain = wide.what_if(BF16).gain
    assert gain.low < gain.mid < gain.high
    further = altered(lambda task: 1.5 if is_tall(task) else 1.0)
    assert width(further.what_if(BF16).gain) > 1.5 * width(gain)
    # What asks for no calibrated time is as sure as before.
    assert width(wide.what_if({"loader_wait": False}).gain) == pytest.approx(0.0, abs=1e-9)


def test_scatter_alone_moves_no_calibrated_time_beyond_half_and_twice() -> None:
    times = calibration().scattered({"product": 5.0})
    plain = {(row["operation"], *map(str, row.get("shape", ()))): row for row in _rows(calibration())}
    moved = [
        math.log(row["seconds"] / plain[(row["operation"], *map(str, row["shape"]))]["seconds"])
        for each in times.draws
        for row in _rows(each)
        if row["operation"] == "product" and row["dtype"] == "bf16"
    ]
    assert 0 < math.sqrt(sum(each**2 for each in moved) / len(moved)) < 3 * MOST_DEVIATION
    assert not calibration().scattered({}).draws and not calibration().keeps_variation


def test_transfers_apart_from_their_line_make_new_ones_doubtful() -> None:
    def bucketed(task: Task) -> Task:
        # The first bucket is small and took long, as one does that waits for the ranks' cores.
        return (
            replace(task, bytes=task.bytes // 8) if task.lane == LINK and task.key == "all_reduce 0" else task
        )

    def two_buckets(recorded: Recorded) -> Recorded:
        step = replace(recorded.graph.steps[0], ranks=tuple(a_step(rank, buckets=2) for rank in range(2)))
        graph = replace(recorded.graph, steps=(step,), recorded=(step,))
        return with_tasks(replace(recorded, graph=graph), lambda task: task)

    alike = two_buckets(run())
    apart = with_tasks(alike, bucketed)
    assert "transfer" not in scatter_of(alike.graph, calibration())
    assert scatter_of(apart.graph, calibration())["transfer"] > 0
    change = {"zero.stage": 2}
    steady = [replace(each, steady=Steady(np.full(30, each.base_s[5]), {})) for each in (alike, apart)]
    assert width(steady[0].what_if(change).gain) < width(steady[1].what_if(change).gain)


def _rows(times: OperationTimes) -> list[dict[str, object]]:
    assert times._peaks is not None
    return [dict(row) for row in times._peaks.operations]
