"""The machine at hand as a cluster: every figure comes from its calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trine.optim.plan import Layouts, Workload, measured
from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.collectives import Network, all_reduce_s
from trine.optim.plan.columns import Conditions
from trine.optim.plan.constants import stack_named
from trine.optim.plan.measured import measured_device
from trine.optim.plan.step import predict
from trine.record.errors import UsageError
from trine.record.hardware import Peaks, all_calibrated, peaks_of, processor_name, store_calibration

GIB = 2**30
ALPHA, BETA = 4e-4, 2e9
RATES, DEPTH = {"fp32": 5e10, "bf16": 2e11}, 24.0


def products(dtype: str) -> list[dict[str, Any]]:
    return [
        {
            "operation": "product",
            "dtype": dtype,
            "shape": [batch, rows, columns, inner],
            "seconds": 2 * batch * rows * columns * (inner + DEPTH) / RATES[dtype],
        }
        for batch, rows, columns in ((1, 64, 64), (1, 256, 1024), (8, 256, 256))
        for inner in (64, 256, 1024)
    ]


def added(elements: int, seconds: float) -> dict[str, Any]:
    return {"operation": "add", "dtype": "fp32", "shape": [elements], "seconds": seconds}


CALIBRATED = Peaks(
    name=processor_name(),
    flops_per_s={"fp32": 4e10, "bf16": 1e11, "fp16": 1e9},
    memory_bytes=16 * GIB,
    memory_bytes_per_s=1e10,
    link_bytes_per_s=None,
    source="measured",
    measured=True,
    threads=1,
    collective={
        "operation": "all_reduce",
        "backend": "gloo",
        "ranks": 2,
        "alpha_s": ALPHA,
        "bytes_per_s": BETA,
    },
    operations=[
        *products("fp32"),
        *products("bf16"),
        added(4096, 3e-6),
        added(2**22, 3 * 4 * 2**22 / 2e10),
        {"operation": "overlap", "bytes": 2**24, "slowdown": 0.6},
    ],
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    return tmp_path


def test_rates_and_constants_are_those_that_were_measured() -> None:
    device = measured_device(CALIBRATED)
    assert device.peak("fp32") == pytest.approx(5e10) and device.matmul_flops_per_s == pytest.approx(2e11)
    assert device.peak("fp16") == 1e9  # of which there is a square product alone
    assert device.constants["depth"] == pytest.approx(DEPTH)
    # The caches' share, beyond a copy that none holds.
    assert device.constants["memory"] == pytest.approx(2.0)
    assert device.constants["launch_s"] == 3e-6
    assert device.constants["attention"] == pytest.approx(256 / (256 + DEPTH))  # the median of three lengths
    assert (device.family, device.constants["units"]) == ("cpu", 1.0)


def test_the_ranks_of_the_machine_are_a_node_whose_all_reduce_is_the_measured_one() -> None:
    store_calibration(CALIBRATED)
    cluster = cluster_of("here")
    assert (cluster.devices, cluster.nodes, cluster.name) == (2, 1, "here")
    assert cluster.device.memory_bytes == 8 * GIB  # the host's, shared
    network = Network.of(cluster)
    sizes = np.asarray([8.0, 2**20, 2**26])
    assert all_reduce_s(network, sizes, 2) == pytest.approx(ALPHA + sizes / BETA)
    conditions = Conditions.of(cluster, stack_named("pytorch"))
    assert conditions.depth[0] == pytest.approx(DEPTH) and conditions.inside_overlap[0] == 0.6


def test_other_numbers_of_ranks_say_what_they_take() -> None:
    store_calibration(CALIBRATED)
    store_calibration(replace(CALIBRATED, threads=2, flops_per_s={"fp32": 9e10}, operations=[]))
    alone = cluster_of("here", 1)
    assert alone.inside is None and alone.device.peak("fp32") == 9e10  # all cores
    four = cluster_of("here", 4)
    assert four.inside is not None and "taken to hold between 4" in four.inside.note
    assert four.device.peak("fp32") == pytest.approx(5e10)


def test_a_step_can_be_predicted_here() -> None:
    store_calibration(CALIBRATED)
    workload = Workload("small", 4, 256, 8, 1024, 256, 384, learned_positions=True)
    layouts = Layouts.of(data=2, micro_batch=8, precision="fp32")
    step = predict(workload, cluster_of("here"), stack_named("pytorch"), layouts)
    flops = workload.model_flops() * 8 * 384
    assert step.step_s[0] > flops / 5e10  # no faster than its products
    faster = predict(
        workload, cluster_of("here"), stack_named("pytorch"), layouts.with_changes(precision="bf16")
    )
    assert faster.step_s[0] < step.step_s[0]


def test_calibrations_of_before_have_their_square_products(cache: Path) -> None:
    store_calibration(replace(CALIBRATED, operations=[]))
    device = cluster_of("here").device
    assert device.peak("fp32") == 4e10 and "depth" not in device.constants


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("present", [(H100,), ("NVIDIA L4", "NVIDIA H100"), None])  # a slice; unknown
def test_an_accelerator_is_taken_before_the_processor(
    present: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "present_devices", lambda: present)
    store_calibration(CALIBRATED)
    collective = {**CALIBRATED.collective, "backend": "nccl", "ranks": 8, "bytes_per_s": 2e11}
    known = peaks_of(H100)
    assert known is not None
    store_calibration(
        replace(
            CALIBRATED,
            name=H100,
            threads=None,
            collective=collective,
            memory_bytes=80 * GIB,
        )
    )
    assert len(all_calibrated()) == 2
    cluster = cluster_of("here")
    assert (cluster.devices, cluster.device.family) == (8, "hopper")
    assert cluster.inside is not None and cluster.inside.kind == "nvlink"
    assert cluster.inside.bandwidth.bytes_per_s == pytest.approx(2e11 * 14 / 8)


@pytest.mark.parametrize("present", [(), ("NVIDIA L4",)])
def test_an_accelerator_of_another_machine_with_the_same_home_is_not_here(
    present: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "present_devices", lambda: present)
    store_calibration(replace(CALIBRATED, name=H100, threads=None))
    with pytest.raises(
        UsageError, match=rf"is not calibrated \({H100} is, which it does not have\): measure"
    ):
        cluster_of("here")
    store_calibration(CALIBRATED)
    assert cluster_of("here").device.name == processor_name()


def test_what_is_not_measured_is_asked_for() -> None:
    with pytest.raises(UsageError, match="trine hardware --calibrate"):
        cluster_of("here")
    store_calibration(replace(CALIBRATED, collective={}))
    assert cluster_of("here").devices == 1
    with pytest.raises(UsageError, match="--calibrate --ranks 4"):
        cluster_of("here", 4)
    known = peaks_of("NVIDIA L4")
    assert known is not None
    with pytest.raises(UsageError, match="datasheet alone"):
        measured_device(known)
