"""How long the host takes for one call of a collective, in traces of real jobs: what the planner's ``call_s`` is expected near.

    python benchmarks/collective_calls.py [TRACE ...]

Of each Kineto trace (by default those of ``$TRINE_TEST_DATA``) with calls of ``c10d``: how many there are of each operation, and
the quartiles of their time on the host in microseconds.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from data_folder import data_folder

__all__ = ["call_times_us", "main"]

#: The names by which PyTorch's profiler records the calls of its own process groups.
_PREFIX = "c10d::"


def call_times_us(trace: Path) -> dict[str, list[float]]:
    """Microseconds of each call, by operation; of gloo none, whose calls wait for the transfer."""
    opener: Any = gzip.open if trace.suffix == ".gz" else open
    with opener(trace, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = content["traceEvents"] if isinstance(content, dict) else content
    found: dict[str, list[float]] = defaultdict(list)
    has_device = any(event.get("cat") in ("kernel", "Kernel") for event in events)
    for event in events if has_device else ():
        if event.get("ph") == "X" and str(event.get("name", "")).startswith(_PREFIX):
            found[event["name"].removeprefix(_PREFIX)].append(float(event["dur"]))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each trace and operation; 2 where there is no trace."""
    given = sys.argv[1:] if arguments is None else arguments
    traces = [Path(each) for each in given] or sorted(
        (data_folder() / "traces" / "kineto").rglob("*.json.gz")
    )
    if not traces:
        print("no trace: name one, or set TRINE_TEST_DATA", file=sys.stderr)
        return 2
    print(f"{'trace':56}{'operation':18}{'calls':>6}  quartiles, us")
    for trace in traces:
        for operation, times in sorted(call_times_us(trace).items()):
            low, mid, high = np.percentile(times, [25, 50, 75])
            print(f"{trace.name[-54:]:56}{operation:18}{len(times):6}  {low:.0f} {mid:.0f} {high:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
