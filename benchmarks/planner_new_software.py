"""How far predictions lie from runs of software that no constant was fitted on.

    python benchmarks/planner_new_software.py [--runs FILE.csv]

The cross-validation of ``planner_fit.py`` leaves a table out and predicts it; the interval of all predictions is that of all
tables. Here are the tables all of whose software no other table has: their constants are priors, or a parent's, as those of a
stack are that no published run declares. Nine of ten of their runs took between the two factors that the last lines print, beside
those of all tables; tables count alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from planner import default_runs
from planner_fit import PRIORS, Problem, Values, cross_validated
from planner_fit import _spread as spread_of
from planner_rows import Run, read_runs

from trine.record.errors import TrineError

__all__ = ["main", "tables_of_new_software"]


def tables_of_new_software(runs: Sequence[Run]) -> list[str]:
    """Tables whose every stack is theirs alone."""
    tables_by_stack: dict[str, set[str]] = {}
    for run in runs:
        tables_by_stack.setdefault(run.stack.name, set()).add(run.table)
    shared = {table for tables in tables_by_stack.values() if len(tables) > 1 for table in tables}
    return sorted({run.table for run in runs} - shared)


def main(arguments: list[str] | None = None) -> int:
    """Cross-validate, and print those tables. 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, metavar="FILE.csv")
    options = parser.parse_args(arguments)
    try:
        runs, _ = read_runs(options.runs or default_runs())
    except TrineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    timed = [run for run in runs if run.seconds is not None and not run.oom]
    problem = Problem.of(timed)
    start = np.asarray([np.log(PRIORS[field][0]) for field, _ in problem.names])
    _print(problem, cross_validated(problem, start), tables_of_new_software(timed))
    return 0


def _print(problem: Problem, ratio: Values, chosen: list[str]) -> None:
    tables = np.asarray([run.table for run in problem.runs])
    print(f"{'table':34}{'rows':>6}{'median error':>14}{'bias':>9}  software")
    for table in chosen:
        own = ratio[tables == table]
        stacks = sorted({run.stack.name for run in problem.runs if run.table == table})
        print(
            f"{table:34}{len(own):6}{np.median(np.abs(np.expm1(own))):14.1%}{np.expm1(np.median(own)):+9.1%}  {', '.join(stacks)}"
        )
    among = np.isin(tables, chosen)
    for title, rows in ((f"these {len(chosen)} tables", among), ("all tables", np.ones_like(among))):
        low, high = spread_of(replace(problem, weights=problem.weights[rows]), ratio[rows])
        print(f"nine of ten runs of {title}: {low:.3f} to {high:.3f} times the prediction")


if __name__ == "__main__":
    sys.exit(main())
