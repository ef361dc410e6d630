"""What the tests of the house share: the committed files, and a wheel that is built from them alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tracked() -> list[Path]:
    """Committed files that are there."""
    found = subprocess.run(
        ["git", "ls-files", "-z"], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if found.returncode:
        pytest.skip("this is no git checkout, so there is no list of committed files")
    return [ROOT / name for name in found.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="session")
def wheel(tracked: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the committed files: nothing that lies about, or that an earlier build left, can get in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for path in tracked:
        if not path.is_relative_to(ROOT / "tests"):
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    # The build backend directly: no index, no other environment, the setuptools of this one.
    work = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    built = subprocess.run(
        [sys.executable, "-c", work], check=False, cwd=source, capture_output=True, text=True, timeout=240
    )
    assert built.returncode == 0, built.stderr[-2000:]
    return next(folder.glob("*.whl"))
