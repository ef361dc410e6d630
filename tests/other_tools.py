"""Tools that are installed beside the project, for tests that hand them what it writes (``tests/other_tools.txt``)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

__all__ = ["run_with"]

_FOLDER = "TRINE_OTHER_TOOLS"


def run_with(package: str, program: str, *arguments: str, folder: Path, given: str = "") -> str:
    """What ``program`` prints, run with ``package`` in reach.

    Where it is not installed the test skips, and fails where the variable promises it.
    """
    folder_of_tools = os.environ.get(_FOLDER)
    path = [*filter(None, [folder_of_tools]), *sys.path]
    if PathFinder.find_spec(package, path) is None:
        if folder_of_tools:
            pytest.fail(f"{package} is not installed although ${_FOLDER} is set: see tests/other_tools.txt")
        pytest.skip(f"{package} is not installed: see tests/other_tools.txt, and set ${_FOLDER}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get(_FOLDER, "")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
