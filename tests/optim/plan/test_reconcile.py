"""Dimensions as published, and the parameters that they should add up to."""

from __future__ import annotations

import pytest

from trine.optim.plan import Workload
from trine.optim.plan.reconcile import reconciled
from trine.optim.plan.workload_files import workload_of

LLAMA = Workload("l", 32, 4096, 32, 14336, 128256, 8192, kv_heads=8, gated=True, bias=False)


@pytest.mark.parametrize(
    ("workload", "parameters", "changed", "value"),
    [
        # Llama 3 8B: nobody said that the head has weights of its own.
        (LLAMA, 8.03e9, "tied_embeddings", False),
        # Qwen3-30B-A3B: 32 heads of 128 on a hidden size of 2048 (arXiv 2505.09388), given without their size.
        (
            workload_of("qwen3-30b-a3b").with_changes(head_size=64, tied_embeddings=True),
            30.5e9,
            "head_size",
            128,
        ),
        (
            workload_of("qwen3-235b-a22b").with_changes(head_size=64, tied_embeddings=True),
            235e9,
            "head_size",
            128,
        ),
        # PaLM 540B: 48 heads of 256 on 18,432 (Chowdhery et al. 2022, table 1).
        (
            Workload("p", 118, 18432, 48, 73728, 256000, 2048, kv_heads=1, gated=True, bias=False),
            540.35e9,
            "head_size",
            256,
        ),
        # MPT-70b: llm-foundry's 70b.yaml has 80 layers; 64 is its number of heads.
        (Workload("m", 64, 8192, 64, 32768, 50368, 2048, bias=False), 64.8624e9, "layers", 80),
    ],
)
def test_what_was_left_out_is_found(workload: Workload, parameters: float, changed: str, value: int) -> None:
    found, reason = reconciled(workload, parameters)
    assert getattr(found, changed) == value
    assert found.parameters == pytest.approx(parameters, rel=0.006)
    assert reason and "\n" not in reason


@pytest.mark.parametrize(
    ("workload", "parameters"),
    [
        (workload_of("gpt3-175b"), 175e9),
        (workload_of("llama3-70b"), 70.6e9),
        # Narayanan et al. 2021, table 1: "1T" are 1,008 billion.
        (Workload("t", 128, 25600, 160, 102400, 51200, 2048), 1000e9),
        # 14.73 billion, where 14.6 is said: no layer more or less.
        (Workload("z", 46, 5120, 40, 20480, 51200, 2048), 14.6e9),
        # A model of 64 layers that was measured with two keeps its name.
        (
            Workload(
                "g",
                2,
                6144,
                48,
                32768,
                131072,
                8192,
                kv_heads=8,
                gated=True,
                bias=False,
                experts=8,
                experts_per_token=2,
            ),
            314e9,
        ),
        # Positions of 65,536 are no other number of layers.
        (Workload("m", 12, 768, 12, 3072, 50368, 65536, bias=False, learned_positions=True), 0.1741e9),
    ],
)
def test_what_adds_up_or_cannot_is_left_alone(workload: Workload, parameters: float) -> None:
    assert reconciled(workload, parameters) == (workload, "")


def _gated(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Workload:
    """As a table of a paper gives it: without the size of heads, and nothing said of the output head."""
    return Workload(
        "g",
        layers,
        hidden,
        heads,
        ffn,
        vocab,
        8192,
        kv_heads=kv_heads,
        gated=True,
        bias=False,
        tied_embeddings=False,
    )


@pytest.mark.parametrize(
    ("workload", "billions"),
    [
        (_gated(16, 2048, 32, 8, 8192, 128256), (1.2, 1.24, 1)),  # Llama 3.2 1B
        (_gated(28, 3072, 16, 16, 24576, 256000), (8.5, 8.54, 7)),  # Gemma 7B
        (_gated(42, 3584, 16, 8, 14336, 256000), (9.2, 9.24, 9)),  # Gemma 2 9B
        (_gated(40, 5120, 40, 40, 13824, 100278), (13, 13.7)),  # OLMo 2 13B
        (_gated(36, 2048, 16, 2, 11008, 151936), (3, 3.1, 3.09)),  # Qwen2.5 3B
    ],
)
def test_layers_stand_where_a_count_is_rounded_or_something_else_explains_it(
    workload: Workload, billions: tuple[float, ...]
) -> None:
    for stated in billions:
        assert reconciled(workload, stated * 1e9)[0].layers == workload.layers, stated


def _ungated(layers: int, hidden: int, heads: int) -> Workload:
    """Of squared ReLU and a vocabulary of 256,000, as Nemotron-4 is (Parmar et al. 2024, arXiv 2402.16819)."""
    return Workload("n", layers, hidden, heads, 4 * hidden, 256000, 4096, bias=False)


@pytest.mark.parametrize(
    ("workload", "billions"),
    [(_ungated(32, 4096, 32), (8.5, 8.54, 8.75)), (_ungated(40, 6144, 48), (21.3, 21.8))],
)
def test_embeddings_of_their_own_are_likelier_than_other_layers(
    workload: Workload, billions: tuple[float, ...]
) -> None:
    for stated in billions:
        found, reason = reconciled(workload, stated * 1e9)
        assert (found.layers, found.tied_embeddings) == (workload.layers, False), stated
        assert reason.startswith("untied embeddings, since")


def test_no_gated_model_keeps_heads_of_an_odd_size() -> None:
    # gpt-oss 120b: 64 heads on 2880 are of 64, not of 45, whatever the count says.
    known = workload_of("gpt-oss-120b")
    odd = known.with_changes(head_size=45)
    for stated in (known.parameters, odd.parameters, 117e9):
        assert reconciled(odd, stated)[0].head_size % 8 == 0, stated
    assert reconciled(known, 117e9) == (known, "")
