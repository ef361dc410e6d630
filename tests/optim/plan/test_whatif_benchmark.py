"""How ``benchmarks/whatif.py`` judges: errors of steps and ratios, and signs only beyond noise."""

from __future__ import annotations

import pytest
import whatif

from trine.optim.config import Config
from trine.optim.plan.whatif import Interval, WhatIf


def answer(predicted: float, step: float = 0.2) -> WhatIf:
    even = Interval(predicted, predicted, predicted)
    return WhatIf({}, "operators", 0.0, {}, Interval(step, step, step), even, even, ())


def test_errors_are_of_the_step_and_of_the_ratio() -> None:
    rows = whatif.rows_of("gpt", {"bf16": answer(0.11)}, {"plain": [0.4] * 5, "bf16": [0.2] * 5})
    assert rows[0].error == pytest.approx(0.11 / 0.2 - 1)
    assert rows[0].ratio_error == pytest.approx(0.55 / 0.5 - 1) and rows[0].sign is True
    assert whatif.summary_of(rows)["step_error_median"] == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("measured", "sign"),
    [
        ([0.2, 0.21, 0.19, 0.2, 0.2], True),
        ([0.5, 0.52, 0.51, 0.5, 0.5], False),
        ([0.3, 0.5, 0.41, 0.39, 0.4], None),
    ],
)
def test_a_sign_is_judged_beyond_noise_alone(measured: list[float], sign: bool | None) -> None:
    rows = whatif.rows_of("gpt", {"bf16": answer(0.1)}, {"plain": [0.4] * 5, "bf16": measured})
    assert rows[0].sign is sign


def test_a_ratio_is_covered_where_the_interval_holds_it() -> None:
    even = Interval(0.2, 0.2, 0.2)
    wide = WhatIf({}, "operators", 0.0, {}, even, Interval(0.09, 0.11, 0.13), even, ())
    measured = {"plain": [0.4] * 5, "a": [0.24] * 5, "b": [0.3] * 5}  # 0.12 and 0.15 s of 0.2
    rows = whatif.rows_of("gpt", {"a": wide, "b": wide}, measured)
    assert [row.covered for row in rows] == [True, False]
    assert whatif.summary_of(rows)["covered"] == 1


def test_what_was_not_answered_or_not_measured_is_no_row() -> None:
    assert whatif.rows_of("gpt", {"bf16": "no answer", "zero 1": answer(0.1)}, {"plain": [0.4]}) == []


def test_a_record_of_which_nothing_is_answered_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(whatif, "calibrate", lambda anew: None)
    monkeypatch.setattr(whatif, "_judged", lambda sample, seconds: ([], [f"{sample}: bf16: no calibration"]))
    assert whatif.main(["gpt"]) == 2
    said = capsys.readouterr()
    assert (
        said.err == "no change was both predicted and measured: gpt: bf16: no calibration\n" and not said.out
    )


def test_every_change_is_one_that_the_configuration_takes() -> None:
    for change in whatif.CHANGES.values():
        assert Config().with_changes(change).changes() == change
