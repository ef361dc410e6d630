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
