"""Which runs are found, what they are called, and that nothing outside the roots is."""

from __future__ import annotations

import gzip
import json
import os
import time
import zipfile
from pathlib import Path

import pytest
from dashboard_samples import Recorder, write_record

from trine.dashboard.catalogue import Catalogue
from trine.record._expansion import ARCHIVE_NAMES
from trine.record.errors import UnreadableInput

TRACE = json.dumps({"schemaVersion": 1, "traceEvents": []})


def trace(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(TRACE.encode()))
    else:
        path.write_text(TRACE)
    return path


def found(*roots: Path) -> dict[str, str]:
    return {run.id: run.kind for run in Catalogue(roots).runs()}


def test_records_folders_of_ranks_and_single_traces(tmp_path: Path) -> None:
    write_record(tmp_path / "exp" / "a", 3)
    trace(tmp_path / "job" / "rank0.json.gz")
    trace(tmp_path / "job" / "rank1.json.gz")
    trace(tmp_path / "mixed" / "resnet.json")
    trace(tmp_path / "mixed" / "gpt.json")
    (tmp_path / "mixed" / "settings.json").write_text('{"learning_rate": 1}')
    (tmp_path / "notes.txt").write_text("traceEvents")
    root = tmp_path.name
    assert found(tmp_path) == {
        f"{root}/exp/a": "record",
        f"{root}/job": "traces",
        f"{root}/mixed/resnet.json": "trace",
        f"{root}/mixed/gpt.json": "trace",
    }


def test_a_root_may_be_a_run_itself_and_two_of_one_name_differ(tmp_path: Path) -> None:
    write_record(tmp_path / "x" / "run", 3)
    write_record(tmp_path / "y" / "run", 3)
    single = trace(tmp_path / "z.json")
    assert set(found(tmp_path / "x" / "run", tmp_path / "y" / "run", single)) == {"run", "run~2", "z.json"}


def test_a_trace_that_is_a_bare_list_and_half_a_file_are_listed(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('[{"ph": "X", "name": "a", "ts": 1}]')
    (tmp_path / "half-a.json.gz").write_bytes(gzip.compress(TRACE.encode() * 5000)[:60])
    (tmp_path / "empty.json").write_text("")
    assert {run.rpartition("/")[2] for run in found(tmp_path)} == {"old.json", "half-a.json.gz"}


def test_links_and_hidden_folders_do_not_lead_out(tmp_path: Path) -> None:
    trace(tmp_path / "outside" / "secret.json")
    inside = tmp_path / "inside"
    trace(inside / ".cache" / "hidden.json")
    trace(inside / "a.json")
    (inside / "folder").symlink_to(tmp_path / "outside")
    (inside / "file.json").symlink_to(tmp_path / "outside" / "secret.json")
    (inside / "circle").symlink_to(inside)
    assert set(found(inside)) == {"inside/a.json"}


@pytest.mark.parametrize(
    "id",
    [
        "inside/../outside/secret.json",
        "../outside/secret.json",
        "/etc/passwd",
        "inside//a.json",
        "",
        "inside",
    ],
)
def test_what_is_not_in_the_list_cannot_be_asked_for(tmp_path: Path, id: str) -> None:
    trace(tmp_path / "outside" / "secret.json")
    trace(tmp_path / "inside" / "a.json")
    catalogue = Catalogue([tmp_path / "inside"])
    assert catalogue.find("inside/a.json").path == tmp_path / "inside" / "a.json"
    with pytest.raises(UnreadableInput, match="no run"):
        catalogue.find(id)


def test_a_run_that_has_just_begun_is_found(tmp_path: Path) -> None:
    catalogue = Catalogue([tmp_path])
    assert catalogue.runs() == []
    write_record(tmp_path / "begun", 1)
    time.sleep(0.1)
    assert catalogue.runs() == []  # a walk is remembered for two seconds
    assert catalogue.find(f"{tmp_path.name}/begun").kind == "record"


def test_an_absent_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match=r"nowhere does not exist"):
        Catalogue([tmp_path / "nowhere"])


def test_a_root_that_no_trace_is_called_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_text("root")
    with pytest.raises(UnreadableInput, match=r"passwd is no trace by its name"):
        Catalogue([path])


def test_the_newest_comes_first_and_a_change_shows_in_the_fingerprint(tmp_path: Path) -> None:
    old, new = trace(tmp_path / "old.json"), trace(tmp_path / "newer.json")
    os.utime(old, (1_000, 1_000))
    before = Catalogue([tmp_path]).runs()
    assert [run.path for run in before] == [new, old]
    old.write_text(TRACE + " ")
    after = {run.id: run for run in Catalogue([tmp_path]).runs()}
    assert after[before[1].id].fingerprint != before[1].fingerprint
    assert after[before[0].id].fingerprint == before[0].fingerprint


def test_states_of_a_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "live")
    recorder.steps(3)
    write_record(tmp_path / "done", 3)
    write_record(tmp_path / "broken", 3, state="failed")
    runs = {run.path.name: run for run in Catalogue([tmp_path]).runs()}
    assert {name: run.state() for name, run in runs.items()} == {
        "live": "running",
        "done": "finished",
        "broken": "failed",
    }
    assert runs["live"].state(time.time() + 3600) == "silent"
    assert runs["done"].state(time.time() + 3600) == "finished"
    recorder.close()
    assert Catalogue([tmp_path / "live"]).runs()[0].state() == "finished"


def test_snapshots_dumps_schedules_and_profiles_are_runs_too(data: Path) -> None:
    runs = {run.id.partition("/")[2]: run for run in Catalogue([data / "traces"]).runs()}
    assert (runs["flight_recorder/gloo_desync"].kind, runs["flight_recorder/gloo_desync"].files) == (
        "traces",
        8,
    )
    assert runs["pipeline_schedule/pp8"].format == "pipeline_schedule"
    assert runs["nsys/healthy_1pct.sqlite"].format == "nsight"
    snapshots = [name for name in runs if name.startswith("memory_snapshot/")]
    assert len(snapshots) == 4, "different models are different runs, whatever numbers their names hold"
    assert {runs[name].kind for name in snapshots} == {"trace"}


SCHEDULE = json.dumps(
    {"1": {"total": 2.0, "fwd_start": [0.0], "fwd_end": [1.0], "bwd_start": [1.0], "bwd_end": [2.0]}}
)


def schedules(folder: Path, ranks: int) -> None:
    folder.mkdir(parents=True)
    for rank in range(ranks):
        (folder / f"pp_rank_{rank}.json").write_text(SCHEDULE)


def test_a_folder_that_loads_as_one_job_is_listed_once_and_its_parts_can_be_opened(tmp_path: Path) -> None:
    trace(tmp_path / "job" / "rank0.json.gz")
    trace(tmp_path / "job" / "rank1.json.gz")
    schedules(tmp_path / "job" / "schedule", 2)
    catalogue = Catalogue([tmp_path])
    (run,) = catalogue.runs()
    assert (run.path, run.kind, run.files) == (tmp_path / "job", "traces", 4)
    assert run.state() == "traces, schedules" and run.format == "kineto+pipeline_schedule"
    assert run.size_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert run.parts == (f"{tmp_path.name}/job/schedule",)
    part = catalogue.find(run.parts[0])
    assert (part.path, part.files, part.state()) == (tmp_path / "job" / "schedule", 2, "schedules")
    changed = run.fingerprint
    (tmp_path / "job" / "schedule" / "pp_rank_1.json").write_text(SCHEDULE + " ")
    assert Catalogue([tmp_path]).runs()[0].fingerprint != changed, "the job's analysis uses its parts"


def test_jobs_below_a_job_stay_jobs_of_their_own(tmp_path: Path) -> None:
    trace(tmp_path / "job" / "rank0.json.gz")
    trace(tmp_path / "job" / "rank1.json.gz")
    trace(tmp_path / "job" / "again" / "rank0.json.gz")
    schedules(tmp_path / "job" / "first", 2)
    schedules(tmp_path / "job" / "second", 2)
    root = tmp_path.name
    assert set(found(tmp_path)) == {
        f"{root}/job",
        f"{root}/job/again/rank0.json.gz",
        f"{root}/job/first",
        f"{root}/job/second",
    }


def test_traces_dumps_and_a_snapshot_are_one_run_in_one_folder_or_several(tmp_path: Path, data: Path) -> None:
    traces = data / "traces"
    for folder in (tmp_path / "flat", tmp_path / "deep"):
        folder.mkdir()
        for path in (traces / "kineto" / "torchrec_straggler_v100").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        below = folder if folder.name == "flat" else folder / "fr"
        below.mkdir(exist_ok=True)
        for path in (traces / "flight_recorder" / "gloo_desync").glob("comm_lib_trace_rank_*"):
            (below / path.name).write_bytes(path.read_bytes())
        snapshot = traces / "memory_snapshot" / "medium_128_training_memory_snapshot.pickle"
        below = folder if folder.name == "flat" else folder / "memory"
        below.mkdir(exist_ok=True)
        (below / snapshot.name).write_bytes(snapshot.read_bytes())
    runs = {run.path.name: run for run in Catalogue([tmp_path]).runs()}
    assert set(runs) == {"flat", "deep"}
    assert {run.state() for run in runs.values()} == {"traces, dumps, snapshot"}
    assert {run.files for run in runs.values()} == {9}
    assert len(runs["deep"].parts) == 2 and len(runs["flat"].parts) == 1


def test_files_that_are_no_run_are_named_with_the_reason(tmp_path: Path) -> None:
    trace(tmp_path / "gpt.json")
    (tmp_path / "broken.json").write_text('{"a": ')
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "config.json").write_text('{"learning_rate": 1}')
    (tmp_path / "report.nsys-rep").write_bytes(b"whatever")
    (tmp_path / "words.json").write_text("hello")
    (tmp_path / "README.md").write_text("no profile by its name")
    catalogue = Catalogue([tmp_path])
    assert [run.path.name for run in catalogue.runs()] == ["gpt.json"]
    (said,) = catalogue.notes
    for words in (
        "broken.json (it is not valid JSON)",
        "empty.json (it is empty)",
        "config.json (JSON, and no trace)",
        "report.nsys-rep (an Nsight Systems report",
        "words.json (it is not JSON)",
    ):
        assert words in said, words
    assert "README" not in said and "gpt" not in said


def test_the_line_about_skipped_files_is_bounded(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"settings{number:02}.json").write_text("{}")
    catalogue = Catalogue([tmp_path])
    assert catalogue.runs() == []
    assert catalogue.notes[0].endswith("and 44 more.") and len(catalogue.notes[0]) < 500
    (tmp_path / "only").mkdir()
    trace(tmp_path / "only" / "gpt.json")
    healthy = Catalogue([tmp_path / "only"])
    assert len(healthy.runs()) == 1 and healthy.notes == ()


def test_archives_of_traces_are_runs_and_zips_of_anything_else_are_not(tmp_path: Path) -> None:
    for name, member in (("traces", "job/rank0.json.gz"), ("photos", "beach.png")):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as made:
            made.writestr(member, b"")
    (tmp_path / "damaged.zip").write_bytes(b"PK\x03\x04")
    (tmp_path / "job.tar.xz").write_bytes(b"whatever")
    listed = {run.path.name for run in Catalogue([tmp_path]).runs()}
    assert listed == {name for name in ("traces.zip", "job.tar.xz") if name.endswith(ARCHIVE_NAMES)}
