"""Ranks that are forked from a process that has imported everything: they start in a moment, and may be killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["await_end", "end_all", "has_ended", "import_all", "outcomes", "reap", "start"]

#: Seconds that anything may take.
LIMIT_S = 60.0


def import_all() -> None:
    """Everything that ranks need, before they are forked: it takes longer than what they do.

    No thread of PyTorch's may start here, or a fork could not run backward.
    """
    import torch

    torch.set_num_threads(1)
    import trine
    from trine.optim.runtime import checkpoints

    assert checkpoints
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # imports the compiler
    trine.optimize(model, optimizer).close()
    import torch.distributed.fsdp
    import torch.distributed.tensor


def start(place: Path, ranks: int, act: Callable[[int], None]) -> list[int]:
    """Fork them, each in a gloo group; their processes. What they print goes to ``rank-….log``."""
    store = place / "store"
    store.unlink(missing_ok=True)
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with (place / f"rank-{rank}.log").open("w", encoding="utf-8") as log:
                    os.dup2(log.fileno(), 1)
                    os.dup2(log.fileno(), 2)
                    _join(rank, ranks, store)
                    act(rank)
                    code = 0
            except BaseException as error:  # noqa: BLE001 - a forked child must end here, whatever happens
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def _join(rank: int, ranks: int, store: Path) -> None:
    from datetime import timedelta

    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT_S / 2),
    )


def outcomes(place: Path, ranks: int, act: Callable[[int], Any], limit_s: float = LIMIT_S) -> list[Any]:
    """What ``act(rank)`` returns on each; of a rank that raised or was killed, a string that begins with ``ended``."""
    place.mkdir(parents=True, exist_ok=True)

    def told(rank: int) -> None:
        result = act(rank)
        (place / f"outcome-{rank}.json").write_text(json.dumps(result))

    for rank in range(ranks):
        (place / f"outcome-{rank}.json").unlink(missing_ok=True)
    pids = start(place, ranks, told)
    hung = await_end(pids, limit_s)
    codes = [] if hung else reap(pids)
    found: list[Any] = []
    for rank in range(ranks):
        path = place / f"outcome-{rank}.json"
        if path.exists():
            found.append(json.loads(path.read_text()))
        else:
            lines = (place / f"rank-{rank}.log").read_text().splitlines()
            found.append(f"ended {hung or codes[rank]}: {lines[-1] if lines else 'nothing said'}")
    return found


def has_ended(pid: int) -> bool:
    """Whether it runs no more; it is still to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def await_end(pids: list[int], limit_s: float = LIMIT_S) -> str:
    """Wait for all; where some are there after ``limit_s``, end all and say so."""
    until = time.monotonic() + limit_s
    while not all(has_ended(pid) for pid in pids):
        if time.monotonic() > until:
            end_all(pids)
            return f"ranks were still there after {limit_s:.0f} s"
        time.sleep(0.005)
    return ""


def end_all(pids: list[int]) -> None:
    """Kill and reap them."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    reap(pids)


def reap(pids: list[int]) -> list[int]:
    """Their exit codes; a signal's is negative."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
