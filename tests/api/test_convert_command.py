"""``trine convert``: configurations of other tools in Trine's words and back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from trine.cli import main

DEEPSPEED = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
    "steps_per_print": 9,
}


def test_deepspeeds_json_as_toml_with_what_is_left_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    assert main(["convert", str(path)]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out) == {
        "precision": {"dtype": "bf16", "master_weights": True},
        "zero": {"stage": 2},
    }
    assert "# to do: pass clip_norm=1.0" in out and "# left out: steps_per_print" in out
    assert err == ""


def test_there_and_back_through_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, toml, back = tmp_path / "ds.json", tmp_path / "tuned.toml", tmp_path / "back.json"
    source.write_text(json.dumps(DEEPSPEED))
    assert main(["convert", str(source), "-o", str(toml)]) == 0
    assert "to do: pass clip_norm=1.0" in capsys.readouterr().err
    assert main(["convert", str(toml), "--to", "deepspeed", "-o", str(back)]) == 0
    assert "to do: gradient_clipping is written as 0.0" in capsys.readouterr().err
    written = json.loads(back.read_text())
    assert written["zero_optimization"] == {"stage": 2} and written["bf16"] == {"enabled": True}
    assert main(["convert", str(back), "--from", "deepspeed"]) == 0


def test_accelerates_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml", reason="Accelerate's files are YAML; install trine[accelerate]")
    path = tmp_path / "accelerate.yml"
    path.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: 'no'\n")
    assert main(["convert", str(path)]) == 0
    assert tomllib.loads(capsys.readouterr().out) == {"zero": {"stage": 3}}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("ds.json", '{"zero_optimisation": {}}', "did you mean zero_optimization"),
        ("ds.txt", "{}", "Say --from"),
        ("absent.json", None, "cannot read"),
        ("a.toml", "[communication]\nalgorithm = 'ring'", "no counterpart in DeepSpeed"),
    ],
)
def test_one_line_and_the_exit_code_of_bad_input(
    name: str, text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    target = ["--to", "deepspeed"] if name.endswith("toml") else []
    assert main(["convert", str(path), *target]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
