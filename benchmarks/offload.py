"""Training state off the device: what a disk-backed step costs one after the other and overlapped, and whether bytes are as planned.

    python benchmarks/offload.py [--mib 96] [--tile 8] [--steps 8] [--path FOLDER]

AdamW's fused step over a model of so many MiB, side by side in one run: in memory, in tiles, and with the state on disk
under FOLDER, serial and overlapped. All of them must end with the same bits, and overlapped must not be slower than serial:
the ways take turns, and what counts is the median over rounds of the ratio of the two. Then bytes on each tier, measured in
the run, against the plan that was printed before it: 1 where one is off by more than 5 %, and where any of this does not hold.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Bytes", "Run", "bytes_beside_plan", "main", "overlapped_to_serial", "step_times"]

#: Of a square layer: 4 MiB of fp32.
WIDTH = 1024
TOLERANCE = 0.05
SERIAL, OVERLAPPED = "on disk, serial", "on disk, overlapped"


@dataclass(frozen=True)
class Run:
    """One way of stepping."""

    name: str
    step_s: float  # median
    buffer_bytes: float
    wait_s: float  # a step waited for transfers
    same_bits: bool
    times_s: tuple[float, ...] = ()  # of each round, in which every way has its turn


@dataclass(frozen=True)
class Bytes:
    """A tier of a configuration, planned and measured."""

    name: str
    tier: str
    planned: float
    measured: float

    @property
    def holds(self) -> bool:
        """Within 5 % of the plan."""
        return abs(self.measured - self.planned) <= TOLERANCE * self.planned


class _Trained:
    """A run whose optimizer's step is timed. ``metrics`` are those of the last step."""

    def __init__(self, changes: Mapping[str, Any], mib: float) -> None:
        import torch

        import trine

        torch.manual_seed(0)
        layers = max(2, round(mib / 4))
        self.model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.times_s: list[float] = []
        began = [0.0]
        optimizer.register_step_pre_hook(lambda *_: began.__setitem__(0, time.perf_counter()))
        self.engine = trine.optimize(
            self.model, optimizer, trine.Config().with_changes(changes), loss_fn=_squares
        )
        optimizer.register_step_post_hook(lambda *_: self.times_s.append(time.perf_counter() - began[0]))
        self.metrics: dict[str, float] = {}

    def step(self, number: int) -> None:
        import torch

        from trine.record import events

        def listen(kind: str, values: dict[str, Any]) -> None:
            if kind == "metric":
                self.metrics[values["name"]] = values["value"]

        stop = events.listen(listen)
        try:
            generator = torch.Generator().manual_seed(number)
            self.engine.train_step(torch.randn(1, WIDTH, generator=generator))
        finally:
            stop()


def _squares(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def step_times(folder: str, mib: float = 96, tile_mib: float = 8, steps: int = 8) -> list[Run]:
    """Median time of the optimizer's step each way, alternated in one process, and whether all end with the same bits."""
    import torch

    disk = {"offload.optimizer": "nvme", "offload.path": folder, "offload.tile_mib": tile_mib}
    ways = {
        "in memory": {},
        "in tiles": {"offload.tile_mib": tile_mib},
        SERIAL: {**disk, "offload.overlap": False},
        OVERLAPPED: disk,
    }
    runs = {name: _Trained(changes, mib) for name, changes in ways.items()}
    try:
        for number in range(steps + 1):  # the first makes the state
            for run in runs.values():
                run.step(number)
        first = list(runs["in memory"].model.parameters())
        return [
            Run(
                name,
                statistics.median(run.times_s[1:]),
                run.metrics.get("offload/cpu_bytes", 0.0),
                run.metrics.get("offload/wait_ns", 0.0) / 1e9,
                all(torch.equal(a, b) for a, b in zip(first, run.model.parameters(), strict=True)),
                tuple(run.times_s[1:]),
            )
            for name, run in runs.items()
        ]
    finally:
        for run in runs.values():
            run.engine.close()


def overlapped_to_serial(runs: Sequence[Run]) -> float:
    """Median over rounds of the time of an overlapped step over that of the serial one beside it; below 1 it gains."""
    times = {run.name: run.times_s for run in runs}
    return statistics.median(
        overlapped / serial for overlapped, serial in zip(times[OVERLAPPED], times[SERIAL], strict=True)
    )


def bytes_beside_plan(folder: str, mib: float = 48, tile_mib: float = 2, steps: int = 2) -> list[Bytes]:
    """Of several configurations and each tier: bytes of the plan's own words, and measured in the last step."""
    size = mib * 2**20
    ways: dict[str, dict[str, Any]] = {
        "optimizer on the cpu": {"offload.optimizer": "cpu", "offload.tile_mib": tile_mib},
        "optimizer on disk": {
            "offload.optimizer": "nvme",
            "offload.path": folder,
            "offload.tile_mib": tile_mib,
        },
        "all on disk": {
            "offload.optimizer": "nvme",
            "offload.parameters": "nvme",
            "offload.path": folder,
            "offload.tile_mib": tile_mib,
        },
        "by heat": {
            "offload.optimizer": "auto",
            "offload.parameters": "auto",
            "offload.path": folder,
            "offload.device_bytes": int(1.5 * size),
            "offload.cpu_bytes": int(1.5 * size),
            "offload.tile_mib": tile_mib,
        },
    }
    found = []
    for name, changes in ways.items():
        run = _Trained(changes, mib)
        try:
            for number in range(steps):
                run.step(number)
        finally:
            run.engine.close()
        plan = {effect.key: effect.after for effect in run.engine.effects}
        for tier, metric in (("device", "device_bytes"), ("host", "cpu_bytes"), ("disk", "disk_bytes")):
            planned = _planned(plan.get(f"offload plan, {tier}", ""))
            measured = run.metrics[f"offload/{metric}"]
            if planned or measured:
                found.append(Bytes(name, tier, planned, measured))
    return found


def _planned(words: str) -> float:
    return float(words.split(" MiB")[0]) * 2**20 if words else 0.0


def main(argv: list[str] | None = None) -> int:
    """Print both tables; 1 where bits or bytes are not as stated, or overlapped is slower than serial."""
    parser = argparse.ArgumentParser(prog="offload", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=float, default=96, help="MiB of parameters")
    parser.add_argument("--tile", type=float, default=8, help="MiB of parameters in a tile")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    print(
        f"{'optimizer step of ' + format(options.mib, 'g') + ' MiB':<28} {'ms':>8} {'waits ms':>9} {'buffers MiB':>12}  bits"
    )
    runs = step_times(options.path, options.mib, options.tile, options.steps)
    for run in runs:
        print(
            f"{run.name:<28} {run.step_s * 1e3:>8.1f} {run.wait_s * 1e3:>9.1f} {run.buffer_bytes / 2**20:>12.1f}  "
            f"{'the same' if run.same_bits else 'OTHERS'}"
        )
    ratio = overlapped_to_serial(runs)
    gains = ratio <= 1.0
    print(f"overlapped takes {ratio:.2f} times the serial step, side by side{'' if gains else '  SLOWER'}")
    print(f"\n{'bytes':<28} {'tier':>8} {'planned MiB':>12} {'measured MiB':>13} {'off':>7}")
    tables = bytes_beside_plan(options.path, options.mib / 2, options.tile / 4)
    for row in tables:
        off = row.measured / row.planned - 1.0 if row.planned else float("inf")
        print(
            f"{row.name:<28} {row.tier:>8} {row.planned / 2**20:>12.2f} {row.measured / 2**20:>13.2f} {off:>+7.1%}"
            f"{'' if row.holds else '  TOO FAR'}"
        )
    holds = gains and all(run.same_bits for run in runs) and all(row.holds for row in tables)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
