"""Models of published runs by their names, and sizes of heads that no row says."""

from __future__ import annotations

import pytest
from test_planner_rows import one

#: DeepSeek-V3 as tables give it: nothing of its attention.
V3 = {
    "layers": "61",
    "hidden": "7168",
    "heads": "128",
    "experts": "256",
    "topk": "8",
    "ffn": "18432",
    "mlp": "swiglu",
    "vocab": "129280",
    "gpu": "H100-SXM-80GB",
    "precision": "bf16",
}
OSS = {
    **V3,
    "model": "GPT OSS 120B",
    "layers": "36",
    "hidden": "2880",
    "heads": "64",
    "kv_heads": "8",
    "ffn": "2880",
}
OSS |= {"experts": "128", "topk": "4", "vocab": "201088", "params_b": "117"}


@pytest.mark.parametrize(
    "name", ["DeepSeek-V3", "DeepSeek V3 671B", "DeepSeek-V3-671B", "DeepSeek_V3 (671B)"]
)
def test_a_size_behind_the_name_is_the_same_model(name: str) -> None:
    run = one(**V3, model=name)
    assert run.workload.latent is not None and run.workload.expert_ffn == 2048


@pytest.mark.parametrize("name", ["DeepSeek V3 16B", "DeepSeek V3 671M", "Unheard-of 671B"])
def test_another_size_behind_the_name_is_another_model(name: str) -> None:
    assert one(**V3, model=name).workload.latent is None


def test_dimensions_of_another_model_are_not_the_named_ones() -> None:
    assert one(**{**V3, "hidden": "4096"}, model="DeepSeek V3 671B").workload.latent is None
    assert one(**{**V3, "heads": "56"}, model="DeepSeek V3 671B").workload.latent is None


def test_windows_that_no_cell_tells_are_the_published_models() -> None:
    work = one(**OSS).workload
    assert (work.window, work.window_layers, work.head_size, work.layers) == (128, 18, 64, 36)
    # A window in all layers, or none, is for a row to say.
    assert one(model="Mistral-7B", hidden="4096", heads="32", mlp="swiglu").workload.window == 0


def test_heads_of_a_gated_model_are_of_a_size_that_kernels_like() -> None:
    run = one(**{**OSS, "model": "ours", "params_b": ""})
    assert run.workload.head_size == 64
    assert "heads of 64, since 64 of them would be of 45 in 2880" in run.assumed
    # Of a model without gates, and of one whose heads are usual, nothing is assumed.
    assert one(hidden="2880", heads="64").workload.head_size == 45
    assert one(hidden="4096", heads="32", mlp="swiglu", ffn="14336").workload.head_size == 128
