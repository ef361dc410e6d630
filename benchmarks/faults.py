"""Faults of training, injected one by one, each beside its healthy control: what a run says, and what it loses.

    python benchmarks/faults.py                 100 kills in the middle of saves, then damage, full disks, lost ranks
    python benchmarks/faults.py --kills 20
    python benchmarks/faults.py --only damage   of kills, damage, disks, ranks

Kills: two ranks train and save after every step, and all or one of them is killed (SIGKILL) at a random moment. Each row of
the table is what the save was at; ``newest`` counts starts that then loaded the checkpoint that was being saved or the last
that had been, ``.previous`` those that found it under its other name. Losses are compared, bit for bit, with those of a run
that was never killed.

Everything else prints what the ranks said. The exit code is 1 when a checkpoint does not load, a fault is not found, is not
named, or hangs, or a healthy control fails.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_ranks
from killed_saves import PHASES, killed_saves

__all__ = ["Found", "damage", "disks", "main", "ranks"]

RANKS = 2
SOUND = "sound"


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one fault."""

    fault: str
    holds: bool
    said: str


# --- what runs on ranks ------------------------------------------------------------------------


def _engine(changes: dict[str, Any], loss_fn: Any = None, blocks: int = 4) -> tuple[Any, list[Any]]:
    """A small model on two ranks, and this rank's batches."""
    import torch
    from torch import distributed

    import trine
    from trine.samples.gpt import GPT, GPTConfig, loss_of

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=blocks, hidden=32, heads=2, sequence=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = trine.Config().with_changes(changes)
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_fn or loss_of)
    rank = engine.data_rank if distributed.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, 256, (4, 17), generator=generator) for _ in range(6)]
    return engine, [(ids[:, :-1], ids[:, 1:]) for ids in batches]


def _said(act: Callable[[], Any]) -> str:
    import trine

    try:
        act()
    except trine.TrineError as error:
        return f"{type(error).__name__}: {error}"
    return SOUND


def _trained(engine: Any, batches: list[Any]) -> str:
    def train() -> None:
        for batch in batches:
            engine.train_step(batch)

    return _said(train)


def _series(folder: Path) -> str:
    """Two checkpoints."""
    engine, batches = _engine({"zero.stage": 3})
    for batch in batches[:2]:
        engine.train_step(batch)
        engine.save(folder, keep=2)
    engine.close()
    return SOUND


def _loaded(folder: Path) -> list[Any]:
    """What the newest says when it is asked for by name, and the step that is loaded when the newest good one is."""
    engine, batches = _engine({"zero.stage": 3})
    said = _said(lambda: engine.load(folder / "step-000002"))
    step = engine.load(folder, newest=True)
    return [said, step, _trained(engine, batches[:1])]


# --- damage ------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped byte in a shard": (_flip, "__1_0.distcp"),
    "a flipped byte in a rank's file": (_flip, "rank-00001.pt"),
    "a flipped byte in DCP's metadata": (_flip, ".metadata"),
    "a flipped byte in the description": (_flip, "trine.json"),
    "a shard cut short": (_cut, "__0_0.distcp"),
    "a shard that is gone": (Path.unlink, "__0_0.distcp"),
}


def damage(folder: Path) -> Iterator[Found]:
    """Files of a checkpoint, damaged after they were written; and offload files in the middle of training."""
    for number, (fault, (harm, name)) in enumerate(DAMAGE.items()):
        place = folder / f"damage-{number}"
        place.mkdir()
        runs = place / "run"
        forked_ranks.outcomes(place, RANKS, lambda rank, runs=runs: _series(runs))
        sound = forked_ranks.outcomes(place, RANKS, lambda rank, runs=runs: _loaded(runs))
        if sound != [[SOUND, 2, SOUND]] * RANKS:
            yield Found(fault, False, f"the control failed: {sound}")
            continue
        harm(runs / "step-000002" / name)
        found = forked_ranks.outcomes(place, RANKS, lambda rank, runs=runs: _loaded(runs))
        named = all(isinstance(each, list) and name in each[0] and each[1:] == [1, SOUND] for each in found)
        yield Found(fault, named and found[0] == found[1], _shown(found[0]))
    yield _offload_file(folder / "offload")
    yield _activation_file(folder / "activations")


def _shown(found: Any) -> str:
    return (
        f"{found[0]}; the one before, of step {found[1]}, was loaded"
        if isinstance(found, list)
        else str(found)
    )


def _offload_file(place: Path) -> Found:
    place.mkdir()
    changes = {"offload.optimizer": "nvme", "offload.path": str(place), "zero.stage": 2}

    def run(rank: int, harmed: bool) -> str:
        engine, batches = _engine(changes)
        engine.train_step(batches[0])
        if harmed and rank == 0:
            held = next(p for p in engine.optimizer.param_groups[0]["params"] if p.dim() == 2)
            moment = engine.optimizer.state[held]["exp_avg"].to_local()  # over the file
            import torch

            moment.detach().view(-1).view(torch.uint8).numpy()[5] ^= 4
        return _trained(engine, batches[1:4])

    sound = forked_ranks.outcomes(place, RANKS, lambda rank: run(rank, False))
    found = forked_ranks.outcomes(place, RANKS, lambda rank: run(rank, True))
    holds = sound == [SOUND] * RANKS and all("is not what was written there" in each for each in found)
    return Found("a flipped byte in an offload file", holds, found[0] if holds else f"{sound} {found}")


def _activation_file(place: Path) -> Found:
    place.mkdir()
    own = [place / f"rank-{rank}" for rank in range(RANKS)]
    for each in own:
        each.mkdir()

    def run(rank: int, harmed: bool) -> str:
        from trine.samples.gpt import loss_of

        steps: list[int] = []

        def loss_then_harm(model: Any, batch: Any) -> Any:
            loss = loss_of(model, batch)
            steps.append(len(steps))
            if harmed and rank == 0 and steps[-1] == 0:
                _flip_first_byte(own[rank])
            return loss

        changes = {"offload.activations": "nvme", "offload.path": str(own[rank])}
        engine, batches = _engine(changes, loss_then_harm)
        return _trained(engine, batches[:3])

    sound = forked_ranks.outcomes(place, RANKS, lambda rank: run(rank, False))
    found = forked_ranks.outcomes(place, RANKS, lambda rank: run(rank, True))
    holds = sound == [SOUND] * RANKS and "is not what was written there" in found[0]
    holds = holds and found[1].startswith("TrainingError")
    return Found(
        "a flipped byte in an offloaded activation", holds, found[0] if holds else f"{sound} {found}"
    )


def _flip_first_byte(folder: Path) -> None:
    """Of the nameless file that this process has open under ``folder``, once its first page has been written."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    (link,) = [link for link in links if str(link.readlink()).startswith(f"{folder}/")]
    with link.open("r+b", buffering=0) as file:
        until = time.monotonic() + 10
        while not any(os.pread(file.fileno(), 4096, 0)):
            if time.monotonic() > until:
                raise RuntimeError(f"nothing was written under {folder}")
            time.sleep(0.01)
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, 0)[0] ^ 4]), 0)


# --- disks -------------------------------------------------------------------------------------


@contextmanager
def _small_disk(place: Path) -> Iterator[bool]:
    """A file system with room for one checkpoint and not for two; false where this user may not mount one."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True, timeout=10).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=10)


def disks(folder: Path) -> Iterator[Found]:
    """No room, while a checkpoint is written; the one before stays."""

    def run(rank: int, runs: Path, limit: int | None) -> list[Any]:
        engine, batches = _engine({"zero.stage": 1})
        engine.save(runs)
        engine.train_step(batches[0])
        if rank == 1 and limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        said = [_said(lambda: engine.save(runs))]
        said.append(_said(lambda: engine.save(runs, asynchronous=True).result()))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return [*said, engine.load(runs)]

    place = folder / "limited"
    sound = forked_ranks.outcomes(place, RANKS, lambda rank: run(rank, place / "run", None))
    found = forked_ranks.outcomes(place, RANKS, lambda rank: run(rank, place / "short", 20_000))
    holds = sound == [[SOUND, SOUND, 1]] * RANKS and _one_line(found, "File too large")
    yield Found("a rank whose files may not grow", holds, _room(found[0]) if holds else f"{sound} {found}")
    with _small_disk(folder / "small") as mounted:
        if not mounted:
            yield Found("a full disk", True, "not tried: this user may not mount a file system")
            return
        found = forked_ranks.outcomes(
            folder / "logs", RANKS, lambda rank: run(rank, folder / "small" / "run", None)
        )
        yield Found("a full disk", _one_line(found, "No space left on device"), _room(found[0]))


def _one_line(found: list[Any], words: str) -> bool:
    return all(
        isinstance(each, list)
        and all(words in said and "\n" not in said for said in each[:2])
        and each[2] == 0
        for each in found
    )


def _room(found: Any) -> str:
    return f"{found[0]}; the one before, of step {found[2]}, loads" if isinstance(found, list) else str(found)


# --- ranks -------------------------------------------------------------------------------------


def ranks(folder: Path) -> Iterator[Found]:
    """A rank that disappears from a pipeline, and ranks that take different paths through the model."""

    def piped(rank: int, killed: bool) -> str:
        from trine.samples.gpt import loss_of

        def loss_or_not(model: Any, batch: Any) -> Any:
            if killed and rank == 1 and engine.step_index == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss_of(model, batch)

        engine, batches = _engine({"parallel.pipeline": 2, "parallel.microbatches": 2}, loss_or_not)
        return _trained(engine, batches)

    place = folder / "pipeline"
    sound = forked_ranks.outcomes(place, RANKS, lambda rank: piped(rank, False))
    began = time.monotonic()
    found = forked_ranks.outcomes(place, RANKS, lambda rank: piped(rank, True))
    took = time.monotonic() - began
    holds = sound == [SOUND] * RANKS and "TrainingError" in found[0] and "rank 1" in found[0]
    words = f"{found[0]}; after {took:.0f} s" if holds else f"{sound} {found}"
    yield Found("a rank lost in a pipeline", holds, words)

    place = folder / "paths"
    sound = forked_ranks.outcomes(place, RANKS, lambda rank: _apart(rank, False))
    began = time.monotonic()
    found = forked_ranks.outcomes(place, RANKS, lambda rank: _apart(rank, True))
    took = time.monotonic() - began
    holds = sound == [SOUND] * RANKS and any("blocks.1" in each for each in found)
    holds = holds and all("TrainingError" in each for each in found)
    words = f"{found[0]}; after {took:.0f} s" if holds else f"{sound} {found}"
    yield Found("ranks that take different paths", holds, words)


def _apart(rank: int, differ: bool) -> str:
    """Rank 1 leaves a sharded block out in its third step."""
    import torch
    from torch import nn

    import trine

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
            self.order = [0, 1, 2, 3]

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for place in self.order:
                hidden = hidden + self.blocks[place](hidden)
            return hidden

    torch.manual_seed(0)
    model = Skipping()
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"zero": {"stage": 3}},
        loss_fn=lambda model, batch: model(batch).square().mean(),
    )

    def train() -> None:
        for step in range(5):
            if differ and rank == 1 and step == 2:
                model.order = [0, 2, 3]
            engine.train_step(torch.randn(4, 8))

    return _said(train)


# --- the report --------------------------------------------------------------------------------


def _kills(folder: Path, count: int, seed: int) -> bool:
    began = time.monotonic()
    trials = killed_saves(folder, count, seed)
    print(
        f"{count} kills in the middle of runs that save after every step, in {time.monotonic() - began:.0f} s"
    )
    print(f"  {'the save was at':20}{'kills':>6}{'newest':>8}{'.previous':>11}{'failed':>8}")
    for phase in PHASES:
        here = [trial for trial in trials if trial.phase == phase]
        bad = sum(bool(trial.failure) for trial in here)
        previous = sum(trial.from_previous for trial in here)
        print(f"  {phase:20}{len(here):6}{len(here) - bad - previous:8}{previous:11}{bad:8}")
    for trial in trials:
        if trial.failure:
            print(f"  FAILED {trial.run}, {trial.victims} killed at {trial.phase}: {trial.failure}")
    failed = sum(bool(trial.failure) for trial in trials)
    print(
        f"  {count - failed} of {count} went on from a checkpoint at least as new as the last that was saved, with the "
        "losses of a run that was not killed, bit for bit"
    )
    return failed == 0


def main(argv: list[str] | None = None) -> int:
    """Inject what was asked for; 1 where one does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["kills", "damage", "disks", "ranks"])
    arguments = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    forked_ranks.import_all()
    sound = True
    with tempfile.TemporaryDirectory(prefix="trine-faults-") as made:
        folder = Path(made)
        if arguments.only in (None, "kills") and arguments.kills:
            (folder / "kills").mkdir()
            sound = _kills(folder / "kills", arguments.kills, arguments.seed)
        for name, inject in (("damage", damage), ("disks", disks), ("ranks", ranks)):
            if arguments.only not in (None, name):
                continue
            print(name)
            for found in inject(folder):
                sound = sound and found.holds
                words = found.said.replace(f"{folder}/", "")
                print(
                    f"  {'found ' if found.holds else 'FAILED'} {found.fault}\n           {words}", flush=True
                )
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
