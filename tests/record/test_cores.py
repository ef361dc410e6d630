"""Lists of cores come back as they were written, and what is none is empty."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.record.cores import core_list, cores_in, own_cores


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_a_list_holds_just_its_cores(cores: frozenset[int]) -> None:
    assert cores_in(core_list(cores)) == cores


def test_runs_of_cores_are_ranges() -> None:
    assert core_list([8, 0, 1, 2, 3]) == "0-3,8"


@pytest.mark.parametrize("text", [None, 4, "", "all", "1-", "-1", "1,,2", "0-99999999", "0-999999", "1 2"])
def test_what_is_no_list_has_no_cores(text: object) -> None:
    assert cores_in(text) == frozenset()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not say which cores")
def test_the_cores_of_this_process_are_those_that_it_may_use() -> None:
    assert cores_in(own_cores()) == os.sched_getaffinity(0)
