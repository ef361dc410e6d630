"""Broken files: what can be saved is used and the loss is said; nothing but ``TrineError`` ever comes out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_builders import kernel, operator, small, step, trace, written

import trine
from trine import TrineError
from trine.record.errors import UnreadableInput
from trine.record.model import Rank
from trine.record.readers import _kineto_stream
from trine.record.readers._kineto_repair import mend
from trine.record.readers.kineto import read_file


def text_of(name: bytes) -> bytes:
    return b'{"ph":"X","cat":"kernel","name":"%s","pid":0,"tid":7,"ts":1,"dur":2,"args":{"stream":7}}' % name


def ids(rank: Rank) -> set[str]:
    return {quality.id for quality in rank.quality}


def test_an_element_without_end_asks_for_no_more_memory_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of gzip can hold a gigabyte of one name."""
    monkeypatch.setattr(_kineto_stream, "_LARGEST_ELEMENT_BYTES", 8 << 20)
    events = b",".join([SOUND] * 30_000)
    endless = b'{"traceEvents":[' + events + b',{"name":"' + b"a" * (40 << 20)
    rank = read_file(written(tmp_path / "a.json.gz", endless))
    assert rank.device is not None and len(rank.device) > 10_000
    assert "damaged-file" in ids(rank)
    alone = written(tmp_path / "b.json.gz", b'{"traceEvents":[{"name":"' + b"a" * (40 << 20))
    with pytest.raises(UnreadableInput, match="before its first complete event"):
        read_file(alone)


# --- broken JSON -----------------------------------------------------------------------------------

SOUND = text_of(b"sound")


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (text_of(b'std::string "x" op'), 'std::string "x" op'),
        (text_of(b'op<"x", "y">(a)'), 'op<"x", "y">(a)'),
        (text_of(b'"quoted"'), '"quoted"'),
        (text_of(b'lambda "{" x'), 'lambda "{" x'),
        (text_of(rb"C:\Users\x\u12"), r"C:\Users\x\u12"),
        (text_of(b"a\tb\x00c"), "a b c"),
        (text_of(b"caf\xe9"), "caf\ufffd"),
        (SOUND.replace(b"7}}", b'7,"a":nan,"b":-inf,"c":NaN,"d":-Infinity,"e":1.#QNAN}}'), "sound"),
        (SOUND.replace(b'"pid":0', b'"pid":1e999'), "sound"),
        (SOUND.replace(b"7}}", b"7,}}"), "sound"),
    ],
)
def test_an_event_of_an_old_writer_is_repaired(broken: bytes, name: str) -> None:
    mended = mend(SOUND + b",\n" + broken + b",\n" + SOUND)
    assert [event.name for event in mended.events] == ["sound", name, "sound"]
    assert (mended.repaired, mended.dropped) == (1, 0)


def test_garbage_between_events_costs_no_neighbour() -> None:
    mended = mend(SOUND + b",\n ~~garbage~~ \n" + SOUND + b"," + SOUND)
    assert (len(mended.events), mended.dropped) == (3, 1)


def test_repairs_and_losses_are_said(tmp_path: Path) -> None:
    content = b'{"traceEvents": [' + b",".join([SOUND, text_of(b'a "b" c'), b'{"ph": , }', SOUND]) + b"]}"
    rank = read_file(written(tmp_path / "t.json", content))
    assert rank.device is not None and len(rank.device) == 3
    assert {"repaired-events", "dropped-events"} <= ids(rank)


def test_arrays_of_objects_inside_events_are_no_boundary(tmp_path: Path) -> None:
    nested = [operator("a", index, 1, list=[{"x": 1}, {"ph": "X"}, {"name": "y"}]) for index in range(20)]
    content = json.dumps(trace(*nested)).encode().replace(b'"a"', b'"a"b"', 1)
    rank = read_file(written(tmp_path / "t.json", content))
    assert rank.host is not None and len(rank.host) == 20


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut files every few hundred bytes, so that every cut is tried on small files."""
    monkeypatch.setattr(_kineto_stream, "CHUNK_BYTES", 512)
    monkeypatch.setattr(_kineto_stream.blocks, "__defaults__", (512,))


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("style", ["minified", "kineto", "indented"])
def test_cuts_between_chunks_change_nothing(tmp_path: Path, style: str) -> None:
    events = [kernel(f"k {{{index}}}, {{", index, 1, list=[{"a": 1}, {"b": "}, {"}]) for index in range(300)]
    content = trace(*events, rank=3, world_size=4)
    text = {
        "minified": json.dumps(content, separators=(",", ":")),
        "kineto": json.dumps(content).replace('}}, {"ph"', '}\n  },\n  {\n    "ph"'),
        "indented": json.dumps(content, indent=1),
    }[style]
    tail = ', "deviceProperties": [' + ", ".join('{"id": 0, "name": "x"}' for _ in range(60)) + "]}"
    rank = read_file(written(tmp_path / "t.json", text.rstrip()[:-1] + tail))
    assert rank.device is not None
    assert rank.device["start_ns"].tolist() == [1000 * index for index in range(300)]
    assert (rank.rank, len(rank.devices)) == (3, 60)
    assert not ids(rank) & {"truncated-file", "dropped-events", "repaired-events"}


@pytest.mark.usefixtures("tiny_chunks")
def test_broken_events_between_cuts_cost_only_themselves(tmp_path: Path) -> None:
    events = [json.dumps(kernel(f"k{index}", index, 1, list=[{"a": 1}, {"b": 2}])) for index in range(400)]
    for index in range(0, 400, 20):
        events[index] = events[index].replace(f'"k{index}"', f'"k<"{index}">"')
    for index in range(10, 400, 100):
        events[index] = events[index].replace('"dur": 1', '"dur": ')
    rank = read_file(written(tmp_path / "t.json", "[" + ",\n".join(events) + "]"))
    assert rank.device is not None
    left = [1000 * index for index in range(400) if index % 100 != 10]
    assert rank.device["start_ns"].tolist() == left
    messages = {quality.id: quality.message for quality in rank.quality}
    assert messages["repaired-events"].startswith("20 events")
    assert messages["dropped-events"].startswith("4 events")


@pytest.mark.usefixtures("tiny_chunks")
@given(st.data())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cut_keeps_all_complete_events(tmp_path: Path, data: st.DataObject) -> None:
    events = [kernel(f"k{index}", index, 1) for index in range(40)]
    content = json.dumps(trace(*events)).encode()
    length = data.draw(st.integers(content.index(b"{", 40) + 1, len(content) - 1))
    path = written(tmp_path / "t.json", content[:length])
    complete = content[:length].count(b"}}") - (1 if content[:length].endswith(b"}]}") else 0)
    if not complete:
        with pytest.raises(UnreadableInput):
            read_file(path)
        return
    rank = read_file(path)
    assert rank.device is not None
    assert len(rank.device) == complete
    if b"]" not in content[length - 2 : length]:
        assert "truncated-file" in ids(rank)


# --- broken files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"hello world", "is not JSON"),
        (b"\x80\x04\x95 a pickle", "is not JSON"),
        (b"\xff\xfe{\x00}\x00", "UTF-16"),
        (b'{"a": 1}', "not a trace"),
        (b'{"a": 1', "broken JSON"),
        (b'{"traceEvents": null}', "not a trace"),
        (b'{"traceEvents": []}', "holds no events"),
        (b"[]", "holds no events"),
        (b"[1, 2, 3]", "none is an event"),
        (b'[{"a": 1}]', "holds no events"),
        (b'{"traceEvents": [{"ph": "X", "na', "cut off"),
        (b"\x1f\x8b\x08\x00broken", "damaged gzip"),
        (gzip.compress(b"")[:12], "damaged gzip"),
    ],
)
def test_what_cannot_be_shown_is_one_clear_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableInput) as caught:
        read_file(path)
    message = str(caught.value)
    assert says in message and str(path) in message and "\n" not in message


def test_a_gzip_file_cut_in_half(tmp_path: Path) -> None:
    events = [kernel(f"k{index * 7919 % 10007}", index, 1) for index in range(3000)]
    whole = gzip.compress(json.dumps(trace(*events)).encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    rank = read_file(path)
    assert rank.device is not None and 1000 < len(rank.device) < 2000
    assert {"damaged-file", "truncated-file"} <= ids(rank)


def test_gzip_members_in_a_row_and_padding_after_them(tmp_path: Path) -> None:
    content = json.dumps(small()).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]) + b"\0" * 100)
    assert read_file(path).quality == []


def test_a_damaged_checksum_is_said(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(json.dumps(small()).encode()))
    data[-6] ^= 0xFF
    path = tmp_path / "t.json.gz"
    path.write_bytes(bytes(data))
    rank = read_file(path)
    assert rank.device is not None and "damaged-file" in ids(rank)


def test_content_counts_not_the_name(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "plain.json.gz", tmp_path / "zipped.json"
    plain.write_bytes(json.dumps(small()).encode())
    zipped.write_bytes(gzip.compress(json.dumps(small()).encode()))
    for path in (plain, zipped):
        assert read_file(path).quality == []


def test_byte_order_mark(tmp_path: Path) -> None:
    assert (
        read_file(written(tmp_path / "t.json", b"\xef\xbb\xbf" + json.dumps(small()).encode())).quality == []
    )


def test_nesting_without_end(tmp_path: Path) -> None:
    deep = (
        b'{"ph":"X","cat":"kernel","name":"deep","ts":1,"dur":1,"args":{"x":'
        + b"[" * 50000
        + b"]" * 50000
        + b"}}"
    )
    rank = read_file(written(tmp_path / "t.json", b"[" + SOUND + b"," + deep + b"]"))
    assert rank.device is not None and len(rank.device) == 1
    assert "dropped-events" in ids(rank)


# --- strangers' files, mutated ---------------------------------------------------------------------

TOKENS = (b"NaN", b'"', b"\\", b"\0", b"\xff", b"{", b"}", b"[", b"]", b",", b"null", b"1e999", b"9" * 40, b'"ts": -5',
          b'"dur": -3.5', b'"ph": "B"', b"]}", b'"traceEvents": [')  # fmt: skip


@given(data=st.data())
@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_real_file_never_breaks_the_reader(
    data: st.DataObject, tmp_path: Path, odd: list[bytes]
) -> None:
    content = bytearray(data.draw(st.sampled_from(odd)))
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(("token", "cut", "byte", "repeat")))
        if kind == "token":
            content[place:place] = data.draw(st.sampled_from(TOKENS))
        elif kind == "cut":
            del content[place : place + data.draw(st.integers(1, 2000))]
        elif kind == "byte":
            content[place : place + 1] = data.draw(st.binary(min_size=1, max_size=1))
        else:
            content[place:place] = content[max(0, place - 300) : place]
    final = bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    if data.draw(st.booleans()):
        final = gzip.compress(final, 1)[: data.draw(st.sampled_from((None, -1, -9, 50)))]
    path = tmp_path / "rank0.json"
    path.write_bytes(final)
    try:
        ranks = list(trine.load(path))
    except TrineError as error:
        assert "\n" not in str(error)
        return
    for rank in ranks:
        for table in (rank.device, rank.host):
            if table is not None:
                assert (table["end_ns"] >= table["start_ns"]).all()
        assert all("\n" not in quality.message for quality in rank.quality)


@pytest.fixture(scope="module")
def odd(data: Path) -> list[bytes]:
    folder = data / "traces" / "kineto" / "odd"
    names = (
        "cpu_only",
        "event_sync_trace",
        "large_integer",
        "mi250_minitoy_train_ROCm6_2_kineto",
        "triton_example",
    )
    return [gzip.decompress((folder / f"{name}.json.gz").read_bytes()) for name in names]


def test_the_control_a_sound_file_is_read_whole(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        step(1, 0, 5000),
        *(kernel(f"k{index}", index, 1) for index in range(2000)),
    ]
    rank = read_file(written(tmp_path / "t.json.gz", trace(*events)))
    assert rank.device is not None and len(rank.device) == 2000
    assert ids(rank) == {"no-launch-record"}


@pytest.mark.parametrize("world", [10**9, 1 << 64, 10**30])
def test_an_absurd_world_is_said_and_not_counted_to(tmp_path: Path, world: int) -> None:
    path = written(tmp_path / "trace.json", small(0, world))
    job = trine.load(path)
    rank = job.rank(0)
    assert (rank.world_size, job.missing_ranks) == (None, ())
    assert [note.id for note in rank.quality if "world" in note.id] == ["world-size-implausible"]


@pytest.mark.parametrize(
    ("shapes", "types"),
    [(7, ["float"]), ([[8]], 7), ("x", ["float"]), ([[8]], {"a": 1}), (True, None)],
    ids=str,
)
def test_shapes_and_types_that_are_no_lists(tmp_path: Path, shapes: Any, types: Any) -> None:
    more = {"Input Dims": shapes, "Input type": types}
    events = [operator("c10d::allreduce_", 10, 20, **more), operator("gloo:all_reduce", 12, 15, **more)]
    rank = read_file(written(tmp_path / "trace.json", trace(*events)))
    assert rank.host is not None and len(rank.host) == 2
