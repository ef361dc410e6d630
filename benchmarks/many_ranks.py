"""A thousand ranks on one machine: time, and memory that the pool bounds and not the number of ranks.

    python benchmarks/many_ranks.py                         128 and 1,024 ranks through the process pool
    python benchmarks/many_ranks.py --ranks 1024 --dask 2   the same through a local Dask cluster of two workers

Ranks are copies of a real job's (by default eight ranks of Megatron-LM on A100), each with a clock of its
own, up to two minutes off; they are written to a temporary folder and removed. Each size is analysed to
JSON in a cold process, which prints

    wall      seconds from start to JSON
    parent    peak resident memory of the process that joins the ranks
    worker    peak resident memory of the largest process that reads them
    joining   seconds of the parent's processor between the last rank read and the JSON

The last lines compare the largest size with the smallest: memory a worker must stay, joining must grow no
faster than the ranks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from data_folder import data_folder

SHARED_TRACES = "traces/kineto/megatron_tp8_a100"
TIMEOUT_S = 3600
#: The most that a rank's clock is off, ns. A job's hosts that lie ten minutes apart would be taken for two runs.
MOST_SHIFT_NS = 120 * 10**9
HEAD_BYTES = 1 << 17

ANALYSE = """
import json, resource, sys, time
started = time.perf_counter()
import trine
from trine.analyzers import analysis, to_json
last = [0.0]
sorted_out = analysis._sorted_out
def mark(*arguments):
    last[0] = time.process_time()
    return sorted_out(*arguments)
analysis._sorted_out = mark
result = trine.analyze(trine.load(sys.argv[1]), workers=None if sys.argv[3] else int(sys.argv[2]), scheduler=sys.argv[3] or None)
text = json.dumps(to_json(result))
print(json.dumps({
    "wall_s": time.perf_counter() - started,
    "joining_s": time.process_time() - last[0],
    "parent_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "worker_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    "ranks": len(result.ranks),
    "matched": sum(rank.communication is not None for rank in result.ranks),
    "clocks": len({rank.clock_offset_ns for rank in result.ranks}),
    "json_bytes": len(text),
}))
"""


@dataclass(frozen=True, slots=True)
class Source:
    """A rank's trace, cut behind its head: ``tail`` is compressed once and shared by all copies."""

    head: str
    tail: bytes


def main() -> int:
    """Make ranks, analyse each size, print the table. Returns the exit code."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a cluster is ended, too
    sources = read_sources(arguments.traces)
    print(f"{'ranks':>6} {'wall':>8} {'parent':>9} {'worker':>9} {'joining':>9} {'JSON':>9}")
    measured = []
    with tempfile.TemporaryDirectory(prefix="trine-many-ranks-") as name:
        for ranks in arguments.ranks:
            folder = Path(name) / str(ranks)
            folder.mkdir()
            for rank in range(ranks):
                write_rank(sources[rank % len(sources)], folder / f"rank{rank}.json.gz", rank, ranks)
            found = analyse(folder, arguments.workers, arguments.dask)
            measured.append(found)
            print(
                f"{ranks:>6} {found['wall_s']:>6.1f} s {found['parent_bytes'] / 1e6:>6.0f} MB "
                f"{found['worker_bytes'] / 1e6:>6.0f} MB {found['joining_s']:>7.2f} s {found['json_bytes'] / 1e6:>6.1f} MB",
                flush=True,
            )
            if not found["ranks"] == found["matched"] == ranks:
                print(
                    f"only {found['ranks']} ranks were read and {found['matched']} matched", file=sys.stderr
                )
                return 1
    if len(measured) > 1:
        compare(measured[0], measured[-1])
    return 0


def compare(small: dict[str, float], large: dict[str, float]) -> None:
    """What grew, from the smallest to the largest number of ranks."""
    times = large["ranks"] / small["ranks"]
    growth = (large["parent_bytes"] - small["parent_bytes"]) / (large["ranks"] - small["ranks"])
    print(
        f"{times:.0f} times the ranks: a worker takes {large['worker_bytes'] / small['worker_bytes']:.2f} times the memory, "
        f"joining {large['joining_s'] / small['joining_s']:.1f} times the processor time; "
        f"a rank costs the parent {growth / 1e3:.0f} kB"
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = data_folder()
    parser.add_argument(
        "--traces", type=Path, default=data / SHARED_TRACES, help="a folder of one job's traces"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 1024], metavar="N")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes of the pool"
    )
    parser.add_argument(
        "--dask", type=int, default=0, metavar="N", help="a local Dask cluster of N workers instead"
    )
    return parser.parse_args()


def read_sources(folder: Path) -> list[Source]:
    """The traces of a job, cut for copying."""
    found = []
    for path in sorted(folder.glob("*.json*")):
        content = path.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
        found.append(Source(text[:HEAD_BYTES], gzip.compress(text[HEAD_BYTES:].encode(), 6)))
    if not found:
        sys.exit(f"no traces in {folder}; name a folder of them with --traces")
    return found


def shift_of(rank: int) -> int:
    """How far a rank's clock is off, ns; no two ranks' alike."""
    return (rank * 7_919_000_003) % (2 * MOST_SHIFT_NS) - MOST_SHIFT_NS


def write_rank(source: Source, path: Path, rank: int, world: int) -> None:
    """One copy, as two gzip members: a head with this rank's number and clock, and the common rest."""
    shift = shift_of(rank)
    head = re.sub(r'"rank"\s*:\s*"?\d+"?', f'"rank": {rank}', source.head, count=1)
    head = re.sub(r'"world_size"\s*:\s*"?\d+"?', f'"world_size": {world}', head, count=1)
    base = re.search(r'"baseTimeNanoseconds"\s*:\s*(\d+)', head)
    if base is not None:
        head = f"{head[: base.start(1)]}{int(base[1]) + shift}{head[base.end(1) :]}"
    else:
        head = head.replace("{", f'{{"baseTimeNanoseconds": {shift},', 1)
    if '"rank":' not in head:
        head = head.replace("{", f'{{"distributedInfo": {{"rank": {rank}, "world_size": {world}}},', 1)
    path.write_bytes(gzip.compress(head.encode(), 1) + source.tail)


def analyse(folder: Path, workers: int, dask: int) -> dict[str, float]:
    """Analyse a folder in a cold process and return what it measured."""
    command = [sys.executable, "-c", ANALYSE, str(folder), str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not dask:
        return run([*command, ""], environment)
    with tempfile.TemporaryDirectory(prefix="trine-dask-") as name:
        place = Path(name) / "scheduler.json"
        processes = cluster(place, dask, environment)
        try:
            found = run([*command, str(place)], environment)
            found["worker_bytes"] = max(peak_bytes(process.pid) for process in processes[1:])
        finally:
            for process in processes:  # a worker asked politely looks for its scheduler first
                process.kill()
                process.wait()
    return found


def run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """The JSON that a process prints last."""
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def cluster(place: Path, workers: int, environment: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """A scheduler that writes its address to ``place``, and its workers, one thread each."""
    base = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    started = [
        subprocess.Popen(
            [*base, "--no-dashboard", "--idle-timeout", "600", "--scheduler-file", str(place)],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
    ]
    worker = [
        sys.executable,
        "-m",
        "distributed.cli.dask_worker",
        "--scheduler-file",
        str(place),
        "--no-nanny",
    ]
    for _ in range(workers):
        started.append(
            subprocess.Popen(
                [
                    *worker,
                    "--nthreads",
                    "1",
                    "--no-dashboard",
                    "--death-timeout",
                    "60",
                    "--local-directory",
                    str(place.parent),
                ],
                env=environment,
                stderr=subprocess.DEVNULL,
            )
        )
    for _ in range(600):
        if place.is_file():
            return started
        time.sleep(0.1)
    sys.exit("the Dask scheduler did not start within a minute")


def peak_bytes(process: int) -> int:
    """Peak resident memory of a living process, where the system tells (Linux)."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) * 1024  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
