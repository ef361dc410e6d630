"""A training loop that goes on from a step, evaluates and saves twice, and ends: what follows a killed one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from profiled_loops import Training


def main(path: Path, first: int) -> None:
    training = Training(batches=30)
    with training.profile(path) as prof:
        for number, ids in enumerate(training.loader, start=first):
            prof.begin_step(number)
            training.step(ids)
            time.sleep(0.01)
            prof.end_step()
            if number in (first + 10, first + 20):
                training.model.eval()
                with torch.no_grad():
                    training.loss(ids)
                training.model.train()
                torch.save(training.model.state_dict(), path / "checkpoint.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
