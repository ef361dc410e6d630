"""How long do stages of a pipeline have nothing to do? Each schedule's bubble from the record, beside its ideal.

    python benchmarks/bubbles.py                  stages that sleep known times, on 4 and 8 ranks, then real compute on 2
    python benchmarks/bubbles.py sleeping         the first alone
    python benchmarks/bubbles.py computing        the second alone

*Sleeping*: a stage's forward sleeps for t, its backward for t by the input and t by the weights, so that two cores do not
blur what eight ranks wait for. Every schedule must come within one point of the bubble that its order leaves at best.
*Computing*: two ranks of one thread each train blocks of matrix products. Zero-bubble and interleaved schedules must leave
less than 1F1B; on a model whose last blocks are larger, a split by measured cost must leave less than equal numbers.

The figures are those of Trine's own record of each run (``trine analyze``: pipeline); the exit code is 1 where one is not met.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from spawned_ranks import in_one_line, on_ranks

__all__ = ["Measured", "compute_rows", "main", "measured", "sleep_rows"]

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
#: How far the record's bubble may be from the ideal: one point.
POINT = 0.01
#: Of a stage's forward, of its backward by input, and of that by weights: long beside what a message costs.
SLEEP_S = 0.25
STEPS = 3


@dataclass(frozen=True)
class Measured:
    """One run."""

    name: str
    ranks: int
    microbatches: int
    bubble: float  # mean over ranks and counted steps, from the record
    ideal: float

    def line(self, verdict: str) -> str:
        """A row of the table."""
        return f"{self.name:<34} {self.ranks:>5} {self.microbatches:>13} {self.bubble:>8.2%} {self.ideal:>8.2%}  {verdict}"


HEAD = f"{'schedule':<34} {'ranks':>5} {'micro-batches':>13} {'bubble':>8} {'ideal':>8}"


# --- what the ranks run ---------------------------------------------------------------------------------


def _sleeping_model(blocks: int, seconds: float) -> Any:
    """Blocks of which each sleeps in forward, in the gradient of its input, and in that of its weight."""
    import torch
    from torch import nn

    class Inner(torch.autograd.Function):
        """The identity, whose backward sleeps: work on the input's gradient."""

        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            time.sleep(seconds)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            time.sleep(seconds)
            return gradient.clone()

    class Weight(torch.autograd.Function):
        """A weight on its way, whose backward sleeps: work on the weight's gradient."""

        @staticmethod
        def forward(context: Any, weight: Any) -> Any:
            return weight.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            time.sleep(seconds)
            return gradient.clone()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.weight = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            # Shifted, so that the first block's input has a gradient as well, and all blocks cost alike.
            return Inner.apply(x + self.shift) * Weight.apply(self.weight)

    return nn.Sequential(*(Block() for _ in range(blocks)))


def _computing_model(widths: Sequence[int]) -> Any:
    """Residual blocks of two matrix products, each as wide inside as ``widths`` says."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(256, inner), nn.Linear(inner, 256)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.relu(self.up(x)))

    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for width in widths))


def _loss(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def run_rank(rank: int, ranks: int, job: Mapping[str, Any]) -> None:
    """Trains a few steps of the job's model and records them into its folder."""
    import torch

    import trine

    sleeps = "blocks" in job
    torch.manual_seed(1)  # ranks of one pipeline share their batches
    model = _sleeping_model(job["blocks"], job["seconds"]) if sleeps else _computing_model(job["widths"])
    batch = torch.randn(job["batch"], 4) if sleeps else torch.randn(job["batch"], 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    config = trine.Config().with_changes(job["changes"])
    example = batch if job.get("example") else None
    engine = trine.optimize(model, optimizer, config, loss_fn=_loss, example=example)
    with trine.profile(job["folder"], model=engine.model, optimizer=engine.optimizer, windows=None) as prof:
        for _ in range(job["steps"]):
            torch.distributed.barrier()
            engine.train_step(batch)
        del prof
    engine.close()


def _run_all(rank: int, ranks: int, jobs: Sequence[Mapping[str, Any]]) -> None:
    import torch

    for job in jobs:
        run_rank(rank, ranks, job)
        torch.distributed.barrier()


def _run(ranks: int, jobs: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
    """All jobs on processes that are started once. Raises ``RankFailed`` where a rank fails or is late."""
    on_ranks(ranks, _run_all, ranks, jobs, timeout_s=timeout_s)


# --- what the record says -----------------------------------------------------------------------------------


def measured(folder: Path, name: str, ranks: int, microbatches: int, ideal: float) -> Measured:
    """From the record of a run: the mean of its stages' bubble ratios."""
    import trine

    found = trine.analyze(trine.load(folder)).pipeline
    if found is None:
        raise RuntimeError(f"the record {folder} shows no pipeline")
    return Measured(name, ranks, microbatches, float(found.bubble_ratio), ideal)


def sleep_rows(
    ranks: int, microbatches: int, schedules: Sequence[str] = SCHEDULES, seconds: float = SLEEP_S
) -> list[Measured]:
    """Every schedule with stages that sleep."""
    from trine.optim.runtime.pipelining.schedules import ideal_bubble, schedule_of

    with tempfile.TemporaryDirectory() as scratch:
        jobs = []
        for name in schedules:
            chunks = schedule_of(name, None).default_chunks()
            jobs.append(
                {
                    "folder": str(Path(scratch) / name),
                    "blocks": ranks * chunks,
                    "seconds": seconds,
                    "batch": microbatches,
                    "steps": STEPS,
                    "changes": {
                        "parallel.pipeline": ranks,
                        "parallel.schedule": name,
                        "parallel.microbatches": microbatches,
                    },
                }
            )
        _run(ranks, jobs, 120.0 + len(jobs) * (30.0 + 20.0 * STEPS * microbatches * seconds))
        found = []
        for name, job in zip(schedules, jobs, strict=True):
            schedule = schedule_of(name, None)
            ideal = ideal_bubble(schedule, ranks, schedule.default_chunks(), microbatches)
            found.append(measured(Path(str(job["folder"])), name, ranks, microbatches, ideal))
        return found


#: Eight blocks of equal width; and eight of which the last two are four times as wide.
EVEN = (3072,) * 8
UNEVEN = (1536,) * 6 + (6144,) * 2


def compute_rows(rounds: int = 3, steps: int = 4) -> dict[str, Measured]:
    """Real compute on two ranks, each the median of several runs that take turns."""
    from trine.optim.runtime.pipelining.schedules import ideal_bubble, schedule_of

    kinds: dict[str, dict[str, Any]] = {
        "1f1b": {"widths": EVEN, "schedule": "1f1b"},
        "interleaved": {"widths": EVEN, "schedule": "interleaved"},
        "interleaved_zero_bubble": {"widths": EVEN, "schedule": "interleaved_zero_bubble"},
        "zbv": {"widths": EVEN, "schedule": "zbv"},
        "uneven, split by layers": {"widths": UNEVEN, "schedule": "1f1b", "split": "layers"},
        "uneven, split automatically": {
            "widths": UNEVEN,
            "schedule": "1f1b",
            "split": "auto",
            "example": True,
        },
    }
    with tempfile.TemporaryDirectory() as scratch:
        jobs = []
        for turn in range(rounds):
            for name, kind in kinds.items():
                jobs.append(
                    {
                        "folder": str(Path(scratch) / f"{name}-{turn}"),
                        "widths": kind["widths"],
                        "batch": 4 * 512,
                        "steps": steps,
                        "example": kind.get("example"),
                        "changes": {
                            "parallel.pipeline": 2,
                            "parallel.schedule": kind["schedule"],
                            "parallel.microbatches": 4,
                            "parallel.split": kind.get("split", "auto"),
                        },
                    }
                )
        _run(2, jobs, 120.0 + 60.0 * len(jobs))
        found = {}
        for name, kind in kinds.items():
            schedule = schedule_of(kind["schedule"], None)
            ideal = ideal_bubble(schedule, 2, schedule.default_chunks(), 4)
            runs = [
                measured(Path(scratch) / f"{name}-{turn}", name, 2, 4, ideal).bubble for turn in range(rounds)
            ]
            found[name] = Measured(name, 2, 4, statistics.median(runs), ideal)
        return found


def main(argv: list[str] | None = None) -> int:
    """Print the tables; 1 where a figure is not met."""
    parser = argparse.ArgumentParser(prog="bubbles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=["sleeping", "computing", []], help="default: both")
    what = parser.parse_args(argv).what or ["sleeping", "computing"]
    failed = 0
    if "sleeping" in what:
        print(f"stages that sleep\n{HEAD}")
        for ranks, microbatches in ((4, 8), (8, 16)):
            for row in sleep_rows(ranks, microbatches):
                near = abs(row.bubble - row.ideal) <= POINT
                failed += not near
                print(row.line("within a point" if near else "FAR FROM THE IDEAL"), flush=True)
    if "computing" in what:
        print(f"stages that compute, a thread each\n{HEAD}")
        rows = compute_rows()
        for name, other in COMPARED:
            less = rows[name].bubble < rows[other].bubble
            failed += not less
            print(rows[name].line(f"{'less' if less else 'NOT LESS'} than {other}"))
        for name in ("1f1b", "uneven, split by layers"):
            print(rows[name].line(""))
    return 1 if failed else 0


#: (what must leave less, than what)
COMPARED = (
    ("interleaved", "1f1b"),
    ("interleaved_zero_bubble", "1f1b"),
    ("zbv", "1f1b"),
    ("uneven, split automatically", "uneven, split by layers"),
)


if __name__ == "__main__":
    sys.exit(in_one_line(main))
