"""Configurations of Hugging Face: every parameter of the model that transformers builds from them is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trine.optim.plan.huggingface import known_model_types, workload_from_config
from trine.record.errors import UsageError

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
}
WIDE = {**SMALL, "head_dim": 32}
ALL_HEADS = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
BIASED = {**SMALL, "attention_bias": True}
LATENT = {
    **ALL_HEADS,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_group": 1,
    "topk_group": 1,
}
QWEN_MOE = {**WIDE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 160, "n_positions": 96}
FALCON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 160}
OPT = {**ALL_HEADS, "ffn_dim": 176, "word_embed_proj_dim": 64}

#: Each: model type, what its configuration holds, and how many parameters transformers 5.24 builds from it.
COMMON: list[tuple[str, dict[str, Any], int]] = [
    ("llama", SMALL, 251_584),
    ("llama", {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, 244_384),
    ("mistral", {**WIDE, "sliding_window": 32}, 313_024),
    ("gpt2", GPT, 166_464),
    ("gpt2", {**GPT, "n_inner": 100, "tie_word_embeddings": False}, 116_332),
    ("qwen2", SMALL, 252_224),
    ("qwen3", WIDE, 313_344),
    ("qwen3_moe", QWEN_MOE, 422_784),
    ("qwen3_moe", {**QWEN_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, 335_232),
    ("mixtral", {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}, 1_098_304),
    ("deepseek_v3", LATENT, 396_544),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None, "attention_bias": True, "n_shared_experts": 1}, 367_896),
    ("olmo2", SMALL, 252_064),
    ("gemma2", {**WIDE, "sliding_window": 32}, 303_424),
]
#: The rest is compared by building the models, which is slow, because importing them is.
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("apertus", {**SMALL, "attention_bias": True}),
    ("arcee", {**SMALL, "attention_bias": True}),
    ("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 160}),
    ("codegen", {**GPT, "rotary_dim": 8, "n_ctx": 96}),
    ("cohere", {**SMALL, "use_qk_norm": True}),
    ("cohere2", {**WIDE, "attention_bias": True}),
    (
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "vocab_size": 160,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    ("deepseek_v2", {**LATENT, "topk_method": "greedy"}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    ("dots1", {**LATENT, "head_dim": 32}),
    ("ernie4_5", {**WIDE, "use_bias": True}),
    ("exaone", {**SMALL, "mlp_bias": True}),
    ("exaone4", {**SMALL, "sliding_window": 32}),
    ("falcon", FALCON),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    ("flex_olmo", {**SMALL, "num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}),
    ("gemma", WIDE),
    ("gemma3_text", {**WIDE, "sliding_window": 32}),
    ("glm", {**WIDE, "attention_bias": True, "pad_token_id": 0}),
    ("glm4", {**WIDE, "pad_token_id": 0}),
    (
        "glm4_moe",
        {
            **WIDE,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", {**GPT, "multi_query": False}),
    (
        "gpt_neo",
        {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "vocab_size": 160,
            "max_position_embeddings": 128,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 32,
        },
    ),
    ("gpt_neox", ALL_HEADS),
    ("gpt_neox", {**ALL_HEADS, "attention_bias": False}),
    ("gpt_oss", {**WIDE, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 32}),
    ("gptj", {**GPT, "rotary_dim": 8}),
    ("granite", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    ("granitemoe", {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}),
    (
        "granitemoeshared",
        {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    ),
    ("granitemoeshared", {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}),
    ("helium", {**SMALL, "head_dim": 16, "attention_bias": True}),
    ("hunyuan_v1_dense", {**WIDE, "attention_bias": True}),
    (
        "llama4_text",
        {
            **WIDE,
            "intermediate_size_mlp": 208,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
        },
    ),
    ("internlm3", {**SMALL, "qkv_bias": True, "bias": True}),
    ("minimax_m2", {**WIDE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    ("ministral", {**WIDE, "sliding_window": 32}),
    ("ministral3", WIDE),
    ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 160}),
    ("nanochat", SMALL),
    ("nemotron", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    ("olmo", {**SMALL, "attention_bias": True}),
    ("olmo3", {**SMALL, "sliding_window": 32}),
    ("olmoe", {**SMALL, "num_experts": 6, "num_experts_per_tok": 2}),
    ("opt", OPT),
    ("opt", {**OPT, "enable_bias": False}),
    ("persimmon", ALL_HEADS),
    ("persimmon", {**ALL_HEADS, "qk_layernorm": False}),
    ("phi", SMALL),
    ("phi", {**SMALL, "qk_layernorm": True}),
    ("phi3", {**SMALL, "sliding_window": 32, "pad_token_id": 0}),
    ("phimoe", {**SMALL, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True}),
    (
        "qwen2_moe",
        {
            **SMALL,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    ("seed_oss", {**WIDE, "attention_out_bias": True}),
    ("smollm3", {**SMALL, "pad_token_id": 0}),
    ("stablelm", {**SMALL, "use_qkv_bias": True}),
    ("stablelm", {**SMALL, "use_parallel_residual": True, "qk_layernorm": True}),
    ("youtu", {key: value for key, value in LATENT.items() if "expert" not in key}),
    ("starcoder2", SMALL),
    ("starcoder2", {**SMALL, "use_bias": False}),
]


def built(model_type: str, shape: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """How many parameters transformers' model of this configuration has, and its config.json."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # Every size is given, so that none is right by the type's default alone.
    config = transformers.CONFIG_MAPPING[model_type](**shape)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters()), json.loads(config.to_json_string())


@pytest.mark.parametrize(("model_type", "shape", "parameters"), COMMON, ids=[case[0] for case in COMMON])
def test_every_parameter_is_counted(model_type: str, shape: dict[str, Any], parameters: int) -> None:
    config = {"model_type": model_type, **shape}
    assert workload_from_config(config, sequence=64).parameters == parameters


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "shape", "parameters"), COMMON, ids=[case[0] for case in COMMON])
def test_the_counts_are_those_of_the_models(model_type: str, shape: dict[str, Any], parameters: int) -> None:
    counted, config = built(model_type, shape)
    assert counted == parameters == workload_from_config(config, sequence=64).parameters


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "shape"), OTHERS, ids=[case[0] for case in OTHERS])
def test_every_parameter_of_other_types_is_counted(model_type: str, shape: dict[str, Any]) -> None:
    parameters, config = built(model_type, shape)
    assert workload_from_config(config, sequence=64).parameters == parameters


def test_positions_are_of_their_kind() -> None:
    def told(config: dict[str, Any]) -> tuple[str, float, float, str]:
        found = workload_from_config(config, sequence=64)
        return found.position_kind, found.rotary_base, found.rotary_share, found.rotary_scaling

    assert told(config_of()) == ("rotary", 10_000, 1, "")  # as its class has it where nothing is said
    scaled = {"rope_type": "llama3", "factor": 8.0}
    assert told(config_of(rope_theta=500000.0, rope_scaling=scaled)) == ("rotary", 500_000, 1, "llama3")
    new = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}
    assert told(config_of(rope_parameters=new)) == ("rotary", 1e6, 0.5, "")
    assert told({"model_type": "gptj", **GPT, "rotary_dim": 8})[:3] == ("rotary", 10_000, 0.5)
    assert told({"model_type": "gpt2", **GPT})[0] == "learned"
    mpt = {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 160}
    assert told(mpt)[:2] == ("alibi", 0)
    with pytest.raises(UsageError, match="rope_theta must be a number above 0"):
        told(config_of(rope_theta=-1))


@pytest.mark.slow
def test_bases_that_nothing_says_are_those_of_the_types_own_classes() -> None:
    transformers = pytest.importorskip("transformers")
    for model_type, shape in {case[0]: case[1] for case in (*COMMON, *OTHERS)}.items():
        config = json.loads(transformers.CONFIG_MAPPING[model_type](**shape).to_json_string())
        rotary = config.get("rope_parameters")
        if not rotary or config.get("alibi"):
            continue
        # Where windowed layers have a base of their own, that of the others.
        rotary = rotary.get("full_attention", rotary)
        bare = {
            key: value for key, value in config.items() if not key.startswith(("rope", "rotary", "partial"))
        }
        found = workload_from_config(bare, sequence=64)
        said = (rotary["rope_theta"], rotary.get("partial_rotary_factor", 1.0))
        assert (found.rotary_base, found.rotary_share) == said, model_type


def test_every_known_type_is_compared_with_its_model() -> None:
    # Types that transformers does not build itself have the modelling code of one that it builds.
    elsewhere = {"internlm2", "kimi_k2"}
    tested = {case[0] for case in (*COMMON, *OTHERS)}
    assert set(known_model_types()) == tested | elsewhere


def config_of(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **SMALL, **changes}


@pytest.mark.parametrize(
    ("config", "window", "layers"),
    [
        (config_of(model_type="mistral", sliding_window=32), 32, 5),
        (config_of(model_type="mistral", sliding_window=None), 0, 0),
        (config_of(model_type="mistral", sliding_window=64), 64, 5),  # of a longer sequence than this one
        (config_of(model_type="gemma2", sliding_window=32), 32, 3),  # 0, 2, 4
        (config_of(model_type="gemma3_text", sliding_window=32, num_hidden_layers=12), 32, 10),
        (config_of(model_type="qwen2", sliding_window=32, use_sliding_window=False), 0, 0),
        (
            config_of(model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=3),
            32,
            2,
        ),
        (
            config_of(
                model_type="cohere2",
                sliding_window=16,
                layer_types=[
                    "sliding_attention",
                    "full_attention",
                    "full_attention",
                    "full_attention",
                    "full_attention",
                ],
            ),
            16,
            1,
        ),
    ],
)
def test_windows_are_those_layers_that_have_them(config: dict[str, Any], window: int, layers: int) -> None:
    workload = workload_from_config(config, sequence=64)
    assert (workload.window, workload.window_layers) == (window, layers)


def test_dimensions_are_what_the_keys_say() -> None:
    workload = workload_from_config({"model_type": "deepseek_v3", **LATENT}, sequence=64)
    assert workload.latent is not None
    assert (workload.latent.kv_rank, workload.latent.query_rank) == (24, 40)
    assert (workload.experts, workload.experts_per_token, workload.shared_experts) == (6, 2, 2)
    assert (workload.dense_layers, workload.expert_ffn, workload.head_size) == (2, 48, 16)
    assert workload_from_config(config_of()).sequence == 128


def test_the_text_part_of_a_model_of_several_inputs_is_taken() -> None:
    inner = {"model_type": "gemma3_text", **WIDE}
    workload = workload_from_config(
        {"model_type": "gemma3", "text_config": inner, "vision_config": {}}, sequence=64
    )
    assert (workload.hidden, workload.head_size) == (64, 32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model_type"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder and a decoder"),
        ({"model_type": "bert", "hidden_size": 64}, "no decoder that is known"),
        ({"model_type": "lama"}, "near: llama"),
        (config_of(num_hidden_layers=None), "no num_hidden_layers"),
        (config_of(hidden_size="wide"), "hidden_size must be a whole number"),
        (config_of(vocab_size=-1), "vocab_size must be a whole number"),
        (config_of(max_position_embeddings=None), r"how long its sequences are: .* \(--sequence\)"),
        (
            config_of(num_attention_heads=4, num_key_value_heads=3),
            "num_attention_heads 4 must be a multiple of num_key_value_heads 3",
        ),
        (config_of(num_attention_heads=0), "num_attention_heads must be at least 1, not 0"),
        (
            config_of(num_attention_heads=5),
            "json: hidden_size 64 is no multiple of num_attention_heads 5: say head_dim",
        ),
        (config_of(tie_word_embeddings="false"), "tie_word_embeddings must be true or false, not 'false'"),
        (config_of(num_hidden_layers=10**12), "json: num_hidden_layers must be at most 100000"),
        (config_of(hidden_size=10**9), "json: hidden_size must be at most 1000000, not 1000000000"),
        (config_of(model_type="mixtral", num_local_experts=4), "no num_experts_per_tok"),
        ({"model_type": "deepseek_v3", **LATENT, "kv_lora_rank": None}, "no kv_lora_rank"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention"]},
            "'linear_attention' are no attention",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        workload_from_config(config, where="some/config.json")
    assert "\n" not in str(caught.value)
