"""One training on any number of gloo ranks, recorded: each rank brings its own batch."""

from __future__ import annotations

import trine

BATCH, STEPS = 16, 12


def record(rank: int, folder: str, ranks: int) -> int | None:
    """Train on the first ``ranks`` processes and record into ``folder``; the samples that this rank took in a step.

    The processes stay alive, since importing torch takes longer than the training: each call makes a new world.
    """
    if rank >= ranks:
        return None
    import torch

    torch.distributed.destroy_process_group()
    store = f"file://{folder}.store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 64))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(BATCH, 256) for _ in range(STEPS)]
    with trine.profile(folder, model=model, optimizer=optimizer, windows=None) as prof:
        for batch in prof.steps(batches):
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return BATCH
