"""The files of training state off the device: damage is named, a full disk is one clear line, nothing is left."""

from __future__ import annotations

import copy
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import offload_cases
import optim_cases
import pytest
import torch
from offload_cases import disk, whole
from rank_pool import RankPool

import trine
from trine.optim.runtime.tiers import files
from trine.optim.runtime.tiers.files import TierFile, checksum_of
from trine.record.errors import TrainingError, UsageError
from trine.samples.gpt import loss_of


def test_a_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    for changes, what, words in (
        (disk(tmp_path), "state", ["blocks.0.norm1.bias's exp_avg"]),
        (whole(tmp_path), "parameters", ["blocks.1.attention.qkv.weight's values"]),
    ):
        said, kind, refused = offload_cases.damaged(0, changes, 0, what)
        assert kind == "DamagedTier" and issubclass(files.DamagedTier, TrainingError)
        assert all(word in said for word in [*words, str(tmp_path), "elements 0 to", "checkpoint"]), said
        assert "\n" not in said
        assert refused or what == "parameters"  # parameters are as they were: the step may be tried again
        assert offload_cases.damaged(0, changes, None, what) == ("", "", False)  # the healthy control


@pytest.mark.parametrize("what", ["state", "parameters"])
def test_a_flipped_byte_on_one_rank_stops_all(what: str, two_ranks: RankPool, tmp_path: Path) -> None:
    changes = whole(tmp_path)
    (own, kind, _), (other, others_kind, _) = two_ranks.run("offload_cases:damaged", changes, 0, what)
    assert kind == others_kind == "DamagedTier"
    assert "is not what was written there" in own
    assert other.startswith("rank 0 has lost a part of the run's state") and own in other
    assert two_ranks.run("offload_cases:damaged", changes, None, what) == [("", "", False)] * 2


@pytest.mark.parametrize("how", ["load", "load_state_dict", "begin"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("what", ["state", "parameters"])
def test_what_was_taken_over_is_compared_at_its_first_read(
    what: str, warm: bool, how: str, tmp_path: Path
) -> None:
    """A byte that is flipped after a load, or after the engine began, and before the first step."""
    data = optim_cases.batches(3, 4)

    def made(changes: dict[str, Any], steps: int) -> Any:
        model = optim_cases.small_gpt(layers=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if how == "begin":  # the optimizer has a state, which goes to disk
            loss_of(model, data[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps -= 1
        config = trine.Config().with_changes(changes)
        engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
        for batch in data[:steps]:
            engine.train_step(batch)
        return engine

    def losses(engine: Any) -> list[float]:
        try:
            return [float(engine.train_step(batch)) for batch in data[1:]]
        finally:
            engine.close()

    def taken_over() -> Any:
        if how == "begin":
            return made(whole(tmp_path), 1)
        engine = made(whole(tmp_path), int(warm))
        engine.load(saved) if how == "load" else engine.load_state_dict(state)
        return engine

    plain = made({}, 1)
    saved, state = plain.save(tmp_path / "saved"), copy.deepcopy(plain.state_dict())
    expected = losses(plain)
    assert losses(taken_over()) == expected  # the healthy control
    engine = taken_over()
    offload_cases.flip(engine, what)
    with pytest.raises(TrainingError, match="is not what was written there"):
        losses(engine)


def test_a_damaged_state_is_not_saved(tmp_path: Path) -> None:
    model = optim_cases.small_gpt(layers=4)
    engine = trine.optimize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        trine.Config().with_changes(disk(tmp_path)),
        loss_fn=loss_of,
    )
    engine.train_step(optim_cases.batches(1, 4)[0])
    engine.save(tmp_path / "good")
    offload_cases.flip(engine, "state")
    with pytest.raises(TrainingError, match="is not what was written there"):
        engine.save(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    engine.close()


def test_a_full_disk_is_found_at_once_with_its_bytes(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = optim_cases.small_gpt()
    # A limit on the file's size fails as a full disk does: where space is reserved.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            UsageError, match=r"offload\.path = .*\d+ bytes are needed there and \d+ are free"
        ) as raised:
            offload_cases.train(disk(tmp_path), model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)
    offload_cases.train(disk(tmp_path), model)  # there is room again


def test_a_disk_that_fails_while_it_is_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, "pwrite", fail)
    with pytest.raises(TrainingError, match=r"cannot be written: Input/output error"):
        offload_cases.train(disk(tmp_path))


def test_closing_ends_the_threads_and_leaves_a_model_that_works(tmp_path: Path) -> None:
    before = threading.active_count()
    model = optim_cases.small_gpt(layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(whole(tmp_path)), loss_fn=loss_of)
    data = optim_cases.batches(3, 4)
    engine.train_step(data[0])
    assert list(tmp_path.iterdir()) == []  # the file has no name
    assert threading.active_count() > before
    engine.close()
    assert threading.active_count() == before
    loss_of(model, data[1]).backward()  # PyTorch's own loop goes on from there
    optimizer.step()
    plain = optim_cases.small_gpt(layers=4)
    stepper = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in data[:2]:
        loss_of(plain, batch).backward()
        stepper.step()
        stepper.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("size", [1, 7, 8, 4096, 600_001])
def test_checksums_see_every_kind_of_damage(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    good = checksum_of(data)
    assert checksum_of(data.clone()) == good
    for place in {0, size // 2, size - 1}:
        for bit in (0, 7):
            damaged = data.clone()
            damaged[place] ^= 1 << bit
            assert checksum_of(damaged) != good
    assert checksum_of(torch.zeros_like(data)) != checksum_of(torch.zeros(size + 1, dtype=torch.uint8))
    if size > 4096:  # pages that changed places, and one that was not written
        swapped = torch.cat([data[4096:8192], data[:4096], data[8192:]])
        assert checksum_of(swapped) != good
        words = 8 * (1 << 16)
        assert checksum_of(torch.cat([data[words:], data[:words]])) != good
        stale = data.clone()
        stale[4096:8192] = 0
        assert checksum_of(stale) != good


def test_a_region_tells_the_programs_writes_from_damage(tmp_path: Path) -> None:
    file = TierFile(tmp_path, 8192)
    region = file.take("weight", "exp_avg", torch.empty(8, 16), torch.float32)
    region.cut([(0, 64), (64, 128)])
    region.fill(torch.ones(8, 16))
    buffer = torch.empty(256, dtype=torch.uint8)
    region.tensor.mul_(3.0)
    region.notice()
    region.read(64, 128, buffer)
    assert bool((buffer.view(torch.float32) == 3.0).all())
    region.write(0, 64, torch.full((64,), 5.0).view(torch.uint8))
    assert bool((region.tensor[:4] == 5.0).all())  # the mapping shows what was written
    region.tensor.numpy()[7, 15] = 4.0
    region.notice()
    with pytest.raises(files.DamagedTier, match="elements 64 to 128 of weight's exp_avg"):
        region.read(64, 128, buffer)
    region.read(0, 64, buffer)
    file.close()


SCRIPT = """
import json, os, signal, sys
import torch, trine
sys.path.insert(0, sys.argv[1])
import optim_cases
from trine.samples.gpt import loss_of
model = optim_cases.small_gpt()
offload = {**json.loads(sys.argv[3]), "path": sys.argv[2]}
engine = trine.optimize(model, torch.optim.AdamW(model.parameters()), {"offload": offload}, loss_fn=loss_of)
engine.train_step(optim_cases.batches(1, 8)[0])
print(len(os.listdir(sys.argv[2])), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "offload", [{"optimizer": "nvme", "parameters": "nvme"}, {"activations": "nvme"}], ids=str
)
def test_a_killed_process_leaves_nothing(offload: dict[str, str], tmp_path: Path) -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT,
            str(Path(__file__).resolve().parents[1]),
            str(tmp_path),
            json.dumps(offload),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (found.returncode, found.stdout) == (-9, "0\n"), found.stderr
    assert list(tmp_path.iterdir()) == []
