"""The sample: a real model on real text, alone, by configuration and profiled."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trine.samples.gpt import GPT, GPTConfig, loss_of
from trine.samples.text import SourceText, standard_library

TINY = ["--layers=2", "--hidden=32", "--heads=2", "--sequence=32", "--batch=4", "--steps=8"]


def _run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trine.samples.train_gpt", *TINY, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_the_model_is_what_it_says() -> None:
    torch.manual_seed(0)
    shape = GPTConfig(layers=3, hidden=48, heads=4, vocab=256, sequence=16)
    model = GPT(shape)
    a_block = 12 * 48 * 48 + 13 * 48  # weights, biases and two norms
    expected = 3 * a_block + (256 + 16) * 48 + 2 * 48
    assert sum(p.numel() for p in model.parameters()) == expected
    ids = torch.randint(0, 256, (2, 16))
    assert model(ids).shape == (2, 16, 256)
    targets = torch.randint(0, 256, (2, 16))  # other than the inputs, which a tied head knows
    assert float(loss_of(model, (ids, targets)).detach()) == pytest.approx(math.log(256), rel=0.05)


def test_attention_is_causal_and_the_same_both_ways() -> None:
    torch.manual_seed(0)
    manual = GPT(GPTConfig(layers=2, hidden=32, heads=2, sequence=16)).double()
    fused = GPT(GPTConfig(layers=2, hidden=32, heads=2, sequence=16, attention="sdpa")).double()
    fused.load_state_dict(manual.state_dict())
    ids = torch.randint(0, 256, (2, 16))
    torch.testing.assert_close(manual(ids), fused(ids), rtol=1e-10, atol=1e-12)
    later = ids.clone()
    later[:, 9:] = 7
    torch.testing.assert_close(manual(ids)[:, :9], manual(later)[:, :9])


def test_wrong_shapes_say_so() -> None:
    with pytest.raises(ValueError, match="3 heads do not divide"):
        GPTConfig(hidden=32, heads=3)
    with pytest.raises(ValueError, match="magic"):
        GPTConfig(attention="magic")


def test_the_text_is_real_and_the_same_every_time() -> None:
    text = standard_library(1 << 17)
    assert len(text) == 1 << 17
    assert b"def " in text and b"import " in text
    assert text == standard_library.__wrapped__(1 << 17)
    data = SourceText(text, 64)
    ids, targets = data[5]
    assert bytes(ids.tolist()) == text[320:384] and bytes(targets.tolist()) == text[321:385]
    last, _ = data[len(data) - 1]
    assert len(last) == 64
    with pytest.raises(ValueError, match="too short"):
        SourceText(b"short", 64)


@pytest.mark.slow
def test_the_script_plain_configured_and_recorded(tmp_path: Path) -> None:
    import trine

    plain = _run("--losses=plain.json", folder=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert "8 steps on 1 x cpu" in plain.stdout
    config = trine.Config().with_changes({"compute.attention": "sdpa", "compute.fuse": ["optimizer"]})
    (tmp_path / "c.toml").write_text(config.to_toml())
    tuned = _run("--losses=tuned.json", "--config=c.toml", "--record=run", folder=tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    losses = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "tuned")]
    assert len(losses[0]) == 8
    assert max(abs(a - b) / a for a, b in zip(*losses, strict=True)) <= 1e-5
    rank = trine.load(tmp_path / "run").rank(0)
    assert rank.steps is not None
    assert rank.steps["loss"].tolist() == pytest.approx(losses[1], rel=1e-6)
    assert set(rank.steps["tokens"].tolist()) == {4 * 32}
    assert rank.metadata["attention"] == "sdpa"
    assert rank.metadata["configuration"] == config.to_dict()
    assert rank.metadata["optimizer"]["implementation"] == "fused"
    assert rank.metadata["model"]["shape"]["layers"] == 2


def test_a_wrong_configuration_stops_before_training(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[zero]\nstage = 3\n")
    failed = _run("--config=c.toml", folder=tmp_path)
    assert failed.returncode != 0
    assert "zero.stage" in failed.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["gpt_fast", "gpt_sharded", "gpt_slow_network", "gpt_two_level"])
def test_each_configuration_trains(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, where those that need ranks refuse by name; the torchrun line of the documentation runs them on two."""
    from trine.record.errors import UsageError
    from trine.samples import train_gpt

    monkeypatch.chdir(tmp_path)
    arguments = [*TINY, "--data=documents", f"--config={name}"]
    if name == "gpt_fast":
        assert train_gpt.main(arguments) == 0
        assert capsys.readouterr().out.startswith("8 steps on 1 x cpu: loss ")
    else:
        with pytest.raises(UsageError, match="torchrun"):
            train_gpt.main(arguments)


def test_checkpoints_are_the_engines() -> None:
    from trine.samples import train_gpt

    with pytest.raises(SystemExit):
        train_gpt.main([*TINY, "--save=checkpoints/one"])
