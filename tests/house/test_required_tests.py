"""Where CI requires data, a browser or other tools, a test that skips for want of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from other_tools import run_with

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import pytest

@pytest.mark.browser
def test_browser():
    pytest.skip("no chromium here")

def test_data(data):
    pass

def test_free():
    pytest.skip("for another reason")
"""


@pytest.mark.parametrize(
    ("variables", "closing"),
    [
        ((), "3 skipped"),
        (("TRINE_REQUIRE_BROWSER",), "1 failed, 2 skipped"),
        (("TRINE_REQUIRE_BROWSER", "TRINE_REQUIRE_DATA"), "1 failed, 1 skipped, 1 error"),
    ],
)
@pytest.mark.slow
def test_skips_become_failures_where_they_are_forbidden(
    tmp_path: Path, variables: tuple[str, ...], closing: str
) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = browser\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRINE_")}
    environment |= {
        "TRINE_TEST_DATA": str(tmp_path / "absent"),
        "PYTHONPATH": str(ROOT / "benchmarks"),
        **dict.fromkeys(variables, "1"),
    }
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:dash", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=tmp_path,
    )
    assert closing in found.stdout.splitlines()[-1], found.stdout
    assert found.returncode == (1 if variables else 0)


def test_a_file_of_the_dashboard_that_skips_whole_fails_too(tmp_path: Path) -> None:
    folder = tmp_path / "dashboard"
    folder.mkdir()
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_whole.py").write_text("import pytest\npytest.importorskip('absent_module_of_trine')\n")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:dash", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TRINE_REQUIRE_BROWSER": "1"},
        cwd=tmp_path,
    )
    assert found.returncode != 0 and "TRINE_REQUIRE_BROWSER" in found.stdout


def test_a_tool_that_the_folder_of_other_tools_lacks_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRINE_OTHER_TOOLS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="absent_tool is not installed"):
        run_with("absent_tool", "", folder=tmp_path)
    monkeypatch.setenv("TRINE_OTHER_TOOLS", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=r"absent_tool .* although \$TRINE_OTHER_TOOLS is set"):
        run_with("absent_tool", "", folder=tmp_path)
