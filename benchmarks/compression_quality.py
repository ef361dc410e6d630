"""What does compressing gradients cost in quality? Held-out loss of each code beside the uncompressed run's.

    python benchmarks/compression_quality.py                    every code, three seeds
    python benchmarks/compression_quality.py int8 onebit        those

Trains the sample GPT on the sources of Python's standard library on two local ranks, for each seed with the same first
weights and the same batches, and measures the loss on text that no rank has seen. Printed are the mean over the seeds,
its gap to the uncompressed mean, and the gaps of the single seeds: a gap inside the spread of the seeds is no finding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from spawned_ranks import SpawnedRanks, in_one_line

__all__ = ["CASES", "Row", "main", "rows_of"]

RANKS = 2
STEPS = 300
SEEDS = 3
SAMPLES = 8  # a rank
SEQUENCE = 64
#: The most that int8 may cost, by its acceptance.
INT8_LIMIT = 1e-3

_KEY = "communication.compression"
_WARM = {"communication.compression_warmup_steps": STEPS // 10}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {_KEY: "bf16"},
    "fp16": {_KEY: "fp16"},
    "int8": {_KEY: "int8"},
    "qsgd": {_KEY: "qsgd"},
    "qsgd, 7 levels": {_KEY: "qsgd", "communication.compression_levels": 7},
    "powersgd, rank 4": {_KEY: "powersgd"},
    "powersgd, rank 4, warm-up": {_KEY: "powersgd", **_WARM},
    "onebit": {_KEY: "onebit"},
    "onebit, warm-up": {_KEY: "onebit", **_WARM},
    "terngrad": {_KEY: "terngrad"},
    "terngrad, warm-up": {_KEY: "terngrad", **_WARM},
    "int8, zero 3": {_KEY: "int8", "zero.stage": 3},
    "int8 weights, zero 3": {"zero.quantized_weights": True, "zero.stage": 3},
    "int8 and int8 weights, zero 3": {_KEY: "int8", "zero.quantized_weights": True, "zero.stage": 3},
}


@dataclass(frozen=True)
class Row:
    """One case over the seeds."""

    name: str
    losses: tuple[float, ...]  # held out, by seed
    gaps: tuple[float, ...]  # to the uncompressed run of the same seed, relative
    ratio: float  # plain bytes / sent bytes

    @property
    def gap(self) -> float:
        """Of the means."""
        return statistics.fmean(self.gaps)


def train(rank: int, changes: dict[str, Any], seed: int, steps: int) -> tuple[float, float]:
    """Held-out loss and ratio of bytes after ``steps`` steps."""
    import torch

    import trine
    from trine.samples.gpt import GPT, GPTConfig, loss_of
    from trine.samples.text import SourceText, standard_library

    text = standard_library(2 << 20)
    cut = len(text) * 9 // 10
    data, held_out = SourceText(text[:cut], SEQUENCE), SourceText(text[cut:], SEQUENCE)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(layers=2, hidden=64, heads=4, vocab=256, sequence=SEQUENCE, attention="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # Decayed to nothing, as runs are: at a constant rate the last steps' noise is larger than what codes cost.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1.0 - step / steps)
    )
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of, scheduler=scheduler
    )

    def batch(source: Any, positions: list[int]) -> Any:
        pairs = [source[position] for position in positions]
        return torch.stack([ids for ids, _ in pairs]), torch.stack([targets for _, targets in pairs])

    for step in range(steps):
        start = (step * RANKS + rank) * SAMPLES
        engine.train_step(batch(data, [order[(start + place) % len(order)] for place in range(SAMPLES)]))
    stride = max(1, len(held_out) // 256)
    with torch.no_grad():
        positions = list(range(0, len(held_out), stride))
        losses = [
            float(loss_of(engine.model, batch(held_out, positions[at : at + 32])))
            for at in range(0, len(positions) - 31, 32)
        ]
    exchange = engine._assembly.state.get("compression")
    ratio = exchange.plain_bytes() / exchange.sent_bytes() if exchange is not None else 1.0  # type: ignore[attr-defined]
    engine.close()
    return statistics.fmean(losses), ratio


def rows_of(results: dict[tuple[str, int], tuple[float, float]], seeds: int) -> list[Row]:
    """By case, in their order; ``results`` is by (case, seed)."""
    plain = [results["none", seed][0] for seed in range(seeds)]
    rows = []
    for name in dict.fromkeys(name for name, _ in results):
        losses = tuple(results[name, seed][0] for seed in range(seeds))
        gaps = tuple(loss / base - 1.0 for loss, base in zip(losses, plain, strict=True))
        rows.append(Row(name, losses, gaps, results[name, 0][1]))
    return rows


def _show(name: str, row: Row) -> None:
    spread = " ".join(f"{gap:+.2%}" for gap in row.gaps)
    print(
        f"{name:<32} {'1/' + format(row.ratio, '.3g'):>7} {statistics.fmean(row.losses):>9.4f} {row.gap:>+8.2%}   {spread}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where int8 costs more than 0.1 % of the held-out loss."""
    parser = argparse.ArgumentParser(prog="compression_quality", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "words", nargs="*", metavar="CODE", help="only cases whose names contain one of these"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args(argv)
    cases = {
        name: changes
        for name, changes in CASES.items()
        if name == "none" or not options.words or any(word in name for word in options.words)
    }
    results: dict[tuple[str, int], tuple[float, float]] = {}
    print(f"{'code':<32} {'bytes':>7} {'held-out':>9} {'gap':>8}   gaps by seed", flush=True)
    with SpawnedRanks(RANKS) as spawned:
        for name, changes in cases.items():
            for seed in range(options.seeds):
                results[name, seed] = spawned.run(train, changes, seed, options.steps, timeout_s=900)[-1]
            _show(name, rows_of(results, options.seeds)[-1])
    rows = {row.name: row for row in rows_of(results, options.seeds)}
    return 1 if "int8" in rows and rows["int8"].gap > INT8_LIMIT else 0


if __name__ == "__main__":
    sys.exit(in_one_line(main))
