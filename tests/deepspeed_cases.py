"""What the tests of DeepSpeed run on ranks of their own: importable by spawned processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optim_cases
from refusals import refusal_of


def engine_of(changes: dict[str, Any], scheduled: bool = False, **settings: Any) -> Any:
    """A small GPT under ``engine = "deepspeed"``; the engine and its model."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = settings.pop("model", None) or optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if scheduled:
        settings["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    settings.setdefault("loss_fn", loss_of)
    config = trine.Config().with_changes({"engine": "deepspeed", **changes})
    return trine.optimize(model, optimizer, config, **settings), model


def losses(engine: Any, rank: int, ranks: int, first: int, last: int) -> list[float]:
    data = optim_cases.batches(last, 4, rank, ranks)[first:]
    return [float(engine.train_step(batch)) for batch in engine.steps(data)]


def resumed(rank: int, changes: dict[str, Any], folder: str, ranks: int) -> dict[str, Any]:
    """Losses of steps 4 to 8: of a run that went through, and of one that was saved after 4 and loaded by another engine."""
    engine, _ = engine_of(changes, scheduled=True)
    losses(engine, rank, ranks, 0, 4)
    path = engine.save(Path(folder) / "saved")
    through = losses(engine, rank, ranks, 4, 8)
    engine.load(path)
    again = losses(engine, rank, ranks, 4, 8)
    engine.close()
    engine, _ = engine_of(changes, scheduled=True)
    step = engine.load(path)
    resumed = losses(engine, rank, ranks, 4, 8)
    engine.close()
    return {
        "through": through,
        "again": again,
        "resumed": resumed,
        "step": step,
        "files": sorted(p.name for p in Path(path).iterdir()),
    }


def trained(
    rank: int, changes: dict[str, Any], ranks: int, steps: int = 4, **settings: Any
) -> dict[str, Any]:
    """Losses by DeepSpeed and by Trine's own engine, the same settings."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    engine, _ = engine_of(changes, scheduled=True, **settings)
    found = losses(engine, rank, ranks, 0, steps)
    effects = [str(effect) for effect in engine.effects]
    engine.close()
    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    plain = trine.optimize(model, optimizer, loss_fn=loss_of, scheduler=scheduler, **settings)
    expected = losses(plain, rank, ranks, 0, steps)
    plain.close()
    return {"found": found, "expected": expected, "effects": effects}


def clipped(rank: int, changes: dict[str, Any], ranks: int, clip_norm: float | None) -> dict[str, Any]:
    return trained(rank, changes, ranks, clip_norm=clip_norm)


def own_loop(rank: int, changes: dict[str, Any], ranks: int) -> dict[str, Any]:
    """A loop with a body of its own in two micro-batches, with token counts, against ``train_step``."""
    from torch.nn import functional

    from trine.record.events import listen

    heard: list[tuple[str, Any]] = []
    engine, model = engine_of({"accumulation.steps": 2, **changes}, loss_fn=None)
    undo = listen(lambda kind, values: heard.append((kind, values.get("name"))))
    halves = [
        half
        for ids, targets in optim_cases.batches(2, 4, rank, ranks)
        for half in zip(ids.chunk(2), targets.chunk(2), strict=True)
    ]
    for position, (ids, targets) in enumerate(engine.steps(halves)):
        logits = engine(ids)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        engine.backward(loss, count=targets.numel())
        stepped = engine.step()
        assert stepped == (position % 2 == 1)
    undo()
    sums = whole_sums(model)
    engine.close()
    engine, model = engine_of({"accumulation.steps": 2, **changes})
    losses(engine, rank, ranks, 0, 2)
    expected = whole_sums(model)
    engine.close()
    return {
        "sums": sums,
        "expected": expected,
        "heard": [kind for kind, _ in heard],
        "phases": [name for kind, name in heard if kind == "phase"],
    }


def whole_sums(model: Any) -> list[float]:
    """Of every parameter, gathered where ZeRO has cut it."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = list(model.parameters())
    with GatheredParameters(parameters):
        return [float(parameter.detach().double().abs().sum()) for parameter in parameters]


def poisoned(rank: int, changes: dict[str, Any], ranks: int, nonfinite: str) -> dict[str, Any]:
    """The second step's loss is infinite on rank 1: what every rank says, and whether parameters stayed."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    bad = False

    def loss_fn(model: Any, batch: Any) -> Any:
        loss = loss_of(model, batch)
        return loss * torch.inf if bad and rank == 1 else loss

    engine, model = engine_of(changes, loss_fn=loss_fn, nonfinite=nonfinite)
    data = optim_cases.batches(4, 4, rank, ranks)
    engine.train_step(data[0])
    before = whole_sums(model)
    bad, said = True, ""
    try:
        engine.train_step(data[1])
    except trine.TrineError as error:
        said = f"{type(error).__name__}: {error}"
    kept = whole_sums(model) == before
    bad, after = False, ""
    try:
        engine.train_step(data[2])
    except trine.TrineError as error:
        after = str(error)
    moved = whole_sums(model) != before
    skipped = engine._update.skipped
    engine.close()
    return {"said": said, "kept": kept, "after": after, "moved": moved, "skipped": skipped}


def refused(rank: int, changes: dict[str, Any], ranks: int, how: str = "") -> str:
    """Our refusal, with the model as it was."""
    import torch

    import trine

    model = optim_cases.small_gpt()
    if how == "double":
        model = model.double()
    if how == "wrapped":
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if how == "trained":
        model(optim_cases.batches(1, 2)[0][0]).sum().backward()
        optimizer.step()
    before = [parameter.clone() for parameter in model.parameters()]
    config = trine.Config().with_changes({"engine": "deepspeed", **changes})
    said = refusal_of(lambda: trine.optimize(model, optimizer, config))
    if said != "not refused":
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return said


def damaged(rank: int, changes: dict[str, Any], folder: str, ranks: int) -> dict[str, str]:
    """What loading says of a flipped byte, of another stage, and of Trine's own engine."""
    import torch

    import trine

    place = Path(folder)
    engine, _ = engine_of(changes)
    losses(engine, rank, ranks, 0, 2)
    path = Path(engine.save(place / "run", keep=2))
    losses(engine, rank, ranks, 2, 3)
    newest = Path(engine.save(place / "run", keep=2))
    engine.close()
    said: dict[str, str] = {}

    def attempt(name: str, engine: Any, folder: Path, **how: Any) -> None:
        try:
            said[name] = str(engine.load(folder, **how))
        except trine.TrineError as error:
            said[name] = f"{type(error).__name__}: {error}"
        finally:
            engine.close()

    attempt("healthy", engine_of(changes)[0], newest)
    attempt("another stage", engine_of({**changes, "zero.stage": 1})[0], newest)
    model = optim_cases.small_gpt()
    attempt("torch", trine.optimize(model, torch.optim.AdamW(model.parameters())), newest)
    if rank == 0:
        victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(bytes(data))
        said["victim"] = victim.name
    torch.distributed.barrier()
    attempt("flipped", engine_of(changes)[0], newest)
    attempt("the one before", engine_of(changes)[0], place / "run", newest=True)
    said["names"] = f"{path.name} {newest.name}"
    return said


def flushed(rank: int, engine: str, folder: str, ranks: int) -> dict[str, Any]:
    """File numbers that this rank flushed to the disk in a save, in turn, and those of the checkpoint's files by name."""
    import os

    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    running = trine.optimize(model, optimizer, {"engine": engine, "zero": {"stage": 2}}, loss_fn=loss_of)
    losses(running, rank, ranks, 0, 1)
    numbers: list[int] = []
    real = os.fsync

    def fsync(file: int) -> None:
        numbers.append(os.fstat(file).st_ino)
        real(file)

    os.fsync = fsync
    try:
        path = running.save(Path(folder) / "run")
    finally:
        os.fsync = real
        running.close()
    files = {str(each.relative_to(path)): each.stat().st_ino for each in path.rglob("*")}
    return {"numbers": numbers, "files": files}


def left_behind(rank: int, changes: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Process-wide state before an engine, while it lives, and after it was closed."""
    import logging
    import os
    import warnings

    from torch import distributed, nn

    def now() -> dict[str, Any]:
        return {
            "linear": nn.functional.linear.__module__,
            "rank": os.environ.get("LOCAL_RANK"),
            "level": logging.getLogger("DeepSpeed").level,
            "filters": len(warnings.filters),
            "group": distributed.is_initialized(),
        }

    before = now()
    engine, _ = engine_of(changes)
    losses(engine, rank, ranks, 0, 1)
    during = now()
    engine.close()
    return {"before": before, "during": during, "after": now()}
