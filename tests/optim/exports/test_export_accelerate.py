"""Exports to Accelerate: read by Accelerate's own loader, launcher and plugins, and back by our own importer."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import export_cases as cases
import pytest
from hypothesis import HealthCheck, assume, given, settings

from trine.optim.config import Config
from trine.optim.exports import Exported, write
from trine.optim.exports._reading import exported_of_layout
from trine.optim.plan.constants import stack_named

yaml = pytest.importorskip("yaml")


def launched(exported: Exported, folder: Path) -> tuple[Any, dict[str, str]]:
    """What ``accelerate launch --config_file`` makes of the file: its arguments, and the processes' environment."""
    pytest.importorskip("accelerate", reason="exports are read by Accelerate; install trine[test]")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = folder / "accelerate.yaml"
    path.write_text(write("accelerate", exported).text)
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    before = dict(os.environ)
    try:
        return arguments, prepare_multi_gpu_env(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_fsdp_by_accelerates_own_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = exported_of_layout(
        {"data": 8, "shard": 4, "zero_stage": 3, "tensor": 2, "context": 2, "recompute": "full"},
        cases.DENSE,
        8,
    )
    arguments, environment = launched(exported, tmp_path)
    assert arguments.use_fsdp and arguments.num_processes == 32 and arguments.num_machines == 4
    assert arguments.mixed_precision == "bf16"
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.activation_checkpointing is True
    degrees = ParallelismConfig()
    assert (degrees.dp_replicate_size, degrees.dp_shard_size) == (2, 4)
    assert (degrees.tp_size, degrees.cp_size, degrees.total_size) == (2, 2, 32)


def test_megatron_by_accelerates_own_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = exported_of_layout(
        {
            "data": 4,
            "tensor": 2,
            "sequence": 1,
            "pipeline": 4,
            "expert": 4,
            "zero_stage": 1,
            "microbatches": 8,
            "recompute": "budget",
            "recomputed_layers": 5,
        },
        cases.MIXTURE,
        8,
    )
    arguments, environment = launched(exported, tmp_path)
    assert arguments.use_megatron_lm and arguments.num_processes == 32
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    from accelerate.utils import MegatronLMPlugin

    plugin = MegatronLMPlugin()
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches) == (2, 4, 8)
    assert plugin.sequence_parallelism and plugin.use_distributed_optimizer
    assert plugin.expert_model_parallel_size == 4 and plugin.expert_tensor_parallel_size == 1
    assert (plugin.recompute_granularity, plugin.recompute_method) == ("full", "block")
    assert plugin.recompute_num_layers == 5


def test_state_of_one_data_rank_is_moved_as_planned(tmp_path: Path) -> None:
    row = {"tensor": 8, "optimizer_offload": "cpu"}
    arguments, environment = launched(exported_of_layout(row, cases.DENSE, 8), tmp_path)
    assert arguments.use_megatron_lm
    assert environment["MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD"] == "True"
    assert environment["MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER"] == "True"
    alone, _ = launched(exported_of_layout({"optimizer_offload": "cpu"}, cases.DENSE, 8), tmp_path)
    assert alone.use_deepspeed and (alone.zero_stage, alone.offload_optimizer_device) == (1, "cpu")


def test_experts_are_cut_as_the_plan_cut_them(tmp_path: Path) -> None:
    row = {"data": 4, "tensor": 2, "sequence": 1, "pipeline": 2, "expert": 4, "microbatches": 4}
    for stack, parts in (("megatron-core", 2), ("megatron-bridge", 1)):
        exported = exported_of_layout(row, cases.MIXTURE, 8, stack_named(stack))
        arguments, _ = launched(exported, tmp_path)
        assert arguments.megatron_lm_expert_tensor_parallel_size == parts


def test_deepspeed_inline(tmp_path: Path) -> None:
    exported = exported_of_layout(
        {"data": 16, "zero_stage": 1, "microbatches": 4, "optimizer_offload": "cpu"}, cases.DENSE, 8
    )
    arguments, _ = launched(exported, tmp_path)
    assert arguments.use_deepspeed and arguments.zero_stage == 1
    assert arguments.offload_optimizer_device == "cpu" and arguments.gradient_accumulation_steps == 4


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exported=cases.exported_layouts())
def test_the_launcher_takes_any_layout(tmp_path: Path, exported: Exported) -> None:
    assume(not exported.config.precision.float8 or find_spec("torchao"))  # Accelerate asks for it at once
    arguments, _ = launched(exported, tmp_path)
    assert arguments.num_processes == exported.devices
    if exported.devices != 1:
        kinds = (arguments.use_fsdp, arguments.use_deepspeed, arguments.use_megatron_lm, arguments.multi_gpu)
        assert sum(map(bool, kinds)) == 1


@settings(max_examples=60)
@given(cases.configurations())
def test_there_and_back_is_what_it_says(config: Config) -> None:
    exported = Exported(config)
    written = write("accelerate", exported)
    tables = yaml.safe_load(written.text)
    if tables["distributed_type"] == "MEGATRON_LM":
        return  # which our importer refuses, with what to write instead
    back = Config.from_accelerate(tables)
    expected = cases.sayable(exported, written)
    silent: dict[str, Any] = {"engine": "torch", "parallel.data": "auto", "parallel.loss": False}
    if config.precision.dtype == "fp32":
        silent |= {"precision.dtype": None, "precision.master_weights": False}
    if config.precision.loss_scale == "auto":
        silent["precision.loss_scale"] = None  # Accelerate's scaler moves by itself
    if tables["distributed_type"] == "FSDP":
        silent["zero.reshard_after_forward"] = None  # said by the stage
        if config.zero.stage in (0, 1):
            silent["zero.stage"] = 2  # as it is written, and named
        if config.zero.stage == 3 and config.zero.reshard_after_forward is False:
            silent["zero.stage"] = 2
    low = config.precision.dtype in ("bf16", "fp16")
    if tables["distributed_type"] in ("FSDP", "DEEPSPEED") and low:
        silent["precision.master_weights"] = True  # named where the configuration has it otherwise
    assert back == expected.with_changes(silent)


def test_state_on_a_disk_and_compiled_blocks_there_and_back() -> None:
    config = Config().with_changes(
        {
            "zero.stage": 3,
            "offload.optimizer": "nvme",
            "offload.parameters": "cpu",
            "offload.path": "/disk: 1",
            "compute.compile": "blocks",
            "precision.dtype": "bf16",
            "precision.master_weights": True,
        }
    )
    written = write("accelerate", Exported(config, devices=8))
    assert cases.named(written) == set()
    assert Config.from_accelerate(yaml.safe_load(written.text)) == config


def test_yaml_is_what_a_yaml_reader_finds() -> None:
    from trine.optim.exports._text import yaml_text

    tables = {
        "a": "no",
        "b": "yes",
        "c": {"d": "1.0", "e": 2, "f": True, "g": ""},
        "h": "x: #y\n",
        "i": {},
        "j": 0.5,
    }
    assert yaml.safe_load(yaml_text(tables)) == tables
