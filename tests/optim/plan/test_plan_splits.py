"""How modules are split over ranks, and layers over stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some
from plan_problems import MIXTURE

from trine.optim.plan.layouts import Layouts
from trine.optim.plan.splits import padded_vocabulary, splits_of
from trine.optim.plan.stages import stage_counts, stage_layers
from trine.optim.plan.workload_files import workload_of


def test_splits_by_hand() -> None:
    llama = workload_of("llama3-70b")
    row = Layouts.of(tensor=8, sequence=1, context=2).row(0)
    found = {split.module: (split.kind, split.words) for split in splits_of(llama, row)}
    assert found["attention queries, keys, values"] == (
        "column",
        "by heads: 8 heads a rank, 1 of keys and values",
    )
    assert found["attention output"] == ("row", "1024 inputs a rank")
    assert found["mlp gate, up"] == ("column", "3584 of 28672 features a rank")
    assert found["mlp down"][0] == "row"
    assert found["norms, residuals"] == ("sequence", "512 tokens a rank")
    assert found["head"] == ("vocabulary", "16128 rows a rank, padded from 128256 to 129024")
    alone = {split.module: split.kind for split in splits_of(llama, Layouts.of().row(0))}
    assert set(alone.values()) == {"whole"}
    experts = splits_of(MIXTURE, Layouts.of(expert=4).row(0))
    assert ("experts", "expert", "2 of 8 a rank, each whole") in {
        (split.module, split.kind, split.words) for split in experts
    }
    cut = splits_of(MIXTURE, Layouts.of(expert=4, tensor=2).row(0), expert_tensor=True)
    words = next(split.words for split in cut if split.module == "experts")
    assert words == "2 of 8 a rank, each split over tensor ranks, 1024 of 2048 features a rank"


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (8, 1, [8]),
        (7, 2, [4, 3]),
        (8, 4, [2, 2, 2, 2]),
        (14, 4, [3, 4, 4, 3]),  # embedding and head stand for a layer each
        (13, 4, [3, 4, 3, 3]),
        (6, 8, [0, 1, 1, 1, 1, 1, 1, 0]),
        (3, 4, [1, 1, 1, 0]),
    ],
)
def test_layers_of_each_stage(layers: int, stages: int, counts: list[int]) -> None:
    assert stage_counts(layers, stages) == counts


@given(some.integers(1, 200), some.integers(1, 64))
def test_layers_of_all_stages_add_up_and_none_has_more_than_is_counted(layers: int, stages: int) -> None:
    counts = stage_counts(layers, stages)
    middle, ends = stage_layers(layers, stages)
    assert sum(counts) == layers or stages > layers + 2
    assert len(counts) == stages and max(counts[1:-1], default=0) <= middle
    assert max(counts[0], counts[-1]) <= ends


def test_vocabularies_are_padded_as_megatron_pads() -> None:
    # Megatron-LM pads GPT-2's 50,257 to 50,304 on one rank and 51,200 on eight.
    assert padded_vocabulary(50257, 1) == 50304
    assert padded_vocabulary(50257, 8) == 51200
