"""Two-rank trainings under torchrun for the profiler's tests: each case plain, then profiled.

Argument: a folder, which gets a record a case and each rank's losses.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from profiled_loops import LENGTH, VOCABULARY, TinyModel
from torch.distributed.fsdp import fully_shard

import trine


class Case:
    """One case: model, optimizer, batches, and a loop that takes any loader."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank = torch.distributed.get_rank()
        torch.manual_seed(0)
        model: Any = TinyModel()
        if name == "fsdp":
            mesh = torch.distributed.init_device_mesh("cpu", (2,))
            fully_shard(model.layers, mesh=mesh)
            model = fully_shard(model, mesh=mesh)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(self.rank)
        self.batches = [torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(12)]

    def loop(self, loader: Any, log: Any) -> list[str]:
        """Train; the losses, exactly."""
        every = 2 if self.name == "accumulate" else 1
        losses = []
        for number, ids in enumerate(loader):
            wait = (number + 1) % every != 0
            with self.model.no_sync() if wait else contextlib.nullcontext():
                loss = torch.nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
                loss.backward()
            if not wait:
                self.optimizer.step()
                self.optimizer.zero_grad()
            log(loss=loss)
            losses.append(loss.item().hex())
            if self.name == "slow" and self.rank == 0:
                time.sleep(0.03)
        return losses


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    losses = {}
    for name in ("slow", "accumulate", "fsdp"):
        case = Case(name)
        plain = case.loop(case.batches, lambda **_: None)
        case = Case(name)
        with trine.profile(folder / name, model=case.model, optimizer=case.optimizer, windows=None) as prof:
            profiled = case.loop(prof.steps(case.batches), prof.log)
            if name == "fsdp":
                torch.distributed.barrier()
                torch.distributed.destroy_process_group()  # before the record is closed
        losses[name] = [plain, profiled]
    (folder / f"losses-{rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
