"""`trine verify`: the same is called the same, and each fault is named with its parameter, step and key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trine.cli import main

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS / "verified_training.py"

LOOP = """
import torch
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(40):
    inputs, targets = torch.randn(16, 8), torch.randint(0, 4, (16,))
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def verify(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "trine", "verify", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def report(*arguments: str, folder: Path | None = None) -> tuple[int, dict[str, Any]]:
    ended = verify("--format", "json", *arguments, folder=folder)
    assert ended.returncode in (0, 1), ended.stderr
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.slow
def test_an_engine_that_trains_the_same() -> None:
    code, found = report("-n", "4", str(SCRIPT))
    assert code == 0
    assert found["verdict"] == "same within the stated tolerance"
    assert [check["name"] for check in found["checks"]] == ["losses", "gradients", "replicas"]
    assert all(check["holds"] for check in found["checks"])
    assert found["steps"] == 4
    assert found["configuration"] == {"compute": {"fuse": ["optimizer"]}, "accumulation": {"steps": 2}}
    assert 0.0 < found["tolerance"]["loss"] < 1e-4


@pytest.mark.slow
def test_a_wrong_gradient_is_named() -> None:
    ended = verify("-n", "2", "--no-search", str(SCRIPT), "scale")
    assert ended.returncode == 1, ended.stderr
    failed = next(line for line in ended.stdout.splitlines() if line.startswith("FAIL  gradients"))
    assert "blocks.1.up.weight at step 0: 5.0e-01 apart" in failed
    assert ended.stdout.splitlines()[-1].startswith("not the same: ")


@pytest.mark.slow
def test_what_a_region_recomputes_otherwise_is_named() -> None:
    _, healthy = report("-n", "2", "--no-search", str(SCRIPT), "checkpointing")
    assert healthy["checks"][-1]["said"] == "the same bits in 2 recomputed regions"
    code, found = report("-n", "2", "--no-search", str(SCRIPT), "random")
    assert code == 1
    assert found["checks"][-1]["where"] == "blocks.0"


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_replica_that_drifts_is_named_with_its_step() -> None:
    code, found = report("-n", "4", "--ranks", "2", "--no-search", str(SCRIPT), "replica")
    assert code == 1
    replicas = next(check for check in found["checks"] if check["name"] == "replicas")
    assert not replicas["holds"]
    assert replicas["said"] == "blocks.1.up.weight differs between rank 0 and rank 1 after step 2"


@pytest.mark.slow
def test_a_run_that_ends_early_is_not_the_same() -> None:
    code, found = report("-n", "6", "--no-search", str(SCRIPT), "fewer")
    assert code == 1
    assert found["checks"][0]["said"] == "the optimised run took 3 steps where the plain one took 6"


@pytest.mark.slow
def test_a_loop_without_an_engine_and_the_key_at_fault(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "both.toml").write_text('[precision]\ndtype = "bf16"\n[compute]\nfuse = ["optimizer"]\n')
    ended = verify(
        "-n", "3", "--config", "both.toml", "--loss-tolerance", "1e-6", "--gradient-tolerance", "1e-6", "loop.py",
        folder=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[-1].endswith("the key at fault is precision.dtype")
    code, found = report("-n", "3", "--config", "both.toml", "loop.py", folder=tmp_path)
    assert code == 0, found


@pytest.mark.slow
def test_a_script_that_breaks_says_its_own_error() -> None:
    ended = verify("-n", "4", str(SCRIPT), "crash")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        "trine: the plain run ended with exit code 1: RuntimeError: something broke"
    )
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "needs a script"),
        (("absent.py",), "there is no script absent.py"),
        (("-m", "absent_module"), "there is no module absent_module"),
        (("--steps", "0", "loop.py"), "--steps takes 1 or more"),
        (("--loss-tolerance", "-1", "loop.py"), "--loss-tolerance takes 0 or more"),
        (("--timeout", "nan", "loop.py"), "--timeout takes seconds"),
        (("--config", "broken.toml", "loop.py"), "did you mean precision.dtype"),
        (("--config", "absent.toml", "loop.py"), "cannot read the configuration absent.toml"),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "broken.toml").write_text('[precision]\ndtyp = "bf16"\n')
    assert main(["verify", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("loop.py",), "nothing to prove"),
        (("--config", "engine.toml", "loop.py"), "accumulation.steps changes the training loop"),
        (("--config", "engine.toml", "empty.py"), "took no optimizer step"),
        (("--config", "fused.toml", "untrained.py"), "took no optimizer step"),
    ],
)
def test_what_cannot_be_verified_is_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "empty.py").write_text("import torch\n")
    (tmp_path / "untrained.py").write_text("import torch\ntorch.nn.Linear(2, 2)\n")
    (tmp_path / "fused.toml").write_text('[compute]\nfuse = ["optimizer"]\n')
    (tmp_path / "engine.toml").write_text("[accumulation]\nsteps = 2\n")
    ended = verify("-n", "2", *arguments, folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_inside_a_launcher_it_says_how_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["verify", str(SCRIPT)]) == 2
    assert "trine verify --ranks 4" in capsys.readouterr().err


SCALED = LOOP.replace("for step", "scaler = torch.amp.GradScaler('cpu')\nfor step").replace(
    "    torch.nn.functional.cross_entropy(model(inputs), targets).backward()\n    optimizer.step()\n",
    "    scaler.scale(torch.nn.functional.cross_entropy(model(inputs), targets)).backward()\n"
    "    scaler.step(optimizer)\n    scaler.update()\n",
)


@pytest.mark.slow
def test_a_fused_optimizer_unscales_for_itself(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCALED)
    (tmp_path / "fused.toml").write_text('[compute]\nfuse = ["optimizer"]\n')
    code, found = report("-n", "3", "--config", "fused.toml", "loop.py", folder=tmp_path)
    assert code == 0, found


LEAVING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, file=open("pids", "w"), flush=True)
time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["timeout", "interrupt", "terminate"])
def test_nothing_is_left_of_a_run_that_hangs(tmp_path: Path, how: str) -> None:
    (tmp_path / "loop.py").write_text(LEAVING)
    (tmp_path / "fused.toml").write_text('[compute]\nfuse = ["optimizer"]\n')
    folders = tmp_path / "temporary"
    folders.mkdir()
    seconds = "8" if how == "timeout" else "200"
    verifying = subprocess.Popen(
        [sys.executable, "-m", "trine", "verify", "--timeout", seconds, "--config", "fused.toml", "loop.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(folders)},
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)
    child = int((tmp_path / "pids").read_text())
    if how != "timeout":
        verifying.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGTERM)
    _, said = verifying.communicate(timeout=60)
    assert verifying.returncode == {"timeout": 2, "interrupt": 130, "terminate": 143}[how], said
    assert len(said.splitlines()) <= 1
    assert not list(folders.iterdir())
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
