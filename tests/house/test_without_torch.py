"""Reading, analysing, reporting and gating work where torch is not installed.

Fast: in a process in which torch and Dash cannot be imported. Slow: in a fresh environment into which
only the base was installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_traces import write_job

ROOT = Path(__file__).resolve().parents[2]

BLOCKED = """
import sys

from importlib.machinery import PathFinder

ABSENT = ("torch", "dash", "dash_mantine_components", "dash_ag_grid", "flask", "werkzeug", "plotly")
find = PathFinder.find_spec

def find_but(name, path=None, target=None):
    return None if name.split(".")[0] in ABSENT else find(name, path, target)

PathFinder.find_spec = staticmethod(find_but)
from trine.cli import main
sys.exit(main(sys.argv[1:]))
"""

Program = tuple[str, ...]


def run(program: Program, folder: Path, *arguments: str, code: int = 0) -> str:
    """Standard output of one verb, which must exit with ``code``."""
    found = subprocess.run(
        [*program, *arguments], check=False, capture_output=True, text=True, timeout=240, cwd=folder
    )
    assert found.returncode == code, f"{arguments}: {found.stderr}"
    assert "Traceback" not in found.stderr
    return found.stdout


def use_everything(program: Program, folder: Path) -> None:
    """Analyse, report in every format, compare, write a baseline and check against it."""
    sides = {"old": (10_000, 0), "again": (10_000, 10), "new": (13_000, 20)}
    for side, (step_us, seed) in sides.items():
        for number in range(3):
            write_job(folder / f"{side}{number}", step_us, seed=seed + number)
    old, again, new = ([f"{side}{number}" for number in range(3)] for side in sides)

    document = json.loads(run(program, folder, "analyze", "new0", "--format", "json"))
    assert document["schema"] == "trine.analysis/1" and document["source"]["world_size"] == 2
    breakdown = document["ranks"][0]["breakdown_ns"]
    assert sum(breakdown.values()) == document["ranks"][0]["window_ns"]
    assert "compute" in run(program, folder, "analyze", "new0")
    assert run(program, folder, "analyze", "new0", "--format", "md").count("|") > 10
    run(program, folder, "analyze", "new0", "--format", "html", "-o", "report.html")
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")

    assert "REGRESSION" in run(program, folder, "compare", *new, "--against", *old)
    run(program, folder, "check", *old, "--write-baseline", "baseline.json")
    assert "PASS" in run(program, folder, "check", *again, "--baseline", "baseline.json")
    assert "FAIL" in run(program, folder, "check", *new, "--baseline", "baseline.json", code=1)
    (folder / "budget.toml").write_text("step_time_ns = 11_000_000\n")
    assert "FAIL" in run(program, folder, "check", "new0", "--budget", "budget.toml", code=1)


@pytest.mark.slow
def test_everything_but_training_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    use_everything((sys.executable, "-c", BLOCKED), tmp_path)


def test_what_needs_torch_or_dash_says_how_to_get_it(tmp_path: Path) -> None:
    for arguments in (("dashboard", "."), ("demo",), ("hardware", "--calibrate")):
        found = subprocess.run(
            [sys.executable, "-c", BLOCKED, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        lines = found.stderr.strip().splitlines()
        assert found.returncode == 2, (arguments, found.stderr)
        assert len(lines) == 1 and "pip install" in lines[0], (arguments, lines)


@pytest.mark.slow
def test_the_base_alone_installs_and_works(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=120)
    python = str(environment / ("Scripts" if os.name == "nt" else "bin") / "python")
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        "constraints.txt",
        str(wheel),
    ]
    installed = subprocess.run(pip, check=False, cwd=ROOT, capture_output=True, text=True, timeout=280)
    if installed.returncode and not os.environ.get("TRINE_REQUIRE_NETWORK"):
        pytest.skip(f"the base could not be installed: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    absent = subprocess.run([python, "-c", "import torch"], check=False, capture_output=True, timeout=60)
    assert absent.returncode == 1
    use_everything((python, "-m", "trine"), tmp_path)
