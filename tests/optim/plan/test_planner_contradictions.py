"""Published runs whose cells contradict one another are noted or skipped; none is predicted as if nothing were wrong."""

from __future__ import annotations

import pytest
from test_planner_rows import one, reason

#: The model of 47 billion parameters, on 64 devices of a stage each.
MIXTRAL = {
    "model": "Mixtral 8x7B",
    "layers": "32",
    "hidden": "4096",
    "ffn": "14336",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "32000",
    "mlp": "swiglu",
    "tp": "1",
    "pp": "1",
    "gpu": "H100-SXM-80GB",
    "precision": "bf16",
    "mbs": "1",
    "experts": "8",
    "topk": "2",
    "ep": "8",
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gbs": "70"}, "sequences a step, since 70 are not those of 4 data ranks with micro-batches of 4"),
        ({"mbs": "3", "gbs": "16"}, "12 sequences a step, since 16 are not those of 4 data ranks"),
        ({"ga": "9"}, "ga 9 is passed over, since 4 data ranks with micro-batches of 4 take 4 for 64"),
        ({"ep": "4"}, "no expert ranks, since no experts are stated for 4 of them"),
        ({"kv_heads": "7"}, "64 key-value heads, since 7 do not divide 64 heads"),
        ({**MIXTRAL, "topk": ""}, "2 experts a token"),
        ({**MIXTRAL, "topk": "0"}, "2 experts a token"),
        ({**MIXTRAL, "experts": "x"}, "8 experts, as the model is published"),
        ({**MIXTRAL, "experts": "", "topk": ""}, "8 experts, as the model is published"),
    ],
)
def test_what_contradicts_a_little_is_said(changes: dict[str, str], said: str) -> None:
    assert any(said in note for note in one(**changes).assumed), one(**changes).assumed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gbs": "1"}, "a batch of 1 is not one of 4 data ranks with micro-batches of 4"),
        ({"mbs": "64", "gbs": "32"}, "a batch of 32 is not one of 4 data ranks with micro-batches of 64"),
        ({**MIXTRAL, "ep": "3"}, "ep 3 does not divide 8 experts"),
        (
            {**MIXTRAL, "experts": "192", "n_gpus": "32", "ep": "64"},
            "ep 64 does not divide 32 ranks of a stage",
        ),
        ({**MIXTRAL, "model": "ours", "experts": "x"}, "experts 'x' are no number of experts"),
        (
            {**MIXTRAL, "model": "ours", "experts": "", "arch": "moe"},
            "no number of experts, though arch is moe",
        ),
        ({"topk": "2"}, "no number of experts, though topk is 2"),
        ({**MIXTRAL, "experts": "-1"}, "experts -1 is no number of experts"),
    ],
)
def test_what_is_another_run_is_skipped(changes: dict[str, str], said: str) -> None:
    assert reason(**changes).startswith(said)


def test_experts_of_an_unknown_model_are_met_as_in_others_of_as_many() -> None:
    few = one(**{**MIXTRAL, "model": "ours", "topk": ""})
    many = one(**{**MIXTRAL, "model": "ours", "topk": "", "experts": "128", "ffn": "768"})
    assert few.workload.experts_per_token == 2 and many.workload.experts_per_token == 8


def test_cells_that_agree_are_not_said() -> None:
    assert not [note for note in one(ga="4").assumed if "micro-batches" in note or "sequences" in note]
    assert not one(kv_heads="8").assumed
    run = one(**MIXTRAL)
    assert (run.workload.experts, run.workload.experts_per_token, run.layout["expert"]) == (8, 2, 8)
    assert not [note for note in run.assumed if "experts" in note]
    assert not one(experts="none").workload.is_mixture
