"""The configuration: what it takes, what it refuses and in which words, and that it survives TOML."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.optim.config import APPLIED, Compute, Config, Precision
from trine.optim.techniques import techniques
from trine.record.errors import UnreadableInput, UsageError


def test_the_default_changes_nothing() -> None:
    config = Config()
    assert config.changes() == {}
    assert config.to_dict() == {}
    assert config.to_toml() == ""
    assert Config.from_dict({}) == config


def test_changes_by_path_and_back_through_toml(tmp_path: Path) -> None:
    changes = {
        "precision.dtype": "bf16",
        "compute.fuse": ["optimizer"],
        "compute.compile": "blocks",
        "communication.bucket_mib": "auto",
        "communication.nccl": {"algo": "Ring", "min_channels": 4},
        "data.workers": 2,
        "data.prefetch": 4,
        "engine": "deepspeed",
    }
    config = Config().with_changes(changes)
    assert config.changes() == changes
    assert config["precision.dtype"] == "bf16"
    path = tmp_path / "tuned.toml"
    path.write_text(config.to_toml())
    assert Config.from_toml(path) == config
    assert config == Config.from_dict(config.to_dict())
    assert hash(config.compute) == hash(Compute(compile="blocks", fuse=("optimizer",)))


def test_sections_may_be_built_directly() -> None:
    assert Config(precision=Precision(dtype="bf16")) == Config.from_dict({"precision": {"dtype": "bf16"}})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"precission": {}}, ["[precission]", "did you mean [precision]"]),
        ({"precision": {"dtyp": "bf16"}}, ["precision.dtyp", "did you mean precision.dtype"]),
        ({"precision": {"dtype": "bf61"}}, ["precision.dtype", '"bf61"', '"bf16"']),
        ({"precision": {"dtype": 16}}, ["precision.dtype = 16"]),
        ({"precision": 3}, ["[precision]"]),
        ({"compute": {"fuse": ["optimiser"]}}, ["compute.fuse", 'did you mean "optimizer"']),
        ({"compute": {"fuse": "optimizer"}}, ["compute.fuse", "a list of strings"]),
        ({"compute": {"fuse": ["norm", "norm"]}}, ["compute.fuse", "twice"]),
        ({"compute": {"compile": True}}, ["compute.compile = true", '"blocks"']),
        ({"compute": {"bucket_mib": 2}}, ["communication.bucket_mib"]),
        ({"data": {"workers": -1}}, ["data.workers = -1", "0 or more"]),
        ({"data": {"workers": True}}, ["data.workers = true"]),
        ({"data": {"prefetch": 2}}, ["data.prefetch", "data.workers"]),
        ({"communication": {"bucket_mib": 0}}, ["communication.bucket_mib", "more than 0"]),
        ({"communication": {"bucket_mib": float("nan")}}, ["communication.bucket_mib"]),
        ({"zero": {"stage": 4}}, ["zero.stage = 4", "0 or 1 or 2 or 3"]),
        ({"zero": {"stage": True}}, ["zero.stage = true"]),
        ({"engine": "jax"}, ["engine", '"torch"']),
        ({"bf16": {"enabled": True}}, ['precision.dtype = "bf16"']),
        ({"zero_optimization": {"stage": 3}}, ["zero.stage"]),
        ({"gradient_accumulation_steps": 4}, ["accumulation.steps"]),
        ({"communication": {"bucket_cap_mb": 25}}, ["communication.bucket_mib"]),
        ({"precision": {"loss_scale": "auto", "dtype": "bf16"}}, ["precision.loss_scale", "fp16"]),
        ({"checkpointing": {"budget_bytes": 3}}, ["checkpointing.budget_bytes", "checkpointing.mode"]),
        ({"offload": {"optimizer": "nvme"}}, ["offload.path"]),
        (
            {"accumulation": {"steps": 2, "micro_batch": 4}},
            ["accumulation.steps", "accumulation.micro_batch"],
        ),
        ({"nonsense": {"x": 1}}, ["nonsense", "the tables are"]),
    ],
)
def test_what_is_wrong_where_and_what_to_do(tables: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        Config.from_dict(tables)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_table_is_no_key_and_a_tile_holds_something() -> None:
    with pytest.raises(
        UsageError, match=r"^the change: zero is a table .*set one of its keys, as zero\.stage$"
    ):
        Config().with_changes({"zero": 3})
    with pytest.raises(UsageError, match=r"^offload\.tile_mib = .*it takes 0\.001 or more$"):
        Config().with_changes({"offload.tile_mib": 1e-300})


def test_an_unknown_change_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"precision\.dtpye.*did you mean precision\.dtype"):
        Config().with_changes({"precision.dtpye": "bf16"})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match="cannot read"):
        Config.from_toml(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[precision\n")
    with pytest.raises(UnreadableInput, match="not TOML"):
        Config.from_toml(broken)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[precision]\ndtyp = "bf16"\n')
    with pytest.raises(UsageError, match=r"wrong\.toml"):
        Config.from_toml(wrong)
    for endless in ("a = " + "[" * 100_000, f"[zero]\nstage = 1{'0' * 6000}\n"):
        broken.write_text(endless)
        with pytest.raises(UnreadableInput, match="not TOML"):
            Config.from_toml(broken)
    with pytest.raises(UnreadableInput):
        Config.from_toml("a\0b")


@pytest.mark.parametrize("key", ["communication.bucket_mib", "offload.tile_mib", "precision.loss_scale"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite(key: str, value: float) -> None:
    with pytest.raises(UsageError, match=rf"^{key} = (inf|nan): it takes a finite number"):
        Config().with_changes({key: value})


def test_names_that_are_no_strings_are_unknown_keys() -> None:
    for take in (Config.from_dict, Config().with_changes):
        with pytest.raises(UsageError, match="no key 1"):
            take({1: 2})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"^parallel\.plan .*keys of a table are strings"):
        Config().with_changes({"parallel.plan": {1: "row"}})


_values = {
    "precision.dtype": st.sampled_from(["bf16", "fp16", "fp32"]),
    "precision.tf32": st.booleans(),
    "compute.attention": st.sampled_from(["sdpa", "flash", "auto"]),
    "compute.fuse": st.lists(st.sampled_from(["norm", "mlp", "optimizer"]), min_size=1, unique=True),
    "data.workers": st.integers(1, 64),
    "accumulation.steps": st.integers(2, 512),
    "communication.bucket_mib": st.floats(0.001, 1e6),
    "parallel.schedule": st.text(min_size=1),
    "offload.path": st.text(min_size=1),
    "checkpointing.modules": st.lists(st.text(), min_size=1, max_size=4, unique=True),
}


@given(st.fixed_dictionaries({}, optional=_values))
def test_every_configuration_survives_toml(changes: dict[str, Any]) -> None:
    config = Config().with_changes(changes)
    assert Config.from_dict(tomllib.loads(config.to_toml())) == config
    assert config.changes() == changes


def test_what_the_runtime_applies_is_what_techniques_answer_for() -> None:
    assert {key for technique in techniques() for key in technique.KEYS} == APPLIED
    assert set(Config.keys()) >= APPLIED


def test_configuring_imports_no_torch() -> None:
    code = (
        "import sys; from trine.optim.config import Config; Config.from_dict({'precision': {'dtype': 'bf16'}});"
        "import trine; trine.Config; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("value", [b"2", object(), {2}, 2j])
def test_values_that_toml_cannot_say_name_their_key(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^parallel\.tensor takes a whole number, not a "):
        Config().with_changes({"parallel.tensor": value})
    with pytest.raises(UsageError, match=r"^engine takes "):
        Config.from_dict({"engine": value})
    with pytest.raises(
        UsageError, match=r"^data\.shape_buckets takes a list .*, and is given one that holds a "
    ):
        Config().with_changes({"data.shape_buckets": [16, value]})
