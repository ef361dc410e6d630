"""How much is recomputed under a budget of bytes: what is chosen fits, and no more than it takes."""

from __future__ import annotations

import itertools
from unittest import mock

import memory_cases
import optim_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.optim.runtime import memory_fit
from trine.optim.runtime.recompute_plan import Candidate, choose, peak_of
from trine.record.errors import UsageError


@pytest.fixture(scope="module")
def plain() -> memory_cases.Trained:
    return memory_cases.train({})


def told(trained: memory_cases.Trained) -> str:
    return str(trained.effects[-1])


@pytest.mark.parametrize(("budget", "modules"), [(10**9, 0), (1_200_000, 2), (500_000, 4)])
def test_a_budget_is_kept(budget: int, modules: int, plain: memory_cases.Trained) -> None:
    trained = memory_cases.train({"checkpointing.mode": "budget", "checkpointing.budget_bytes": budget})
    assert trained.is_bitwise(plain)
    assert [step["checkpointing/modules"] for step in trained.metrics[:3]] == [modules] * 3
    assert all(step["memory/saved_activation_bytes"] <= budget for step in trained.metrics[:3])
    assert f"{modules} of 4 modules recomputed" in told(trained)
    names = ", ".join(f"blocks.{n}" for n in range(modules)) or "nothing"
    assert f"recomputed: {names};" in told(trained)


def test_a_budget_below_what_full_checkpointing_needs_is_refused_with_the_number() -> None:
    with pytest.raises(
        UsageError, match=r"checkpointing\.budget_bytes = 1000: .* needs (\d+) bytes"
    ) as raised:
        memory_cases.train({"checkpointing.mode": "budget", "checkpointing.budget_bytes": 1000})
    needed = int(str(raised.value).partition("needs ")[2].partition(" ")[0])
    memory_cases.train({"checkpointing.mode": "budget", "checkpointing.budget_bytes": needed})
    with pytest.raises(UsageError):
        memory_cases.train({"checkpointing.mode": "budget", "checkpointing.budget_bytes": needed - 1})


def test_a_larger_batch_is_measured_anew(caplog: pytest.LogCaptureFixture) -> None:
    sizes = (2, 2, 6, 2, 6)
    batches = [optim_cases.batches(1, size)[0] for size in sizes]
    changes = {"checkpointing.mode": "budget", "checkpointing.budget_bytes": 1_300_000}
    trained = memory_cases.train(changes, batches=batches)
    assert trained.is_bitwise(memory_cases.train({}, batches=batches))
    recomputed = [step["checkpointing/modules"] for step in trained.metrics[:-1]]
    assert recomputed[0] == recomputed[1] < recomputed[2] == recomputed[4]
    assert all(step["memory/saved_activation_bytes"] <= 1_300_000 for step in trained.metrics[:-1])


@pytest.mark.parametrize(("free", "modules"), [(10**9, 0), (1_000_000, 2), (0, 4)])
def test_auto_recomputes_what_memory_asks_for(free: int, modules: int) -> None:
    with mock.patch.object(memory_fit, "available_host_bytes", lambda: free):
        trained = memory_cases.train({"checkpointing.mode": "auto"})
    assert [step["checkpointing/modules"] for step in trained.metrics[:3]] == [4, modules, modules]
    assert "saved for backward at the peak" in told(trained) and "allowed" in told(trained)


CANDIDATES = st.lists(
    st.builds(
        lambda saved, input_bytes, flops: (saved, input_bytes, flops),
        st.integers(1, 1000),
        st.integers(0, 50),
        st.integers(0, 1000),
    ),
    min_size=1,
    max_size=6,
).map(
    lambda rows: [
        Candidate(str(n), saved, saved, sum(row[1] for row in rows[: n + 1]), flops)
        for n, (saved, _, flops) in enumerate(rows)
    ]
)


@given(CANDIDATES, st.integers(0, 4000))
def test_what_is_chosen_fits_and_nothing_is_chosen_only_where_nothing_fits(
    candidates: list[Candidate], budget: int
) -> None:
    end = candidates[-1].before_bytes + 10
    chosen = choose(candidates, budget, end)
    everything = frozenset(candidate.name for candidate in candidates)
    assert (chosen is None) == (peak_of(candidates, everything, end) > budget)
    if chosen is not None:
        assert peak_of(candidates, chosen, end) <= budget


@given(CANDIDATES)
def test_recomputing_one_more_never_raises_the_peak(candidates: list[Candidate]) -> None:
    end = candidates[-1].before_bytes + 10
    names = [candidate.name for candidate in candidates]
    for count in range(len(names)):
        for chosen in itertools.combinations(names, count):
            peak = peak_of(candidates, frozenset(chosen), end)
            assert all(peak_of(candidates, frozenset({*chosen, name}), end) <= peak for name in names)


def test_of_equal_blocks_as_few_as_possible_are_recomputed() -> None:
    blocks = [Candidate(str(n), 100, 100, 10 * (n + 1), 7) for n in range(6)]
    for budget in range(160, 700, 20):
        chosen = choose(blocks, budget, 60)
        assert chosen is not None
        for count in range(len(chosen)):
            for fewer in itertools.combinations([block.name for block in blocks], count):
                assert peak_of(blocks, frozenset(fewer), 60) > budget
