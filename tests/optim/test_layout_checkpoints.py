"""A checkpoint of one layout read by another: the same tensors, under the names of the model that was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layout_checkpoints
import pytest
from rank_pool import RankPool

torch = pytest.importorskip("torch")

T = {"parallel.tensor": 2}
P = {"parallel.pipeline": 2, "parallel.microbatches": 2}
V = {**P, "parallel.chunks": 2, "parallel.schedule": "zbv"}
E = {"parallel.expert": 2}
Z = {"zero.stage": 3}

#: (writes, reads, experts), two ranks each.
ON_TWO: list[Any] = [
    (T, P, False),
    pytest.param(V, T, False, marks=pytest.mark.slow),
    pytest.param({}, V, False, marks=pytest.mark.slow),
    pytest.param(Z, T, False, marks=pytest.mark.slow),
    pytest.param(T, Z, False, marks=pytest.mark.slow),
    pytest.param(E, Z, True, marks=pytest.mark.slow),
    pytest.param({}, E, True, marks=pytest.mark.slow),
]
#: Written on four, read on two.
FROM_FOUR: list[Any] = [
    ({**P, **T}, {}, False),
    ({**T, **Z}, P, False),
    ({**P, **Z}, T, False),
    ({**Z, "parallel.shard": 2}, T, False),
    ({**E, **Z}, {}, True),
    ({**P, **T}, Z, False),
]


def _holds(writer: RankPool, reader: RankPool, writes: Any, reads: Any, experts: bool, place: Path) -> None:
    model = {"experts": 4} if experts else {}
    first, second = place / "first", place / "second"
    losses = writer.run("layout_checkpoints:saved", writes, model, str(first))[0]
    others = reader.run("layout_checkpoints:loaded_and_saved", reads, model, str(first), str(second))[0]
    assert others == pytest.approx(losses, rel=1e-10, abs=0)
    one, two = layout_checkpoints.content(first), layout_checkpoints.content(second)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.mark.parametrize(("writes", "reads", "experts"), ON_TWO)
def test_on_as_many(two_ranks: RankPool, writes: Any, reads: Any, experts: bool, tmp_path: Path) -> None:
    _holds(two_ranks, two_ranks, writes, reads, experts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("writes", "reads", "experts"), FROM_FOUR)
def test_of_four_on_two(
    four_ranks: RankPool, two_ranks: RankPool, writes: Any, reads: Any, experts: bool, tmp_path: Path
) -> None:
    _holds(four_ranks, two_ranks, writes, reads, experts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("writes", "reads", "experts"), [(Z, {**P, **T}, False), ({}, {**E, **Z}, True)])
def test_of_two_on_four(
    four_ranks: RankPool, two_ranks: RankPool, writes: Any, reads: Any, experts: bool, tmp_path: Path
) -> None:
    _holds(two_ranks, four_ranks, writes, reads, experts, tmp_path)


def test_names_and_values_are_those_of_one_process(two_ranks: RankPool, tmp_path: Path) -> None:
    """The order of rows, too: a fused qkv matrix stands in another one on tensor ranks."""
    two_ranks.run("layout_checkpoints:saved", T, {}, str(tmp_path / "run"))
    model = layout_checkpoints.model_of({}, seed=0)
    plain = layout_checkpoints.plain_steps(model)
    found = layout_checkpoints.content(tmp_path / "run")
    names = {name for name in found if name.startswith("model/")}
    assert names == {f"model/{name}" for name, _ in model.named_parameters()}
    for name, value in plain.items():
        torch.testing.assert_close(found[f"model/{name}"], value, rtol=1e-9, atol=1e-12)
