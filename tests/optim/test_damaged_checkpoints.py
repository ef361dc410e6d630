"""Checkpoints that were damaged after they were written, or could not be: named on every rank, and gone round."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_cases
import pytest
import zero_cases
from rank_pool import RankPool

import trine
from trine.record.errors import UnreadableInput, UsageError

pytest.importorskip("torch")


def flip(path: Path, part: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * part)] ^= 0x10
    path.write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard": (
        lambda f: flip(f / "__1_0.distcp"),
        r"__1_0\.distcp, in which (model|optimizer)/\S+ is, is not what was",
    ),
    "rank": (lambda f: flip(f / "rank-00001.pt"), r"rank-00001\.pt is not what was written"),
    "metadata": (lambda f: flip(f / ".metadata"), r"\.metadata is not what was written"),
    "common": (lambda f: flip(f / "common.pt"), r"common\.pt is not what was written"),
    "cut": (lambda f: (f / "__1_0.distcp").write_bytes((f / "__1_0.distcp").read_bytes()[:-9]), "ends after"),
    "lost": (lambda f: (f / "rank-00001.pt").unlink(), r"rank-00001\.pt .*No such file"),
}


@pytest.mark.parametrize("damage", [*DAMAGE])
def test_it_is_named_on_every_rank(two_ranks: RankPool, damage: str, tmp_path: Path) -> None:
    """And of a series, the one before is taken instead, when the newest was asked for."""
    harm, words = DAMAGE[damage]
    changes = {"zero.stage": 3}
    two_ranks.run("checkpoint_cases:series", changes, str(tmp_path), 2, 3)
    newest = tmp_path / "step-000002"
    if damage == "shard":
        for found in two_ranks.run("checkpoint_cases:loads", changes, str(newest)):  # the control
            assert found["step"] == 2 and found["said"] == found["trains"] == "not refused"
    harm(newest)
    by_rank = two_ranks.run("checkpoint_cases:loads", changes, str(newest))
    for found in by_rank:
        assert "\n" not in found["said"] and found["said"] == by_rank[0]["said"]
        assert re.search(words, found["said"]), found["said"]
        if damage == "shard":  # found half way
            assert "load another" in found["trains"]
        else:
            assert found["untouched"] and found["trains"] == "not refused"
    for rank, found in enumerate(two_ranks.run("checkpoint_cases:loads", changes, str(tmp_path), True)):
        assert found["step"] == 1 and found["said"] == found["trains"] == "not refused"
        assert any("step-000001 is tried instead" in line for line in found["warned"]) == (rank == 0)


def test_every_byte_of_a_description_counts(tmp_path: Path) -> None:
    folder = checkpoint_cases.plain_engine().save(tmp_path / "run")
    text = (folder / "trine.json").read_text()
    assert json.loads(text)["step"] == 0
    (folder / "trine.json").write_text(text.replace('"step": 0', '"step": 8'))
    with pytest.raises(UnreadableInput, match=r"trine\.json is not what was written"):
        checkpoint_cases.plain_engine().load(folder)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"schema": "trine.checkpoint/9\\n"}',
        '{"schema": "trine.checkpoint/1", "ranks": 1, "step": "x"}',
    ],
    ids=["endless", "a later schema", "no step"],
)
def test_a_description_that_nothing_has_written(text: str, tmp_path: Path) -> None:
    engine = checkpoint_cases.plain_engine()
    folder = engine.save(tmp_path, keep=1)
    assert trine.latest_checkpoint(tmp_path) == folder
    (folder / "trine.json").write_text(text)
    assert trine.latest_checkpoint(tmp_path) is None
    with pytest.raises(UnreadableInput) as raised:
        engine.load(folder)
    assert "\n" not in str(raised.value)


def test_a_series(tmp_path: Path) -> None:
    engine = checkpoint_cases.plain_engine()
    batch = zero_cases.optim_cases.batches(1, 2)[0]
    assert trine.latest_checkpoint(tmp_path) is None
    with pytest.raises(UnreadableInput, match="holds no checkpoint step-"):
        engine.load(tmp_path, newest=True)
    for _ in range(4):
        engine.train_step(batch)
        engine.save(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]
    assert trine.latest_checkpoint(tmp_path) == tmp_path / "step-000004"
    with pytest.raises(UnreadableInput, match=r"step-000004 the newest: .*newest=True"):
        engine.load(tmp_path)
    (tmp_path / "step-000004" / "common.pt").unlink()
    assert trine.latest_checkpoint(tmp_path) == tmp_path / "step-000003"
    assert checkpoint_cases.plain_engine().load(tmp_path, newest=True) == 3
    with pytest.raises(UsageError, match="keep = 0"):
        engine.save(tmp_path, keep=0)


def test_a_later_step_is_left_alone_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = checkpoint_cases.plain_engine()
    batch = zero_cases.optim_cases.batches(1, 2)[0]
    engine.train_step(batch)
    engine.save(tmp_path, keep=1)
    engine.train_step(batch)
    engine.save(tmp_path, keep=2)
    engine.load(tmp_path / "step-000001")
    engine.save(tmp_path, keep=1)
    assert "step-000002 is of a later step" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path: Path) -> None:
    # Ranks of its own: their store is a file too, and that of ranks that live longer is larger than what is allowed.
    ranks = RankPool(tmp_path)
    try:
        for found in ranks.run("checkpoint_cases:short_of_room", str(tmp_path / "run"), 1):
            for said in found["said"]:
                assert "File too large" in said and "\n" not in said
            assert found["stays"] == 0
    finally:
        ranks.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the case, and not for two."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(place)],
        check=False,
        capture_output=True,
        timeout=10,
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=10)


def test_a_full_disk(two_ranks: RankPool, small_disk: Path) -> None:
    for found in two_ranks.run("checkpoint_cases:short_of_room", str(small_disk / "run"), None):
        assert "No space left on device" in found["said"][0] and "\n" not in found["said"][0]
        assert not found["left"]  # of what was written until then, which would only fill the disk
        assert found["stays"] == 0
