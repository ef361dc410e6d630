"""Names of devices as papers, logs and PyTorch write them."""

from __future__ import annotations

import csv
from importlib.resources import files

import pytest

from trine.optim.plan.devices import device_named, device_names, facts_of
from trine.record.errors import UsageError
from trine.record.hardware import Peaks, all_peaks, store_calibration

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "name", "family"),
    [
        ("A100", "A100 SXM4 80GB", "ampere"),
        ("A100-SXM-40GB", "A100 SXM4 40GB", "ampere"),
        ("A100-SXM-80GB", "A100 SXM4 80GB", "ampere"),
        ("A100-SXM4-40GB (DGX-A100)", "A100 SXM4 40GB", "ampere"),
        ("A100-SXM4-80GB", "A100 SXM4 80GB", "ampere"),
        ("A100-SXM4-80GB (Jean Zay)", "A100 SXM4 80GB", "ampere"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", "ampere"),
        ("A100-PCIe", "A100 PCIe 80GB", "ampere"),
        ("8x A100 40GB", "A100 SXM4 40GB", "ampere"),
        ("DGX A100", "A100 SXM4 80GB", "ampere"),
        ("B200-SXM-180GB", "B200", "blackwell"),
        ("B200 192GB", "B200", "blackwell"),
        ("DGX-B200", "B200", "blackwell"),
        ("DGX-B300", "B300", "blackwell"),
        ("DGX-GB200", "GB200", "blackwell"),
        ("GB200 NVL72", "GB200", "blackwell"),
        ("GB200-NVL72", "GB200", "blackwell"),
        ("DGX-GB300", "GB300", "blackwell"),
        ("DGX-H100", "H100 SXM5 80GB", "hopper"),
        ("H100", "H100 SXM5 80GB", "hopper"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5 80GB", "hopper"),
        ("H100-SXM5-80GB", "H100 SXM5 80GB", "hopper"),
        ("H100 96GB HBM2e 500W (Grand Teton)", "H100 96GB HBM2e", "hopper"),
        ("H100 NVL 94GB", "H100 NVL", "hopper"),
        ("H200-SXM-141GB", "H200 SXM", "hopper"),
        ("GH200 96GB", "GH200 96GB", "hopper"),
        ("Gaudi2", "Gaudi 2", "gaudi"),
        ("Intel Gaudi 3", "Gaudi 3", "gaudi"),
        ("MI325X", "MI325X", "cdna3"),
        ("AMD Instinct MI300X OAM", "MI300X", "cdna3"),
        ("MI355X", "MI355X", "cdna4"),
        ("TPU trillium", "TPU v6e", "tpu"),
        ("TPU v5e", "TPU v5e", "tpu"),
        ("TPU v5 lite", "TPU v5e", "tpu"),
        ("TPU v5p", "TPU v5p", "tpu"),
        ("TPUv3", "TPU v3", "tpu"),
        ("Google Cloud TPUv4", "TPU v4", "tpu"),
        ("V100", "V100 SXM2 32GB", "volta"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB", "volta"),
        ("V100-SXM3-32GB (DGX-2)", "V100 SXM3 32GB", "volta"),
        ("DGX-2", "V100 SXM3 32GB", "volta"),
        ("RTX 4090", "GeForce RTX 4090", "ada"),
        ("Trainium2", "Trainium2", "trainium"),
        ("H100 (SXM5, 80GB)", "H100 SXM5 80GB", "hopper"),
        ("A100 (PCIe)", "A100 PCIe 80GB", "ampere"),
        ("A100 40GB (Selene)", "A100 SXM4 40GB", "ampere"),
        ("8xA100", "A100 SXM4 80GB", "ampere"),
        ("8 x NVIDIA H100 80GB", "H100 SXM5 80GB", "hopper"),
        ("80GB A100-SXM", "A100 SXM4 80GB", "ampere"),
        ("HGX H100", "H100 SXM5 80GB", "hopper"),
        ("V100 16GB", "V100 SXM2 16GB", "volta"),
        ("H100 94GB", "H100 96GB HBM2e", "hopper"),
        ("NVIDIA H800", "H800 SXM5 80GB", "hopper"),
        ("A800-SXM4-80GB", "A800 SXM4 80GB", "ampere"),
        ("TPU v4-4096", "TPU v4", "tpu"),
        ("v5e-256", "TPU v5e", "tpu"),
        ("TPUv5p-6144", "TPU v5p", "tpu"),
        ("L40S 48GB", "L40S", "ada"),
        ("RTX A6000 48GB", "RTX A6000", "ampere"),
        ("MI250X 64GB (one GCD)", "MI250X (one GCD)", "cdna2"),
        ("H20-96GB", "H20", "hopper"),
        ("NVIDIA L20", "L20", "ada"),
        ("B100", "B100", "blackwell"),
        ("TPU v2-8", "TPU v2", "tpu"),
        ("TPU v7", "TPU v7", "tpu"),
        ("Ironwood", "TPU v7", "tpu"),
        ("Trn1", "Trainium", "trainium"),
        ("Gaudi2 HLS-2", "Gaudi 2", "gaudi"),
        ("GH200 NVL2 144GB", "GH200 144GB", "hopper"),
    ],
)
def test_names_that_people_write(text: str, name: str, family: str) -> None:
    device = device_named(text)
    assert (device.name, device.family) == (name, family)
    assert device.source and device.memory_bytes > 10 * GIB


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cpu",
        "A100 MIG 1g.10gb",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "RTX 4090 Laptop",
        "H1000",
        "A1000",
        "TPU",
        "some device",
        "dgx",
    ],
)
def test_other_devices_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        device_named(text)
    assert "\n" not in str(caught.value)


def test_a_memory_size_that_nobody_makes_is_refused() -> None:
    with pytest.raises(
        UsageError, match="A100 SXM4 80GB with 80 GB or A100 SXM4 40GB with 40 GB, none with 96 GB"
    ):
        device_named("A100 96GB")


def test_what_was_assumed_is_said_and_only_that() -> None:
    assert '"A100" is taken to be A100 SXM4 80GB' in device_named("A100").source
    assert "taken" not in device_named("A100-SXM4-80GB").source
    assert "taken" not in device_named("MI300X").source


def test_every_row_of_peaks_has_a_family_and_a_network_and_every_rate_a_device() -> None:
    # Adding a device is a row in each: one alone would plan with constants of no family.
    assert {peaks.name for peaks in all_peaks()} == set(device_names())
    for peaks in all_peaks():
        device = device_named(peaks.name)
        facts = facts_of(device)
        assert facts is not None and facts.family == device.family and facts.source
    text = files("trine.optim.plan").joinpath("matmul_rates.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    assert len(rows) >= 20
    for row in rows:
        device = device_named(row["device"])
        share = float(row["tflops"]) * 1e12 / device.peak(row["precision"])
        assert 0.5 < share < 1, row  # a rate above the peak is of another device or sparse


def test_measured_rates_are_of_the_device() -> None:
    device = device_named("H100")
    assert device.matmul_flops_per_s == pytest.approx(794.5e12)
    assert device.matmul_rates["fp8"] == pytest.approx(1402.6e12)
    assert device_named("V100").matmul_flops_per_s is None


def test_a_calibrated_processor_is_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    flops = {"fp32": 6e10, "bf16": 9e10}
    store_calibration(Peaks("Some CPU (family 1 model 2)", flops, 8 * GIB, 1e10, None, "measured", True, 2))
    device = device_named("Some CPU (family 1 model 2)")
    assert device.family == "cpu" and device.peak("bf16") == 9e10


def test_every_device_of_the_published_runs_is_known(published_runs: list[dict[str, str]]) -> None:
    names = {row["gpu"]: row["gpu_mem_gb"] for row in published_runs if row["gpu"]}
    assert len(names) > 20
    for name, memory in names.items():
        device = device_named(name)
        if memory:
            assert device.memory_bytes / GIB == pytest.approx(float(memory), rel=0.02), name
