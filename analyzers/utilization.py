"""The device's peaks, and how much of them the model's arithmetic used.

MFU = model FLOPs per step / (step time × dense peak × devices), under a *named* convention. When
none was chosen the value is left open and the range over the conventions is given. The peak is that
of the precision in use and always dense; a device that is unknown has none until it is calibrated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trine.record.hardware import Peaks, calibrated, peaks_of
from trine.record.model import Quality

from .planned import declared_peaks, is_simulated
from .results import Hardware, Mfu, RankSummary, StepStatistics

__all__ = ["CONVENTIONS", "find_hardware", "find_mfu"]

#: Names under which a record may give model FLOPs per step; ``executed`` is what HFU uses.
CONVENTIONS = ("counted", "palm", "megatron", "narayanan", "6n")

_DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp32": "fp32",
    "float8_e4m3fn": "fp8",
    "fp8": "fp8",
}


def find_hardware(summaries: Sequence[RankSummary]) -> tuple[Hardware, list[Quality]]:
    """The device most ranks ran on, with its peaks and where each comes from."""
    names = Counter(name for summary in summaries if (name := _device_name(summary)))
    if not names:
        note = Quality(
            "unknown-hardware", "info", "the source names no device, so there is no peak to compare with"
        )
        return Hardware(None, None), [note]
    name, count = names.most_common(1)[0]
    quality = []
    if len(names) > 1:
        listed = ", ".join(sorted(names))
        message = f"ranks ran on different devices ({listed}); peaks are those of {name}"
        quality.append(Quality("mixed-hardware", "warning", message))
    peaks = _peaks(name, summaries)
    if peaks is None:
        other = calibrated(name)
        message = (
            f"no peak is known for {name!r}, so there is no MFU; run `trine hardware --calibrate` on it"
            if other is None
            else f"{name!r} was calibrated for other thread counts than this run's, so there is no MFU; "
            f"run with OMP_NUM_THREADS={other.threads}"
        )
        quality.append(Quality("unknown-hardware", "info", message))
        return Hardware(name, count, memory_bytes=_declared_memory(summaries)), quality
    return _with_peaks(name, count, peaks, summaries), quality


def _device_name(summary: RankSummary) -> str | None:
    named = (summary.metadata.get("device") or {}).get("name")
    return named or next((device.name for device in summary.devices if device.name), None)


def _peaks(name: str, summaries: Sequence[RankSummary]) -> Peaks | None:
    looked_up = next((peaks for s in summaries if (peaks := declared_peaks(s.metadata))), None) or peaks_of(
        name
    )
    if looked_up is not None:
        return looked_up
    threads = Counter(
        int(count) for s in summaries if (count := (s.metadata.get("device") or {}).get("threads"))
    )
    # A processor's figures hold for one thread count; another count's would be another peak.
    return calibrated(name, threads.most_common(1)[0][0]) if threads else calibrated(name)


def _declared_memory(summaries: Sequence[RankSummary]) -> int | None:
    declared = ((s.metadata.get("device") or {}).get("memory_bytes") for s in summaries)
    listed = (device.memory_bytes for s in summaries for device in s.devices)
    return next((int(size) for size in (*declared, *listed) if size), None)


def _with_peaks(name: str, count: int, peaks: Peaks, summaries: Sequence[RankSummary]) -> Hardware:
    # A calibration's source says itself that it was measured, where and when.
    source = peaks.source if peaks.measured else f"looked up: {peaks.source}"
    provenance = {"peak_flops_per_s": source}
    declared = _declared_memory(summaries)
    if declared:
        provenance["memory_bytes"] = "declared: named by the record"
    elif peaks.memory_bytes:
        provenance["memory_bytes"] = source
    for key in ("memory_bytes_per_s", "link_bytes_per_s"):
        if getattr(peaks, key) is not None:
            provenance[key] = source
    return Hardware(
        name=name,
        count=count,
        peak_flops_per_s=dict(peaks.flops_per_s),
        memory_bytes=declared or peaks.memory_bytes,
        memory_bytes_per_s=peaks.memory_bytes_per_s,
        link_bytes_per_s=peaks.link_bytes_per_s,
        provenance=provenance,
    )


# --- MFU ---------------------------------------------------------------------------------------


def find_mfu(
    summaries: Sequence[RankSummary],
    hardware: Hardware,
    statistics: StepStatistics | None,
    convention: str | None = None,
) -> tuple[Mfu | None, list[Quality]]:
    """MFU of the job's ranks together, or ``None`` with the reason.

    ``convention`` is one of :data:`CONVENTIONS`; without it, what the record's configuration chose.
    """

    def nothing(reason: str) -> tuple[None, list[Quality]]:
        return None, [Quality("no-mfu", "info", f"no MFU: {reason}")]

    counts = [flops for summary in summaries if (flops := _flops(summary))]
    if not counts:
        return nothing(
            "the model's FLOPs per step are not known; record with `trine.profile(model=…)` to count them"
        )
    if statistics is None:
        return nothing("the source marks no steps")
    if not hardware.peak_flops_per_s:
        return nothing(
            f"the peak of {hardware.name or 'the device'} is not known; run `trine hardware --calibrate` on it"
        )
    dtype, evidence = _dtype(summaries)
    if dtype is None:
        return nothing("the precision in use is not known")
    peak = hardware.peak_flops_per_s.get(dtype)
    if peak is None:
        return nothing(f"no {dtype} peak is known for {hardware.name}")
    seconds = statistics.median_ns / 1e9
    per_rank = {name: _mean(counts, name) for name in (*CONVENTIONS, "executed")}
    used = {name: flops / (seconds * peak) for name, flops in per_rank.items() if flops}
    chosen = convention or _recorded_convention(summaries)
    notes: list[Quality] = []
    if chosen is not None and chosen not in used:
        known = ", ".join(name for name in used if name != "executed") or "none"
        message = f"no MFU by the convention {chosen}: its FLOPs per step are not known of every rank (known: {known})"
        notes.append(Quality("convention-unknown", "info", message))
        chosen = None
    devices = len(counts)
    told = "planned" if any(is_simulated(summary.metadata) for summary in summaries) else "measured"
    provenance = hardware.provenance.get("peak_flops_per_s", "")
    return Mfu(
        value=used[chosen] if chosen else None,
        convention=chosen,
        flops_per_step=_total(per_rank[chosen], devices) if chosen else None,
        peak_flops_per_s=peak,
        dtype=dtype,
        range={name: value for name, value in used.items() if name != "executed"},
        hfu=used.get("executed"),
        inputs={
            "step_time": f"{seconds:.6g} s, the median over the slowest path ({told})",
            "peak": f"{peak:.6g} FLOP/s a device, dense {dtype} ({provenance})",
            "dtype": f"{dtype} ({evidence})",
            "devices": f"{devices}, one a rank that counted its FLOPs",
            **{
                f"flops.{name}": f"{flops:.6g} a step and device, mean of the ranks (recorded)"
                for name, flops in per_rank.items()
                if flops
            },
        },
    ), notes


def _recorded_convention(summaries: Sequence[RankSummary]) -> str | None:
    named = ((summary.metadata.get("flops") or {}).get("convention") for summary in summaries)
    return next((convention for convention in named if convention), None)


def _total(flops: float | None, devices: int) -> float | None:
    return None if flops is None else flops * devices


def _flops(summary: RankSummary) -> dict[str, float]:
    """Model FLOPs per step of a rank by convention; from the steps themselves where only they have them."""
    recorded: Mapping[str, Any] = summary.metadata.get("flops") or {}
    found = {
        name: float(value)
        for name in (*CONVENTIONS, "executed")
        if isinstance(value := recorded.get(name), int | float) and value > 0
    }
    if "counted" not in found and summary.steps is not None:
        counted = summary.steps["flops"]
        counted = counted[np.isfinite(counted) & (counted > 0)]
        if len(counted):
            found["counted"] = float(np.median(counted))
    return found


def _mean(counts: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [count[name] for count in counts if name in count]
    return sum(values) / len(values) if len(values) == len(counts) else None


def _dtype(summaries: Sequence[RankSummary]) -> tuple[str | None, str]:
    """Precision of most matrix-product time where kernels tell it, else as the record declares."""
    measured: Counter[str] = Counter()
    for summary in summaries:
        measured.update(summary.dtypes)
    if measured:
        dtype, amount = measured.most_common(1)[0]
        share = amount / sum(measured.values())
        return dtype, f"measured: {share:.0%} of matrix-product time"
    named = [_declared_dtype(summary.metadata.get("precision") or {}) for summary in summaries]
    declared = Counter(dtype for dtype in named if dtype is not None)
    return (declared.most_common(1)[0][0], "declared by the record") if declared else (None, "")


def _declared_dtype(precision: Mapping[str, Any]) -> str | None:
    name = str(precision.get("autocast_dtype") or precision.get("parameter_dtype") or "")
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype == "fp32" and precision.get("float32_matmul") in ("high", "medium", "tf32"):
        return "tf32"
    return dtype
