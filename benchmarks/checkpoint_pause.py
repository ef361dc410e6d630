"""How long training stands still for a checkpoint: saved at once, and in the background.

    python benchmarks/checkpoint_pause.py
    python benchmarks/checkpoint_pause.py --width 2048 --saves 5

Two ranks of ZeRO stage 1 train a stack of linear layers and save after every few steps, at once and in the background in
turns, so that whatever else the machine does falls on both. Printed are medians over the saves of rank 0: for how long
``engine.save`` did not return, how long until the checkpoint was whole, and the steps that were taken meanwhile, beside
those with nothing to write. Times depend on the disk and on what else runs; the ratio of the pauses is what to look at.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import forked_ranks

__all__ = ["main", "measure"]

RANKS = 2


def measure(rank: int, folder: Path, width: int, saves: int) -> dict[str, Any]:
    """Medians in seconds, and the bytes of a checkpoint."""
    import torch
    from torch import nn

    import trine

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"zero": {"stage": 1}, "communication": {"bucket_mib": 16.0}}
    engine = trine.optimize(model, optimizer, config, loss_fn=lambda model, x: model(x).square().mean())
    batch = torch.randn(4, width)

    def step() -> float:
        began = time.perf_counter()
        engine.train_step(batch)
        return time.perf_counter() - began

    for _ in range(3):
        step()
    quiet, beside, pauses, whole = [], [], {True: [], False: []}, []
    for number in range(2 * saves + 2):
        asynchronous = number % 2 == 1
        quiet += [step() for _ in range(3)]
        began = time.perf_counter()
        saving: Any = engine.save(folder / "run", asynchronous=asynchronous)  # type: ignore[call-overload]
        paused = time.perf_counter() - began
        while asynchronous and not saving.done():
            beside.append(step())
        if asynchronous:
            saving.result()
        if number >= 2:  # the first makes the plan, the first in the background the group and the buffers
            pauses[asynchronous].append(paused)
            whole += [time.perf_counter() - began] if asynchronous else []
    engine.close()
    size = sum(path.stat().st_size for path in (folder / "run").iterdir())
    found = {"quiet": quiet, "beside": beside or quiet, "whole": whole}
    found |= {"at once": pauses[False], "background": pauses[True]}
    return {name: statistics.median(values) for name, values in found.items()} | {"bytes": size}


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where the background stands still as long as at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--width", type=int, default=1024, metavar="N", help="of the layers, of which there are 8"
    )
    parser.add_argument("--saves", type=int, default=5, metavar="N", help="of each kind")
    arguments = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    forked_ranks.import_all()
    with tempfile.TemporaryDirectory(prefix="trine-pause-") as made:
        folder = Path(made)
        found = forked_ranks.outcomes(
            folder, RANKS, lambda rank: measure(rank, folder, arguments.width, arguments.saves), limit_s=900.0
        )[0]
    if isinstance(found, str):
        print(found)
        return 1
    ratio = found["at once"] / found["background"]
    print(f"a checkpoint of {found['bytes'] / 2**20:.0f} MiB, of {RANKS} ranks")
    print(f"  at once        training stands still for {found['at once'] * 1e3:7.1f} ms")
    print(
        f"  in background  training stands still for {found['background'] * 1e3:7.1f} ms, {ratio:.1f} times less"
    )
    print(f"                 whole after               {found['whole'] * 1e3:7.1f} ms")
    print(
        f"  a step takes {found['quiet'] * 1e3:.1f} ms, and {found['beside'] * 1e3:.1f} ms while one is written"
    )
    return 0 if ratio > 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
