"""All keys under every kind of parallelism: each trains as the plain run does, or is refused in one line with both names.

Combinations that are accepted and do something else, or nothing, are the ones that nobody sees.
"""

from __future__ import annotations

from typing import Any

import pytest
from layout_key_cases import LAYOUTS, ROWS, case_of, parity
from rank_pool import RankPool

import trine

STEPS = 3
#: The degrees themselves: two of them at once take more than two ranks, and have cases of their own.
_DEGREES = {"parallel.tensor", "parallel.pipeline", "parallel.expert", "parallel.context"}


def test_every_key_has_a_row() -> None:
    assert {row.key for row in ROWS} | _DEGREES == set(trine.Config.keys())


def _pairs(is_long: bool) -> list[tuple[int, str]]:
    return [(n, layout) for layout in LAYOUTS for n, row in enumerate(ROWS) if row.is_long == is_long]


def _named(pair: tuple[int, str]) -> str:
    row = ROWS[pair[0]]
    return f"{pair[1]}-{row.key}={row.changes[row.key]}"


def _hold(number: int, layout: str, ranks: RankPool) -> None:
    row = ROWS[number]
    found = ranks.run("layout_key_cases:run", number, layout, STEPS)
    if isinstance(found[0], str):
        _explain(number, layout, found[0], ranks)
        return
    outcome = parity.outcome_of(case_of(row, layout), found, STEPS)
    assert outcome.holds, f"{outcome.worst:.1e} apart, allowed {row.tolerance:.0e}, {outcome.same_replicas=}"
    if row.must_round:
        plain = _without_key(number, layout, ranks)
        assert [losses for losses, _ in plain] != [losses for losses, _ in found], f"{row.key} did nothing"


_WITHOUT: dict[str, Any] = {}


def _without_key(number: int, layout: str, ranks: RankPool) -> Any:
    """What the layout alone comes to: the same for all rows of one model, type and data, so it is run once."""
    row = ROWS[number]
    key = repr((layout, row.dtype, row.data, sorted(row.model.items())))
    if key not in _WITHOUT:
        _WITHOUT[key] = ranks.run("layout_key_cases:run_plain", number, layout, STEPS)
    return _WITHOUT[key]


def _explain(number: int, layout: str, line: str, ranks: RankPool) -> None:
    """A refusal names both keys, or has nothing to do with the layout, or nothing with the key."""
    row = ROWS[number]
    assert line and "\n" not in line
    names_key = any(key in line for key in (row.key, *row.needs))
    if names_key and f"parallel.{layout}" in line:
        return
    (without_layout, _) = ranks.run("layout_key_cases:run_replicated", number, layout, STEPS)
    if isinstance(without_layout, str):
        return
    (without_key, _) = _without_key(number, layout, ranks)
    assert isinstance(without_key, str), f"{row.key} under {layout}: {line}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the combinations' own
@pytest.mark.parametrize("pair", _pairs(False), ids=_named)
def test_trains_or_is_refused(pair: tuple[int, str], two_ranks: RankPool) -> None:
    _hold(*pair, two_ranks)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns itself
@pytest.mark.parametrize("pair", _pairs(True), ids=_named)
def test_compiled_trains_or_is_refused(pair: tuple[int, str], two_ranks: RankPool) -> None:
    _hold(*pair, two_ranks)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("tensor", {"communication.compression": "int8"}),
        ("context", {"accumulation.micro_batch": "auto"}),
        ("expert", {"offload.activations": "nvme"}),
        ("pipeline", {"checkpointing.mode": "selective"}),
    ],
    ids=str,
)
def test_some_of_them(layout: str, changes: dict[str, object], two_ranks: RankPool) -> None:
    """What was once accepted and wrong, or came to an error midway."""
    ((key, value),) = changes.items()
    number = next(n for n, row in enumerate(ROWS) if row.key == key and row.changes[key] == value)
    _hold(number, layout, two_ranks)


def test_a_key_that_does_nothing_would_show(two_ranks: RankPool) -> None:
    """The control: two runs without the key have the same losses, so rounding that is not applied is seen."""
    number = next(n for n, row in enumerate(ROWS) if row.key == "activations.dtype")
    assert ROWS[number].must_round
    first, second = (two_ranks.run("layout_key_cases:run_plain", number, "tensor", STEPS) for _ in range(2))
    assert [losses for losses, _ in first] == [losses for losses, _ in second]
    _hold(number, "tensor", two_ranks)
