"""Every reader, fed with mutated and cut real files: a clear error or what is left of them, and never more memory.

The cases are the same in every run. ``TRINE_FUZZ_CASES=5000 pytest tests/record/test_fuzz_readers.py`` runs that many of
each format, from ``TRINE_FUZZ_FIRST`` on.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import pkgutil
import subprocess
import sys
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import mutated_files
import pytest
from record_rows import collective_rows, step_rows
from trace_builders import small, written

import trine
from trine.record import readers
from trine.record.errors import TrineError
from trine.record.store import RankWriter

CASES = int(os.environ.get("TRINE_FUZZ_CASES") or 0)
FIRST = int(os.environ.get("TRINE_FUZZ_FIRST") or 0)

#: Format → real files of it under the test data; small ones, or the first bytes of large ones.
SEEDS: dict[str, tuple[str, ...]] = {
    "kineto": (
        "kineto/odd/cpu_only.json.gz",
        "kineto/odd/event_sync_trace.json.gz",
        "kineto/odd/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
        "kineto/odd/triton_example.json.gz",
        "kineto/odd/step_based_trace_2543932.json.gz",
    ),
    "memory_snapshot": ("memory_snapshot/medium_512_inference_memory_snapshot.pickle",),
    "memory_timeline": ("memory_snapshot/memory_timeline.raw.gz",),
    "flight_recorder": (
        "flight_recorder/gloo_desync/comm_lib_trace_rank_1",
        "flight_recorder/gloo_desync/fr_rank_1.json",
        "flight_recorder/gloo_plain/comm_lib_trace_rank_0",
        "flight_recorder/gloo_plain/fr_rank_0.json",
    ),
    "nsight": ("nsys/healthy_1pct.sqlite",),
    "pipeline_schedule": ("pipeline_schedule/pp8/pp_rank_0.json",),
}
#: A record is a folder, written here.
FOLDERS = {"trine"}


def formats() -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(readers.__path__)]
    modules = [import_module(f"{readers.__name__}.{name}") for name in names if not name.startswith("_")]
    return sorted(module.FORMAT for module in modules)


def test_every_reader_is_fuzzed() -> None:
    assert set(formats()) == set(SEEDS) | FOLDERS, "give the new reader some real files to mutate"


def seeds_of(format: str, data: Path, folder: Path) -> list[Path]:
    if format == "trine":
        return [written_record(folder / "run")]
    found = []
    for name in SEEDS[format]:
        source = data / "traces" / name
        if not source.is_file():
            pytest.skip(f"{source} is absent")
        target = folder / source.name
        target.write_bytes(shortened(format, source.read_bytes()))
        found.append(target)
    return found


def written_record(run: Path) -> Path:
    """A finished run of two ranks with a deep window each."""
    for rank in range(2):
        writer = RankWriter(run, rank, 2)
        writer.append({"parts": step_rows(0, 10), "collectives": collective_rows(0, 10)})
        if rank == 0:
            writer.describe_run({"name": "fuzzed"})
        groups = [{"id": "0", "name": "0", "description": "default_pg", "ranks": [0, 1]}]
        written(writer.folder / "window-00000.json", small(rank, 2))
        writer.close({"state": "finished", "groups": groups, "metadata": {"backend": "gloo"}})
    return run


def shortened(format: str, content: bytes) -> bytes:
    """A file of the same kind that takes milliseconds to read."""
    if format == "memory_snapshot":
        return _small_snapshot(pickle.loads(content))  # a file of the test data, not of a stranger
    if format == "memory_timeline":
        rows = json.loads(gzip.decompress(content))
        return gzip.compress(json.dumps(rows[:600]).encode(), 1)
    return content


def _small_snapshot(snapshot: dict[str, Any]) -> bytes:
    snapshot["device_traces"] = [trace[-300:] for trace in snapshot["device_traces"]]
    snapshot["segments"] = snapshot["segments"][:20]
    return pickle.dumps(snapshot)


@pytest.mark.parametrize("format", sorted({*SEEDS, *FOLDERS}))
def test_mutated_files_never_break_a_reader(format: str, data: Path, tmp_path: Path) -> None:
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    files = [str(path) for path in seeds_of(format, data, seeds)]
    folder = tmp_path / "cases"
    folder.mkdir()
    cases = CASES or 100
    command = [sys.executable, mutated_files.__file__, format, str(FIRST), str(cases), str(folder), *files]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=60 + cases,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failures"] == []
    assert report["read"] and report["refused"], report  # both outcomes were tried


# --- bombs -----------------------------------------------------------------------------------------

EVENT = b'{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":2}'


@pytest.mark.parametrize(
    ("head", "filling"),
    [
        (b'{"traceEvents": [' + EVENT + b",", b" "),
        (b'{"traceEvents": [' + EVENT + b',{"ph":"X","name":"', b"a"),
        (b'{"traceEvents": [' + EVENT + b',{"ph":"X","args":', b"["),
        (b'{"traceEvents": [', b"{},"),
        (b'{"x": "', b"a"),
    ],
    ids=["spaces", "a name", "nesting", "empty objects", "a head"],
)
def test_a_small_file_that_unpacks_to_a_large_one(head: bytes, filling: bytes, tmp_path: Path) -> None:
    """50 KB of gzip that are 50 MB of nothing: bounded, and said."""
    packer = zlib.compressobj(6, wbits=31)
    block = filling * ((1 << 20) // len(filling))
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(
        packer.compress(head) + b"".join(packer.compress(block) for _ in range(48)) + packer.flush()
    )
    mutated_files._reset_peak()
    before = mutated_files._memory("VmRSS")
    said = ""
    try:
        rank = trine.load(path).rank(0)
        said = " ".join(note.message for note in rank.quality)
    except TrineError as error:
        said = str(error)
    assert any(part in said for part in ("MiB", "no events", "not a trace")), said
    assert mutated_files._memory("VmHWM") - before < 300 << 20


def test_the_control_a_large_sound_file_is_read_whole(tmp_path: Path) -> None:
    count = 200_000
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b",".join([EVENT] * count) + b"]}", 1))
    rank = trine.load(path).rank(0)
    assert rank.device is not None and len(rank.device) == count


# --- code ------------------------------------------------------------------------------------------


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path, call: Any = os.system) -> None:
        self.marker, self.call = marker, call

    def __reduce__(self) -> Any:
        return self.call, (f"touch {self.marker}",)


@pytest.mark.parametrize("place", ["frames", "top", "key"])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("shape", ["memory_snapshot", "flight_recorder"])
def test_no_code_of_a_pickle_is_run(shape: str, protocol: int, place: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    if shape == "memory_snapshot":
        content: dict[Any, Any] = {"segments": [], "device_traces": [[]], "allocator_settings": {}}
    else:
        content = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}
    if place == "frames":
        content["external_annotations"] = [Malicious(marker)]
    elif place == "key":
        content[(1, 2)] = {"x": [Malicious(marker, eval)]}
    data = pickle.dumps([content, Malicious(marker)] if place == "top" else content, protocol=protocol)
    path = tmp_path / "comm_lib_trace_rank_0.pickle"
    path.write_bytes(data)
    with pytest.raises(TrineError) as refused:
        for rank in trine.load(path):
            assert rank is not None
    assert not marker.exists()
    assert "\n" not in str(refused.value)


def test_the_control_a_pickle_of_plain_data_is_read(data: Path) -> None:
    folder = data / "traces" / "flight_recorder" / "gloo_plain"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    rank = trine.load(folder / "comm_lib_trace_rank_0").rank(0)
    assert rank.flight_recorder is not None and len(rank.flight_recorder) > 0


def test_a_fault_in_a_reader_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: an exception that is no ``TrineError`` comes through."""
    from trine.record.readers import kineto

    def broken(_: Path) -> Any:
        raise KeyError("correlation")

    monkeypatch.setattr(kineto, "open_job", broken)
    with pytest.raises(KeyError):
        mutated_files.read_everything(kineto, written(tmp_path / "t.json", small()))
