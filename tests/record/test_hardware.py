"""Names that PyTorch and traces really give, and what must come of them."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import pytest

from trine.record.hardware import (
    Peaks,
    all_peaks,
    busy_while_measured,
    cache_folder,
    calibrated,
    peaks_of,
    present_devices,
    processor_name,
    store_calibration,
)

TERA = 1e12


@pytest.mark.parametrize(
    ("device", "name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB", "bf16", 312),
        ("A100-SXM4-40GB", "A100 SXM4 40GB", "tf32", 156),
        ("NVIDIA A100-PG509-200", "A100 SXM4 40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5 80GB", "bf16", 989.4),
        ("NVIDIA H100 96GB HBM2e", "H100 96GB HBM2e", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", "bf16", 756),
        ("NVIDIA H800", "H800 SXM5 80GB", "bf16", 989.4),
        ("NVIDIA A800-SXM4-80GB", "A800 SXM4 80GB", "bf16", 312),
        ("NVIDIA H100 NVL", "H100 NVL", "bf16", 835),
        ("NVIDIA H200", "H200 SXM", "fp8", 1978.9),
        ("NVIDIA H200 NVL", "H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "GH200 96GB", "bf16", 989.4),
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB", "bf16", 989.4),
        ("NVIDIA B200", "B200", "bf16", 2250),
        ("NVIDIA GB200", "GB200", "bf16", 2500),
        ("NVIDIA B300 SXM6 AC", "B300", "bf16", 2250),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB", "fp16", 125),
        ("Tesla V100-DGXS-32GB", "V100 DGX Station 32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB", "fp16", 112),
        ("Quadro GP100", "Quadro GP100", "fp32", 10.3),
        ("Tesla T4", "T4", "fp16", 65),
        ("NVIDIA A10", "A10", "bf16", 125),
        ("NVIDIA A10G", "A10G", "bf16", 70),
        ("NVIDIA A40", "A40", "bf16", 149.7),
        ("NVIDIA L4", "L4", "bf16", 121),
        ("NVIDIA L40", "L40", "bf16", 181),
        ("NVIDIA L40S", "L40S", "bf16", 362),
        ("NVIDIA RTX A6000", "RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "bf16", 364.2),
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI300X", "MI300X", "bf16", 1307.4),
        ("AMD Instinct MI300X VF", "MI300X", "bf16", 1307.4),
        ("AMD Instinct MI250X", "MI250X (one GCD)", "bf16", 191.5),
        ("AMD Instinct MI250", "MI250 (one GCD)", "bf16", 181.05),
        ("AMD Instinct MI355X", "MI355X", "bf16", 2516.6),
        ("TPU v3", "TPU v3", "bf16", 123),
    ],
)
def test_known_names(device: str, name: str, dtype: str, tflops: float) -> None:
    peaks = peaks_of(device)
    assert peaks is not None
    assert peaks.name == name
    assert peaks.flops_per_s[dtype] == pytest.approx(tflops * TERA)
    assert not peaks.measured


@pytest.mark.parametrize(
    "device",
    [
        "",
        "cpu",
        "NVIDIA H100",  # SXM or PCIe: 989 or 756
        "NVIDIA A100",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",  # a slice of one
        "NVIDIA A100-SXM-64GB",  # Leonardo's own, faster than the public one
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A1000",
        "AMD Radeon Graphics",
        "AMD EPYC 7763 64-Core Processor",
        "Some Future Device 9000",
    ],
)
def test_unknown_and_ambiguous_names_have_no_peak(device: str) -> None:
    assert peaks_of(device) is None


def test_devices_that_share_a_prefix_are_told_apart() -> None:
    assert peaks_of("NVIDIA L4").memory_bytes != peaks_of("NVIDIA L40").memory_bytes  # type: ignore[union-attr]
    small, large = peaks_of("Tesla V100-SXM2-16GB"), peaks_of("Tesla V100-SXM2-32GB")
    assert small is not None and large is not None
    assert (small.memory_bytes, large.memory_bytes) == (16 * 2**30, 32 * 2**30)


def test_every_row_is_sound_and_cited() -> None:
    rows = all_peaks()
    assert len({peaks.name for peaks in rows}) == len(rows) >= 45
    for peaks in rows:
        assert re.search(r"https://|datasheet|data sheet|whitepaper|white paper|brief|brochure", peaks.source)
        assert peaks.flops_per_s, peaks.name
        assert all(1e12 < value < 1e16 for value in peaks.flops_per_s.values()), peaks.name
        bf16, fp8 = peaks.flops_per_s.get("bf16"), peaks.flops_per_s.get("fp8")
        if bf16 and fp8:  # fp8 above twice bf16 would be the sparse figure slipped in
            assert fp8 <= 2.05 * bf16, peaks.name
        assert peaks.memory_bytes and peaks.memory_bytes_per_s, peaks.name
        assert 1e11 < peaks.memory_bytes_per_s < 1e13, peaks.name


def test_every_device_of_the_real_traces_is_known_or_truly_unknown(data: Path) -> None:
    names: set[str] = set()
    for path in (data / "traces" / "kineto").rglob("*.json*"):
        opened = gzip.open if path.suffix == ".gz" else Path.open
        try:
            with opened(path, "rb") as file:
                head = file.read(400_000)
        except (OSError, EOFError):
            continue  # truncated on purpose
        names |= {m.decode() for m in re.findall(rb'"name": ?"([^"]{3,60})", ?"totalGlobalMem"', head)}
    assert len(names) >= 6
    unknown = {name for name in names if peaks_of(name) is None}
    assert unknown <= {"AMD Radeon Graphics"}


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("TRINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "trine"


def _measured(name: str, threads: int | None, bf16: float) -> Peaks:
    flops = {"bf16": bf16, "fp32": 6e10}
    collective = {"backend": "gloo", "ranks": 2, "alpha_s": 1e-4, "bytes_per_s": 1e9}
    return Peaks(name, flops, None, 1e10, None, "measured here", True, threads, collective)


def test_calibrations_are_kept_by_device_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    assert calibrated("AMD EPYC") is None
    one, two = _measured("AMD EPYC", 1, 2e11), _measured("AMD EPYC", 2, 4e11)
    store_calibration(two)
    path = store_calibration(one)
    assert path.is_relative_to(tmp_path)
    assert calibrated("AMD EPYC", threads=1) == one
    assert calibrated("AMD EPYC", threads=2) == two
    assert calibrated("AMD EPYC", threads=4) is None
    assert calibrated("AMD EPYC") == two
    assert calibrated("AMD EPYC 7763") is None  # the same beginning is not the same device
    assert not list(tmp_path.rglob("*.part"))


def test_a_damaged_calibration_counts_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    store_calibration(_measured("X", 1, 1e11)).write_text('{"schema": "trine.calibra')
    assert calibrated("X") is None
    assert "calibrate again" in caplog.text


@pytest.mark.parametrize("threads", [1, 2, None])
def test_a_machine_that_was_busy_while_it_was_calibrated_is_said_to_have_been(threads: int | None) -> None:
    row = {"operation": "copy", "dtype": "fp32", "shape": [8], "seconds": 1.0}
    alone, disturbed = ({**row, "quartiles": [1.0, 1.1, high]} for high in (1.2, 6.0))
    peaks = _measured("X", threads, 1e11)
    busy = busy_while_measured(replace(peaks, operations=[alone] * 80 + [disturbed] * 20))
    assert (
        busy is not None
        and "20 of 100 times" in busy
        and "trine hardware --calibrate again when it is idle" in busy
    )
    assert ("thread" in busy) == (threads is not None)
    for quiet in (
        [alone] * 96 + [disturbed] * 4,
        [row] * 100,
        [],
    ):  # by chance, by an earlier release, of datasheets
        assert busy_while_measured(replace(peaks, operations=quiet)) is None


def test_processor_name_is_one_line() -> None:
    assert processor_name() and "\n" not in processor_name()


def test_accelerators_are_named_by_their_driver(tmp_path: Path) -> None:
    assert present_devices(tmp_path) is None  # no /proc: nobody tells
    (tmp_path / "proc/self").mkdir(parents=True)
    assert present_devices(tmp_path) == ()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()  # of the driver, not of a device
    assert present_devices(tmp_path) == ()
    (tmp_path / "dev/kfd").touch()
    assert present_devices(tmp_path) is None
    for index in (0, 1):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{index}:00.0"
        folder.mkdir(parents=True)
        text = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 45\nDevice Minor: \t 0\n"
        (folder / "information").write_text(text)
    assert present_devices(tmp_path) == ("NVIDIA H200", "NVIDIA H200")
