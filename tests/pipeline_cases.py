"""What ranks do with a pipeline's models, for the tests; importable by spawned processes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pipeline_models import SIZE, batch_of, loss_for, loss_of_scores, made
from plain_loop import plain_losses
from refusals import refusal_of

STEPS = 4


def plain(name: str, outside: bool = False) -> list[float]:
    """Losses of the loop that people write."""
    import torch

    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = [batch_of(name, step) for step in range(STEPS)]
    return plain_losses(model, optimizer, batches, loss_for(name, outside))


def piped(
    rank: int, name: str, changes: Mapping[str, Any], outside: bool = False, example: bool = False
) -> Any:
    """Losses and effects of a pipeline over all ranks."""
    import torch

    import trine

    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = trine.Config().with_changes({"parallel.pipeline": torch.distributed.get_world_size(), **changes})
    shown = batch_of(name, 100) if example else None
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_for(name, outside), example=shown)
    losses = [float(engine.train_step(batch_of(name, step))) for step in range(STEPS)]
    said = [str(effect) for effect in engine.effects]
    engine.close()
    return losses, said


def refused(rank: int, name: str, example: bool, changes: Mapping[str, Any] | None = None) -> str:
    return refusal_of(lambda: piped(rank, name, changes or {}, example=example))


def again(rank: int, name: str) -> str:
    """What is said of a model that a pipeline has cut, and that is given to ``trine.optimize`` once more."""
    import torch

    import trine

    model = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = trine.Config().with_changes({"parallel.pipeline": 2, "parallel.microbatches": 2})
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_for(name))
    return refusal_of(
        lambda: trine.optimize(model, optimizer, config, loss_fn=loss_for(name)), closing=engine
    )


def failing(rank: int, ranks: int, name: str) -> str:
    """What the first step says, of a model that cannot be cut so."""
    return refusal_of(lambda: piped(rank, name, {}))


def statistics(rank: int, chunks: int) -> list[float]:
    """Running means of the batch norms of two replicas of a pipeline, which see different batches, in an evaluation."""
    import torch
    from torch import nn

    import trine

    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = {"parallel.pipeline": 2, "parallel.data": 2, "parallel.chunks": chunks, "parallel.microbatches": 2}
    if chunks > 1:
        keys["parallel.schedule"] = "interleaved"  # type: ignore[assignment]
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(keys), loss_fn=loss_of_scores)
    try:
        batch = torch.randn(SIZE, 12), torch.randint(0, 12, (SIZE,))
        torch.manual_seed(engine.data_rank)
        engine.train_step((torch.randn(SIZE, 12), torch.randint(0, 12, (SIZE,))))
        engine.evaluate(batch)
        means = [b for name, b in engine.model.named_buffers() if name.endswith("running_mean")]
        return [float(value) for mean in means for value in mean]
    finally:
        engine.close()


def evaluated(rank: int, schedule: str) -> Any:
    """(mean loss by the pipeline, by the whole model, modes of the first own block's dropout)."""
    import torch
    from optim_cases import batches, small_gpt

    import trine
    from trine.samples.gpt import Block, loss_of

    model = small_gpt(layers=4, dropout=0.5).double()
    batch = batches(1, 8)[0]
    with torch.no_grad():
        model.eval()
        whole = float(loss_of(model, batch))
        model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = trine.Config().with_changes({"parallel.pipeline": 2, "parallel.schedule": schedule})
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    engine.train_step(batch)
    mine = float(engine.evaluate(batch))
    block = next(module for module in engine.model.modules() if isinstance(module, Block))
    modes = [block.training]
    for switched, mode in ((model, False), (model, True), (engine.model, False)):
        switched.train(mode)
        engine.evaluate(batch)
        modes.append(block.training)
    engine.close()
    return mine, whole, modes


def kept(rank: int) -> dict[str, Any]:
    """Names and bytes that a rank of two has left."""
    import torch
    from optim_cases import batches, small_gpt

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt(layers=4, hidden=64)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    names = {name for name, _ in model.named_parameters()}
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}])
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes({"parallel.pipeline": 2}), loss_fn=loss_of
    )
    engine.train_step(batches(1, 8)[0])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    by_id = {id(p): name for name, p in engine.parameters().items()}
    try:
        model(batches(1, 2)[0][0])
        called = ""
    except trine.TrineError as error:
        called = str(error)
    found = {
        "all": names,
        "names": set(engine.parameters()),
        "held": {by_id[each] for each in held},
        "duplicates": set(engine._assembly.duplicates),
        "whole_bytes": whole,
        "bytes": sum(
            {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
            }.values()
        ),
        "groups": len(optimizer.param_groups),
        "called": called,
    }
    engine.close()
    return found


def held(rank: int, schedule: str, microbatches: int) -> int:
    """The most micro-batches whose activations a stage held at once, counted on what autograd saves."""
    import torch
    from torch import nn

    import trine

    alive: set[int] = set()
    most = 0

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            nonlocal most
            out = self.inner(x).exp()  # exp saves its result, which lives until backward has passed
            node = out.grad_fn
            if node is not None:
                key = id(node)
                alive.add(key)
                node.register_hook(partial(lambda key, *_: alive.discard(key), key))
                most = max(most, len(alive))
            return out * 0.1

    torch.manual_seed(0)
    ranks = torch.distributed.get_world_size()
    model = nn.Sequential(*(Block() for _ in range(ranks)))
    config = trine.Config().with_changes(
        {"parallel.pipeline": ranks, "parallel.schedule": schedule, "parallel.microbatches": microbatches}
    )
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        config,
        loss_fn=lambda given, batch: given(batch).square().mean(),
    )
    batch = torch.randn(microbatches, 4, generator=torch.Generator().manual_seed(1))
    engine.train_step(batch)
    engine.train_step(batch)
    engine.close()
    return most


def shapes(rank: int) -> Any:
    """Losses of batches whose width changes from step to step and comes again, by the pipeline and whole."""
    import torch
    from optim_cases import batches, small_gpt

    import trine
    from trine.samples.gpt import loss_of

    data = [
        batches(1, size, sequence=width)[0] for size, width in ((8, 16), (4, 24), (8, 16), (8, 9), (4, 24))
    ]

    def run(piping: bool) -> list[float]:
        model = small_gpt(layers=4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not piping:
            losses = []
            for batch in data:
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses
        config = trine.Config().with_changes({"parallel.pipeline": 2, "parallel.schedule": "zbv"})
        engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
        losses = [float(engine.train_step(batch)) for batch in data]
        engine.close()
        return losses

    return run(True), run(False)


def ended(rank: int, seconds: float) -> Any:
    """Of two steps over stages that sleep: when this rank began, when its own work ended and what of it was work, when it
    took the step for ended (ns of a clock that all processes share), and its bubble."""
    import bubbles
    import torch

    import trine

    ranks = torch.distributed.get_world_size()
    model = bubbles._sleeping_model(ranks, seconds)
    changes = {"parallel.pipeline": ranks, "parallel.microbatches": 8, "parallel.schedule": "1f1b"}
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        trine.Config().with_changes(changes),
        loss_fn=bubbles._loss,
    )
    runner: Any = engine._assembly.pipeline
    found = []
    for _ in range(2):
        engine.train_step(torch.ones(8, 4))
        busy = sum(end - begin for *_, begin, end in runner.worked)
        own = max(end for *_, end in runner.worked)
        found.append((runner._began, own, busy, runner._ended, runner.bubble()))
    engine.close()
    return found


def recorded(rank: int, folder: str) -> Any:
    """Records a run; the engine's own metrics of its last step."""
    import torch
    from optim_cases import batches, small_gpt

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt(layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    config = trine.Config().with_changes({"parallel.pipeline": 2, "parallel.microbatches": 4})
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    with trine.profile(folder, model=engine.model, optimizer=engine.optimizer, windows=None):
        for batch in engine.steps(batches(6, 8)):
            engine.train_step(batch)
    metrics = engine._assembly.metrics
    found = metrics["pipeline/bubble"](), metrics["pipeline/ideal_bubble"]()
    engine.close()
    return found
