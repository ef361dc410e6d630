"""A stage of a pipeline whose neighbour is killed or fails, or is the one that does. Started by itself: it is killed."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def train(rank: int, ranks: int, store: str, how: str) -> None:
    """Rank 2 disappears, or fails, in its third step; or is sound."""
    import optim_cases
    import torch

    import trine
    from trine.samples.gpt import loss_of

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = optim_cases.small_gpt(layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_or_not(given: Any, batch: Any) -> Any:
        if rank == 2 and engine.step_index == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise ValueError("the data of this stage are gone")
        return loss_of(given, batch)

    config = trine.Config().with_changes({"parallel.pipeline": ranks, "parallel.microbatches": 4})
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_or_not)
    for batch in engine.steps(optim_cases.batches(5, 4)):
        engine.train_step(batch)
    engine.close()
    torch.distributed.destroy_process_group()
    sys.stdout.write(f"rank {rank} trained {engine.step_index} steps\n")


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
