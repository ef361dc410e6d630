"""What does each technique change? The quantity it exists for, from Trine's own record, plain and optimised in turn.

    python benchmarks/effects.py                    every row, about six minutes on two cores
    python benchmarks/effects.py zero checkpointing the rows whose names contain one of these

Both sides of a row train the same model on the same data in the same processes: in each of three rounds a few steps of
each, in an order that is drawn anew, each under ``trine.profile`` with a record of its own. Every number is then read
from those records: phases of steps, the table of collectives, readings. A line with a formula is ``ok`` within 5 % of it.
The exit code is 1 when one is off, or when buckets overlap no better with backward than one bucket behind it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import effect_records
from effect_rows import ROWS, Facts, Line, Row
from spawned_ranks import SpawnedRanks, cause, in_one_line

__all__ = ["ROWS", "Result", "Row", "measure", "results_of"]

ROUNDS = 3
VARIANTS = ("plain", "optimised")
#: A row takes seconds; a rank that hangs must not hold the others for longer.
TIMEOUT_S = 240

SHAPES: Mapping[str, dict[str, Any]] = {
    "small": {"layers": 4, "hidden": 64, "heads": 4, "sequence": 64},
    "large": {"layers": 3, "hidden": 192, "heads": 6, "sequence": 128},
    "long": {"layers": 2, "hidden": 128, "heads": 4, "sequence": 256},
    "documents": {"layers": 2, "hidden": 64, "heads": 4, "sequence": 384},
    "dropout": {"layers": 4, "hidden": 64, "heads": 4, "sequence": 64, "dropout": 0.1},
    "gated": {"layers": 4, "hidden": 64, "heads": 4, "sequence": 64, "mlp": "swiglu", "norm": "rms"},
    "vocabulary": {"layers": 2, "hidden": 64, "heads": 4, "sequence": 64, "vocab": 8192},
}


@dataclass(frozen=True)
class Result:
    """A line of the table."""

    row: Row
    line: Line
    plain: float
    optimised: float
    expected: float | None
    holds: bool

    def __str__(self) -> str:
        unit = effect_records.QUANTITIES[self.line.quantity].unit
        change = f"× {self.optimised / self.plain:.3f}" if self.plain else ""
        theory = ""
        if self.expected is not None and self.line.expected is not None:
            theory = f"{effect_records.spell(self.expected, unit)}  {self.line.expected.words}"
        judged = "" if self.line.expected is None else "ok" if self.holds else "OFF"
        plain, optimised = (effect_records.spell(value, unit) for value in (self.plain, self.optimised))
        return (
            f"{self.row.name:<37} {self.line.quantity:<23} {plain:>10} {optimised:>10} {change:>9}  "
            f"{theory:<30} {judged}"
        ).rstrip()


# --- on the ranks ------------------------------------------------------------------------------


def _text() -> bytes:
    from trine.samples.text import standard_library

    return standard_library(1 << 19)


def model_of(row: Row) -> tuple[Any, Any]:
    """The row's model, seeded, and its loss."""
    import torch

    torch.manual_seed(0)
    if row.model == "images":
        from trine.samples.vision import VisionConfig, VisionTransformer, loss_of

        return VisionTransformer(VisionConfig(layers=2, hidden=64)), loss_of
    from trine.samples.gpt import GPT, GPTConfig
    from trine.samples.gpt import loss_of as text_loss

    return GPT(GPTConfig(**SHAPES[row.model])), text_loss


def loader_of(row: Row, samples: int, rank: int, part: int) -> Any:
    """A rank's batches of a round: the same for both sides, but for their size where the row says so."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    if row.data == "images":
        from trine.samples.vision import Digits

        return DataLoader(Digits(2048, read_ms=4.0), batch_size=samples)
    from trine.samples.text import SourceDocuments, SourceText, pad_documents

    length = SHAPES[row.model]["sequence"]
    if row.data == "documents":
        documents = SourceDocuments(_text(), length)
        sampler = RandomSampler(documents, generator=torch.Generator().manual_seed(part))
        return DataLoader(documents, batch_size=samples, sampler=sampler, collate_fn=pad_documents)
    windows = SourceText(_text(), length)
    first = (rank * ROUNDS + part) * row.steps * samples
    return [
        tuple(
            torch.stack(column)
            for column in zip(*(windows[first + step * samples + i] for i in range(samples)), strict=True)
        )
        for step in range(row.steps)
    ]


def _engine(row: Row, changes: Mapping[str, Any]) -> Any:
    import torch

    import trine

    model, loss_fn = model_of(row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_fn)


def _record(row: Row, engine: Any, samples: int, rank: int, part: int, folder: Path) -> None:
    """Some steps, and their record."""
    import trine

    loader = loader_of(row, samples, rank, part)
    with (
        trine.profile(folder, model=engine.model, optimizer=engine.optimizer, windows=None, flops=False),
        closing(engine.steps(loader)) as steps,
    ):
        for batch in islice(steps, row.steps):
            engine.train_step(batch)


def measure(rank: int, row: Row, folder: str, rounds: int = ROUNDS) -> tuple[tuple[int, ...], ...]:
    """Train both sides in turn, on every rank at once; the shapes of the model's parameters.

    The records lie in ``folder/SIDE/ROUND`` afterwards.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    place = Path(folder)
    drawn = random.Random(0)
    engines: dict[str, Any] = {}
    with mock.patch.dict(os.environ, row.environment):
        try:
            engines["plain"] = _engine(row, row.plain)
            changes = dict(row.changes)
            if row.budget is not None:
                first = place / "plain" / "first"
                _record(row, engines["plain"], row.samples, rank, 0, first)
                saved = effect_records.Records([first]).reading("memory/saved_activation_bytes")
                changes["checkpointing.budget_bytes"] = int(row.budget * saved)
            if "offload.path" in changes:
                changes["offload.path"] = folder
            engines["optimised"] = _engine(row, changes)
            sizes = {"plain": row.plain_samples or row.samples, "optimised": row.samples}
            for part in range(rounds):
                order = list(VARIANTS)
                drawn.shuffle(order)
                for side in order:
                    _record(row, engines[side], sizes[side], rank, part, place / side / str(part))
        finally:
            for engine in engines.values():
                engine.close()
            torch.set_num_threads(threads)
    return tuple(tuple(parameter.shape) for parameter in model_of(row)[0].parameters())


# --- what the records say ----------------------------------------------------------------------


def results_of(row: Row, folder: Path, shapes: tuple[tuple[int, ...], ...]) -> list[Result]:
    """The row's lines, from the records that :func:`measure` left."""
    sides = {side: effect_records.Records(sorted((folder / side).iterdir())) for side in VARIANTS}
    node = int(row.environment.get("TRINE_RANKS_PER_NODE", row.ranks))
    results = []
    for line in row.lines:
        quantity = effect_records.QUANTITIES[line.quantity]
        plain, optimised = (quantity.read(sides[side], node) for side in VARIANTS)
        facts = Facts(row.ranks, shapes, plain, row.changes)
        expected = None if line.expected is None else line.expected.value(facts)
        holds = line.expected is None or line.expected.holds(optimised, facts)
        results.append(Result(row, line, plain, optimised, expected, holds))
    return results


# --- standing alone ----------------------------------------------------------------------------


def _measure(rank: int, row: str, folder: str) -> Any:
    return measure(rank, next(each for each in ROWS if each.name == row), folder)


def _run_together(ranks: int, rows: Sequence[Row]) -> Iterator[list[Result] | str]:
    """All rows of one number of ranks, on processes that are started once; a row that failed is its error."""
    backend = "gloo" if ranks > 1 else None
    with SpawnedRanks(ranks, backend=backend, daemon=False) as spawned:  # loader workers are their children
        for row in rows:
            with tempfile.TemporaryDirectory() as folder:
                answers = spawned.outcomes(_measure, row.name, folder, timeout_s=TIMEOUT_S)
                failure = cause(answers)
                if failure is not None:
                    print(failure.trace, end="", file=sys.stderr)
                yield str(failure) if failure else results_of(row, Path(folder), answers[0])
            if (failure and ranks > 1) or spawned.has_ended:
                break  # the others may wait for it: the group is of no use any more


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where a line with a formula is off, or a row failed."""
    parser = argparse.ArgumentParser(prog="effects", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only rows whose names contain one of these")
    words = parser.parse_args(argv).words
    chosen = [row for row in ROWS if not words or any(word in row.name for word in words)]
    began = time.perf_counter()
    print(
        f"{'technique':<37} {'quantity':<23} {'plain':>10} {'optimised':>10} {'change':>9}  {'expected':<30}"
    )
    judged = failed = done = 0
    for ranks in sorted({row.ranks for row in chosen}):
        rows = [row for row in chosen if row.ranks == ranks]
        for row, outcome in zip(rows, _run_together(ranks, rows), strict=False):
            if isinstance(outcome, str):
                print(f"{row.name:<37} {outcome}", flush=True)
                continue
            done += 1
            for result in outcome:
                print(result, flush=True)
                judged += result.line.expected is not None
                failed += not result.holds
    seconds = time.perf_counter() - began
    print(
        f"{done} of {len(chosen)} rows measured in {seconds:.0f} s; {judged - failed} of {judged} formulas hold"
    )
    return 1 if failed or done < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(in_one_line(main))
