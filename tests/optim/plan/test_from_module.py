"""Workloads of live models: of Hugging Face, of the samples, and as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from trine.optim.plan.from_module import workload_of_module
from trine.record.errors import UsageError

torch = pytest.importorskip("torch")
from torch import nn

from trine.samples.gpt import GPT, GPTConfig
from trine.samples.moe import MixtureConfig, MixtureGPT


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def meta(make: Any, *arguments: Any, **options: Any) -> nn.Module:
    with torch.device("meta"):
        found: nn.Module = make(*arguments, **options)
    return found


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize(("norm", "positions"), [("layer", "learned"), ("rms", "rotary")])
def test_the_samples(mlp: str, norm: str, positions: str) -> None:
    config = GPTConfig(
        layers=3, hidden=64, heads=4, vocab=100, sequence=32, norm=norm, mlp=mlp, positions=positions
    )
    module = meta(GPT, config)
    workload = workload_of_module(module, sequence=32)
    assert workload.parameters == parameters(module)
    assert abs(workload.other_parameters) <= 64  # structure explains all but a final norm's bias
    assert (workload.layers, workload.hidden, workload.heads, workload.vocab) == (3, 64, 4, 100)
    assert workload.gated == (mlp == "swiglu") and workload.ffn == (176 if mlp == "swiglu" else 256)
    assert workload.learned_positions == (positions == "learned")
    assert workload.norm_bias == (norm == "layer") and workload.tied_embeddings


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_the_mixture_of_the_samples(mlp: str) -> None:
    config = MixtureConfig(layers=2, hidden=64, heads=4, vocab=100, sequence=32, mlp=mlp, experts=6, top_k=3)
    module = meta(MixtureGPT, config)
    workload = workload_of_module(module, sequence=32)
    assert workload.parameters == parameters(module) and abs(workload.other_parameters) <= 64
    assert (workload.experts, workload.experts_per_token, workload.dense_layers) == (6, 3, 0)
    assert workload.expert_ffn == (176 if mlp == "swiglu" else 256)


class Plain(nn.Module):
    """As people write one: other names, grouped heads, no configuration."""

    def __init__(self, say_heads: bool = True, kv: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(PlainBlock(say_heads, kv) for _ in range(layers))
        self.ln = nn.LayerNorm(64, bias=False)
        self.lm_head = nn.Linear(64, 100, bias=False)


class PlainBlock(nn.Module):
    def __init__(self, say_heads: bool, kv: int) -> None:
        super().__init__()
        if say_heads:
            self.n_heads = 4
        self.ln1, self.ln2 = nn.LayerNorm(64, bias=False), nn.LayerNorm(64, bias=False)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(64, size, bias=False) for size in (64, kv, kv, 64))
        self.w1, self.w3 = nn.Linear(64, 160, bias=False), nn.Linear(64, 160, bias=False)
        self.w2 = nn.Linear(160, 64, bias=False)


def test_a_model_of_ones_own() -> None:
    module = meta(Plain)
    workload = workload_of_module(module, sequence=128, name="mine")
    assert workload.parameters == parameters(module) and workload.other_parameters == 0
    assert (workload.name, workload.heads, workload.kv_heads, workload.head_size) == ("mine", 4, 2, 16)
    assert workload.gated and workload.ffn == 160 and not workload.tied_embeddings and not workload.bias


def test_wrappers_are_looked_through() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    module = meta(Plain)
    assert workload_of_module(Wrapper(module), sequence=8) == workload_of_module(module, sequence=8)


def test_torchs_own_layers() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(100, 64)
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(64, 4, 256), 3, enable_nested_tensor=False
            )

    module = meta(Encoder)
    workload = workload_of_module(module, sequence=16, causal=False)
    assert workload.parameters == parameters(module)
    assert (workload.layers, workload.heads, workload.ffn, workload.causal) == (3, 4, 256, False)
    assert workload.dropout


def test_what_a_model_does_not_show_is_asked_for() -> None:
    module = meta(Plain, say_heads=False)
    with pytest.raises(UsageError, match="give heads="):
        workload_of_module(module, sequence=16)
    assert workload_of_module(module, sequence=16, heads=2).head_size == 32
    with pytest.raises(UsageError, match="do not divide"):
        workload_of_module(module, sequence=16, heads=3)
    with pytest.raises(UsageError, match="did you mean 'heads'"):
        workload_of_module(module, sequence=16, head=2)


def test_what_is_no_transformer_is_refused_in_one_line() -> None:
    odd = meta(Plain)
    odd.layers.append(meta(PlainBlock, True, 16))  # type: ignore[union-attr, operator]
    for module, message in (
        (nn.Linear(2, 2), "no list of blocks"),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.Conv2d(8, 8, 3))), "no list of blocks"),
        (odd, "block 2 has other attention"),
        (object(), "is no module"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            workload_of_module(module, sequence=16)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen", "mixtral"])
def test_models_of_hugging_face(model: str) -> None:
    pytest.importorskip("transformers")
    from trine.samples import pretrained

    arguments = pretrained.arguments_of(["--model", model, "--hidden", "64", "--layers", "3"])
    module = meta(pretrained.model_of, arguments)
    workload = workload_of_module(module, sequence=64)
    assert workload.parameters == parameters(module) and workload.other_parameters == 0
    assert (workload.layers, workload.hidden, workload.heads, workload.sequence) == (3, 64, 8, 64)
    # By structure alone the same is found, as far as structure shows it.
    kind = module.config.model_type
    module.config.model_type = "another"  # type: ignore[union-attr, assignment]
    shown = workload_of_module(module, sequence=64)
    assert kind != "another" and shown.parameters == workload.parameters
    for field in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "gated",
        "vocab",
        "experts",
        "experts_per_token",
    ):
        assert getattr(shown, field) == getattr(workload, field), field
