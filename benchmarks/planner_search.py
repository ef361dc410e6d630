"""How fast layouts are searched, how many of them are computed, and whether bounds lose anything.

    python benchmarks/planner_search.py [--format text|json] [--quick]

For each problem: shapes and configurations of its space, those whose time or memory was computed (the rest is ruled out by
bounds), processor seconds of one core, and computed configurations a minute, which counts nothing that was ruled out. The
last lines weigh the whole space of a problem one by one and compare the winner and the seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.constants import stack_named
from trine.optim.plan.layouts import OFFLOADED
from trine.optim.plan.problem import Problem
from trine.optim.plan.reasons import layout_words
from trine.optim.plan.search import Searcher
from trine.optim.plan.space import savings, shapes
from trine.optim.plan.workload_files import workload_of

__all__ = ["main", "measured", "weighed_one_by_one"]

PROBLEMS = (
    ("llama3-8b", "dgx-h100", 64, "torchtitan"),
    ("gpt3-175b", "dgx-a100-80", 1024, "megatron-lm-2023"),
    ("llama3-70b", "dgx-h100", 1024, "megatron-core"),
    ("llama3-405b", "dgx-h100", 16_384, "megatron-core"),
    ("mixtral-8x7b", "dgx-h100", 256, "megatron-core"),
    ("deepseek-v3", "dgx-h100", 2048, "megatron-core"),
)
#: Small enough to weigh each of its configurations.
ONE_BY_ONE = ("llama3-8b", "dgx-h100", 16, "torchtitan")


@dataclass(frozen=True, slots=True)
class Measured:
    """One search."""

    model: str
    devices: int
    stack: str
    shapes: int
    configurations: int
    computed: int
    processor_s: float
    configurations_per_minute: float
    best: str
    step_s: float


def problem_of(model: str, cluster: str, devices: int, stack: str) -> Problem:
    """With the usual batch."""
    return Problem.of(workload_of(model), cluster_of(cluster, devices), stack_named(stack))


def measured(model: str, cluster: str, devices: int, stack: str) -> Measured:
    """The ten best ways to divide the devices."""
    asked = problem_of(model, cluster, devices, stack)
    begin = time.process_time()
    searcher = Searcher(asked, shapes(asked))
    found = searcher.fastest(10)
    seconds = time.process_time() - begin
    tally = searcher.tally
    return Measured(
        model,
        devices,
        stack,
        tally.shapes,
        tally.configurations,
        tally.weighed,
        seconds,
        60 * tally.weighed / seconds,
        layout_words(found.layouts.row(0)),
        float(found.step_s[0]),
    )


def weighed_one_by_one(model: str, cluster: str, devices: int, stack: str) -> Measured:
    """The same without bounds: every configuration's time and memory."""
    asked = problem_of(model, cluster, devices, stack)
    begin = time.process_time()
    searcher = Searcher(asked, shapes(asked))
    every, _ = savings(asked, searcher.shapes, ("recompute", *OFFLOADED))
    step_s, peak_bytes = searcher.step_s(every), searcher.peak_bytes(every)
    fits = np.flatnonzero(peak_bytes <= asked.capacity_bytes)
    best = int(fits[np.lexsort((peak_bytes[fits], step_s[fits]))][0])
    seconds = time.process_time() - begin
    return Measured(
        model,
        devices,
        stack,
        len(searcher.shapes),
        len(every),
        len(every),
        seconds,
        60 * len(every) / seconds,
        layout_words(every.row(best)),
        float(step_s[best]),
    )


def main(argv: list[str] | None = None) -> int:
    """Search and print; 1 where bounds lost the winner."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--quick", action="store_true", help="only the problem that is weighed one by one")
    options = parser.parse_args(argv)
    found = [] if options.quick else [measured(*asked) for asked in PROBLEMS]
    bounds, plain = measured(*ONE_BY_ONE), weighed_one_by_one(*ONE_BY_ONE)
    same = abs(bounds.step_s / plain.step_s - 1) < 1e-7
    if options.format == "json":
        rows = [_row(one) for one in (*found, bounds)]
        print(json.dumps({"searches": rows, "one_by_one": _row(plain), "same_winner": same}, indent=2))
    else:
        _print([*found, bounds])
        print(
            f"\none by one: {plain.computed:,} configurations in {plain.processor_s:.1f} s, with bounds {bounds.computed:,} in "
            f"{bounds.processor_s:.1f} s"
        )
        print(f"{'the same winner' if same else 'ANOTHER WINNER'}: {plain.best}, {plain.step_s:.3f} s a step")
    return 0 if same else 1


def _row(one: Measured) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}


def _print(found: list[Measured]) -> None:
    print(
        f"{'model':<14}{'devices':>8}  {'stack':<18}{'shapes':>8}{'configurations':>16}{'computed':>10}{'s':>7}{'a minute':>11}"
    )
    for one in found:
        print(
            f"{one.model:<14}{one.devices:>8}  {one.stack:<18}{one.shapes:>8,}{one.configurations:>16,}{one.computed:>10,}"
            f"{one.processor_s:>7.1f}{one.configurations_per_minute:>11,.0f}"
        )


if __name__ == "__main__":
    sys.exit(main())
