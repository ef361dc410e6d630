"""Bubble rates of pipeline schedules: published ones beside the planner's simulator.

    python benchmarks/planner_bubbles.py                      every row of the published table, in two ways
    python benchmarks/planner_bubbles.py --rates FILE.csv     other rows of the same columns
    python benchmarks/planner_bubbles.py --format json
    python benchmarks/planner_bubbles.py --schedules          every schedule on one of the models, by simulator and formula

Qi et al. 2023 ("Zero Bubble Pipeline Parallelism", ICLR 2024) give bubble rates of six schedules for four models, computed
from times that they profiled on A100s: (cost − m (F + B + W)) / cost, with the cost of the rank that is at it longest from its
own first action to its own last. Their profile is public (the paper's appendix; ``interleave.py`` of the authors' repository).

*profiled*: their F, B, W and message times go into the simulator. What is left is the orders, the automatic scheduler and the
simulator. *dimensions*: the times themselves come from the planner's operators for the model's dimensions, with five
constants of that machine and software (matmul, memory, B over F, message latency and bandwidth) fitted on
the profiles of the *other three* models, so no row has seen its own. *package*: the same with the package's constants, which
know nothing of this machine's software.

Rows are read from ``$TRINE_TEST_DATA/tables/zero_bubble_rates_table5.csv``, else from ``../shared/data``; the exit code is 1
where *profiled* or *dimensions* is further off than a point in any row.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import trine
from trine.optim.plan import Bandwidth, Cluster, Layouts, Link, Workload
from trine.optim.plan.closed_form import bubble_s
from trine.optim.plan.collectives import point_to_point_s
from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.constants import stack_named
from trine.optim.plan.devices import device_named
from trine.optim.plan.layouts import SCHEDULES
from trine.optim.plan.operators import layer_times
from trine.optim.plan.schedules import Shape, Work, order_of, schedules
from trine.optim.plan.schedules.automatic import automatic
from trine.optim.plan.simulator import simulate
from trine.record.errors import UsageError

__all__ = ["Scored", "main", "score"]

REPOSITORY = Path(__file__).resolve().parents[1]
#: One point of a bubble rate: the goal.
POINT = 0.01
WAYS = ("profiled", "dimensions", "package")
SEQUENCE = 1024

#: The paper's names; the automatic schedules have so many times 1F1B's memory.
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "ZB-V": "zb-v"}
AUTOMATIC = {"ZB-1p": 1, "ZB-2p": 2}
ONE_CHUNK = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")

#: (hidden, ranks, micro-batches) → microseconds of a stage's F, B and W, and of a message (Qi et al. 2023).
PROFILE: Mapping[tuple[int, int, int], tuple[float, float, float, float]] = {
    (2304, 8, 24): (18522, 18086, 9337, 601),
    (2304, 8, 32): (18513, 18086, 9331, 626),
    (2304, 8, 64): (18546, 18097, 9321, 762),
    (4096, 8, 24): (29718, 29444, 19927, 527),
    (4096, 8, 32): (29802, 29428, 19530, 577),
    (4096, 8, 64): (29935, 29621, 19388, 535),
    (5120, 16, 48): (11347, 11248, 8132, 377),
    (5120, 16, 64): (11307, 11254, 8101, 379),
    (5120, 16, 128): (11325, 11308, 8109, 378),
    (6144, 32, 96): (10419, 10207, 7715, 408),
    (6144, 32, 128): (10408, 10204, 7703, 408),
    (6144, 32, 256): (10402, 10248, 7698, 460),
}
#: Heads by hidden size (table 3 of the paper); else of 128 elements.
HEADS = {2304: 24, 4096: 32, 5120: 40, 6144: 48}


class Size(NamedTuple):
    """What stages' times depend on."""

    layers: int
    hidden: int
    ranks: int
    micro_batch: int

    @property
    def heads(self) -> int:
        """Of attention."""
        return HEADS.get(self.hidden, max(self.hidden // 128, 1))

    @property
    def message_bytes(self) -> float:
        """Of a micro-batch's activations between two stages, in 16 bits."""
        return 2.0 * self.micro_batch * SEQUENCE * self.hidden


#: The models that were profiled.
PROFILED = (Size(22, 2304, 8, 6), Size(30, 4096, 8, 3), Size(46, 5120, 16, 1), Size(62, 6144, 32, 1))
VOCABULARY = 50304
#: Shares of the best matmul's rate and of the memory's that a fit tries.
SHARES = tuple(product(np.arange(0.7, 1.1, 0.02).tolist(), np.arange(0.4, 1.3, 0.05).tolist()))


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


@dataclass(frozen=True, slots=True)
class Machine:
    """Constants of the machine and its software: shares of the best matmul's and the memory's rate, B over F, and of a message."""

    matmul: float
    memory: float
    by_input: float
    latency_s: float
    bytes_per_s: float


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


# --- times of a stage -------------------------------------------------------------------------------------


def _cluster(ranks: int) -> Cluster:
    """Nodes of eight A100 SXM 80 GB with RoCE between them (section 5.1)."""
    return Cluster(
        device_named("A100-SXM-80GB"),
        devices_per_node=min(ranks, 8),
        nodes=max(ranks // 8, 1),
        inside=Link(Bandwidth.gigabytes_per_s(600, directions=2)),
        between=Link(Bandwidth.gigabits_per_s(1600, devices=8), kind="roce"),
    )


@lru_cache(maxsize=64)
def stages_s(size: Size, shares: tuple[tuple[float, float], ...] = ()) -> npt.NDArray[np.float64]:
    """Seconds of F, B and W of the mean stage, embedding and head among them: a row for each (matmul, memory) of ``shares``,
    one by the package's constants where there are none.

    Attention's scores lie in memory, element-wise kernels are not joined, and dropout is on, as the paper's count of
    activations (34 sbh + 5 as²b) has it.
    """
    workload = Workload(
        name="published",
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        ffn=4 * size.hidden,
        vocab=VOCABULARY,
        sequence=SEQUENCE,
        learned_positions=True,
        dropout=True,
    )
    stack = stack_named("Megatron-LM").with_traits(fused_attention=False, fused=False)
    conditions = Conditions.of(_cluster(size.ranks), stack)
    if shares:
        matmul, memory = np.array(shares).T
        conditions = replace(conditions, matmul=matmul, memory=memory)
    layouts = Layouts.of(
        pipeline=size.ranks, micro_batch=size.micro_batch, microbatches=[size.ranks] * max(len(shares), 1)
    )
    times = layer_times(Sizes.of(workload), conditions, layouts)
    columns = []
    for name in ("forward_s", "input_s", "weight_s"):
        ends = getattr(times.head, name) + getattr(times.embedding, name)
        column = (getattr(times.dense, name) * size.layers + ends) / size.ranks
        columns.append(np.broadcast_to(column, (len(layouts),)))
    return np.stack(columns, axis=1)


def package_message_s(size: Size) -> float:
    """A message by the package's constants: the mean over boundaries, of which those between nodes are few."""
    cluster = _cluster(size.ranks)
    network = Conditions.of(cluster, stack_named("Megatron-LM")).networks[0]
    inside = float(point_to_point_s(network, size.message_bytes, True))
    across = cluster.nodes - 1
    if not across:
        return inside
    between = float(point_to_point_s(network, size.message_bytes, False))
    return (inside * (size.ranks - 1 - across) + between * across) / (size.ranks - 1)


@lru_cache(maxsize=8)
def fit(hidden: int) -> Machine:
    """Constants from the published profiles of all models but those of a hidden size: least squares of logarithms, and a line
    for messages."""
    means = {
        size: np.mean([line for key, line in PROFILE.items() if key[0] == size.hidden], axis=0) / 1e6
        for size in PROFILED
        if size.hidden != hidden
    }

    # Logarithms of profiled over modelled F and W: (models, shares, 2).
    ratios = np.stack([np.log(mean[[0, 2]] / stages_s(size, SHARES)[:, ::2]) for size, mean in means.items()])
    matmul, memory = SHARES[int(np.argmin(np.square(ratios).sum(axis=(0, 2))))]
    by_input = float(np.exp(np.mean([np.log(mean[1] / mean[0]) for mean in means.values()])))
    sizes = np.array([size.message_bytes for size in means])
    slope, latency = np.polyfit(sizes, [mean[3] for mean in means.values()], 1)
    return Machine(matmul, memory, by_input, float(latency), float(1 / slope))


# --- rates ------------------------------------------------------------------------------------------------


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
    by_package = stages_s(row.size)[0].tolist()
    rates = {
        "package": rate_of(row, (by_package[0], by_package[1], by_package[2]), package_message_s(row.size))
    }
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


def main(argv: list[str] | None = None) -> int:
    """Print rows and summary; 1 where a row is further off than a point."""
    parser = argparse.ArgumentParser(prog="planner_bubbles", description=(__doc__ or "").splitlines()[0])
    data = Path(os.environ.get("TRINE_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
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
