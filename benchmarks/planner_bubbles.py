"""Bubble rates of pipeline schedules: published ones beside the planner's simulator.

    python benchmarks/planner_bubbles.py                      every row of the published table, in three ways
    python benchmarks/planner_bubbles.py --rates FILE.csv     other rows of the same columns
    python benchmarks/planner_bubbles.py --format json
    python benchmarks/planner_bubbles.py --schedules          every schedule on one of the models, by simulator and formula

Qi et al. 2023 ("Zero Bubble Pipeline Parallelism", ICLR 2024) give bubble rates of six schedules for four models, computed
from times that they profiled on A100s: (cost − m (F + B + W)) / cost, with the cost of the rank that is at it longest from its
own first action to its own last. Their profile is public (the paper's appendix; ``interleave.py`` of the authors' repository).

*profiled*: their F, B, W and message times go into the simulator. What is left is the orders, the automatic scheduler and the
simulator. *dimensions*: the times themselves come from the planner's operators for the model's dimensions, with five
constants of that machine and software (matmul, memory, B over F, message latency and bandwidth) fitted on
the profiles of the *other three* models, so no row has seen its own. *package*: times of stages and messages as the package
plans them for these models on nodes of eight A100, which know nothing of this profile.

Rows are read from ``$TRINE_TEST_DATA/tables/zero_bubble_rates_table5.csv``, else from ``../shared/data``; the exit code is 1
where *profiled* or *dimensions* is further off than a point in any row.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from data_folder import data_folder
from planner_stages import PROFILE, PROFILED, SEQUENCE, Size, fit, package_s, stages_s

import trine
from trine.optim.plan.closed_form import bubble_s
from trine.optim.plan.layouts import SCHEDULES
from trine.optim.plan.schedules import Shape, Work, order_of, schedules
from trine.optim.plan.schedules.automatic import automatic
from trine.optim.plan.simulator import simulate
from trine.record.errors import UsageError

__all__ = ["Scored", "main", "score"]

#: One point of a bubble rate: the goal.
POINT = 0.01
WAYS = ("profiled", "dimensions", "package")

#: The paper's names; the automatic schedules have so many times 1F1B's memory.
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "ZB-V": "zb-v"}
AUTOMATIC = {"ZB-1p": 1, "ZB-2p": 2}
ONE_CHUNK = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")


@dataclass(frozen=True, slots=True)
class Row:
    """One published rate, and what it is of."""

    model: str
    layers: int
    hidden: int
    ranks: int
    micro_batch: int
    microbatches: int
    schedule: str
    rate: float

    @property
    def size(self) -> Size:
        """What its stages' times depend on."""
        return Size(self.layers, self.hidden, self.ranks, self.micro_batch)

    @property
    def profiled(self) -> tuple[float, float, float, float] | None:
        """Seconds of F, B, W and a message, where they were profiled."""
        found = PROFILE.get((self.hidden, self.ranks, self.microbatches)) if self.size in PROFILED else None
        return None if found is None else (found[0] / 1e6, found[1] / 1e6, found[2] / 1e6, found[3] / 1e6)


@dataclass(frozen=True, slots=True)
class Scored:
    """A row and the rates predicted for it, by way; a way that does not apply is left out."""

    row: Row
    rates: Mapping[str, float]

    def error(self, way: str) -> float:
        """Predicted less published."""
        return self.rates[way] - self.row.rate


def read_rows(path: Path) -> list[Row]:
    """The published table. Raises ``OSError``, ``KeyError`` and ``ValueError`` where it is another's."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(
                each["model"],
                *(int(each[name]) for name in ("layers", "hidden", "pp", "mbs", "m")),
                schedule=each["schedule"],
                rate=float(each["bubble_rate"]),
            )
            for each in csv.DictReader(file)
        ]


def rate_of(row: Row, times: tuple[float, float, float], message_s: float) -> float:
    """A schedule's bubble rate with stages that take ``times``."""
    if row.schedule not in NAMES and row.schedule not in AUTOMATIC:
        raise UsageError(f"no schedule of the planner is called {row.schedule}")
    if row.schedule in AUTOMATIC:
        shape, work = Shape(row.ranks, 1, row.microbatches), Work.even(row.ranks, *times, message_s)
        # Activations that W needs, of all (Qi et al. 2023, appendix; Korthikanti et al. 2022).
        share = 32 * row.hidden / (34 * row.hidden + 5 * row.size.heads * SEQUENCE)
        order = automatic(shape, work, AUTOMATIC[row.schedule] * row.ranks, share)
        return simulate(order, work).bubble_rate()
    chunks = {"1F1B-I": max((row.layers + 2) // row.ranks, 1), "ZB-V": 2}.get(row.schedule, 1)
    shape = Shape(row.ranks, chunks, row.microbatches)
    split = [each / chunks for each in times]
    work = Work.even(row.ranks * chunks, split[0], split[1], split[2], message_s)
    return simulate(order_of(NAMES[row.schedule], shape), work).bubble_rate()


def score(rows: Sequence[Row]) -> tuple[list[Scored], dict[str, int]]:
    """Every row, in each way that it can be predicted; and reason → rows for those that cannot."""
    found: list[Scored] = []
    skipped: dict[str, int] = {}
    for row in rows:
        try:
            found.append(_scored(row))
        except UsageError as error:
            skipped[str(error)] = skipped.get(str(error), 0) + 1
    return found, skipped


def _scored(row: Row) -> Scored:
    by_package = package_s(row.size)
    rates = {"package": rate_of(row, by_package[:3], by_package[3])}
    if row.profiled is not None:
        rates["profiled"] = rate_of(row, row.profiled[:3], row.profiled[3])
    machine = fit(row.hidden)
    times = stages_s(row.size, ((machine.matmul, machine.memory),))[0].tolist()
    message = machine.latency_s + row.size.message_bytes / machine.bytes_per_s
    rates["dimensions"] = rate_of(row, (times[0], times[0] * machine.by_input, times[2]), message)
    return Scored(row, rates)


def summary(scored: Sequence[Scored]) -> dict[str, Any]:
    """By way: rows, how many within a point, and the median and the largest error."""
    found: dict[str, Any] = {}
    for way in WAYS:
        errors = [abs(each.error(way)) for each in scored if way in each.rates]
        if errors:
            found[way] = {
                "rows": len(errors),
                "within_a_point": sum(error <= POINT for error in errors),
                "median": float(np.median(errors)),
                "largest": max(errors),
            }
    return found


def compare_schedules(ranks: int = 8, microbatches: int = 24, hidden: int = 4096) -> None:
    """Print what every schedule leaves idle with one profile's times, simulated and by formula, and what it holds."""
    forward, by_input, by_weight, message = (each / 1e6 for each in PROFILE[hidden, ranks, microbatches])
    print(
        f"{ranks} ranks, {microbatches} micro-batches; F {forward:.4g} s, B {by_input:.4g} s, W {by_weight:.4g} s"
    )
    print(
        f"{'schedule':<15} {'chunks':>6} {'alone':>7} {'together':>8} {'formula':>8}  held by first and last rank"
    )
    for name in schedules():
        chunks = 1 if name in ONE_CHUNK else 2
        shape = Shape(ranks, chunks, microbatches)
        times = [each / chunks for each in (forward, by_input, by_weight)]
        work = Work.even(shape.stages, times[0], times[1], times[2], message)
        order = order_of(name, shape, work)
        result = simulate(order, work)
        formula = "-"
        if name in SCHEDULES:
            code, busy = SCHEDULES.index(name), microbatches * (forward + by_input + by_weight)
            idle = bubble_s(code, ranks, chunks, microbatches, forward, by_input, by_weight, message)[0]
            formula = f"{idle / (idle + busy):.2%}"
        alone, together = result.bubble_rate(), result.bubble_rate(bypassed=False)
        held = ", ".join(f"{order.most_held(rank):.1f}" for rank in (0, ranks - 1))
        print(f"{name:<15} {chunks:>6} {alone:>7.2%} {together:>8.2%} {formula:>8}  {held}")


def print_timed(folder: Path) -> None:
    """Print a timed 1F1B pipeline's bubble beside the simulator's, from the medians of its stages, and the formula's."""
    found = trine.analyze(trine.load(folder)).pipeline
    if found is None or found.schedule != "1F1B":
        raise RuntimeError(f"{folder} is no pipeline that ran 1F1B")
    forward = tuple((stage.forward_ns or 0) / 1e9 for stage in found.stages)
    backward = tuple((stage.backward_ns or 0) / 1e9 for stage in found.stages)
    work = Work(forward, backward, (0.0,) * len(forward), message_s=0.0)
    result = simulate(order_of("1f1b", Shape(len(forward), 1, found.microbatches)), work)
    print(
        f"a timed pipeline of {len(forward)} stages, {found.microbatches} micro-batches: {found.bubble_ratio:.1%} idle, "
        f"simulated {result.bubble_ratio:.1%}, formula for equal stages {found.ideal_ratio:.1%}; {found.iteration_ns / 1e9:.3f} s an "
        f"iteration, simulated {result.span_s():.3f} s"
    )


def print_messages(rows: Sequence[Row]) -> None:
    """Print how long the package's messages take beside those that were profiled, of each model their mean."""
    seconds: dict[Size, list[float]] = {}
    for row in rows:
        if row.profiled is not None:
            seconds.setdefault(row.size, []).append(row.profiled[3])
    if seconds:
        means = {size: float(np.mean(each)) for size, each in seconds.items()}
        shares = [package_s(size)[3] / mean for size, mean in means.items()]
        print(
            f"messages of the package take {min(shares):.2f} to {max(shares):.2f} of those profiled, "
            f"{min(means.values()) * 1e3:.2f} to {max(means.values()) * 1e3:.2f} ms"
        )


def main(argv: list[str] | None = None) -> int:
    """Print rows and summary; 1 where a row is further off than a point."""
    parser = argparse.ArgumentParser(prog="planner_bubbles", description=(__doc__ or "").splitlines()[0])
    data = data_folder()
    parser.add_argument("--rates", type=Path, default=data / "tables" / "zero_bubble_rates_table5.csv")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument(
        "--schedules", action="store_true", help="compare all schedules on one profile instead"
    )
    arguments = parser.parse_args(argv)
    if arguments.schedules:
        compare_schedules()
        return 0
    try:
        rows = read_rows(arguments.rates)
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"{arguments.rates} holds no bubble rates: {error!r}")
    scored, skipped = score(rows)
    found = {**summary(scored), "skipped": skipped}
    if arguments.format == "json":
        print(json.dumps({"summary": found, "rows": [asdict(each) for each in scored]}, indent=2))
    else:
        _print(scored, found)
        print_messages(rows)
        for reason, count in skipped.items():
            print(f"skipped {count}: {reason}")
        if (timed := data / "traces" / "pipeline_schedule" / "pp8").is_dir():
            print_timed(timed)
    judged = [found[way] for way in ("profiled", "dimensions") if way in found]
    return int(not judged or any(each["within_a_point"] < each["rows"] for each in judged))


def _print(scored: Sequence[Scored], found: Mapping[str, Any]) -> None:
    print(
        f"{'model':>6} {'ranks':>5} {'m':>4} {'schedule':<8} {'published':>9}"
        + "".join(f" {w:>18}" for w in WAYS)
    )
    for each in scored:
        row = each.row
        line = f"{row.model:>6} {row.ranks:>5} {row.microbatches:>4} {row.schedule:<8} {row.rate:>9.2%}"
        for way in WAYS:
            given = f"{each.rates[way]:.2%} ({100 * each.error(way):+.2f})" if way in each.rates else "-"
            line += f" {given:>18}"
        print(line)
    for way in WAYS:
        if way in found:
            each = found[way]
            print(
                f"{way}: {each['within_a_point']} of {each['rows']} rows within a point, median error "
                f"{100 * each['median']:.2f}, largest {100 * each['largest']:.2f} points"
            )


if __name__ == "__main__":
    sys.exit(main())
