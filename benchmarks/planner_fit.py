"""Fits the planner's constants to published runs, prints its cross-validation, and writes ``constants.toml``.

    python benchmarks/planner_fit.py [--runs FILE.csv] [--write] [--no-cross-validation]

What is minimised is a robust loss (pseudo-Huber) of log(predicted/measured), each table weighing as the tenth root of its rows, plus
each constant's distance from its prior in units of how far such constants may lie from it. A constant that no run tells
apart stays at its prior, and so do a family's and a network's with fewer than five runs. No network is fitted above its line
rate, no overlap above what was measured of kernels beside collectives. Cross-validation leaves one table out, fits on the
others from the priors on, and predicts it.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from planner import columns_of, default_runs, kendall_tau
from planner_rows import Run, read_runs

from trine.optim.plan import Layouts
from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.constants import DEVICE_CONSTANTS, NETWORK_CONSTANTS, STACK_CONSTANTS, stacks
from trine.optim.plan.network import Network
from trine.optim.plan.step import parts_of
from trine.optim.plan.waits import Waits, waits_of
from trine.record.errors import TrineError

__all__ = ["main"]

CONSTANTS = Path(__file__).resolve().parents[1] / "optim" / "plan" / "constants.toml"
Values = npt.NDArray[np.float64]

#: Prior and, in units of its logarithm, how far a constant may lie from it before that costs as much as an error of ``_KNEE``
#: in one table. The priors are what vendors' guides and microbenchmarks say; ``depth``'s is a tile's step along K in CUTLASS,
#: ``call_s``'s what published traces show of PyTorch's own call (``collective_calls.py`` prints it: 42 to 278 microseconds for an
#: all-reduce, 106 in Megatron on A100).
PRIORS: Mapping[str, tuple[float, float]] = {
    "matmul": (0.85, 0.1),
    "depth": (32.0, 1.0),
    "attention": (0.6, 0.3),
    "memory": (0.8, 0.15),
    "launch_s": (12e-6, 0.3),
    "call_s": (110e-6, 0.7),
    "skew_s": (60e-6, 1.0),
    "fp8": (0.7, 0.3),
    "inside_bandwidth": (0.95, 0.15),
    "inside_overlap": (0.2, 0.7),
    "between_bandwidth": (0.9, 0.4),
    "between_overlap": (0.2, 0.7),
    "compute": (1.0, 0.1),
    "microbatch_s": (1e-3, 1.0),
    "step_s": (0.03, 1.5),
    "exposed": (0.8, 0.4),
}
#: Above this error (as a logarithm) a run counts as an outlier and pulls ever less.
_KNEE = 0.05
#: How much more a table of one run weighs than a prior.
_SHARE = 8.0
_STEPS = 200
#: Runs below which a family or a network keeps its priors.
_FEWEST = 5
#: The slowest that computing beside a collective was seen to be (:mod:`trine.optim.plan.contention` quotes it).
_MOST_OVERLAP = 0.4


@dataclass(frozen=True, slots=True)
class Problem:
    """Runs in columns, and which constant of which owner each row takes."""

    runs: Sequence[Run]
    sizes: Sizes
    conditions: Conditions
    layouts: Layouts
    waits: Waits
    measured: Values
    weights: Values
    owners: Mapping[str, npt.NDArray[np.int64]]
    names: tuple[tuple[str, str], ...]
    parents: npt.NDArray[np.int64]
    least: Values
    most: Values

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Problem:
        sizes, conditions, layouts = columns_of(runs)
        names: list[tuple[str, str]] = []
        owners: dict[str, npt.NDArray[np.int64]] = {}
        for field in PRIORS:
            owner = [_owner(run, field) for run in runs]
            positions = {name: len(names) + place for place, name in enumerate(sorted(set(owner)))}
            names += [(field, name) for name in positions]
            owners[field] = np.asarray([positions[name] for name in owner])
        # A stack's constants are expected near its parent's, where the parent has runs.
        place = {name: position for position, name in enumerate(names)}
        parents = [
            place.get((field, stacks()[name].parent) if field in STACK_CONSTANTS else (field, name), position)
            for position, (field, name) in enumerate(names)
        ]
        bounds = [_bounds(runs, field, name) for field, name in names]
        tables = [run.table for run in runs]
        counts = {table: tables.count(table) for table in tables}
        return cls(
            runs=runs,
            sizes=sizes,
            conditions=conditions,
            layouts=layouts,
            waits=waits_of(sizes, conditions, layouts),
            measured=np.asarray([run.seconds for run in runs], dtype=np.float64),
            weights=np.asarray([_SHARE * counts[table] ** -0.9 for table in tables]) ** 0.5,
            owners=owners,
            names=tuple(names),
            parents=np.asarray(parents),
            least=np.log([least for least, _ in bounds]),
            most=np.log([most for _, most in bounds]),
        )

    def prior(self, theta: Values) -> Values:
        """Logarithms that constants are expected near: of :data:`PRIORS`, or their parents' own."""
        own = np.asarray([np.log(PRIORS[field][0]) for field, _ in self.names])
        return np.where(self.parents == np.arange(len(theta)), own, theta[self.parents])

    def log_ratio(self, theta: Values) -> Values:
        """log(predicted/measured) with these logarithms of constants."""
        return self._log_ratio({field: theta[owner] for field, owner in self.owners.items()})

    def _log_ratio(self, rows: Mapping[str, Values]) -> Values:
        changed = {field: np.exp(value) for field, value in rows.items()}
        parts = parts_of(self.sizes, replace(self.conditions, **changed), self.layouts, self.waits)
        return np.asarray(np.log(sum(parts.values()) / self.measured))

    def jacobian(self, theta: Values, at: Values) -> Values:
        """Of :meth:`log_ratio`. A row depends on one owner a field, so one evaluation a field tells all its owners' columns."""
        rows = {field: theta[owner] for field, owner in self.owners.items()}
        found = np.zeros((len(at), len(theta)))
        for field, owner in self.owners.items():
            moved = self._log_ratio({**rows, field: rows[field] + 1e-4})
            found[np.arange(len(at)), owner] += (moved - at) / 1e-4
        return found


def _owner(run: Run, field: str) -> str:
    if field.startswith("inside_"):
        return run.cluster.inside.kind if run.cluster.inside else "none"
    if field.startswith("between_"):
        return run.cluster.between.kind if run.cluster.between else "none"
    return run.stack.name if field in STACK_CONSTANTS else run.cluster.device.family


def _bounds(runs: Sequence[Run], field: str, name: str) -> tuple[float, float]:
    """Between which a constant may lie: what is physical, and its prior alone where too few runs tell."""
    own = [run for run in runs if _owner(run, field) == name]
    prior = PRIORS[field][0]
    if field in STACK_CONSTANTS:
        # Without ZeRO 3's gathers it is a share.
        is_share = field == "exposed" and all(run.layout["zero_stage"] < 3 for run in own)
        return 1e-9, 1.0 if is_share else np.inf
    if len(own) < _FEWEST:
        return prior, prior
    if field.endswith("_overlap"):
        return 1e-9, _MOST_OVERLAP
    if field.endswith("_bandwidth"):
        side = field.partition("_")[0]
        networks = [Network.of(run.cluster) for run in own]
        return 1e-9, 1 / max(getattr(each, f"{side}_constants").bandwidth_efficiency for each in networks)
    return 1e-9, np.inf


def fit(problem: Problem, start: Values, included: npt.NDArray[np.bool_], steps: int = _STEPS) -> Values:
    """Levenberg–Marquardt on the included rows, reweighted for the robust loss; constants at a bound stay where it holds them.

    Raises ``RuntimeError`` where it has not converged.
    """
    spread = np.asarray([PRIORS[field][1] for field, _ in problem.names])

    def loss(theta: Values, ratio: Values) -> float:
        robust = _KNEE**2 * (np.sqrt(1 + (ratio / _KNEE) ** 2) - 1)
        far = (theta - problem.prior(theta)) / spread
        return float((problem.weights**2 * robust)[included].sum() + 0.5 * _KNEE**2 * (far**2).sum())

    theta, damping = np.clip(start, problem.least, problem.most), 1e-2
    ratio = problem.log_ratio(theta)
    cost = loss(theta, ratio)
    for _ in range(steps):
        jacobian = problem.jacobian(theta, ratio)[included]
        weight = (problem.weights**2 / np.sqrt(1 + (ratio / _KNEE) ** 2))[included]
        normal = jacobian.T @ (weight[:, None] * jacobian) + np.diag((_KNEE / spread) ** 2)
        gradient = jacobian.T @ (weight * ratio[included]) + (_KNEE / spread) ** 2 * (
            theta - problem.prior(theta)
        )
        free = ~(((theta <= problem.least) & (gradient > 0)) | ((theta >= problem.most) & (gradient < 0)))
        normal, gradient = normal[np.ix_(free, free)], gradient[free]
        for _ in range(12):
            move = np.zeros(len(theta))
            move[free] = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial = np.clip(theta + np.clip(move, -1.0, 1.0), problem.least, problem.most)
            trial_ratio = problem.log_ratio(trial)
            trial_cost = loss(trial, trial_ratio)
            if trial_cost < cost:
                break
            damping *= 4
        else:
            return theta
        done = cost - trial_cost < 1e-6 * cost
        theta, ratio, cost, damping = trial, trial_ratio, trial_cost, max(damping / 3, 1e-7)
        if done:
            return theta
    raise RuntimeError(f"the fit has not converged in {steps} steps")


def main(argv: list[str] | None = None) -> int:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=None, help="a CSV file; by default the shared one")
    parser.add_argument("--write", action="store_true", help="write constants.toml")
    parser.add_argument("--no-cross-validation", action="store_true")
    options = parser.parse_args(argv)
    try:
        runs, _ = read_runs(options.runs or default_runs())
    except TrineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    problem = Problem.of([run for run in runs if run.seconds is not None and not run.oom])
    start = np.asarray([np.log(PRIORS[field][0]) for field, _ in problem.names])
    everything = np.ones(len(problem.runs), dtype=bool)
    theta = fit(problem, start, everything)
    _print_constants(problem, theta)
    _print_errors("fitted on all tables", problem, problem.log_ratio(theta))
    factors = None
    if not options.no_cross_validation:
        left_out = cross_validated(problem, start)
        _print_errors("each table predicted by constants of the others", problem, left_out)
        factors = _spread(problem, left_out)
    if options.write:
        write(problem, theta, factors)
    return 0


def cross_validated(problem: Problem, start: Values) -> Values:
    """log(predicted/measured) of every row by constants that its table had no part in."""
    found = np.zeros(len(problem.runs))
    tables = np.asarray([run.table for run in problem.runs])
    for table in sorted(set(tables)):
        included = tables != table
        fitted = fit(problem, start, included)
        found[~included] = problem.log_ratio(fitted)[~included]
    return found


def _spread(problem: Problem, ratio: Values) -> tuple[float, float]:
    """Factors between which nine of ten measured times lie, tables weighing alike."""
    order = np.argsort(-ratio)
    weight = np.cumsum((problem.weights ** (20 / 9))[order])
    low = -ratio[order][np.searchsorted(weight, 0.05 * weight[-1])]
    high = -ratio[order][min(np.searchsorted(weight, 0.95 * weight[-1]), len(order) - 1)]
    return float(np.exp(low)), float(np.exp(high))


def _print_constants(problem: Problem, theta: Values) -> None:
    for field in PRIORS:
        values = [
            f"{name} {np.exp(value):.4g}"
            for (own, name), value in zip(problem.names, theta, strict=True)
            if own == field
        ]
        print(f"{field:20}{'  '.join(values)}")


def _print_errors(title: str, problem: Problem, ratio: Values) -> None:
    print(f"\n{title}\n{'table':34}{'rows':>6}{'median':>9}{'p90':>8}{'bias':>9}{'tau':>7}{'regret':>8}")
    tables = np.asarray([run.table for run in problem.runs])
    medians = []
    for table in sorted(set(tables)):
        chosen = np.flatnonzero(tables == table)
        error = np.abs(np.expm1(ratio[chosen]))
        medians.append(float(np.median(error)))
        tau, regret = _order(problem, chosen, ratio)
        print(
            f"{table:34}{len(chosen):6}{medians[-1]:9.1%}{np.quantile(error, 0.9):8.1%}"
            f"{np.expm1(np.median(ratio[chosen])):+9.1%}{tau:7.2f}{regret:8.1%}"
        )
    print(
        f"{'median of tables':34}{'':6}{np.median(medians):9.1%}   p90 of tables {np.quantile(medians, 0.9):.1%}"
    )


def _order(problem: Problem, chosen: npt.NDArray[np.int64], ratio: Values) -> tuple[float, float]:
    groups: dict[Any, list[int]] = {}
    for row in chosen:
        groups.setdefault(problem.runs[row].group, []).append(int(row))
    predicted = problem.measured * np.exp(ratio)
    taus, regrets = [], []
    for rows in groups.values():
        if len(rows) > 1:
            taus.append(kendall_tau(predicted[rows], problem.measured[rows]))
            best = problem.measured[rows]
            regrets.append(best[np.argmin(predicted[rows])] / best.min() - 1)
    known = [tau for tau in taus if not np.isnan(tau)]
    return (
        float(np.mean(known)) if known else float("nan"),
        float(np.mean(regrets)) if regrets else float("nan"),
    )


# --- the file -----------------------------------------------------------------------------------------------------------


def write(problem: Problem, theta: Values, factors: tuple[float, float] | None) -> None:
    """``constants.toml`` anew: fitted values in place of those it had, and where each comes from."""
    content = tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))
    for (field, name), value in zip(problem.names, theta, strict=True):
        kind, plain = _place(field)
        if name in content[kind]:
            content[kind][name][plain] = float(f"{np.exp(value):.4g}")
            content[kind][name]["provenance"] = _provenance(problem, field, name)
    if factors is not None:
        content["spread"] = {"low": round(factors[0], 3), "high": round(factors[1], 3)}
    lines = ["# Written by benchmarks/planner_fit.py. What the names mean: constants.py."]
    for kind, owners in content.items():
        tables = (
            {kind: owners}
            if kind == "spread"
            else {f"{kind}.{name}": table for name, table in owners.items()}
        )
        for title, table in tables.items():
            lines += ["", f"[{title}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    CONSTANTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _provenance(problem: Problem, field: str, name: str) -> str:
    """On how many runs a constant was fitted; of a stack's also on which families, since it is carried over to all others."""
    mine = problem.owners[field] == problem.names.index((field, name))
    own = [run for run, is_mine in zip(problem.runs, mine, strict=True) if is_mine]
    if field not in STACK_CONSTANTS:
        if len(own) < _FEWEST:
            return f"the fit's priors: {len(own)} published runs are too few"
        return f"fitted on {len(own)} published runs"
    families = Counter(run.cluster.device.family for run in own)
    return f"fitted on {len(own)} published runs ({', '.join(f'{family} {count}' for family, count in families.most_common())})"


def _place(field: str) -> tuple[str, str]:
    if field.startswith(("inside_", "between_")):
        return "network", field.partition("_")[2]
    return ("stack" if field in STACK_CONSTANTS else "device"), field


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return repr(value)


assert set(DEVICE_CONSTANTS) | {
    f"{side}_{name}" for side in ("inside", "between") for name in NETWORK_CONSTANTS
} | set(STACK_CONSTANTS) == set(PRIORS)

if __name__ == "__main__":
    sys.exit(main())
