"""What this machine is: processors, devices, their peaks, and the α–β of its collectives.

    trine hardware                what is known: looked up with its source, or measured before
    trine hardware --calibrate    measure now, in about a minute, and keep it

Peaks of known devices come from vendors' datasheets. CPUs and unknown devices have none until they are
measured; utilisation (MFU) and some predictions need them. Both are kept in $TRINE_CACHE, else
~/.cache/trine. Where a compiler is at hand this also builds the observer of collectives, once.

Exit codes: 0; 2 where --calibrate is impossible (no torch).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

from trine.record.errors import TrineError, UsageError
from trine.record.hardware import (
    Peaks,
    busy_while_measured,
    cache_folder,
    calibrated,
    peaks_of,
    processor_name,
    store_calibration,
    usable_cores,
)

__all__ = ["SUMMARY", "describe", "prepare_parser", "run", "text_of"]

SUMMARY = "what this machine is: peaks, bandwidths, collectives"

SCHEMA = "trine.hardware/1"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trine hardware``."""
    parser.add_argument("--calibrate", action="store_true", help="measure now, and keep the result")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of the measured all-reduce (default: one a device, from 2 to 8; 2 where there is none)",
    )
    parser.add_argument("--no-observer", action="store_true", help="do not build the observer of collectives")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text (default) or json")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate when asked, then say what is known."""
    if arguments.ranks is not None and not 2 <= arguments.ranks <= 64:
        raise UsageError(f"--ranks must be from 2 to 64, not {arguments.ranks}")
    has_torch = find_spec("torch") is not None
    if arguments.calibrate:
        if not has_torch:
            raise UsageError(
                "--calibrate measures with PyTorch, which is not installed: pip install 'trine[train]'"
            )
        _calibrate(arguments.ranks)
    if has_torch and not arguments.no_observer:
        _build_observer()
    machine = describe(has_torch)
    if arguments.format == "json":
        print(json.dumps(machine, indent=2, ensure_ascii=False))
    else:
        print(text_of(machine))
    return 0


def describe(has_torch: bool) -> dict[str, Any]:
    """Everything known, as plain values. Rates per second, sizes in bytes; measured ones say when and where."""
    processor = processor_name()
    cores = usable_cores()
    counts = sorted({threads for threads in (1, cores) if calibrated(processor, threads)})
    return {
        "schema": SCHEMA,
        "processor": {
            "name": processor,
            "architecture": platform.machine(),
            "logical_cores": os.cpu_count(),
            "usable_cores": cores,
            "memory_bytes": _memory_bytes(),
            "measured": [_plain(peaks) for threads in counts if (peaks := calibrated(processor, threads))],
        },
        "devices": _devices() if has_torch else None,
        "torch": _torch_facts() if has_torch else None,
        "observer": _observer() if has_torch else None,
        "cache": str(cache_folder()),
    }


def text_of(machine: dict[str, Any]) -> str:
    """The same for people."""
    processor = machine["processor"]
    memory = f", {processor['memory_bytes'] / 2**30:.1f} GiB of memory" if processor["memory_bytes"] else ""
    cores = processor["usable_cores"]
    of_all = "" if cores == processor["logical_cores"] else f" of {processor['logical_cores']}"
    lines = [f"CPU       {processor['name']}, {cores}{of_all} core{'s' if cores != 1 else ''}{memory}"]
    for peaks in processor["measured"]:
        lines += _peak_lines(peaks, f"{peaks['threads']} thread{'s' if peaks['threads'] != 1 else ''}")
    if not processor["measured"]:
        lines.append("          not measured yet: trine hardware --calibrate")
    if machine["torch"] is None:
        lines.append("PyTorch   not installed, so devices are not known: pip install 'trine[train]'")
        return "\n".join(lines)
    lines.append(f"PyTorch   {machine['torch']['version']}")
    for device in machine["devices"]:
        lines.append(f"Device    {device['count']} × {device['name']}")
        for key, word in (("looked_up", "datasheet"), ("measured", "measured")):
            if device[key]:
                lines += _peak_lines(device[key], word)
        if not device["looked_up"] and not device["measured"]:
            lines.append("          no datasheet known and not measured yet: trine hardware --calibrate")
    if not machine["devices"]:
        lines.append("Device    none besides the CPU")
    observer = machine["observer"]
    state = "built" if observer["built"] else f"not built: {observer['reason']}"
    lines.append(f"Observer  of collectives: {state}")
    sources = _sources(machine)
    if sources:
        lines += ["", *(f"  {source}" for source in sources)]
    return "\n".join(lines)


def _peak_lines(peaks: dict[str, Any], word: str) -> list[str]:
    rates = [
        f"{name} {_scaled(value)}FLOP/s"
        for name, value in sorted(peaks["flops_per_s"].items(), key=lambda i: i[1])
    ]
    if peaks["memory_bytes_per_s"]:
        rates.append(f"memory {_scaled(peaks['memory_bytes_per_s'])}B/s")
    if peaks["link_bytes_per_s"]:
        rates.append(f"link {_scaled(peaks['link_bytes_per_s'])}B/s")
    lines = [f"          {word}: {', '.join(rates)}"]
    collective = peaks["collective"]
    if collective:
        lines.append(
            f"          all-reduce of {collective['ranks']} ranks ({collective['backend']}): "
            f"α {collective['alpha_s'] * 1e6:.0f} µs, β {_scaled(collective['bytes_per_s'])}B/s"
        )
    if peaks["doubt"]:
        lines.append(f"          {peaks['doubt']}")
    return lines


def _scaled(value: float) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def _sources(machine: dict[str, Any]) -> list[str]:
    found = [peaks["source"] for peaks in machine["processor"]["measured"]]
    for device in machine["devices"]:
        found += [device[key]["source"] for key in ("looked_up", "measured") if device[key]]
    return list(dict.fromkeys(found))


def _devices() -> list[dict[str, Any]]:
    from trine.profiler.machine import accelerators

    found = accelerators()
    names = [device.name for device in found]
    return [
        {
            "name": name,
            "count": names.count(name),
            "memory_bytes": found[names.index(name)].memory_bytes,
            "looked_up": _plain(peaks) if (peaks := peaks_of(name)) else None,
            "measured": _plain(peaks) if (peaks := calibrated(name)) else None,
        }
        for name in dict.fromkeys(names)
    ]


def _plain(peaks: Peaks) -> dict[str, Any]:
    """``doubt``: that the machine was busy while it was measured; else null."""
    return {**asdict(peaks), "doubt": busy_while_measured(peaks)}


def _torch_facts() -> dict[str, str | None]:
    from trine.profiler.machine import torch_facts

    return torch_facts()


def _observer() -> dict[str, Any]:
    from trine.profiler.observer_build import ensure_built, why_not_built

    library = ensure_built(wait=False)
    return {
        "built": library is not None,
        "path": None if library is None else str(library),
        "reason": None if library is not None else why_not_built(),
    }


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _calibrate(ranks: int | None) -> None:
    from trine.profiler.calibrate import calibrate_all

    began = time.monotonic()
    for device, peaks in calibrate_all(ranks, tell=_tell):
        peaks = replace(peaks, operations=[*peaks.operations, *_codecs(device, peaks, ranks)])
        try:
            path = store_calibration(peaks)
        except OSError as error:
            raise UsageError(
                f"cannot keep the calibration in {cache_folder()} ({error.strerror or error}): "
                "set TRINE_CACHE to a folder that can be written"
            ) from error
        _tell(f"Wrote {path}")
    _tell(f"measured in {time.monotonic() - began:.0f} s")


def _codecs(device: Any, peaks: Peaks, ranks: int | None) -> list[dict[str, Any]]:
    """Codecs of gradients among as many ranks as links were measured between; where they fail the rest is kept."""
    from trine.optim.runtime.exchange.calibration import codecs_of
    from trine.profiler.calibrate import torch_threads

    among = next((row["ranks"] for row in peaks.operations if "ranks" in row), ranks or 2)
    try:
        with torch_threads(peaks.threads):
            return codecs_of(device, among)
    except (TrineError, RuntimeError, OSError) as error:
        _tell(f"left out: codecs: {' '.join(str(error).split())}")
        return []


def _build_observer() -> None:
    from trine.profiler.observer_build import ensure_built

    if ensure_built(wait=False) is None and sys.platform == "linux":
        _tell("building the observer of collectives, once; up to half a minute")
        ensure_built(wait=True)


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
