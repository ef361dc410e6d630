"""The machine at hand as a cluster, from what ``trine hardware --calibrate`` measured on it: ``cluster_of("here")``.

Where published clusters have datasheets and constants that were fitted on other people's runs, this one has its own: the rate
that matrix products reach by precision and how it falls with the summed dimension, what element-wise work gets of the memory, an
operation's least time, and α and β of the collectives between its ranks. Ranks of a CPU are processes of one thread, as
``torchrun`` starts them; one rank alone has all cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from trine.optim.plan.cluster import Cluster, Device, Link
from trine.optim.plan.devices import device_named
from trine.optim.plan.links import default_link
from trine.optim.plan.units import Bandwidth
from trine.record.errors import UsageError
from trine.record.hardware import (
    Peaks,
    all_calibrated,
    fit_latency_bandwidth,
    present_devices,
    processor_name,
)

__all__ = ["HERE", "measured_cluster", "measured_device"]

#: What the machine at hand is called where a cluster's name is asked for.
HERE = "here"
_CALIBRATE = "measure it first: trine hardware --calibrate"
#: Rows a product must have to say how its rate falls with the summed dimension.
_ROWS = 6
#: Element-wise operations that read one or two tensors and write one: bytes of traffic an element, in elements' sizes.
_TRAFFIC = {"add": 3, "multiply": 2, "copy": 2}
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
#: Elements of a tensor that no core's own cache holds.
_LARGE = 2**20


def measured_cluster(devices: int | None = None) -> Cluster:
    """One node of this machine's calibrated devices, or of ranks on its CPU where no device was calibrated.

    ``devices``: by default as many as the collectives were measured between. Raises ``UsageError`` where nothing is measured.
    """
    known = all_calibrated()
    present = present_devices()
    accelerators = [peaks for peaks in known if peaks.threads is None]
    # Nodes of several kinds may share the folder of calibrations.
    here = [peaks for peaks in accelerators if present is None or peaks.name.startswith(present)]
    if here:
        peaks = max(here, key=lambda each: max(each.flops_per_s.values()))
        count = devices or int(peaks.collective.get("ranks", 1))
    else:
        own = sorted(
            (peaks for peaks in known if peaks.name == processor_name()), key=lambda each: each.threads or 0
        )
        if not own:
            others = ", ".join(dict.fromkeys(peaks.name for peaks in accelerators))
            note = f" ({others} is, which it does not have)" if others else ""
            raise UsageError(f"this machine ({processor_name()}) is not calibrated{note}: {_CALIBRATE}")
        count = devices or int(own[0].collective.get("ranks", 1))
        peaks = own[0] if count > 1 else own[-1]
        if peaks.memory_bytes is not None:
            peaks = replace(peaks, memory_bytes=peaks.memory_bytes // count)
    device = measured_device(peaks)
    inside = None if count == 1 else _link(peaks, count)
    return Cluster(device, count, 1, inside, name=HERE)


def measured_device(peaks: Peaks) -> Device:
    """A calibrated device: rates as its products reach them, and constants of its own. Raises ``UsageError``."""
    if not peaks.measured:
        raise UsageError(f"{peaks.name} has figures of a datasheet alone: {_CALIBRATE}")
    rates, constants = dict(peaks.flops_per_s), {"matmul": 1.0, "achievable": 1.0, "fp8": 0.0}
    for precision in ("fp32", "bf16"):
        found = _products(peaks.operations, precision)
        if found is not None:
            rates[precision], constants["depth"] = found
    attention = _attention(peaks.operations, rates)
    if attention is not None:
        constants["attention"] = attention
    memory, least = _memory(peaks)
    constants |= {
        name: value for name, value in (("memory", memory), ("launch_s", least)) if value is not None
    }
    device = Device.from_peaks(peaks, "cpu")
    if peaks.threads is None:
        try:
            device = device.with_changes(family=device_named(peaks.name).family)
        except UsageError:
            device = device.with_changes(family="unknown")
    else:
        constants["units"] = 1.0  # a product is not cut over more than the rank's own threads
    return device.with_changes(
        flops_per_s=rates,
        matmul_flops_per_s=rates.get("bf16"),
        matmul_rates={name: rates[name] for name in ("fp32", "bf16") if name in rates},
        constants=constants,
    )


def _link(peaks: Peaks, count: int) -> Link:
    """Of a ring whose all-reduce takes α + S/β, as between the measured ranks; raises ``UsageError`` without one."""
    if not peaks.collective:
        raise UsageError(
            f"collectives between ranks of {peaks.name} are not measured: {_CALIBRATE} --ranks {count}"
        )
    ranks = int(peaks.collective["ranks"])
    steps = 2 * (ranks - 1)
    alpha, beta = float(peaks.collective["alpha_s"]), float(peaks.collective["bytes_per_s"])
    note = f"measured between {ranks} ranks ({peaks.collective['backend']})"
    if count != ranks:
        note += f"; taken to hold between {count}"
    constants = {"bandwidth_efficiency": 1.0, "bandwidth": 1.0}
    kind = "shared-memory"
    if peaks.threads is None:
        try:
            kind = default_link(device_named(peaks.name)).kind
        except UsageError:
            kind = "pcie"
    else:
        constants["hop_s"] = alpha / steps
    slowdown = [row["slowdown"] for row in peaks.operations if row.get("operation") == "overlap"]
    if slowdown:
        constants["overlap"] = float(slowdown[0])
    return Link(Bandwidth(beta * steps / ranks), kind, note=note, constants=constants)


def _rows(operations: Sequence[Mapping[str, Any]], operation: str, dtype: str) -> list[Mapping[str, Any]]:
    return [row for row in operations if (row.get("operation"), row.get("dtype")) == (operation, dtype)]


def _products(operations: Sequence[Mapping[str, Any]], dtype: str) -> tuple[float, float] | None:
    """(FLOP/s of a product that is summed over many, and the length at which half of that is reached).

    A product of M by N by K takes 2·M·N·(K + depth)/rate: seconds a pair of row and column are affine in K.
    """
    rows = [row for row in _rows(operations, "product", dtype) if row["shape"][0] == 1]
    if len(rows) < _ROWS:
        return None
    lengths = [int(row["shape"][3]) for row in rows]
    each = [row["seconds"] / (2 * row["shape"][1] * row["shape"][2]) for row in rows]
    start, rate = fit_latency_bandwidth(lengths, each)
    return rate, start * rate


def _attention(operations: Sequence[Mapping[str, Any]], rates: Mapping[str, float]) -> float | None:
    """Share of the rate that batched products over heads reach, the median over their shapes."""
    shares = [
        2 * batch * rows * columns * inner / row["seconds"] / rates[dtype]
        for dtype in ("fp32", "bf16")
        for row in _rows(operations, "product", dtype)
        for batch, rows, columns, inner in [row["shape"]]
        if batch > 1
    ]
    return min(1.0, median(shares)) if shares else None


def _memory(peaks: Peaks) -> tuple[float | None, float | None]:
    """(share of the copy's bandwidth that element-wise work on large tensors reaches, seconds of the least operation)."""
    shares, least = [], []
    for operation, tensors in _TRAFFIC.items():
        for dtype, size in _ELEMENT_BYTES.items():
            for row in _rows(peaks.operations, operation, dtype):
                elements = row["shape"][0]
                if elements >= _LARGE and peaks.memory_bytes_per_s:
                    shares.append(tensors * size * elements / row["seconds"] / peaks.memory_bytes_per_s)
                least.append(float(row["seconds"]))
    return (median(shares) if shares else None), (min(least) if least else None)
