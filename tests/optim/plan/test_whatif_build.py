"""From ranks' tables to one graph: each rank as long as it usually is, groups apart, and what is known of the whole job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from whatif_steps import a_step, calibration

from trine.optim.plan.whatif.build import Part, _matched, joined, part_of
from trine.optim.plan.whatif.graph import HOST, LINK, RankStep, Step, Task
from trine.optim.plan.whatif.operators import TRANSFER, WAIT
from trine.optim.plan.whatif.predict import Recorded, replayed
from trine.optim.plan.whatif.replay import replay
from trine.record.errors import UsageError
from trine.record.model import Rank, Strings, Table

#: Of a profiled step, host time over what it usually is.
PROFILER = 1.25
WINDOW = (10, 11)


def steps_table(of_step: RankStep, seconds: float, count: int = 40, samples: int = 8) -> Table:
    """Steps that each take ``seconds``, in the phases of ``of_step``; those of the window are longer by the profiler."""
    longer = [PROFILER if index in WINDOW else 1.0 for index in range(count)]
    columns: dict[str, Any] = {
        "index": range(count),
        "start_ns": [round(index * 10e9) for index in range(count)],
        "end_ns": [round((index * 10 + seconds * more) * 1e9) for index, more in enumerate(longer)],
        "samples": [samples] * count,
    }
    for name, mine in of_step.phase_s().items():
        columns[f"phase_{name}_ns"] = [round(mine * more * 1e9) for more in longer]
    return Table("steps", columns, Strings())


def profiled(step: RankStep) -> RankStep:
    tasks = tuple(task.times(PROFILER) if task.lane == HOST else task for task in step.tasks)
    return replace(step, tasks=tasks, measured_s=step.measured_s * PROFILER)


def parts_of(
    steps: Sequence[RankStep], basis: Sequence[str] = (), hosts: Sequence[str | None] = (), **metadata: Any
) -> list[Part]:
    """Ranks of a job whose steps usually are these; each has two of them, profiled."""
    seconds = replay(Step(0, tuple(steps))).seconds
    return [
        Part(
            rank=each.rank,
            basis=basis[place] if basis else "operators",
            steps=tuple((index, profiled(each)) for index in WINDOW),
            profiled=frozenset(WINDOW),
            table=steps_table(each, seconds),
            host_name=hosts[place] if hosts else "a",
            world=None,
            metadata=metadata,
            work={},
        )
        for place, each in enumerate(steps)
    ]


def recorded(parts: Sequence[Part], world: int | None = None) -> Recorded:
    return replayed(*joined(parts, world, "a job"), calibration())


# --- each rank as long as it usually is -----------------------------------------------------------------


@pytest.mark.parametrize("slow", [1.3, 1.6])
def test_a_rank_that_is_always_slower_is_a_straggler(slow: float) -> None:
    late = [a_step(0), a_step(1, slow=slow)]
    even = [a_step(0), a_step(1)]
    usual, expected = (replay(Step(0, tuple(steps))).seconds for steps in (late, even))
    found = recorded(parts_of(late))
    assert found.usual_error == pytest.approx(0.0, abs=1e-6)
    answer = found.what_if({"straggler": False})
    assert answer.gain.mid == pytest.approx(usual - expected, rel=1e-6)
    assert answer.gain.mid > 0.15 * usual


def test_one_rank_alone_that_waits_for_its_loader_is_heard() -> None:
    waits = a_step(1)
    waits = replace(waits, tasks=(Task(0.1, "data"), *waits.tasks[1:]))
    found = recorded(parts_of([a_step(0), waits]))
    assert found.what_if({"loader_wait": False}).gain.mid == pytest.approx(0.1, rel=1e-6)


def test_steps_that_were_profiled_count_for_none_that_are_usual() -> None:
    parts = parts_of([a_step(0), a_step(1)])
    # The first of the window's steps alone is replayed; the second, and the one behind it, are not usual either.
    found = recorded([replace(part, steps=part.steps[:1]) for part in parts])
    assert len(found.steady.seconds) == 40 - 3 - len(WINDOW) - 1
    assert found.steady.seconds.max() == pytest.approx(found.steady.seconds.min())


def test_copies_to_the_device_are_no_waiting_for_the_loader() -> None:
    columns = {"index": range(8), "start_ns": [0] * 8, "end_ns": [round(0.1e9)] * 8, "phase_data_ns": [0] * 8,
               "phase_copy_ns": [round(0.04e9)] * 8, "phase_forward_ns": [round(0.06e9)] * 8}  # fmt: skip
    strings = Strings()
    rank = Rank(0, "", "trine", strings, steps=Table("steps", columns, strings))
    found = recorded([part_of(rank)])
    assert found.graph.basis == "phases" and found.base_s[3] == pytest.approx(0.1)
    assert found.what_if({"loader_wait": False}).gain.mid == pytest.approx(0.0)


def test_files_that_are_not_whole_are_said() -> None:
    columns = {
        "index": range(8),
        "start_ns": [0] * 8,
        "end_ns": [round(0.1e9)] * 8,
        "phase_forward_ns": [round(0.1e9)] * 8,
    }
    strings = Strings()
    rank = Rank(0, "", "trine", strings, steps=Table("steps", columns, strings))
    rank.note("flops-step", "info", "step 1 was slowed down")
    assert not any("not whole" in note for note in recorded([part_of(rank)]).graph.notes)
    rank.note("truncated-file", "error", "window-000010.json.gz ends in the middle")
    assert any(
        "not whole" in note and "window-000010.json.gz ends in the middle" in note
        for note in recorded([part_of(rank)]).graph.notes
    )


# --- ranks that were recorded otherwise -----------------------------------------------------------------


def test_of_many_ranks_those_with_windows_are_replayed_and_that_is_said() -> None:
    steps = [a_step(rank) for rank in range(4)]
    found = recorded(parts_of(steps, basis=["operators", "phases", "operators", "phases"]))
    assert found.graph.basis == "operators"
    assert [each.rank for each in found.graph.steps[0].ranks] == [0, 2]
    assert any("2 of 4 ranks" in note for note in found.graph.notes)
    assert found.what_if({"product_speed": 2}).gain.mid > 0


def test_a_transfer_is_as_long_as_on_the_rank_that_came_last_with_a_window_or_without() -> None:
    def transfers(seconds: float) -> RankStep:
        return exchanging(0, (seconds, "all 1", ()))

    early, late = transfers(0.4), replace(transfers(0.1), rank=1)
    parts = parts_of([early, late], basis=["operators", "phases"])
    found = recorded(parts)
    assert found.base_s[10] == pytest.approx(0.1)
    assert "1 of 2 ranks: of the others their collectives" in found.graph.notes
    silent = [parts[0], replace(parts[1], steps=parts_of([exchanging(1)])[0].steps)]
    assert recorded(silent).base_s[10] == pytest.approx(0.4)
    assert "1 of 2 ranks: transfers may hold waiting for the others" in recorded(silent).graph.notes
    with pytest.raises(UsageError, match="straggler: operators of one rank alone"):
        found.what_if({"straggler": False})


def test_nodes_are_those_of_the_whole_job() -> None:
    ranks = [a_step(rank) for rank in range(16)]
    names = ["a"] * 8 + ["b"] * 8

    def hosts(hosts: Sequence[str | None], world: int, count: int = 16) -> object:
        return recorded(parts_of(ranks[:count], hosts=hosts), world).graph.facts["hosts"]

    assert hosts(names, 16) == 2
    assert hosts(names, 64) == 8  # the first 16 ranks of 64 are read
    assert hosts(names, 64, 8) is None  # and of one node of who knows how many
    run = recorded(parts_of(ranks[:8], hosts=names), 64)
    with pytest.raises(UsageError, match=r"does not say on how many nodes its 64 ranks ran"):
        run.what_if({"communication.algorithm": "two_level"})


def test_micro_batches_are_counted_by_rank_and_a_pipeline_without_forwards_is_none() -> None:
    def piped(work: Mapping[tuple[int, str], tuple[float, ...]], **metadata: Any) -> Recorded:
        parts = parts_of([a_step(0), a_step(1), a_step(2), a_step(3)], **metadata)
        # Two replicas of two stages.
        stages = [
            {(part.rank % 2, direction): each for (_, direction), each in work.items()} for part in parts
        ]
        return recorded([replace(part, work=each) for part, each in zip(parts, stages, strict=True)])

    whole = {(0, "forward"): (1e-3,) * 4 * 40, (0, "backward"): (2e-3,) * 4 * 40}
    pipeline = piped(whole).graph.pipeline
    assert pipeline is not None and pipeline.microbatches == 4 and pipeline.ranks == 2
    stated = piped(whole, configuration={"parallel": {"microbatches": 8}}).graph.pipeline
    assert stated is not None and stated.microbatches == 8
    assert piped({(0, "backward"): (2e-3,) * 160}).graph.pipeline is None


def test_more_micro_batches_than_a_step_has_samples_are_refused() -> None:
    found = recorded(parts_of([a_step(0), a_step(1)]))
    assert found.what_if({"accumulation.steps": 8})
    with pytest.raises(UsageError, match=r"accumulation\.steps = 16: a rank's step has 8 samples"):
        found.what_if({"accumulation.steps": 16})


# --- groups -------------------------------------------------------------------------------------------------


def exchanging(rank: int, *calls: tuple[float, str, tuple[int, ...]]) -> RankStep:
    """A rank that enters all-reduces (seconds, key, group), one after another."""
    tasks = [Task(0.0, "forward")]
    for seconds, key, group in calls:
        sent = Task(seconds, "backward", LINK, TRANSFER, "all_reduce", (tasks[-1].number,), issued="all_reduce",
                    key=key, group=group, bytes=2**20)  # fmt: skip
        tasks += [sent, Task(0.0, "backward", operator=WAIT, after=(sent.number,))]
    return RankStep(rank, tuple(tasks), 1.0)


def test_a_group_of_some_ranks_exchanges_among_itself() -> None:
    pair, both = (0, 2), (0, 1, 2)
    step = _matched(0, [
        exchanging(0, (0.01, "pair 1", pair), (0.1, "all 1", both)),
        exchanging(1, (0.1, "all 1", both)),
        exchanging(2, (0.02, "pair 1", pair), (0.3, "all 1", both)),
    ])  # fmt: skip
    assert replay(step).seconds == pytest.approx(0.11)


def test_what_a_rank_of_a_group_lacks_was_entered_by_none() -> None:
    step = _matched(0, [exchanging(0, (0.01, "pair 1", (0, 1))), exchanging(1)])
    assert replay(step).seconds == 0.0


def test_a_group_whose_other_ranks_were_not_recorded_takes_its_time() -> None:
    step = _matched(
        0, [exchanging(0, (0.01, "pair 1", (0, 8))), exchanging(1, (0.02, "pair 1 from 1", (1, 9)))]
    )
    assert replay(step).seconds == pytest.approx(0.02)


def test_all_reduces_of_layers_are_no_gradients() -> None:
    layers, replicas = (0, 1), (0, 2)

    def reduced(phase: str, size: int, group: tuple[int, ...], name: str = "all_reduce") -> Task:
        key = f"{phase} {size} {group}"
        return Task(0.1, phase, LINK, TRANSFER, name, issued=name, key=key, group=group, bytes=size)

    activations, gradients = 2**20, 2**22
    tasks = (
        reduced("forward", activations, layers),
        reduced("backward", activations, layers),
        reduced("backward", gradients, replicas),
        reduced("other", gradients, replicas, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        reduced("other", 8, replicas),
    )
    step = _matched(0, [RankStep(0, tasks, 1.0)])
    assert [task.of_gradients for task in step.ranks[0].tasks] == [False, False, True, True, False]
