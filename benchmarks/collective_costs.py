"""What observing one collective costs, by source: in the thread that issues it, and in the background that drains it.

    python benchmarks/collective_costs.py          two ranks on gloo, about twenty seconds

CPU time, the least of several batches: wall time of a collective is mostly waiting for the other rank. The sources take
turns, so that whatever the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from spawned_ranks import in_one_line, launch

from trine.profiler.collectives import PythonSource
from trine.profiler.flight import FlightReader
from trine.profiler.observer import ObserverSource
from trine.profiler.observer_build import ensure_built, why_not_built

BATCH, ROUNDS = 200, 15


def issue_costs(sources: dict[str, Any]) -> dict[str, float]:
    """CPU time of the issuing thread for one asynchronous all-reduce of 1 KiB, in ns, by source."""
    vector = torch.ones(256)
    best = dict.fromkeys(sources, float("inf"))
    for _ in range(ROUNDS):
        for name, make in sources.items():
            source = make()
            if source is not None:
                source.start()
            begun = time.thread_time_ns()
            works = [dist.all_reduce(vector, async_op=True) for _ in range(BATCH)]
            best[name] = min(best[name], (time.thread_time_ns() - begun) / BATCH)
            for work in works:
                work.wait()
            if source is not None:
                source.stop()
                source.drain()
    return best


def drain_cost(library: Path) -> float:
    """CPU time of draining one collective, in ns, flight recorder aside."""
    source = ObserverSource(library, lambda *note: None)
    source.start()
    source._flight.available = False
    for _ in range(BATCH * 4):
        dist.all_reduce(torch.ones(256))
    begun = time.thread_time_ns()
    rows = len(source.drain().get("operation", ()))
    cost = (time.thread_time_ns() - begun) / max(rows, 1)
    source.stop()
    return cost


def flight_cost() -> float:
    """CPU time of reading one entry of the flight recorder, in ns."""
    for _ in range(2000):
        dist.all_reduce(torch.ones(1))
    begun = time.thread_time_ns()
    entries = len(FlightReader().read())
    return (time.thread_time_ns() - begun) / max(entries, 1)


def measure(rank: int) -> None:
    """One rank's part; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    library = ensure_built(wait=True)
    sources: dict[str, Any] = {"nothing": lambda: None}
    if library is not None:
        sources["observer (C++)"] = lambda: ObserverSource(library, lambda *note: None)
    sources["python and flight recorder"] = lambda: PythonSource(lambda *note: None)
    issue = issue_costs(sources)
    drain = drain_cost(library) if library is not None else None
    flight = flight_cost()
    if rank == 0:
        print(f"one all-reduce of 1 KiB, 2 ranks, gloo, PyTorch {torch.__version__}; CPU time")
        for name, cost in issue.items():
            extra = "" if name == "nothing" else f"   + {(cost - issue['nothing']) / 1e3:.1f}"
            print(f"  issued under {name:<28}{cost / 1e3:8.1f} µs{extra}")
        print(
            f"  drained from the observer                {'-' if drain is None else f'{drain / 1e3:8.1f} µs'}"
        )
        print(f"  read from the flight recorder            {flight / 1e3:8.1f} µs")
        if library is None:
            print(f"  no observer: {why_not_built()}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Start two ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().child:
        measure(int(os.environ["RANK"]))
    else:
        launch([sys.executable, __file__, "--child"], 2, timeout_s=300)
    return 0


if __name__ == "__main__":
    sys.exit(in_one_line(main))
