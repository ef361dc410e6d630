"""Days and money by hand, and the words that counts are written in."""

from __future__ import annotations

import pytest

from trine.optim.plan.cost import Range, parse_count, run_cost
from trine.record.errors import UsageError


def test_counts_of_tokens() -> None:
    assert [parse_count(text) for text in ("15T", "300 B", "1.4e12", "7")] == [15e12, 300e9, 1.4e12, 7.0]
    for text in ("many", "0", "-3", "", "1e999", "5X"):
        with pytest.raises(UsageError, match="no number of tokens"):
            parse_count(text)


def test_run_cost_by_hand() -> None:
    # 1,000 steps of 10 s are 10,000 s; 8 devices for 10,000 s are 22.2 device-hours.
    found = run_cost(Range(10.0, 8.0, 14.0), 1_000, 8, 1e6, 3.0)
    assert found.days.value == pytest.approx(10_000 / 86_400)
    assert found.device_hours.value == pytest.approx(22.2222, rel=1e-4)
    assert found.price is not None and found.price.high == pytest.approx(93.333, rel=1e-4)
    assert run_cost(Range(10.0, 8.0, 14.0), 1_000, 8, 1e6, None).price is None


def test_a_rate_is_low_where_seconds_are_high() -> None:
    assert Range(10.0, 8.0, 16.0).dividing(80.0) == Range(8.0, 5.0, 10.0)
