"""Workloads by name or from files: ``workload_of("llama3-70b")``, ``workload_of("model.toml")``, ``workload_of("config.json")``.

A TOML file has the fields of :class:`trine.optim.plan.Workload`, and may start from a known model:

    like = "llama3-8b"
    layers = 48
    sequence = 16384

    [latent]                # of multi-head latent attention alone
    kv_rank = 512
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from trine.optim.plan._tables import check_keys, check_line, near, packaged, read_json, read_toml
from trine.optim.plan.huggingface import workload_from_config
from trine.optim.plan.workload import LatentAttention, Workload
from trine.record.errors import UnreadableInput, UsageError

__all__ = ["check_field", "latent_from_table", "model_names", "workload_from_table", "workload_of"]

_NEEDED = ("layers", "hidden", "heads", "vocab", "sequence")
#: Sizes that hold one where a whole number is asked for; the rest are counts.
_REAL = ("load_imbalance", "rotary_base", "rotary_share")
#: Fields that say nothing where there are no experts.
_OF_EXPERTS = ("experts_per_token", "expert_ffn", "shared_experts", "shared_ffn", "dense_layers")
#: Fields whose default depends on others: those that a file changes take new ones with them.
_DERIVED = {
    "heads": ("kv_heads", "head_size"),
    "hidden": ("head_size",),
    "ffn": ("expert_ffn", "shared_ffn"),
    "experts": ("expert_ffn", "shared_ffn"),
    "expert_ffn": ("shared_ffn",),
    "layers": ("window_layers",),
    "window": ("window_layers",),
    "bias": ("attention_bias", "output_bias", "mlp_bias", "norm_bias"),
    "learned_positions": ("position_kind",),
}


def workload_of(source: str | Path, *, sequence: int | None = None) -> Workload:
    """A workload by the name of a known model, from TOML, from a ``config.json`` or from the folder that holds one.

    ``sequence`` replaces the sequence's length. Raises ``UsageError`` or ``UnreadableInput`` in one line.
    """
    if sequence is not None and sequence < 1:
        raise UsageError(f"sequence must be at least 1, not {sequence}")
    if not str(source).strip():
        raise UsageError(
            "no model is named: is a variable unset? give a model's name, a .toml or a config.json"
        )
    known = packaged("models.toml")
    path = Path(source)
    is_there = path.is_file() or (path / "config.json").is_file()
    name = None if is_there else _known(str(source))
    if name is not None:
        found = workload_from_table(known[name], name, name)
    elif path.is_dir():
        found = _from_config(_config_in(path), sequence)
    elif path.suffix == ".json":
        found = _from_config(path, sequence)
    elif path.suffix == ".toml" or path.is_file():
        found = workload_from_table(read_toml(path, "workload"), path.stem, str(path))
    else:
        raise UsageError(
            f"no model is called {str(source)!r}{near(str(source), known)} and no file: give a .toml, a config.json, the folder "
            f"that holds one, or one of {', '.join(known)}"
        )
    return found if sequence is None else found.with_changes(sequence=sequence)


def model_names() -> tuple[str, ...]:
    """The models that are known by name."""
    return tuple(packaged("models.toml"))


def workload_from_table(table: Mapping[str, Any], name: str, where: str) -> Workload:
    """A workload from a file's table; ``where`` begins messages. Raises ``UsageError``."""
    known = {
        field.name for field in fields(Workload) if field.compare
    }  # the rest is no size, but who said one
    beside = {"like", "aliases", "source"}
    check_keys(table, known | beside, where)
    _check_beside(table, where)
    given = {key: value for key, value in table.items() if key not in beside}
    for key, value in given.items():
        check_field(key, value, where)
    if isinstance(given.get("latent"), Mapping):
        given["latent"] = latent_from_table(given["latent"], where)
    called = {"name": name, **given}
    base = _base(table["like"], where) if "like" in table else None
    if base is None:
        _check_needed(given, where)
        called.setdefault("ffn", given.get("expert_ffn"))
    try:
        found = Workload(**called) if base is None else _changed(base, called)
    except UsageError as error:  # of a workload, which knows its name alone
        raise UsageError(f"{where}: {str(error).removeprefix(called['name'] + ': ')}") from None
    _check_used(found, given, where)
    return found


def _check_needed(given: Mapping[str, Any], where: str) -> None:
    """Raises ``UsageError`` for a size that no default gives."""
    for key in _NEEDED:
        if key not in given:
            raise UsageError(
                f'{where} has no {key}: add it, or start from a known model with like = "llama3-8b"'
            )
    if "ffn" not in given and "expert_ffn" not in given:
        raise UsageError(f"{where} has no ffn: add the width of the feed-forward")


def _check_beside(table: Mapping[str, Any], where: str) -> None:
    """What a table has beside a workload's sizes. Raises ``UsageError``."""
    if "name" in table:
        check_line(table["name"], "name", where)
    if not isinstance(table.get("source", ""), str):
        raise UsageError(f"{where}: source must be text, not {table['source']!r}")
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise UsageError(f"{where}: aliases must be a list of names, not {aliases!r}")


def _check_used(found: Workload, given: Mapping[str, Any], where: str) -> None:
    """Raises ``UsageError`` for what a table says and a workload does not use."""
    unused = next((key for key in _OF_EXPERTS if given.get(key) and not found.experts), None)
    if unused is not None:
        raise UsageError(
            f"{where}: {unused} {given[unused]} is of experts, and there are none: say experts, or leave it out"
        )
    if given.get("window_layers") and not found.window:
        raise UsageError(
            f"{where}: window_layers {given['window_layers']} see a window, and there is none: say window, or leave it out"
        )
    if given.get("rotary_base") == 0:
        raise UsageError(
            f"{where}: rotary_base must be above 0, such as 10000: leave it out where it is not known"
        )


def _known(name: str) -> str | None:
    """The known model that a name means, also as the Hub spells it ("meta-llama/Llama-3.1-8B-Instruct")."""
    plain = _plain(name)
    for known, table in packaged("models.toml").items():
        if plain in (_plain(known), *(_plain(alias) for alias in table.get("aliases", ()))):
            return known
    return None


def _plain(name: str) -> str:
    word = name.rpartition("/")[2].casefold()
    word = re.sub(r"^(meta|openai)-|-(hf|instruct|chat|base|v0\.\d)(?=-|$)", "", word)
    return re.sub(r"[^a-z0-9]", "", word)


def _base(like: Any, where: str) -> Workload:
    known = packaged("models.toml")
    name = _known(like) if isinstance(like, str) else None
    if name is None:
        raise UsageError(
            f"{where}: no model is called {like!r}{near(str(like), known)}: one of {', '.join(known)}"
        )
    return workload_from_table(known[name], name, name)


def _changed(base: Workload, given: dict[str, Any]) -> Workload:
    """A copy with what is given, and what followed from it worked out anew."""
    changes: dict[str, Any] = {}
    defaults = {field.name: field.default for field in fields(Workload)}
    for key, derived in _DERIVED.items():
        if key in given and given[key] != getattr(base, key):
            changes |= {name: defaults[name] for name in derived}
    return base.with_changes(**{**changes, **given})


def check_field(key: str, value: Any, where: str) -> None:
    """Raises ``UsageError`` for a value that this field of a workload cannot have."""
    kinds = {field.name: str(field.type) for field in fields(Workload)}
    if key == "latent":
        wanted, fits = "a table", isinstance(value, Mapping)
    elif kinds[key] == "str":
        wanted, fits = "text", isinstance(value, str)
    elif kinds[key].startswith("bool"):
        wanted, fits = "true or false", isinstance(value, bool)
    elif key in _REAL:
        wanted, fits = "a number", isinstance(value, int | float) and not isinstance(value, bool)
    else:
        wanted, fits = "a whole number", isinstance(value, int) and not isinstance(value, bool)
    if not fits:
        raise UsageError(f"{where}: {key} must be {wanted}, not {value!r}")
    if isinstance(value, int | float) and value < 0:
        raise UsageError(f"{where}: {key} must not be negative, not {value}")


def latent_from_table(table: Mapping[str, Any], where: str) -> LatentAttention:
    """The table ``[latent]`` of a workload. Raises ``UsageError``."""
    check_keys(table, [field.name for field in fields(LatentAttention)], f"{where}: [latent]")
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{where}: latent.{key} must be a whole number, not {value!r}")
    if not table.get("kv_rank"):
        raise UsageError(f"{where}: [latent] has no kv_rank: the rank that keys and values are compressed to")
    return LatentAttention(**table)


def _config_in(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.is_file():
        raise UnreadableInput(
            f"{folder} holds no config.json: give a Hugging Face model's folder, or a .toml"
        )
    return path


def _from_config(path: Path, sequence: int | None) -> Workload:
    config = read_json(path, "configuration of a model")
    name = path.parent.name if path.name == "config.json" else path.stem
    return workload_from_config(config, sequence=sequence, name=name, where=str(path))
