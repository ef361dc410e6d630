"""What stages of a pipeline must agree on although each has gradients of its own; importable by spawned processes."""

from __future__ import annotations

from typing import Any


def _engine(changes: dict[str, Any], frozen: bool = False, loss_fn: Any = None, **named: Any) -> Any:
    import torch
    from pipeline_models import loss_of_scores, made

    import trine

    model = made("sequential")
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(("0.", "2.")))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    config = trine.Config().with_changes({"parallel.pipeline": 2, "accumulation.steps": 2, **changes})
    return trine.optimize(model, optimizer, config, loss_fn=loss_fn or loss_of_scores, **named)


def overflowed(rank: int) -> list[bool]:
    """Whether each of two steps changed this stage; in the first one gradients overflow on the last stage alone."""
    import torch
    from pipeline_models import batch_of

    engine = _engine({"precision.loss_scale": 1024.0, "precision.dtype": "fp16"})
    changed = []
    for step in range(2):
        held = [p for p in engine.parameters().values() if p.requires_grad]
        before = [p.detach().clone() for p in held]
        hooks = [
            p.register_hook(lambda g: torch.full_like(g, float("inf")))
            for p in held
            if rank == 1 and step == 0
        ]
        engine.train_step(batch_of("sequential", step))
        for hook in hooks:
            hook.remove()
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, held, strict=True)))
    engine.close()
    return changed


def with_a_frozen_stage(rank: int, changes: dict[str, Any]) -> list[float]:
    """Losses where the first stage has nothing to train."""
    from pipeline_models import batch_of

    engine = _engine({**changes, "parallel.split": ["4"]}, frozen=True, clip_norm=0.1)
    losses = [float(engine.train_step(batch_of("sequential", step))) for step in range(3)]
    engine.close()
    return losses


def counting(model: Any, batch: Any) -> Any:
    """A mean that is 0/0 where no sample of a micro-batch counts."""
    from torch.nn import functional

    inputs, labels = batch
    mask = labels >= 0
    each = functional.cross_entropy(model(inputs), labels.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum(), mask.sum()


def empty_microbatch(rank: int, changes: dict[str, Any]) -> list[float]:
    """Losses where the first micro-batch of each step counts nothing."""
    from pipeline_models import SIZE, batch_of

    engine = _engine(changes, loss_fn=counting)
    losses = []
    for step in range(3):
        inputs, labels = batch_of("sequential", step)
        labels[: SIZE // 2] = -1
        losses.append(float(engine.train_step((inputs, labels))))
    engine.close()
    return losses


def empty_microbatch_plain() -> list[float]:
    """The same by the loop that people write, over all samples at once."""
    import torch
    from pipeline_models import SIZE, batch_of, made

    model = made("sequential")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        inputs, labels = batch_of("sequential", step)
        labels[: SIZE // 2] = -1
        loss, _ = counting(model, (inputs, labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
