"""Two real processes with a gloo process group that stay alive across tests; cases are functions of a module."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

__all__ = ["RankPool"]

SECONDS = 120.0


class RankPool:
    """``run("module:function", *arguments)`` calls ``function(rank, *arguments)`` on every rank at once."""

    def __init__(self, folder: Path, world_size: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, str(folder / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def run(self, case: str, *arguments: Any) -> list[Any]:
        """Results by rank. Raises ``AssertionError`` with the traceback of the first rank that failed."""
        for pipe in self._pipes:
            pipe.send((case, arguments))
        return self._answers()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
                raise AssertionError(f"rank {rank} did not answer in {SECONDS:.0f} s")
            answers.append(pipe.recv())
        for rank, (failure, _) in enumerate(answers):
            assert failure is None, f"rank {rank}: {failure}"
        return [result for _, result in answers]


def _serve(rank: int, world_size: int, store: str, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    pipe.send((None, None))
    while True:
        request = pipe.recv()
        if request is None:
            break
        case, arguments = request
        module, _, function = case.partition(":")
        try:
            pipe.send((None, getattr(importlib.import_module(module), function)(rank, *arguments)))
        except BaseException:  # noqa: BLE001 - told to the test
            pipe.send((traceback.format_exc(), None))
    torch.distributed.destroy_process_group()
