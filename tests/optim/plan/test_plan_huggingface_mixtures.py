"""Configurations of Hugging Face that leave out or mistake what a mixture of experts, a window or a size needs."""

from __future__ import annotations

from typing import Any

import pytest

from trine.optim.plan.huggingface import workload_from_config
from trine.optim.plan.huggingface_keys import dialect_of, tables
from trine.optim.plan.workload_files import workload_of
from trine.record.errors import UsageError

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
}
MIXTRAL = {"model_type": "mixtral", **SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}
QWEN = {
    "model_type": "qwen3_moe",
    **SMALL,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
QWEN2 = {**QWEN, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 80}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    **SMALL,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
WINDOWED = {"model_type": "qwen3", **SMALL, "head_dim": 16, "sliding_window": 32, "use_sliding_window": True}
DENSE = {"model_type": "llama", **SMALL}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((MIXTRAL, key) for key in ("num_local_experts", "num_experts_per_tok")),
        *((QWEN, key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")),
        (QWEN2, "shared_expert_intermediate_size"),
        *((DEEPSEEK, key) for key in without(DEEPSEEK, "model_type", *SMALL)),
        (WINDOWED, "max_window_layers"),
    ],
)
def test_what_a_types_class_would_fill_in_is_asked_for(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UsageError, match=f"^some/config.json has no {key}: add it") as caught:
        workload_from_config(without(config, key), where="some/config.json")
    assert "\n" not in str(caught.value)


def test_every_type_that_has_a_key_of_experts_asks_for_their_number() -> None:
    for model_type in tables():
        keys = dialect_of(model_type).keys
        if not keys.get("experts"):
            continue
        config = {field: 8 for name in ("layers", "hidden", "heads", "vocab", "ffn") for field in keys[name]}
        latent = without(DEEPSEEK, "model_type", "n_routed_experts", *SMALL)
        nested = {"ffn_config": {"ffn_hidden_size": 8}} if model_type == "dbrx" else {}
        with pytest.raises(UsageError, match=r"has no \S*experts: add it"):
            workload_from_config({"model_type": model_type, **latent, **config, **nested}, sequence=16)


def test_what_is_said_to_be_none_is_none() -> None:
    assert not workload_from_config({**QWEN, "num_experts": 0}).is_mixture
    assert workload_from_config({**QWEN2, "shared_expert_intermediate_size": 0}).shared_experts == 0
    plain = workload_from_config({**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": None})
    assert plain.latent is not None
    assert (plain.latent.query_rank, plain.shared_experts, plain.experts) == (0, 0, 6)
    # No class of these types builds a mixture of none.
    with pytest.raises(UsageError, match="num_local_experts must be at least 1, not 0"):
        workload_from_config({**MIXTRAL, "num_local_experts": 0})


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        (MIXTRAL, 0),
        (QWEN, 0),
        ({**QWEN, "mlp_only_layers": [0, 3, 9]}, 2),
        ({**QWEN, "decoder_sparse_step": 2}, 2),
        ({**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, 3),
        (DEEPSEEK, 2),
        ({**DEEPSEEK, "first_k_dense_replace": 4}, 4),
        ({**MIXTRAL, "model_type": "llama4_text", "moe_layers": [1, 3]}, 2),
        ({**MIXTRAL, "model_type": "llama4_text", "moe_layers": []}, 4),
    ],
)
def test_layers_are_dense_where_the_keys_say_so(config: dict[str, Any], dense: int) -> None:
    assert workload_from_config(config).dense_layers == dense


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**WINDOWED, "layer_types": "sliding_attention"},
            "layer_types must be a list, one kind a layer, not",
        ),
        ({**WINDOWED, "layer_types": ["full_attention"]}, "layer_types lists 1 and num_hidden_layers is 4"),
        ({**DENSE, "layer_types": ["full_attention"] * 5}, "layer_types lists 5 and num_hidden_layers is 4"),
        ({**WINDOWED, "max_window_layers": "x"}, "max_window_layers must be a whole number, not 'x'"),
        (
            {**WINDOWED, "use_sliding_window": "false"},
            "use_sliding_window must be true or false, not 'false'",
        ),
        ({**QWEN, "mlp_only_layers": "x"}, "mlp_only_layers must be a list of layers, not 'x'"),
        ({**QWEN, "mlp_only_layers": ["x"]}, "a layer of mlp_only_layers must be a whole number, not 'x'"),
        ({**QWEN, "decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, not 0"),
        (
            {**MIXTRAL, "model_type": "llama4_text", "moe_layers": 2},
            "moe_layers must be a list of layers, not 2",
        ),
        (
            {**DEEPSEEK, "first_k_dense_replace": 9},
            "first_k_dense_replace 9 is more than num_hidden_layers 4",
        ),
        (
            {**MIXTRAL, "num_experts_per_tok": 7},
            r"num_experts_per_tok must be from 1 to num_local_experts \(6\), not 7",
        ),
        ({**MIXTRAL, "num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1, not 0"),
    ],
)
def test_what_would_be_passed_over_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^some/config.json: {message}") as caught:
        workload_from_config(config, where="some/config.json")
    assert "\n" not in str(caught.value)


def test_windows_that_are_listed_are_those_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    found = workload_from_config({**WINDOWED, "layer_types": kinds})
    assert (found.window, found.window_layers) == (32, 3)
    assert workload_from_config({**DENSE, "layer_types": ["full_attention"] * 4}).window == 0


def test_keys_are_named_as_the_configuration_has_them() -> None:
    config = {"model_type": "gpt2", "hidden_size": 64, "n_layer": 3, "n_head": 5, "vocab_size": 160}
    with pytest.raises(UsageError, match=r"^c\.json: hidden_size 64 is no multiple of n_head 5"):
        workload_from_config(config, sequence=16, where="c.json")
    # A length that --sequence says is no key's.
    with pytest.raises(UsageError, match=r"^c\.json: sequence must be at most"):
        workload_from_config({**config, "n_head": 4}, sequence=10**13, where="c.json")


def test_modules_of_multi_token_prediction_are_known_of() -> None:
    assert workload_from_config({**DEEPSEEK, "num_nextn_predict_layers": 1}).multi_token_modules == 1
    assert workload_from_config(DEEPSEEK).multi_token_modules == 0
    assert workload_of("deepseek-v3").multi_token_modules == 1
    # They are in no count.
    assert (
        workload_from_config({**DEEPSEEK, "num_nextn_predict_layers": 1}).parameters
        == workload_from_config(DEEPSEEK).parameters
    )
