"""What the exchange between ranks costs where it is slower than calibrated, what ranks share it, and what cannot be answered."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from whatif_steps import ALPHA, BETA, MIB, a_step, calibration, run, run_on_device, with_tasks

from trine.optim.plan.whatif.build import Steady
from trine.optim.plan.whatif.graph import HOST, LINK, Graph, RankStep, Step, Task
from trine.optim.plan.whatif.operators import TRANSFER
from trine.optim.plan.whatif.predict import Recorded, replayed
from trine.optim.plan.whatif.times import OperationTimes
from trine.record.errors import UsageError

#: Bytes of all gradients.
SIZE = sum(task.gradient_bytes for task in a_step(0).tasks)
SECONDS = ALPHA + SIZE / BETA


def slower_link(times: float, on: Callable[[], Recorded] = run) -> Recorded:
    return with_tasks(on(), lambda task: task.times(times) if task.lane == LINK else task)


def with_transfer(phase: str, operation: str, size: int = 50 * MIB, **changes: Any) -> Recorded:
    """The step with one more transfer in a phase, which its next task waits for."""

    def put(step: RankStep) -> RankStep:
        place = next(at for at, task in enumerate(step.tasks) if task.phase == phase and task.lane == HOST)
        more = Task(0.02, phase, LINK, TRANSFER, operation, (step.tasks[place].number,), issued=operation,
                    key=f"{operation} more", bytes=size, **changes)  # fmt: skip
        after = replace(step.tasks[place + 1], after=(more.number,))
        return replace(step, tasks=(*step.tasks[: place + 1], more, after, *step.tasks[place + 2 :]))

    found = run()
    steps = tuple(replace(step, ranks=tuple(put(each) for each in step.ranks)) for step in found.graph.steps)
    return with_tasks(replace(found, graph=replace(found.graph, steps=steps)), lambda task: task)


# --- links that are slower than calibrated ----------------------------------------------------------------


@pytest.mark.parametrize("times", [1.0, 10.0, 100.0])
def test_shards_are_moved_over_the_link_that_was_recorded(times: float) -> None:
    first = slower_link(times).what_if({"zero.stage": 1})
    optimizer = sum(task.seconds for task in a_step(0).tasks if task.phase == "optimizer")
    copies = SIZE / 4 * 1e-9
    assert first.gain.mid == pytest.approx(optimizer / 2 - copies - times * SECONDS, rel=1e-3)
    # Of stage 2: an all-reduce goes, and a gather and a scatter come, of as many bytes in more calls.
    assert slower_link(times).what_if({"zero.stage": 2}).gain.mid < 0


def test_on_a_device_the_work_beside_them_counts_for_those_that_have_it_beside() -> None:
    idle, busy = (
        slower_link(times, run_on_device).what_if({"zero.stage": 2}).gain.mid for times in (1.0, 50.0)
    )
    assert busy < idle < 0


def test_transfers_that_took_no_time_say_nothing_of_their_link() -> None:
    blank = replace(slower_link(0.0), times=OperationTimes(None))
    for change in ({"communication.bucket_mib": 1}, {"ranks": 4}):
        with pytest.raises(UsageError, match="latency and bandwidth are not known"):
            blank.what_if(change)
    # Some of them: the link is fitted to the others.
    four = replace(run().graph.steps[0], ranks=tuple(a_step(rank, buckets=4) for rank in range(2)))
    sizes = iter([0, 1, 4, 16] * 2)

    def sized(task: Task) -> Task:
        if task.lane != LINK:
            return task
        many = next(sizes)
        size = (many or 1) * 2**16
        return replace(task, bytes=size, seconds=ALPHA + size / BETA if many else 0.0)

    graph = Graph((four,), "operators", 2, {}, recorded=(four,))
    fitted = with_tasks(replayed(graph, Steady(np.empty(0), {}), OperationTimes(None)), sized)
    # Two more hops, and half as many bytes again.
    expected = 3 * 2 * ALPHA + 0.5 * (1 + 4 + 16) * 2**16 / BETA
    assert -fitted.what_if({"ranks": 4}).gain.mid == pytest.approx(expected, rel=1e-3)


def test_a_transfer_of_unknown_size_is_as_large_as_its_time_says() -> None:
    known = slower_link(20.0)
    unknown = with_tasks(known, lambda task: replace(task, bytes=0) if task.lane == LINK else task)
    answer = unknown.what_if({"ranks": 64})
    seconds = 20.0 * SECONDS
    # Of a link that is not idle a size makes up for the rest: longer by bytes, 2·63/64 where 2·1/2, and 62 more latencies.
    assert -answer.gain.mid == pytest.approx(
        (seconds - ALPHA) * (63 / 64 / (1 / 2) - 1) + 62 * ALPHA, rel=1e-3
    )
    assert any("sizes are not on record" in note for note in answer.notes)
    assert not any("sizes are not on record" in note for note in known.what_if({"ranks": 64}).notes)


# --- who shares it ----------------------------------------------------------------------------------------


def in_groups(found: Recorded, *groups: tuple[int, ...]) -> Recorded:
    """Every rank's all-reduces among the ranks of its group alone."""

    def of_rank(each: RankStep) -> RankStep:
        mine = next(group for group in groups if each.rank in group)
        tasks = tuple(
            replace(task, group=mine, key=f"{task.key} from {mine[0]}") if task.lane == LINK else task
            for task in each.tasks
        )
        return replace(each, tasks=tasks)

    steps = tuple(replace(step, ranks=tuple(map(of_rank, step.ranks))) for step in found.graph.steps)
    return with_tasks(replace(found, graph=replace(found.graph, steps=steps)), lambda task: task)


def test_shards_are_divided_among_the_ranks_that_share_gradients() -> None:
    two, pairs = run(), in_groups(run(ranks=4), (0, 2), (1, 3))
    for change in ({"zero.stage": 1}, {"zero.stage": 2}, {"communication.bucket_mib": 0.05}):
        assert pairs.what_if(change).gain.mid == pytest.approx(two.what_if(change).gain.mid, rel=1e-9)
    with pytest.raises(UsageError, match=r"ranks: this record's 4 ranks exchange in groups of 2"):
        pairs.what_if({"ranks": 8})


def test_two_levels_are_those_of_the_ranks_that_share_gradients() -> None:
    # Four nodes of two ranks; replicas of a layer that two ranks of a node share lie one on each node.
    apart = in_groups(run(ranks=8, hosts=4), (0, 2, 4, 6), (1, 3, 5, 7))
    with pytest.raises(UsageError, match="the record has 4 ranks on 4 nodes"):
        apart.what_if({"communication.algorithm": "two_level"})
    together = in_groups(run(ranks=8, hosts=4), (0, 1, 2, 3), (4, 5, 6, 7))
    four = run(ranks=4, hosts=2)
    change = {"communication.algorithm": "two_level"}
    assert together.what_if(change).gain.mid == pytest.approx(four.what_if(change).gain.mid)


def test_a_layers_all_reduce_in_forward_is_left_alone() -> None:
    plain, parallel = run(), with_transfer("forward", "all_reduce")
    for change in (
        {"zero.stage": 2},
        {"communication.compression": "int8"},
        {"communication.bucket_mib": 0.05},
    ):
        assert parallel.what_if(change).gain.mid == pytest.approx(plain.what_if(change).gain.mid, rel=1e-6)


# --- micro-batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["all_gather", "all_to_all", "all_reduce"])
def test_shards_that_every_micro_batch_would_gather_again_are_refused(operation: str) -> None:
    said = rf"transfers that every micro-batch would repeat \({operation}\)"
    with pytest.raises(UsageError, match=said):
        with_transfer("forward", operation).what_if({"accumulation.steps": 4})
    # Buffers go out before the first micro-batch, and flags are small.
    assert with_transfer("forward", "broadcast").what_if({"accumulation.steps": 4})
    assert with_transfer("forward", operation, size=8).what_if({"accumulation.steps": 4})


def of_two_micro_batches() -> Recorded:
    """A step that runs forward again once gradients are there, and sends them behind the second backward."""

    def again(step: RankStep) -> RankStep:
        inside = [task for task in step.tasks if task.phase in ("forward", "backward") and task.lane == HOST]
        first = [replace(task, number=-task.number) for task in inside if task.kind != "wait"]
        return replace(step, tasks=(step.tasks[0], *first, *step.tasks[1:]))

    steps = (Step(5, tuple(again(a_step(rank)) for rank in range(2))),)
    graph = Graph(steps, "operators", 2, {}, recorded=steps)
    return with_tasks(replayed(graph, Steady(np.empty(0), {}), calibration()), lambda task: task)


@pytest.mark.parametrize(
    "change", [{"checkpointing.mode": "full"}, {"zero.stage": 2}, {"accumulation.steps": 2}], ids=str
)
def test_blocks_of_several_micro_batches_are_not_told_apart(change: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="this step is of several micro-batches"):
        of_two_micro_batches().what_if(change)


def test_of_several_micro_batches_the_last_ones_gradients_fill_buckets() -> None:
    change = {"communication.bucket_mib": 0.05}
    assert of_two_micro_batches().what_if(change).gain.mid == pytest.approx(
        run().what_if(change).gain.mid, rel=1e-6
    )


# --- what is no change --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "change", "said"),
    [
        ({"configuration": {"checkpointing": {"mode": "full"}}}, {"checkpointing.mode": "none"}, "cannot be taken out"),
        ({"configuration": {"zero": {"stage": 3}}}, {"zero.stage": 0}, "cannot be taken out"),
        ({"data_parallel": {"kind": "fsdp2"}}, {"communication.bucket_mib": 1}, "by modules (fsdp2), not in buckets"),
        ({"accumulation": 4}, {"accumulation.steps": 1}, "accumulates already"),
        ({"loader": {"workers": 2}}, {"data.workers": 0}, "loads with 2 workers already"),
        ({}, {"checkpointing.mode": "none"}, "checkpointing.mode = none: the run has that by all that its record says"),
        ({}, {"zero.stage": 0}, "so nothing would change"),
        ({}, {"accumulation.steps": 1}, "so nothing would change"),
        ({}, {"data.workers": 0}, "so nothing would change"),
        ({}, {"communication.algorithm": None}, "so nothing would change"),
        ({}, {"checkpointing.every": 2}, "checkpointing.every: changes nothing without checkpointing.mode"),
        ({}, {"zero.reshard_after_forward": True}, "changes nothing without zero.stage"),
        ({}, {"straggler": None}, "straggler: give false"),
        ({}, {"loader_wait": None}, "loader_wait: give false"),
    ],
    ids=str,
)  # fmt: skip
def test_what_leaves_the_step_as_it_is_is_refused(
    facts: dict[str, Any], change: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        run(**facts).what_if(change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"zero.stage": 0}, {"zero.stage": 3}, {"communication.bucket_mib": 1}], ids=str
)
def test_parameters_that_are_gathered_are_sharded_already(change: dict[str, object]) -> None:
    for size in (SIZE, 0):
        with pytest.raises(UsageError, match="the recorded run gathers its parameters"):
            with_transfer("forward", "all_gather", size=size).what_if(change)
    if change != {"zero.stage": 0}:  # statistics of a layer are no parameters
        assert with_transfer("forward", "all_gather", size=SIZE // 4).what_if(change)


def test_gradients_that_are_scattered_are_said_to_be() -> None:
    tasks = with_transfer("backward", "reduce_scatter")
    sharded = with_tasks(tasks, lambda task: replace(task, of_gradients=False))
    with pytest.raises(UsageError, match="gradients are reduced by reduce-scatters, to shards"):
        sharded.what_if({"communication.bucket_mib": 1})
    with pytest.raises(UsageError, match="one rank exchanges nothing: record two or more"):
        with_tasks(run(ranks=1), lambda task: replace(task, of_gradients=False)).what_if({"zero.stage": 2})


# --- other changes at once ----------------------------------------------------------------------------------


def test_loading_hides_behind_what_the_other_changes_leave_of_the_step() -> None:
    slow = with_tasks(run(), lambda task: replace(task, seconds=0.1) if task.phase == "data" else task)
    rest = slow.base_s[5] - 0.1
    assert slow.what_if({"data.workers": 2}).predicted.mid == pytest.approx(rest, rel=1e-6)
    # A batch is ready every 50 ms, however fast the rest is.
    assert rest > 0.05 > slow.what_if({"loader_wait": False, "product_speed": 100}).predicted.mid
    faster = slow.what_if({"data.workers": 2, "product_speed": 100})
    assert faster.predicted.mid == pytest.approx(0.05, rel=1e-6)


def test_overlap_alone_keeps_the_runs_own_buckets() -> None:
    behind = {"communication.overlap": False}

    def alone(**facts: Any) -> float:
        return run(**facts).what_if(behind).gain.mid

    stated = run().what_if({"communication.bucket_mib": 0.05, **behind}).gain.mid
    assert alone(data_parallel={"kind": "ddp", "bucket_mib": 0.05}) == pytest.approx(stated)
    assert alone(configuration={"communication": {"bucket_mib": 0.05}}) == pytest.approx(stated)
    assert alone() == pytest.approx(0.0, abs=1e-6)  # all gradients fill no bucket of 1 MiB


@pytest.mark.parametrize(
    ("facts", "change"),
    [
        ({}, {"communication.overlap": True}),
        ({}, {"communication.first_bucket_mib": 1}),
        ({"data_parallel": {"kind": "ddp", "bucket_mib": 25.0}}, {"communication.overlap": True}),
        (
            {"configuration": {"communication": {"bucket_mib": 0.05}}},
            {"communication.bucket_mib": 0.05, "communication.overlap": True},
        ),
    ],
    ids=str,
)
def test_buckets_that_the_run_has_change_nothing(facts: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the run has that by all that its record says"):
        run(**facts).what_if(change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": 2}, "the record has that many already"),
        ({"link_speed": 1}, "as fast as it is"),
        ({"zero.stage": 1, "ranks": 1}, "one rank has nobody to share its state with"),
        ({"zero.stage": 3, "communication.bucket_mib": 1}, "are not answered together"),
    ],
    ids=str,
)
def test_questions_that_change_nothing_or_contradict_themselves(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run().what_if(change)


def test_ranks_whose_exchange_is_not_on_record() -> None:
    found = run()
    steps = tuple(
        replace(
            step,
            ranks=tuple(
                replace(each, tasks=tuple(t for t in each.tasks if t.lane != LINK)) for each in step.ranks
            ),
        )
        for step in found.graph.steps
    )
    with pytest.raises(UsageError, match="this record holds nothing that is on all of them"):
        replace(found, graph=replace(found.graph, steps=steps)).what_if({"ranks": 8})
    assert run().what_if({"ranks": 8}).gain.high < 0


def test_without_overlap_buckets_leave_behind_the_last_gradient() -> None:
    found = run().what_if({"communication.bucket_mib": 0.05, "communication.overlap": False})
    # Seven gradients, each large enough to fill one.
    assert -found.gain.mid == pytest.approx(6 * ALPHA, rel=1e-3)
