"""What ``trine.profile`` costs a training loop: always on, collector by collector, and in a deep window.

    python benchmarks/overhead.py                 one rank and two, about five minutes
    python benchmarks/overhead.py --pairs 10      quicker, wider intervals

Plain and profiled blocks of steps alternate in one process, so that whatever the machine does meets both; the ratio of
each pair's mean step times is one measurement, and the median of these with a bootstrap interval the result. Means, not
medians, inside a block: the background thread's work falls on few steps, and it counts. Steps take about 50 ms here.
The ratio of CPU times says the same on a machine that others use too, where wall times scatter by tens of per cent; and
the sum of the parts' CPU times bounds it where even that scatters. (The observer of collectives runs in C++, some 3 µs
for each, and is in the ratios, not in the sum.)
The first steps of a profiled block are not timed: one-time work (facts, files) belongs to a run, not to its steps.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from spawned_ranks import in_one_line, launch
from torch import nn
from torch.nn import functional

import trine
from trine.profiler.background import Background
from trine.profiler.batches import measure_batch
from trine.profiler.collectors import Collectors
from trine.profiler.marks import Marker
from trine.profiler.session import Session

STEP_NS = 50_000_000
UNTIMED, TIMED, PLAIN_UNTIMED = 14, 20, 2
WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY = 256, 8, 4, 64, 512


#: A part of "a step closes", shown beside it and not added again.
NESTED = "  of which reading memory"
#: Wall and CPU time of this process, ns.
Times = np.ndarray[Any, np.dtype[np.float64]]


def now() -> Times:
    """Wall and CPU clocks."""
    return np.array([time.perf_counter_ns(), time.process_time_ns()], dtype=np.float64)


class Block(nn.Module):
    """A transformer block as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, _ = x.shape
        parts = self.inputs(self.first(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """A small language model: 3.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, length) token ids to logits."""
        return self.head(self.blocks(self.embedding(ids)))


class Loop:
    """One rank's training loop, with a batch size that makes its step about 50 ms."""

    def __init__(self, world_size: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model: nn.Module = Model()
        if world_size > 1:
            model = nn.parallel.DistributedDataParallel(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.batches = 1
        self.step(self.batch())
        self.step(self.batch())
        spent = min(self.timed_step() for _ in range(5))
        share = torch.tensor(max(1.0, STEP_NS / spent))
        if world_size > 1:
            torch.distributed.all_reduce(share, torch.distributed.ReduceOp.MIN)
        self.batches = min(64, round(float(share)))

    def batch(self) -> torch.Tensor:
        """Token ids (batch, length)."""
        return torch.randint(0, VOCABULARY, (self.batches, LENGTH))

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Forward, backward, optimizer."""
        logits = self.model(ids)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def timed_step(self) -> int:
        """Nanoseconds of one step."""
        begin = time.perf_counter_ns()
        self.step(self.batch())
        return time.perf_counter_ns() - begin

    def loader(self, steps: int) -> Iterator[torch.Tensor]:
        """Batches, made on demand."""
        for _ in range(steps):
            yield self.batch()

    def plain(self) -> Times:
        """Mean times of a step in a block without profiling."""
        begin = now()
        for number, ids in enumerate(self.loader(PLAIN_UNTIMED + TIMED)):
            if number == PLAIN_UNTIMED:
                begin = now()
            self.step(ids)
        return (now() - begin) / TIMED

    def profiled(self, folder: Path, watch: Stopwatch | None = None) -> tuple[Times, Session]:
        """Mean times of a step in a profiled block, and its session."""
        begin = end = now()
        with trine.profile(
            folder, model=self.model, optimizer=self.optimizer, windows=None, flops=False
        ) as session:
            for number, ids in enumerate(session.steps(self.loader(UNTIMED + TIMED + 1))):
                if number == UNTIMED:
                    begin = now()
                    if watch is not None:
                        watch.running = True
                if number == UNTIMED + TIMED:
                    end = now()
                    if watch is not None:
                        watch.running = False
                session.log(loss=self.step(ids))
        return (end - begin) / TIMED, session


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Median of the ratios and its 95 % bootstrap interval (percentile method, 10,000 resamples)."""
    generator = np.random.default_rng(0)
    values = np.asarray(ratios)
    medians = np.median(generator.choice(values, (10_000, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


class Stopwatch:
    """Adds up the CPU time that a thread spends in some functions while they are wrapped."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.running = False
        self._undo: list[Callable[[], None]] = []
        begin = time.thread_time_ns()
        for _ in range(1000):
            self.spent["nothing"] = time.thread_time_ns()
        self._own_ns = (time.thread_time_ns() - begin) // 1000
        self.spent.clear()

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Time ``owner.name`` under ``label``."""
        original = getattr(owner, name)
        self.spent.setdefault(label, 0)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return original(*arguments, **keywords)
            finally:
                if self.running:
                    self.spent[label] += time.thread_time_ns() - begin - self._own_ns

        setattr(owner, name, timed)
        self._undo.append(lambda: setattr(owner, name, original))

    def unwrap(self) -> None:
        """Put the functions back."""
        for undo in reversed(self._undo):
            undo()


def collector_costs(loop: Loop, folder: Path) -> dict[str, float]:
    """Microseconds of CPU time a step of each part of the session."""
    import trine.profiler.parts as parts_module

    watch = Stopwatch()
    watch.wrap(Marker, "enter", "phases begin")
    watch.wrap(Marker, "leave", "phases end")
    watch.wrap(parts_module, "measure_batch", "batch size")
    watch.wrap(Session, "take_values", "loss")
    watch.wrap(Session, "begin_part", "a step opens")
    watch.wrap(Session, "end_part", "a step closes")
    watch.wrap(Collectors, "read_memory", NESTED)
    watch.wrap(Background, "flush", "background thread")
    try:
        loop.profiled(folder, watch)
    finally:
        watch.unwrap()
    assert parts_module.measure_batch is measure_batch
    return {label: spent / TIMED / 1e3 for label, spent in watch.spent.items()}


def window_costs(loop: Loop, folder: Path) -> dict[str, float]:
    """Milliseconds of three recorded steps and of what is written after them: a deep window beside bare torch.profiler."""
    from torch.profiler import ProfilerActivity, profile

    def bare() -> float:
        begin = time.perf_counter_ns()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler:
            for _ in range(3):
                loop.step(loop.batch())
        profiler.export_chrome_trace(str(folder / "bare.json.gz"))
        return (time.perf_counter_ns() - begin) / 1e6

    def deep(windows: Any) -> float:
        begin = time.perf_counter_ns()
        target = Path(tempfile.mkdtemp(dir=folder))
        with trine.profile(
            target / "run", model=loop.model, optimizer=loop.optimizer, windows=windows, flops=False
        ) as session:
            for ids in session.steps(loop.loader(4)):
                loop.step(ids)
        return (time.perf_counter_ns() - begin) / 1e6

    folder.mkdir(parents=True, exist_ok=True)
    plain = statistics.median(sum(loop.timed_step() for _ in range(3)) / 1e6 for _ in range(3))
    bare()  # the first use of the profiler starts it, whoever asks
    with_window = [deep((0, 2)) for _ in range(3)]
    without = [deep(None) for _ in range(3)]
    return {
        "three plain steps": plain,
        "three steps in torch.profiler, with its export": statistics.median(bare() for _ in range(3)),
        "three steps in a deep window, written": plain
        + statistics.median(with_window)
        - statistics.median(without),
    }


def measure(pairs: int) -> None:
    """One rank's part; the first rank prints."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    folder = Path(os.environ["TRINE_OVERHEAD_FOLDER"]) / f"world-{world_size}"
    loop = Loop(world_size)
    loop.profiled(folder / "warm-up")
    ratios: list[Times] = []
    plains: list[Times] = []
    for pair in range(pairs):
        # Which comes first alternates too, so that a drift of the machine favours neither.
        first = loop.plain() if pair % 2 else None
        profiled, session = loop.profiled(folder / f"pair-{pair}")
        plain = loop.plain() if first is None else first
        ratios.append(profiled / plain)
        plains.append(plain)
    costs = collector_costs(loop, folder / "collectors")
    windows = window_costs(loop, folder / f"windows-{rank}") if world_size == 1 else {}
    if rank == 0:
        report(world_size, ratios, plains, costs, windows, session)
    if world_size > 1:
        torch.distributed.destroy_process_group()


def report(
    world_size: int,
    ratios: list[Times],
    plains: list[Times],
    costs: dict[str, float],
    windows: dict[str, float],
    session: Session,
) -> None:
    """Print one world size's results."""
    source = session.collectors.source
    print(f"\n{world_size} rank{'s' if world_size > 1 else ''}, CPU and gloo, PyTorch {torch.__version__}")
    print(
        f"  plain step                      {statistics.median(plain[0] for plain in plains) / 1e6:8.2f} ms"
    )
    for row, clock in enumerate(("wall", "CPU")):
        median, low, high = ratio_interval([float(ratio[row]) for ratio in ratios])
        print(
            f"  always-on overhead, {clock + ' time':<9}   {100 * (median - 1):+8.2f} %   "
            f"95 % interval {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %, {len(ratios)} pairs of {TIMED} steps"
        )
    print(f"  collectives seen by             {'nothing' if source is None else source.name:>8}")
    step_us = statistics.median(plain[0] for plain in plains) / 1e3
    total = sum(cost for label, cost in costs.items() if label != NESTED)
    print("  CPU time of each part, µs a step:")
    for label, cost in costs.items():
        print(f"    {label:<30}{cost:8.1f}")
    print(f"    {'sum':<30}{total:8.1f}   {100 * total / step_us:.2f} % of the step")
    if windows:
        print("  a deep window, ms:")
        for label, cost in windows.items():
            print(f"    {label:<50}{cost:8.0f}")
    sys.stdout.flush()


def main() -> int:
    """Run one and two ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30, help="pairs of blocks of each world size")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(arguments.pairs)
        return 0
    folder = tempfile.mkdtemp(prefix="trine-overhead-")
    try:
        command = [sys.executable, __file__, "--pairs", str(arguments.pairs), "--child"]
        for ranks in arguments.ranks:
            launch(command, ranks, timeout_s=1800, environment={"TRINE_OVERHEAD_FOLDER": folder})
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(in_one_line(main))
