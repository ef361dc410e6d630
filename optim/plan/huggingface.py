"""Workloads from a Hugging Face ``config.json``: dense, grouped-query, latent attention, windows, mixtures of experts.

    workload = workload_from_config(json.load(open("config.json")), sequence=8192)

``huggingface.toml`` says, a table a model type, under which keys each type keeps what; nothing of ``transformers`` is
imported. A type that is not listed is refused: a wrong guess would be a wrong plan.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from trine.optim.plan.huggingface_keys import Reading, dialect_of, is_positive, tables
from trine.optim.plan.workload import LatentAttention, Workload
from trine.record.errors import UsageError

__all__ = ["known_model_types", "workload_from_config"]

_LATENT = "latent."
_SIZES = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_size",
    "ffn",
    "vocab",
    "experts",
    "experts_per_token",
    "expert_ffn",
    "shared_experts",
    "shared_ffn",
    "norms",
    "multi_token_modules",
)
_SWITCHES = (
    "gated",
    "bias",
    "attention_bias",
    "output_bias",
    "mlp_bias",
    "norm_bias",
    "norm_weights",
    "tied_embeddings",
    "learned_positions",
)
#: Any of these above nought: there is dropout. Attention's own is inside the fused kernel and costs no memory.
_DROPOUTS = (
    "resid_pdrop",
    "residual_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "dropout",
    "embd_pdrop",
)
#: Layers of ``layer_types`` that see a window, and those that see everything.
_WINDOWED = ("sliding_attention", "chunked_attention", "local")
_FULL = ("full_attention", "global")


def known_model_types() -> tuple[str, ...]:
    """What ``model_type`` may be."""
    return tuple(sorted(tables()))


def workload_from_config(
    config: Mapping[str, Any], *, sequence: int | None = None, name: str = "", where: str = "config.json"
) -> Workload:
    """The workload that a configuration describes.

    ``sequence``: tokens a sample; by default the most that the model takes, which is more than most train with. Of models
    of several kinds of input the text part is taken. Raises ``UsageError`` in one line that begins with ``where``: for
    what is missing, for types that are not known, and for what is no decoder.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and "hidden_size" not in config:
        outer = config.get("model_type", "")
        config = {
            "model_type": f"{outer}_text",
            "tie_word_embeddings": config.get("tie_word_embeddings"),
            **nested,
        }
    model_type = config.get("model_type")
    _refuse_what_is_no_decoder(config, model_type, where)
    reading = Reading(config, dialect_of(str(model_type)), where)
    fields: dict[str, Any] = {
        field: reading.size(field) for field in _SIZES if reading.raw(field) is not None
    }
    fields |= {field: reading.flag(field) for field in _SWITCHES if reading.raw(field) is not None}
    for field in ("layers", "hidden", "heads", "vocab"):
        fields[field] = reading.needed(field)
    if not fields.get("ffn"):
        fields["ffn"] = reading.size("ffn_factor") * fields["hidden"] or reading.needed("ffn")
    fields |= {
        "name": name or str(config.get("_name_or_path") or model_type),
        "sequence": sequence or _sequence(reading),
        "sequence_is_most": not sequence,
        "dropout": any(is_positive(config.get(key)) for key in _DROPOUTS),
        **_attention(reading, fields),
        **_mixture(reading, fields),
    }
    fields |= _odds_and_ends(reading, fields)
    fields |= _positions(reading, fields)
    fields |= _window(reading, fields["layers"])
    try:
        return Workload(**fields)
    except UsageError as error:
        said = () if sequence is None else ("sequence",)
        raise UsageError(
            f"{where}: {_in_its_words(str(error).removeprefix(fields['name'] + ': '), reading, said)}"
        ) from None


def _in_its_words(message: str, reading: Reading, but: Collection[str]) -> str:
    """A message about a workload's fields with the configuration's keys in their place, ``but`` for those not from it."""
    return re.sub(r"[a-z_]+", lambda word: word[0] if word[0] in but else reading.name(word[0]), message)


def _refuse_what_is_no_decoder(config: Mapping[str, Any], model_type: Any, where: str) -> None:
    if not isinstance(model_type, str) or not model_type:
        raise UsageError(
            f"{where} has no model_type: it is no configuration of a Hugging Face model; describe the model in TOML"
        )
    if config.get("is_encoder_decoder"):
        raise UsageError(
            f"{where}: {model_type!r} has an encoder and a decoder; only decoders can be planned"
        )
    kinds = config.get("layer_types")
    odd = [kind for kind in kinds if kind not in (*_WINDOWED, *_FULL)] if isinstance(kinds, list) else []
    if odd:
        raise UsageError(
            f"{where}: layers of kind {odd[0]!r} are no attention; only decoders of attention can be planned"
        )
    if model_type not in tables():
        near = difflib.get_close_matches(model_type, tables(), n=3, cutoff=0.6)
        raise UsageError(
            f"{where}: model_type {model_type!r} is no decoder that is known"
            + (f" (near: {', '.join(near)})" if near else "")
            + ": describe it in TOML (docs/plan_inputs.md), or plan the live module"
        )


def _sequence(reading: Reading) -> int:
    found = reading.size("sequence")
    if not found:
        raise UsageError(
            f"{reading.where} does not say how long its sequences are: give a sequence length (--sequence)"
        )
    return found


def _attention(reading: Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of keys and values, norms of queries and keys, and latent vectors."""
    found: dict[str, Any] = {}
    if reading.flag("one_kv_head") and not reading.switch("one_kv_head_unless"):
        key = reading.dialect.values["one_kv_head_if"]
        if reading.config.get(key, True):
            found["kv_heads"] = 1
        else:  # what the key of grouped heads says is then not used
            found["kv_heads"] = fields["heads"]
    heads, kv_heads = fields["heads"], found.get("kv_heads", fields.get("kv_heads")) or fields["heads"]
    head_size = fields.get("head_size") or fields["hidden"] // heads
    norm = reading.raw("query_key_norm")
    if norm is not None and reading.config.get(
        str(reading.raw("query_key_norm_if")), "query_key_norm_if" not in reading.dialect.values
    ):
        found["query_key_norm"] = {
            "head": 2 * head_size,
            "head-bias": 4 * head_size,
            "all": (heads + kv_heads) * head_size,
        }[norm]
    if _LATENT + "kv_rank" in reading.dialect.keys:
        reading.needed("head_size")
        sizes = {
            part: reading.needed(_LATENT + part) for part in ("kv_rank", "rope_head_size", "value_head_size")
        }
        # Queries that are not compressed have null, as DeepSeek-V2-Lite's.
        query_rank = reading.said(_LATENT + "query_rank", or_null=True)
        found["latent"] = LatentAttention(query_rank=query_rank, **sizes)
        found["kv_heads"] = heads
    return found


def _mixture(reading: Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers are dense, and that a mixture says how many experts it has and a token visits, and how wide they are."""
    if not reading.dialect.keys.get("experts") or (
        reading.raw("experts") == 0 and reading.flag("experts_or_none")
    ):
        # Keys of a mixture may stand in a dense configuration.
        return {"experts": 0, "experts_per_token": 0, "expert_ffn": 0, "shared_experts": 0, "shared_ffn": 0}
    found = {field: reading.needed(field) for field in ("experts", "experts_per_token")}
    if reading.dialect.keys.get("expert_ffn"):
        found["expert_ffn"] = reading.needed("expert_ffn")
    found["shared_experts"] = reading.said("shared_experts", or_null=True)
    if reading.dialect.keys.get("shared_ffn") and not reading.said("shared_ffn"):
        found["shared_experts"] = 0  # a size of nought says that there is none
    return found | {"dense_layers": len(_dense_layers(reading, fields["layers"]))}


def _dense_layers(reading: Reading, layers: int) -> set[int]:
    """Layers of a mixture that have none."""
    first = reading.said("dense_first")
    if first > layers:
        raise UsageError(
            f"{reading.where}: {reading.name('dense_first')} {first} is more than {reading.name('layers')} {layers}"
        )
    # As transformers has it, layers are listed that this model may be too short for.
    dense = set(range(first)) | set(reading.listed("mlp_only_layers") or ()) & set(range(layers))
    mixtures = reading.listed("moe_layers")
    if mixtures is not None:
        return dense | set(range(layers)) - set(mixtures)
    every = 1 if reading.raw("mixture_every") is None else reading.needed("mixture_every")
    return dense | {layer for layer in range(layers) if (layer + 1) % every}


def _odds_and_ends(reading: Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Weights that few models have: a bias of the head, norms of embeddings, sinks, gates; parallel blocks' one norm."""
    hidden = fields["hidden"]
    found: dict[str, Any] = {}
    if reading.flag("learned_positions"):
        found["positions"] = (reading.size("positions") or fields["sequence"]) + reading.size(
            "positions_more"
        )
    found["other_parameters"] = fields["vocab"] * reading.flag("head_bias") + 2 * hidden * reading.flag(
        "embedding_norm"
    )
    found["other_layer_parameters"] = (
        fields["heads"] * reading.flag("sinks")
        + fields.get("experts", 0) * reading.flag("router_bias")
        + hidden * reading.flag("shared_gate")
        + reading.size("activation_parameters")
    )
    if reading.switch("norms_if_parallel") or (
        "norms_if_parallel" in reading.dialect.values and reading.switch("one_kv_head_unless")
    ):
        separate = reading.switch("one_kv_head_unless") and reading.config.get("num_ln_in_parallel_attn") != 1
        found["norms"] = 2 if separate else 1
    return found


def _positions(reading: Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
    """ALiBi, or rotary positions with their base, the share of a head that turns, and how they are scaled."""
    if reading.flag("alibi"):
        return {"position_kind": "alibi"}
    if reading.dialect.values.get("position_kind") != "rotary" or fields.get("learned_positions"):
        return {}
    found: dict[str, Any] = {"position_kind": "rotary", "rotary_base": reading.number("rotary_base")}
    head_size = fields.get("head_size") or fields["hidden"] // fields["heads"]
    turned = reading.size("rotary_size")
    share = turned / head_size if turned else reading.number("rotary_share")
    scaling = str(reading.raw("rotary_scaling") or "")
    return found | {"rotary_share": share or 1.0, "rotary_scaling": scaling.replace("default", "")}


def _window(reading: Reading, layers: int) -> dict[str, int]:
    """Tokens that attention looks back over, and how many layers do, also where a window holds this sequence."""
    kinds = _kinds(reading, layers)
    window = reading.size("window")
    switched = "window_if" not in reading.dialect.values or reading.switch("window_if")
    if not window or not switched:
        return {}
    if kinds is not None:
        windowed = sum(kind in _WINDOWED for kind in kinds)
    elif "window_if" in reading.dialect.values:  # Qwen: the layers from this one on
        if reading.config.get("max_window_layers") is None:
            raise UsageError(f"{reading.where} has no max_window_layers: add it, or layer_types")
        from_layer = reading.whole("max_window_layers", reading.config["max_window_layers"])
        windowed = max(0, layers - from_layer)
    else:
        period = max(1, reading.size("window_period"))
        windowed = layers if period == 1 else layers - layers // period
    return {"window": window, "window_layers": windowed} if windowed else {}


def _kinds(reading: Reading, layers: int) -> list[Any] | None:
    """What each layer attends over; None where that is not listed. Raises ``UsageError`` for a list of another length."""
    key = next(
        (key for key in ("layer_types", "attention_layers") if reading.config.get(key) is not None), None
    )
    if key is None:
        return None
    kinds = reading.config[key]
    if not isinstance(kinds, list):
        raise UsageError(f"{reading.where}: {key} must be a list, one kind a layer, not {kinds!r}")
    if len(kinds) != layers:
        raise UsageError(
            f"{reading.where}: {key} lists {len(kinds)} and {reading.name('layers')} is {layers}: list one kind a layer"
        )
    return kinds
