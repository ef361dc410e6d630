"""Copies of a real job with clocks of their own, as ``benchmarks/many_ranks.py`` makes them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import trine
from trine.analyzers import Analysis

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "many_ranks.py"
RANKS = 24


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("many_ranks_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_copy_gets_its_clock_back(benchmark: ModuleType, data: Path, tmp_path: Path) -> None:
    """Four ranks copied six times: the same waits in every copy, and offsets as they were set."""
    folder = data / "traces" / "kineto" / "torchrec_straggler_v100"
    sources = benchmark.read_sources(folder)
    for rank in range(RANKS):
        benchmark.write_rank(sources[rank % 4], tmp_path / f"rank{rank}.json.gz", rank, RANKS)
    analysis = trine.analyze(trine.load(tmp_path), steps="all", workers=2)
    assert len(analysis.ranks) == RANKS and analysis.source.missing_ranks == ()
    for rank in analysis.ranks:
        assert rank.communication is not None and rank.communication.matched > 0
        set_ns = benchmark.shift_of(rank.rank) - benchmark.shift_of(0)
        assert rank.clock_offset_ns == pytest.approx(-set_ns, abs=100_000)
    # Each waits as long as the rank that it is a copy of; and copies enter together, so none is blamed.
    original = trine.analyze(trine.load(folder), steps="all")
    assert sorted(waits(analysis)) == sorted(6 * waits(original))
    assert all(r.communication is not None and r.communication.lateness_ns < 1000 for r in analysis.ranks)


def waits(analysis: Analysis) -> list[int]:
    return [rank.communication.wait_ns for rank in analysis.ranks if rank.communication is not None]


@pytest.mark.slow
@pytest.mark.timing
def test_the_benchmark_prints_its_table(data: Path) -> None:
    traces = data / "traces" / "kineto" / "torchrec_straggler_v100"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--traces", str(traces), "--ranks", "4", "16", "--workers", "2"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["ranks", "4", "16"]
    # A worker reads rank after rank: four times the ranks are no more memory.
    times = float(lines[-1].split("a worker takes ")[1].split()[0])
    assert times < 1.3
