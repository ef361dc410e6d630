"""How far the planner is from published runs: a line a table, and a summary.

    python benchmarks/planner.py [--runs FILE.csv] [--format text|json] [--worst N] [--as-stated]

Any file in the schema of the published runs is scored (by default the one of ``$TRINE_TEST_DATA``): each row is predicted or
skipped with its reason. The step's error is |predicted/measured − 1|. Kendall's tau and the regret (time lost by trusting the
pick) are means over groups of one model, batch and device count, of at least two layouts that took different times; a layout that
is measured again counts once, with its mean. A dash: there is nothing to compute it from.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from data_folder import data_folder
from planner_peaks import NEAR, near_all_peaks
from planner_rows import Run, Skipped, read_runs

from trine.optim.plan import Layouts
from trine.optim.plan.columns import Conditions, Sizes, joined
from trine.optim.plan.memory import memory_of
from trine.optim.plan.step import parts_of, predict
from trine.record.errors import TrineError

__all__ = ["kendall_tau", "main", "predicted_s", "score"]

Seconds = npt.NDArray[np.float64]


def main(argv: list[str] | None = None) -> int:
    """Score and print; 2 where the file cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=None, help="a CSV file; by default the shared one")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--worst", type=_rows, default=0, metavar="N", help="also the N rows furthest off")
    parser.add_argument(
        "--as-stated",
        action="store_true",
        help="rows as their tables state them, without errata; also how many are faster than that allows",
    )
    options = parser.parse_args(argv)
    try:
        runs, skipped = read_runs(options.runs or default_runs(), as_stated=options.as_stated)
    except TrineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    found = score(runs, skipped)
    if options.as_stated:
        found["summary"]["near_all_peaks"] = near_all_peaks(runs)
    if not found["summary"]["predicted"]:
        print("no row is predicted and has a time: what is skipped says why", file=sys.stderr)
    if options.format == "json":
        print(json.dumps(_plain(found), indent=2, allow_nan=False))
    else:
        _print(found)
        _print_worst(runs, options.worst)
    return 0


def _rows(text: str) -> int:
    """A number of rows, as a command line says it."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows: say 0 or more")
    return int(text)


def _plain(value: Any) -> Any:
    """JSON has no number for what is not one."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def default_runs() -> Path:
    """The shared table of published runs."""
    data = data_folder()
    return data / "tables" / "training_runs.csv"


def columns_of(runs: Sequence[Run]) -> tuple[Sizes, Conditions, Layouts]:
    """All runs under one another, each with its own workload and cluster."""
    ones = [1] * len(runs)
    layouts = [run.layouts for run in runs]
    stacked = {
        name: np.concatenate([layout.columns[name] for layout in layouts]) for name in layouts[0].columns
    }
    return (
        joined([Sizes.of(run.workload, frozen=run.frozen) for run in runs], ones),
        joined([Conditions.of(run.cluster, run.stack) for run in runs], ones),
        Layouts(stacked),
    )


def predicted_s(runs: Sequence[Run]) -> Seconds:
    """Predicted seconds of a step, a row a run."""
    return np.asarray(sum(parts_of(*columns_of(runs)).values()))


def kendall_tau(first: Seconds, second: Seconds) -> float:
    """Kendall's tau-b: agreement in order of all pairs, ties counted out; not a number where all are tied."""
    one, other = np.triu_indices(len(first), 1)
    a, b = np.sign(first[one] - first[other]), np.sign(second[one] - second[other])
    pairs = np.sqrt(float((a != 0).sum()) * float((b != 0).sum()))
    return float((a * b).sum() / pairs) if pairs else float("nan")


def score(runs: Sequence[Run], skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Tables and the summary, as plain values."""
    timed = [run for run in runs if run.seconds is not None and not run.oom]
    predicted = predicted_s(timed) if timed else np.zeros(0)
    measured = np.asarray([run.seconds for run in timed], dtype=np.float64)
    errors = np.abs(predicted / measured - 1)
    tables = {
        table: _table(rows, timed, predicted, measured)
        for table, rows in sorted(_positions(run.table for run in timed).items())
    }
    medians = [line["step_error_median"] for line in tables.values()]
    tail = [line["step_error_p90"] for line in tables.values()]
    memory = _memory(runs)
    counted = sum(run.countable for run in timed)
    countable = sum(skip.countable for skip in skipped)
    summary = {
        "rows": len(runs) + len(skipped),
        "predicted": len(timed),
        **_sweeps(timed, predicted, measured),
        "step_error_median": _quantile(medians, 0.5),
        "step_error_p90": _quantile(medians, 0.9),
        "step_error_p90_median_of_tables": _quantile(tail, 0.5),
        "step_error_median_pooled": _quantile(errors, 0.5),
        "step_error_p90_pooled": _quantile(errors, 0.9),
        **memory,
        "coverage": counted / (counted + countable) if counted else 0.0,
        "skipped": dict(Counter(skip.reason for skip in skipped).most_common()),
        "configs_per_minute": round(_speed(timed)) if timed else 0,
        "scaling": _scaling(timed, predicted, measured),
    }
    return {"tables": tables, "summary": summary}


def _memory(runs: Sequence[Run]) -> dict[str, Any]:
    """Error of the peak, median of per-table medians, where one is published; which out-of-memory runs were foreseen."""
    errors: dict[str, list[float]] = defaultdict(list)
    foreseen: list[bool] = []
    false_alarms: list[bool] = []
    for run in runs:
        if run.memory_gib is None and not run.oom:
            continue
        try:
            found = memory_of(run.workload, run.cluster, run.stack, run.layouts, frozen=run.frozen)
        except TrineError:
            continue
        if run.oom:
            foreseen.append(not bool(found.fits[0]))
            continue
        false_alarms.append(not bool(found.fits[0]))
        kinds = {"used": "peak_bytes", "reserved": "reserved_bytes", "allocated": "allocated_bytes"}
        peak = getattr(found, kinds[run.memory_is])
        errors[run.table].append(abs(float(peak[0]) / ((run.memory_gib or 0.0) * 2**30) - 1))
    medians = [float(np.median(values)) for values in errors.values()]
    return {
        "memory_error_median": _quantile(medians, 0.5),
        "memory_error_by_table": {table: _quantile(values, 0.5) for table, values in errors.items()},
        "oom_rows": len(foreseen),
        "oom_recall": float(np.mean(foreseen)) if foreseen else float("nan"),
        "oom_false_alarms": float(np.mean(false_alarms)) if false_alarms else float("nan"),
    }


def _positions(keys: Any) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        found[key].append(position)
    return found


def _quantile(values: Any, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else float("nan")


def _table(rows: list[int], runs: Sequence[Run], predicted: Seconds, measured: Seconds) -> dict[str, Any]:
    ratio = predicted[rows] / measured[rows]
    ordered = _order([runs[row] for row in rows], predicted[rows], measured[rows])
    return {
        "rows": len(rows),
        "stacks": sorted({runs[row].stack.name for row in rows}),
        "step_error_median": _quantile(np.abs(ratio - 1), 0.5),
        "step_error_p90": _quantile(np.abs(ratio - 1), 0.9),
        "bias": float(np.median(ratio) - 1),
        **ordered,
    }


def _order(runs: Sequence[Run], predicted: Seconds, measured: Seconds) -> dict[str, Any]:
    """Tau and regret over groups; not a number without any."""
    taus, regrets = [], []
    for rows in _positions(run.group for run in runs).values():
        ours, truth = _a_layout_once([runs[row] for row in rows], predicted[rows], measured[rows])
        if len(set(truth)) > 1:
            taus.append(kendall_tau(ours, truth))
            regrets.append(truth[np.argmin(ours)] / truth.min() - 1)
    known = [tau for tau in taus if not np.isnan(tau)]
    return {
        "groups": len(taus),
        "tau": float(np.mean(known)) if known else float("nan"),
        "regret": float(np.mean(regrets)) if regrets else float("nan"),
    }


def _a_layout_once(runs: Sequence[Run], predicted: Seconds, measured: Seconds) -> tuple[Seconds, Seconds]:
    """Predicted and measured seconds of a group, a layout once: one that is measured again counts with its mean."""
    same = _positions(
        (run.stack.name, *sorted(run.layout.items()), seconds)
        for run, seconds in zip(runs, predicted, strict=True)
    )
    return (
        np.asarray([predicted[rows[0]] for rows in same.values()]),
        np.asarray([measured[rows].mean() for rows in same.values()]),
    )


def _sweeps(runs: Sequence[Run], predicted: Seconds, measured: Seconds) -> dict[str, Any]:
    """Order within sweeps of layouts, of one node and of several: of the tables that sweep by measurement alone, if any."""
    sweeping = [position for position, run in enumerate(runs) if run.table.startswith("vtrain")]
    rows = sweeping or list(range(len(runs)))
    found: dict[str, Any] = {}
    for name, several in (("single", False), ("multi", True)):
        chosen = [row for row in rows if (runs[row].cluster.nodes > 1) == several]
        order = _order([runs[row] for row in chosen], predicted[chosen], measured[chosen])
        found |= {f"tau_{name}": order["tau"], f"regret_{name}": order["regret"]}
        found[f"groups_{name}"] = order["groups"]
    return found


def _scaling(runs: Sequence[Run], predicted: Seconds, measured: Seconds) -> list[dict[str, Any]]:
    """Runs of one model, stack and model-parallel layout on growing clusters: errors, and T = a·m + b of both."""
    counts = np.asarray([run.layout["microbatches"] for run in runs], dtype=np.float64)
    found = []
    for rows in _positions(_scaled(run) for run in runs).values():
        devices = {runs[row].devices for row in rows}
        if len(set(counts[rows])) >= 3 and len(devices) >= 3 and max(devices) >= 512:
            line = _line(counts[rows], predicted[rows], measured[rows])
            found.append(_named(runs[rows[0]], devices) | {"rows": len(rows)} | line)
    return found


def _scaled(run: Run) -> tuple[Any, ...]:
    """What runs have in common that differ in nothing but the cluster's size and the batch."""
    kept = ("tensor", "pipeline", "chunks", "context", "micro_batch", "precision")
    layout = tuple(run.layout[name] for name in kept)
    model = (run.workload.name, run.workload.sequence)
    return (run.table, run.stack.name, run.cluster.device.name, layout, model)


def _named(run: Run, devices: set[int]) -> dict[str, Any]:
    layout = run.layout
    return {
        "table": run.table,
        "stack": run.stack.name,
        "layout": f"tp{layout['tensor']} pp{layout['pipeline']} vpp{layout['chunks']}",
        "devices": [min(devices), max(devices)],
    }


def _line(counts: Seconds, predicted: Seconds, measured: Seconds) -> dict[str, Any]:
    """Errors of runs over their micro-batches, and the line through them as measured and as predicted."""
    error = predicted / measured - 1
    slope, intercept = np.polyfit(counts, measured, 1, w=1 / measured)
    our_slope, our_intercept = np.polyfit(counts, predicted, 1, w=1 / predicted)
    return {
        "worst_error": float(error[np.argmax(np.abs(error))]),
        "median_error": _quantile(np.abs(error), 0.5),
        "slope_s": [float(slope), float(our_slope)],
        "intercept_s": [float(intercept), float(our_intercept)],
        "intercept_error": float(our_intercept / intercept - 1),
    }


def _speed(runs: Sequence[Run]) -> float:
    """Layouts predicted a minute: many of one run's workload and cluster."""
    run = max(runs, key=lambda each: each.devices)
    count = 20_000
    generator = np.random.default_rng(0)
    layouts = Layouts.of(
        data=generator.integers(1, 65, count),
        tensor=2 ** generator.integers(0, 4, count),
        pipeline=2 ** generator.integers(0, 4, count),
        micro_batch=2 ** generator.integers(0, 4, count),
        microbatches=generator.integers(1, 65, count),
        recompute=generator.integers(0, 3, count),
    )
    start = time.perf_counter()
    predict(run.workload, run.cluster, run.stack, layouts)
    return count / (time.perf_counter() - start) * 60


# --- printing -----------------------------------------------------------------------------------------------------------


def _print(found: Mapping[str, Any]) -> None:
    print(f"{'table':34}{'rows':>6}{'median':>9}{'p90':>8}{'bias':>9}{'groups':>8}{'tau':>7}{'regret':>8}")
    for name, line in found["tables"].items():
        print(
            f"{name:34}{line['rows']:6}{line['step_error_median']:9.1%}{line['step_error_p90']:8.1%}{line['bias']:+9.1%}"
            f"{line['groups']:8}{_number(line['tau'], '7.2f')}{_number(line['regret'], '8.1%')}"
        )
    print("\nscaling: T = a·m + b over micro-batches m, measured and predicted")
    for line in found["summary"]["scaling"]:
        print(
            f"{line['stack']:20}{line['layout']:16}{line['devices'][0]:6}–{line['devices'][1]:<6} {line['rows']:3} rows  "
            f"worst {line['worst_error']:+.1%}  a {line['slope_s'][0]:.4f} {line['slope_s'][1]:.4f} s  "
            f"b {line['intercept_s'][0]:.3f} {line['intercept_s'][1]:.3f} s ({line['intercept_error']:+.0%})"
        )
    print()
    for name, value in found["summary"].items():
        if name == "skipped":
            for reason, count in value.items():
                print(f"skipped {count:5}  {reason}")
        elif name == "memory_error_by_table":
            for table, error in value.items():
                print(f"memory_error_median  {table:34}{error:.1%}")
        elif name == "near_all_peaks":
            for table, count in value.items():
                print(f"within {NEAR:.0%} of all peaks {count:5}  {table}")
        elif name != "scaling":
            print(f"{name:32}{_number(value, '.4g') if isinstance(value, float) else f'{value:,}'}")


def _number(value: float, form: str) -> str:
    """A number in a form such as ``7.2f``; a dash of the same width where nothing was there to compute it from."""
    if np.isnan(value):
        return "–".rjust(int(form.partition(".")[0] or 0))
    return f"{value:{form}}"


def _print_worst(runs: Sequence[Run], count: int) -> None:
    timed = [run for run in runs if run.seconds is not None and not run.oom]
    if not count or not timed:
        return
    ratio = predicted_s(timed) / np.asarray([run.seconds for run in timed], dtype=np.float64)
    print("\nfurthest off")
    for row in np.argsort(-np.abs(np.log(ratio)))[:count]:
        run = timed[row]
        print(f"{ratio[row] - 1:+8.1%}  {run.row:36}{run.stack.name:20}{', '.join(run.assumed)}")


if __name__ == "__main__":
    sys.exit(main())
