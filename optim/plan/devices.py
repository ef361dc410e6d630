"""What a device's name means: ``device_named("A100-SXM4-80GB (DGX-A100)")`` finds its datasheet, family and network.

Names come as PyTorch gives them, as papers and logs write them, or as vendors call whole machines. Peaks stand in
``trine.record.hardware``; ``devices.csv`` says which names mean which row, what family's constants apply, and how such
devices are usually wired; ``matmul_rates.csv`` says what matrix products were seen to reach.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from trine.optim.plan._tables import packaged_rows
from trine.optim.plan.cluster import Device
from trine.record.errors import UsageError
from trine.record.hardware import Peaks, all_peaks, calibrated, peaks_of

__all__ = ["DeviceFacts", "device_named", "device_names", "facts_of", "families"]

#: Said of the device or its maker, and not which one it is.
_NOISE = frozenset(
    [
        "nvidia",
        "amd",
        "intel",
        "google",
        "habana",
        "tesla",
        "instinct",
        "geforce",
        "quadro",
        "cloud",
        "gpu",
        "gpus",
        "accelerator",
        "oam",
        "superchip",
        "of",
    ]
)
#: Memory technologies, power limits, and counts as in "8x".
_NOISE_PATTERN = re.compile(r"hbm\d?e?|\d+w|\d+x|[x×]")
_MEMORY = re.compile(r"\b(\d+) ?gi?b?\b")
#: A stated size within this share of the nominal one means it: 94 or 96 GB, 180 or 192 GB.
_MEMORY_TOLERANCE = 0.08


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """How devices of one name are usually wired, a row of ``devices.csv``.

    ``inside``: kind of link within a node (:class:`trine.optim.plan.Link`); ``between``: one device's share of the network as
    :func:`trine.optim.plan.links.link_of` reads it; ``node``: devices of a node.
    """

    pattern: re.Pattern[str]
    device: str
    family: str
    inside: str
    in_switch: bool
    between: str
    node: int
    source: str


def device_named(text: str) -> Device:
    """The device that a name means. Raises ``UsageError`` for names that are unknown, naming the nearest.

    Tried in this order: the name of a row of peaks, the name that PyTorch gives, what people write, and the name of a CPU
    or device that was calibrated on this machine. Where a name fits several sizes of memory and says none, the larger
    and commoner one is meant, and ``source`` says so.
    """
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f'a device is named by text such as "H100-SXM-80GB", not {text!r}')
    by_name = {peaks.name.casefold(): peaks for peaks in all_peaks()}
    found = by_name.get(text.strip().casefold()) or peaks_of(text)
    if found is not None:
        return _device(found)
    rows, assumed = _rows_of(text)
    if rows:
        note = f'; "{text}" is taken to be {rows[0].device}' if assumed else ""
        return _device(by_name[rows[0].device.casefold()], note)
    measured = calibrated(text)
    if measured is not None:
        return Device.from_peaks(measured, "cpu" if measured.threads is not None else "unknown")
    near = difflib.get_close_matches(text, device_names(), n=3, cutoff=0.3)
    raise UsageError(
        f"no device is known by the name {text!r}"
        + (f" (near: {', '.join(near)})" if near else "")
        + ": docs/plan_inputs.md lists what is known; any other is declared in the cluster file under [device]"
    )


def facts_of(device: Device) -> DeviceFacts | None:
    """How such devices are usually wired; ``None`` where nobody said."""
    return next((row for row in _table() if row.device == device.name), None)


def device_names() -> tuple[str, ...]:
    """All that have a datasheet and a family."""
    return tuple(row.device for row in _table())


def families() -> tuple[str, ...]:
    """Families that devices belong to; constants are fitted for one."""
    return tuple(sorted({row.family for row in _table()} | {"cpu"}))


def _device(peaks: Peaks, note: str = "") -> Device:
    row = next((row for row in _table() if row.device == peaks.name), None)
    rates = _matmul_rates().get(peaks.name, {})
    device = Device.from_peaks(peaks, row.family if row else "unknown", rates.get("bf16"))
    return device.with_changes(matmul_rates=rates, source=device.source + note)


def _rows_of(text: str) -> tuple[list[DeviceFacts], bool]:
    """Rows that fit a name as people write it, the meant one first; whether memory was assumed."""
    rows: list[DeviceFacts] = []
    memory = None
    # What stands in brackets is the device's form, or where it stands: with it first, and then without.
    for name in (re.sub(r"[()]", " ", text), re.sub(r"\([^)]*\)", " ", text)):
        words = re.sub(r"[\s_/,™®-]+|(?<=\d)[x×](?=[a-z])", " ", name.casefold()).strip()
        memory = _MEMORY.search(words)
        kept = [
            word
            for word in _MEMORY.sub(" ", words).split()
            if word not in _NOISE and not _NOISE_PATTERN.fullmatch(word)
        ]
        plain = re.sub(r"^\d+ (?=[a-z])|\b(?:dgx|hgx) (?=[a-z])", "", " ".join(kept))
        plain = re.sub(r"^\d+ (?=[a-z])|\b(?:dgx|hgx) (?=[a-z])", "", plain)
        rows = [row for row in _table() if row.pattern.fullmatch(plain)]
        if rows:
            break
    if memory is None or not rows:
        return rows, len(rows) > 1
    sizes = {peaks.name: (peaks.memory_bytes or 0) / 2**30 for peaks in all_peaks()}
    stated = float(memory[1])
    fitting = [row for row in rows if abs(sizes[row.device] - stated) <= _MEMORY_TOLERANCE * stated]
    if not fitting:
        made = " or ".join(f"{row.device} with {sizes[row.device]:.0f} GB" for row in rows)
        raise UsageError(f"no device {text!r} is known: there is {made}, none with {stated:.0f} GB")
    return fitting, False


@lru_cache(maxsize=1)
def _table() -> tuple[DeviceFacts, ...]:
    return tuple(
        DeviceFacts(
            pattern=re.compile(row["pattern"]),
            device=row["device"],
            family=row["family"],
            inside=row["inside"],
            in_switch=row["in_switch"] == "1",
            between=row["between"],
            node=int(row["node"]),
            source=row["source"],
        )
        for row in packaged_rows("devices.csv")
    )


@lru_cache(maxsize=1)
def _matmul_rates() -> Mapping[str, Mapping[str, float]]:
    rates: dict[str, dict[str, float]] = {}
    for row in packaged_rows("matmul_rates.csv"):
        rates.setdefault(row["device"], {})[row["precision"]] = float(row["tflops"]) * 1e12
    return rates
