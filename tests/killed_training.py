"""A training loop to be killed: writes each finished step's number and time, and never ends by itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from profiled_loops import Training


def main(path: Path) -> None:
    training = Training(batches=50)
    with training.profile(path) as prof:
        number = 0
        while True:
            for ids in prof.steps(training.loader):
                if number:
                    sys.stdout.write(f"{number - 1} {time.time_ns()}\n")  # the step before is closed now
                    sys.stdout.flush()
                training.step(ids)
                time.sleep(0.01)
                number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
