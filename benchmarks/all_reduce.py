"""What each all-reduce costs by size on ranks of this machine, beside what was predicted from the measured links.

    python benchmarks/all_reduce.py                    4 ranks, two simulated nodes of two
    python benchmarks/all_reduce.py --ranks 8 --node 4

Times are the fastest of several repetitions, each as the slowest rank saw it; the algorithms take turns within a
repetition, so that other work on the machine falls on all alike. The last columns say what ``communication.algorithm =
"auto"`` would take, and how much longer that took here than the fastest.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from spawned_ranks import in_one_line, on_ranks

SIZES_BYTES = tuple(2**exponent for exponent in (10, 14, 17, 20, 22, 24))
REPEATS = 7
SECONDS = 300.0


def _measure(rank: int, ranks: int, node: int) -> list[Any]:
    import torch
    from torch import distributed

    from trine.optim.runtime.exchange.selection import Range, Selected, candidates, measure_costs, ranges
    from trine.optim.runtime.exchange.trial import corrected
    from trine.optim.topology import Topology

    topology, device = Topology(rank, ranks, node), torch.device("cpu")
    names = candidates("auto", topology)
    costs = corrected(measure_costs(topology, device), names, SIZES_BYTES[-1], device)
    world = distributed.group.WORLD
    sums = {name: Selected([Range(1, name, 0.0)], costs, topology, world) for name in names}
    rows = []
    for size in SIZES_BYTES:
        flat = torch.zeros(size // 4)
        took: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(REPEATS + 1):
            for name in names:
                distributed.barrier()
                began = time.perf_counter()
                sums[name](flat)
                slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
                distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
                took[name].append(float(slowest))
        measured = {name: min(times[1:]) for name, times in took.items()}
        predicted = {name: costs.seconds(name, size) for name in names}
        rows.append((size, measured, predicted, ranges(costs, names, size)[-1].name))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="all_reduce", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--node", type=int, default=2, help="ranks on a simulated node")
    chosen = parser.parse_args(argv)
    if chosen.ranks % chosen.node:
        parser.error(f"--node {chosen.node} does not divide --ranks {chosen.ranks}")
    rows = on_ranks(chosen.ranks, _measure, chosen.ranks, chosen.node, timeout_s=SECONDS)[0]
    names = list(rows[0][1])
    print("milliseconds, measured (predicted)")
    print(
        f"{'bytes':>9} "
        + " ".join(f"{name:>20}" for name in names)
        + f" {'auto takes':>15} {'longer by':>10}"
    )
    for size, measured, predicted, auto in rows:
        cells = [f"{measured[name] * 1e3:.2f} ({predicted[name] * 1e3:.2f})" for name in names]
        longer = measured[auto] / min(measured.values()) - 1
        print(f"{size:>9} " + " ".join(f"{cell:>20}" for cell in cells) + f" {auto:>15} {longer:>10.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(in_one_line(main))
