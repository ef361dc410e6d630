"""Several changes at once: what one puts into the step, the others change as they change the rest."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from whatif_steps import ALPHA, BETA, a_step, calibration, layer, run, with_tasks

from trine.optim.config import Config
from trine.optim.plan.whatif.build import Steady
from trine.optim.plan.whatif.graph import LINK, Graph, Step, Task
from trine.optim.plan.whatif.predict import Recorded, replayed
from trine.optim.plan.whatif.transforms import Change, compiled
from trine.optim.plan.whatif.transforms._blocks import _repetition
from trine.record.errors import UsageError

#: Bytes of all gradients.
SIZE = sum(task.gradient_bytes for task in a_step(0).tasks)
#: Of a block, what full recomputation repeats: a product and two functions, the second after it.
REPEATED = layer(0)[:3]
FULL = {"checkpointing.mode": "full"}


def cost_of_recomputation(other: dict[str, object]) -> float:
    """Seconds a step that recomputation adds to a step with ``other``."""
    found = run()
    return found.what_if(other).gain.mid - found.what_if({**other, **FULL}).gain.mid


def test_what_is_recomputed_is_recomputed_in_low_precision() -> None:
    product, *functions = (task.seconds for task in REPEATED)
    weight, inputs = 64 * 256 * 1e-9, 128 * 64 * 1e-9
    # A quarter of the product, half of the functions, and the casts of each block's inputs and weight.
    expected = 3 * (product / 4 + sum(functions) / 2 + weight + inputs)
    assert cost_of_recomputation({"precision.dtype": "bf16"}) == pytest.approx(expected, rel=1e-6)


def test_what_is_recomputed_is_compiled() -> None:
    # gelu and multiply, four passes, are one pass and two passes' worth of arithmetic.
    expected = 3 * (REPEATED[0].seconds + 3 * 128 * 256 * 1e-9)
    assert cost_of_recomputation({"compute.compile": "blocks"}) == pytest.approx(expected, rel=1e-6)


def test_micro_batches_recompute_their_own_rows() -> None:
    expected = 3 * sum(task.seconds for task in REPEATED)
    assert cost_of_recomputation({"accumulation.steps": 2}) == pytest.approx(expected, rel=1e-3)


def test_a_straggler_is_late_in_most_steps_and_not_by_turns() -> None:
    steps = tuple(
        Step(place, (a_step(0, slow=1.2 if place % 2 else 1.0), a_step(1, slow=1.0 if place % 2 else 1.2)))
        for place in range(4)
    )
    graph = Graph(steps, "operators", 2, {}, recorded=steps)
    found = replayed(graph, Steady(np.empty(0), {}), calibration()).what_if({"straggler": False})
    assert found.gain.mid == pytest.approx(0.0, abs=1e-9)


def on_link(ranks: int, times: float, **facts: Any) -> Recorded:
    """The step of :func:`run`, whose all-reduces take so many ``times`` as long."""
    found = run(ranks=ranks, **facts)
    return with_tasks(found, lambda task: task.times(times) if task.lane == LINK else task)


def test_calibrated_links_are_rescaled_to_the_runs_ranks() -> None:
    longer = calibration().link("all_reduce").among(4).seconds(SIZE) / (ALPHA + SIZE / BETA)
    two, four = (on_link(ranks, times).what_if({"zero.stage": 1}) for ranks, times in ((2, 1.0), (4, longer)))
    tasks = a_step(0).tasks
    size = sum(task.gradient_bytes for task in tasks)
    optimizer = sum(task.seconds for task in tasks if task.phase == "optimizer")
    # Between four ranks: three hops where there was one, 3/4 of the bytes where there was 1/2; shards half as large.
    hops, moved = 2 * 1e-3, size / 1e9 / 2
    assert two.gain.mid - four.gain.mid == pytest.approx(hops + moved - optimizer / 4, rel=1e-3)
    assert not any("between nodes" in note for note in four.notes)
    assert any("between nodes" in note for note in run(ranks=4, hosts=2).what_if({"zero.stage": 1}).notes)


@pytest.mark.parametrize(
    ("facts", "change", "said"),
    [
        (
            {"precision": {"autocast_dtype": "bfloat16"}},
            {"precision.dtype": "bf16"},
            "computes in bfloat16 already",
        ),
        (
            {"configuration": {"checkpointing": {"mode": "full"}}},
            FULL,
            "has checkpointing.mode = full already",
        ),
        ({"configuration": {"zero": {"stage": 1}}}, {"zero.stage": 2}, "has zero.stage = 1 already"),
        (
            {"configuration": {"communication": {"compression": "bf16"}}},
            {"communication.compression": "int8"},
            "has communication.compression = bf16 already",
        ),
        ({"loader": {"workers": 2}}, {"data.workers": 4}, "loads with 2 workers already"),
    ],
)
def test_what_the_record_has_already_cannot_be_asked_again(
    facts: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    assert run().what_if(change)
    with pytest.raises(UsageError, match=re.escape(said)):
        run(**facts).what_if(change)


def test_products_in_low_precision_on_a_trace_without_facts_are_seen() -> None:
    found = run()
    step = found.graph.steps[0]
    low = tuple(replace(task, operator=replace(task.operator, dtype="bf16")) for task in step.ranks[0].tasks)
    step = replace(step, ranks=(replace(step.ranks[0], tasks=low), *step.ranks[1:]))
    with pytest.raises(UsageError, match="computes in bf16 already"):
        replace(found, graph=replace(found.graph, steps=(step,))).what_if({"precision.dtype": "bf16"})


def test_blocks_are_found_in_a_forward_of_many_thousand_products() -> None:
    layer_of = (5, 7, 5, 9)
    assert _repetition((1, 2, *layer_of * 3, 3)) == (2, 4, 3)
    assert _repetition((1, 2, 3)) == (0, 0, 0)
    began = time.process_time()
    assert _repetition((1, 2, *layer_of * 2000, 3)) == (2, 4, 2000)
    assert time.process_time() - began < 5


def test_a_compiled_chain_leaves_the_dispatch_of_what_follows_it() -> None:
    graph = run().graph
    step = graph.steps[0].ranks[0]
    gap = 1e-3
    tasks = [
        each
        for task in step.tasks
        for each in ((task, Task(gap, task.phase)) if task.kind == "memory" else (task,))
    ]
    graph = replace(graph, steps=(replace(graph.steps[0], ranks=(replace(step, tasks=tuple(tasks)),)),))
    changes = {"compute.compile": "blocks"}
    change = Change(changes, Config().with_changes(changes), calibration())
    fused = compiled.apply(graph, change).steps[0].ranks[0].tasks
    # Between gelu and multiply of three blocks half of the dispatch goes; all others stay.
    gaps = [sum(task.seconds for task in found if task.kind == "glue") for found in (tasks, fused)]
    assert gaps[0] - gaps[1] == pytest.approx(3 * gap / 2)


def test_many_ranks_are_replayed_by_some_and_that_is_said() -> None:
    assert any("64 ranks are replayed for 96" in note for note in run().what_if({"ranks": 96}).notes)


def test_a_compiled_chain_stores_the_gradients_that_its_parts_stored() -> None:
    graph = run().graph
    step = graph.steps[0].ranks[0]
    tasks = tuple(
        replace(task, gradient_bytes=8) if task.name == "aten::gelu" else task for task in step.tasks
    )
    graph = replace(graph, steps=(replace(graph.steps[0], ranks=(replace(step, tasks=tasks),)),))
    changes = {"compute.compile": "blocks"}
    change = Change(changes, Config().with_changes(changes), calibration())
    fused = compiled.apply(graph, change).steps[0].ranks[0].tasks
    assert len(fused) < len(tasks)
    assert sum(task.gradient_bytes for task in fused) == sum(task.gradient_bytes for task in tasks)


@pytest.mark.parametrize("changes", [None, {}, [], "precision.dtype=bf16"])
def test_changes_are_a_table_of_keys(changes: Any) -> None:
    with pytest.raises(UsageError, match="what_if wants changes by key"):
        run().what_if(changes)


def test_as_many_micro_batches_as_take_minutes_to_replay_are_refused() -> None:
    with pytest.raises(UsageError, match="up to 128 of them"):
        run().what_if({"accumulation.steps": 10**9})
