"""Calibrated operations: every kind is there by dtype and size, and more work takes longer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed

from trine.cli import main
from trine.optim.config import CODECS
from trine.optim.runtime.exchange import calibration
from trine.optim.runtime.exchange.calibration import codecs_of
from trine.profiler import calibrate, calibrate_links, calibrate_operations, calibrate_sharding
from trine.profiler.calibrate_sharding import PARAMETERS
from trine.record.hardware import Peaks, calibrated


def test_operations_are_measured_by_dtype_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_operations, "SECONDS", 0.0)
    monkeypatch.setattr(calibrate_operations, "SIDES", (16, 256))
    monkeypatch.setattr(calibrate_operations, "TOKENS", (16,))
    monkeypatch.setattr(calibrate_operations, "HEAD_SIZES", (32,))
    monkeypatch.setattr(calibrate_operations, "ELEMENTS", (2**12, 2**20))
    rows = calibrate_operations.measure_operations(torch.device("cpu"))
    assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    seconds = {(row["operation"], row["dtype"], tuple(row["shape"])): row["seconds"] for row in rows}
    assert all(value > 0 for value in seconds.values())
    assert seconds["product", "fp32", (1, 256, 256, 256)] > seconds["product", "fp32", (1, 16, 16, 16)]
    for name in ("add", "gelu", "softmax_backward", "layer_norm", "masked_fill", "cast", "transposed_copy"):
        assert seconds[name, "bf16", (2**20,)] > seconds[name, "bf16", (2**12,)]
    for row in rows:  # how far the repetitions were from each other is kept
        low, middle, high = row["quartiles"]
        assert 0 < row["seconds"] <= low <= middle <= high
    assert any(row["quartiles"][0] < row["quartiles"][2] for row in rows)


def test_codecs_send_fewer_bytes_in_the_ratio_of_their_bits() -> None:
    rows = {row["dtype"]: row for row in codecs_of(torch.device("cpu"))}
    assert set(rows) == set(CODECS) and all(row["seconds"] > 0 for row in rows.values())
    assert all(row["seconds"] <= row["quartiles"][0] <= row["quartiles"][2] for row in rows.values())
    assert rows["bf16"]["ratio"] == pytest.approx(2.0)
    assert rows["int8"]["ratio"] == pytest.approx(4.0, rel=0.05)  # and a scale for 64 codes
    assert rows["onebit"]["ratio"] > rows["int8"]["ratio"]


def test_codecs_that_fail_leave_the_rest_of_a_calibration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = {"operation": "all_reduce", "bytes": 8, "seconds": 1e-3, "ranks": 4}
    peaks = Peaks("a machine", {}, None, None, None, "by hand", True, 1, {}, None, [link])
    asked: list[tuple[int, int]] = []
    before = torch.get_num_threads()

    def failing(device: torch.device, ranks: int = 2) -> list[dict[str, object]]:
        asked.append((ranks, torch.get_num_threads()))
        raise RuntimeError("no such\ncodec")

    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "calibrate_all", lambda ranks, tell: [(torch.device("cpu"), peaks)])
    monkeypatch.setattr(calibration, "codecs_of", failing)
    assert main(["hardware", "--calibrate", "--no-observer"]) == 0
    assert asked == [(4, 1)] and torch.get_num_threads() == before
    assert "left out: codecs: no such codec" in capsys.readouterr().err
    kept = calibrated("a machine", 1)
    assert kept is not None and list(kept.operations) == [link]


def codec_of(device: torch.device) -> dict[str, Any]:
    return {"operation": "codec", "dtype": str(device), "bytes": 8, "seconds": 1.0, "ratio": 2.0}


def test_codecs_of_a_second_kind_of_device_are_measured_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices = {name: torch.device("cuda", index) for index, name in ((0, "one kind"), (2, "another"))}
    found = [(device, Peaks(name, {}, None, None, None, "by hand", True)) for name, device in devices.items()]
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "calibrate_all", lambda ranks, tell: found)
    monkeypatch.setattr(calibration, "codecs_of", lambda device, ranks: [codec_of(device)])
    assert main(["hardware", "--calibrate", "--no-observer"]) == 0
    for name, device in devices.items():
        kept = calibrated(name)
        assert kept is not None and list(kept.operations) == [codec_of(device)]


def test_products_beside_an_all_reduce_last_as_long_as_it_whatever_a_launch_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds

    def timed(run: Callable[[], Any], device: torch.device) -> float:
        began = now
        run()
        takes(1e-3)  # a launch, and the wait for the device
        return now - began

    monkeypatch.setattr(calibrate_links, "_timed", timed)
    monkeypatch.setattr(calibrate_links.torch, "mm", lambda *factors: takes(1e-5))

    def reduced(buffer: torch.Tensor, async_op: bool = False) -> Any:
        takes(0.4e-2 if async_op else 1e-2)  # the slow-down, of what hides behind the products
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(calibrate_links.distributed, "all_reduce", reduced)
    found = calibrate_links._overlap(torch.device("cpu"))
    assert found["covered"] == pytest.approx(1.0, abs=0.1)
    assert found["slowdown"] == pytest.approx(0.4, abs=0.1)


@pytest.mark.slow
def test_links_and_the_overlap_are_measured_between_ranks() -> None:
    collective, rows = calibrate.measure_links(2)
    assert collective["operation"] == "all_reduce" and float(collective["bytes_per_s"]) > 0
    assert {row["operation"] for row in rows} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "overlap",
        "sharded_unit",
    }
    assert all(row["ranks"] == 2 and row["backend"] == "gloo" for row in rows)
    dtypes = {(row["operation"], row["dtype"]) for row in rows if "dtype" in row}
    assert {dtype for operation, dtype in dtypes if operation == "all_reduce"} == {"fp32", "bf16"}
    assert {dtype for operation, dtype in dtypes if operation == "broadcast"} == {"fp32"}
    overlap = next(row for row in rows if row["operation"] == "overlap")
    assert 0 <= overlap["slowdown"] <= 1 and overlap["covered"] > 0
    units = {
        (row["phase"], row["again"], row["parameters"]): row["seconds"]
        for row in rows
        if row["operation"] == "sharded_unit"
    }
    assert len(units) == 8 and all(seconds >= 0 for seconds in units.values())
    for row in rows:
        if row["operation"] != "overlap":
            low, middle, high = row["quartiles"]
            assert low <= middle <= high and row["seconds"] <= high


def test_shards_cost_what_their_units_take_longer_on_the_device_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, meshes = [0.0], []

    def takes(seconds: float) -> None:
        now[0] += seconds

    def sharded(module: torch.nn.Module, *, mesh: Any = None, reshard_after_forward: bool) -> None:
        meshes.append(mesh)
        parameters = len(list(module.parameters())) if isinstance(module, calibrate_sharding._Unit) else 0
        again = 2.0 if reshard_after_forward else 1.0
        module.register_forward_pre_hook(lambda *given: takes(1e-3 * parameters))
        module.register_full_backward_hook(lambda *given: takes(1e-2 * parameters * again))

    monkeypatch.setattr(calibrate_sharding.time, "thread_time", lambda: now[0])
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", sharded)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        rows = calibrate_sharding.measure_sharding(torch.device("cpu"))
    finally:
        distributed.destroy_process_group()
    # Without a mesh FSDP2 moves the parameters to the machine's accelerator, wherever the ranks are.
    assert {mesh.device_type for mesh in meshes} == {"cpu"}
    found = {(row["phase"], row["again"], row["parameters"]): row["seconds"] for row in rows}
    assert found == {
        (phase, again, parameters): pytest.approx(seconds * parameters)
        for parameters in PARAMETERS
        for phase, again, seconds in (
            ("forward", False, 1e-3),
            ("forward", True, 1e-3),
            ("backward", False, 1e-2),
            ("backward", True, 2e-2),
        )
    }


def test_a_call_finds_other_tensors_than_the_call_before_and_keeps_what_it_made() -> None:
    inputs = [(torch.full((4,), float(number)),) for number in range(3)]
    seen: list[float] = []
    made: list[int] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x[0]))
        result = x.clone()
        made.append(result.data_ptr())
        return result

    call = calibrate_operations._cold(work, inputs)
    for _ in range(6):
        call()
    assert seen == [0.0, 1.0, 2.0] * 2
    assert all(len(set(made[at : at + 3])) == 3 for at in range(4))


def test_a_device_is_timed_over_launches_that_run_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, blocks = [0], []

    def timed(work: Callable[[], Any], device: torch.device) -> float:
        before = calls[0]
        work()
        blocks.append(calls[0] - before)
        return 1e-4 * blocks[-1]

    def work() -> None:
        calls[0] += 1

    monkeypatch.setattr(calibrate_operations, "timed", timed)
    found = calibrate_operations._repeated(work, torch.device("cuda", 0))
    assert len(found) >= 5 and found == pytest.approx([1e-4] * len(found))
    assert blocks[0] == 1 and set(blocks[1:]) == {10}  # a millisecond together


def test_products_of_a_device_are_large_but_none_takes_too_long() -> None:
    shapes = [shape for shape, _ in calibrate_operations._products(torch.float32, torch.device("meta"))]
    plain = [shape for shape in shapes if shape[0] == 1]
    assert (1, 8192, 8192, 1024) in plain and (1, 4096, 4096, 4096) in plain
    assert (1, 8192, 8192, 8192) not in plain
