"""Frames: what is written is read, and a file cut or damaged anywhere gives what is whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.record.frames import TABLES, Frames, decode_rows, encode_frame, read_frames
from trine.record.model import MISSING
from trine.record.rollup import content_of

INTEGERS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.integers(-5, 300), st.just(MISSING), st.integers(10**18, 10**18 + 9)
)


def _file(path: Path, messages: int) -> list[bytes]:
    frames = Frames()
    pieces = [frames.head("segment")]
    for number in range(messages):
        pieces.append(
            frames.rows("samples", {"time_ns": [number], "metric": [f"m{number % 3}"], "value": [0.5]})
        )
    path.write_bytes(b"".join(pieces))
    return pieces


@given(st.lists(INTEGERS, min_size=1, max_size=40), st.data())
def test_columns_come_back_exactly(integers: list[int], data: st.DataObject) -> None:
    texts = data.draw(
        st.lists(st.none() | st.text(max_size=8), min_size=len(integers), max_size=len(integers))
    )
    frames, strings = Frames(), []
    message = frames.rows("collectives", {"bytes": integers, "operation": texts})
    import msgspec

    decoded = decode_rows(_decode(msgspec, message), strings)
    assert decoded["bytes"].tolist() == integers
    assert [None if code < 0 else strings[code] for code in decoded["operation"].tolist()] == texts
    assert (decoded["issued_ns"] == MISSING).all()
    assert (decoded["device_row"] == -1).all()


def _decode(msgspec: object, frame: bytes) -> dict[str, object]:
    import zlib

    payload = frame[12:]
    body = zlib.decompress(payload[1:]) if payload[0] else payload[1:]
    return msgspec.msgpack.decode(body)  # type: ignore[attr-defined]


@given(st.lists(st.floats(allow_nan=True, width=64), min_size=1, max_size=20))
def test_floats_come_back_exactly(values: list[float]) -> None:
    import msgspec

    message = Frames().rows("samples", {"time_ns": range(len(values)), "value": values})
    decoded = decode_rows(_decode(msgspec, message), [])
    np.testing.assert_array_equal(decoded["value"], np.array(values))


def test_a_file_cut_at_any_byte_gives_its_whole_frames(tmp_path: Path) -> None:
    path = tmp_path / "rows-000001.trine"
    pieces = _file(path, 6)
    data = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        file = read_frames(path)
        assert len(file.messages) == int((ends <= cut).sum())
        assert file.damaged == 0
        assert file.torn_bytes == cut - max([0, *ends[ends <= cut]])


@pytest.mark.parametrize("where", [0, 5, 20])
def test_damage_in_the_middle_costs_that_frame_alone(tmp_path: Path, where: int) -> None:
    path = tmp_path / "rows-000001.trine"
    pieces = _file(path, 6)
    damaged = bytearray(pieces[3])
    damaged[where] ^= 0xFF
    path.write_bytes(b"".join([*pieces[:3], bytes(damaged), *pieces[4:]]))
    file = read_frames(path)
    assert len(file.messages) == len(pieces) - 1
    assert (file.damaged, file.torn_bytes) == (1, 0)
    _file(path, 6)
    assert read_frames(path).damaged == 0  # the control


def _metrics(path: Path) -> list[str | None]:
    """Metrics of the samples as a reader finds them."""
    content = content_of([path])
    columns = content.table("samples")
    assert columns is not None
    return [None if code < 0 else content.strings[code] for code in columns["metric"].tolist()]


def _named(*names: str, damaged: int | None = None) -> bytes:
    """Frames of one sample each; one of them may be damaged."""
    frames = Frames()
    pieces = [frames.head("segment")]
    for number, name in enumerate(names):
        piece = bytearray(frames.rows("samples", {"time_ns": [number], "metric": [name], "value": [0.5]}))
        if number == damaged:
            piece[20] ^= 0xFF
        pieces.append(bytes(piece))
    return b"".join(pieces)


def test_strings_that_are_lost_rename_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows-000001.trine"
    path.write_bytes(_named("a", "b", "c", "b", "a", damaged=1))
    assert _metrics(path) == ["a", "c", None, "a"]
    path.write_bytes(_named("a", "b", "c", "b", "a"))
    assert _metrics(path) == ["a", "b", "c", "b", "a"]


def test_a_table_of_a_later_version_is_passed_over_and_its_strings_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows-000001.trine"
    frames = Frames()
    with monkeypatch.context() as later:
        later.setitem(TABLES, "dreams", {"name": "text"})  # type: ignore[arg-type]
        data = frames.head("segment") + frames.rows("dreams", {"name": ["a sheep"]})
    data += frames.rows("samples", {"time_ns": [1, 2], "metric": ["m", "a sheep"], "value": [0.5, 1.0]})
    path.write_bytes(data)
    assert _metrics(path) == ["m", "a sheep"]
    assert content_of([path]).damaged == 0


def test_tables_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Frames().rows("samples", {"time_ns": [1], "value": [1.0, 2.0]})
    with pytest.raises(KeyError):
        Frames().rows("samples", {"nonsense": [1]})
    assert "complete" in TABLES["parts"]


def test_large_frames_are_compressed() -> None:
    assert len(encode_frame({"text": "a" * 100_000})) < 2_000
