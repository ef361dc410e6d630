"""Codecs in a what-if: what they take is no transfer's, and TernGrad's bytes hang on how many ranks add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from whatif_steps import ALPHA, BETA, calibration, run

from trine.optim.plan.whatif.graph import LINK
from trine.optim.plan.whatif.predict import Recorded
from trine.optim.plan.whatif.times import MOST_TERNARY_RANKS, OperationTimes
from trine.record.errors import UsageError

INT8 = {"communication.compression": "int8"}
CODEC_S = 1e-7


def gradients_bytes(found: Recorded) -> int:
    return sum(task.bytes for task in found.graph.steps[0].ranks[0].tasks if task.lane == LINK)


@pytest.mark.parametrize(
    "further", [{}, {"link_speed": 1000}, {"ranks": 16}, {"link_speed": 10, "ranks": 8}], ids=str
)
def test_a_codec_takes_the_same_on_any_link_and_between_any_ranks(further: dict[str, Any]) -> None:
    free, dear = (run(calibration(codec_s=seconds)) for seconds in (0.0, CODEC_S))
    change = {**INT8, **further}
    longer = dear.what_if(change).predicted.mid - free.what_if(change).predicted.mid
    assert longer == pytest.approx(CODEC_S * gradients_bytes(free), rel=1e-6)


def test_what_is_sent_is_as_much_faster_as_the_link() -> None:
    found = run(calibration(codec_s=0.0))
    size = gradients_bytes(found)
    sent = 2 * ALPHA + size / 4 / BETA
    slow, fast = (found.what_if({**INT8, **faster}).predicted.mid for faster in ({}, {"link_speed": 10}))
    assert slow - fast == pytest.approx(sent * 0.9, rel=1e-3)


def test_halves_are_summed_as_fast_as_halves_were_calibrated() -> None:
    codec = {"operation": "codec", "dtype": "bf16", "bytes": 2**20, "seconds": 0.0, "ratio": 2.0}

    def predicted(*further: dict[str, Any]) -> tuple[float, int]:
        found = run(calibration(further=[codec, *further]))
        return found.what_if({"communication.compression": "bf16"}).predicted.mid, gradients_bytes(found)

    slow = [
        {
            "operation": "all_reduce",
            "dtype": "bf16",
            "bytes": size,
            "seconds": ALPHA + 3 * size / BETA,
            "ranks": 2,
        }
        for size in (2**10, 2**24)
    ]
    as_fp32, size = predicted()
    as_halves, _ = predicted(*slow)
    assert as_halves - as_fp32 == pytest.approx((3 - 1) * size / 2 / BETA, rel=1e-3)


def test_more_ranks_sums_take_more_bits_in_terngrad() -> None:
    torch = pytest.importorskip("torch")
    from trine.optim.runtime.exchange.calibration import codecs_of

    two, many = ({row["dtype"]: row for row in codecs_of(torch.device("cpu"), ranks)} for ranks in (2, 16))
    peaks = calibration()._peaks
    assert peaks is not None
    times = OperationTimes(replace(peaks, operations=list(two.values())))
    for name, row in many.items():
        assert times.codec(name, 16)[1] == pytest.approx(row["ratio"], rel=0.01)
        assert times.codec(name, 2)[1] == two[name]["ratio"]
    with pytest.raises(UsageError, match="terngrad sums codes of up to 127 ranks, not of 128"):
        times.codec("terngrad", 128)


def test_the_most_ranks_are_terngrads() -> None:
    pytest.importorskip("torch")
    from trine.optim.runtime.exchange.terngrad import MOST_RANKS

    assert MOST_TERNARY_RANKS == MOST_RANKS
