"""What ``test_replicas_on_a_gpu.py`` runs on one process a CUDA device."""

from __future__ import annotations

import os
from typing import Any

import spawned_ranks

__all__ = ["losses_on_devices"]


def losses_on_devices(ranks: int, configurations: list[dict[str, Any]], seconds: float = 240) -> list[Any]:
    """By rank, for each configuration: losses, effects, and a checksum of the parameters."""
    workers, results = spawned_ranks.start(ranks, _train, configurations)
    try:
        found = dict(results.get(timeout=seconds) for _ in range(ranks))
    finally:
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
    return [found[rank] for rank in range(ranks)]


def _train(rank: int, ranks: int, port: int, results: Any, configurations: list[dict[str, Any]]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import optim_cases
    import torch
    from torch import distributed

    import trine
    from trine.samples.gpt import loss_of

    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=ranks)
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
    results.put((rank, found))
    distributed.barrier()
    distributed.destroy_process_group()
