"""What ``test_replicas_on_a_gpu.py`` runs on one process a CUDA device."""

from __future__ import annotations

from typing import Any

import started_ranks

__all__ = ["losses_on_devices"]


def losses_on_devices(ranks: int, configurations: list[dict[str, Any]], seconds: float = 240) -> list[Any]:
    """By rank, for each configuration: losses, effects, and a checksum of the parameters."""
    return started_ranks.on_ranks(ranks, _train, ranks, configurations, backend="nccl", timeout_s=seconds)


def _train(rank: int, ranks: int, configurations: list[dict[str, Any]]) -> list[Any]:
    import optim_cases
    import torch

    import trine
    from trine.samples.gpt import loss_of

    found = []
    for changes in configurations:
        model = optim_cases.small_gpt().double().cuda()
        engine = trine.optimize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            trine.Config().with_changes(changes),
            loss_fn=loss_of,
        )
        data = optim_cases.batches(8, 4, rank, ranks)
        losses = [float(engine.train_step(batch)) for batch in engine.steps(data)]
        checksum = sum(float(p.detach().sum()) for p in model.parameters())
        found.append((losses, [str(effect) for effect in engine.effects], checksum))
        engine.close()
    return found
