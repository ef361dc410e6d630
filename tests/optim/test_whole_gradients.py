"""What ranks of a tensor group have whole gets the same gradients on each, or is refused before it is trained on."""

from __future__ import annotations

import pytest
from rank_pool import RankPool

TENSOR = {"parallel.tensor": 2}
SEQUENCE = {**TENSOR, "parallel.sequence": True}


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("slope", TENSOR, "blocks.0.mlp.slope"),
        ("activation", TENSOR, "blocks.0.mlp.activation.weight"),
        ("scale", SEQUENCE, "blocks.0.scale"),
        ("mean", SEQUENCE, "blocks.0.mean"),
    ],
)
def test_what_sees_a_part_is_refused_by_name(
    kind: str, changes: dict[str, object], name: str, two_ranks: RankPool
) -> None:
    """Each forward is right, which is all that a comparison of outputs sees; the gradient would be that part's."""
    for said, _ in two_ranks.run("whole_gradient_cases:trained", kind, changes):
        assert f"parallel.tensor: {name} is whole on every rank" in said
        assert "another on each" in said and "\n" not in said


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("nothing", TENSOR),
        ("nothing", SEQUENCE),
        ("scale", TENSOR),
        ("mean", TENSOR),
        ("slope", {**TENSOR, "parallel.plan": {"blocks.*.mlp": "replicate"}}),
        ("activation", {**TENSOR, "parallel.plan": {"blocks.*.mlp": "replicate"}}),
        ("scale", {**TENSOR, "checkpointing.mode": "full"}),
    ],
    ids=str,
)
def test_what_sees_all_trains_as_the_plain_loop(
    kind: str, changes: dict[str, object], two_ranks: RankPool
) -> None:
    for said, apart in two_ranks.run("whole_gradient_cases:trained", kind, changes):
        assert not said
        assert apart < 1e-10
