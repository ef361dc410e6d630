"""Documents stay true: links lead somewhere, commands parse, paths and tables exist, the two commands are two."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trine.analyzers.run_facts import METRICS
from trine.cli import _parser
from trine.record.errors import UsageError
from trine.record.model import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

#: The same two expressions as in .ci/run.
BETWEEN = re.compile(r"<!-- the two commands -->(.*?)<!-- end -->", re.DOTALL)
COMMAND = re.compile(r"^(?:python3|\.venv).*$", re.MULTILINE)


def two_commands() -> list[str]:
    found = BETWEEN.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    return COMMAND.findall(found[1])


def test_the_readme_has_two_commands_and_ci_runs_exactly_those() -> None:
    first, second = two_commands()
    assert first.endswith("trine demo") and second.endswith("pytest")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    taken = re.search(r"< <\((sed .*)\)$", script, re.MULTILINE)
    assert taken is not None
    found = subprocess.run(
        ["bash", "-c", taken[1]], check=True, cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert found.stdout.splitlines() == [first, second]
    assert "pip install -c" not in script.replace(taken[1], "")  # no third way to install


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_links_lead_to_files(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    broken = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_paths_in_code_type_exist(path: Path) -> None:
    rooms = "api|record|profiler|analyzers|optim|dashboard|samples|benchmarks|tests|docs"
    text = path.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{rooms})/[\w./*-]*)`", text)
    absent = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert not absent


def shell_lines(text: str) -> list[str]:
    """Lines of code blocks, fenced or indented, that call trine, without what two spaces set apart from
    them. Placeholders with … are skipped."""
    lines = re.findall(r"^(?: {4}|)((?:\.venv/bin/)?trine [a-z].*)$", text, re.MULTILINE)
    return [line.split("  ")[0] for line in lines if "…" not in line and "|" not in line]


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_commands_in_documents_parse(path: Path) -> None:
    for line in shell_lines(path.read_text(encoding="utf-8")):
        _parser().parse_args(shlex.split(line)[1:])  # raises UsageError on what the command does not know


def test_a_wrong_command_in_a_document_would_be_found() -> None:
    assert shell_lines("```sh\ntrine compare a --agianst b\n```\n    trine chek  # no\ntext trine x") == [
        "trine compare a --agianst b",
        "trine chek",
    ]
    with pytest.raises(UsageError):
        _parser().parse_args(["compare", "a", "--agianst", "b"])


PRELUDE = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = [torch.randn(4, 8) for _ in range(4)]
def loss_fn(model, batch):
    return model(batch).pow(2).mean()
"""


def test_python_in_the_readme_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the README's Python trains a model; install trine[train]")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 2
    (tmp_path / "tuned.toml").write_text('[precision]\ndtype = "bf16"\n')
    (tmp_path / "program.py").write_text("\n".join([PRELUDE, *blocks, "print(float(loss))"]))
    found = subprocess.run(
        [sys.executable, "program.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert float(found.stdout.splitlines()[-1]) >= 0
    assert (tmp_path / "runs" / "a" / "run.json").is_file()


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


def test_the_gate_page_lists_every_metric_as_it_is() -> None:
    text = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (at \w+) \| (.*) \|$", text, re.MULTILINE)
    expected = [(name, "at least" if more else "at most", what) for name, (what, more) in METRICS.items()]
    assert rows == expected


def test_the_architecture_page_lists_every_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)` \| ", text.partition("## The tables")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert rows == list(SCHEMAS)


def test_the_architecture_page_draws_the_floors_as_they_are() -> None:
    from test_imports import MAY_IMPORT

    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Who may import whom")[2]
    drawn = {
        f"trine.{room}": {f"trine.{name}" for name in re.findall(r"`([\w.]+)`", may)}
        for room, may in re.findall(r"^\| `([\w.]+)` \| ([^|]*) \|", table, re.MULTILINE)
    }
    # Private modules belong to their room's own floor, and who may import everyone is said in words.
    expected = {
        room: {name for name in may if "._" not in name}
        for room, may in MAY_IMPORT.items()
        if "*" not in may and "._" not in room
    }
    assert drawn == expected


def test_every_module_has_a_docstring() -> None:
    # ruff's D1 sees to it where it runs; this holds for a run of the tests alone.
    folders = [
        path
        for path in ROOT.iterdir()  # an environment inside the checkout has a hundred times as many
        if path.is_dir() and path.name not in ("tests", "build") and not path.name.startswith(".")
    ]
    modules = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(modules) > 100
    missing = []
    for path in modules:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and ast.get_docstring(tree) is None:
            missing.append(str(path.relative_to(ROOT)))
    assert not missing
