"""How much a device works in a step, by device count: what tells weak scaling from strong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from trine.analyzers.difference import mean_parts
from trine.analyzers.run_facts import RunFacts

__all__ = ["Mode", "Work", "WorkUnit"]

Mode = Literal["weak", "strong", "mixed"]
WorkUnit = Literal["tokens", "samples", "steps"]

#: Work of a device counts as kept, or as shared out, within this share.
_SAME_WORK = 0.1
#: Compute time varies with clocks and neighbours, so it decides only where it is far from one of the two.
_CLEARLY = 0.3


class Work:
    """Work that a device does in a step, by device count, and what kind of scaling that is."""

    def __init__(self, by_count: Mapping[int, Sequence[RunFacts]], asked: Mode | None) -> None:
        self.per_device: dict[int, float] = {}
        self.unit: WorkUnit = "steps"
        self.mode: Mode = "weak"
        self.said = ""
        self.assumed = False
        for unit in ("tokens", "samples"):
            known = {count: _recorded(runs, unit, count) for count, runs in by_count.items()}
            if all(known.values()):
                self.unit = "tokens" if unit == "tokens" else "samples"
                self.per_device = {count: value or 0.0 for count, value in known.items()}
                self.mode, _ = self._recognise(_SAME_WORK)
                self.said = f"{self.unit} that a device takes in a step"
                return
        self._from_compute(by_count, asked)

    def _from_compute(self, by_count: Mapping[int, Sequence[RunFacts]], asked: Mode | None) -> None:
        """Traces do not say how much a step holds: what a device computes in it says whether that was kept."""
        compute = {count: _compute(runs) for count, runs in by_count.items()}
        mode: Mode | None = asked if asked in ("weak", "strong") else None
        self.said = "what was asked for (--mode)"
        if mode is None and all(compute.values()):
            self.per_device = {count: value or 0.0 for count, value in compute.items()}
            found, sure = self._recognise(_CLEARLY)
            mode = found if sure and found != "mixed" else None
            self.said = "the time that a device computes in a step"
        if mode is None:
            self.assumed, mode = True, "weak"
            self.said = "an assumption: neither tokens nor samples are recorded"
        self.mode = mode
        self.per_device = {count: 1.0 if mode == "weak" else 1.0 / count for count in by_count}

    def _recognise(self, tolerance: float) -> tuple[Mode, bool]:
        """Kept or shared out, and whether every count says so."""
        fewest, most = min(self.per_device), max(self.per_device)
        kept = self.per_device[most] / self.per_device[fewest]
        shared = kept * most / fewest
        if abs(kept - 1) <= tolerance and abs(shared - 1) > tolerance:
            return "weak", True
        if abs(shared - 1) <= tolerance and abs(kept - 1) > tolerance:
            return "strong", True
        return "mixed", False

    def ratio(self, count: int, fewest: int) -> float:
        """Work of a device on ``count`` devices over that on the fewest."""
        return self.per_device[count] / self.per_device[fewest]


def _recorded(runs: Sequence[RunFacts], unit: str, count: int) -> float | None:
    """Work of a device in a step, mean of the runs; None where a run does not say it."""
    name = f"{unit}_per_s"
    if not all(name in run.metrics for run in runs):
        return None
    values = [run.metrics[name] * float(np.mean(run.step_ns)) / 1e9 / count for run in runs]
    return float(np.mean(values)) or None


def _compute(runs: Sequence[RunFacts]) -> float | None:
    parts = mean_parts(runs)
    part = parts.get(("breakdown", "compute"))
    if part is not None:
        return part.ns or None
    phases = [parts.get(("phase", name)) for name in ("forward", "backward")]
    total = sum(part.ns for part in phases if part is not None)
    return total or None
