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


def plan_of(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    plan = {
        "schema": "trine.plan/1",
        "workload": asdict(cases.MIXTURE),
        "cluster": {"name": "h100", "devices_per_node": 8, "nodes": 8},
        "rows": [{"layout": row, "step_s": 1.0} for row in rows],
    }
    return plan | changes


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
    path.write_text(json.dumps(plan_of(*rows)))
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
    assert err.splitlines() == [
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
        "cluster": cluster_to_dict(cluster_of("dgx-h100", 64)),
        "stack": {"name": "megatron-core"},
        "options": {"global_batch": 512, "memory_headroom": 0.1},
    }
    path.write_text(json.dumps(plan_of(row, **known)))
    assert main(["export", str(path), "--to", "pytorch"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("planned for megatron-core (") and first.endswith(": plan with --stack trine")
    assert "under trine this layout does not fit: " in first and "72.0 GiB may be used" in first
    assert main(["export", str(path), "--to", "megatron"]) == 0
    assert "planned for" not in capsys.readouterr().err
    path.write_text(json.dumps(plan_of(row, **{**known, "options": {"memory_headroom": "0.1"}})))
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
        (plan_of(), [], 'holds no layouts: its "rows" are [], no list with one each: write the plan anew'),
        ({"schema": "trine.plan/1"}, [], 'its "rows" are none'),
        (plan_of({"tensor": 2}), ["--row", "2"], "holds 1 layouts: --row takes 1 to 1, not 2"),
        (plan_of({"tensor": 2}), ["--row", "0"], "--row takes 1 to 1, not 0"),
        (plan_of({"tensor": 2}), ["--devices", "8"], "is a plan, which says its devices and nodes"),
        (plan_of({"tensor": "2"}), [], "tensor of a layout takes a whole number, not '2'"),
        (plan_of({"tensr": 2}), [], "a layout has no 'tensr'"),
        (plan_of({"tensor": 2}, rows=[{"step_s": 1.0}]), [], "row 1 has no layout"),
        (plan_of({"tensor": 2}, rows="none"), [], 'its "rows" are "none"'),
        (
            plan_of({"tensor": 2}, schema="trine.analysis/1"),
            [],
            'its "schema" is "trine.analysis/1", not "trine.plan/1"',
        ),
        (plan_of({"tensor": 2}, workload={"name": "x"}), [], "its workload has no layers"),
        (
            plan_of({"tensor": 2}, workload=changed(layers="32")),
            [],
            "layers must be a whole number, not '32'",
        ),
        (plan_of({"tensor": 2}, workload=changed(gated=1)), [], "gated must be true or false, not 1"),
        (plan_of({"tensor": 2}, workload=changed(rotary_base=None)), [], "rotary_base must be a number"),
        (plan_of({"tensor": 2}, workload=changed(latent=3)), [], "latent must be a table, not 3"),
        (plan_of({"tensor": 2}, workload=changed(latent={"kv_rank": "x"})), [], "latent.kv_rank must be"),
        (plan_of({"tensor": 2}, workload=changed(latent={"rank": 1})), [], "has no key 'rank'"),
        (plan_of({"tensor": 2}, workload={"layer": 2}), [], "a workload has no 'layer'"),
        (plan_of({"tensor": 2}, workload=[]), [], "its workload is no table"),
        (plan_of({"tensor": 2}, cluster={"devices_per_node": "8"}), [], "is '8', no whole number"),
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
            "row 1 has data 8 x context 1 x tensor 4 x pipeline 4 = 128, and its plan is for devices 64",
        ),
        ({"microbatches": 4}, "= 32, and its plan is for global batch 64: plan anew with --pin"),
    ],
)
def test_a_plan_that_was_changed_by_hand_is_refused_in_one_line(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"tensor": 2, "data": 8, "pipeline": 4, "microbatches": 8}
    known = {"cluster": {"devices": 64, "devices_per_node": 8}, "options": {"global_batch": 64}}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of(row, **known)))
    assert main(["export", str(path), "--to", "megatron"]) == 0
    capsys.readouterr()
    path.write_text(json.dumps(plan_of({**row, **changes}, **known)))
    assert main(["export", str(path), "--to", "megatron"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.count("\n") == 1
