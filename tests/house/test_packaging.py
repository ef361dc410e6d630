"""What is installed: every folder is a package of the list, and the wheel holds all of it."""

from __future__ import annotations

import re
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]


def package_folders() -> Iterator[tuple[str, Path]]:
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            yield ".".join((package, *parts)), init.parent


def test_every_package_folder_is_listed() -> None:
    # A package that is missing from the list leaves the wheel without a word.
    assert sorted(name for name, _ in package_folders()) == sorted(SETUPTOOLS["packages"])


def test_every_folder_with_modules_is_a_package(tracked: list[Path]) -> None:
    known = {folder for _, folder in package_folders()}
    rooms = {ROOT / folder for folder in FOLDERS.values()}
    loose = [
        str(path.relative_to(ROOT))
        for path in tracked
        if path.suffix == ".py" and rooms & set(path.parents) and path.parent not in known
    ]
    assert not loose


def test_files_of_tests_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))  # pytest imports them by bare name
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_module_and_every_file_that_modules_read(
    wheel_names: set[str], tracked: list[Path]
) -> None:
    missing = []
    for path in tracked:
        for package, folder in FOLDERS.items():
            if path.is_relative_to(ROOT / folder):
                name = f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
                if name not in wheel_names:
                    missing.append(name)
    assert not missing
    assert "trine/py.typed" in wheel_names


def test_the_wheel_holds_nothing_else(wheel_names: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"trine"}
    assert not [name for name in wheel_names if "test" in Path(name).name or name.endswith(".pyc")]


def test_constraints_pin_exactly_and_allow_what_the_project_asks_for() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==" and "*" not in specifier.version, line
            pins[canonicalize_name(requirement.name)] = specifier.version
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    for text in wanted:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name == "trine":
            continue
        assert name in pins, f"{name} is not pinned"
        assert requirement.specifier.contains(pins[name]), text
    assert pins["torch"] == "2.13.0"


def test_the_base_install_brings_no_torch_and_no_dash() -> None:
    names = {re.split(r"[<>=\[ ]", text)[0] for text in PROJECT["project"]["dependencies"]}
    assert not names & {"torch", "dash", "dash-mantine-components", "dash-ag-grid"}
