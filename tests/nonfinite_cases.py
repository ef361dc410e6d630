"""Models whose gradients or losses go wrong on demand; importable by the ranks of a pool."""

from __future__ import annotations

import math
from typing import Any

import optim_cases


def model_of(seed: int = 0) -> Any:
    """Two layers with biases, in float64: an embedding-free model whose batches are numbers."""
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def tokens(step: int, count: int, bad: float | None = None) -> Any:
    """Inputs (count, 4), targets (count,); ``bad`` (an infinity, NaN) is put among the inputs."""
    import torch

    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    if bad is not None:
        inputs[0, 0] = bad
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def masked(inputs: Any, targets: Any, valid: int) -> Any:
    """The batch with all targets but the first ``valid`` masked out."""
    targets = targets.clone()
    targets[valid:] = -100
    return inputs, targets


def ignoring_loss(model: Any, batch: Any) -> Any:
    """PyTorch's cross-entropy with ignored targets: NaN where all are, with gradients of zero."""
    from torch.nn import functional

    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets, ignore_index=-100), int((targets >= 0).sum())


def divided_loss(model: Any, batch: Any) -> Any:
    """A masked mean as people write it: 0/0 where nothing is valid, and its gradients are NaN."""
    inputs, targets = batch
    mask = (targets >= 0).double()
    each = -model(inputs).log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return (each * mask).sum() / mask.sum(), mask.sum()


LOSSES = {"ignoring": ignoring_loss, "divided": divided_loss}


def engine_of(model: Any, loss_fn: Any, changes: Any = None, **keys: Any) -> Any:
    import torch

    import trine

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trine.optimize(
        model, optimizer, trine.Config().with_changes(changes or {}), loss_fn=loss_fn, **keys
    )


def values(model: Any) -> list[list[float]]:
    """Parameters, whole."""
    found = []
    for parameter in model.parameters():
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.append(value.flatten().tolist())
    return found


# --- on ranks ----------------------------------------------------------------------------------


def bad_gradients(rank: int, changes: Any, nonfinite: str, guilty: int) -> Any:
    """Rank ``guilty`` has a NaN in its third batch: (losses, error, parameters before and after)."""
    from trine.record.errors import TrainingError

    engine = engine_of(model_of(), ignoring_loss, changes, nonfinite=nonfinite)
    losses, error = [], ""
    before = values(engine.model)
    for step in range(5):
        batch = tokens(10 * step + rank, 6, bad=math.nan if step == 2 and rank == guilty else None)
        if step == 2:
            before = values(engine.model)
        try:
            losses.append(float(engine.train_step(batch)))
        except TrainingError as raised:
            error = str(raised)
            break
        if step == 2:
            assert values(engine.model) == before
    result = losses, error, before, values(engine.model)
    engine.close()
    return result


def no_valid_token(rank: int, ranks: int, loss: str, changes: Any, nothing_on: list[int]) -> Any:
    """Ranks in ``nothing_on`` have no valid token in the second of three steps: losses and parameters."""
    from trine.record.errors import TrainingError

    engine = engine_of(model_of(), LOSSES[loss], changes)
    losses, error = [], ""
    for step in range(3):
        valid = 0 if step == 1 and rank in nothing_on else 4 + rank
        try:
            losses.append(float(engine.train_step(masked(*tokens(10 * step + rank, 6), valid))))
        except TrainingError as raised:
            error = str(raised)
            break
    result = losses, error, values(engine.model)
    engine.close()
    return result


def whole_losses(ranks: int, nothing_on: list[int]) -> Any:
    """The same three steps in one process, on the valid tokens of all ranks together."""
    import torch

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        parts = [
            masked(*tokens(10 * step + rank, 6), 0 if step == 1 and rank in nothing_on else 4 + rank)
            for rank in range(ranks)
        ]
        batch = torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])
        loss, _ = ignoring_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, values(model)


def storm(rank: int) -> str:
    """fp16 on a loss that no scale can save, on rank 1 alone: what each rank says."""
    import torch

    import trine
    from trine.record.errors import TrainingError
    from trine.samples.gpt import loss_of

    def loss_fn(model: Any, batch: Any) -> Any:
        return loss_of(model, batch) * (1e38 if rank == 1 else 1.0)

    model = optim_cases.small_gpt()
    engine = trine.optimize(
        model, torch.optim.AdamW(model.parameters()), {"precision": {"dtype": "fp16"}}, loss_fn=loss_fn
    )
    batch = optim_cases.batches(1, 1, rank, 2)[0]
    try:
        for _ in range(40):
            engine.train_step(batch)
    except TrainingError as raised:
        return str(raised)
    finally:
        engine.close()
    return ""
