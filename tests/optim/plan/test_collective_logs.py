"""All-reduce times against published logs of nccl-tests, scored as ``benchmarks/planner_collectives.py`` does."""

from pathlib import Path

import numpy as np
import planner_collectives
import pytest


def machine_of(name: str) -> planner_collectives.Machine:
    return next(machine for machine in planner_collectives.MACHINES if machine.name == name)


@pytest.mark.parametrize(
    ("name", "most"), [("V100, one node", 1.06), ("A100, one node", 1.10), ("H100, one node", 1.08)]
)
def test_shipped_constants_meet_one_node(tables: Path, name: str, most: float) -> None:
    machine = machine_of(name)
    logs = planner_collectives.read_logs(tables / "nccl_collectives.csv", machine)
    assert len(logs.seconds) > 10
    assert np.exp(planner_collectives.ratios(machine, logs).mean()) < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts"), [("A100, 200 Gb/s each", (16, 32, 128)), ("A100, one node", (2, 8))]
)
def test_a_rank_count_that_the_fit_never_saw_is_met(tables: Path, name: str, counts: tuple[int, ...]) -> None:
    machine = machine_of(name)
    logs = planner_collectives.read_logs(tables / "nccl_collectives.csv", machine)
    assert set(counts) <= set(np.unique(logs.ranks))
    for count in counts:
        left = logs.ranks == count
        constants = planner_collectives.fit(machine, logs.where(~left))
        assert np.exp(planner_collectives.ratios(machine, logs.where(left), constants).mean()) < 1.15
