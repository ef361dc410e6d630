"""Exports to torchtitan: Python that builds its configuration, read by torchtitan's own ``ConfigManager`` where it is installed."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import export_cases as cases
import pytest
import torchtitan_shape
from hypothesis import given, settings
from other_tools import run_with

from trine.optim.config import Config
from trine.optim.exports import Exported, write
from trine.optim.exports._reading import exported_of_layout
from trine.optim.exports.torchtitan import _MODELS, _own_counts
from trine.optim.plan.constants import stack_named
from trine.optim.plan.stages import stage_counts


def built(exported: Exported) -> Any:
    """The configuration that the exported module builds, over torchtitan's public shape."""
    namespace: dict[str, Any] = {}
    with torchtitan_shape.loaded(*set(_MODELS.values())):
        exec(compile(write("torchtitan", exported).text, "trine_torchtitan.py", "exec"), namespace)  # noqa: S102 - it is a program
        if "exported" in namespace:
            return namespace["exported"]()
        return namespace["applied"](torchtitan_shape.Configuration())


ROW: dict[str, Any] = {
    "data": 8,
    "shard": 4,
    "zero_stage": 2,
    "tensor": 2,
    "sequence": 1,
    "context": 2,
    "pipeline": 2,
    "schedule": "zb-v",
    "chunks": 2,
    "micro_batch": 2,
    "microbatches": 8,
    "recompute": "full",
}


def test_every_degree_has_its_field() -> None:
    found = built(exported_of_layout(ROW, cases.DENSE))
    parallelism = found.parallelism
    assert (parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree) == (2, 4)
    assert (parallelism.tensor_parallel_degree, parallelism.enable_sequence_parallel) == (2, True)
    assert (parallelism.context_parallel_degree, parallelism.pipeline_parallel_degree) == (2, 2)
    assert parallelism.pipeline_parallel_schedule == "ZBVZeroBubble"
    assert parallelism.pipeline_parallel_microbatch_size == 2
    assert parallelism.fsdp_reshard_after_forward == "never"
    # A rank's eight micro-batches of two are one local batch there, and the step has no accumulation besides.
    assert (found.training.local_batch_size, found.training.global_batch_size) == (16, 128)
    assert (found.training.seq_len, found.training.disable_cuda_graphs) == (8192, True)
    assert found.activation_checkpoint.kind == "FullAC"


@pytest.mark.parametrize(
    ("row", "reshard", "degrees"),
    [
        ({"data": 8}, "default", (8, 1)),
        ({"data": 8, "zero_stage": 3}, "always", (1, 8)),
        ({"data": 8, "zero_stage": 2}, "never", (1, 8)),
        ({"data": 8, "zero_stage": 1, "shard": 2}, "never", (4, 2)),
        # A plan keeps a pipeline's stage gathered, but for weights that lie elsewhere.
        ({"data": 8, "zero_stage": 3, "pipeline": 2, "microbatches": 4}, "default", (1, 8)),
        (
            {
                "data": 8,
                "zero_stage": 3,
                "pipeline": 2,
                "microbatches": 4,
                "parameter_offload": "cpu",
                "optimizer_offload": "cpu",
            },
            "always",
            (1, 8),
        ),
    ],
)
def test_stages(row: dict[str, Any], reshard: str, degrees: tuple[int, int]) -> None:
    parallelism = built(exported_of_layout(row, cases.DENSE)).parallelism
    assert parallelism.fsdp_reshard_after_forward == reshard
    assert (parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree) == degrees


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ("torchtitan", None),
        ("trine", "selective keeps every second matmul there, not all"),
        ("megatron-core", "recompute = selective: what is cheap is recomputed here"),
    ],
)
def test_selective_is_said_where_the_plan_means_another(stack: str, words: str | None) -> None:
    row = {"data": 8, "recompute": "selective"}
    cannot = write("torchtitan", exported_of_layout(row, cases.DENSE, stack=stack_named(stack))).cannot
    about = [line for line in cannot if "selective" in line]
    assert len(about) == (words is not None) and all(words in line for line in about if words)


def test_experts_are_borrowed_from_shards() -> None:
    found = built(exported_of_layout({"data": 16, "expert": 8, "zero_stage": 3}, cases.MIXTURE))
    # dp_shard counts the ranks that experts are spread over (expert_parallel_degree).
    assert (found.parallelism.data_parallel_shard_degree, found.parallelism.expert_parallel_degree) == (16, 8)


@pytest.mark.parametrize(
    ("row", "degree"),
    [
        ({"data": 2, "context": 2, "tensor": 2, "expert": 8, "zero_stage": 2}, 8),
        ({"data": 3, "tensor": 4, "expert": 4}, 4),  # within the tensor group, and nothing is sharded
    ],
)
def test_experts_are_spread_over_context_and_tensor_ranks_as_planned(
    row: dict[str, Any], degree: int
) -> None:
    exported = exported_of_layout(row, cases.MIXTURE)
    found = built(exported)
    assert found.parallelism.expert_parallel_degree == degree and found.training.disable_cuda_graphs is True
    assert not any(line.startswith("expert = ") for line in write("torchtitan", exported).cannot)


@settings(max_examples=60)
@given(cases.exported_layouts())
def test_any_layout_builds_and_fills_its_devices(exported: Exported) -> None:
    found = built(exported)
    parallelism, training = found.parallelism, found.training
    degrees = (
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
    )
    assert prod(getattr(parallelism, f"{name}_degree") for name in degrees) == exported.devices
    ranks = parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
    assert training.global_batch_size % (training.local_batch_size * ranks) == 0  # as Trainer checks
    assert exported.layout is not None
    if parallelism.pipeline_parallel_degree > 1 and "parallel.chunks" not in cases.named(
        write("torchtitan", exported)
    ):
        assert exported.workload is not None
        stages = torchtitan_shape.stages_of(parallelism, exported.workload.layers)
        chunks = 2 if parallelism.pipeline_parallel_schedule in ("ZBVZeroBubble", "DualPipeV") else 1
        assert stages == parallelism.pipeline_parallel_degree * max(exported.config.parallel.chunks, chunks)
    pieces = training.local_batch_size // exported.layout["micro_batch"]  # type: ignore[operator]
    steps = training.global_batch_size // (training.local_batch_size * ranks)
    assert pieces * steps == exported.layout["microbatches"]


@pytest.mark.parametrize(
    ("layers", "pipeline", "chunks", "field"),
    [
        (32, 8, 4, "module_fqns_per_model_part"),  # by layers a stage these were 17 stages, which it refuses
        (32, 4, 4, "module_fqns_per_model_part"),  # and these 12, of which it took three a rank
        (80, 4, 4, "module_fqns_per_model_part"),
        (126, 4, 4, "pipeline_parallel_layers_per_stage"),
        (30, 4, 8, "pipeline_parallel_layers_per_stage"),
        (
            32,
            4,
            2,
            "module_fqns_per_model_part",
        ),  # by itself it had 3 to 5 layers a stage, where the plan has 4
        (80, 4, 10, "module_fqns_per_model_part"),
        (30, 4, 2, None),
    ],
)
def test_stages_a_rank_are_those_of_the_plan(
    layers: int, pipeline: int, chunks: int, field: str | None
) -> None:
    row = {"pipeline": pipeline, "schedule": "interleaved", "chunks": chunks, "microbatches": 16}
    exported = exported_of_layout(row, cases.DENSE.with_changes(layers=layers))
    parallelism = built(exported).parallelism
    assert torchtitan_shape.stages_of(parallelism, layers) == pipeline * chunks
    written = {"module_fqns_per_model_part", "pipeline_parallel_layers_per_stage"}
    assert {name for name in written if getattr(parallelism, name)} == ({field} if field else set())
    assert "parallel.chunks" not in cases.named(write("torchtitan", exported))
    parts = parallelism.module_fqns_per_model_part
    if parts:
        everything = ["tok_embeddings", *(f"layers.{layer}" for layer in range(layers)), "norm", "lm_head"]
        assert [name for part in parts for name in part] == everything
    counts = [sum("layers" in name for name in part) for part in parts or ()]
    assert (counts or _own_counts(layers, pipeline * chunks)) == stage_counts(layers, pipeline * chunks)


@pytest.mark.parametrize(
    ("layers", "listed"), [(80, [20, 20, 20, 20]), (126, None), (30, None), (31, None), (32, [8, 8, 8, 8])]
)
def test_stages_of_one_a_rank_have_the_layers_that_the_plan_counted(
    layers: int, listed: list[int] | None
) -> None:
    row = {"pipeline": 4, "microbatches": 8}
    known = exported_of_layout(row, cases.DENSE.with_changes(layers=layers))
    parts = built(known).parallelism.module_fqns_per_model_part
    assert (parts and [sum("layers" in name for name in part) for part in parts]) == listed
    other = exported_of_layout(row, cases.DENSE.with_changes(layers=layers, name="another"))
    told = [line for line in write("torchtitan", other).cannot if line.startswith("stages: ")]
    assert len(told) == (listed is not None)
    assert all(f"the plan has {min(listed or ())} to {max(listed or ())}" in line for line in told)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.schedule": "zbv"}, "ZBVZeroBubble has two stages a rank"),
        ({"parallel.schedule": "unheard-of"}, "1F1B has one stage a rank"),
        ({"parallel.schedule": "interleaved"}, "no number of layers a stage comes to 32 stages"),
    ],
)
def test_stages_a_rank_that_it_has_not_are_named(changes: dict[str, Any], words: str) -> None:
    config = Config().with_changes({"parallel.pipeline": 8, "parallel.chunks": 4, **changes})
    written = write("torchtitan", Exported(config, cases.DENSE.with_changes(name="another")))
    assert any(line.startswith("parallel.chunks") and words in line for line in written.cannot)
    assert "layers_per_stage" not in written.text and "module_fqns" not in written.text


def test_models_of_its_own_are_named_and_others_are_left_to_the_user() -> None:
    dense = write("torchtitan", exported_of_layout({"data": 2}, cases.DENSE))
    assert "from torchtitan.models.llama3.config_registry import llama3_8b" in dense.text
    assert "return applied(llama3_8b())" in dense.text and dense.cannot == ()
    mixture = write("torchtitan", exported_of_layout({"data": 2}, cases.MIXTURE))
    assert "def exported" not in mixture.text
    assert any("no configuration of a-mixture" in line for line in mixture.cannot)


def test_a_configuration_whose_ranks_nobody_knows() -> None:
    config = Config().with_changes({"zero.stage": 3, "parallel.tensor": 2, "accumulation.micro_batch": 2})
    parallelism = built(Exported(config)).parallelism
    assert parallelism.data_parallel_shard_degree == -1  # the ranks that are left over


#: By the parser that torchtitan.train uses: --module and --config name the function. PyTorch for CPUs comes without Triton,
#: in which one module of torchtitan's kernels is written; none of them is called here.
READ = """
import importlib, json, sys
from importlib.util import find_spec
from types import ModuleType
import torch.distributed.pipelining.schedules as schedules
if find_spec("triton") is None:
    kernels = ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__getattr__ = lambda name: None
    sys.modules[kernels.__name__] = kernels
from torchtitan.config.manager import ConfigManager
sys.path.insert(0, sys.argv[1])
found = []
for name in json.loads(sys.argv[2]):
    config = ConfigManager().parse_args(["--module", name, "--config", "exported"])
    parallelism, training = config.parallelism, config.training
    schedules.get_schedule_class(parallelism.pipeline_parallel_schedule)
    found.append([parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_schedule,
                  parallelism.data_parallel_shard_degree, training.global_batch_size, training.seq_len,
                  type(config.activation_checkpoint).__qualname__, len(config.model_spec.model.layers),
                  len(parallelism.module_fqns_per_model_part or ()) or None])
for module, function in json.loads(sys.argv[3]):
    getattr(importlib.import_module(f"torchtitan.models.{module}.config_registry"), function)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_torchtitans_own_parser_reads_exports(tmp_path: Path) -> None:
    mixture = cases.MIXTURE.with_changes(name="deepseek-v3")
    rows = {
        "titan_dense": exported_of_layout(ROW, cases.DENSE),
        "titan_stages": exported_of_layout(
            {"pipeline": 8, "schedule": "interleaved", "chunks": 4, "microbatches": 16}, cases.DENSE
        ),
        "titan_plain": exported_of_layout(
            {"data": 64, "zero_stage": 3, "recompute": "selective"}, cases.DENSE
        ),
        "titan_experts": exported_of_layout({"data": 64, "expert": 32, "zero_stage": 3}, mixture),
    }
    for name, exported in rows.items():
        (tmp_path / f"{name}.py").write_text(write("torchtitan", exported).text)
    given = (str(tmp_path), json.dumps(list(rows)), json.dumps(sorted(set(_MODELS.values()))))
    said = run_with("torchtitan", READ, *given, folder=tmp_path)
    dense, stages, plain, experts = json.loads(said.splitlines()[-1])
    assert dense == [2, "ZBVZeroBubble", 4, 128, 8192, "FullAC.Config", 32, 4]
    assert stages[:2] == [1, "Interleaved1F1B"] and stages[-2:] == [32, 32]
    assert plain[2:6] == [64, 64, 8192, "SelectiveAC.Config"]
    assert experts[2] == 64 and experts[6] == 61
