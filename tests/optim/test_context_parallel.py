"""Sequences cut over ranks: the cut, the attention, and what of a program's own would be wrong over parts.

That they train the same is held by the cases of benchmarks/parity_cases/context.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool

from trine.optim.runtime.context_attention import positions_of
from trine.optim.runtime.late_checks import LateChecks
from trine.record.errors import UsageError


@given(st.integers(2, 8), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_parts_make_the_sequence_and_see_equally_many_keys(ranks: int, chunk: int) -> None:
    length = 2 * ranks * chunk
    parts = [positions_of(length, ranks, place) for place in range(ranks)]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    seen = {int((part + 1).sum()) for part in parts}
    assert seen == {length * (length + 1) // 2 // ranks}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_over_parts_is_that_over_the_whole(
    two_ranks: RankPool, causal: bool, key_heads: int
) -> None:
    assert max(two_ranks.run("context_cases:attention", 2, causal, 4, key_heads)) < 1e-13


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_over_parts_by_the_causal_bias_of_cuda(two_ranks: RankPool, key_heads: int) -> None:
    """PyTorch's bias looks attention up by its name, which is patched then."""
    assert max(two_ranks.run("context_cases:attention", 2, True, 4, key_heads, True)) < 1e-13


@pytest.mark.slow
def test_attention_over_four_parts(four_ranks: RankPool) -> None:
    assert max(four_ranks.run("context_cases:attention", 4, True, 4, 1)) < 1e-13


def test_unequal_targets_weigh_by_their_counts(two_ranks: RankPool) -> None:
    for evaluated, expected in two_ranks.run("context_cases:counted", True):
        assert evaluated == pytest.approx(expected, rel=1e-10)


def test_unequal_targets_without_counts_are_refused(two_ranks: RankPool) -> None:
    for said, _ in two_ranks.run("context_cases:counted", False):
        assert "have loss_fn return (mean loss, token count)" in said


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("right", "trained"),
        ("shifting logits", "something compares tokens across the cut"),
        ("slicing ids", "made from the batch's"),
        ("by hand", "no attention of ByHand went through torch.nn.functional.scaled_dot_product_attention"),
        ("odd", "pad it on the right, as to 24"),
        ("own loop", "pass loss_fn=… to trine.optimize"),
    ],
)
def test_programs_whose_loss_is_another_over_parts(two_ranks: RankPool, which: str, said: str) -> None:
    for answer in two_ranks.run("context_cases:programs", which):
        assert said in answer
        assert "\n" not in answer


def test_other_keys_and_models_are_refused_by_name(two_ranks: RankPool) -> None:
    two = {"parallel.context": 2}
    cases = [
        ({**two, "data.packing": True}, False, "parallel.context and data.packing"),
        ({**two, "compute.compile": "blocks"}, False, "parallel.context and compute.compile"),
        ({**two, "parallel.pipeline": 2}, False, "parallel.context"),
        ({**two, "zero.stage": 1}, False, "zero.stage = 1 and parallel.context"),
        (two, True, "takes neither position_ids nor positions"),
    ]
    for changes, plain, said in cases:
        for answer in two_ranks.run("context_cases:refused", changes, plain):
            assert said in answer
            assert "\n" not in answer


def test_closing_gives_pytorch_its_attention_back(two_ranks: RankPool) -> None:
    assert two_ranks.run("context_cases:taken_back") == [(True, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_models_of_transformers(two_ranks: RankPool, kind: str) -> None:
    pytest.importorskip("transformers")
    changes = {"parallel.context": 2}
    for losses, expected in two_ranks.run("expert_cases:hugging_face", kind, changes):
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_padding_and_windows_of_transformers(two_ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    assert two_ranks.run("context_cases:padded", "right") == ["trained"] * 2
    assert all("pad on the right" in said for said in two_ranks.run("context_cases:padded", "left"))
    assert all("sliding_window" in said for said in two_ranks.run("context_cases:sliding"))


@pytest.mark.slow
def test_one_label_a_sequence_is_refused(two_ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    for said in two_ranks.run("context_cases:classified"):
        assert "something compares tokens across the cut" in said


def test_late_checks_raise_at_once_on_the_processor() -> None:
    checks = LateChecks()
    checks.expect(torch.tensor(False), "never")
    checks.look()
    with pytest.raises(UsageError, match="why"):
        checks.expect(torch.tensor(True), "why")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_late_checks_wait_for_nothing_on_a_device() -> None:
    checks = LateChecks()
    checks.expect(torch.tensor(False, device="cuda"), "never")
    checks.expect(torch.tensor(True, device="cuda"), "why")
    torch.cuda.synchronize()
    with pytest.raises(UsageError, match="in a step before: why"):
        checks.look()
