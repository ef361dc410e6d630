"""What a device can do at best: looked up with a citation, or measured on it. Never guessed.

``peaks.csv`` holds vendors' dense figures, each with its source. A name that is unknown, or that
fits more than one row, gives ``None``: a utilisation against the wrong peak is worse than none.
Slices of a device (MIG) and vendors' special boards are other devices than the whole one.

Measured figures come from ``trine hardware --calibrate`` and lie in the user's cache, one file a
device and thread count. A calibration says what was *reached*, a datasheet what is promised; both
carry where they come from in ``source``.
"""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import os
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from trine.record._calibrations import refuse_strange

__all__ = [
    "Peaks",
    "all_calibrated",
    "all_peaks",
    "busy_while_measured",
    "cache_folder",
    "calibrated",
    "fit_latency_bandwidth",
    "peaks_of",
    "present_devices",
    "processor_name",
    "quartiles_of",
    "store_calibration",
    "usable_cores",
]

logger = logging.getLogger("trine")

_DTYPES = ("bf16", "fp16", "tf32", "fp8", "fp32")
_GIB = 2**30
_CALIBRATION_SCHEMA = "trine.calibration/1"
#: A time whose upper quartile is so much above the lower one was not measured alone, and so large a share of such times is
#: not chance.
VARIED, MOST_VARIED = 0.5, 0.05


@dataclass(frozen=True, slots=True)
class Peaks:
    """What one device can do. Rates per second, sizes in bytes; ``None`` where the source is silent.

    ``flops_per_s`` is dense, by dtype (``bf16``, ``fp16``, ``tf32``, ``fp8``, ``fp32``);
    ``link_bytes_per_s`` is one device's scale-up bandwidth in one direction. ``measured`` tells a
    calibration from a datasheet; then ``threads`` is the thread count it holds for, and
    ``collective`` the all-reduce's α (``alpha_s``), β (``bytes_per_s``), ``backend`` and ``ranks``.
    ``multiprocessors`` counts streaming multiprocessors or compute units. ``operations`` are single measured
    times, a mapping each: products by shape and dtype, work on memory by size, collectives by bytes
    (:mod:`trine.profiler.calibrate_operations` says which), and the ``quartiles`` of their repetitions.
    """

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes: int | None
    memory_bytes_per_s: float | None
    link_bytes_per_s: float | None
    source: str
    measured: bool = False
    threads: int | None = None
    collective: Mapping[str, float | int | str] = field(default_factory=dict)
    multiprocessors: int | None = None
    operations: Sequence[Mapping[str, Any]] = field(default_factory=list)


def peaks_of(device_name: str) -> Peaks | None:
    """Datasheet peaks of a device by the name PyTorch gives it; ``None`` when unknown or ambiguous.

    >>> peaks_of("NVIDIA A100-SXM4-80GB").flops_per_s["bf16"]
    312000000000000.0
    """
    name = _plain(device_name)
    found = [peaks for pattern, peaks in _table() if pattern.fullmatch(name)]
    return found[0] if len(found) == 1 else None


def all_peaks() -> tuple[Peaks, ...]:
    """Every row of the table, in its order."""
    return tuple(peaks for _, peaks in _table())


def calibrated(device_name: str, threads: int | None = None) -> Peaks | None:
    """What ``trine hardware --calibrate`` measured on a device of this name, from the user's cache.

    On a CPU the figures hold for one thread count: with ``threads`` only that count's are given,
    without it those of the highest. A file that cannot be read counts as absent and is logged.
    """
    found: list[Peaks] = []
    for path in sorted(_calibration_folder().glob(f"{_slug(device_name)}--*.json")):
        peaks = _read_calibration(path)
        if peaks is not None and peaks.name == device_name:
            found.append(peaks)
    if threads is not None:
        found = [peaks for peaks in found if peaks.threads in (None, threads)]
    return max(found, key=lambda peaks: peaks.threads or 0, default=None)


def all_calibrated() -> tuple[Peaks, ...]:
    """Everything that ``trine hardware --calibrate`` measured and keeps in the user's cache."""
    found = [_read_calibration(path) for path in sorted(_calibration_folder().glob("*--*.json"))]
    return tuple(peaks for peaks in found if peaks is not None)


def store_calibration(peaks: Peaks) -> Path:
    """Keep measured peaks for this user. Written whole or not at all. Raises ``OSError``."""
    folder = _calibration_folder()
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "device" if peaks.threads is None else f"threads-{peaks.threads}"
    path = folder / f"{_slug(peaks.name)}--{suffix}.json"
    content = {"schema": _CALIBRATION_SCHEMA, **asdict(peaks)}
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def fit_latency_bandwidth(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(α in seconds, β in bytes a second) of T = α + S/β, by least squares of relative errors.

    Relative, so that a 16 MiB message does not drown an 8 B one. α is at least a tenth of the shortest time:
    noise must not make it nought or negative.
    """
    weights = [1 / t for t in seconds]
    # Of rows (w, w·S) against 1: normal equations of two unknowns.
    a = sum(w * w for w in weights)
    b = sum(w * w * s for w, s in zip(weights, sizes, strict=True))
    c = sum(w * w * s * s for w, s in zip(weights, sizes, strict=True))
    p = sum(weights)
    q = sum(w * s for w, s in zip(weights, sizes, strict=True))
    determinant = a * c - b * b
    alpha = (p * c - q * b) / determinant
    slope = (a * q - b * p) / determinant
    floor = min(seconds) / 10
    if alpha < floor:
        alpha = floor
        slope = (q - b * alpha) / c
    largest = max(range(len(sizes)), key=lambda position: sizes[position])
    if slope <= 0:  # all latency, as far as can be seen: the largest message bounds the bandwidth
        slope = seconds[largest] / sizes[largest]
    return alpha, 1 / slope


def quartiles_of(seconds: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile of two repetitions or more: a calibration's own variation."""
    return statistics.quantiles(seconds, n=4, method="inclusive")


def busy_while_measured(peaks: Peaks) -> str | None:
    """That a calibration's times vary by too much for a machine that did nothing else; ``None`` where they do not, or where it
    keeps no quartiles, as those of earlier releases.
    """
    kept = [row["quartiles"] for row in peaks.operations if row.get("quartiles")]
    far = sum(high > (1 + VARIED) * low for low, _, high in kept)
    if not kept or far <= MOST_VARIED * len(kept):
        return None
    of = "" if peaks.threads is None else f" with {peaks.threads} thread{'s' if peaks.threads != 1 else ''}"
    return (
        f"this machine was busy while it was calibrated: {far} of {len(kept)} times{of} vary by more than {VARIED:.0%} between "
        "the quartiles of their repetitions; run trine hardware --calibrate again when it is idle"
    )


def cache_folder() -> Path:
    """Where Trine keeps what it measured and built: ``$TRINE_CACHE``, else ``~/.cache/trine``."""
    given = os.environ.get("TRINE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trine"


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def processor_name() -> str:
    """The CPU's model with its family numbers, because clouds call very different CPUs the same.

    For example ``"AMD EPYC (family 25 model 17)"``; the platform's own word where there is no
    ``/proc/cpuinfo``.
    """
    import platform

    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, separator, value = line.partition(":")
            if separator:
                facts.setdefault(key.strip(), value.strip())
            elif facts:
                break  # the first processor speaks for all
    except OSError:
        pass  # not Linux: the platform's word has to do
    name = " ".join((facts.get("model name") or platform.processor() or platform.machine()).split())
    if "cpu family" in facts and "model" in facts:
        name += f" (family {facts['cpu family']} model {facts['model']})"
    return name


def present_devices(root: Path = Path("/")) -> tuple[str, ...] | None:
    """Names of the accelerators in this machine as their driver tells them, without PyTorch; ``None`` where none tells.

    A slice of a device (MIG) has the device's name, and more after it, in PyTorch.
    """
    names = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        with contextlib.suppress(OSError):
            lines = (
                line.partition(":")
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            )
            names += [value.strip() for key, _, value in lines if key.strip() == "Model"]
    if names:
        return tuple(names)
    # Drivers of others, of Windows' Linux and of single-board computers tell no names; without one there is no device.
    drivers = ("nvidia[0-9]*", "nvhost*", "nvgpu*", "kfd", "dxg")
    has_driver = any(any(root.glob(f"dev/{name}")) for name in drivers)
    return None if has_driver or not root.joinpath("proc/self").exists() else ()


def _plain(name: str) -> str:
    words = re.sub(r"\((tm|r)\)|™|®", "", name.lower()).split()
    return " ".join(word for word in words if word not in ("nvidia", "tesla", "amd"))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"


def _calibration_folder() -> Path:
    return cache_folder() / "hardware"


@lru_cache(maxsize=1)
def _table() -> tuple[tuple[re.Pattern[str], Peaks], ...]:
    text = files("trine.record").joinpath("peaks.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return tuple((re.compile(row["pattern"]), _peaks(row)) for row in csv.DictReader(lines))


def _peaks(row: Mapping[str, str]) -> Peaks:
    flops = {dtype: float(row[f"{dtype}_tflops"]) * 1e12 for dtype in _DTYPES if row[f"{dtype}_tflops"]}
    return Peaks(
        name=row["name"],
        flops_per_s=flops,
        memory_bytes=int(float(row["memory_gib"]) * _GIB) if row["memory_gib"] else None,
        memory_bytes_per_s=_giga(row["memory_gb_per_s"]),
        link_bytes_per_s=_giga(row["link_gb_per_s"]),
        source=row["source"],
        multiprocessors=int(row["multiprocessors"]) if row["multiprocessors"] else None,
    )


def _giga(text: str) -> float | None:
    return float(text) * 1e9 if text else None


def _read_calibration(path: Path) -> Peaks | None:
    try:
        state = path.stat()
    except OSError:
        return None  # deleted since it was listed
    return _read_version(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _read_version(path: Path, modified_ns: int, size_bytes: int) -> Peaks | None:
    """Each version of a file is read once: so a command that asks again is not warned again."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("schema") != _CALIBRATION_SCHEMA:
            raise ValueError("written by another version of Trine")
        refuse_strange(content)
        return Peaks(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning(
            "%s is no calibration of ours (%s): ignored; delete it or calibrate again", path, error
        )
        return None
