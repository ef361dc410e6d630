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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["PHASES", "Trial", "killed_saves"]

RANKS = 2
#: Bytes of the shared memory: each rank's phase, saves that have returned, in which steps.
_PUBLISHED = 16
_STEPS_AHEAD = 100_000
#: Seconds that a trial may take, and survivors to notice that a rank is gone.
LIMIT_S = 60.0
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
    _import_all()
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


def _import_all() -> None:
    """Everything that ranks need, before they are forked: it takes longer than a trial."""
    import torch

    torch.set_num_threads(1)
    import trine
    from trine.optim.runtime import checkpoints

    assert checkpoints
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # imports the compiler
    trine.optimize(model, optimizer).close()
    import torch.distributed.fsdp
    import torch.distributed.tensor


def _trial(run: _Run, place: Path, generator: random.Random) -> Trial:
    """Start, kill, and start again to see what it loads."""
    shared = mmap.mmap(-1, 4096)
    ranks = _start(place, lambda rank: _train(rank, place, run, shared, None))
    began = time.monotonic()
    while (
        _published(shared) < 0 or generator.random() > 0.5
    ):  # some are killed at their first save, some later
        if time.monotonic() - began > LIMIT_S or any(_ended(pid) for pid in ranks):
            _kill(ranks)
            return Trial(run.name, "", "training", -1, -1, False, f"did not train: {_said(place)}")
        time.sleep(generator.uniform(0.0, 0.05))
    time.sleep(generator.uniform(0.0, 0.1))
    victims = generator.choice(("all", "rank 0", "rank 1"))
    phase = PHASES[shared[0]]
    chosen = ranks if victims == "all" else [ranks[int(victims[-1])]]
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
    published = _published(shared)  # what a rank has told before it was killed
    failure = _await_end([pid for pid in ranks if pid not in chosen])
    _reap(chosen)
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
    ranks = _start(place, lambda rank: _train(rank, place, run, shared, 2))
    failure = _await_end(ranks, killed=False)
    return _published(shared), previous, failure and f"{failure}: {_said(place)}"


# --- ranks -------------------------------------------------------------------------------------


def _start(place: Path, act: Callable[[int], None]) -> list[int]:
    """Fork the ranks. Their output goes to files."""
    store = place / "store"
    store.unlink(missing_ok=True)
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with (place / f"rank-{rank}.log").open("w", encoding="utf-8") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                    act(rank)
                    code = 0
            except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happens
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def _train(rank: int, place: Path, run: _Run, shared: mmap.mmap, steps: int | None) -> None:
    """Load the newest, and train: until killed, saving after every step, or ``steps`` more, saving nothing."""
    from datetime import timedelta

    import torch
    from torch import distributed, nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    import trine

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{place / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LIMIT_S / 2),
    )
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
    from trine.optim.runtime.checkpoints import background, integrity, keeper, writing

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
    marked(writing, "_rename", "renaming")
    marked(writing, "forget_old", "deleting old ones")
    for owner, name in ((Path, "rename"), (Path, "unlink"), (shutil, "rmtree"), (os, "fsync")):
        _stretch(owner, name)


def _stretch(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def act(*arguments: Any, **named: Any) -> Any:
        time.sleep(STRETCH_S)
        found = original(*arguments, **named)
        time.sleep(STRETCH_S)
        return found

    setattr(owner, name, act)


# --- afterwards --------------------------------------------------------------------------------


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _await_end(pids: list[int], killed: bool = True) -> str:
    """What is wrong with how they end: they hang, or, where none was ``killed``, they fail."""
    until = time.monotonic() + LIMIT_S
    while not all(_ended(pid) for pid in pids):
        if time.monotonic() > until:
            _kill(pids)
            return f"ranks were still there after {LIMIT_S:.0f} s"
        time.sleep(0.005)
    codes = _reap(pids)
    return "" if killed or not any(codes) else f"ranks ended with {codes}"


def _kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _reap(pids)


def _reap(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


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
                if loss.endswith(("p+0", "p-0")) or "p" in loss:
                    losses[int(step)].add(loss)
    longest = max((max(losses, default=0) for losses in seen.values()), default=0)
    control = folder / "control"
    control.mkdir(exist_ok=True)
    quiet = _Run("control", False, None)
    shared = mmap.mmap(-1, 4096)
    failure = _await_end(
        _start(control, lambda rank: _train(rank, control, quiet, shared, longest + 1)), killed=False
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
