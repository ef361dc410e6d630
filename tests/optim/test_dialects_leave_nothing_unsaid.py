"""Every key of DeepSpeed's and Accelerate's files is translated, to do, left out with a reason, or an error. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trine.optim.dialects import Imported, accelerate_keys, deepspeed_keys, read_accelerate, read_deepspeed
from trine.optim.dialects.rows import Row
from trine.record.errors import TrineError, UsageError

KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")

#: None of them is a key's default, but for what :data:`DEFAULTS` names.
VALUES: tuple[Any, ...] = (
    True,
    2,
    3.5,
    "bf16",
    "cpu",
    "INDUCTOR",
    "TRUE",
    "a word",
    ["a"],
    {"enabled": True},
)
DEFAULTS: set[tuple[str, Any]] = {
    ("deepspeed_config.zero_stage", 2),
    ("num_processes", 2),  # no key of these files depends on ranks by itself
    ("fsdp_config.fsdp_version", 2),  # both versions shard all
    ("fsdp_config.fsdp_reshard_after_forward", "TRUE"),
}


def outcome(read: Callable[[Any], Imported], tables: Mapping[str, Any]) -> Any:
    """All that a reader says of a file, to be compared."""
    try:
        found = read(tables)
    except TrineError as error:
        return str(error)
    return found.config.changes(), found.arguments, found.to_do, found.notes


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def unsaid(
    read: Callable[[Any], Imported], rows: tuple[Row, ...], base: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Keys and values that change nothing of what a reader says of ``base`` alone."""
    alone = outcome(read, base)
    assert not isinstance(alone, str), alone
    return [
        (row.path, value)
        for row in rows
        for value in VALUES
        if row.path not in base and outcome(read, {**base, **nested(row.path, value)}) == alone
    ]


def test_every_key_of_deepspeeds() -> None:
    found = unsaid(read_deepspeed, deepspeed_keys.ROWS, {})
    assert [each for each in found if not asks_for_nothing(deepspeed_keys.ROWS_BY_PATH, *each)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_accelerates(kind: str) -> None:
    found = unsaid(read_accelerate, accelerate_keys.ROWS, {"distributed_type": kind})
    found = [each for each in found if not asks_for_nothing(accelerate_keys.ROWS_BY_PATH, *each)]
    assert [(path, value) for path, value in found if not is_default(path, value)] == []


def is_default(path: str, value: Any) -> bool:
    return any(
        path == name and value == default and type(value) is type(default) for name, default in DEFAULTS
    )


def asks_for_nothing(rows: Mapping[str, Row], path: str, value: Any) -> bool:
    """A refused key whose value is harmless."""
    row = rows[path]
    return row.does == "refused" and any(value == each and type(value) is type(each) for each in row.harmless)


# --- Accelerate --------------------------------------------------------------------------------


def accelerated(**tables: Any) -> dict[str, Any]:
    return read_accelerate(tables).config.changes()


def said(**tables: Any) -> str:
    with pytest.raises(UsageError) as raised:
        read_accelerate(tables)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_mixed_precision_under_deepspeed_is_that_of_accelerates_plugin() -> None:
    masters = {"precision.master_weights": True, "zero.stage": 2}
    for word, changes in {
        "no": {"zero.stage": 2},
        "fp16": {"precision.dtype": "fp16", **masters},
        "bf16": {"precision.dtype": "bf16", **masters},
        "fp8": {"precision.dtype": "bf16", "precision.float8": True, **masters},
    }.items():
        assert accelerated(distributed_type="DEEPSPEED", mixed_precision=word) == changes


@pytest.mark.parametrize("kind", KINDS)
def test_a_precision_that_there_is_none_of_is_an_error_under_every_kind(kind: str) -> None:
    assert 'mixed_precision = "bf61": it takes' in said(distributed_type=kind, mixed_precision="bf61")


@pytest.fixture
def accelerates_plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``plugin(fields, precision, file)``: Accelerate's own, in the environment that ``accelerate launch`` makes."""
    pytest.importorskip("accelerate", reason="compared with Accelerate; install trine[accelerate]")
    pytest.importorskip(
        "deepspeed", reason="Accelerate's plugin asks for DeepSpeed; install trine[deepspeed]"
    )
    from accelerate.utils import DeepSpeedPlugin

    def made(fields: list[str], precision: str, file: Path | None) -> dict[str, Any]:
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", ",".join(fields))
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none" if file is None else str(file))
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(precision)
        described: dict[str, Any] = plugin.deepspeed_config
        return described

    return made


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16", "fp8"])
def test_the_plugin_itself_makes_the_same_of_precisions(precision: str, accelerates_plugin: Any) -> None:
    described = accelerates_plugin([], precision, None)
    types = [name for name in ("bf16", "fp16") if described[name]["enabled"]]
    taken = accelerated(distributed_type="DEEPSPEED", mixed_precision=precision)
    assert types == [taken[key] for key in taken if key == "precision.dtype"]
    assert described["zero_optimization"]["stage"] == taken["zero.stage"]


BESIDE: list[dict[str, Any]] = [
    {"zero_stage": 3},
    {"gradient_clipping": 0.5},
    {"gradient_accumulation_steps": 4},
    {"offload_optimizer_device": "cpu"},
    {"offload_param_nvme_path": "/disk"},
]


@pytest.mark.parametrize("inline", BESIDE, ids=lambda inline: next(iter(inline)))
def test_keys_beside_deepspeeds_file_are_refused_as_accelerate_does(
    inline: dict[str, Any], tmp_path: Path, accelerates_plugin: Any
) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}')
    with pytest.raises(ValueError, match="deepspeed_config_file"):
        accelerates_plugin(["deepspeed_config_file", *inline], "no", file)
    words = said(
        distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": str(file), **inline}
    )
    assert f"deepspeed_config.{next(iter(inline))} beside deepspeed_config_file" in words
    assert f"say it in {file} and take it out here" in words


def test_precision_beside_deepspeeds_file_too(tmp_path: Path, accelerates_plugin: Any) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}')
    tables = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(file)}}
    with pytest.raises(ValueError, match="deepspeed_config_file"):
        accelerates_plugin(["deepspeed_config_file", "mixed_precision"], "bf16", file)
    assert "mixed_precision beside deepspeed_config_file" in said(**tables, mixed_precision="bf16")
    assert accelerated(**tables) == accelerated(**tables, mixed_precision="no") == {"zero.stage": 1}
    tables["deepspeed_config"] = {"deepspeed_config_file": 3}
    assert "takes the path of DeepSpeed's JSON file" in said(**tables)
    tables["deepspeed_config"] = {"deepspeed_config_file": "none", "zero_stage": 3}
    assert accelerated(**tables) == {"zero.stage": 3}


@pytest.mark.parametrize(
    ("name", "table", "of"),
    [
        ("fsdp_config", {"fsdp_sharding_strategy": "FULL_SHARD"}, "FSDP"),
        ("deepspeed_config", {"zero_stage": 3}, "DEEPSPEED"),
    ],
)
def test_a_table_of_another_kind_is_left_out_with_a_reason(name: str, table: dict[str, Any], of: str) -> None:
    for kind in KINDS:
        imported = read_accelerate({"distributed_type": kind, name: table})
        reason = f"left out: {name}.{next(iter(table))} (only for distributed_type = {of})"
        assert (reason in imported.notes) == (kind != of)
        alone = read_accelerate({"distributed_type": kind})
        assert kind == of or imported.config == alone.config


@pytest.mark.parametrize(
    ("fsdp", "stage", "unused"),
    [
        ({"version": 2, "sharding_strategy": "SHARD_GRAD_OP"}, 3, "sharding_strategy"),
        ({"version": 2, "reshard_after_forward": "no"}, 2, None),
        ({"version": 1, "reshard_after_forward": False}, 3, "reshard_after_forward"),
        (
            {"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": "FULL_SHARD"},
            2,
            "reshard_after_forward",
        ),
        ({"version": 1, "sharding_strategy": "SHARD_GRAD_OP"}, 2, None),
    ],
)
def test_the_key_of_the_other_version_of_fsdp(fsdp: dict[str, Any], stage: int, unused: str | None) -> None:
    imported = read_accelerate({"distributed_type": "FSDP", "fsdp_config": fsdp})
    assert imported.config.changes() == {"zero.stage": stage}
    assert any(f"fsdp_{unused}" in note for note in imported.notes) == (unused is not None)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"},
            },
            "it takes true or false",
        ),
        ({"fsdp_config": {"version": 1, "fsdp_version": 2}}, "with and without fsdp_: keep one"),
        ({"fp16": True, "mixed_precision": "bf16"}, "keep one of them"),
        ({"dynamo_backend": "INDUCTOR", "dynamo_config": {"mode": "default"}}, "keep one of them"),
        ({"parallelism_config": {"tp_size": -1}}, "tp_size = -1: it takes 1 or more"),
        ({"parallelism_config": {"cp_size": 2, "sp_size": 2}}, "exclude each other"),
        ({"num_processes": 0}, "num_processes = 0"),
    ],
)
def test_what_accelerate_refuses_or_would_drop_is_named(tables: dict[str, Any], words: str) -> None:
    assert words in said(**tables)


def test_what_asks_for_nothing_here_still_says_so() -> None:
    """Unquoted words of YAML are what they were meant to be, and -1 processes are the launcher's."""
    assert accelerated(distributed_type=False, mixed_precision=False, dynamo_backend=False) == {}
    assert (
        accelerated(fp16=True)
        == accelerated(fp16=True, mixed_precision="fp16")
        == {"precision.dtype": "fp16"}
    )
    assert accelerated(num_processes=-1, fp16=False, mixed_precision="bf16") == {"precision.dtype": "bf16"}
    notes = read_accelerate({"dynamo_config": {"backend": "NO", "mode": "max-autotune"}}).notes
    assert notes == ("left out: dynamo_config.dynamo_mode (nothing is compiled: dynamo_backend is NO)",)


# --- DeepSpeed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "note"),
    [
        ({"fp16": {"enabled": False, "loss_scale": 1024}}, "fp16.loss_scale (fp16.enabled is off)"),
        ({"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}, "torch_autocast.dtype"),
        ({"bf16": {"enabled": True}, "communication_data_type": "bf16"}, "communication_data_type"),
        ({"communication_data_type": "fp32"}, "communication_data_type (gradients travel in float32)"),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, "bf16.check_grad_overflow"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/disk"}}},
            "offload_param.nvme_path (nothing is offloaded to disk)",
        ),
        ({"expert_parallel": {"enabled": False, "autoep_size": 2}}, "expert_parallel.enabled is off"),
        ({"compile": {"deepcompile": False, "offload_activation": True}}, "compile.offload_activation"),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, "optimizer.params.torch_adam"),
        ({"zero_optimization": "auto"}, 'zero_optimization = "auto" is left to the program'),
    ],
)
def test_what_has_no_effect_in_deepspeed_is_said_to_be_left_out(tables: dict[str, Any], note: str) -> None:
    imported = read_deepspeed(tables)
    assert any(note in each for each in imported.notes), imported.notes


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"optimizer": "AdamW"}, 'optimizer = "AdamW": it takes a table'),
        ({"scheduler": ["WarmupLR"]}, "scheduler = "),
        ({"compile": True}, "compile = true: it takes a table"),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": "2"}},
            'autoep_size = "2": it takes a whole number',
        ),
        ({"bf16": {}, "bfloat16": {"enabled": True}}, "bfloat16 is the old name of bf16"),
        ({"zero_optimization": {"cpu_offload": 1}}, '"offload_optimizer": {"device": "cpu"}'),
    ],
)
def test_what_deepspeed_would_not_read_so_is_an_error(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_deepspeed(tables)
    assert words in str(raised.value)


def test_ranks_that_share_samples_count_once_in_a_batch() -> None:
    """DeepSpeed counts a batch over data-parallel ranks (``DeepSpeedConfig.world_size``)."""
    batch = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    assert (
        read_deepspeed({**batch, "sequence_parallel_size": 2}, ranks=8).config.accumulation.global_batch == 16
    )
    del batch["train_batch_size"]
    shared = json.loads(json.dumps({**batch, "tensor_parallel": {"autotp_size": 4}}))
    assert read_deepspeed(shared, ranks=8).config.accumulation.global_batch == 8
    assert read_deepspeed(batch, ranks=8).config.accumulation.global_batch == 32
