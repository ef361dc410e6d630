"""Loss scaling, master weights and dtypes on ranks; importable by the ranks of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optim_cases


def overflow_on_one_rank(rank: int, changes: Mapping[str, Any]) -> Any:
    """Rank 1's third loss overflows fp16: (scale before, scale after, skipped, parameters alike, schedule)."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    def loss_fn(model: Any, batch: Any) -> Any:
        return loss_of(model, batch) * (1e30 if rank == 1 and engine.step_index == 2 else 1.0)

    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_fn, scheduler=scheduler
    )
    scales, taken, kept = [], [], []
    for batch in optim_cases.batches(5, 2, rank, 2):
        before = _sums(engine.model)
        engine.train_step(batch)
        kept.append(_sums(engine.model) == before)
        scales.append(engine._assembly.metrics["loss_scale"]())
        taken.append(scheduler.last_epoch)
    result = scales, taken, kept, engine._assembly.metrics["skipped_steps"](), _sums(engine.model)
    engine.close()
    return result


def _sums(model: Any) -> list[float]:
    import torch

    sums = []
    for parameter in model.parameters():
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        sums.append(float(value.double().mul(torch.arange(value.numel()).view_as(value) + 1.0).sum()))
    return sums


def masters_of(rank: int, changes: Mapping[str, Any], wrapped: bool) -> Any:
    """Train with master weights: dtypes, whether the model is the masters rounded, losses."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = optim_cases.small_gpt(seed=rank)  # ranks that were seeded apart start from rank 0's
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given: Any = model
    if wrapped:
        given = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        for batch in optim_cases.batches(2, 2, rank, 2):  # half trained: state is there
            loss_of(given, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    engine = trine.optimize(given, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    losses = [float(engine.train_step(batch)) for batch in optim_cases.batches(6, 2, rank, 2)]
    stored = {name: p.detach() for name, p in model.named_parameters()}
    rounded = all(
        torch.equal(_whole(master).to(stored[name].dtype), stored[name])
        for name, master in engine.parameters().items()
    )
    result = (
        sorted({str(p.dtype) for p in model.parameters()}),
        sorted({str(p.dtype) for p in engine.parameters().values()}),
        rounded,
        getattr(engine.model, "find_unused_parameters", None),
        losses,
        sum(_local(p).numel() for p in engine.parameters().values()),
        _sums(model),
    )
    engine.close()
    return result


def _whole(tensor: Any) -> Any:
    value = tensor.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
