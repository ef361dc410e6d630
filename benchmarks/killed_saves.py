"""Runs that are killed while they save: two ranks train, save after every step, and are killed at a random moment.

One process imports torch once and forks the ranks of every trial, so that a trial takes a second. Four runs take turns,
each going on from what its last trial left: saving at once or in the background, to one folder that is replaced or to a
series of which two stay. What takes no time on an idle disk (renaming, flushing, deleting) is stretched by a few
milliseconds, or kills would never fall there.

A trial is good when the next start loads by itself a checkpoint at least as new as the last that a save had returned, and
when every loss that was seen at a step, before kills and after loads, is that of a run that was never killed, bit for bit.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import forked_ranks

__all__ = ["PHASES", "Trial", "killed_saves"]

RANKS = 2
#: Bytes of the shared memory: each rank's phase, saves that have returned, in which steps.
_PUBLISHED = 16
_STEPS_AHEAD = 100_000
#: Seconds by which what takes no time is stretched.
STRETCH_S = 0.002

PHASES = (
    "training",
    "planning",
    "copying",
    "tensors",
    "small files",
    "metadata",
    "description",
    "renaming",
    "deleting old ones",
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One kill. ``loaded`` by the next start; ``failure`` says why it is not good."""

    run: str
    victims: str
    phase: str
    published: int
    loaded: int
    from_previous: bool
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    asynchronous: bool
    keep: int | None


RUNS = (
    _Run("at once, one folder", False, None),
    _Run("background, series", True, 2),
    _Run("at once, series", False, 2),
    _Run("background, one folder", True, None),
)


def killed_saves(folder: Path, trials: int, seed: int) -> list[Trial]:
    """Every trial, in order. Needs torch; forks, so call it where no thread of torch has started."""
    forked_ranks.import_all()
    generator = random.Random(seed)
    found: list[Trial] = []
    for number in range(trials):
        run = RUNS[number % len(RUNS)]
        place = folder / f"run-{number % len(RUNS)}"
        place.mkdir(parents=True, exist_ok=True)
        found.append(_trial(run, place, generator))
    bad = _losses_that_differ(folder)
    return [
        Trial(**(asdict(each) | {"failure": each.failure or bad[each.run]})) if each.run in bad else each
        for each in found
    ]


def _trial(run: _Run, place: Path, generator: random.Random) -> Trial:
    """Start, kill, and start again to see what it loads."""
    shared = mmap.mmap(-1, 4096)
    ranks = forked_ranks.start(place, RANKS, lambda rank: _train(rank, place, run, shared, None))
    began = time.monotonic()
    while (
        _published(shared) < 0 or generator.random() > 0.5
    ):  # some are killed at their first save, some later
        if time.monotonic() - began > forked_ranks.LIMIT_S or any(
            forked_ranks.has_ended(pid) for pid in ranks
        ):
            forked_ranks.end_all(ranks)
            return Trial(run.name, "", "training", -1, -1, False, f"did not train: {_said(place)}")
        time.sleep(generator.uniform(0.0, 0.05))
    time.sleep(generator.uniform(0.0, 0.1))
    victims = generator.choice(("all", "rank 0", "rank 1"))
    phase = PHASES[shared[0]]
    chosen = ranks if victims == "all" else [ranks[int(victims[-1])]]
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
    published = _published(shared)  # what a rank has told before it was killed
    failure = _end_of([pid for pid in ranks if pid not in chosen], killed=True)
    forked_ranks.reap(chosen)
    loaded, previous, said = _look(run, place)
    if not failure and said:
        failure = said
    if not failure and loaded < published:
        failure = f"loaded step {loaded}, and step {published} had been saved"
    return Trial(run.name, victims, phase, published, loaded, previous, failure)


def _look(run: _Run, place: Path) -> tuple[int, bool, str]:
    """What a fresh start loads: its step, whether from ``.previous``, and what went wrong."""
    shared = mmap.mmap(-1, 4096)
    previous = not (place / "one" / "trine.json").exists() if run.keep is None else False
    previous = previous and (place / "one.previous" / "trine.json").exists()
    ranks = forked_ranks.start(place, RANKS, lambda rank: _train(rank, place, run, shared, 2))
    failure = _end_of(ranks)
    return _published(shared), previous, failure and f"{failure}: {_said(place)}"


# --- ranks -------------------------------------------------------------------------------------


def _train(rank: int, place: Path, run: _Run, shared: mmap.mmap, steps: int | None) -> None:
    """Load the newest, and train: until killed, saving after every step, or ``steps`` more, saving nothing."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    import trine

    if steps is None:
        _mark_phases(rank, shared)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 16, generator=generator), torch.randn(48, 4, generator=generator))
    sampler = DistributedSampler(data, RANKS, rank, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(10 + rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = trine.optimize(
        model,
        optimizer,
        {"zero": {"stage": 1}},
        loss_fn=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )
    folder = place if run.keep is not None else place / "one"
    first = 0
    if _anything(run, place):
        first = engine.load(folder, newest=run.keep is not None)
        if steps is not None:
            shared[_PUBLISHED : _PUBLISHED + 4] = (first + 1).to_bytes(4, "little")
    waiting: Any = None
    with (place / f"losses-{rank}.txt").open("a", encoding="utf-8", buffering=1) as log:
        for epoch in range(engine.epoch, _STEPS_AHEAD):
            sampler.set_epoch(epoch)
            for batch in engine.steps(loader):
                loss = engine.train_step(batch)
                log.write(f"{engine.step_index} {float(loss).hex()}\n")
                if steps is not None:
                    if engine.step_index + 1 >= first + steps:
                        os._exit(0)
                    continue
                if waiting is not None:
                    waiting.result()
                    _publish(shared, rank, engine.step_index)
                if run.asynchronous:
                    waiting = engine.save(folder, keep=run.keep, asynchronous=True)
                else:
                    engine.save(folder, keep=run.keep)
                    _publish(shared, rank, engine.step_index + 1)


def _anything(run: _Run, place: Path) -> bool:
    names = ["one", "one.previous"] if run.keep is None else [each.name for each in place.glob("step-*")]
    return any((place / name / "trine.json").exists() for name in names)


def _publish(shared: mmap.mmap, rank: int, step: int) -> None:
    if rank == 0:
        shared[_PUBLISHED : _PUBLISHED + 4] = (step + 1).to_bytes(4, "little")


def _published(shared: mmap.mmap) -> int:
    return int.from_bytes(shared[_PUBLISHED : _PUBLISHED + 4], "little") - 1


def _mark_phases(rank: int, shared: mmap.mmap) -> None:
    """Note in shared memory what a save is at, and stretch what is too quick to be hit."""
    from trine.optim.runtime import lost_ranks
    from trine.optim.runtime.checkpoints import background, integrity, keeper, writing

    lost_ranks.explained.__defaults__ = (0.1,)  # survivors wait for no signs: nobody reads what they say

    def marked(owner: Any, name: str, phase: str) -> None:
        original = getattr(owner, name)

        def act(*arguments: Any, **named: Any) -> Any:
            before = shared[rank]
            shared[rank] = PHASES.index(phase)
            try:
                time.sleep(STRETCH_S)
                return original(*arguments, **named)
            finally:
                time.sleep(STRETCH_S)
                shared[rank] = before

        setattr(owner, name, act)

    marked(keeper, "prepared", "planning")
    marked(background.Background, "_copy", "copying")
    marked(integrity.Writer, "write_data", "tensors")
    marked(writing, "write_whole", "small files")
    marked(integrity.Writer, "finish", "metadata")
    marked(writing, "write_description", "description")
    marked(writing, "renamed_when_whole", "renaming")
    marked(writing, "forget_old", "deleting old ones")
    for owner, name in ((Path, "unlink"), (shutil, "rmtree"), (os, "fsync")):
        _stretch(owner, name, STRETCH_S)
    _stretch(Path, "rename", 8 * STRETCH_S)  # between two of them there is only the one before


def _stretch(owner: Any, name: str, seconds: float) -> None:
    original = getattr(owner, name)

    def act(*arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        found = original(*arguments, **named)
        time.sleep(seconds)
        return found

    setattr(owner, name, act)


# --- afterwards --------------------------------------------------------------------------------


def _end_of(pids: list[int], killed: bool = False) -> str:
    """What is wrong with how they end: they hang, or, where none was ``killed``, they fail."""
    hung = forked_ranks.await_end(pids)
    if hung:
        return hung
    codes = forked_ranks.reap(pids)
    return "" if killed or not any(codes) else f"ranks ended with {codes}"


def _said(place: Path) -> str:
    lines = [line for rank in range(RANKS) for line in (place / f"rank-{rank}.log").read_text().splitlines()]
    return lines[-1] if lines else "nothing"


def _losses_that_differ(folder: Path) -> dict[str, str]:
    """Run's name → what is wrong with its losses, held against those of a run that was never killed."""
    seen: dict[str, dict[int, set[str]]] = {}
    for number, run in enumerate(RUNS):
        place = folder / f"run-{number}"
        for rank in range(RANKS):
            path = place / f"losses-{rank}.txt"
            lines = path.read_text().splitlines() if path.exists() else []
            losses = seen.setdefault(f"{rank} {run.name}", defaultdict(set))
            for line in lines:
                step, _, loss = line.partition(" ")
                if "p" in loss:  # a line that a kill cut short has no exponent yet
                    losses[int(step)].add(loss)
    longest = max((max(losses, default=0) for losses in seen.values()), default=0)
    control = folder / "control"
    control.mkdir(exist_ok=True)
    quiet = _Run("control", False, None)
    shared = mmap.mmap(-1, 4096)
    failure = _end_of(
        forked_ranks.start(control, RANKS, lambda rank: _train(rank, control, quiet, shared, longest + 1))
    )
    if failure:
        return {run.name: f"the control failed: {failure}" for run in RUNS}
    bad: dict[str, str] = {}
    for key, losses in seen.items():
        rank, _, name = key.partition(" ")
        lines = (control / f"losses-{rank}.txt").read_text().splitlines()
        right = dict(line.split(" ") for line in lines)
        wrong = [step for step, values in losses.items() if values != {right.get(str(step))}]
        if wrong:
            bad[name] = (
                f"losses of step {min(wrong)} on rank {rank} differ from those of a run that was not killed"
            )
    return bad


def main() -> None:
    """``killed_saves.py FOLDER TRIALS SEED``: the trials as JSON, one a line."""
    folder, trials, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for trial in killed_saves(folder, trials, seed):
        print(json.dumps(asdict(trial)))


if __name__ == "__main__":
    main()
