"""How far the planner's memory is from published peaks: a line a table, each predicted by constants of the others, too.

    python benchmarks/planner_memory.py [--runs FILE.csv] [--worst N] [--write] [--format text|json]

Each kind of software has two fitted scalars (``optim/plan/memory.toml``): the allocator's fragments as a
share of tensors, and fixed bytes. They are fitted robustly about a prior that is the same for every kind, so
a kind of which no table is left has the prior. The error is |predicted/published − 1|. Out-of-memory rows
count as predicted where the peak is above what the device gives; a false alarm is a row that ran and is
predicted not to. ``--write`` keeps the constants fitted on all tables.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from planner import default_runs
from planner_memory_rows import Case, fine_tuning, of_runs, recomputation, sharding, too_large
from planner_rows import Run, read_runs

from trine.optim.plan.constants import stacks
from trine.optim.plan.memory_traits import memory_traits
from trine.record.errors import TrineError

__all__ = ["fitted", "main", "of_memory", "shipped"]

TRAITS = Path(__file__).resolve().parents[1] / "optim" / "plan" / "memory.toml"
GIB = 2**30
#: Before any table is seen: fragments and fixed bytes, and how far a kind's may lie from them.
PRIOR, SPREAD = (0.07, 0.5e9), (0.03, 1.0e9)
#: Above this error a row counts as an outlier and pulls ever less.
_KNEE = 0.03

Constants = tuple[float, float]


def main(argv: list[str] | None = None) -> int:
    """Score and print; 2 where a file cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=None, help="a CSV file; by default the shared one")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="also the N rows furthest off")
    parser.add_argument("--write", action="store_true", help="write the constants fitted on all tables")
    options = parser.parse_args(argv)
    try:
        runs = read_runs(options.runs or default_runs())[0]
        cases = _cases(runs, shared=options.runs is None)
    except TrineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    tables = {
        "shipped": _lines(cases, dict.fromkeys({case.table for case in cases}, shipped())),
        "left out": _lines(
            cases, {table: left_out(cases, table) for table in {case.table for case in cases}}
        ),
        "ran": too_large(runs),
    }
    if options.format == "json":
        print(json.dumps({"constants": fitted(cases), "tables": tables}, indent=2))
    else:
        _print(tables, fitted(cases))
        _print_worst(cases, options.worst)
    if options.write:
        _write(cases)
    return 0


def _cases(runs: Sequence[Run], *, shared: bool) -> list[Case]:
    found = of_runs(runs)
    if shared:
        folder = default_runs().parent
        found += recomputation(folder / "korthikanti_2022_memory.csv")
        found += sharding(folder / "zero_memory.csv")
        found += fine_tuning(folder / "litgpt_finetune_memory.csv")
    return found


def shipped() -> dict[str, Constants]:
    """The package's constants by family of kinds."""
    kinds = {memory_traits(stack).family: memory_traits(stack) for stack in stacks().values()}
    return {kind: (traits.fragmentation, traits.fixed_bytes) for kind, traits in kinds.items()}


def fitted(cases: Sequence[Case]) -> dict[str, Constants]:
    """Constants of every kind from its cases, about the prior: robust least squares of relative errors."""
    return {kind: _fit([case for case in cases if case.kind == kind]) for kind in shipped()}


def left_out(cases: Sequence[Case], table: str) -> dict[str, Constants]:
    """Constants that a table had no part in. One that many kinds' runs are in takes all of them out."""
    return fitted([case for case in cases if case.table != table])


def _fit(cases: Sequence[Case]) -> Constants:
    known = [case for case in cases if case.measured is not None and case.counts != "tensors"]
    prior, spread = np.asarray(PRIOR), np.asarray(SPREAD)
    if not known:
        return PRIOR
    measured = np.asarray([case.measured for case in known], dtype=np.float64)
    rows = np.stack([[case.tensors for case in known], np.ones(len(known))], axis=1) / measured[:, None]
    wanted = 1 - np.asarray([case.predicted(0.0, 0.0) for case in known]) / measured
    found = prior.copy()
    for _ in range(60):
        weight = 1 / (_KNEE**2 * np.sqrt(1 + ((rows @ found - wanted) / _KNEE) ** 2))
        normal = rows.T @ (weight[:, None] * rows) + np.diag(spread**-2.0)
        found = np.linalg.solve(normal, rows.T @ (weight * wanted) + prior / spread**2)
    return max(float(found[0]), 0.0), max(float(found[1]), 0.0)


def spread_of(cases: Sequence[Case]) -> dict[str, float]:
    """Factors on a prediction between which nine of ten peaks lie, by constants of other tables; tables weigh alike."""
    known = [case for case in cases if case.measured and case.counts != "tensors"]
    tables = [case.table for case in known]
    constants = {table: left_out(cases, table) for table in set(tables)}
    ratio = np.asarray(
        [(case.measured or 0.0) / case.predicted(*constants[case.table][case.kind]) for case in known]
    )
    order = np.argsort(ratio)
    weight = np.cumsum(np.asarray([1 / tables.count(table) for table in tables])[order])
    low, high = (
        float(ratio[order][min(np.searchsorted(weight, share * weight[-1]), len(order) - 1)])
        for share in (0.05, 0.95)
    )
    return {"low": low, "high": high}


# --- scores -------------------------------------------------------------------------------------------------------------


def of_memory(cases: Sequence[Case], constants: Mapping[str, Constants]) -> dict[str, Any]:
    """Median and 90th percentile of errors, their bias, the share of out-of-memory rows that were predicted,
    and false alarms."""
    known = [case for case in cases if case.measured]
    ratio = np.asarray([case.predicted(*constants[case.kind]) / (case.measured or 1.0) for case in known])
    error = np.abs(ratio - 1)
    out = [case for case in cases if case.measured is None]
    alarms = [case for case in known if case.capacity and case.runs_out(*constants[case.kind])]
    return {
        "rows": len(cases),
        "median": float(np.median(error)) if len(error) else float("nan"),
        "p90": float(np.quantile(error, 0.9)) if len(error) else float("nan"),
        "bias": float(np.median(ratio) - 1) if len(error) else float("nan"),
        "oom": len(out),
        "oom_predicted": sum(case.runs_out(*constants[case.kind]) for case in out),
        "oom_missed": [case.name for case in out if not case.runs_out(*constants[case.kind])],
        "false_alarms": len(alarms),
    }


def _lines(cases: Sequence[Case], constants: Mapping[str, Mapping[str, Constants]]) -> dict[str, Any]:
    names = sorted(constants)
    return {
        name: of_memory([case for case in cases if case.table == name], constants[name]) for name in names
    }


def _print(tables: Mapping[str, Any], constants: Mapping[str, Constants]) -> None:
    for title, text in (
        ("shipped", "constants as the package has them"),
        ("left out", "each table predicted by constants of the others"),
    ):
        print(
            f"{text}\n{'table':30}{'rows':>6}{'median':>9}{'p90':>8}{'bias':>9}{'out of memory':>15}{'false alarms':>14}"
        )
        for name, line in tables[title].items():
            out = f"{line['oom_predicted']} of {line['oom']}" if line["oom"] else "-"
            print(
                f"{name:30}{line['rows']:6}{line['median']:9.1%}{line['p90']:8.1%}{line['bias']:+9.1%}{out:>15}"
                f"{line['false_alarms']:14}  {', '.join(line['oom_missed'])}"
            )
        print()
    print("runs that went, whether or not their memory is published, and how many are predicted not to fit")
    for name, line in tables["ran"].items():
        print(f"{name:36}{line['rows']:6}{line['too_large']:6}")
    total = {key: sum(line[key] for line in tables["ran"].values()) for key in ("rows", "too_large")}
    print(f"{'all':36}{total['rows']:6}{total['too_large']:6}\n")
    print("fitted on all tables")
    for kind, (fragmentation, fixed) in sorted(constants.items()):
        print(f"{kind:12} fragmentation {fragmentation:.3f}  fixed {fixed / GIB:.2f} GiB")


def _print_worst(cases: Sequence[Case], count: int) -> None:
    constants = shipped()
    known = [case for case in cases if case.measured]
    ratio = np.asarray([case.predicted(*constants[case.kind]) / (case.measured or 1.0) for case in known])
    for row in np.argsort(-np.abs(np.log(ratio)))[:count]:
        case = known[row]
        print(f"{ratio[row] - 1:+8.1%}  {case.table:30}{case.name:40}{(case.measured or 0) / GIB:8.2f} GiB")


def _write(cases: Sequence[Case]) -> None:
    """The two constants and their provenance, in place; the rest of the file is facts."""
    text = TRAITS.read_text(encoding="utf-8")
    for kind, (fragmentation, fixed) in fitted(cases).items():
        rows = sum(case.kind == kind and case.counts != "tensors" and bool(case.measured) for case in cases)
        source = f"fitted on {rows} published peaks" if rows else "no published peak: the prior of all kinds"
        start = text.index(f"[{kind}]")
        end = text.find("\n[", start) if "\n[" in text[start:] else len(text)
        section = text[start:end]
        for key, value in (
            ("fragmentation", f"{fragmentation:.3f}"),
            ("fixed_bytes", f"{fixed:.3g}"),
            ("provenance", f'"{source}"'),
        ):
            section = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", section)
        text = text[:start] + section + text[end:]
    for key, value in spread_of(cases).items():
        text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value:.2f}", text)
    TRAITS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
