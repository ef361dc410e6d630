"""Pickles of strangers: plain data comes through, anything else is refused by name, and nothing is run."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.record.errors import UnreadableInput
from trine.record.readers import _pickles
from trine.record.readers._pickle_stream import stream
from trine.record.readers._pickles import load, read_bytes


def at_once(data: bytes, where: str = "it.pickle") -> Any:
    return load(data, where)


def piece_by_piece(data: bytes, where: str = "it.pickle") -> Any:
    return stream(data, where, lambda row, replace: row)


BOTH = pytest.mark.parametrize("read", [at_once, piece_by_piece])

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary()
)
KEYS = st.integers() | st.text(max_size=9) | st.tuples(st.integers(), st.text(max_size=3))
DATA = st.recursive(
    SCALARS | st.frozensets(st.integers(), max_size=3),
    lambda part: (
        st.lists(part, max_size=4)
        | st.dictionaries(KEYS, part, max_size=4)
        | st.tuples(part, part)
        | st.tuples(part)
        | st.tuples()
    ),
    max_leaves=40,
)


@BOTH
@given(data=DATA, protocol=st.sampled_from([4, 5]), twice=st.booleans())
def test_plain_data_comes_through(
    read: Callable[[bytes], Any], data: Any, protocol: int, twice: bool
) -> None:
    whole = [data, data] if twice else data
    assert read(pickle.dumps(whole, protocol)) == whole


@BOTH
@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_writes_what_can_be_read(read: Callable[[bytes], Any], protocol: int) -> None:
    data = {
        "a": [1, 255, 256, 65536, 2**31, -5, 10**300, 2.5, True, False, None, "ä\n", "x" * 70_000],
        (0, 1): (),
    }
    assert read(pickle.dumps(data, protocol)) == data


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@BOTH
@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_by_name_and_runs_nothing(
    read: Callable[[bytes], Any], protocol: int, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    data = pickle.dumps({"segments": [], "device_traces": [[Malicious(marker)]]}, protocol)
    with pytest.raises(
        UnreadableInput, match=rf"it\.pickle.*refuses {os.system.__module__}\.system.*plain data only"
    ):
        read(data)
    assert not marker.exists()
    pickle.loads(data)  # it is the reader that keeps it from running
    assert marker.exists()


@BOTH
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"cos\nsystem\n(S'ls'\ntR.", r"os\.system"),
        (b"(ios\nsystem\n.", r"os\.system"),
        (b"\x80\x02K\x01)R.", "REDUCE"),
        (b"}Nb.", "BUILD"),
        (b"\x82\x01.", "EXT1"),
        (b"Pabc\n.", "PERSID"),
        (b"]\x81.", "NEWOBJ"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"os\.system"),
    ],
)
def test_each_way_to_an_object_is_refused(read: Callable[[bytes], Any], data: bytes, said: str) -> None:
    with pytest.raises(UnreadableInput, match=rf"refuses .*{said}"):
        read(data)


#: Few bytes that ask for gigabytes, or for years.
BOMBS = {
    "memo index": b"\x80\x02]r\xff\xff\xff\x7f.",
    "memo index in text": b"]p3000000000\n.",
    "sets": b"\x80\x04(" + b"\x8f" * 1_000_000 + b"l.",
    "lists": b"\x80\x02(" + b"]" * 3_000_000 + b"l.",
    "hash of pairs": b"\x80\x02}K\x01" + b"2\x86" * 64 + b"Ns.",
    "hash of fetched pairs": b"\x80\x02}(K\x01K\x01\x86q\x00"
    + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
    + b"Nu.",
    "deep key": b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.",
    "long bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",
    "long bytearray": b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00.",
    "long frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\x00\x00\x00",
    "long number": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "a list for a key": b"}]Ns.",
    "nothing": b"",
    "cut": b"\x80\x04]",
    "text": b"not a pickle at all",
}


@BOTH
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_an_error_soon(read: Callable[[bytes], Any], name: str) -> None:
    began = time.process_time()
    with pytest.raises(UnreadableInput) as told:
        read(BOMBS[name])
    assert time.process_time() - began < 5
    assert "\n" not in str(told.value)
    assert str(told.value).startswith("it.pickle")


@BOTH
@given(data=st.data())
def test_damage_is_an_error_or_plain_data(read: Callable[[bytes], Any], data: st.DataObject) -> None:
    whole = bytearray(
        pickle.dumps(
            {"a": [{"b": i, "c": (i, "x")} for i in range(9)]}, data.draw(st.sampled_from([0, 2, 4]))
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for damaged in (bytes(whole), bytes(whole[:cut])):
        try:
            read(damaged)
        except UnreadableInput as error:
            assert "\n" not in str(error)


def test_a_finished_dictionary_is_replaced_wherever_it_is_named() -> None:
    event = {"action": "alloc", "frames": [1, 2]}
    seen: list[Any] = []

    def taken(row: dict[Any, Any], replace: Callable[[Any, Any], None]) -> Any:
        if "action" not in row:
            return row
        seen.append(dict(row))
        replace(row["frames"], "a stack")
        return 7

    found = stream(pickle.dumps({"trace": [event, event], "same": event["frames"]}), "it", taken)
    assert seen == [event]
    assert found == {"trace": [7, 7], "same": "a stack"}


def test_gzip_is_unpacked_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    path = tmp_path / "it.pickle.gz"
    path.write_bytes(gzip.compress(b"x" * 5000))
    assert read_bytes(path) == b"x" * 5000
    monkeypatch.setattr(_pickles, "MOST_UNPACKED_BYTES", 1 << 10)
    with pytest.raises(UnreadableInput, match="unpacks to more than"):
        read_bytes(path)
    with pytest.raises(UnreadableInput, match="cannot read"):
        read_bytes(tmp_path / "absent")
