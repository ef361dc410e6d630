"""Exports to Megatron-LM and Megatron-DeepSpeed: flags as their parsers have them, and Megatron-Core's own checks of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import export_cases as cases
import megatron_flags
import pytest
from hypothesis import example, given, settings
from other_tools import run_with

from trine.optim.config import Config
from trine.optim.exports import Exported, exported_from, write
from trine.optim.exports._reading import exported_of_layout


def flags(exported: Exported) -> dict[str, str]:
    return cases.flags_of(write("megatron", exported).text)


def test_the_layout_of_the_scaling_paper() -> None:
    # Narayanan et al. 2021, table 1: 175B on 1024 devices, tensor 8, pipeline 16, batch 1536, full recomputation.
    exported = exported_of_layout(
        {
            "data": 8,
            "tensor": 8,
            "pipeline": 16,
            "microbatches": 192,
            "schedule": "interleaved",
            "chunks": 3,
            "recompute": "full",
            "precision": "fp16",
        },
        cases.DENSE.with_changes(layers=96),
    )
    found = flags(exported)
    assert found["--num-layers-per-virtual-pipeline-stage"] == "2"
    assert found["--global-batch-size"] == "1536" and found["--micro-batch-size"] == "1"
    assert (found["--tensor-model-parallel-size"], found["--pipeline-model-parallel-size"]) == ("8", "16")
    assert found["--fp16"] == "" and found["--recompute-method"] == "uniform"
    assert "--use-distributed-optimizer" not in found and "--overlap-grad-reduce" in found


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"zero_stage": 1}, {"--use-distributed-optimizer": "", "--overlap-param-gather": ""}),
        ({"zero_stage": 2}, {"--use-megatron-fsdp": "", "--data-parallel-sharding-strategy": "optim_grads"}),
        (
            {"zero_stage": 3},
            {"--data-parallel-sharding-strategy": "optim_grads_params", "--ckpt-format": "fsdp_dtensor"},
        ),
        ({"zero_stage": 1, "shard": 2}, {"--num-distributed-optimizer-instances": "4"}),
        ({"precision": "fp8"}, {"--bf16": "", "--fp8-format": "hybrid"}),
        (
            {"recompute": "selective"},
            {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"},
        ),
        (
            {"recompute": "budget", "recomputed_layers": 7},
            {"--recompute-method": "block", "--recompute-num-layers": "7"},
        ),
        ({"bucket_bytes": 2**22}, {"--ddp-bucket-size": str(2**20)}),
        ({"compression": "bf16"}, {"--grad-reduce-in-bf16": ""}),
        (
            {"zero_stage": 1, "optimizer_offload": "cpu"},
            {"--optimizer-cpu-offload": "", "--use-precision-aware-optimizer": ""},
        ),
        ({"activation_offload": "cpu"}, {"--cpu-offloading-num-layers": "31"}),
        (
            {"context": 2, "tensor": 2, "sequence": 1},
            {"--context-parallel-size": "2", "--sequence-parallel": ""},
        ),
    ],
)
def test_each_column(row: dict[str, Any], expected: dict[str, str]) -> None:
    exported = exported_of_layout({"data": 8, **row}, cases.DENSE)
    written = write("megatron", exported)
    assert expected.items() <= cases.flags_of(written.text).items()
    assert not cases.named(written) & {*exported.config.changes(), *row}


@pytest.mark.parametrize(("stack", "is_short"), [("megatron-core", True), ("megatron-lm-2023", False)])
def test_gradients_are_as_wide_as_the_plan_counted_them(tmp_path: Path, stack: str, is_short: bool) -> None:
    row = {"data": 8, "microbatches": 8, "bucket_bytes": 2**22}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(cases.plan_of(row, model=cases.DENSE, software=stack, devices=8)))
    written = write("megatron", exported_from(path))
    found = cases.flags_of(written.text)
    assert ("--grad-reduce-in-bf16" in found) is is_short
    told = [line for line in written.cannot if line.startswith("gradients are summed in bf16, as the plan")]
    assert len(told) == is_short  # nobody asked for it
    assert found["--ddp-bucket-size"] == str(2**21 if is_short else 2**20)  # elements


def test_layers_under_a_budget_are_counted_in_every_virtual_stage() -> None:
    row = {"pipeline": 2, "schedule": "interleaved", "chunks": 4, "microbatches": 4, "recompute": "budget"}
    exact = exported_of_layout({**row, "recomputed_layers": 8}, cases.DENSE)
    assert flags(exact)["--recompute-num-layers"] == "2"
    more = write("megatron", exported_of_layout({**row, "recomputed_layers": 7}, cases.DENSE))
    assert cases.flags_of(more.text)["--recompute-num-layers"] == "2"
    assert any("7 layers do not divide over 4 virtual stages" in line for line in more.cannot)


def test_layers_that_do_not_divide_are_laid_out_one_by_one() -> None:
    found = flags(exported_of_layout({"pipeline": 4, "microbatches": 8}, cases.MIXTURE))  # 61 layers
    assert found["--pipeline-model-parallel-layout"] == "Et*15|t*16|t*15|t*15L"
    row = {"pipeline": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 8}
    found = flags(exported_of_layout(row, cases.DENSE.with_changes(layers=3)))
    assert found["--pipeline-model-parallel-layout"] == "Et*1|t*1|t*1|L"
    assert "--num-layers-per-virtual-pipeline-stage" not in found
    assert "--pipeline-model-parallel-layout" not in flags(exported_of_layout(row, cases.DENSE))


def test_a_mixture_with_latent_attention() -> None:
    exported = exported_of_layout(
        {"data": 16, "expert": 64, "tensor": 4, "sequence": 1, "zero_stage": 1}, cases.MIXTURE
    )
    found = flags(exported)
    assert found["--expert-model-parallel-size"] == "64" and found["--expert-tensor-parallel-size"] == "1"
    assert found["--moe-layer-freq"] == "([0]*3+[1]*58)" and found["--moe-router-topk"] == "8"
    assert found["--kv-lora-rank"] == "512" and found["--q-lora-rank"] == "1536"
    assert "--num-query-groups" not in found and "--qk-layernorm" in found
    assert not any(line.startswith("expert") for line in write("megatron", exported).cannot)


def test_activations_are_offloaded_or_recomputed() -> None:
    # Megatron-Core raises at both together, and at as many layers as there are (TransformerConfig.__post_init__).
    for recompute in ("full", "selective"):
        row = {"activation_offload": "cpu", "recompute": recompute}
        written = write("megatron", exported_of_layout(row, cases.DENSE))
        assert "--cpu-offloading-num-layers" not in written.text and "--recompute-granularity" in written.text
        assert "offload.activations" in cases.named(written)
    single = exported_of_layout({"activation_offload": "cpu"}, cases.DENSE.with_changes(layers=1))
    assert "--cpu-offloading-num-layers" not in flags(single)


#: Models that hold what no flag says: ALiBi and a norm of the embeddings (BLOOM), one norm a layer and a feed-forward with
#: biases alone (GPT-J), norms around both parts (Gemma 2), norms without weights (OLMo).
KINDS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"bias": True, "norm_bias": True, "gated": False, "other_parameters": 8192},
        ["GELU", "rotary", "8192 more"],
    ),
    ({"norms": 1, "mlp_bias": True}, ["RMSNorm", "layers with 1 norms", "feed-forward"]),
    ({"norms": 4}, ["SiLU", "layers with 4 norms"]),
    ({"norm_weights": False}, ["norms without weights"]),
    ({"bias": True, "attention_bias": False, "output_bias": False}, ["without biases", "attention's output"]),
    ({"other_layer_parameters": 64, "causal": False}, ["64 more parameters a layer", "looks ahead"]),
    ({"learned_positions": True, "positions": 2048}, ["2048 there, and a sequence has 8192"]),
]


@pytest.mark.parametrize(("changes", "words"), KINDS)
@pytest.mark.parametrize("name", ["megatron", "megatron-deepspeed"])
def test_what_sizes_do_not_tell_of_a_model_is_named(
    name: str, changes: dict[str, Any], words: list[str]
) -> None:
    lines = write(name, exported_of_layout({}, cases.DENSE.with_changes(**changes))).cannot
    model = [line for line in lines if line.startswith("the model: ")]
    assert all(any(word in line for line in model) for word in words), model
    plain = write(name, exported_of_layout({}, cases.DENSE)).cannot
    flag = "--rotary-base" if name == "megatron" else "--rotary-position-embeddings-theta"
    kinds = f"written as SiLU gates, RMSNorm, rotary positions of base 10000 ({flag})"
    assert [line for line in plain if line.startswith("the model: ")] == [
        f"the model: its sizes do not tell its kinds: {kinds}"
    ]


@pytest.mark.parametrize("name", ["megatron", "megatron-deepspeed"])
def test_positions_are_written_where_a_model_tells_their_kind(name: str) -> None:
    def told(**changes: Any) -> tuple[dict[str, str], tuple[str, ...]]:
        written = write(name, exported_of_layout({}, cases.DENSE.with_changes(**changes)))
        text = written.files["megatron.flags"]
        megatron_flags.parsed(
            text, megatron_flags.MEGATRON if name == "megatron" else megatron_flags.MEGATRON_DEEPSPEED
        )
        return cases.flags_of(text), tuple(line for line in written.cannot if line.startswith("the model: "))

    base = "--rotary-base" if name == "megatron" else "--rotary-position-embeddings-theta"
    found, lines = told(position_kind="rotary", rotary_base=500000.0, rotary_share=0.25)
    assert (found[base], found["--rotary-percent"]) == ("500000", "0.25")
    assert lines == ("the model: its sizes do not tell its kinds: written as SiLU gates, RMSNorm",)
    assert any(
        "scaled by llama3" in line
        for line in told(position_kind="rotary", rotary_base=5e5, rotary_scaling="llama3")[1]
    )
    found, lines = told(position_kind="alibi")
    assert base not in found and any("does not have ALiBi" in line for line in lines)
    found, lines = told(position_kind="none")
    off = {
        "megatron": ("--position-embedding-type", "none"),
        "megatron-deepspeed": ("--no-position-embedding", ""),
    }
    assert off[name] in found.items() and not any("rotary" in line for line in lines)


def test_positions_are_no_fewer_than_a_sequence_has() -> None:
    learned = cases.DENSE.with_changes(learned_positions=True, positions=2048)
    assert flags(exported_of_layout({}, learned))["--max-position-embeddings"] == "8192"
    longer = learned.with_changes(positions=10000)
    assert flags(exported_of_layout({}, longer))["--max-position-embeddings"] == "10000"


def test_what_the_environment_has_to_say() -> None:
    def names(name: str, **row: Any) -> bool:
        lines = write(name, exported_of_layout(row, cases.DENSE)).cannot
        return any(line.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 ") for line in lines)

    assert names("megatron", tensor=2) and names("megatron", context=2) and not names("megatron", data=2)
    assert not names("megatron", tensor=2, data=2, zero_stage=2)  # Megatron-FSDP wants the contrary
    assert names("megatron-deepspeed", tensor=2, sequence=1) and not names("megatron-deepspeed", tensor=2)


def test_megatron_deepspeed_has_neither_zero_bubbles_beside_split_sequences_nor_sequence_ranks_beside_tensors() -> (
    None
):
    row = {"pipeline": 4, "tensor": 2, "sequence": 1, "schedule": "zb-h1", "microbatches": 8}
    written = write("megatron-deepspeed", exported_of_layout(row, cases.DENSE))
    found = cases.flags_of(written.files["megatron.flags"])
    assert "--sequence-parallel" in found and "--enable-zbh1-pipeline" not in found
    assert "schedule" in cases.named(written)
    for tensor, refused in ((1, False), (2, True)):
        exported = exported_of_layout({"context": 2, "tensor": tensor}, cases.DENSE)
        lines = write("megatron-deepspeed", exported).cannot
        assert any("refuses sequence ranks" in line for line in lines) == refused


def test_schedules_that_it_has_not_are_named() -> None:
    exported = exported_of_layout(
        {"pipeline": 4, "schedule": "zb-v", "chunks": 2, "microbatches": 8}, cases.DENSE
    )
    assert "parallel.schedule" in cases.named(write("megatron", exported))
    zero_bubble = exported_of_layout({"pipeline": 4, "schedule": "zb-h1", "microbatches": 8}, cases.DENSE)
    other = write("megatron-deepspeed", zero_bubble)
    assert "--enable-zbh1-pipeline" in cases.flags_of(other.files["megatron.flags"])
    assert not {"schedule", "parallel.schedule"} & cases.named(other)


def test_without_a_model_its_flags_are_said_to_be_missing() -> None:
    written = write("megatron", Exported(Config().with_changes({"zero.stage": 1}), devices=8))
    assert any("--num-layers" in line for line in written.cannot)
    assert any("--micro-batch-size" in line for line in written.cannot)
    assert "--use-distributed-optimizer" in cases.flags_of(written.text)


@settings(max_examples=60)
@given(cases.exported_layouts())
def test_megatrons_parser_takes_any_layout(exported: Exported) -> None:
    found = megatron_flags.parsed(write("megatron", exported).text, megatron_flags.MEGATRON)
    assert exported.layout is not None and exported.devices is not None
    model = (found.tensor_model_parallel_size or 1) * (found.pipeline_model_parallel_size or 1)
    model *= found.context_parallel_size or 1
    # Megatron finds data parallelism by division (validate_args), and micro-batches from it.
    data = exported.devices // model
    assert data == exported.layout["data"]
    assert found.global_batch_size == data * found.micro_batch_size * exported.layout["microbatches"]
    assert not (found.cpu_offloading_num_layers and found.recompute_granularity)
    assert found.max_position_embeddings >= found.seq_length
    assert not (found.num_layers_per_virtual_pipeline_stage and found.num_virtual_stages_per_pipeline_rank)


@settings(max_examples=60)
@given(cases.exported_layouts())
def test_megatron_deepspeeds_parser_takes_any_layout(exported: Exported) -> None:
    files = write("megatron-deepspeed", exported).files
    found = megatron_flags.parsed(files["megatron.flags"], megatron_flags.MEGATRON_DEEPSPEED)
    tables = json.loads(files["ds_config.json"])
    assert found.zero_stage == tables.get("zero_optimization", {}).get("stage", 0)
    assert found.micro_batch_size == tables["train_micro_batch_size_per_gpu"]
    assert found.global_batch_size == tables["train_batch_size"]
    assert bool(found.pipeline_model_parallel_size) != found.no_pipeline_parallel
    assert not (found.sequence_parallel and found.enable_zbh1_pipeline)
    assert not (found.sequence_parallel and found.ds_sequence_parallel_size)


#: Fields of Megatron-Core's classes are filled from arguments of the same name (``core_transformer_config_from_args``); those
#: that differ are here, as there.
CORE = """
import dataclasses, json, sys
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
for line in sys.stdin:
    given = json.loads(line)
    low = given.get("bf16") or given.get("fp16")
    dtype = torch.bfloat16 if given.get("bf16") else torch.float16 if given.get("fp16") else torch.float32
    kind = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    kept = {key: value for key, value in given.items() if key in names}
    kept |= {"pipeline_dtype": dtype, "params_dtype": dtype, "num_moe_experts": given.get("num_experts")}
    kept |= {"gated_linear_unit": bool(given.get("swiglu")), "fp8": given.get("fp8_format")}
    kept |= {"add_bias_linear": not given.get("disable_bias_linear")}
    kept |= {"gradient_accumulation_fusion": False, "bias_activation_fusion": False}
    if given.get("cpu_offloading_num_layers"):
        kept["cpu_offloading"] = True
    if "recompute_modules" in kept:
        kept["recompute_modules"] = [kept["recompute_modules"]]
    kept.pop("moe_layer_freq", None), kept.pop("window_size", None), kept.pop("attention_backend", None)
    layout = given.get("pipeline_model_parallel_layout")
    if layout:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
        laid = PipelineParallelLayerLayout.from_str(layout, given["pipeline_model_parallel_size"])
        kept["virtual_pipeline_model_parallel_size"] = laid.virtual_pipeline_model_parallel_size
        kept["pipeline_model_parallel_layout"] = laid
        laid.validate_layer_layout(num_layers=given["num_layers"], mtp_num_layers=0)
    stages = given.get("num_layers_per_virtual_pipeline_stage")
    if stages:
        size = given["num_layers"] // given["pipeline_model_parallel_size"] // stages
        kept["virtual_pipeline_model_parallel_size"] = size
    kind(**kept)
    data = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    DistributedDataParallelConfig(**{key: value for key, value in given.items() if key in data})
print("taken")
"""


@pytest.mark.slow
def test_megatron_cores_own_checks_take_layouts(tmp_path: Path) -> None:
    lines: list[str] = []

    @settings(max_examples=40, database=None)
    @given(cases.exported_layouts())
    @example(exported_of_layout({"activation_offload": "cpu"}, cases.DENSE))
    def collect(exported: Exported) -> None:
        found = megatron_flags.parsed(write("megatron", exported).text, megatron_flags.MEGATRON)
        if exported.config.precision.float8:
            return  # which wants Transformer Engine
        if found.num_experts and (found.tensor_model_parallel_size or 1) > 1 and not found.sequence_parallel:
            return  # which Megatron trains no mixture with, and the export says so
        lines.append(
            json.dumps({key: value for key, value in vars(found).items() if value not in (None, False)})
        )

    collect()
    assert len(lines) > 10
    assert run_with("megatron", CORE, folder=tmp_path, given="\n".join(lines)).endswith("taken\n")
