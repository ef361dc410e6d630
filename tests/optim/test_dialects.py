"""DeepSpeed's and Accelerate's configurations in our words, and ours in DeepSpeed's. Imports no torch."""

from __future__ import annotations

import json
import logging
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.optim.config import Config
from trine.optim.dialects import read_accelerate, read_deepspeed, to_deepspeed
from trine.optim.techniques import require_applicable
from trine.record.errors import TrineError, UnreadableInput, UsageError

pytest.importorskip("yaml", reason="Accelerate's files are YAML; install trine[accelerate]")

#: As people write them: for the Trainer, with offload; for pre-training; for fp16.
TRAINER = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
PRETRAINING = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 8,
    "fp16": {"enabled": True, "loss_scale": 1024},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 50000000, "allgather_bucket_size": 5e8},
    "communication_data_type": "fp16",
    "tensorboard": {"enabled": True, "output_path": "out"},
}


def taken(source: Any, **how: Any) -> dict[str, Any]:
    return read_deepspeed(source, **how).config.changes()


def said(source: Any, read: Any = read_deepspeed, **how: Any) -> str:
    with pytest.raises(TrineError) as raised:
        read(source, **how)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_a_trainers_file() -> None:
    imported = read_deepspeed(TRAINER)
    assert imported.config.changes() == {
        "precision.dtype": "bf16",
        "precision.master_weights": True,
        "zero.stage": 3,
        "offload.optimizer": "cpu",
        "offload.parameters": "cpu",
    }
    assert imported.arguments == {}  # "auto" clipping is the Trainer's to fill in
    assert any("torch.optim.AdamW(model.parameters(), weight_decay=0.1)" in line for line in imported.to_do)
    assert any("scheduler=" in line for line in imported.to_do)
    require_applicable(imported.config)


def test_a_file_for_pretraining() -> None:
    imported = read_deepspeed(PRETRAINING)
    assert imported.config.changes() == {
        "precision.dtype": "fp16",
        "precision.master_weights": True,
        "precision.loss_scale": 1024.0,
        "accumulation.global_batch": 256,
        "accumulation.micro_batch": 8,
        "zero.stage": 1,
        "communication.bucket_mib": 50000000 * 2 / 2**20,
    }
    assert imported.arguments == {"clip_norm": 0.5}
    require_applicable(imported.config)


def test_without_clipping_deepspeed_clips_at_one_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trine"):
        config = Config.from_deepspeed({"zero_optimization": {"stage": 2}})
    assert config == Config().with_changes({"zero.stage": 2})
    assert "pass clip_norm=1.0 to trine.optimize" in caplog.text
    assert read_deepspeed({"gradient_clipping": 0.0}).to_do == ()


@pytest.mark.parametrize(
    ("batch", "ranks", "changes"),
    [
        (
            (64, 8, 2),
            None,
            {"accumulation.global_batch": 64, "accumulation.micro_batch": 8, "accumulation.steps": 2},
        ),
        ((64, 8, None), None, {"accumulation.global_batch": 64, "accumulation.micro_batch": 8}),
        ((64, None, 4), None, {"accumulation.global_batch": 64, "accumulation.steps": 4}),
        (
            (None, 8, 4),
            2,
            {"accumulation.global_batch": 64, "accumulation.micro_batch": 8, "accumulation.steps": 4},
        ),
        ((None, 8, 4), None, {"accumulation.steps": 4}),
        ((None, 8, 1), None, {"accumulation.micro_batch": 8}),
        ((None, None, 4), None, {"accumulation.steps": 4}),
    ],
)
def test_two_of_the_three_batch_keys_are_enough(
    batch: tuple[int | None, ...], ranks: int | None, changes: dict[str, Any]
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    tables = {name: value for name, value in zip(names, batch, strict=True) if value is not None}
    imported = read_deepspeed(tables | {"gradient_clipping": 0}, ranks=ranks)
    assert imported.config.changes() == changes
    assert bool(imported.to_do) == (batch == (None, 8, 4) and ranks is None)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"zero_optimisation": {}}, "no key zero_optimisation; did you mean zero_optimization"),
        ({"zero_optimization": {"stge": 1}}, "did you mean zero_optimization.stage?"),
        ({"stage": 1}, "did you mean zero_optimization.stage?"),
        ({"flops_profiler": {"enable": True}}, "did you mean flops_profiler.enabled?"),
        ({"zero_optimization": {"stage": 4}}, "zero.stage = 4: it takes 0 or 1 or 2 or 3"),
        ({"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage = "two": it takes a whole number'),
        ({"zero_optimization": 3}, "takes a table of keys"),
        ({"amp": {"enabled": True}}, "amp was removed from DeepSpeed"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "parallel.shard = N"),
        ({"optimizer": {"type": "OneBitAdam"}}, 'communication.compression = "onebit"'),
        ({"gradient_allreduce_op": "sum"}, "averaged over ranks"),
        ({"pipeline": {"stages": 4}}, "parallel.pipeline"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled and fp16.enabled exclude"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, 'offload.activations = "cpu"'),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            "take the key out, and with parallel.tensor",
        ),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3},
            "8 × 3",
        ),
        ({"amp": {}, "nebula": {}, "x": 1}, "nebula"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}, '"none", "cpu" or "nvme"'),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload.path"),
        ({"torch_autocast": {"enabled": True}}, "say which in torch_autocast.dtype"),
        ({"autotuning": {"enabled": True}}, 'accumulation.micro_batch = "auto"'),
    ],
)
def test_what_cannot_be_taken_over_is_named_with_the_way_out(tables: dict[str, Any], words: str) -> None:
    assert words in said(tables)


def test_contradicting_batches_are_named_for_the_ranks_they_are_for() -> None:
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    assert taken(batch, ranks=4)["accumulation.global_batch"] == 64
    assert "8 × 2 × 2 ranks" in said(batch, ranks=2)


@pytest.mark.parametrize(
    "tables",
    [
        {"autotuning": {"enabled": False}, "pipeline": {}, "zero_optimization": {"zenflow": None}},
        {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": False}}},
        {"bf16": {"enabled": False}, "fp16": {"enabled": False}, "zero_optimization": {"stage": 0}},
        {
            "tensor_parallel": {"autotp_size": 1},
            "sequence_parallel_size": 1,
            "compile": {"deepcompile": False},
        },
        {
            "zero_optimization": {
                "zero_hpz_partition_size": 1,
                "offload_optimizer": {"device": "none", "ratio": 1.0},
            }
        },
    ],
)
def test_what_asks_for_nothing_changes_nothing(tables: dict[str, Any]) -> None:
    assert taken(tables) == {}


def test_files_are_read_and_what_is_none_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(PRETRAINING))
    assert taken(path) == taken(PRETRAINING) == taken(str(path))
    path.write_text('{"bf16": {"enabled": true}, "bf16": {}}')
    assert "bf16 stands in it twice" in said(path)
    path.write_text("{")
    assert str(path) in said(path)
    with pytest.raises(UnreadableInput):
        read_deepspeed(tmp_path / "absent.json")
    with pytest.raises(UsageError):
        read_deepspeed(3)  # type: ignore[arg-type]
    path.write_text("[1]")
    assert "no table of keys" in said(path)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params = [1]: it takes a table"),
        ({"gradient_clipping": 10**400}, "gradient_clipping = 1000"),
        ({"zero_optimization": {"reduce_bucket_size": 10**400}}, "reduce_bucket_size = 1000"),
        ({"zero_optimization.stage": 3}, "no key zero_optimization.stage: tables are written inside"),
        ({"a\nb": 1}, "no key a\\nb"),
        ({1: 2}, "no key 1"),
    ],
)
def test_what_no_program_writes_is_named_in_one_line(tables: dict[str, Any], words: str) -> None:
    assert words in said(tables)


def test_files_nested_without_end_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"a":' * 100_000)
    assert "cannot be read as a DeepSpeed configuration" in said(path)
    assert "null byte" in said("a\0b")
    assert "cannot be read as an Accelerate configuration" in said(path, read_accelerate)


@pytest.mark.parametrize("table", [{"type": "Adam\n[zero]\nstage = 3"}, {"params": {"lr\n[zero]\nstage": 3}}])
@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_what_a_comment_quotes_stays_a_comment(name: str, table: dict[str, Any]) -> None:
    imported = read_deepspeed({name: table, "zero_optimization": {"stage": 1}})
    assert Config.from_dict(tomllib.loads(imported.to_toml())) == imported.config
    assert imported.config.changes() == {"zero.stage": 1}


# --- there and back ----------------------------------------------------------------------------

PRECISIONS = st.sampled_from(
    [
        {},
        {"precision.dtype": "bf16"},
        {"precision.dtype": "bf16", "precision.master_weights": True},
        {"precision.dtype": "fp16", "precision.master_weights": True},
        {"precision.dtype": "fp16", "precision.master_weights": True, "precision.loss_scale": 512.0},
    ]
)
BATCHES = st.sampled_from(
    [
        {},
        {"accumulation.steps": 4},
        {"accumulation.micro_batch": 3},
        {"accumulation.global_batch": 48, "accumulation.micro_batch": 3},
        {"accumulation.global_batch": 48, "accumulation.steps": 2},
        {"accumulation.global_batch": 48, "accumulation.steps": 2, "accumulation.micro_batch": 6},
    ]
)
SHARDS = st.one_of(
    st.just({}),
    st.builds(
        lambda elements, overlap: {
            "zero.stage": 1,
            "communication.bucket_mib": elements * 4 / 2**20,
            **({"communication.overlap": False} if overlap else {}),
            "offload.optimizer": "cpu",
        },
        st.integers(1, 10**9),
        st.booleans(),
    ),
    st.just({"zero.stage": 2, "offload.optimizer": "nvme", "offload.path": "/disk"}),
    st.builds(
        lambda size, quantized: {
            "zero.stage": 3,
            "zero.reshard_after_forward": size,
            **({"zero.quantized_weights": True, "communication.compression": "int8"} if quantized else {}),
            "offload.parameters": "cpu",
        },
        st.integers(2, 64),
        st.booleans(),
    ),
)


@settings(max_examples=150, deadline=None)
@given(PRECISIONS, BATCHES, SHARDS)
def test_there_and_back_is_the_same_configuration(
    precision: dict[str, Any], batch: dict[str, Any], shards: dict[str, Any]
) -> None:
    changes = {**precision, **batch, **shards}
    if precision.get("precision.master_weights") and "communication.bucket_mib" in changes:
        changes["communication.bucket_mib"] /= 2  # whole elements of two bytes
    config = Config().with_changes(changes)
    written = to_deepspeed(config)
    assert json.loads(json.dumps(written)) == written
    back = read_deepspeed(written)
    assert back.config == config
    assert back.to_do == () and back.arguments == {}


def test_compression_by_a_shorter_type_there_and_back() -> None:
    config = Config().with_changes({"zero.stage": 2, "communication.compression": "bf16"})
    assert read_deepspeed(to_deepspeed(config)).config == config


def test_every_other_key_of_ours_is_refused_by_name() -> None:
    from trine.optim.dialects.deepspeed_pairs import BESIDE, SAID
    from trine.optim.dialects.deepspeed_writing import no_counterpart

    assert set(Config.keys()) >= BESIDE | SAID
    others = sorted(set(Config.keys()) - BESIDE - SAID - {"engine"})
    assert "communication.algorithm" in others and "parallel.pipeline" in others
    for key in others:
        reason = no_counterpart(SimpleNamespace(changes=lambda key=key: {key: 1}))  # type: ignore[arg-type, misc]
        assert reason == f'{key} has no counterpart in DeepSpeed: take it out, or train with engine = "torch"'


# --- Accelerate --------------------------------------------------------------------------------

FSDP_2 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: 'true'
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_version: 2
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""


def accelerated(tables: Any, **how: Any) -> dict[str, Any]:
    return read_accelerate(tables, **how).config.changes()


def test_fsdp_of_the_second_version_with_parallel_degrees(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(FSDP_2)
    assert accelerated(path) == {
        "precision.dtype": "bf16",
        "precision.master_weights": True,
        "checkpointing.mode": "full",
        "zero.stage": 3,
        "parallel.data": 2,
        "parallel.shard": 2,
        "parallel.tensor": 2,
    }
    assert Config.from_accelerate(path).zero.stage == 3
    path.write_text("distributed_type: [")
    assert str(path) in said(path, read_accelerate)


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("FULL_SHARD", {"zero.stage": 3}),
        (1, {"zero.stage": 3}),
        ("SHARD_GRAD_OP", {"zero.stage": 2}),
        ("NO_SHARD", {}),
        ("HYBRID_SHARD", {"zero.stage": 3, "parallel.shard": "auto"}),
        ("5", {"zero.stage": 2, "parallel.shard": "auto"}),
    ],
)
def test_fsdp_of_the_first_version(strategy: Any, changes: dict[str, Any]) -> None:
    for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward", "sharding_strategy"):
        assert accelerated({"distributed_type": "FSDP", "fsdp_config": {key: strategy}}) == changes
    resharding = {"fsdp_version": 2, "fsdp_reshard_after_forward": "false"}
    assert accelerated({"distributed_type": "FSDP", "fsdp_config": resharding}) == {"zero.stage": 2}


def test_replicas_with_a_communication_hook_and_compiled_regions() -> None:
    tables = {
        "distributed_type": "MULTI_GPU",
        "mixed_precision": "fp16",
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True},
    }
    ddp = {
        "comm_hook": "power_sgd",
        "comm_state_option": {"matrix_approximation_rank": 2},
        "bucket_cap_mb": 50,
    }
    assert accelerated(tables, ddp=ddp) == {
        "precision.dtype": "fp16",
        "compute.compile": "blocks",
        "communication.bucket_mib": 50.0,
        "communication.compression": "powersgd",
        "communication.compression_rank": 2,
    }
    assert accelerated({"distributed_type": "NO", "dynamo_backend": "NO"}) == {}


def test_deepspeed_inline_and_in_a_file_of_its_own(tmp_path: Path) -> None:
    inline = {
        "zero_stage": 3,
        "gradient_accumulation_steps": 4,
        "offload_optimizer_device": "cpu",
        "gradient_clipping": 1.0,
    }
    imported = read_accelerate(
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": inline,
            "mixed_precision": "bf16",
            "num_processes": 4,
        }
    )
    expected = {
        "precision.dtype": "bf16",
        "precision.master_weights": True,
        "zero.stage": 3,
        "accumulation.steps": 4,
        "offload.optimizer": "cpu",
    }
    assert imported.config.changes() == expected
    assert imported.arguments == {"clip_norm": 1.0}
    (tmp_path / "ds.json").write_text(json.dumps(PRETRAINING))
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    assert accelerated(path) == taken(PRETRAINING)
    (tmp_path / "ds.json").write_text('{"amp": {"enabled": true}}')
    assert "ds.json" in said(path, read_accelerate) and "amp was removed" in said(path, read_accelerate)


def test_an_empty_tpu_env_as_accelerate_config_writes_it() -> None:
    assert accelerated({"distributed_type": "NO", "mixed_precision": "bf16", "tpu_env": []}) == {
        "precision.dtype": "bf16"
    }
    assert "TPUs" in said({"distributed_type": "NO", "tpu_env": ["XLA_FLAGS=1"]}, read_accelerate)


def test_a_scheduler_that_the_program_fills_in() -> None:
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    told = read_deepspeed({"train_batch_size": 8, "scheduler": warm_up}).to_do
    assert any("in the program (WarmupLR) and" in words for words in told)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"distributed_typ": "NO"}, "did you mean distributed_type?"),
        ({"distributed_type": "MEGATRON_LM"}, "parallel.tensor"),
        ({"distributed_type": "MULTI_NPU"}, "MULTI_GPU"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_stratgy": 1}},
            "there is no key fsdp_config.fsdp_stratgy",
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"sharding_strategy": "ALL"}}, "FULL_SHARD"),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, "INDUCTOR"),
        ({"mixed_precision": "fp4"}, '"bf16" or "fp8"'),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "SageMaker"),
        ({"tpu_use_cluster": True}, "TPUs"),
    ],
)
def test_what_of_accelerate_cannot_be_taken_over_is_named(tables: dict[str, Any], words: str) -> None:
    assert words in said(tables, read_accelerate)


def test_hooks_that_fail_in_pytorch_are_refused() -> None:
    assert "power_sgd" in said({}, read_accelerate, ddp={"comm_hook": "batched_power_sgd"})
    assert "bucket_cap_mb" in said({}, read_accelerate, ddp={"bucket_cap": 3})


def test_ranks_instead_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(FSDP_2)
    assert accelerated(path, ranks=16) == accelerated(path)
    inline = {"zero_stage": 1, "gradient_accumulation_steps": 4}
    tables = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": inline}
    assert accelerated(tables, ranks=4) == accelerated(tables)


@pytest.mark.parametrize("quoted", ["no", "off", "n", "0", "False", False, 0])
def test_quoted_words_for_no_are_no(quoted: Any) -> None:
    names = (
        "offload_params",
        "activation_checkpointing",
        "activation_checkpointing_offload",
        "forward_prefetch",
    )
    tables = {"distributed_type": "FSDP", "fsdp_config": {f"fsdp_{name}": quoted for name in names}}
    assert accelerated(tables) == {"zero.stage": 3}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": "maybe"}},
            "it takes true or false",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 3}},
            "fsdp_version = 3: it takes 1 or 2",
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {1: 2}}, "no key fsdp_config.fsdp_1"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": [1]},
            "deepspeed_config = [1]: it takes a table",
        ),
        ({"distributed_type": "x\ny"}, "distributed_type = X\\nY"),
    ],
)
def test_what_accelerate_never_writes_is_named_in_one_line(tables: dict[str, Any], words: str) -> None:
    assert words in said(tables, read_accelerate)


def test_values_that_nobody_can_write_whole_are_shortened(tmp_path: Path) -> None:
    path = tmp_path / "aliases.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path.write_text("\n".join([*lines, "mixed_precision: *a11"]))
    assert "mixed_precision = [[[" in said(path, read_accelerate)
