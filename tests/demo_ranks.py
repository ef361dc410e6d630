"""What launched ranks do in the tests of the launcher: ``python -m demo_ranks WHAT FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what in ("sleep", "stubborn"):
        time.sleep(300)
    elif what == "fail" and rank == 1:
        raise ValueError("the second rank has no luck")
    elif what == "fail":
        time.sleep(60)


if __name__ == "__main__":
    main()
