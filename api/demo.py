"""The demo: a real training run on local ranks, measured, explained, changed, measured again.

Six stages: measure the machine; train plain; analyse; try the recommended changes against the plain loop,
alternated; train with those that helped; report. Those that train run under torchrun, each in processes of
its own with a limit on its time. Every figure is measured here: in this call, or by an earlier calibration
of this machine.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trine._demo_changes import Candidate, Skipped, candidates, with_pieces
from trine._launch import launch
from trine.analyzers import analyze
from trine.analyzers.reports import html
from trine.analyzers.results import Analysis
from trine.analyzers.statistics import bootstrap_median, ratio_of_medians
from trine.optim import Config
from trine.record import load
from trine.record.errors import TrineError, UsageError
from trine.record.hardware import calibrated, processor_name, store_calibration, usable_cores

__all__ = ["DemoResult", "Measured", "Options", "Outcome", "Side", "run_demo"]

#: Losses of the tuned run against the plain one, relative, by what was changed.
TOLERANCE_BF16 = 2e-3
TOLERANCE_FP32 = 1e-5

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. ``shape``: arguments of the sample; ``try_seconds``: time for trying changes."""

    output: Path
    steps: int = 30
    ranks: int | None = None
    compile: bool = False
    try_seconds: float = 32.0
    shape: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """Gain a step in seconds, with the bootstrap interval of its median over the rounds."""

    gain_s: float
    low_s: float
    high_s: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One change: what was predicted of it, what it gained alone, and whether it stayed among the others.

    ``on_top`` is the ratio of steps with it to steps without it, on top of those kept before, with the bootstrap
    interval of its median.
    """

    candidate: Candidate
    alone: Measured
    kept: bool
    on_top: tuple[float, float, float]
    on_top_of: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two recorded runs."""

    record: Path
    report: Path
    analysis: Analysis
    losses: Mapping[int, float]  # step → mean over ranks


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything the table shows. ``together`` is alternated with the plain loop, ``together_ratio`` its steps over the
    plain ones with their interval in ``together_range``; sides are separate runs."""

    ranks: int
    config: Config
    config_path: Path
    outcomes: tuple[Outcome, ...]
    skipped: tuple[Skipped, ...]
    predicted_together_s: float | None
    together: Measured
    together_ratio: float
    together_range: tuple[float, float]
    plain: Side
    tuned: Side
    loss_difference: float
    tolerance: float
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether the losses agree within the tolerance."""
        return self.loss_difference <= self.tolerance


def run_demo(options: Options, tell: Tell) -> DemoResult:
    """Run all stages. Raises ``TrineError`` in one line; no process outlives the call."""
    from trine.profiler.machine import accelerators

    devices = [device.name for device in accelerators()]
    ranks, threads, device = _place(options.ranks, devices)
    shape = options.shape or _shape(on_gpu=device is not None)
    output = _prepare(options.output)
    environment = {"OMP_NUM_THREADS": str(threads)}
    clock = _Clock(tell)
    with clock.stage("machine", "measuring this machine and building the observer of collectives"):
        _measure_machine(ranks, threads, device, tell)
    with clock.stage("plain", f"training {options.steps} steps as people first write it, {ranks} ranks"):
        plain = _train(output, "plain", options, shape, ranks, environment, None)
    with clock.stage("analysis", "analysing the record"):
        before = _read(output, "plain")
        found, skipped = candidates(before.analysis, options.steps, options.compile)
    tell(f"      {before.analysis.verdict.sentence}")
    if not found:
        raise TrineError(
            f"the analysis recommends nothing that this version can apply; the record is in {plain}: trine analyze {plain}"
        )
    with clock.stage("trials", f"trying {len(found)} changes, each alone and then together, alternated"):
        tried = _try(output, options, shape, ranks, environment, found)
    outcomes = _outcomes(with_pieces(found, tried["pieces"]), tried)
    config = Config()
    for outcome in outcomes:
        if outcome.kept:
            config = config.with_changes(outcome.candidate.change)
    config_path = output / "tuned.toml"
    config_path.write_text(config.to_toml(), encoding="utf-8")
    with clock.stage("tuned", f"training {options.steps} steps with what helped"):
        _train(output, "tuned", options, shape, ranks, environment, config_path)
    with clock.stage("report", "writing the reports"):
        after = _read(output, "tuned")
    result = _conclude(ranks, config, config_path, outcomes, skipped, tried, before, after, clock.seconds)
    (output / "demo.json").write_text(json.dumps(_ledger(result), indent=2), encoding="utf-8")
    return result


# --- stages ------------------------------------------------------------------------------------


class _Clock:
    """Says each stage as it begins and how long it took."""

    STAGES = 6

    def __init__(self, tell: Tell) -> None:
        self.seconds: dict[str, float] = {}
        self._tell = tell

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        self._tell(f"[{len(self.seconds) + 1}/{self.STAGES}] {what}")
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start


def _place(wanted: int | None, devices: Sequence[str]) -> tuple[int, int, str | None]:
    """(ranks, threads a rank, device): a GPU a rank where there are two, one GPU alone, else two on the CPU.

    The device is what the sample trains on: none where ranks are more than GPUs (:func:`trine.samples.training.place`).
    """
    ranks = wanted or (2 if len(devices) != 1 else 1)
    return ranks, max(1, usable_cores() // ranks), devices[0] if ranks <= len(devices) else None


def _shape(on_gpu: bool) -> tuple[str, ...]:
    """The sample's own shape on a CPU; a few hundred times the work on a GPU, so that it has something to do."""
    if not on_gpu:
        return ()
    return ("--layers=12", "--hidden=1024", "--heads=16", "--sequence=1024", "--batch=16")


def _prepare(output: Path) -> Path:
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise UsageError(f"--output {output} is not empty: give a folder that is, or that does not exist yet")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make {output} ({error.strerror or error}): give --output another folder"
        ) from error
    return output


def _measure_machine(ranks: int, threads: int, device: str | None, tell: Tell) -> None:
    """Calibrate what has no figures yet, while the observer is compiled on another core. Neither is fatal."""
    from trine.profiler import calibrate
    from trine.profiler.observer_build import ensure_built

    builder = threading.Thread(target=ensure_built, kwargs={"wait": True}, daemon=True)
    builder.start()
    try:
        known = calibrated(device, None) if device else calibrated(processor_name(), threads)
        if known is None or (ranks > 1 and not known.collective):
            collective = calibrate.measure_all_reduce(ranks) if ranks > 1 else {}
            if known is not None:  # all else that a calibration measured is kept
                measured = calibrate.with_collective(known, collective)
            elif device:
                measured = calibrate.calibrate_device(0, collective)
            else:
                measured = calibrate.calibrate_cpu(threads, collective)
            store_calibration(measured)
    except (TrineError, OSError, RuntimeError) as error:
        tell(f"      not calibrated: {' '.join(str(error).split())}")
    builder.join(120)


def _train(
    output: Path,
    name: str,
    options: Options,
    shape: tuple[str, ...],
    ranks: int,
    environment: Mapping[str, str],
    config: Path | None,
) -> Path:
    record = output / name
    arguments = [*shape, f"--steps={options.steps}", f"--record={record}"]
    if config is not None:
        arguments.append(f"--config={config}")
    launch(
        f"the {name} run",
        "trine.samples.train_gpt",
        arguments,
        ranks=ranks,
        log_folder=output / "logs" / name,
        seconds=90 + 10 * options.steps,
        environment=environment,
    )
    return record


def _read(output: Path, name: str) -> Side:
    """Analyse a record, write its report, and take its losses."""
    record = output / name
    job = load(record)
    analysis = analyze(job, workers=1)
    report = output / f"{name}.html"
    report.write_text(html.render(analysis), encoding="utf-8")
    by_step: dict[int, list[float]] = {}
    for rank in job:
        if rank.steps is not None:
            for index, loss in zip(rank.steps["index"].tolist(), rank.steps["loss"].tolist(), strict=True):
                by_step.setdefault(index, []).append(loss)
    losses = {
        index: sum(values) / len(values)
        for index, values in sorted(by_step.items())
        if len(values) == len(job.sources) and not any(map(math.isnan, values))
    }
    return Side(record, report, analysis, losses)


def _try(
    output: Path,
    options: Options,
    shape: tuple[str, ...],
    ranks: int,
    environment: Mapping[str, str],
    found: list[Candidate],
) -> dict[str, Any]:
    plan, result = output / "logs" / "plan.json", output / "logs" / "trials.json"
    changes = {candidate.name: dict(candidate.change) for candidate in found}
    plan.write_text(
        json.dumps({"arguments": list(shape), "seconds": options.try_seconds, "changes": changes}),
        encoding="utf-8",
    )
    launch(
        "the trial of changes",
        "trine.samples.try_changes",
        [str(plan), str(result)],
        ranks=ranks,
        log_folder=output / "logs" / "trials",
        seconds=180 + 6 * options.try_seconds,
        environment=environment,
    )
    tried: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return tried


# --- conclusions -------------------------------------------------------------------------------


def _measured(plain: list[float], changed: list[float]) -> Measured:
    """Median of the rounds' differences: neighbours in time, so that drift cancels."""
    gains = [a - b for a, b in zip(plain, changed, strict=True)]
    middle, low, high = bootstrap_median(gains)
    return Measured(middle, low, high, len(gains))


def _outcomes(found: list[Candidate], tried: Mapping[str, Any]) -> tuple[Outcome, ...]:
    by_name = {candidate.name: candidate for candidate in found}
    outcomes = []
    for trial in tried["together"]:
        name = trial["change"]
        ratios = [a / b for a, b in zip(trial["with"], trial["without"], strict=True)]
        alone = _measured(tried["alone"]["plain"], tried["alone"][name])
        outcomes.append(
            Outcome(by_name[name], alone, trial["kept"], bootstrap_median(ratios), tuple(trial["on_top_of"]))
        )
    return tuple(outcomes)


def _conclude(
    ranks: int,
    config: Config,
    config_path: Path,
    outcomes: tuple[Outcome, ...],
    skipped: list[Skipped],
    tried: Mapping[str, Any],
    before: Side,
    after: Side,
    seconds: Mapping[str, float],
) -> DemoResult:
    final = tried["final"]
    ratio = ratio_of_medians([final["together"]], [final["plain"]])
    shared = sorted(before.losses.keys() & after.losses.keys())
    if not shared:
        raise TrineError(
            f"the records hold no losses to compare ({before.record}, {after.record}): please report it"
        )
    difference = max(abs(before.losses[i] - after.losses[i]) / abs(before.losses[i]) for i in shared)
    return DemoResult(
        ranks=ranks,
        config=config,
        config_path=config_path,
        outcomes=outcomes,
        skipped=tuple(skipped),
        predicted_together_s=_predicted_together(outcomes, before.analysis),
        together=_measured(final["plain"], final["together"]),
        together_ratio=ratio.ratio,
        together_range=(ratio.low, ratio.high),
        plain=before,
        tuned=after,
        loss_difference=difference,
        tolerance=TOLERANCE_BF16 if config.precision.dtype == "bf16" else TOLERANCE_FP32,
        seconds=dict(seconds),
    )


def _predicted_together(outcomes: tuple[Outcome, ...], plain: Analysis) -> float | None:
    """Each kept change shortens what the others left: step × Π(1 − gain ÷ step), less the step."""
    if plain.step_statistics is None:
        return None
    step = plain.step_statistics.median_ns
    left = float(step)
    for outcome in outcomes:
        if outcome.kept and outcome.candidate.predicted is not None:
            left *= 1 - outcome.candidate.predicted.mid / step
    return (step - left) / 1e9


def _ledger(result: DemoResult) -> dict[str, Any]:
    """The figures as plain values, for programs and for the public ledger of predicted against measured."""
    return {
        "schema": "trine.demo/1",
        "ranks": result.ranks,
        "configuration": result.config.to_dict(),
        "changes": [
            {
                "change": dict(outcome.candidate.change),
                "basis": outcome.candidate.basis,
                "predicted_gain_ns": asdict(outcome.candidate.predicted)
                if outcome.candidate.predicted
                else None,
                "measured_gain_s": asdict(outcome.alone),
                "kept": outcome.kept,
                "ratio_on_top": dict(zip(("median", "low", "high"), outcome.on_top, strict=True)),
                "on_top_of": list(outcome.on_top_of),
            }
            for outcome in result.outcomes
        ],
        "skipped": [asdict(each) for each in result.skipped],
        "together": {
            "predicted_gain_s": result.predicted_together_s,
            "measured_gain_s": asdict(result.together),
            "ratio": result.together_ratio,
            "ratio_low": result.together_range[0],
            "ratio_high": result.together_range[1],
        },
        "loss": {"largest_relative_difference": result.loss_difference, "tolerance": result.tolerance},
        "seconds": dict(result.seconds),
    }
