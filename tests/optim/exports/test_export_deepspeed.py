"""Exports to DeepSpeed, and to Megatron-DeepSpeed's JSON: read by DeepSpeed itself, and back by our own importer."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import export_cases as cases
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trine.optim.config import Config
from trine.optim.exports import Exported, write
from trine.optim.exports._reading import exported_of_layout
from trine.optim.exports.deepspeed import moves_checkpoints
from trine.record.errors import UsageError


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    pytest.importorskip("deepspeed", reason="exports are read by DeepSpeed; install trine[deepspeed]")
    from trine.optim.runtime.deepspeed_engine import imported

    return imported("cpu")


def tables(exported: Exported, name: str = "deepspeed") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(write(name, exported).files["ds_config.json"])
    return found


def read_by_deepspeed(found: dict[str, Any], exported: Exported, *, megatron: bool) -> Any:
    """As ``deepspeed.initialize`` does: by the data ranks of a grid, where Megatron or a PipelineModule brings one (the latter
    without sequence ranks), else by all ranks, or by those of the mesh that the file itself describes.
    """
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    devices = exported.devices
    assert exported.data_ranks is not None
    lost = exported.config.parallel.context > 1 and exported.config.parallel.pipeline > 1 and not megatron
    data_ranks = exported.data_ranks * (exported.config.parallel.context if lost else 1)
    grid = SimpleNamespace(get_data_parallel_world_size=lambda: data_ranks)
    mpu = grid if megatron or exported.config.parallel.pipeline > 1 else None
    sizes = (found.get("data_parallel_size"), found.get("sequence_parallel_size"))
    mesh = None
    if None not in sizes:
        assert prod(sizes) == devices  # a mesh of all ranks
        mesh = SimpleNamespace(get_group=lambda mesh_dim: sizes[0])
    with (
        patch.object(comm, "get_rank", lambda: 0),
        patch.object(comm, "get_world_size", lambda group=devices: group),
    ):
        return DeepSpeedConfig(found, mpu=mpu, mesh_device=mesh)


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
    found = read_by_deepspeed(tables(exported, name), exported, megatron=name != "deepspeed")
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
    parallel, megatron = exported.config.parallel, name == "megatron-deepspeed"
    found = read_by_deepspeed(tables(exported, name), exported, megatron=megatron)
    piped = parallel.pipeline > 1
    lost = parallel.context if piped and not megatron else 1
    batch = exported.batch
    assert batch.whole is not None and batch.micro is not None and batch.count is not None
    # Ranks that no grid knows count as data in what DeepSpeed derives.
    times = 1 if megatron or piped else parallel.tensor
    divides = batch.micro * batch.count % lost == 0
    assert (found.train_batch_size == batch.whole * times) == divides
    if lost == 1:
        assert found.train_micro_batch_size_per_gpu == batch.micro
        assert found.gradient_accumulation_steps == batch.count
    stage = exported.zero_stage
    assert found.zero_optimization_stage == (min(stage, 1) if piped and megatron else stage)


@settings(max_examples=15)
@given(exported=cases.exported_layouts(), compiled=st.booleans())
def test_deepspeed_folds_experts_and_tensors_of_any_layout(
    deepspeed: Any, exported: Exported, compiled: bool
) -> None:
    from deepspeed.module_inject.auto_ep_folding import build_folding_spec, validate_folding_global

    exported = replace(
        exported,
        config=exported.config.with_changes({"compute.compile": "blocks" if compiled else False}),
    )
    found = tables(exported)
    assert exported.devices is not None
    spec = build_folding_spec(
        world_size=exported.devices,
        pp_size=exported.config.parallel.pipeline,
        tp_size=found.get("tensor_parallel", {}).get("autotp_size", 1),
        ep_size=found.get("expert_parallel", {}).get("autoep_size", 1),
    )
    stages = found.get("zero_optimization", {})
    validate_folding_global(
        spec,
        sp_size=found.get("sequence_parallel_size", 1),
        deepcompile_enabled=found.get("compile", {}).get("deepcompile", False),
        autoep_enabled=found.get("expert_parallel", {}).get("enabled", False),
        zero_offload_optimizer="offload_optimizer" in stages,
        zero_offload_param="offload_param" in stages,
    )


def test_what_deepspeed_refuses_beside_experts_and_tensors_is_named() -> None:
    row = {"data": 8, "expert": 4, "tensor": 2, "zero_stage": 2, "optimizer_offload": "cpu"}
    folded = exported_of_layout(row, cases.MIXTURE)
    written = write("deepspeed", folded)
    assert "offload_optimizer" not in written.text and '"autoep_size": 4' in written.text
    assert "offload.optimizer" in cases.named(written)
    spilled = exported_of_layout({**row, "activation_offload": "nvme"}, cases.MIXTURE)
    assert {"offload.optimizer", "offload.activations"} <= cases.named(write("deepspeed", spilled))
    lengthy = write("deepspeed", exported_of_layout({**row, "context": 2}, cases.MIXTURE))
    assert "expert_parallel" not in lengthy.text and "offload_optimizer" in lengthy.text
    assert "parallel.expert" in cases.named(lengthy)


def test_sequence_ranks_have_a_mesh_where_it_can_be_had() -> None:
    row = {"data": 4, "context": 2}
    assert tables(exported_of_layout(row, cases.DENSE))["data_parallel_size"] == 4
    unknown = write("deepspeed", Exported(Config().with_changes({"parallel.context": 2})))
    assert any("give --devices" in line for line in unknown.cannot)
    beside = write("deepspeed", exported_of_layout({**row, "tensor": 2}, cases.DENSE))
    assert "data_parallel_size" not in beside.text
    assert any("no mesh of tensor and sequence ranks" in line for line in beside.cannot)
    piped = write("deepspeed", exported_of_layout({**row, "pipeline": 2, "microbatches": 4}, cases.DENSE))
    assert "sequence_parallel_size" not in piped.text and "parallel.context" in cases.named(piped)


@pytest.mark.parametrize(
    ("micro_batch", "microbatches", "written", "whole"),
    [(1, 16, (1, 4), 32), (2, 4, (2, 1), 16), (3, 4, (3, 1), 24), (4, 2, (2, 1), 16), (1, 2, (1, 1), 8)],
)
def test_ranks_that_a_pipeline_loses_leave_the_step_its_samples(
    deepspeed: Any, micro_batch: int, microbatches: int, written: tuple[int, int], whole: int
) -> None:
    row = {"data": 2, "context": 4, "pipeline": 2, "micro_batch": micro_batch, "microbatches": microbatches}
    exported = exported_of_layout(row, cases.DENSE)
    found = read_by_deepspeed(tables(exported), exported, megatron=False)  # 8 ranks with batches of their own
    assert (found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == written
    assert found.train_batch_size == whole
    cannot = write("deepspeed", exported).cannot
    told = f"8 ranks see batches of their own then: gradient_accumulation_steps is written as {written[1]}"
    assert any(line.startswith("parallel.microbatches") and told in line for line in cannot)
    planned = exported.batch.whole
    assert any(line.startswith(f"accumulation.global_batch = {planned}") for line in cannot) == (
        whole != planned
    )


def test_compiling_is_the_programs_to_begin() -> None:
    lines = [
        line
        for stage in (0, 1)
        for line in write(
            "deepspeed",
            Exported(Config().with_changes({"compute.compile": "blocks", "zero.stage": stage})),
        ).cannot
        if "engine.compile()" in line
    ]
    assert [("torch.compile" in line) for line in lines] == [True, False]


def test_a_batch_over_tensor_ranks_is_left_to_deepspeed() -> None:
    config = Config().with_changes({"parallel.tensor": 2, "accumulation.global_batch": 64})
    known = write("deepspeed", Exported(config, devices=8))
    found = json.loads(known.text)
    assert "train_batch_size" not in found and found["train_micro_batch_size_per_gpu"] == 16
    assert any("finds 128 where the layout has 64" in line for line in known.cannot)
    unknown = write("deepspeed", Exported(config))
    assert "train_batch_size" not in unknown.text
    assert "accumulation.global_batch" in cases.named(unknown)


def back(config: Config) -> Config:
    return Config.from_deepspeed(json.loads(write("deepspeed", Exported(config)).text))


@settings(max_examples=60)
@given(cases.configurations())
def test_there_and_back_is_what_it_says(config: Config) -> None:
    assume(not moves_checkpoints(config))  # below
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


def test_checkpoints_in_host_memory_are_not_guessed_at_on_the_way_back() -> None:
    config = Config().with_changes({"checkpointing.mode": "full", "offload.activations": "cpu"})
    written = write("deepspeed", Exported(config))
    assert json.loads(written.text)["activation_checkpointing"] == {"cpu_checkpointing": True}
    assert "offload.activations" not in cases.named(written)
    # Which blocks a program checkpoints by DeepSpeed's own call no file says.
    with pytest.raises(UsageError, match=r'checkpointing\.mode = "full" and offload\.activations = "cpu"'):
        back(config)


def test_there_and_back_with_degrees_and_compiled_blocks() -> None:
    config = Config().with_changes(
        {
            "parallel.tensor": 4,
            "compute.compile": "blocks",
            "zero.stage": 1,
            "zero.reshard_after_forward": None,
        }
    )
    assert back(config) == config
    experts = Config().with_changes({"parallel.expert": 8, "parallel.tensor": 4})
    assert back(experts) == experts
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
