"""Does a one-step-late update still learn? Held-out loss of a small GPT on two ranks, plain and late, over seeds.

    python benchmarks/delayed.py [--steps 200] [--seeds 3] [--rate 1e-3]

Both runs of a seed see the same text of Python's standard library, from the same parameters; the late one differs by
``accumulation.delayed = true`` alone. What is compared is the loss on text that neither was trained on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from spawned_ranks import SpawnedRanks, in_one_line

__all__ = ["held_out_losses", "main"]

RANKS = 2
SEQUENCE = 64
#: Samples of a rank and step.
BATCH = 8
STEPS = 200
#: For one seed.
SECONDS = 3600.0
#: Windows of the text that are kept for the end.
HELD_OUT = 256


def held_out_losses(
    rank: int, seed: int, steps: int = STEPS, rate: float = 1e-3
) -> tuple[float, float, float]:
    """Loss on held-out text: after plain training, after late training, before any. Called on both ranks of a group."""
    import torch

    import trine
    from trine.samples.gpt import GPT, GPTConfig, loss_of
    from trine.samples.text import SourceText, standard_library

    data = SourceText(standard_library(1 << 20), SEQUENCE)

    def batch_of(places: Any) -> tuple[Any, Any]:
        pairs = [data[int(place)] for place in places]
        return torch.stack([ids for ids, _ in pairs]), torch.stack([targets for _, targets in pairs])

    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    held_out = batch_of(order[:HELD_OUT])

    def evaluated(model: Any) -> float:
        with torch.no_grad():
            return float(_mean(loss_of(model, held_out)))

    found = []
    for late in (False, True):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(layers=2, hidden=64, heads=4, sequence=SEQUENCE))
        untrained = evaluated(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        engine = trine.optimize(model, optimizer, {"accumulation": {"delayed": late}}, loss_fn=loss_of)
        for step in range(steps):
            start = HELD_OUT + ((step * RANKS + rank) * BATCH) % (len(order) - HELD_OUT - BATCH)
            engine.train_step(batch_of(order[start : start + BATCH]))
        engine.close()
        found.append(evaluated(model))
    return found[0], found[1], untrained


def _mean(loss: Any) -> Any:
    return loss[0] if isinstance(loss, tuple) else loss


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="delayed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--rate", type=float, default=1e-3, metavar="LR", help="AdamW's learning rate")
    arguments = parser.parse_args(argv)
    print(f"held-out loss after {arguments.steps} steps on {RANKS} ranks")
    print(f"{'seed':>4} {'untrained':>10} {'plain':>8} {'late':>8} {'difference':>11}")
    differences = []
    with SpawnedRanks(RANKS) as spawned:
        for seed in range(arguments.seeds):
            given = (seed, arguments.steps, arguments.rate)
            plain, late, untrained = spawned.run(held_out_losses, *given, timeout_s=SECONDS)[0]
            differences.append(100 * (late / plain - 1))
            print(
                f"{seed:>4} {untrained:>10.4f} {plain:>8.4f} {late:>8.4f} {differences[-1]:>+10.2f}%",
                flush=True,
            )
    spread = f" (from {min(differences):+.2f} % to {max(differences):+.2f} %)"
    print(f"late is {statistics.mean(differences):+.2f} % from plain on average{spread}")
    return 0


if __name__ == "__main__":
    sys.exit(in_one_line(main))
