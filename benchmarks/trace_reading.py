"""How fast Trine reads and analyses Kineto traces, beside HolisticTraceAnalysis and Python's own json.

    python benchmarks/trace_reading.py                                  two ranks, as a user's script analyses them
    python benchmarks/trace_reading.py --single                         50 MB: the whole command beside json.load
    python benchmarks/trace_reading.py --large                          500 MB, 2 million events, one core
    python benchmarks/trace_reading.py --hta-python hta/bin/python      beside HolisticTraceAnalysis

where ``hta`` is an environment of its own (``python -m venv hta; hta/bin/pip install HolisticTraceAnalysis==0.5.0``).
Without ``--hta-python`` Trine is measured beside ``json.load`` alone.

``--single`` times ``trine analyze --format json FILE``, process start and writing included, beside a cold Python that
does ``json.load`` of the same file. ``--large`` runs the command on one core and reports time and peak memory.

Each tool runs in a cold process, the same ranks, the same questions: load, temporal breakdown, kernel
breakdown, idle breakdown, overlap. The traces are made by repeating one trace with shifted times until each
rank has at least ``--events`` events; they are written to a temporary folder and removed. Each figure is the
median of ``--repeats`` processes, tools in turn, so that other load on the machine hits both alike.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_folder import data_folder

SHARED_TRACE = "traces/kineto/single/a100_nccl_metadata.json.gz"
TIMEOUT_S = 900

TRINE = """
import sys, trine
analysis = trine.analyze(trine.load(sys.argv[1]), steps="all")
print(sum(result.summary.breakdown.events for result in analysis.ranks))
"""

HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
analysis.get_temporal_breakdown(visualize=False)
analysis.get_gpu_kernel_breakdown(visualize=False)
analysis.get_idle_time_breakdown(ranks=list(range(int(sys.argv[2]))), visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
"""

ONE_FILE = """
import json, sys
with open(sys.argv[1]) as file:
    json.load(file)
"""

JSON = """
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    with path.open() as file:
        json.load(file)
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """A cold process: wall seconds, processor seconds, and the peak resident bytes of its largest process."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def main() -> int:
    """Make traces, measure, print the table. Returns the exit code."""
    arguments = parse()
    source = source_trace(arguments.trace)
    if arguments.single or arguments.large:
        if arguments.single:
            measure_command(source, SINGLE, arguments.repeats)
        if arguments.large:
            measure_command(source, LARGE, 1)
        return 0
    with tempfile.TemporaryDirectory(prefix="trine-benchmark-") as name:
        folder = Path(name)
        events = [
            write_rank(source, folder / f"rank{rank}.json", rank, arguments.ranks, arguments.events)
            for rank in range(arguments.ranks)
        ]
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(
            f"{arguments.ranks} ranks, {sum(events):,} events, {size / 1e6:.0f} MB of JSON, "
            f"median of {arguments.repeats} cold processes each, {os.cpu_count()} cores"
        )
        report(measure_all(arguments, folder), sum(events))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hta-python", metavar="PATH", help="Python of an environment that has HolisticTraceAnalysis"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        help="the trace to repeat (default: a real A100 trace if present, else a made one)",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--events",
        type=int,
        default=700_000,
        help="events of each rank at least; below, start-up weighs more than reading",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--single",
        action="store_true",
        help="measure the command on one file of 50 MB beside json.load of it",
    )
    parser.add_argument(
        "--large", action="store_true", help="measure the command on 500 MB and 2 million events, on one core"
    )
    return parser.parse_args()


# --- the command -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """A trace to make: at least so many bytes and events, and what the command may take of it.

    ``ratio`` is of ``json.load``'s time; ``seconds`` and ``peak_bytes`` are absolute.
    """

    bytes: int
    events: int
    ratio: float | None = None
    seconds: float | None = None
    peak_bytes: int | None = None


SINGLE = Size(50_000_000, 216_000, ratio=1.5)
LARGE = Size(500_000_000, 2_000_000, seconds=15.0, peak_bytes=1_500_000_000)


def measure_command(source: dict[str, Any], size: Size, repeats: int) -> None:
    """Print what ``trine analyze --format json`` takes for one file, beside ``json.load`` in turn."""
    with tempfile.TemporaryDirectory(prefix="trine-benchmark-") as name:
        path = Path(name) / "rank0.json"
        events = write_rank(source, path, 0, 1, size.events)
        while path.stat().st_size < size.bytes:
            events = write_rank(source, path, 0, 1, int(events * 1.02 * size.bytes / path.stat().st_size))
        print(f"one file, {events:,} events, {path.stat().st_size / 1e6:.0f} MB of JSON, one core")
        command = [sys.executable, "-m", "trine", "analyze", "--format", "json", str(path)]
        runs: dict[str, list[Measured]] = {"trine": [], "json.load": []}
        for _ in range(repeats):
            runs["trine"].append(measure(one_core(command)))
            runs["json.load"].append(measure(one_core([sys.executable, "-c", ONE_FILE, str(path)])))
    found = {tool: median(measured) for tool, measured in runs.items()}
    for tool, each in found.items():
        print(
            f"{tool:12}{each.wall_s:>8.2f} s on the clock{each.cpu_s:>8.2f} s of the processor"
            f"{each.peak_bytes / 1e6:>8.0f} MB at its peak"
        )
    ratio = found["trine"].cpu_s / found["json.load"].cpu_s
    goals = [f"{ratio:.2f} times json.load" + (f" (goal {size.ratio})" if size.ratio else "")]
    if size.seconds:
        goals.append(f"{found['trine'].cpu_s:.1f} s (goal {size.seconds:.0f})")
    if size.peak_bytes:
        goals.append(f"{found['trine'].peak_bytes / 1e6:.0f} MB (goal {size.peak_bytes / 1e6:.0f})")
    print("trine analyze --format json takes " + ", ".join(goals))


def one_core(command: list[str]) -> list[str]:
    """The command bound to one core, where the system can."""
    taskset = shutil.which("taskset")
    return [taskset, "-c", str(min(os.sched_getaffinity(0))), *command] if taskset else command


def median(runs: list[Measured]) -> Measured:
    """The median of each figure."""
    return Measured(
        statistics.median(run.wall_s for run in runs),
        statistics.median(run.cpu_s for run in runs),
        int(statistics.median(run.peak_bytes for run in runs)),
    )


# --- traces ----------------------------------------------------------------------------------------


def source_trace(path: Path | None) -> dict[str, Any]:
    """The trace to repeat, as decoded JSON."""
    if path is None:
        data = data_folder()
        path = data / SHARED_TRACE
        if not path.is_file():
            print("no real trace at hand: repeating a made one")
            return made_trace()
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    decoded = json.loads(text)
    return decoded if isinstance(decoded, dict) else {"traceEvents": decoded}


def made_trace() -> dict[str, Any]:
    """Two steps of a model that never was, in the proportions of a real CUDA trace."""
    events: list[dict[str, Any]] = []
    for step in range(2):
        begin = step * 50_000.0
        events.append(_span("user_annotation", f"ProfilerStep#{step}", begin, 49_000.0, 1, {}))
        for index in range(1_000):
            at, correlation = begin + 45.0 * index, step * 1_000 + index + 1
            shapes = {"External id": correlation, "Input Dims": [[4096, 1024], [1024, 1024]]}
            events.append(_span("cpu_op", "aten::linear", at, 40.0, 1, shapes))
            events.append(_span("cpu_op", "aten::addmm", at + 5, 30.0, 1, shapes))
            events.append(
                _span("cuda_runtime", "cudaLaunchKernel", at + 20, 8.5, 1, {"correlation": correlation})
            )
            flow = {"id": correlation, "pid": 9, "tid": 1, "cat": "ac2g", "name": "ac2g"}
            events += [{"ph": "s", "ts": at + 20, **flow}, {"ph": "f", "ts": at + 60, "bp": "e", **flow}]
            name = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
            arguments = {"device": 0, "stream": 7, "correlation": correlation, "External id": correlation}
            if index % 50 == 0:
                name, arguments["stream"] = (
                    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)",
                    20,
                )
            kernel = _span("kernel", name, at + 60, 31.25, arguments["stream"], arguments)
            events.append({**kernel, "pid": 0})
    return {"schemaVersion": 1, "deviceProperties": [], "traceEvents": events}


def _span(category: str, name: str, ts: float, dur: float, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 9,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def write_rank(source: dict[str, Any], path: Path, rank: int, ranks: int, events: int) -> int:
    """Repeat a trace until it has that many events; returns how many it has."""
    facts = {key: value for key, value in source.items() if key != "traceEvents"}
    facts["distributedInfo"] = {**(facts.get("distributedInfo") or {}), "rank": rank, "world_size": ranks}
    written = 0
    with path.open("w") as file:
        file.write(json.dumps(facts)[:-1] + ', "traceEvents": [')
        for event in _repeated(source["traceEvents"], events):
            file.write((",\n  " if written else "\n  ") + json.dumps(event))
            written += 1
        file.write("\n]}")
    return written


def _repeated(events: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """The events again and again: later each time, with correlations and steps of their own."""
    timed = [event for event in events if event.get("ph") == "X"]
    span = max(e["ts"] + e["dur"] for e in timed) - min(e["ts"] for e in timed) + 1_000
    steps = [int(e["name"].split("#")[1]) for e in timed if e["name"].startswith("ProfilerStep#")]
    most = max((e["args"].get("correlation", 0) for e in timed if "args" in e), default=0) + 1
    for copy in range(-(-count // len(events))):
        for event in events:
            again = dict(event)
            if "ts" in again:
                again["ts"] = round(again["ts"] + copy * span, 3)
            if again.get("name", "").startswith("ProfilerStep#"):
                number = int(again["name"].split("#")[1]) + copy * (max(steps) - min(steps) + 1)
                again["name"] = f"ProfilerStep#{number}"
            if "correlation" in again.get("args", ()):
                again["args"] = {**again["args"], "correlation": again["args"]["correlation"] + copy * most}
            yield again


# --- measuring -------------------------------------------------------------------------------------


def measure_all(arguments: argparse.Namespace, folder: Path) -> dict[str, Measured]:
    """Each tool's median, run in turn."""
    commands = {
        "Trine": [sys.executable, "-c", TRINE, str(folder)],
        "json.load": [sys.executable, "-c", JSON, str(folder)],
    }
    if arguments.hta_python:
        commands["HolisticTraceAnalysis"] = [
            arguments.hta_python,
            "-c",
            HTA,
            str(folder),
            str(arguments.ranks),
        ]
    runs: dict[str, list[Measured]] = {name: [] for name in commands}
    for _ in range(arguments.repeats):
        for name, command in commands.items():
            runs[name].append(measure(command))
    return {name: median(found) for name, found in runs.items()}


def measure(command: list[str]) -> Measured:
    """Run a command in a fresh process that reports its own and its children's use."""
    with tempfile.TemporaryFile() as output:
        watcher = [sys.executable, str(Path(__file__).resolve()), "--watch", *command]
        done = subprocess.run(watcher, stdout=subprocess.PIPE, stderr=output, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            output.seek(0)
            raise SystemExit(f"{command[0]} failed:\n{output.read().decode(errors='replace')[-2000:]}")
    wall, cpu, peak = json.loads(done.stdout.splitlines()[-1])
    return Measured(wall, cpu, peak)


def watch(command: list[str]) -> int:
    """Run a command as the only child of this process, and print its wall and processor seconds and peak bytes."""
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False, timeout=TIMEOUT_S)
    wall = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    scale = 1 if sys.platform == "darwin" else 1024
    print(json.dumps([wall, used.ru_utime + used.ru_stime, used.ru_maxrss * scale]))
    return done.returncode


def report(results: dict[str, Measured], events: int) -> None:
    """The table, and the ratios that matter."""
    print(f"\n{'':24}{'wall s':>9}{'cpu s':>9}{'events/s':>12}{'peak MB':>10}")
    for name, found in results.items():
        rate = events / found.wall_s
        print(
            f"{name:24}{found.wall_s:>9.2f}{found.cpu_s:>9.2f}{rate:>12,.0f}{found.peak_bytes / 1e6:>10.0f}"
        )
    trine = results["Trine"]
    print()
    for name, other in results.items():
        if name != "Trine":
            print(
                f"Trine beside {name}: {other.wall_s / trine.wall_s:.1f} times as fast on the clock, "
                f"{other.cpu_s / trine.cpu_s:.1f} times in processor time, "
                f"{trine.peak_bytes / other.peak_bytes:.2f} of its peak memory"
            )


if __name__ == "__main__":
    sys.exit(watch(sys.argv[2:]) if sys.argv[1:2] == ["--watch"] else main())
