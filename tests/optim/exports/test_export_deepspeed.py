"""Exports to DeepSpeed, and to Megatron-DeepSpeed's JSON: read by DeepSpeed itself, and back by our own importer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import export_cases as cases
import pytest
from hypothesis import given, settings

from trine.optim.config import Config
from trine.optim.exports import Exported, write
from trine.optim.exports._reading import exported_of_layout


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    pytest.importorskip("deepspeed", reason="exports are read by DeepSpeed; install trine[deepspeed]")
    from trine.optim.runtime.deepspeed_engine import imported

    return imported("cpu")


def tables(exported: Exported, name: str = "deepspeed") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(write(name, exported).files["ds_config.json"])
    return found


def read_by_deepspeed(found: dict[str, Any], data_ranks: int) -> Any:
    """As its engine does, which asks the ranks of a pipeline's or a tensor grid for those that see different batches."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    grid = SimpleNamespace(get_data_parallel_world_size=lambda: data_ranks)
    with patch.object(comm, "get_rank", lambda: 0):
        return DeepSpeedConfig(found, mpu=grid)


def test_a_plan_word_by_word() -> None:
    exported = exported_of_layout(
        {
            "data": 4,
            "tensor": 2,
            "context": 2,
            "zero_stage": 1,
            "micro_batch": 2,
            "microbatches": 8,
            "optimizer_offload": "cpu",
            "bucket_bytes": 100 * 2**20,
        },
        cases.DENSE,
    )
    assert tables(exported) == {
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 50 * 2**20,  # elements of two bytes
            "offload_optimizer": {"device": "cpu"},
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "sequence_parallel_size": 2,
        "tensor_parallel": {"autotp_size": 2},
    }


@pytest.mark.parametrize("name", ["deepspeed", "megatron-deepspeed"])
def test_deepspeed_reads_what_the_layout_says(deepspeed: Any, name: str) -> None:
    exported = exported_of_layout(
        {"data": 8, "zero_stage": 3, "micro_batch": 2, "microbatches": 4, "parameter_offload": "cpu"},
        cases.DENSE,
    )
    found = read_by_deepspeed(tables(exported, name), 8)
    assert found.train_batch_size == 64
    assert found.train_micro_batch_size_per_gpu == 2
    assert found.gradient_accumulation_steps == 4
    assert found.zero_optimization_stage == 3
    assert found.zero_config.offload_param.device == "cpu"
    assert found.bfloat16_config.enabled and not found.float16_config.enabled
    assert found.gradient_clipping == 0.0


@settings(max_examples=15)
@given(exported=cases.exported_layouts())
@pytest.mark.parametrize("name", ["deepspeed", "megatron-deepspeed"])
def test_deepspeed_takes_any_layout(deepspeed: Any, name: str, exported: Exported) -> None:
    assert exported.data_ranks is not None
    found = read_by_deepspeed(tables(exported, name), exported.data_ranks)
    assert found.train_batch_size == exported.batch.whole
    stage = exported.config.zero.stage
    piped = name == "megatron-deepspeed" and exported.config.parallel.pipeline > 1
    assert found.zero_optimization_stage == (min(stage, 1) if piped else stage)


def back(config: Config) -> Config:
    return Config.from_deepspeed(json.loads(write("deepspeed", Exported(config)).text))


@settings(max_examples=60)
@given(cases.configurations())
def test_there_and_back_is_what_it_says(config: Config) -> None:
    exported = Exported(config)
    expected = cases.sayable(exported, write("deepspeed", exported))
    # Their engine is ours to name, and ranks that are left over are theirs; communication overlaps by itself, and from stage
    # 2 on in blocks instead of buckets (``trine.optim.dialects.deepspeed_pairs``); one step is none.
    silent: dict[str, Any] = {"engine": "torch", "parallel.data": "auto"}
    if config.precision.dtype == "fp32":  # which it says by nothing
        silent["precision.dtype"] = None
    if config.precision.loss_scale == "auto":  # as is its default
        silent["precision.loss_scale"] = None
    if config.precision.master_weights:  # gradients travel in the parameters' type
        silent["communication.compression"] = "none"
    if config.parallel.pipeline > 1 and config.parallel.microbatches:  # as it is written, and named
        silent["accumulation.steps"] = config.parallel.microbatches
    if config.communication.overlap or config.zero.stage >= 2:
        silent["communication.overlap"] = None
    if config.zero.stage >= 2:
        silent["communication.bucket_mib"] = None
    assert back(config) == expected.with_changes(silent)


def test_there_and_back_with_degrees_and_compiled_blocks() -> None:
    config = Config().with_changes(
        {
            "parallel.tensor": 4,
            "parallel.expert": 8,
            "compute.compile": "blocks",
            "zero.stage": 1,
            "zero.reshard_after_forward": None,
        }
    )
    assert back(config) == config
    context = Config().with_changes({"parallel.context": 2, "zero.stage": 3, "zero.reshard_after_forward": 8})
    assert back(context) == context


def test_what_deepspeed_cannot_say_is_named_without_repeating_itself() -> None:
    config = Config().with_changes(
        {
            "zero.reshard_after_forward": True,
            "zero.stage": 2,
            "communication.compression": "powersgd",
            "checkpointing.mode": "full",
            "parallel.pipeline": 2,
            "communication.bucket_mib": "auto",
            "parallel.shard": 4,
            "offload.optimizer": "auto",
        }
    )
    written = write("deepspeed", Exported(config))
    assert cases.named(written) >= set(config.changes()) - {"zero.stage"}
    for line in written.cannot:
        assert "or train with" not in line and line.count(" = ") <= 3, line
    assert "zero_hpz_partition_size" not in written.text and "offload_optimizer" not in written.text
