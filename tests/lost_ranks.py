"""A training process that loses a peer, or is the peer that is lost. Started by itself: it is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any


def train(rank: int, ranks: int, store: str, how: str, changes: dict[str, Any]) -> None:
    """Rank 1 disappears in its fourth step, or is late beyond the group's timeout of 8 s, or is sound."""
    import optim_cases
    import torch

    import trine
    from trine.samples.gpt import loss_of

    torch.set_num_threads(1)
    timeout = timedelta(seconds=8 if how == "late" else 60)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout
    )
    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_or_not(given: Any, batch: Any) -> Any:
        if rank == 1 and engine.step_index == 3:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "late":
                time.sleep(26)  # longer than the timeout and the wait for signs after it
        return loss_of(given, batch)

    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_or_not)
    for batch in engine.steps(optim_cases.batches(8, 2, rank, ranks)):
        engine.train_step(batch)
    engine.close()
    torch.distributed.destroy_process_group()
    sys.stdout.write(f"rank {rank} trained {engine.step_index} steps\n")


if __name__ == "__main__":
    import json

    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], json.loads(sys.argv[5]))
