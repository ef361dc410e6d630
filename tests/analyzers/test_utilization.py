from __future__ import annotations

import pytest
from analysis_tables import step_table, summary_of

from trine.analyzers.results import Hardware, StepStatistics
from trine.analyzers.utilization import find_hardware, find_mfu
from trine.record.hardware import Peaks, peaks_of, store_calibration
from trine.record.model import DeviceInfo, Strings

A100 = "NVIDIA A100-SXM4-80GB"
STATISTICS = StepStatistics(10, 500_000_000, 490_000_000, 510_000_000, 520_000_000)
FLOPS = {"counted": 3e13, "palm": 4e13, "executed": 6e13, "megatron": None}
BF16 = {"parameter_dtype": "float32", "autocast_dtype": "bfloat16", "float32_matmul": "highest"}


def trained(rank: int = 0, **metadata):
    values = {"flops": FLOPS, "precision": BF16, **metadata}
    return summary_of(rank, devices=(DeviceInfo(0, A100, 80 * 2**30),), metadata=values)


def mfu_of(*summaries, statistics=STATISTICS, convention=None):
    hardware, _ = find_hardware(summaries)
    mfu, notes = find_mfu(summaries, hardware, statistics, convention)
    assert (mfu is None) == ("no-mfu" in {note.id for note in notes})
    return mfu, notes[0].message if notes else None


def test_without_a_convention_the_value_is_open_and_the_range_is_given() -> None:
    mfu, _ = mfu_of(trained(0), trained(1))
    peak = peaks_of(A100).flops_per_s["bf16"]
    assert mfu.value is None and mfu.convention is None and mfu.flops_per_step is None
    assert mfu.range == pytest.approx({"counted": 3e13 / 0.5 / peak, "palm": 4e13 / 0.5 / peak})
    assert mfu.hfu == pytest.approx(6e13 / 0.5 / peak)
    assert (mfu.dtype, mfu.peak_flops_per_s) == ("bf16", peak)
    assert {"step_time", "peak", "dtype", "devices", "flops.counted"} <= set(mfu.inputs)


def test_a_chosen_convention_gives_the_value_over_all_devices() -> None:
    for mfu, said in (
        mfu_of(trained(0), trained(1), convention="palm"),
        mfu_of(trained(0, flops={**FLOPS, "convention": "palm"}), trained(1)),
    ):
        assert (mfu.convention, mfu.flops_per_step, said) == ("palm", 8e13, None)
        assert mfu.value == pytest.approx(8e13 / (0.5 * 312e12 * 2))
    mfu, said = mfu_of(trained(), convention="megatron")
    assert mfu.value is None, "a convention that is not known of this run gives no value"
    assert "megatron" in said and "known: counted, palm" in said


def test_kernels_tell_the_precision_in_use_better_than_what_was_declared() -> None:
    summary = summary_of(
        0,
        devices=(DeviceInfo(0, A100),),
        metadata={"flops": FLOPS, "precision": BF16},
        dtypes={"tf32": 900, "bf16": 100},
    )
    mfu, _ = mfu_of(summary)
    assert mfu.dtype == "tf32" and mfu.peak_flops_per_s == 156e12 and "90%" in mfu.inputs["dtype"]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ({"parameter_dtype": "torch.bfloat16"}, "bf16"),
        ({"parameter_dtype": "float32", "float32_matmul": "high"}, "tf32"),
        ({"parameter_dtype": "float16"}, "fp16"),
    ],
)
def test_declared_precision(precision, dtype: str) -> None:
    mfu, _ = mfu_of(trained(precision=precision))
    assert mfu.dtype == dtype


def test_flops_of_the_steps_serve_where_the_record_has_no_others() -> None:
    steps = step_table(Strings(), [(0, 0, 5), (1, 5, 10)])
    steps.columns["flops"][1] = 3e13
    mfu, _ = mfu_of(summary_of(0, devices=(DeviceInfo(0, A100),), steps=steps, metadata={"precision": BF16}))
    assert set(mfu.range) == {"counted"}


def test_what_lacks_is_said_with_its_remedy() -> None:
    nameless = summary_of(0, metadata={"flops": FLOPS, "precision": BF16})
    unknown = summary_of(0, devices=(DeviceInfo(0, "Quantum Abacus 9000"),), metadata={"flops": FLOPS})
    cases = [
        (mfu_of(summary_of(0)), "trine.profile"),
        (mfu_of(trained(), statistics=None), "marks no steps"),
        (mfu_of(nameless), "--calibrate"),
        (mfu_of(unknown), "--calibrate"),
        (mfu_of(trained(precision={})), "precision"),
        (mfu_of(trained(precision={"parameter_dtype": "fp8"})), "no fp8 peak"),
    ]
    for (mfu, reason), word in cases:
        assert mfu is None and word in reason


def test_hardware_is_looked_up_with_its_source() -> None:
    hardware, notes = find_hardware([trained(0), trained(1)])
    assert (hardware.name, hardware.count, notes) == (A100, 2, [])
    assert hardware.memory_bytes == 80 * 2**30 and "declared" in hardware.provenance["memory_bytes"]
    assert "looked up" in hardware.provenance["peak_flops_per_s"]
    assert hardware.peak_flops_per_s["bf16"] == 312e12, "the dense peak, never the sparse one"


def test_an_unknown_device_has_no_peak_until_it_is_calibrated(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    device = {"type": "cpu", "name": "Some CPU @ 2 GHz", "threads": 1}
    summary = trained(device=device)
    hardware, notes = find_hardware([summary])
    assert hardware.peak_flops_per_s == {} and "trine hardware --calibrate" in notes[0].message
    store_calibration(
        Peaks("Some CPU @ 2 GHz", {"fp32": 1e11, "bf16": 2e11}, None, 1e10, None, "measured here", True, 1)
    )
    store_calibration(Peaks("Some CPU @ 2 GHz", {"fp32": 9e11}, None, 1e10, None, "calibrated here", True, 8))
    hardware, notes = find_hardware([summary])
    assert notes == [] and hardware.peak_flops_per_s == {"fp32": 1e11, "bf16": 2e11}
    assert hardware.provenance["peak_flops_per_s"] == "measured here", "said once"


def test_mixed_devices_are_said() -> None:
    other = summary_of(1, devices=(DeviceInfo(0, "NVIDIA H100 80GB HBM3"),))
    hardware, notes = find_hardware([trained(0), trained(2), other])
    assert hardware.name == A100 and notes[0].id == "mixed-hardware"


def test_no_device_at_all() -> None:
    hardware, notes = find_hardware([summary_of(0)])
    assert hardware == Hardware(None, None) and notes[0].id == "unknown-hardware"
