"""Every study is shown, documented and tested, and one without an answer says why, on each kind of file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import trine
from trine.analyzers.studies import studies

ROOT = Path(__file__).resolve().parents[2]
#: Studies without a section of their own, and where they are shown instead.
SHOWN_ELSEWHERE: dict[str, str] = {}

#: One small file of each kind.
KINDS = {
    "kineto": "kineto/odd/cpu_only.json.gz",
    "memory snapshot": "memory_snapshot/medium_512_inference_memory_snapshot.pickle",
    "memory timeline": "memory_snapshot/memory_timeline.raw.gz",
    "flight recorder": "flight_recorder/gloo_plain",
    "pipeline schedule": "pipeline_schedule/pp8",
    "nsight": "nsys/healthy_1pct.sqlite",
}


def modules(folder: str) -> set[str]:
    return {path.stem for path in (ROOT / folder).glob("*.py") if not path.name.startswith("_")}


def test_a_study_is_called_as_its_file() -> None:
    assert {study.KEY for study in studies()} == modules("analyzers/studies")
    assert len(modules("analyzers/studies")) >= 11


def test_every_study_has_a_section() -> None:
    assert modules("analyzers/reports/studies") | set(SHOWN_ELSEWHERE) == modules("analyzers/studies")


def test_every_study_has_a_line_in_the_index_that_leads_to_its_page() -> None:
    text = (ROOT / "docs" / "analyses.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]+\?) \| ([^|]+) \| \[[^\]]+\]\(([\w.#-]+)\) \|$", text, re.MULTILINE
    )
    assert {key for key, *_ in rows} == modules("analyzers/studies")
    for _, _, _, target in rows:
        page, _, anchor = target.partition("#")
        content = (ROOT / "docs" / (page or "analyses.md")).read_text(encoding="utf-8")
        anchors = {
            re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")
            for head in re.findall(r"^#+ (.+)$", content, re.MULTILINE)
        }
        assert not anchor or anchor in anchors, target


@pytest.mark.parametrize("key", sorted(modules("analyzers/studies")))
def test_every_study_has_a_test_that_names_it(key: str) -> None:
    tests = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__)
    ]
    assert any(f"studies.{key} import" in text or f'"{key}"' in text for text in tests)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_null_says_why(kind: str, data: Path) -> None:
    path = data / "traces" / KINDS[kind]
    if not path.exists():
        pytest.skip(f"{path} is not there")
    analysis = trine.analyze(trine.load(path))
    notes = {note.id: note.message for note in analysis.data_quality}
    assert "study-failed" not in notes, notes["study-failed"]
    for study in studies():
        if study.KEY in analysis.studies:
            assert study.to_json(analysis.studies[study.KEY])
        else:
            reason = notes[f"no-{study.KEY.replace('_', '-')}"].removeprefix(f"{study.KEY} is null: ")
            assert 20 < len(reason) < 400 and "\n" not in reason, reason
