"""All-reduce times against published logs of nccl-tests, scored as ``benchmarks/planner_collectives.py`` does."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "planner_collectives.py"


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planner_collectives", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def machine_of(benchmark: ModuleType, name: str):  # type: ignore[no-untyped-def]
    return next(machine for machine in benchmark.MACHINES if machine.name == name)


@pytest.mark.parametrize(
    ("name", "most"), [("V100, one node", 1.06), ("A100, one node", 1.10), ("H100, one node", 1.08)]
)
def test_shipped_constants_meet_one_node(
    tables: Path, benchmark_module: ModuleType, name: str, most: float
) -> None:
    machine = machine_of(benchmark_module, name)
    logs = benchmark_module.read_logs(tables / "nccl_collectives.csv", machine)
    assert len(logs.seconds) > 10
    assert np.exp(benchmark_module.ratios(machine, logs).mean()) < most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts"), [("A100, 200 Gb/s each", (16, 32, 128)), ("A100, one node", (2, 8))]
)
def test_a_rank_count_that_the_fit_never_saw_is_met(
    tables: Path, benchmark_module: ModuleType, name: str, counts: tuple[int, ...]
) -> None:
    machine = machine_of(benchmark_module, name)
    logs = benchmark_module.read_logs(tables / "nccl_collectives.csv", machine)
    assert set(counts) <= set(np.unique(logs.ranks))
    for count in counts:
        left = logs.ranks == count
        constants = benchmark_module.fit(machine, logs.where(~left))
        assert np.exp(benchmark_module.ratios(machine, logs.where(left), constants).mean()) < 1.15
