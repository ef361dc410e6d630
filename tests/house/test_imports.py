"""The rooms import downwards only, and what is heavy or may be absent stays in its own room.

Read from the source, so that an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
    "package-dir"
]

#: Room → the rooms that it may import, itself aside. A module belongs to the longest name that fits.
MAY_IMPORT: dict[str, set[str]] = {
    "trine.record": set(),
    "trine.profiler": {"trine.record"},
    "trine.optim.config": {"trine.record"},
    "trine.optim._schema": {"trine.record", "trine.optim.config"},
    "trine.optim.plan": {"trine.record", "trine.optim.config", "trine.optim._schema"},
    "trine.optim": {"trine.record"},
    # What a plan chose in the words of other tools: it joins the planner and the dialects, which do not know each other.
    "trine.optim.exports": {
        "trine.record",
        "trine.optim",
        "trine.optim.config",
        "trine.optim._schema",
        "trine.optim.plan",
    },
    "trine.analyzers": {"trine.record", "trine.optim.config", "trine.optim.plan"},
    "trine.dashboard": {"trine.record", "trine.optim.config", "trine.optim.plan", "trine.analyzers"},
    # The roof, the programs that show it in use, and what closes the loop know everyone.
    "trine.optim.tune": {"*"},
    "trine.samples": {"*"},
    "trine": {"*"},
}

#: Rooms in one group are one floor: they may import each other.
FLOORS = [
    {"trine.optim.config", "trine.optim._schema"},
    {"trine.optim", "trine.optim.config", "trine.optim._schema"},
]

#: Package → where it may be imported at module level, and where inside functions besides.
GUARDED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch": (("trine.profiler", "trine.samples", "trine.optim.runtime"), ("trine.optim",)),
    "dash": (("trine.dashboard",), ()),
    "dash_mantine_components": (("trine.dashboard",), ()),
    "dash_ag_grid": (("trine.dashboard",), ()),
    "flask": (("trine.dashboard",), ()),
}
NEVER_TORCH = ("trine.optim.config", "trine.optim._schema", "trine.optim.plan", "trine.optim.exports")


@dataclass(frozen=True)
class Import:
    module: str  # who imports
    target: str  # what, absolute
    line: int
    top: bool  # at module level, and at run time
    path: Path

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.target}"


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def imports_of(module: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node, late in statements_of(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(module, target, node.lineno, not late, path)


def statements_of(node: ast.AST, late: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """All below, and whether they run later than the import. An import stands in no expression."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, late
        if not isinstance(child, ast.expr):
            yield from statements_of(child, late or is_late(child))


def is_late(node: ast.AST) -> bool:
    """Whether what stands inside does not run when the module is imported."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def room_of(name: str) -> str | None:
    fitting = [room for room in MAY_IMPORT if name == room or name.startswith(f"{room}.")]
    return max(fitting, key=len, default=None)


def is_allowed(found: Import) -> bool:
    here, there = room_of(found.module), room_of(found.target)
    assert here is not None, found
    if there is None or there == here or "*" in MAY_IMPORT[here] or there in MAY_IMPORT[here]:
        return True
    if found.target in ("trine.__version__", "trine"):  # a constant, and what any import runs anyway
        return True
    return any({here, there} <= floor for floor in FLOORS)


ALL = [found for module, path in modules() for found in imports_of(module, path)]


def test_the_reader_of_imports_sees_what_it_must(tmp_path: Path) -> None:
    path = tmp_path / "reader.py"
    path.write_text(
        "import torch\nfrom ..analyzers import x\nfrom . import y\n"
        "if TYPE_CHECKING:\n    import dash\n"
        "def f():\n    from trine.cli import main\n"
    )
    found = {(i.target, i.top) for i in imports_of("trine.record.reader", path)}
    assert found == {
        ("torch", True),
        ("trine.analyzers.x", True),
        ("trine.record.y", True),
        ("dash", False),
        ("trine.cli.main", False),
    }
    upward = [i.target for i in imports_of("trine.record.reader", path) if not is_allowed(i)]
    assert upward == ["trine.analyzers.x", "trine.cli.main"]


def test_rooms_import_downwards_only() -> None:
    wrong = [str(found) for found in ALL if not is_allowed(found)]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_a_room_by_its_bare_name() -> None:
    bare = set(PACKAGES.values()) | {"api"}
    sources = [
        *ALL,
        *(i for f in ("tests", "benchmarks") for p in (ROOT / f).rglob("*.py") for i in imports_of("t", p)),
    ]
    wrong = [str(found) for found in sources if found.target.split(".")[0] in bare]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", GUARDED)
def test_heavy_packages_stay_in_their_rooms(name: str) -> None:
    at_top, in_functions = GUARDED[name]
    wrong = []
    for found in ALL:
        if found.target.split(".")[0] != name:
            continue
        inside = found.module.startswith(at_top) or (
            not found.top and found.module.startswith(in_functions or ("-",))
        )
        if not inside or found.module.startswith(NEVER_TORCH):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


# --- at run time -------------------------------------------------------------------------------

LOADED = """
import json, sys
{work}
print(json.dumps(sorted({{name.split(".")[0] for name in sys.modules}})))
"""


def loaded_by(work: str) -> set[str]:
    """Top-level modules that a fresh process has loaded after ``work``."""
    found = subprocess.run(
        [sys.executable, "-c", LOADED.format(work=work)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert found.returncode == 0, found.stderr
    return set(json.loads(found.stdout.splitlines()[-1]))


def test_importing_trine_loads_nothing_heavy() -> None:
    loaded = loaded_by("import trine")
    assert "trine" in loaded
    assert not loaded & {"torch", "dash", "pandas", "plotly", "numpy"}


def test_the_command_line_starts_without_torch_or_dash() -> None:
    work = "from trine.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert not loaded_by(work) & {"torch", "dash", "pandas", "plotly", "numpy", "rich"}


def test_no_bare_room_is_loaded_at_the_repository_root() -> None:
    loaded = loaded_by("import trine.record.model, trine.analyzers.results, trine.cli")
    assert not loaded & set(PACKAGES.values())
