"""`trine plan` as a shell sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trine.cli import main

ASK = [
    "plan",
    "llama3-8b",
    "dgx-h100",
    "--devices",
    "8",
    "--global-batch",
    "64",
    "--pin",
    "pipeline=1",
    "--top",
    "3",
]


def test_text_says_the_winner_its_time_and_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, "--tokens", "1T", "--price", "2.5"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    head = "\n".join(shown.out.splitlines()[:8])
    assert "llama3-8b" in head and "8 x H100" in head and "megatron-core" in head
    assert (
        " a step, MFU " in " ".join(head.split())
        and "tokens/s" in head
        and "days" in head
        and "price" in head
    )
    for title in ("The best layouts", "Where the step goes", "How modules are split", "Why not otherwise"):
        assert title in shown.out
    assert "fitted on" in shown.out and "configurations" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 100


def test_every_number_has_its_interval_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, "--tokens", "1T", "--price", "2.5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    ranges = r"[\d.]+( k| M)? to [\d.]+"
    columns = rf"(?<!\S)1 {ranges} s {ranges} % {ranges} GiB {ranges} [kM] {ranges} {ranges} [kMG]"
    assert len(re.findall(columns, shown)) == 2, "of the ranking and of the front"
    assert re.search(rf"MFU \d+ % \({ranges} %\)", shown)
    assert re.search(r"context in tokens, of the best layout: [\d,]+ \([\d,]+ to [\d,]+\)", shown)
    assert "micro-batches of" in shown and "It may run out" not in shown


def test_a_plan_without_headroom_says_what_may_run_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ASK, "--memory-headroom", "0", "--pin", "tensor=1", "--pin", "data=8"]
    assert main([*words, "--format", "json"]) == 0
    memory = json.loads(capsys.readouterr().out)["rows"][0]["memory"]
    assert memory["peak_high_bytes"] > 0.99 * memory["capacity_bytes"] and not memory["fits_at_high"]
    assert main(words) == 0
    assert "It may run out of memory" in capsys.readouterr().out


def test_what_is_searched_beside_the_usual_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, "--search", "precision", "--pin", "tensor=1"]) == 0
    shown = capsys.readouterr().out
    assert "fp8" in shown and "searched, too" in shown
    assert main([*ASK, "--search", "precison"]) == 2
    assert "did you mean 'precision'" in capsys.readouterr().err


def test_json_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main([*ASK, "-o", str(file)]) == 0
    assert capsys.readouterr().err == f"Wrote {file}\n"
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["schema"] == "trine.plan/1" and len(content["rows"]) == 3
    assert content["options"]["pins"] == {"pipeline": [1]}
    assert content["stack"]["name"] == "megatron-core"


def test_the_best_step_is_written_as_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "planned"
    words = [
        *ASK[:-4],
        "--pin",
        "pipeline=2",
        "--pin",
        "microbatches=8",
        "--top",
        "1",
        "--record",
        str(folder),
    ]
    assert main(words) == 0
    assert f"Wrote {folder}" in capsys.readouterr().err
    assert main(["analyze", str(folder)]) == 0
    assert "2 ranks" in capsys.readouterr().out
    assert main(words) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["md", "html"])
def test_other_forms(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, "--format", form]) == 0
    assert "The best layouts" in capsys.readouterr().out


def test_files_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster = tmp_path / "model.toml", tmp_path / "cluster.toml"
    model.write_text('like = "llama3-8b"\nlayers = 16\n', encoding="utf-8")
    cluster.write_text('device = "H100-SXM-80GB"\ndevices_per_node = 4\n', encoding="utf-8")
    assert (
        main(["plan", str(model), str(cluster), "--global-batch", "8", "--stack", "torchtitan", "--top", "1"])
        == 0
    )
    assert "4 x H100" in capsys.readouterr().out
    before = model.read_text(encoding="utf-8")
    assert main(["plan", str(model), str(cluster), "--format", "text", "-o", str(model)]) == 2
    assert model.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nosuchmodel", "dgx-h100"], "no model is called"),
        (["llama3-8b", "nosuchcluster"], "no cluster is called"),
        (["llama3-8b", "dgx-h100", "--devices", "12"], "take 8 or 16"),
        (["llama3-8b", "dgx-h100", "--devices", "0"], "at least 1"),
        (["llama3-8b", "dgx-h100", "--pin", "tensor=16"], "nearest that works: tensor 8"),
        (["llama3-8b", "dgx-h100", "--pin", "tensor=8", "--pin", "tensor=4"], "pinned twice"),
        (["llama3-8b", "dgx-h100", "--pin", "colour=red"], "a layout has no 'colour'"),
        (["llama3-405b", "dgx-h100"], "does not fit"),
        (["llama3-8b", "dgx-h100", "--tokens", "lots"], "no number of tokens"),
        (["llama3-8b", "dgx-h100", "--tokens", "-1T"], "is written after =, as --option=-1"),
        (["llama3-8b", "dgx-h100", "--tokens=-1T"], "no number of tokens"),
        (["", "dgx-h100"], "no model is named"),
        (["llama3-8b", "dgx-h100", "--price", "2"], "needs the tokens"),
        (["llama3-8b", "dgx-h100", "--memory-headroom", "2"], "memory headroom"),
        (["llama3-8b", "dgx-h100", "--stack", "abacus"], "no software stack"),
        (["llama3-8b", "dgx-h100", "-o", "plan.pdf"], "no form of a report"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.strip().splitlines()
    assert told in line and shown.out == ""
