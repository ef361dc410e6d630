"""Workloads from a Hugging Face ``config.json``: dense, grouped-query, latent attention, windows, mixtures of experts.

    workload = workload_from_config(json.load(open("config.json")), sequence=8192)

``huggingface.toml`` says, a table a model type, under which keys each type keeps what; nothing of ``transformers`` is
imported. A type that is not listed is refused: a wrong guess would be a wrong plan.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

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


@dataclass(frozen=True, slots=True)
class _Dialect:
    """A model type's table, with what it is like filled in."""

    keys: Mapping[str, Sequence[str]]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Reading:
    """A configuration seen through its dialect. ``where`` begins messages."""

    config: Mapping[str, Any]
    dialect: _Dialect
    where: str

    def raw(self, field: str) -> Any:
        """The first key that holds something, else the dialect's value, else None."""
        for key in self.dialect.keys.get(field, ()):
            value: Any = self.config
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return self.dialect.values.get(field)

    def size(self, field: str) -> int:
        """A whole number that is not negative; 0 where nothing says. Raises ``UsageError``."""
        value = self.raw(field)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{self.where}: {self.name(field)} must be a whole number, not {value!r}")
        return value

    def number(self, field: str) -> float:
        """A number above nought; 0 where nothing says. Raises ``UsageError``."""
        value = self.raw(field)
        if value is None:
            return 0.0
        if not _positive(value) or isinstance(value, bool):
            raise UsageError(f"{self.where}: {self.name(field)} must be a number above 0, not {value!r}")
        return float(value)

    def needed(self, field: str) -> int:
        """A size that must be there. Raises ``UsageError`` naming the key."""
        value = self.size(field)
        if self.raw(field) == 0:
            raise UsageError(f"{self.where}: {self.name(field)} must be at least 1, not 0")
        if not value:
            raise UsageError(f"{self.where} has no {self.name(field)}: add it, or describe the model in TOML")
        return value

    def flag(self, field: str) -> bool:
        """Whether a field is on. Raises ``UsageError`` for words, since "false" would be on."""
        value = self.raw(field)
        if isinstance(value, str):
            raise UsageError(f"{self.where}: {self.name(field)} must be true or false, not {value!r}")
        return bool(value)

    def switch(self, field: str) -> bool:
        """Whether the key that a field of the dialect names is on."""
        key = self.dialect.values.get(field)
        return key is not None and bool(self.config.get(key))

    def name(self, field: str) -> str:
        """What the configuration calls a field."""
        keys = self.dialect.keys.get(field, ())
        return keys[0] if keys else field


def known_model_types() -> tuple[str, ...]:
    """What ``model_type`` may be."""
    return tuple(sorted(_tables()))


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
    reading = _Reading(config, _dialect(str(model_type)), where)
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
        "dropout": any(_positive(config.get(key)) for key in _DROPOUTS),
        **_attention(reading, fields),
        **_mixture(reading, fields),
    }
    fields |= _odds_and_ends(reading, fields)
    fields |= _positions(reading, fields)
    fields |= _window(reading, fields["layers"])
    return Workload(**fields)


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
    if model_type not in _tables():
        near = difflib.get_close_matches(model_type, _tables(), n=3, cutoff=0.6)
        raise UsageError(
            f"{where}: model_type {model_type!r} is no decoder that is known"
            + (f" (near: {', '.join(near)})" if near else "")
            + ": describe it in TOML (docs/plan_inputs.md), or plan the live module"
        )


def _sequence(reading: _Reading) -> int:
    found = reading.size("sequence")
    if not found:
        raise UsageError(f"{reading.where} does not say how long its sequences are: give a sequence length")
    return found


def _attention(reading: _Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
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
        parts = ("kv_rank", "query_rank", "rope_head_size", "value_head_size")
        sizes = {part: reading.size(_LATENT + part) for part in parts}
        sizes["kv_rank"] = reading.needed(_LATENT + "kv_rank")
        found["latent"] = LatentAttention(**sizes)
        found["kv_heads"] = heads
    return found


def _mixture(reading: _Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers are dense, and that a mixture says how many experts a token visits."""
    if not fields.get("experts"):
        # Keys of a mixture may stand in a dense configuration, with nought experts.
        return {"experts": 0, "experts_per_token": 0, "expert_ffn": 0, "shared_experts": 0, "shared_ffn": 0}
    layers = fields["layers"]
    dense = set(range(min(layers, reading.size("dense_first"))))
    listed = reading.config.get("mlp_only_layers")
    dense |= {layer for layer in listed if 0 <= layer < layers} if isinstance(listed, list) else set()
    every = reading.size("mixture_every") or 1
    mixtures = reading.config.get("moe_layers")
    if isinstance(mixtures, list) and mixtures:
        dense |= set(range(layers)) - set(mixtures)
    else:
        dense |= {layer for layer in range(layers) if (layer + 1) % every} if every > 1 else set()
    found = {"experts_per_token": reading.needed("experts_per_token"), "dense_layers": len(dense)}
    if "shared_ffn" in fields and not fields["shared_ffn"]:
        found["shared_experts"] = 0  # a size of nought says that there is none
    return found


def _odds_and_ends(reading: _Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
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


def _positions(reading: _Reading, fields: Mapping[str, Any]) -> dict[str, Any]:
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


def _window(reading: _Reading, layers: int) -> dict[str, int]:
    """Tokens that attention looks back over, and how many layers do, also where a window holds this sequence."""
    window = reading.size("window")
    switched = "window_if" not in reading.dialect.values or reading.switch("window_if")
    if not window or not switched:
        return {}
    kinds = reading.config.get("layer_types") or reading.config.get("attention_layers")
    if isinstance(kinds, list):
        windowed = sum(kind in _WINDOWED for kind in kinds[:layers])
    elif "window_if" in reading.dialect.values:  # Qwen: the layers from this one on
        windowed = max(0, layers - int(reading.config.get("max_window_layers") or 0))
    else:
        period = max(1, reading.size("window_period"))
        windowed = layers if period == 1 else layers - layers // period
    return {"window": window, "window_layers": windowed} if windowed else {}


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _dialect(model_type: str) -> _Dialect:
    table = _tables()[model_type]
    base = _dialect(table["like"]) if "like" in table else _Dialect({}, {})
    own = _flat(table.get("keys", {}))
    keys = {field: [names] if isinstance(names, str) else list(names) for field, names in own.items()}
    return _Dialect({**base.keys, **keys}, {**base.values, **table.get("values", {})})


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= {f"{name}.{part}": inner for part, inner in value.items()}
        else:
            found[name] = value
    return found


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    text = files("trine.optim.plan").joinpath("huggingface.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
