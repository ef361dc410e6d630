"""Published runs as the planner takes them: derived, assumed, skipped, and never a crash."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planner
import planner_peaks
import planner_rows
import pytest
from hypothesis import given
from hypothesis import strategies as st

PAGE = Path(__file__).resolve().parents[3] / "docs" / "plan.md"

ROW = {
    "table": "made",
    "row_id": "made-1",
    "model": "GPT-22B",
    "layers": "48.0",
    "hidden": "6144.0",
    "ffn": "24576",
    "heads": "64",
    "vocab": "51200",
    "seq_len": "2048",
    "mlp": "gelu",
    "gpu": "A100-SXM4-80GB",
    "n_gpus": "64",
    "gpus_per_node": "8.0",
    "intra_link": "NVLink3 300GB/s/dir NVSwitch",
    "inter_link_per_gpu": "200Gb/s HDR IB (8 HCA/node)",
    "framework": "Megatron-LM 2022",
    "precision": "fp16",
    "tp": "8",
    "pp": "2",
    "gbs": "64",
    "mbs": "4",
    "recompute": "selective(attention)",
    "step_time_s": "3.9",
}


def one(**changes: str) -> Any:
    runs, skipped = planner_rows.read_rows([{**ROW, **changes}])
    assert not skipped, skipped
    return runs[0]


def reason(**changes: str) -> str:
    runs, skipped = planner_rows.read_rows([{**ROW, **changes}])
    assert not runs and len(skipped) == 1
    return str(skipped[0].reason)


def test_data_ranks_and_micro_batches_are_derived() -> None:
    run = one()
    assert (run.layout["data"], run.layout["microbatches"]) == (4, 4)
    assert run.layout["recompute"] == "selective" and run.stack.name == "megatron-lm-2022"
    assert run.cluster.nodes == 8 and run.cluster.between.bandwidth.bytes_per_s == 25e9


def test_data_ranks_that_do_not_fit_the_devices_are_corrected_and_said() -> None:
    run = one(dp="16")
    assert run.layout["data"] == 4 and any("data ranks" in note for note in run.assumed)


def test_throughput_is_a_truth_too() -> None:
    run = one(step_time_s="", tokens_per_s_gpu="525.1")
    assert run.seconds == pytest.approx(64 * 2048 / 64 / 525.1)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("fp8 rowwise", "fp8"),
        ("MXFP8", "fp8"),
        ("float8 tensorwise", "fp8"),
        ("bf16+float8", "fp8"),
        ("NVFP4", "fp8"),
        ("amp_bf16", "bf16"),
        ("bf16", "bf16"),
        ("", "bf16"),
    ],
)
def test_precisions_as_people_write_them(text: str, precision: str) -> None:
    run = one(precision=text, gpu="H100-SXM-80GB")
    assert run.layout["precision"] == precision
    assert run.stack.fp8_gain == {"fp8 rowwise": 0.0, "NVFP4": 2.0}.get(text, 1.0)


@pytest.mark.parametrize(
    ("text", "recompute"),
    [
        ("selective (per-op SAC)", "selective"),
        ("none (recipe default)", "none"),
        ("full", "full"),
        ("", "selective"),
        ("selective layer", "budget"),
    ],
)
def test_recomputation_as_people_write_it(text: str, recompute: str) -> None:
    run = one(recompute=text)
    assert run.layout["recompute"] == recompute
    if not text:
        assert "recomputation selective" in run.assumed


def test_a_range_is_its_middle_and_said() -> None:
    run = one(step_time_s="3.8-4.0")
    assert run.seconds == pytest.approx(3.9) and any("middle" in note for note in run.assumed)


def test_layers_come_from_parameters_where_nobody_says_them() -> None:
    run = one(layers="", params_b="22.0")
    assert run.workload.layers == 48 and any("48 layers" in note for note in run.assumed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": ""}, "no hidden"),
        ({"n_gpus": ""}, "no n_gpus"),
        ({"gpu": "Abacus 3000"}, "Abacus 3000"),
        ({"gpu": "A100 MIG 1g.10gb"}, "MIG"),
        ({"gpu": "RTX A1000"}, "A1000"),
        ({"step_time_s": ""}, "no truth"),
        ({"precision": "fp8"}, "no peak for fp8"),
        ({"tp": "", "pp": "", "mbs": ""}, "no layout"),
        ({"tp": "7"}, "divide"),
        ({"gbs": "", "mbs": ""}, "neither global batch nor micro-batch"),
    ],
)
def test_what_cannot_be_predicted_is_skipped_with_its_reason(changes: dict[str, str], said: str) -> None:
    found = reason(**changes)
    assert said in found and "\n" not in found


@pytest.mark.parametrize(
    ("changes", "stack"),
    [
        ({}, "megatron-core"),
        ({"tp": "1", "pp": "1", "zero_stage": "3"}, "fsdp"),
        ({"tp": "1", "pp": "1", "zero_stage": "1"}, "pytorch"),
    ],
)
def test_unknown_software_is_what_trains_in_such_layouts_and_said(
    changes: dict[str, str], stack: str
) -> None:
    run = one(framework="Our own trainer", **changes)
    assert run.stack.name == stack and f"Our own trainer as {stack}" in run.assumed


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"tp": "1", "pp": "1", "zero_stage": "HSDP"}, {"zero_stage": 3, "shard": 8}),
        ({"tp": "1", "pp": "1", "zero_stage": "3", "notes": "FSDP=16, rest DP"}, {"shard": 16}),
        ({"tp": "1", "pp": "1", "zero_stage": "3", "notes": "FSDP=16 (32 at 64 GPUs)"}, {"shard": 32}),
        ({"tp": "1", "pp": "1", "zero_stage": "fsdp"}, {"zero_stage": 3, "shard": 0}),
        ({"pp_schedule": "DualPipeV"}, {"schedule": "dualpipe-v", "chunks": 2}),
        ({"pp_schedule": "InterleavedZeroBubble"}, {"schedule": "interleaved-zb", "chunks": 2}),
        ({"pp_schedule": "LoopedBFS", "vpp": "4"}, {"schedule": "looped-bfs", "chunks": 4}),
        ({"pp_schedule": "breadth-first"}, {"schedule": "looped-bfs", "chunks": 2}),
    ],
)
def test_shards_and_schedules_as_people_write_them(changes: dict[str, str], layout: dict[str, Any]) -> None:
    found = one(**changes).layout
    assert {name: found[name] for name in layout} == layout


@pytest.mark.parametrize(
    ("cell", "text", "gigabytes_per_s", "said"),
    [
        ("inter_link_per_gpu", "unknown", 25, ""),
        ("inter_link_per_gpu", "n/a", 25, ""),
        ("inter_link_per_gpu", "-", 25, ""),
        ("inter_link_per_gpu", "400G", 50, ""),
        ("inter_link_per_gpu", "8x400G", 50, ""),
        ("inter_link_per_gpu", "10GigE", 1.25, ""),
        ("inter_link_per_gpu", "ConnectX-7", 50, ""),
        ("inter_link_per_gpu", "RDMA", 25, "infiniband at 25 GB/s for 'RDMA'"),
        ("inter_link_per_gpu", "DCN", 25, "infiniband at 25 GB/s for 'DCN'"),
        ("intra_link", "none", 300, ""),
        ("intra_link", "PCIe", 32, ""),
        ("intra_link", "SXM", 300, "nvlink at 300 GB/s for 'SXM'"),
        ("intra_link", "NV12", 300, "nvlink at 300 GB/s for 'NV12'"),
        ("intra_link", "HCCS", 300, "nvlink at 300 GB/s for 'HCCS'"),
    ],
)
def test_links_that_say_little_are_the_devices_usual_ones(
    cell: str, text: str, gigabytes_per_s: float, said: str
) -> None:
    run = one(**{cell: text})
    link = run.cluster.between if cell == "inter_link_per_gpu" else run.cluster.inside
    assert link.bandwidth.bytes_per_s == gigabytes_per_s * 1e9
    assert any(said in note for note in run.assumed) if said else not run.assumed


@pytest.mark.parametrize(
    ("changes", "name", "gib", "said"),
    [
        ({"gpu": "A100", "gpu_mem_gb": "40"}, "A100 SXM4 40GB", 40, ""),
        ({"gpu": "A100", "gpu_mem_gb": "80.0"}, "A100 SXM4 80GB", 80, ""),
        ({"gpu": "A100", "gpu_mem_gb": ""}, "A100 SXM4 80GB", 80, ""),
        ({"gpu": "A100-SXM4-80GB", "gpu_mem_gb": "40"}, "A100 SXM4 80GB", 80, ""),
        ({"gpu": "A100 64GB"}, "A100 SXM4 80GB", 64, "with 64 GB"),
        ({"gpu": "H100-SXM5-64GB"}, "H100 SXM5 80GB", 64, "with 64 GB"),
        ({"gpu": "B200", "gpu_mem_gb": "192"}, "B200", 180, ""),
        ({"gpu": "GH200-120GB"}, "GH200 96GB", 96, ""),
        ({"gpu": "p4d.24xlarge"}, "A100 SXM4 40GB", 40, "p4d.24xlarge as A100-SXM-40GB"),
        ({"gpu": "A100 (Azure ND96amsr)"}, "A100 SXM4 80GB", 80, ""),
        ({"gpu": "A100 Azure ND96amsr"}, "A100 SXM4 80GB", 80, "A100 Azure ND96amsr as A100-SXM-80GB"),
        ({"gpu": "Ascend 910B", "gpu_mem_gb": "64"}, "A100 SXM4 80GB", 64, "Ascend 910B as"),
    ],
)
def test_devices_of_another_memory_or_maker(
    changes: dict[str, str], name: str, gib: float, said: str
) -> None:
    run = one(**changes)
    assert run.cluster.device.name == name and run.cluster.device.memory_bytes == gib * 2**30
    of_the_device = [note for note in run.assumed if "Megatron-LM" not in note]
    assert len(of_the_device) == (2 if changes.get("gpu_mem_gb") and said else bool(said)), of_the_device
    assert not said or any(said in note for note in of_the_device)


def test_a_part_of_a_device_has_a_part_of_its_peaks() -> None:
    whole, part = one(gpu="MI300X").cluster.device, one(gpu="MI308X").cluster.device
    assert part.peak("bf16") == pytest.approx(whole.peak("bf16") * 80 / 304)


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({"gpus_per_node": "4"}, 128),
        ({"gpus_per_node": "8"}, 64),
        ({"gpus_per_node": "4", "dp": "4"}, 64),
        ({"gpus_per_node": "8", "dp": "8"}, 128),
        ({"gpus_per_node": "4", "gpu_mem_gb": "64"}, 64),
    ],
)
def test_modules_are_two_devices_where_they_are_counted(changes: dict[str, str], devices: int) -> None:
    run = one(
        **{"gpu": "MI250X", "gpu_mem_gb": "128", "step_time_s": "", "tokens_per_s_gpu": "500", **changes}
    )
    assert run.devices == devices and run.cluster.device.memory_bytes == 64 * 2**30
    assert run.seconds == pytest.approx(64 * 2048 / 64 / 500)


@pytest.mark.parametrize(
    ("framework", "gpu", "stack"),
    [
        ("Megatron-LM core_r0.8.0", "A100", "megatron-core"),
        ("Megatron-LM (mcore r0.6)", "A100", "megatron-core"),
        ("Megatron-LM 23.04", "A100", "megatron-lm-2023"),
        ("Megatron-LM v3.0", "A100", "megatron-lm-2022"),
        ("Megatron-LM v2.5", "A100", "megatron-lm-2021"),
        ("Megatron-LM v1.1", "A100", "megatron-lm-2020"),
        ("Megatron-LM", "A100", "megatron-lm-2022"),  # selective recomputation
        ("Megatron-LM fork 2023", "A100", "megatron-lm-zero-bubble"),
        ("Megatron-LM", "H100", "megatron-core"),
        ("Megatron-LM 24.05", "H100", "megatron-core"),
        ("Megatron-LM v3.0", "B200", "megatron-core"),
        ("GPT-NeoX 2.0 (DeepSpeed)", "A100", "megatron-deepspeed"),
        ("DeepSpeed", "A100", "megatron-deepspeed"),
        ("Colossal-AI 0.3", "A100", "megatron-lm-2022"),
        ("Alpa", "A100", "maxtext"),
        ("HF Transformers", "A100", "pytorch"),
    ],
)
def test_software_by_its_version_or_its_hardware(framework: str, gpu: str, stack: str) -> None:
    assert one(framework=framework, gpu=gpu).stack.name == stack


def test_software_is_compiled_or_fused_where_the_row_says_so() -> None:
    plain = {"tp": "1", "pp": "1", "zero_stage": "3"}
    assert not one(framework="FSDP2", **plain).stack.fused
    assert one(framework="FSDP2 + torch.compile", **plain).stack.fused
    assert not one(framework="Megatron-DeepSpeed").stack.fused_attention
    assert one(framework="Megatron-DeepSpeed", notes="flash attention").stack.fused_attention
    assert one(pp_schedule="DualPipe").stack.expert_overlap and not one().stack.expert_overlap


@pytest.mark.parametrize(
    ("text", "framework", "stage", "shard"),
    [
        ("SHARD_GRAD_OP", "", 2, 0),
        ("FSDP SHARD_GRAD_OP", "", 2, 0),
        ("FULL_SHARD", "", 3, 0),
        ("HYBRID_SHARD", "", 3, 8),
        ("ZeRO++", "", 3, 0),
        ("ZeRO-1", "", 1, 0),
        ("distributed optimizer", "", 1, 0),
        ("DDP", "", 0, 0),
        ("", "PyTorch FSDP", 3, 0),
        ("", "DeepSpeed ZeRO-2", 2, 0),
        ("0", "PyTorch FSDP", 0, 0),
    ],
)
def test_what_is_sharded_as_people_write_it(text: str, framework: str, stage: int, shard: int) -> None:
    layout = one(tp="1", pp="1", zero_stage=text, framework=framework).layout
    assert (layout["zero_stage"], layout["shard"]) == (stage, shard)


@pytest.mark.parametrize("layers", ["96", "126"])
def test_interleaved_stages_are_even_with_the_embedding_and_the_head_as_layers(layers: str) -> None:
    pipeline = {"layers": layers, "pp": "16", "n_gpus": "512", "pp_schedule": "interleaved-1F1B"}
    assert one(**pipeline).layout["chunks"] == 2
    assert one(**{**pipeline, "layers": "100"}).layout["chunks"] == 1


@pytest.mark.parametrize("text", ["OOM", "yes", "1", "1.0", "True", "true"])
def test_out_of_memory_as_people_write_it(text: str) -> None:
    assert one(step_time_s="", oom=text).oom
    assert not one(oom="0").oom and not one(oom="").oom and not one(oom="no").oom


@pytest.mark.parametrize(
    ("notes", "kind"),
    [("max_memory_allocated", "allocated"), ("by nvidia-smi", "used"), ("", "reserved")],
)
def test_memory_is_what_notes_say(notes: str, kind: str) -> None:
    assert one(notes=notes, mem_gib="40").memory_is == kind


def test_a_known_model_needs_no_dimensions() -> None:
    bare = dict.fromkeys(("hidden", "heads", "ffn", "layers", "vocab"), "")
    run = one(model="Qwen3_30B_a3B (tokendrop)", **bare)
    assert run.workload.experts == 128 and run.workload.hidden == 2048 and run.workload.sequence == 2048
    assert (
        run.workload.load_imbalance == 1.0 and "Qwen3_30B_a3B (tokendrop) as it is published" in run.assumed
    )


def test_latent_attention_is_the_published_models() -> None:
    run = one(model="DeepSeek-V3", hidden="7168", heads="128", layers="61", experts="256", topk="8")
    assert run.workload.latent is not None
    assert one(model="DeepSeek-V3", hidden="1024").workload.latent is None


MIXTURE = {
    "mlp": "swiglu",
    "hidden": "2048",
    "layers": "48",
    "heads": "32",
    "experts": "128",
    "topk": "8",
    "vocab": "151936",
    "params_b": "30.5",
}


@pytest.mark.parametrize(
    ("model", "ffn"), [("Qwen3-30B-A3B", "6144"), ("Qwen3-thirty", "6144"), ("Q", "768")]
)
def test_experts_are_not_wider_than_the_parameters_allow(model: str, ffn: str) -> None:
    run = one(model=model, ffn=ffn, kv_heads="4", **MIXTURE)
    assert run.workload.expert_ffn == 768
    assert run.workload.parameters == pytest.approx(30.5e9, rel=0.03)
    assert any("experts of 768" in note for note in run.assumed) == (ffn != "768")


def test_a_sequence_that_nobody_says_is_the_models_or_its_kinds() -> None:
    llama = {"hidden": "4096", "heads": "32", "layers": "32", "mlp": "swiglu", "seq_len": ""}
    assert one(model="Llama-3-8B", **llama).workload.sequence == 8192
    run = one(model="ours", **llama)
    assert run.workload.sequence == 4096 and "sequences of 4096" in run.assumed


@pytest.mark.parametrize(
    ("hidden", "heads", "found"),
    [("1600", "", (25, 64)), ("6144", "", (48, 128)), ("5000", "48", (48, 96)), ("6144", "64", (64, 96))],
)
def test_heads_that_are_left_out_or_do_not_divide(hidden: str, heads: str, found: tuple[int, int]) -> None:
    workload = one(hidden=hidden, heads=heads, tp="1").workload
    assert (workload.heads, workload.head_size) == found


def test_an_erratum_is_of_a_table_and_can_be_left_out() -> None:
    stated = {
        **ROW,
        "table": "vtrain_ground_truth_single",
        "recompute": "full",
        "framework": "Megatron-DeepSpeed",
    }
    (run,), _ = planner_rows.read_rows([stated])
    assert run.layout["recompute"] == "none" and any("faster than the stated" in note for note in run.assumed)
    assert planner_rows.read_rows([stated], as_stated=True)[0][0].layout["recompute"] == "full"
    assert planner_rows.read_rows([{**stated, "table": "made"}])[0][0].layout["recompute"] == "full"


def test_runs_near_all_their_peaks_are_counted_by_table() -> None:
    times = ("0.5", "50", "60")
    runs = [one(recompute="full", framework="Megatron-DeepSpeed", step_time_s=time) for time in times]
    assert planner_peaks.near_all_peaks(runs) == {"made": 1}
    assert (
        planner_peaks.near_all_peaks(
            [replace(run, layout={**run.layout, "recompute": "none"}) for run in runs]
        )
        == {}
    )


def test_out_of_memory_is_a_truth_without_time() -> None:
    run = one(step_time_s="", oom="1.0")
    assert run.oom and run.seconds is None


def test_adapters_freeze_weights() -> None:
    assert one(notes="LoRA Performance").frozen


@given(st.data())
def test_no_row_crashes(data: st.DataObject) -> None:
    words = st.sampled_from(
        ["", "nan", "-1", "0", "1e9", "3-5", "many", "fp8", "selective", "A100", "α", "None", "4x"]
    )
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(ROW)), words, max_size=6))
    runs, skipped = planner_rows.read_rows([{**ROW, **changed}])
    assert len(runs) + len(skipped) == 1


def test_scores_of_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = [
        {**ROW, "row_id": "made-2", "tp": "4", "pp": "4", "step_time_s": "4.3"},
        {**ROW, "row_id": "made-3", "gpu": "Abacus 3000"},
        {"table": "bare"},
    ]
    path = tmp_path / "runs.csv"
    lines = [",".join(ROW), *(",".join(str(row.get(name, "")) for name in ROW) for row in [ROW, *extra])]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert planner.main(["--runs", str(path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    summary = found["summary"]
    assert summary["predicted"] == 2 and summary["rows"] == 4 and sum(summary["skipped"].values()) == 2
    assert summary["coverage"] == pytest.approx(2 / 3)
    for name in (
        "tau_single",
        "tau_multi",
        "regret_single",
        "regret_multi",
        "step_error_median",
        "step_error_p90",
    ):
        assert name in summary
    assert found["tables"]["made"]["groups"] == 1 and found["tables"]["made"]["step_error_median"] < 0.3
    assert planner.main(["--runs", str(tmp_path / "absent.csv")]) == 2


def test_tau_counts_pairs_in_order() -> None:
    first = np.asarray([1.0, 2.0, 3.0, 4.0])
    assert planner.kendall_tau(first, first) == 1
    assert planner.kendall_tau(first, -first) == -1
    # One of six pairs is turned round: 5 − 1 of 6.
    assert planner.kendall_tau(first, np.asarray([1.0, 3.0, 2.0, 4.0])) == pytest.approx(4 / 6)


@pytest.mark.slow
def test_published_runs_are_met(tables: Path) -> None:
    found = planner.score(*planner_rows.read_runs(tables / "training_runs.csv"))["summary"]
    assert found["coverage"] > 0.95 and found["configs_per_minute"] > 100_000
    assert found["step_error_median"] < 0.08 and found["step_error_p90"] < 0.2
    assert found["tau_single"] > 0.85


@pytest.mark.slow
def test_the_page_says_what_the_score_says(tables: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = planner.score(*planner_rows.read_runs(tables / "training_runs.csv"))["summary"]
    said = {
        name: float(value) / (100 if percent else 1)
        for name, value, percent in (
            ("step_error_median", re.search(r"median of per-table medians.*?\| ([\d.]+) %", text)[1], True),  # type: ignore[index]
            ("step_error_p90", re.search(r"p90 of per-table medians \| ([\d.]+) %", text)[1], True),  # type: ignore[index]
            ("tau_single", re.search(r"one node \| ([\d.]+)", text)[1], False),  # type: ignore[index]
            ("regret_multi", re.search(r"several nodes \| [\d.]+[^|]* \| ([\d.]+) %", text)[1], True),  # type: ignore[index]
        )
    }
    for name, value in said.items():
        assert found[name] == pytest.approx(value, abs=0.006), name
    (near,) = re.findall(r"with it (\d+) of them would come within 15 %", text)
    stated = planner_rows.read_runs(tables / "training_runs.csv", as_stated=True)[0]
    counted = planner_peaks.near_all_peaks(stated)
    assert counted["vtrain_ground_truth_single"] == int(near) and sum(counted.values()) == int(near) + 1
