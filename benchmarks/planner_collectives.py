"""How far the planner's all-reduce times are from published logs of nccl-tests, a node count left out.

    python benchmarks/planner_collectives.py [--format json]

For each set of logs of one machine, its scalars are fitted on all rank counts but one and the left-out count is predicted:
bandwidth efficiency and a factor on latencies (of hops between nodes, of starting inside one) and, inside a node, what the ends
of a ring cost. Then the constants the package ships are scored on every log. Sizes from 64 KB to 4 GB.
Columns: geometric mean and 90th percentile of the ratio between predicted and measured, whichever is larger over the other.
Logs are read from ``$TRINE_TEST_DATA/tables/nccl_collectives.csv``, else from ``../shared/data``.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from data_folder import data_folder

from trine.optim.plan.cluster import Link
from trine.optim.plan.collectives import LINK_CONSTANTS, LinkConstants, Network, all_reduce_s
from trine.optim.plan.nccl import Floats
from trine.optim.plan.units import Bandwidth
from trine.record.errors import UsageError

BANDS = (("64 KB-1 MB", 2**16, 2**20), ("1 MB-32 MB", 2**20, 2**25), ("32 MB-4 GB", 2**25, 2**32 + 1))
#: The fit looks at a coarse grid, then around its best at a finer one.
EFFICIENCIES, FACTORS = np.arange(0.40, 0.99, 0.03), np.geomspace(0.5, 6.0, 14)
TURNS = np.linspace(0, 1, 6)
AROUND = np.linspace(-1, 1, 9)


@dataclass(frozen=True, slots=True)
class Machine:
    """Whose logs these are: what marks its rows, and its links as datasheets have them."""

    name: str
    words: tuple[str, ...]
    network: Network
    several_nodes: bool = False


def _network(family: str, inside: float, between: float, *, reduces: bool = False) -> Network:
    link = Link(Bandwidth.gigabytes_per_s(inside), in_switch=reduces)
    network = Link(Bandwidth.gigabytes_per_s(between), kind="infiniband")
    return Network(8, family, link, network, _inside(family), LINK_CONSTANTS["infiniband"])


def _inside(family: str) -> LinkConstants:
    return LINK_CONSTANTS.get(f"nvlink/{family}") or LINK_CONSTANTS["nvlink"]


MACHINES = (
    Machine("A100, 200 Gb/s each", ("A100-SXM4-40GB",), _network("ampere", 300, 25), several_nodes=True),
    Machine("A100, one node", ("A100 single node", "A100-SXM4-40GB"), _network("ampere", 300, 25)),
    Machine("V100, one node", ("V100 single node",), _network("volta", 150, 12.5)),
    Machine("H100, one node", ("H100-SXM",), _network("hopper", 450, 50, reduces=True)),
)


@dataclass(frozen=True, slots=True)
class Logs:
    """Columns of one machine's logs."""

    size_bytes: Floats
    ranks: Floats
    nodes: Floats
    seconds: Floats

    def where(self, mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Logs:
        """These rows."""
        return Logs(self.size_bytes[mask], self.ranks[mask], self.nodes[mask], self.seconds[mask])


def read_logs(path: Path, machine: Machine) -> Logs:
    """All rows of a machine that say a size and a time, from 64 KB to 4 GB."""
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not any(row["hardware"].startswith(word) for word in machine.words):
                continue
            if row["collective"] != "all_reduce" or not row["bytes"].isdigit() or not row["time_us"]:
                continue
            several = int(row["n_nodes"]) > 1
            if several == machine.several_nodes and 2**16 <= int(row["bytes"]) <= 2**32:
                found.append([float(row[name]) for name in ("bytes", "n_ranks", "n_nodes", "time_us")])
    columns = np.asarray(found).reshape(-1, 4).T
    return Logs(columns[0], columns[1], columns[2], columns[3] * 1e-6)


def predicted(machine: Machine, logs: Logs, constants: LinkConstants | None = None) -> Floats:
    """Seconds, with these constants on the link that governs, or with the package's."""
    network = machine.network
    if constants is not None:
        network = (
            network.with_constants(between=constants)
            if machine.several_nodes
            else network.with_constants(inside=constants)
        )
    return all_reduce_s(network, logs.size_bytes, logs.ranks, np.ceil(logs.ranks / logs.nodes))


def ratios(machine: Machine, logs: Logs, constants: LinkConstants | None = None) -> Floats:
    """|ln(predicted / measured)|."""
    return np.asarray(np.abs(np.log(predicted(machine, logs, constants) / logs.seconds)))


def _latency(machine: Machine) -> str:
    """Which latency differs from the tuner's."""
    return "latency_factor" if machine.several_nodes else "start_factor"


def fit(machine: Machine, logs: Logs) -> LinkConstants:
    """The scalars with the least mean |ln ratio|, on a grid and then on a finer one around its best.

    What the ends of a ring cost shows beside other rank counts alone, and inside a node alone, where rings are short.
    """
    shipped = machine.network.between_constants if machine.several_nodes else machine.network.inside_constants
    latency = _latency(machine)
    turns = TURNS if not machine.several_nodes and len(np.unique(logs.ranks)) > 1 else TURNS[:1]

    def best(efficiencies: Floats, factors: Floats, turns: Floats) -> LinkConstants:
        candidates = (
            replace(shipped, bandwidth_efficiency=efficiency, turn_share=turn, **{latency: factor})
            for efficiency, factor, turn in product(efficiencies.tolist(), factors.tolist(), turns.tolist())
        )
        return min(candidates, key=lambda constants: float(ratios(machine, logs, constants).mean()))

    coarse = best(EFFICIENCIES, FACTORS, turns)
    return best(
        np.clip(coarse.bandwidth_efficiency + 0.03 * AROUND, 0.01, 1.0),
        getattr(coarse, latency) * (FACTORS[1] / FACTORS[0]) ** AROUND,
        np.unique(np.clip(coarse.turn_share + 0.2 * AROUND[::2], 0.0, 1.0)) if len(turns) > 1 else turns,
    )


def _scored(machine: Machine, logs: Logs, label: str, constants: LinkConstants | None) -> dict[str, object]:
    errors = ratios(machine, logs, constants)
    row: dict[str, object] = {"machine": machine.name, "left_out": label, "rows": len(errors)}
    if constants is not None:
        row |= {"efficiency": constants.bandwidth_efficiency, "turn_share": constants.turn_share}
        row |= {"factor": getattr(constants, _latency(machine))}
    row |= {
        "geometric_mean": float(np.exp(errors.mean())),
        "p90": float(np.exp(np.quantile(errors, 0.9))),
    }
    for name, low, high in BANDS:
        band = errors[(logs.size_bytes >= low) & (logs.size_bytes < high)]
        row[name] = float(np.exp(band.mean())) if len(band) else None
    return row


def rows_of(path: Path) -> list[dict[str, object]]:
    """A row a machine and left-out rank count, then one a machine with the constants that the package ships."""
    rows = []
    for machine in MACHINES:
        logs = read_logs(path, machine)
        counts = np.unique(logs.ranks)
        for count in counts if len(counts) > 2 else ():
            left = logs.ranks == count
            rows.append(
                _scored(machine, logs.where(left), f"{count:g} ranks", fit(machine, logs.where(~left)))
            )
        everything = fit(machine, logs)
        rows.append(_scored(machine, logs, "nothing", everything))
        rows.append(_scored(machine, logs, "shipped constants", None))
        rows[-1]["constants"] = asdict(
            machine.network.between_constants if machine.several_nodes else machine.network.inside_constants
        )
    return rows


def _printed(rows: list[dict[str, object]]) -> None:
    bands = "".join(f"{name:>13}" for name, _, _ in BANDS)
    print(
        f"{'logs':<21}{'left out':<19}{'rows':>5}{'efficiency':>12}{'latency ×':>11}{'turn':>6}{'mean':>7}{'p90':>7}"
        f"{bands}"
    )
    for row in rows:
        fitted = (
            f"{row['efficiency']:>12.2f}{row['factor']:>11.2f}{row['turn_share']:>6.2f}"
            if "efficiency" in row
            else " " * 29
        )
        cells = "".join(f"{row[name]:>13.2f}" if row[name] is not None else " " * 13 for name, _, _ in BANDS)
        print(
            f"{row['machine']:<21}{row['left_out']:<19}{row['rows']:>5}{fitted}"
            f"{row['geometric_mean']:>7.3f}{row['p90']:>7.2f}{cells}"
        )


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    given = parser.parse_args()
    data = data_folder()
    path = data / "tables" / "nccl_collectives.csv"
    if not path.exists():
        raise UsageError(
            f"no logs: {path} is not there; set TRINE_TEST_DATA to the folder that holds tables/"
        )
    rows = rows_of(path)
    if given.format == "json":
        print(json.dumps(rows, indent=2))
    else:
        _printed(rows)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"planner_collectives: {error}")
