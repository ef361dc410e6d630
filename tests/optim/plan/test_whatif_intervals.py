"""How sure an answer is: by how steps varied, by how the calibration's own repetitions did, and by nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from whatif_steps import calibration, run

from trine.optim.plan.whatif import predict, times
from trine.optim.plan.whatif.build import Steady
from trine.optim.plan.whatif.graph import Graph
from trine.optim.plan.whatif.predict import Interval, Recorded, WhatIf
from trine.optim.plan.whatif.times import DRAWN, OperationTimes
from trine.optim.plan.whatif.transforms import Change, speeds

#: Half of what 95 % of a normal distribution's draws lie within, in standard deviations.
WITHIN = 1.96
UNSURE = "this calibration keeps no quartiles"


def varied(
    times: OperationTimes, operation: str, deviation: float, dtype: str | None = None
) -> OperationTimes:
    """The same calibration, the repetitions of one operation so far from each other (a standard deviation of their logarithms)."""
    peaks = times._peaks
    assert peaks is not None
    rows = []
    for row in peaks.operations:
        if row["operation"] == operation and dtype in (None, row.get("dtype")):
            factor = math.exp(deviation * 0.6745)
            quartiles = [row["seconds"] / factor, row["seconds"], row["seconds"] * factor]
            row = {**row, "quartiles": quartiles}
        rows.append(row)
    return OperationTimes(replace(peaks, operations=rows))


def steady(recorded: Recorded) -> Recorded:
    """Steps that were all alike."""
    return replace(recorded, steady=Steady(np.full(30, recorded.base_s[5]), {}))


def test_a_change_that_reads_no_calibrated_time_is_as_sure_as_the_steps() -> None:
    found = steady(run(varied(calibration(), "product", 0.3)))
    for change in ({"loader_wait": False}, {"straggler": False}, {"product_speed": 2}):
        answer = found.what_if(change)
        assert answer.gain.low == pytest.approx(answer.gain.high), change
        assert not any(UNSURE in note for note in answer.notes)


def test_a_product_that_varied_by_a_tenth_is_a_tenth_of_its_time_in_doubt() -> None:
    found = steady(run(varied(calibration(), "product", 0.1, "bf16")))
    products = sum(task.seconds for task in found.graph.steps[0].ranks[0].tasks if task.kind == "product")
    gain = found.what_if({"precision.dtype": "bf16"}).gain
    # In bf16 products take a quarter. A dozen draws tell a deviation to a fifth of it or so.
    assert (gain.high - gain.low) / 2 == pytest.approx(WITHIN * 0.1 * products / 4, rel=0.5)
    assert gain.low < gain.mid < gain.high
    # Both dtypes of the sums between products vary alike there and here: nothing of compiling is a product's.
    other = found.what_if({"compute.compile": "blocks"}).gain
    assert other.low == pytest.approx(other.high)


def disturbed(times: OperationTimes) -> OperationTimes:
    """The same calibration, as a busy machine leaves it: of each time the upper quartile is six times the rest."""
    peaks = times._peaks
    assert peaks is not None
    rows = [
        {**row, "quartiles": [each * row["seconds"] for each in (0.99, 1.0, 6.0)]}
        if "seconds" in row
        else row
        for row in peaks.operations
    ]
    return OperationTimes(replace(peaks, operations=rows))


@pytest.mark.parametrize("change", [{"zero.stage": 1}, {"precision.dtype": "bf16"}])
def test_repetitions_beside_other_programs_make_no_interval_but_are_said(change: dict[str, object]) -> None:
    answer = steady(run(disturbed(calibration()))).what_if(change)
    assert answer.predicted.high - answer.predicted.low < 0.1 * answer.predicted.mid
    assert any("busy while it was calibrated" in note for note in answer.notes)
    quiet = steady(run(varied(calibration(), "product", 0.1))).what_if(change)
    assert not any("busy" in note for note in quiet.notes)


def test_times_that_are_hardly_known_are_half_or_twice_what_they_are_at_most() -> None:
    found = steady(run(varied(calibration(), "product", 4.0, "bf16")))
    products = sum(task.seconds for task in found.graph.steps[0].ranks[0].tasks if task.kind == "product")
    gain = found.what_if({"precision.dtype": "bf16"}).gain  # in which they take a quarter
    assert products / 8 < gain.high - gain.low < products / 2
    for low in (0.0, 1e-9):  # a unit's shards may cost nothing in a repetition
        row = {"seconds": 1.0, "quartiles": [low, 1.0, 1.0]}
        assert math.exp(WITHIN * times._deviation(row)) == pytest.approx(2.0)
    assert times._deviation({"seconds": 0.0, "quartiles": [0.0, 0.0, 1.0]}) == 0.0


def test_of_a_long_step_fewer_calibrations_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[OperationTimes] = []
    apply = speeds.apply

    def counted(graph: Graph, change: Change) -> Graph:
        tried.append(change.times)
        return apply(graph, change)

    monkeypatch.setattr(speeds, "apply", counted)
    found = steady(run(varied(calibration(), "product", 0.1, "bf16")))
    changes = {"precision.dtype": "bf16", "product_speed": 2}
    for tasks, count in ((predict.TRIED_TASKS, DRAWN), (0, predict.LEAST_TRIED)):
        tried.clear()
        monkeypatch.setattr(predict, "TRIED_TASKS", tasks)
        gain = found.what_if(changes).gain
        assert (
            len(tried) == 2 + count and gain.low < gain.mid < gain.high
        )  # the answer, and the deviation's middle


def test_a_gain_that_is_smaller_than_what_it_rests_on_varied_may_be_a_cost() -> None:
    # Products in bf16 that are hardly faster than in fp32; what is between them gains what casts cost.
    peaks = calibration()._peaks
    assert peaks is not None
    rows = [
        {**row, "seconds": 3.9 * row["seconds"]}
        if (row["operation"], row.get("dtype")) == ("product", "bf16")
        else row
        for row in peaks.operations
    ]
    times = OperationTimes(replace(peaks, operations=rows))
    change = {"precision.dtype": "bf16"}
    sure, unsure = (
        steady(run(each)).what_if(change).gain for each in (times, varied(times, "product", 0.1, "bf16"))
    )
    assert 0 < sure.low == pytest.approx(sure.high)
    assert unsure.mid == sure.mid and unsure.low < 0 < unsure.high


def test_a_calibration_of_an_earlier_release_is_read_and_said_to_lack_its_variation() -> None:
    answer = steady(run()).what_if({"precision.dtype": "bf16"})
    assert any(UNSURE in note for note in answer.notes) and answer.gain.mid > 0
    sure = steady(run(varied(calibration(), "product", 0.1))).what_if({"precision.dtype": "bf16"})
    assert not any(UNSURE in note for note in sure.notes)


def test_no_step_is_predicted_to_take_no_time() -> None:
    found = run(varied(calibration(), "product", 2.0))
    found = replace(found, steady=Steady(found.base_s[5] / np.linspace(1.0, 5.0, 30), {}))
    for change in ({"precision.dtype": "bf16"}, {"product_speed": 1e6}, {"memory_speed": 1e6}):
        answer = found.what_if(change)
        assert answer.predicted.low > 0 and answer.gain.high < answer.step.high


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (
            (0.0059, 0.0337, 0.0577),
            "506.4 ms a step instead of 540.1 ms, a gain of 33.7 ms (5.9 ms to 57.7 ms); ",
        ),
        (
            (-41.4, -0.1, -0.05),
            "640.1 ms a step instead of 540.1 ms, a cost of 100.0 ms (50.0 ms to 41.40 s); ",
        ),
        ((-0.002, 0.01, 0.02), "a gain of 10.0 ms (between a cost of 2.0 ms and a gain of 20.0 ms); "),
        (
            (-9e6, -7.57e6, -6e6),
            "87.6 days a step instead of 540.1 ms, a cost of 87.6 days (69.4 days to 104.2 days); ",
        ),
    ],
)
def test_one_line_says_what_a_change_gains_or_costs(gain: tuple[float, float, float], words: str) -> None:
    step = Interval(0.53, 0.5401, 0.55)
    after = Interval(0.5401 - gain[2], 0.5401 - gain[1], 0.5401 - gain[0])
    answer = WhatIf({"zero.stage": 1}, "operators", 0.026, {}, step, after, Interval(*gain), (), -0.066)
    assert words in str(answer) and str(answer).startswith("zero.stage = 1: ")
    assert str(answer).endswith(
        "; the replay is 2.6% off, and the graph that is changed 6.6% shorter than the usual step"
    )


def test_a_single_step_says_that_it_is_one() -> None:
    said = "one step was recorded: how steps vary is not in the interval"
    assert said in run().what_if({"loader_wait": False}).notes
    assert said not in steady(run()).what_if({"loader_wait": False}).notes


def test_errors_of_both_signs_do_not_cancel() -> None:
    found = replace(run(), replay_errors={1: 0.3, 2: -0.3})
    answer = found.what_if({"loader_wait": False})
    assert answer.replay_error == pytest.approx(0.3) and "the replay is 30.0% off" in str(answer)
