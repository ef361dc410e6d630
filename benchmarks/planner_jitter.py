"""Are the planner's intervals as wide as clusters are uneven? Each measured cluster is left out of the fit, then met.

    python benchmarks/planner_jitter.py [--coverage 0.9] [--clusters FILE.csv] [--format json]

A row a cluster: the interval that the others predict for a step (over the median), the cluster's own 5 % and 95 % quantiles, the
part of its steps inside, and whether its mean lies in the interval of a run's mean. ``--clusters`` scores other clusters than
the package's, in columns ``n_gpus gpu n_samples min_s p5_s median_s mean_s p95_s p99_s max_s``, with all of the package's in
the fit that are not the same log.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from trine.optim.plan.jitter import MeasuredSteps, fitted, interval, measured
from trine.record.errors import UsageError


@dataclass(frozen=True, slots=True)
class Row:
    """One cluster, left out. Factors are over its median step."""

    devices: int
    family: str
    low: float
    high: float
    p5: float
    p95: float
    inside: float
    mean: float
    mean_inside: bool


def scored(clusters: tuple[MeasuredSteps, ...], coverage: float) -> list[Row]:
    """A row a cluster."""
    rows = []
    for one in clusters:
        others = [each for each in measured() if not _same(each, one)]
        found = interval(
            1.0, one.devices, family=one.family, coverage=coverage, samples=1000, model=fitted(others)
        )
        low, high = float(found.low_s), float(found.high_s)
        rows.append(
            Row(
                devices=one.devices,
                family=one.family,
                low=low,
                high=high,
                p5=one.p5,
                p95=one.p95,
                inside=one.share_within(low, high),
                mean=one.mean,
                mean_inside=bool(found.mean_low_s <= one.mean <= found.mean_high_s),
            )
        )
    return rows


def _same(one: MeasuredSteps, other: MeasuredSteps) -> bool:
    return (one.devices, one.steps, round(one.median_s, 3)) == (
        other.devices,
        other.steps,
        round(other.median_s, 3),
    )


def read_clusters(path: Path) -> tuple[MeasuredSteps, ...]:
    """Other clusters' quantiles, in seconds. Raises ``UsageError``."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return tuple(_cluster(row) for row in csv.DictReader(file))
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(f"{path} is no table of step times: {error}") from None


def _cluster(row: dict[str, str]) -> MeasuredSteps:
    median = float(row["median_s"])
    over = {
        name: float(row[column]) / median
        for name, column in (
            ("minimum", "min_s"),
            ("p5", "p5_s"),
            ("mean", "mean_s"),
            ("p95", "p95_s"),
            ("p99", "p99_s"),
            ("maximum", "max_s"),
        )
    }
    family = "blackwell" if "B200" in row["gpu"] or "B300" in row["gpu"] else "hopper"
    return MeasuredSteps(
        int(row["n_gpus"]), family, int(row["n_samples"]), median, source=row.get("source", ""), **over
    )


def summary_of(rows: list[Row]) -> dict[str, float]:
    """Over clusters."""
    inside = [row.inside for row in rows]
    return {
        "clusters": len(rows),
        "steps_inside_mean": float(np.mean(inside)),
        "steps_inside_median": float(np.median(inside)),
        "steps_inside_least": float(np.min(inside)),
        "means_inside": float(np.mean([row.mean_inside for row in rows])),
    }


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--clusters", type=Path)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    given = parser.parse_args()
    rows = scored(measured() if given.clusters is None else read_clusters(given.clusters), given.coverage)
    summary = summary_of(rows)
    if given.format == "json":
        print(json.dumps({"clusters": [asdict(row) for row in rows], "summary": summary}, indent=2))
        return
    print(
        f"{'devices':>8} {'family':<10}{'predicted':>18}{'measured 5-95 %':>20}{'inside':>8}{'mean':>9}{'':>4}"
    )
    for row in rows:
        print(
            f"{row.devices:>8} {row.family:<10}{row.low:>9.4f}{row.high:>9.4f}{row.p5:>11.4f}{row.p95:>9.4f}"
            f"{row.inside:>8.0%}{row.mean:>9.4f}{'' if row.mean_inside else ' outside'}"
        )
    print("  ".join(f"{name} {value:.2f}" for name, value in summary.items()))


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"planner_jitter: {error}")
