"""Another pipeline schedule: of ranks that wait for each other's messages, and of a run that has a schedule already."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from whatif_steps import calibration

from trine.optim.plan.whatif.build import Steady
from trine.optim.plan.whatif.graph import LINK, Graph, Pipeline, RankStep, Step, Task
from trine.optim.plan.whatif.operators import TRANSFER, WAIT
from trine.optim.plan.whatif.predict import Recorded, replayed
from trine.optim.plan.whatif.replay import replay
from trine.record.errors import UsageError

#: Seconds of a micro-batch's forward and backward on a stage.
FORWARD_S, BACKWARD_S = 1e-3, 2e-3


def gpipe_rank(rank: int, ranks: int, count: int) -> list[Task]:
    """All forwards, then all backwards, each after the message that it waits for and followed by the one that it sends."""
    tasks = [Task(0.0, "forward")]
    for phase, seconds, source, target in (
        ("forward", FORWARD_S, rank - 1, rank + 1),
        ("backward", BACKWARD_S, rank + 1, rank - 1),
    ):
        for number in range(count):
            for sends, peer in ((False, source), (True, target)):
                if sends:
                    tasks.append(Task(seconds, phase))
                if not 0 <= peer < ranks:
                    continue
                channel = f"{rank}>{peer}" if sends else f"{peer}>{rank}"
                tasks.append(
                    Task(
                        0.0,
                        phase,
                        LINK,
                        TRANSFER,
                        after=(tasks[-1].number,),
                        key=f"{channel} {number}",
                        channel=channel,
                    )
                )
                if not sends:
                    tasks.append(Task(0.0, phase, operator=WAIT, after=(tasks[-1].number,)))
    return tasks


def run(ranks: int, count: int, chunks: int = 1, **facts: Any) -> Recorded:
    """A step of GPipe as it would be recorded; of more ``chunks`` only the times of single micro-batches say so."""
    step = Step(5, tuple(RankStep(rank, tuple(gpipe_rank(rank, ranks, count)), 0.0) for rank in range(ranks)))
    seconds = replay(step).seconds
    step = Step(5, tuple(RankStep(each.rank, each.tasks, seconds) for each in step.ranks))
    stages = ranks * chunks
    pipeline = Pipeline(
        ranks, count, (FORWARD_S / chunks,) * stages, (BACKWARD_S / chunks,) * stages, (0.0,) * stages
    )
    graph = Graph((step,), "operators", ranks, facts, recorded=(step,), pipeline=pipeline)
    return replayed(graph, Steady(np.empty(0), {}), calibration())


def stating(schedule: str) -> dict[str, Any]:
    return {"configuration": {"parallel": {"schedule": schedule}}}


@pytest.mark.parametrize(("ranks", "count"), [(4, 4), (8, 8), (4, 16)])
def test_ranks_that_wait_for_messages_gain_the_difference_of_the_spans_and_no_more(
    ranks: int, count: int
) -> None:
    found = run(ranks, count, **stating("gpipe"))
    assert found.base_s[5] == pytest.approx((count + ranks - 1) * (FORWARD_S + BACKWARD_S))
    # ZB-H1 leaves (p − 1)(F + B − 2W) where GPipe leaves (p − 1)(F + B); W is half of B.
    gain = found.what_if({"parallel.schedule": "zb-h1"}).gain.mid
    assert gain == pytest.approx((ranks - 1) * BACKWARD_S, rel=0.01)
    # Half as large and twice as many: the bubble is half of (p − 1)(F + B).
    more = found.what_if({"parallel.microbatches": 2 * count})
    assert more.gain.mid == pytest.approx((ranks - 1) * (FORWARD_S + BACKWARD_S) / 2, rel=0.01)
    assert any("smaller micro-batches" in note for note in more.notes)


@pytest.mark.parametrize(
    ("names", "chunks"),
    [
        (("zbv", "ZBVZeroBubble", "zb-v"), 2),
        (("Interleaved1F1B", "interleaved"), 2),
        (("looped_bfs", "LoopedBFS", "looped-bfs"), 2),
        (("interleaved_zero_bubble", "interleaved-zb"), 2),
        (("dualpipev", "dualpipe-v"), 2),
        (("1F1B", "1f1b"), 1),
    ],
)
def test_schedules_have_the_names_that_the_configuration_takes(names: tuple[str, ...], chunks: int) -> None:
    found = run(2, 8, **stating("gpipe"))
    gains = {found.what_if({"parallel.schedule": name, "parallel.chunks": chunks}).gain.mid for name in names}
    assert len(gains) == 1
    # How many stages a rank a schedule runs need not be said.
    assert {found.what_if({"parallel.schedule": name}).gain.mid for name in names} == gains


def test_every_schedule_of_the_configuration_can_be_asked() -> None:
    from trine.optim.runtime.pipelining.schedules import SCHEDULES

    found = run(2, 8, **stating("1f1b"))
    for name in SCHEDULES:
        if name == "1f1b":
            continue
        assert found.what_if({"parallel.schedule": name}).step.mid > 0


def test_what_the_run_has_already_is_no_gain() -> None:
    said = re.escape(
        "the recorded run is zb-v with 2 stages a rank and 8 micro-batches already: ask for another"
    )
    with pytest.raises(UsageError, match=said):
        run(2, 8, 2, **stating("ZBVZeroBubble")).what_if({"parallel.schedule": "zbv"})
    # A schedule that is not on record is a guess, and that is said.
    guessed = run(2, 8).what_if({"parallel.schedule": "zb-h1"})
    assert "the record does not say its schedule: it is taken to be 1f1b" in guessed.notes
    assert not any("does not say" in note for note in run(2, 8, **stating("1f1b")).what_if(
        {"parallel.schedule": "zb-h1"}
    ).notes)  # fmt: skip


def test_a_step_that_does_not_hang_on_its_micro_batches_is_no_ground_for_an_answer() -> None:
    found = run(4, 4, **stating("gpipe"))
    step = found.graph.steps[0]
    idle = Step(5, tuple(RankStep(each.rank, (Task(0.02, "other"),), 0.02) for each in step.ranks))
    graph = Graph((idle,), "operators", 4, found.graph.facts, recorded=(idle,), pipeline=found.graph.pipeline)
    with pytest.raises(UsageError, match="does not hang on its forward and backward that far"):
        replayed(graph, Steady(np.empty(0), {}), calibration()).what_if({"parallel.schedule": "zb-h1"})
    with pytest.raises(UsageError, match="did you mean"):
        found.what_if({"parallel.schedule": "zbvv"})
