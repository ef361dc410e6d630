"""A small real training run of two gloo ranks, healthy or with one fault, recorded by ``trine.profile``.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python faulty_training.py RECORD healthy|straggler|loader

A fault is given as a share of the steps just before, its own pauses taken off, so that the same fault is
injected on a fast, a slow and a busy machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import trine

STEPS = 36
#: Steps by which the machine's own step time is known and the fault sets in; as many give it from then on.
MEASURED = 5
BATCH = 256
WIDTH = 512
#: Of a healthy step.
STRAGGLER_SHARE = 0.5
LOADER_SHARE = 0.6


class Pause:
    """Sleeps for a share of the steps just before."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.steps: list[float] = []
        self.slept = 0.0

    def __call__(self) -> None:
        if self.share and len(self.steps) >= MEASURED:
            seconds = self.share * statistics.median(self.steps[-MEASURED:])
            time.sleep(seconds)
            self.slept += seconds

    def saw(self, seconds: float) -> None:
        """A step took this long, pauses included."""
        self.steps.append(max(seconds - self.slept, 0.0))
        self.slept = 0.0


class Samples(Dataset[torch.Tensor]):
    """Batches as they come from a slow disk: the pause is made once a batch."""

    def __init__(self, pause: Pause) -> None:
        self.pause = pause
        self.values = torch.randn(BATCH, WIDTH)

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % BATCH == 0:
            self.pause()
        return self.values[index % BATCH]


def main(record: str, fault: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    in_loop = Pause(STRAGGLER_SHARE if fault == "straggler" and dist.get_rank() == 1 else 0.0)
    in_loader = Pause(LOADER_SHARE if fault == "loader" else 0.0)
    loader = DataLoader(Samples(in_loader), batch_size=BATCH, num_workers=0)
    with trine.profile(record, model=model, optimizer=optimizer) as profile:
        begun = time.perf_counter()
        for batch in profile.steps(loader):
            in_loop()
            loss = torch.nn.functional.mse_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for pause in (in_loop, in_loader):
                pause.saw(time.perf_counter() - begun)
            begun = time.perf_counter()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
