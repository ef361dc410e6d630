"""Every case of ``benchmarks/parity.py`` holds: each technique for a few steps, all cases whole with ``-m slow``."""

from __future__ import annotations

import parity_ranks
import pytest
from parity_ranks import parity

CASES = parity.CASES
#: Scaling bugs show at once, and replicas that drift apart by the bit. The mean that ``by_last`` looks at is of a whole run,
#: as in the benchmark.
QUICK_STEPS, WHOLE_STEPS = 6, 8


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def _first_of_each(cases: list[parity.Case]) -> list[parity.Case]:
    """One case a configuration: its other models, optimizers, types and numbers of ranks wait for the slow suite."""
    return list({str(sorted(case.changes.items())): case for case in reversed(cases)}.values())[::-1]


#: Combinations wait for the slow suite.
QUICK = _first_of_each(
    [case for case in CASES if not case.slow and len(case.changes) <= 2 and " + " not in case.name]
)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_quick(case: parity.Case, request: pytest.FixtureRequest) -> None:
    _hold(case, QUICK_STEPS, request)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns itself
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whole(case: parity.Case, request: pytest.FixtureRequest) -> None:
    _hold(case, parity.STEPS if case.by_last else WHOLE_STEPS, request)


def _hold(case: parity.Case, steps: int, request: pytest.FixtureRequest) -> None:
    if case.ranks == 1:
        by_rank = [parity_ranks.run_case(0, case.name, steps)]
    else:
        pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks", 8: "eight_ranks"}[case.ranks])
        by_rank = pool.run("parity_ranks:run_case", case.name, steps)
    outcome = parity.outcome_of(case, by_rank, steps)
    assert outcome.holds, (
        f"{outcome.worst:.2e} apart at worst, {outcome.last:.2e} at last, {outcome.same_replicas=}"
    )
