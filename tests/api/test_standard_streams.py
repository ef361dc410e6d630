"""Every verb on streams that are closed, full, or of a small character set: one line, the right code, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trace_builders import operator, step, trace, written

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def shell(command: str, **names: object) -> subprocess.CompletedProcess[bytes]:
    """``{trine}`` and the given names in a shell command."""
    filled = command.format(trine=f"{sys.executable} -m trine", **names)
    return subprocess.run(["bash", "-c", filled], capture_output=True, timeout=120, check=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A trace whose names hold Greek and an escape, in a file whose name is no UTF-8."""
    steps = [step(number, 100 + 1000 * number, 900) for number in range(9)]
    work = [operator("μ \x1b[31m", 110 + 1000 * number, 500) for number in range(9)]
    return written(tmp_path / "r\udcfcn.json", trace(*steps, *work, rank=0, world_size=1))


@pytest.mark.parametrize("verb", ["analyze {run}", "check {run} --budget {budget}"])
def test_a_full_disk_behind_standard_output_is_one_line(verb: str, run: Path, tmp_path: Path) -> None:
    budget = written(tmp_path / "budget.toml", "step_time_ns = 1_000_000_000")
    done = shell("{trine} " + verb + " > /dev/full", run=run, budget=budget)
    assert done.returncode == 2
    assert done.stderr.decode() == "trine: No space left on device (while writing to standard output)\n"


def test_closed_streams_are_nobody_listening(run: Path) -> None:
    assert shell("{trine} analyze {run} >&-", run=run).returncode == 0
    quiet = shell("{trine} analyze {run} --format json 2>&-", run=run)
    assert quiet.returncode == 0 and json.loads(quiet.stdout)["schema"] == "trine.analysis/1"
    failed = shell("{trine} analyze {run} 2>&-", run="/nowhere")
    assert (failed.returncode, failed.stdout) == (2, b""), "an error is not the answer"


def test_the_code_survives_a_standard_error_that_is_full() -> None:
    assert shell("{trine} analyze /nowhere 2>/dev/full").returncode == 2


def test_a_reader_that_goes_away_is_no_error(run: Path) -> None:
    done = shell("{trine} analyze {run} | head -1; exit ${{PIPESTATUS[0]}}", run=run)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("verb", ["analyze {run}", "compare {run} --against {other} --min-steps 2"])
@pytest.mark.slow
def test_an_ascii_terminal_gets_ascii(verb: str, run: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other.json", run.read_bytes())
    done = shell("PYTHONIOENCODING=ascii:strict {trine} " + verb, run=run, other=other)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii() and b"\x1b" not in done.stdout


@pytest.mark.slow
def test_json_is_whole_whatever_the_character_set(run: Path, tmp_path: Path) -> None:
    ascii_only = shell("PYTHONIOENCODING=ascii {trine} analyze {run} --format json", run=run)
    assert ascii_only.stdout.isascii()
    assert shell("{trine} analyze {run} -o {out}", run=run, out=tmp_path / "out.json").returncode == 0
    in_a_file = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert json.loads(ascii_only.stdout) == in_a_file
    assert in_a_file["source"]["path"].endswith("/r?n.json")
    assert in_a_file["operators"][0]["name"] == "μ \x1b[31m"


def test_an_error_prints_escapes_of_a_name_as_text(tmp_path: Path) -> None:
    done = shell("{trine} analyze $'{folder}/\\x1b[31mred.json'", folder=tmp_path)
    assert done.returncode == 2 and b"\x1b" not in done.stderr and rb"\x1b[31mred" in done.stderr


def test_an_empty_path_is_not_the_working_folder() -> None:
    done = shell("{trine} analyze ''")
    assert done.returncode == 2 and b"an empty path was given" in done.stderr


@pytest.mark.slow
def test_a_full_disk_leaves_the_older_report_as_it_was(run: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text("the older one")
    done = shell("ulimit -f 1; {trine} analyze {run} -o {report}", run=run, report=report)
    assert done.returncode == 2 and b"cannot write" in done.stderr
    assert report.read_text() == "the older one"
    assert sorted(each for each in tmp_path.iterdir()) == sorted([report, run]), (
        "nothing half written is left"
    )
    assert shell("{trine} analyze {run} -o {report}", run=run, report=report).returncode == 0
    assert report.read_text() != "the older one"
