"""``trine export``: a configuration or a plan's layout in the words of other tools."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import export_cases as cases
import pytest

from trine.cli import main
from trine.optim.exports import dialect_names
from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.cluster_json import cluster_to_dict
from trine.optim.plan.layouts import DEFAULTS
from trine.optim.plan.plan_json import plan_to_dict
from trine.optim.plan.planning import plan as search

CLUSTER = cluster_to_dict(cluster_of("dgx-h100", 64))


def changed(**fields: Any) -> dict[str, Any]:
    """A model, tampered with."""
    return asdict(cases.DENSE) | fields


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    rows = (
        {
            "tensor": 2,
            "sequence": 1,
            "data": 8,
            "expert": 8,
            "pipeline": 4,
            "zero_stage": 1,
            "microbatches": 8,
        },
        {"data": 64, "expert": 8, "zero_stage": 3, "recompute": "full", "precision": "fp8"},
    )
    path.write_text(json.dumps(cases.plan_of(*rows)))
    return path


def test_the_best_layout_goes_to_standard_output_and_what_it_cannot_say_to_the_other(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(plan), "--to", "pytorch"]) == 0
    out, err = capsys.readouterr()
    tables = tomllib.loads(out)
    assert tables["parallel"] == {
        "tensor": 2,
        "sequence": True,
        "loss": True,
        "expert": 8,
        "pipeline": 4,
        "microbatches": 8,
        "schedule": "1f1b",
    }
    assert [line for line in err.splitlines() if not line.startswith("planned for ")] == [
        "not said: zero.stage = 1: beside other kinds of parallelism gradients are sharded too: written as 2"
    ]


def test_another_row_in_a_file(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "accelerate.yaml"
    assert main(["export", str(plan), "--row", "2", "--to", "accelerate", "-o", str(target)]) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"Wrote {target}\n")
    text = target.read_text()
    assert "num_processes: 64\nnum_machines: 8\n" in text and "fsdp_activation_checkpointing: true" in text
    assert "not said: parallel.expert = 8: it spreads no experts" in err


def test_several_files_go_into_a_folder(plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there" / "run"
    assert main(["export", str(plan), "--to", "megatron-deepspeed", "-o", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["ds_config.json", "megatron.flags"]
    assert json.loads((folder / "ds_config.json").read_text())["train_batch_size"] == 64
    assert "--deepspeed_config ds_config.json" in (folder / "megatron.flags").read_text()


def test_a_plan_for_other_software_says_what_it_takes_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    row = {"data": 32, "context": 2, "zero_stage": 1, "microbatches": 16}
    known = {
        "workload": asdict(cases.DENSE),
        "options": {"global_batch": 512, "memory_headroom": 0.1},
    }
    path.write_text(json.dumps(cases.plan_of(row, **known)))
    assert main(["export", str(path), "--to", "pytorch"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("planned for megatron-core (") and first.endswith(": plan with --stack trine")
    assert "under trine this layout does not fit: " in first and "72.0 GiB may be used" in first
    assert main(["export", str(path), "--to", "megatron"]) == 0
    assert "planned for" not in capsys.readouterr().err
    path.write_text(
        json.dumps(
            cases.plan_of(row, **{**known, "options": {"global_batch": 512, "memory_headroom": "0.1"}})
        )
    )
    assert main(["export", str(path), "--to", "pytorch"]) == 2
    assert "memory_headroom of its options is '0.1'" in capsys.readouterr().err


@pytest.mark.parametrize("name", dialect_names())
def test_every_dialect_takes_a_configuration_and_its_devices(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text('[zero]\nstage = 2\n[precision]\ndtype = "bf16"\nmaster_weights = true\n')
    assert main(["export", str(path), "--to", name, "--devices", "16", "--nodes", "2"]) == 0
    out, _ = capsys.readouterr()
    assert out.strip()


def test_the_help_names_every_dialect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    out = "".join(capsys.readouterr().out.split())  # names may be broken at their hyphens
    assert f"oneof{','.join(dialect_names())}" in out


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (
            cases.plan_of(),
            [],
            'holds no layouts: its "rows" are [], no list with one each: write the plan anew',
        ),
        ({"schema": "trine.plan/1"}, [], 'its "rows" are none'),
        (cases.plan_of({"tensor": 2}), ["--row", "2"], "holds 1 layouts: --row takes 1 to 1, not 2"),
        (cases.plan_of({"tensor": 2}), ["--row", "0"], "--row takes 1 to 1, not 0"),
        (cases.plan_of({"tensor": 2}), ["--devices", "8"], "is a plan, which says its devices and nodes"),
        (cases.plan_of({"tensor": "2"}), [], "tensor of a layout takes a whole number, not '2'"),
        (cases.plan_of({"tensr": 2}), [], "a layout has no 'tensr'"),
        (cases.plan_of({"tensor": 2}, rows=[{"step_s": 1.0}]), [], "row 1 has no layout"),
        (cases.plan_of({"tensor": 2}, rows="none"), [], 'its "rows" are "none"'),
        (
            cases.plan_of({"tensor": 2}, schema="trine.analysis/1"),
            [],
            'its "schema" is "trine.analysis/1", not "trine.plan/1"',
        ),
        (cases.plan_of({"tensor": 2}, workload={"name": "x"}), [], "its workload has no layers"),
        (
            cases.plan_of({"tensor": 2}, workload=changed(layers="32")),
            [],
            "layers must be a whole number, not '32'",
        ),
        (cases.plan_of({"tensor": 2}, workload=changed(gated=1)), [], "gated must be true or false, not 1"),
        (
            cases.plan_of({"tensor": 2}, workload=changed(rotary_base=None)),
            [],
            "rotary_base must be a number",
        ),
        (cases.plan_of({"tensor": 2}, workload=changed(latent=3)), [], "latent must be a table, not 3"),
        (
            cases.plan_of({"tensor": 2}, workload=changed(latent={"kv_rank": "x"})),
            [],
            "latent.kv_rank must be",
        ),
        (cases.plan_of({"tensor": 2}, workload=changed(latent={"rank": 1})), [], "has no key 'rank'"),
        (cases.plan_of({"tensor": 2}, workload={"layer": 2}), [], "a workload has no 'layer'"),
        (cases.plan_of({"tensor": 2}, workload=[]), [], "its workload is no table"),
        (
            cases.plan_of({"tensor": 2}, cluster=CLUSTER | {"devices_per_node": "8"}),
            [],
            "is '8', no whole number",
        ),
        ([1], [], 'its "schema" is null'),
    ],
)
def test_what_is_no_plan_is_one_line(
    content: Any, arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    assert main(["export", str(path), "--to", "megatron", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "arguments", "words"),
    [
        ("a.toml", "", ["--to", "megatrn"], "did you mean megatron?"),
        ("a.toml", "", ["--to", "megatron", "--row", "1"], "--row picks a layout of a plan"),
        ("a.toml", "[zero]\nstages = 2\n", ["--to", "megatron"], "did you mean zero.stage?"),
        ("a.toml", "", ["--to", "megatron", "--devices", "0"], "devices must be 1 or more, not 0"),
        (
            "a.toml",
            "[parallel]\ntensor = 4\n",
            ["--to", "megatron", "--devices", "6"],
            "must divide the 6 ranks",
        ),
        ("a.json", "{", ["--to", "megatron"], "is no JSON"),
        ("a.json", "[" * 100_000, ["--to", "megatron"], "is no JSON"),
        (None, "", ["--to", "megatron"], "cannot read the configuration"),
        ("a.toml", "", [], "required: --to"),
    ],
)
def test_bad_input_is_one_line(
    name: str | None,
    text: str,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / (name or "absent.toml")
    if name is not None:
        path.write_text(text)
    assert main(["export", str(path), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


def test_an_export_never_replaces_what_it_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text("[zero]\nstage = 2\n")
    assert main(["export", str(path), "--to", "pytorch", "-o", str(path)]) == 2
    assert "is what is read" in capsys.readouterr().err
    assert path.read_text() == "[zero]\nstage = 2\n"


def test_a_folder_of_files_replaces_none_that_it_is_made_of(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = plan.rename(tmp_path / "ds_config.json")
    before = source.read_text()
    assert main(["export", str(source), "--to", "megatron-deepspeed", "-o", str(tmp_path)]) == 2
    assert f"{source} is what is read" in capsys.readouterr().err
    assert source.read_text() == before and [path.name for path in tmp_path.iterdir()] == [source.name]
    assert main(["export", str(source), "--to", "megatron-deepspeed", "-o", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"tensor": 4},
            "row 1: its layout has data 8 x context 1 x tensor 4 x pipeline 4 = 128, and its plan is for devices 64",
        ),
        ({"microbatches": 4}, "= 32, and its plan is for global batch 64: plan anew with --pin"),
    ],
)
def test_a_plan_that_was_changed_by_hand_is_refused_in_one_line(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"tensor": 2, "sequence": 1, "data": 8, "pipeline": 4, "microbatches": 8}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(cases.plan_of(row)))
    assert main(["export", str(path), "--to", "megatron"]) == 0
    capsys.readouterr()
    path.write_text(json.dumps(cases.plan_of({**row, **changes})))
    assert main(["export", str(path), "--to", "megatron"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.count("\n") == 1


#: The same layout as a search has it: experts over tensor groups, stages of several chunks, ZeRO beside them.
WHOLE = {
    "tensor": 2,
    "sequence": 1,
    "data": 8,
    "expert": 8,
    "zero_stage": 1,
    "pipeline": 4,
    "microbatches": 8,
    "schedule": "interleaved",
    "chunks": 2,
}
MODEL = cases.MIXTURE.with_changes(layers=64)


def exported(plan: dict[str, Any], path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code and both streams of an export to Megatron-LM."""
    path.write_text(json.dumps(plan))
    code = main(["export", str(path), "--to", "megatron"])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("column", sorted(DEFAULTS))
def test_a_column_that_was_deleted_is_refused(
    column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plan = tmp_path / "plan.json", cases.plan_of(WHOLE, model=MODEL)
    code, out, _ = exported(plan, path, capsys)
    assert code == 0 and "--expert-model-parallel-size 8\n" in out and "--use-distributed-optimizer" in out
    del plan["rows"][0]["layout"][column]
    code, out, err = exported(plan, path, capsys)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"row 1: its layout has no {column}: put it back, or write the plan anew" in err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"expert": 5}, "expert 5 does not divide 256 experts"),
        ({"expert": 16}, "expert 16 does not divide the 8 tensor groups"),
        ({"sequence": 2}, "sequence must be from 0 to 1, not 2"),
        ({"zero_stage": 4}, "zero_stage must be from 0 to 3, not 4"),
        ({"recomputed_layers": 999}, "recomputed_layers 999 needs recompute=budget"),
        ({"recompute": "budget", "recomputed_layers": 17}, "from 1 to a stage's 16, not 17"),
        ({"chunks": 3}, "64 layers do not make 12 equal stages"),
        ({"shard": 3}, "shard 3 does not divide data 8"),
        ({"parameter_offload": "cpu"}, "parameter_offload needs zero_stage 3, not 1"),
        ({"schedule": "zb-v"}, "megatron-core does not offer schedule=zb-v, which nobody pinned"),
        ({"sequence": 0}, "megatron-core does not run "),
    ],
)
def test_a_layout_that_no_search_would_weigh_is_refused(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert exported(cases.plan_of(WHOLE, model=MODEL), path, capsys)[0] == 0
    code, out, err = exported(cases.plan_of({**WHOLE, **changes}, model=MODEL), path, capsys)
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stack": "nope"}, "its stack is no table"),
        ({"stack": None}, "its stack is no table"),
        ({"stack": {"name": "nope"}}, "nope"),
        ({"stack": {}}, "its stack has no name of a software, but None"),
        ({"cluster": None}, "its cluster is no table"),
        ({"workload": None}, "its workload is no table"),
        ({"options": {}}, "global_batch of its options is None, no whole number"),
        ({"options": {"global_batch": 64, "pins": [1]}}, "pins of its options are no table"),
    ],
)
def test_a_plan_whose_parts_were_changed_is_refused(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    code, out, err = exported(cases.plan_of(WHOLE, model=MODEL, **changes), path, capsys)
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1
    without = cases.plan_of(WHOLE, model=MODEL)
    for part in changes:
        del without[part]
    code, out, err = exported(without, path, capsys)
    assert (code, out) == (2, "") and f"it has no {part}: write the plan anew" in err


def test_layers_of_stages_are_those_of_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = cases.plan_of(WHOLE, model=MODEL)
    plan["rows"][0]["stage_layers"] = [8] * 8
    assert exported(plan, tmp_path / "plan.json", capsys)[0] == 0
    plan["rows"][0]["stage_layers"] = [1, 2]
    code, out, err = exported(plan, tmp_path / "plan.json", capsys)
    assert (code, out) == (2, "") and "its stage_layers are [1, 2], and its stages have [8, 8, 8" in err


@pytest.mark.parametrize(
    "pins",
    [
        {"schedule": "zb-v", "pipeline": 4},
        {"zero_stage": 2, "pipeline": 2},
        {"optimizer_offload": "remote"},
        {"recomputed_layers": 3},
        {"shard": 4, "zero_stage": 3},
        {"bucket_bytes": "25MiB", "precision": "fp8"},
    ],
)
@pytest.mark.slow
def test_what_a_pin_asks_for_beyond_the_software_is_exported(
    pins: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan_to_dict(search(cases.DENSE, "dgx-h100", devices=16, global_batch=64, pins=pins, top=3))
    for row in range(1, len(found["rows"]) + 1):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(found))
        assert main(["export", str(path), "--to", "megatron", "--row", str(row)]) == 0, capsys.readouterr()
    for row in found["rows"]:
        row["layout"]["compression"] = "onebit"  # nobody pinned that
    assert exported(found, tmp_path / "plan.json", capsys)[0] == 2
