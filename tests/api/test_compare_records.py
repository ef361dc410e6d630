"""Runs that trine.profile recorded: a slower forward pass is found, named, and fails the check."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import trine
from trine.cli import main

torch = pytest.importorskip("torch", reason="recording a run needs torch; install trine[train]")


class Slow(torch.nn.Module):  # type: ignore[name-defined,misc]
    """A linear layer that sleeps first, so that forward takes a known time at least."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layer = torch.nn.Linear(32, 1)

    def forward(self, batch: object) -> object:
        time.sleep(self.seconds)
        return self.layer(batch)


def record(path: Path, seconds: float, steps: int = 24) -> str:
    torch.manual_seed(0)
    model = Slow(seconds)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trine.profile(str(path), model=model, optimizer=optimizer, windows=None) as prof:
        for batch in prof.steps([torch.randn(4, 32) for _ in range(steps)]):
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return str(path)


@pytest.mark.slow
def test_a_slower_forward_is_found_named_and_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In turn, so that whatever else the machine does hits both sides.
    new, old, same = [], [], []
    for number in range(3):
        new.append(record(tmp_path / f"new-{number}", 0.020))
        old.append(record(tmp_path / f"old-{number}", 0.010))
        same.append(record(tmp_path / f"same-{number}", 0.010))

    assert main(["compare", *new, "--against", *old, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "regression"
    assert document["step_time"]["ratio"] > 1.3
    worst = document["causes"][0]
    assert (worst["kind"], worst["name"]) == ("phase", "forward")
    assert worst["change_ns"] > 5e6
    assert document["environment"] == [] and document["configuration"] == []

    baseline = str(tmp_path / "baseline.json")
    assert main(["check", *old, "--write-baseline", baseline]) == 0
    assert main(["check", *new, "--baseline", baseline]) == 1
    # The healthy control sleeps as long as the baseline did: whatever the machine adds, 50 % is not it.
    assert main(["check", *same, "--baseline", baseline, "--effect", "0.5"]) == 0
    run = json.loads(Path(baseline).read_text())["runs"][0]
    assert run["environment"]["torch"] == torch.__version__ and run["environment"]["world_size"] == 1
    assert run["configuration"]["model"]["class"] == "Slow"
