"""What lies in the repository: nothing of one machine, nothing large, nothing that a run leaves behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 1_000_000

#: Pieces are joined here, so that this file does not find itself.
PRIVATE = {
    "a path of one machine": re.compile(
        "|".join(("/" + r"work/", "/" + r"root/", "/" + r"home/\w+/", "/" + r"Users/\w+/"))
    ),
    "the host of a registry": re.compile(
        "|".join(
            (
                "pypi" + r"\.org",
                "python" + r"hosted\.org",
                "download" + r"\.pytorch\.org",
                "registry" + r"\.npmjs",
                "deb" + r"\.debian\.org",
            )
        )
    ),
    "an option that names an index": re.compile("--(?:extra-)?" + r"index-url|--find-" + "links"),
}

#: What runs, profilers and debuggers leave behind.
LEFTOVERS = re.compile(
    r"\.(?:json\.gz|pt\.trace\.json|nsys-rep|qdrep|sqlite|pickle|pkl|pt|pth|safetensors|prof|dmp|core|npz?|parquet|whl|tar\.gz|zip|so)$"
    r"|(?:^|/)(?:nccl_trace|memory_snapshot|window-\d)(?!\w*\.(?:py|md)$)"
)


def private_lines(name: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for what, pattern in PRIVATE.items():
            if pattern.search(line):
                yield f"{name}:{number} holds {what}: {line.strip()[:100]}"


def test_no_file_names_a_machine_or_a_registry(tracked: list[Path]) -> None:
    found = []
    for path in tracked:
        data = path.read_bytes()
        if b"\0" not in data:
            found += private_lines(str(path.relative_to(ROOT)), data.decode(errors="replace"))
    assert not found, "\n".join(found)


def test_the_guard_sees_what_it_must() -> None:
    for line in ("cd /" + "work/main", "https://pypi" + ".org/simple", "pip install --index-" + "url x"):
        assert list(private_lines("x", line)), line
    assert not list(private_lines("x", "cd ../shared/data and work/main"))


def test_no_file_is_large_or_a_leftover_of_a_run(tracked: list[Path]) -> None:
    large = [str(path) for path in tracked if path.stat().st_size > MOST_BYTES]
    names = [path.relative_to(ROOT).as_posix() for path in tracked]
    left = [name for name in names if LEFTOVERS.search(name)]
    assert not large and not left, (large, left)
    assert LEFTOVERS.search("runs/rank0.pt.trace.json") and not LEFTOVERS.search("record/peaks.csv")


def test_rooms_stand_where_they_are_expected() -> None:
    for room in ("profiler", "analyzers", "optim", "dashboard", "tests", "samples"):
        assert (ROOT / room).is_dir(), room
    assert (ROOT / "pyproject.toml").is_file()
