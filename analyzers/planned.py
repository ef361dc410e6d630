"""Records of a plan (``trine plan --record``): read as a real run's, and told apart from one.

What nobody measured has no faults of measuring, and advice to record it better would be none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trine.record.hardware import Peaks
from trine.record.model import Quality

from .results import CollectiveResult

__all__ = ["declared_peaks", "headline", "is_simulated", "of_no_run", "without_rates"]

#: Notes on what a run's record lacks and a plan never has.
_OF_RUNS = frozenset({"no-breakdown", "collectives-alone"})


def is_simulated(metadata: Mapping[str, Any]) -> bool:
    """Whether a job's or a rank's metadata says that it never ran."""
    return metadata.get("simulated") is True


def headline(metadata: Mapping[str, Any]) -> str | None:
    """What must be read before any number; None of a run."""
    if not is_simulated(metadata):
        return None
    planned = metadata.get("planned")
    return f"Planned, not measured: {planned}." if isinstance(planned, str) else "Simulated, not measured."


def of_no_run(notes: Sequence[Quality]) -> list[Quality]:
    """Notes without those that blame a plan for not being a run: what it has no tables for, and which ranks are alone."""
    return [note for note in notes if note.id not in _OF_RUNS and " is null: " not in note.message]


def without_rates(rows: Sequence[CollectiveResult]) -> tuple[CollectiveResult, ...]:
    """A plan's collectives last as long as nothing hides them, so bytes over time are no rate of a link."""
    return tuple(replace(row, algbw_bytes_per_s=None, busbw_bytes_per_s=None) for row in rows)


def declared_peaks(metadata: Mapping[str, Any]) -> Peaks | None:
    """The planned device's, which may be of a file of one's own; None of a run, whose device is looked up."""
    device = metadata.get("device")
    rates = device.get("peak_flops_per_s") if isinstance(device, Mapping) else None
    if not is_simulated(metadata) or not isinstance(device, Mapping) or not isinstance(rates, Mapping):
        return None
    known = {str(name): float(rate) for name, rate in rates.items() if isinstance(rate, int | float)}
    bandwidth = device.get("memory_bytes_per_s")
    return Peaks(
        name=str(device.get("name")),
        flops_per_s=known,
        memory_bytes=None,
        memory_bytes_per_s=float(bandwidth) if isinstance(bandwidth, int | float) else None,
        link_bytes_per_s=None,
        source=str(device.get("source")),
    )
