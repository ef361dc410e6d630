"""The shipped configurations that need ranks, and the pretrained sample: each trains end to end, and its record is analysed."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import trine

torch = pytest.importorskip("torch")

TINY = ["--layers=2", "--hidden=32", "--heads=2", "--sequence=32", "--rate=0.01", "--steps=6"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a text in it that is quick to learn."""
    (tmp_path / "text").write_bytes(b"def function(x):\n    return x\n" * 400)
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def hold(folder: Path, said: str, ranks: int, plain: list[float]) -> None:
    """The loss begins where the plain run's does and falls; the record has every rank, and is analysed."""
    losses = json.loads((folder / "losses.json").read_text())
    assert f"6 steps on {ranks} x cpu: loss {losses[0]:.3f} to {losses[-1]:.3f}" in said
    assert len(losses) == 6 and all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.3, losses
    assert statistics.fmean(losses) == pytest.approx(statistics.fmean(plain), rel=0.05), (losses, plain)
    record = trine.load(folder / "run")
    assert all(record.rank(rank).steps is not None for rank in range(ranks))
    analysed = run([sys.executable, "-m", "trine", "analyze", "run"], folder)
    assert f"{ranks} rank" in analysed


def plainly(program: str, arguments: list[str], folder: Path) -> list[float]:
    """Losses of the same samples a step, on one rank and by the loop that people write."""
    run([sys.executable, "-m", f"trine.samples.{program}", *arguments, "--losses=plain.json"], folder)
    found: list[float] = json.loads((folder / "plain.json").read_text())
    return found


def configured(program: str, name: str, ranks: int, arguments: list[str], folder: Path) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    flags = [*arguments, f"--config={name}", "--losses=losses.json", "--record=run"]
    return run([sys.executable, *launcher, "-m", f"trine.samples.{program}", *flags], folder)


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("program", "name", "ranks", "shares", "more"),
    [
        ("train_gpt", "gpt_3d", 8, 2, []),
        ("train_gpt", "long_context", 4, 1, ["--positions=rotary"]),
        ("train_moe", "moe", 2, 2, ["--experts=4"]),
    ],
)
def test_a_configuration_trains_on_its_ranks(
    program: str, name: str, ranks: int, shares: int, more: list[str], folder: Path
) -> None:
    """``shares``: how many ranks see batches of their own."""
    arguments = [*TINY, *more, "--text=text"]
    plain = plainly(program, [*arguments, f"--batch={8 * shares}"], folder)
    said = configured(program, name, ranks, [*arguments, "--batch=8"], folder)
    hold(folder, said, ranks, plain)


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_pretrained_model_trains_on_two_tensor_ranks(folder: Path) -> None:
    pytest.importorskip(
        "transformers", reason="the sample's models are of transformers; install trine[transformers]"
    )
    arguments = [*TINY, "--kv-heads=2", "--model=llama", "--text=text", "--batch=8"]
    plain = plainly("pretrained", arguments, folder)
    said = configured("pretrained", "pretrained_tensor", 2, arguments, folder)
    hold(folder, said, 2, plain)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen", "mixtral"])
def test_each_pretrained_model_trains_alone(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "transformers", reason="the sample's models are of transformers; install trine[transformers]"
    )
    from trine.samples import pretrained

    monkeypatch.chdir(folder)
    arguments = [*TINY, "--kv-heads=2", f"--model={model}", "--text=text", "--batch=8"]
    assert pretrained.main([*arguments, "--record=run", "--losses=losses.json"]) == 0
    hold(folder, capsys.readouterr().out, 1, json.loads((folder / "losses.json").read_text()))


def test_without_transformers_the_sample_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trine.samples import pretrained

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert pretrained.main([]) == 2
    said = capsys.readouterr().err
    assert 'pip install "trine[transformers]"' in said and said.count("\n") == 1
