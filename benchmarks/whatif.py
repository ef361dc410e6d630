"""Does what-if meet the truth? One plain record predicts what ten changes do to a step; then each is measured.

    python benchmarks/whatif.py                       train_gpt.py and train_vision.py on two gloo ranks, under six minutes
    python benchmarks/whatif.py gpt --seconds 40      one of them, with so long to measure all its changes
    python benchmarks/whatif.py --calibrate           the same with a calibration of now
    python benchmarks/whatif.py --format json

The machine is calibrated first (``trine hardware --calibrate``; a calibration of the last day is taken as it is), then the
sample runs once, plain, under ``trine.profile``, and every change is predicted from that record alone. Only then are
the changes measured: all of them and the plain step in turn, in one run, in an order drawn anew each round, so that what
the machine does meanwhile falls on all alike. No fitting knows of either program.

``error`` is of the step time; ``of ratio`` of the change against the plain step, which a machine that has become
slower since the record cannot blur. ``sign`` is judged where the measured change exceeds noise: where 95 % of bootstrap
draws of the rounds' median ratio lie on one side of 1. ``covered``: the measured ratio lies in the predicted interval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

__all__ = ["CHANGES", "Row", "main", "rows_of"]

#: Every change, by the keys of a configuration.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"precision.dtype": "bf16"},
    "compile": {"compute.compile": "blocks"},
    "bucket 1 MiB": {"communication.bucket_mib": 1},
    "compression int8": {"communication.compression": "int8"},
    "compression bf16": {"communication.compression": "bf16"},
    "zero 1": {"zero.stage": 1},
    "zero 2": {"zero.stage": 2},
    "zero 3": {"zero.stage": 3},
    "checkpointing": {"checkpointing.mode": "full"},
    "accumulation 2": {"accumulation.steps": 2},
}
SAMPLES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpt": ("trine.samples.train_gpt", ()),
    "vision": ("trine.samples.train_vision", ()),
}
RECORDED_STEPS = 40
RANKS = 2
#: Steps of a variant in a row, of which the mean counts: the first finds the caches as another variant left them.
IN_A_ROW = 2
#: A calibration older than this is measured anew.
FRESH_S = 86_400.0
TIMEOUT_S = 1200
#: glibc gives nothing back to the system, and takes nothing from it for a single tensor (mallopt(3)).
KEPT_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_THRESHOLD_": str(2**32)}


@dataclass(frozen=True)
class Row:
    """A change of one sample. Times in milliseconds a step; ratios against the plain step."""

    sample: str
    change: str
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float
    error: float
    predicted_ratio: float
    measured_ratio: float
    noise_low: float
    noise_high: float
    ratio_error: float
    sign: bool | None  # None: the measured change lies within noise
    covered: bool = False


# --- parts -------------------------------------------------------------------------------------


def calibrate(anew: bool) -> None:
    """Measure this machine, unless that was done within a day and ``anew`` is not asked."""
    from trine.record.hardware import cache_folder, calibrated, processor_name

    kept = calibrated(processor_name(), 1)
    files = (cache_folder() / "hardware").glob("*--threads-1.json")
    own = [path for path in files if json.loads(path.read_text("utf-8")).get("name") == processor_name()]
    age = min((time.time() - path.stat().st_mtime for path in own), default=FRESH_S)
    whole = kept is not None and any(
        row["operation"] == "sharded_unit" and "quartiles" in row for row in kept.operations
    )
    if (
        not anew and whole and age < FRESH_S
    ):  # one of an earlier release lacks what shards cost, or how times vary
        return
    _run([sys.executable, "-m", "trine", "hardware", "--calibrate", "--no-observer"])


def record(sample: str, folder: Path) -> None:
    """The sample's plain run, as people start it."""
    module, flags = SAMPLES[sample]
    command = ["-m", module, *flags, "--steps", str(RECORDED_STEPS), "--record", str(folder)]
    _run([*_torchrun(), *command])


def predict(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The record's what-if, and the answer to each change or, in words, why there is none."""
    import trine
    from trine.optim.plan.whatif import recorded

    run = recorded(folder)
    answers: dict[str, Any] = {}
    for name, change in CHANGES.items():
        try:
            answers[name] = run.what_if(change)
        except trine.TrineError as error:
            answers[name] = str(error)
    return run, answers


def measure(sample: str, seconds: float, folder: Path) -> dict[str, list[float]]:
    """Seconds of a step by variant and round, the slowest rank's."""
    result = folder / "measured.json"
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"sample": sample, "seconds": seconds, "changes": {**CHANGES}}))
    _run([*_torchrun(), str(Path(__file__).resolve()), "--worker", str(plan), str(result)])
    found: dict[str, list[float]] = json.loads(result.read_text())
    return found


def _torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]


def _run(command: Sequence[str]) -> None:
    environment = {**os.environ, **KEPT_HEAP, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise SystemExit(f"{' '.join(command[-4:])} ended with {done.returncode}: {last}")


def rows_of(sample: str, answers: Mapping[str, Any], measured: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row for each change that was predicted and measured."""
    plain = np.array(measured["plain"])
    found = []
    for name, answer in answers.items():
        if isinstance(answer, str) or name not in measured:
            continue
        times = np.array(measured[name])
        ratios = times / plain
        low, high = _noise(ratios)
        ratio, predicted = float(np.median(ratios)), answer.predicted.mid / answer.step.mid
        told = median(times.tolist())
        found.append(
            Row(
                sample, name, answer.predicted.mid * 1e3, answer.predicted.low * 1e3, answer.predicted.high * 1e3,
                told * 1e3, answer.predicted.mid / told - 1, predicted, ratio, low, high, predicted / ratio - 1,
                (predicted < 1) == (ratio < 1) if low > 1 or high < 1 else None,
                answer.predicted.low <= ratio * answer.step.mid <= answer.predicted.high,
            )
        )  # fmt: skip
    return found


def _noise(ratios: Any) -> tuple[float, float]:
    """What 95 % of bootstrap draws of the median lie between."""
    random = np.random.default_rng(0)
    draws = np.median(random.choice(ratios, (1000, len(ratios))), axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


# --- on the ranks ------------------------------------------------------------------------------


def work(plan_path: Path, result_path: Path) -> None:
    """One of the ranks that measure: every variant's steps in turn."""
    plan = json.loads(plan_path.read_text())
    from trine.optim.trials import alternate
    from trine.samples.training import place

    with place() as (rank, ranks, device):
        variants = {"plain": _stepper(plan["sample"], {}, rank, ranks, device)}
        for name, change in plan["changes"].items():
            variants[name] = _stepper(plan["sample"], change, rank, ranks, device)
        times = alternate(variants, plan["seconds"], warm_up=1, least_rounds=5, most_rounds=60)
        if rank == 0:
            result_path.write_text(
                json.dumps(
                    {name: [each / IN_A_ROW for each in found] for name, found in times.seconds.items()}
                )
            )


def _stepper(
    sample: str, change: Mapping[str, Any], rank: int, ranks: int, device: Any
) -> Callable[[], None]:
    """Steps of a model of its own with a change; those of ``plain`` by the loop that was recorded."""
    import importlib

    from torch.nn.parallel import DistributedDataParallel

    import trine

    name, flags = SAMPLES[sample]
    module = importlib.import_module(name)
    model, optimizer, loader = module.build(module.arguments_of(list(flags)), rank, ranks, device)
    if not change:
        replica = DistributedDataParallel(model)
        batches = (batch for _ in count() for batch in loader)

        def plain() -> None:
            for _ in range(IN_A_ROW):
                loss = module.loss_of(replica, tuple(part.to(device) for part in next(batches)))
                (loss[0] if isinstance(loss, tuple) else loss).backward()
                optimizer.step()
                optimizer.zero_grad()

        return plain
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(change), loss_fn=module.loss_of)
    taken = (batch for _ in count() for batch in engine.steps(loader))

    def step() -> None:
        for _ in range(IN_A_ROW):
            engine.train_step(next(taken))

    return step


# --- the table ---------------------------------------------------------------------------------


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians over rows, and how many signs are right of those that exceed noise."""
    judged = [row.sign for row in rows if row.sign is not None]
    return {
        "step_error_median": median(abs(row.error) for row in rows),
        "ratio_error_median": median(abs(row.ratio_error) for row in rows),
        "signs_right": sum(judged),
        "signs_judged": len(judged),
        "covered": sum(row.covered for row in rows),
        "rows": len(rows),
    }


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"{'':8}{'change':<18}{'predicted':>11}{'measured':>11}{'error':>8}   {'ratio':>13}{'(noise)':>16}{'of ratio':>10}  sign"
    ]
    for row in rows:
        sign = "within noise" if row.sign is None else "right" if row.sign else "WRONG"
        lines.append(
            f"{row.sample:8}{row.change:<18}{row.predicted_ms:>8.1f} ms{row.measured_ms:>8.1f} ms{row.error:>+8.1%}   "
            f"{row.predicted_ratio:>5.3f} / {row.measured_ratio:>5.3f}  ({row.noise_low:.3f}–{row.noise_high:.3f})"
            f"{row.ratio_error:>+10.1%}  {sign}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate, record, predict, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("samples", nargs="*", metavar="SAMPLE", help="gpt, vision (default: both)")
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="to measure one sample's changes (default 75)"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="anew, though there is a calibration of today"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        work(*arguments.worker)
        return 0
    unknown = sorted(set(arguments.samples) - set(SAMPLES))
    if unknown:
        parser.error(f"no sample {unknown[0]!r}: choose from {', '.join(SAMPLES)}")
    calibrate(arguments.calibrate)
    rows: list[Row] = []
    said: list[str] = []
    for sample in arguments.samples or SAMPLES:
        found, words = _judged(sample, arguments.seconds)
        rows += found
        said += words
    if not rows:
        print(f"no change was both predicted and measured: {'; '.join(said)}", file=sys.stderr)
        return 2
    summary = summary_of(rows)
    if arguments.format == "json":
        plain = {"rows": [asdict(row) for row in rows], "summary": summary, "notes": said}
        print(json.dumps({"schema": "trine.whatif_benchmark/1", **plain}))
    else:
        print("\n".join([*said, "", *_table(rows), ""]))
        print(
            f"median error {summary['step_error_median']:.1%} (of ratio {summary['ratio_error_median']:.1%}), "
            f"{summary['signs_right']} of {summary['signs_judged']} signs right, {summary['covered']} of {summary['rows']} ratios "
            "in their intervals"
        )
    return 0


def _judged(sample: str, seconds: float) -> tuple[list[Row], list[str]]:
    """One sample recorded, predicted and only then measured; its rows and what is to be said of them."""
    with tempfile.TemporaryDirectory() as folder:
        record(sample, Path(folder) / "plain")
        run, answers = predict(Path(folder) / "plain")
        measured = measure(sample, seconds, Path(folder))
    errors = ", ".join(f"step {index} {error:+.2%}" for index, error in run.replay_errors.items())
    plain, recorded_ms = median(measured["plain"]) * 1e3, float(np.median(run.steady.seconds)) * 1e3
    said = [
        f"{sample}: replay error {errors}; {'; '.join(run.graph.notes)}",
        *(f"{sample}: {name}: {answer}" for name, answer in answers.items() if isinstance(answer, str)),
        (
            f"{sample}: plain step {recorded_ms:.1f} ms on record, {plain:.1f} ms measured beside the changes "
            f"({len(measured['plain'])} rounds)"
        ),
    ]
    return rows_of(sample, answers, measured), said


if __name__ == "__main__":
    sys.exit(main())
